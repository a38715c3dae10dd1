"""Text while it comes: nothing is shown that a later token changes, and stop texts end it."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from tokenizers import decoders

from tests.runtime.recorded import CHECKPOINT, recorded, with_generation
from tests.runtime.test_special_tokens import metaspace, written
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError
from vlexport.runtime.tokenizer import CheckpointTokenizer, Detokenizer

TOKENIZER = CheckpointTokenizer(Checkpoint.open(CHECKPOINT))


def words(ids, stop=()):
    """The pieces shown, and the text at the end."""
    wording = Detokenizer(TOKENIZER, stop)
    shown = []
    for token_id in ids:
        shown.append(wording.push(token_id))
        if wording.stopped:
            break
    shown.append(wording.finish())
    return shown, wording


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special=False).ids)


@settings(deadline=None)
@given(some.lists(some.integers(0, 619), max_size=40))
def test_pieces_add_up_to_the_whole_text_whatever_the_tokens(ids):
    shown, wording = words(ids)
    assert "".join(shown) == wording.text == TOKENIZER.decode(ids)


def test_bytes_that_are_no_text_do_not_end_an_answer(tmp_path):
    """Of a tokenizer that falls back to bytes, as those of Llama do."""
    made = metaspace("always")
    spaces = decoders.Replace("▁", " ")
    made.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = written(tmp_path, made, normalized=False)
    wording, random_number = Detokenizer(tokenizer, ()), random.Random(0)
    for each in (random_number.randrange(350) for _ in range(400)):
        wording.push(each)
    wording.finish()
    assert len(wording.text) > 200


def test_a_character_is_shown_once_all_its_bytes_are_there():
    ids = ids_of("a€b")
    assert len(ids) > 3
    shown, _ = words(ids)
    assert [piece for piece in shown if piece] == ["a", "€", "b"]


@settings(deadline=None)
@given(some.text("abc", max_size=30), some.lists(some.text("abc", min_size=1, max_size=4), max_size=3))
def test_a_stop_text_ends_the_answer_before_its_first_appearance(text, stop):
    ids = [each for letter in text for each in ids_of(letter)]
    shown, wording = words(ids, tuple(stop))
    # Tokens are letters: the text ends with the first letter that completes a stop text.
    ends = [at for at in range(len(text) + 1) if any(text[:at].endswith(each) for each in stop)]
    upto = text[: ends[0]] if ends else text
    first = min((upto.find(each) for each in stop if each in upto), default=len(upto))
    assert "".join(shown) == wording.text == upto[:first]
    assert wording.stopped == bool(ends)


def test_what_may_become_a_stop_text_is_held_back():
    wording = Detokenizer(TOKENIZER, ("stop",))
    shown = [wording.push(each) for letter in "a stomp" for each in ids_of(letter)]
    assert shown == ["a", " ", "", "", "", "stom", "p"]


def test_a_stream_gives_the_tokens_and_the_text_of_the_whole_answer(answering):
    request = recorded("image_then_video").request
    whole = answering.generate(request)
    stream = answering.stream(request)
    with pytest.raises(InputError, match="the stream has more pieces"):
        stream.require_answer()
    pieces = list(stream)
    assert [piece.token_id for piece in pieces if piece.token_id is not None] == list(whole.token_ids)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert stream.require_answer().token_ids == whole.token_ids
    assert list(stream) == []
    assert stream.require_answer().text == whole.text


def test_a_callback_gets_every_token_with_its_request(answering):
    names = ["text_only", "two_images"]
    received: list[list[int]] = [[], []]

    def receive(number, piece):
        received[number] += [] if piece.token_id is None else [piece.token_id]

    answering.generate_all([recorded(name).request for name in names], receive)
    assert received == [recorded(name).case["token_ids"] for name in names]


def test_a_stop_token_ends_the_answer_and_is_its_last_token(answering):
    one = recorded("text_only")
    stop = one.case["token_ids"][4]
    answer = answering.generate(with_generation(one.request, stop_token_ids=(stop,)))
    first = one.case["token_ids"].index(stop)
    assert list(answer.token_ids) == one.case["token_ids"][: first + 1]
    assert answer.finish == "end"


def test_a_stop_text_cuts_text_and_is_reported(answering):
    request = recorded("text_only").request
    whole = answering.generate(request)
    stop = whole.text.strip()[3:5]
    answer = answering.generate(with_generation(request, stop=(stop,)))
    assert answer.finish == "stop"
    assert answer.text == whole.text[: whole.text.index(stop)]
    assert list(answer.token_ids) == list(whole.token_ids)[: len(answer.token_ids)]
