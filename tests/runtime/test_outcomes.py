"""Whatever one request brings or meets is its own outcome, of a class with an exit code."""

from __future__ import annotations

import gc
import io
import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from vlexport.errors import InputError, InternalError, LimitError, MediaError, ResourceError, VlexportError
from vlexport.media import MediaLimits
from vlexport.runtime import encoder as encoder_module
from vlexport.runtime.decoder import DecoderOptions
from vlexport.runtime.encoder import Encoder, EncoderOptions, EngineSession
from vlexport.runtime.generate import AnswerGenerator, RuntimeOptions
from vlexport.runtime.outputs import Answer
from vlexport.runtime.pipeline import Pipeline
from vlexport.runtime.request import Generation, Request, RequestLimits
from vlexport.specs import Pixels


@pytest.fixture
def pipeline(fresh):
    return fresh()


SHORT = Generation(max_new_tokens=2)
LONE = "caf\udce9"
# None of these is of the type of any field that is not a text, a list or free.
WRONG = [object(), b"2", 1j, math.nan, math.inf, [object()], {"a": 1}]


def good(number: int) -> Request:
    if number % 2:
        return Request(raw_prompt=prompt(IMAGE, str(number)), images=[image(number)], generation=SHORT)
    film = video(number, frames=4)
    return Request(raw_prompt=prompt(VIDEO, str(number)), videos=[film], prune=0.5, generation=SHORT)


def cycle() -> list[Any]:
    found: list[Any] = [{"role": "user", "content": "a"}]
    found[0]["again"] = found
    return found


def shared() -> list[Any]:
    """Lists of 2**60 texts, which take no memory."""
    found: list[Any] = ["a"]
    for _ in range(60):
        found = [found, found]
    return found


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "surrogate in prompt": ({"prompt": LONE}, "prompt: a lone surrogate .* at character 3"),
    "surrogate in raw_prompt": ({"raw_prompt": LONE}, "raw_prompt: a lone surrogate"),
    "surrogate in a message": ({"messages": [{"role": "user", "content": LONE}]}, "messages: a lone surr"),
    "surrogate in a role": ({"messages": [{"role": LONE, "content": "x"}]}, "messages: a lone surrogate"),
    "surrogate in a part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": LONE}]}]}, "messages: a lone"
    ),
    "empty raw_prompt": ({"raw_prompt": ""}, "raw_prompt: '' given, a text that is not empty"),
    "no messages": ({"messages": []}, "messages: .* at least one message"),
    "messages that contain themselves": ({"messages": cycle()}, "may contain itself"),
    "messages without end": (
        {"messages": [{"role": "u", "content": "a", "x": shared()}]}, "more than 1000000"
    ),
    "fps in words": ({"prompt": "a", "fps": "2"}, r"fps: '2' \(str\) given, a finite number or None"),
    "fps of nothing": ({"prompt": "a", "fps": 0}, "frames per second: 0 given"),
    "fps subnormal": ({"prompt": "a", "fps": 1e-320}, "frames per second: 1e-320 given"),
    "prune in words": ({"prompt": "a", "prune": "0.5"}, r"prune: '0\.5' \(str\) given"),
    "prune in truth": ({"prompt": "a", "prune": True}, r"prune: True \(bool\) given"),
    "a text for messages": ({"messages": "hello"}, r"messages: 'hello' \(str\) given, a list or None"),
}  # fmt: skip


@pytest.mark.seconds
def test_a_value_that_no_request_can_have_is_refused_where_it_is_made(subtests):
    for name, (given, message) in REFUSED.items():
        with subtests.test(name), pytest.raises(InputError, match=message):
            Request(**given)


NO_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 1e-320}, "temperature: 1e-320 given, 0, or 2.2e-308 or more"),
    ({"temperature": -1e-320}, "temperature"),
    ({"temperature": -1.0}, "temperature: .* expected"),
    ({"temperature": math.nan}, "temperature: .* expected"),
    ({"top_p": 0.0}, "top_p: .* expected"),
    ({"top_p": 1.5}, "top_p: .* expected"),
    ({"top_k": -1}, "top_k: .* expected"),
    ({"seed": -1}, "seed: .* expected"),
    ({"stop": ("",)}, "stop: .* expected"),
    ({"stop": ("a" * 1025,)}, "stop: 1 texts of up to 1025 characters given, at most 64 of 1024"),
    ({"stop": ("a",) * 65}, "stop: 65 texts"),
    ({"stop_token_ids": (1,) * 65}, "stop_token_ids: 65 ids given, at most 64"),
    ({"prefill_chunk": 0}, "prefill_chunk: .* expected"),
    ({"max_new_tokens": 0}, "max_new_tokens: .* expected"),
    ({"temperature": math.inf}, "temperature: inf .* a finite number expected"),
    ({"temperature": 10**400}, "temperature"),
    ({"top_k": 2**70}, "top_k"),
    ({"max_new_tokens": 2.0}, r"max_new_tokens: 2\.0 \(float\) given, a whole number expected"),
    ({"max_new_tokens": True}, "max_new_tokens: True"),
    ({"stop": "end"}, "stop: 'end' .* a list expected"),
    ({"stop": [LONE]}, r"stop\[0\]: a lone surrogate"),
    ({"stop_token_ids": ["2"]}, r"stop_token_ids\[0\]: '2'"),
]


def test_a_setting_that_no_generation_can_have_is_refused_where_it_is_made(subtests):
    for given, message in NO_SETTINGS:
        with subtests.test(ascii(given)[:60]), pytest.raises(InputError, match=message):
            Generation(**given)


OPTIONS: list[Any] = [Generation, RequestLimits, MediaLimits, EncoderOptions, DecoderOptions, RuntimeOptions]


def test_no_field_of_requests_and_options_takes_a_value_of_another_type(subtests):
    for kind in (*OPTIONS, Request):
        whole = {"raw_prompt": "a"} if kind is Request else {}
        for name, value in ((field.name, value) for field in fields(kind) for value in WRONG):
            if kind is Request and (
                name in ("images", "videos") or (name == "messages" and isinstance(value, list))
            ):
                continue  # Sources, one or several, and messages are judged when they are read.
            with subtests.test(f"{kind.__name__}.{name}"), pytest.raises(InputError, match=name):
                kind(**{**whole, name: value})


def test_numbers_of_numpy_become_pythons_own():
    given: dict[str, Any] = {"max_new_tokens": np.int64(3), "temperature": np.float32(0.5), "stop": ["a"]}
    made = Generation(**given)
    assert (type(made.max_new_tokens), type(made.temperature), made.stop) == (int, float, ("a",))


def test_frames_at_a_rate_that_is_none_are_refused(subtests):
    frames = torch.zeros(2, 28, 28, 3, dtype=torch.uint8)
    for rate in (math.inf, math.nan, 0, -1.0, "2", 1e-320):
        with (
            subtests.test(rate),
            pytest.raises(InputError, match=r"frames per second: .* a finite number above 0"),
        ):
            Pixels(kind="video", frames=frames, frames_per_second=rate)  # type: ignore[arg-type]


def tampered(request: Request, **values: object) -> Request:
    """As if a check where requests are made had a hole."""
    for name, value in values.items():
        object.__setattr__(request, name, value)
    return request


def cold() -> Generation:
    made = Generation(max_new_tokens=2)
    object.__setattr__(made, "temperature", "cold")
    return made


class Broken(io.BytesIO):
    """A source that fails in a way of its own."""

    def __array__(self, *_: object) -> np.ndarray:
        raise ZeroDivisionError("of all things")


def hostile() -> list[Request]:
    """Ten, most of them past every check."""
    return [
        tampered(good(1), raw_prompt=LONE + IMAGE),
        tampered(Request(raw_prompt="a", generation=SHORT), raw_prompt=""),
        tampered(good(1), generation=cold()),
        tampered(good(2), fps="2", videos=[np.zeros((4, 56, 56, 3), np.uint8)]),
        tampered(good(2), prune="0.5"),
        tampered(good(1), images=[Broken()]),
        tampered(good(1), images=5),
        tampered(good(1), limits="none"),
        tampered(good(1), generation=None),
        Request(raw_prompt=prompt(IMAGE), images=[b"no picture"], generation=SHORT),
    ]


@pytest.mark.seconds
def test_forty_of_fifty_requests_are_answered_as_alone_beside_ten_that_break(pipeline):
    requests = [good(number) for number in range(40)]
    bad = hostile()
    mixed = list(requests)
    for number, each in enumerate(bad):
        mixed.insert(5 * number + 2, each)
    outcomes = pipeline.generate_all(mixed)
    found = dict(zip(map(id, mixed), outcomes, strict=True))
    assert [type(found[id(each)]) for each in bad if not isinstance(found[id(each)], VlexportError)] == []
    assert all(isinstance(found[id(each)], MediaError) for each in bad[-1:])
    assert all(found[id(each)].exit_code in (1, 2) for each in bad)
    pipeline.encoder.cache.clear()
    for each in requests:
        answer = found[id(each)]
        assert isinstance(answer, Answer)
        assert answer.token_ids == pipeline.generate(each).token_ids


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def in_a_list(pipeline: Pipeline, request: Request) -> None:
    outcomes = pipeline.generate_all([request])
    assert isinstance(outcomes[0], VlexportError)


def raised(pipeline: Pipeline, request: Request) -> None:
    with pytest.raises(VlexportError):
        pipeline.generate(request)


def streamed(pipeline: Pipeline, request: Request) -> None:
    with pytest.raises(VlexportError):
        list(pipeline.stream(request))


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("way", [in_a_list, raised, streamed])
@pytest.mark.parametrize("is_bug", [True, False])
def test_an_error_keeps_no_media_alive(pipeline, monkeypatch, way, is_bug):
    if is_bug:
        monkeypatch.setattr(AnswerGenerator, "embed", lambda *_: 1 / 0)
    given = np.zeros((56, 56, 3), np.uint8 if is_bug else np.float32)
    known = weakref.ref(given)
    request = tampered(good(1), images=[given])
    del given
    way(pipeline, request)
    del request
    assert known() is None


def test_an_unexpected_error_says_where_it_was_raised(pipeline, monkeypatch):
    def divided(*_: object) -> float:
        return 1 / 0

    monkeypatch.setattr(AnswerGenerator, "embed", divided)
    (found,) = pipeline.generate_all([good(1)])
    assert isinstance(found, InternalError)
    assert isinstance(found.__cause__, ZeroDivisionError)
    assert "in divided" in "".join(found.__cause__.__notes__)


def test_what_is_no_request_is_an_outcome_too(pipeline):
    first, second = pipeline.generate_all(["what?", good(1)])
    assert isinstance(first, InputError)
    assert isinstance(second, Answer)


STAGES = ["preprocess", "prune", "embed", "prefill", "decode"]


@pytest.mark.parametrize("stage", STAGES)
def test_an_error_at_any_stage_is_the_outcome_of_its_request_with_the_original_as_cause(
    pipeline, monkeypatch, stage
):
    whole = getattr(AnswerGenerator, stage)
    expected = [pipeline.generate(good(number)).token_ids for number in (1, 3)]
    for error, kind in ((ZeroDivisionError("x"), InternalError), (MemoryError(), ResourceError)):
        calls: list[object] = []

        def failing(self, given, calls=calls, error=error):
            calls.append(given)
            if len(calls) == 2:
                raise error
            return whole(self, given)

        monkeypatch.setattr(AnswerGenerator, stage, failing)
        first, bad, last = pipeline.generate_all([good(1), good(5), good(3)])
        assert isinstance(bad, kind)
        assert bad.__cause__ is error
        assert [first.token_ids, last.token_ids] == expected


def test_an_error_in_the_engine_is_the_outcome_of_the_items_that_meet_it(pipeline, monkeypatch):
    pipeline.encoder.cache.clear()
    whole = pipeline.session.run
    broken = pipeline.preprocess(image(5)).patches

    def run(items):
        if any(item.patches.shape == broken.shape and torch.equal(item.patches, broken) for item in items):
            raise KeyError("a library's own")
        return whole(items)

    monkeypatch.setattr(pipeline.session, "run", run)
    first, bad, last = pipeline.generate_all([good(1), good(5), good(3)])
    assert isinstance(bad, InternalError)
    assert isinstance(bad.__cause__, KeyError)
    assert isinstance(first, Answer)
    assert isinstance(last, Answer)


def test_a_callback_that_raises_ends_its_own_request(pipeline):
    def on_piece(number: int, _: object) -> None:
        if number == 1:
            raise ValueError("full")

    first, bad, last = pipeline.generate_all([good(1), good(3), good(5)], on_piece)
    assert isinstance(bad, InputError)
    assert "on_piece raised ValueError: full" in str(bad)
    assert isinstance(bad.__cause__, ValueError)
    assert isinstance(first, Answer)
    assert isinstance(last, Answer)


def test_an_interrupt_is_nobodys_outcome(pipeline):
    for stop in (KeyboardInterrupt, SystemExit):

        def on_piece(*_: object, stop: type[BaseException] = stop) -> None:
            raise stop

        with pytest.raises(stop):
            pipeline.generate_all([good(1)], on_piece)


def test_a_stream_that_breaks_raises_the_same_kind_of_error(pipeline, monkeypatch):
    stream = pipeline.stream(good(1))
    next(stream)
    monkeypatch.setattr(type(pipeline.language.tokenizer), "decode", lambda *_: 1 / 0)
    with pytest.raises(InternalError, match="unexpected ZeroDivisionError"):
        list(stream)
    with pytest.raises(InternalError):
        pipeline.stream(tampered(good(1), images=5))


def test_however_low_a_temperature_the_likeliest_is_drawn(pipeline):
    greedy = pipeline.generate(good(1)).token_ids
    for temperature in (2.3e-308, 1e-38, 1e-6):
        settings = Generation(max_new_tokens=2, temperature=temperature)
        assert pipeline.generate(replace(good(1), generation=settings)).token_ids == greedy


def test_each_item_of_encode_all_has_an_outcome_of_its_own(pipeline):
    sources = [image(0), b"no picture", image(0, 1, 300)]
    first, unread, strip, film = pipeline.encode_all(images=sources, videos=[video(3)], prune=0.5)
    assert isinstance(unread, MediaError)
    assert isinstance(strip, VlexportError)
    (alone,), (whole,) = pipeline.encode(images=[image(0)]), pipeline.encode(videos=[video(3)], prune=0.5)
    # Rows of calls of other heights: matrix products round differently, 1e-6 on values around 1.
    torch.testing.assert_close(first.embeds, alone.embeds, atol=1e-5, rtol=0)
    torch.testing.assert_close(film.embeds, whole.embeds, atol=1e-5, rtol=0)
    assert torch.equal(film.kept, whole.kept)


def test_encode_all_reports_each_item_as_it_is_read_and_encoded(pipeline, monkeypatch):
    monkeypatch.setattr(pipeline.encoder, "max_items", 1)
    reported = []
    pipeline.encode_all([image(0), image(1), image(2)], progress=lambda *each: reported.append(each))
    shares = (0, 1 / 3, 2 / 3)
    assert reported[:3] == [(f"read {at + 1} of 3", shares[at]) for at in range(3)]
    each = len(pipeline.encode(image(0)).embeds)
    for at, (words, share) in enumerate(reported[3:]):
        counted = f"encode {at + 1} of 3, {at * each} of {3 * each} tokens"
        assert re.fullmatch(counted + (r", \d+ a second" if at else ""), words)
        assert share == pytest.approx(shares[at])


def test_calls_take_two_seconds_of_work_by_the_speed_of_the_last_one(pipeline, monkeypatch):
    encoder = Encoder(pipeline.session, EncoderOptions())
    # Rows of this backend have other bits in other company, so the clock has no say.
    assert not encoder.is_paced
    assert list(encoder._batches([300, 100, 100, 50])) == [[3, 1, 2, 0]]
    monkeypatch.setattr(encoder, "is_paced", True)
    calls = encoder._batches([300, 100, 100, 50, 400, 10_000])
    assert next(calls) == [3, 1, 2]  # within 256 tokens
    encoder.speed = 200.0
    assert next(calls) == [0]
    encoder.speed = 2_000_000.0
    assert next(calls) == [4, 5]
    assert list(calls) == []
    encoder.speed = 0.01
    assert encoder.room == 256
    assert list(encoder._batches([3_000, 4_000])) == [[0], [1]]


def test_paced_calls_cut_videos_and_give_the_rows_of_one_call(pipeline, monkeypatch):
    sources = {"images": [image(0), image(1)], "videos": [video(3)]}
    whole = pipeline.encode_all(**sources)
    paced = Encoder(pipeline.session, EncoderOptions(cache_bytes=0))
    monkeypatch.setattr(paced, "is_paced", True)
    monkeypatch.setattr(encoder_module, "PIECE_TOKENS", 8)
    monkeypatch.setattr(encoder_module, "FIRST_TOKENS", 8)
    monkeypatch.setattr(pipeline, "encoder", paced)
    monkeypatch.setattr(pipeline.media, "cache", paced.cache)
    before = pipeline.session.num_calls
    for ours, theirs in zip(pipeline.encode_all(**sources), whole, strict=True):
        torch.testing.assert_close(ours.embeds, theirs.embeds, atol=1e-5, rtol=0)
        assert ours.grid == theirs.grid
    assert pipeline.session.num_calls > before + 1


def test_an_image_above_the_profile_is_refused_with_the_largest_size_that_is_not(pipeline, monkeypatch):
    monkeypatch.setattr(EngineSession, "largest_call", 12)
    with pytest.raises(LimitError, match=r"image of 200x301 pixels: 77 tokens, .* \(at most 12\)") as caught:
        pipeline.encode(image(0, 301, 200))
    width, height = map(int, re.findall(r"size is (\d+)x(\d+) pixels", str(caught.value))[0])
    assert abs(width / height - 200 / 301) < 1 / height
    assert 1 < len(pipeline.encode(image(0, height, width)).embeds) <= 12
    with pytest.raises(LimitError):
        pipeline.encode(image(0, height + 1, round((height + 1) * 200 / 301)))


def test_a_setting_of_encode_of_another_type_is_refused(pipeline, subtests):
    for given in ({"fps": "2"}, {"prune": "0.5"}, {"fps": math.nan}, {"limits": 3}):
        for encode in (pipeline.encode, pipeline.encode_all):
            with subtests.test(ascii(given)), pytest.raises(InputError):
                encode(videos=[video(0)], **given)


def test_preprocessed_items_with_numbers_that_are_none_are_refused(pipeline):
    item = pipeline.preprocess(image(0))
    for value in (math.nan, math.inf):
        item.patches[3, 5] = value
        with pytest.raises(InputError, match=r"image patches: .* with NaN or infinite"):
            pipeline.encode_items([item])


def test_preprocessed_items_of_no_kind_or_with_a_grid_or_cells_that_are_none_are_refused(pipeline, subtests):
    item = replace(pipeline.preprocess(image(0, 56, 84)), cells=torch.arange(6))
    cells = [
        [0, 1, 2, 3, 4, 6],
        [-1, 0, 1, 2, 3, 4],
        [0, 1, 1, 2, 3, 4],
        [5, 4, 3, 2, 1, 0],
        [[0, 1, 2, 3, 4, 5]],
    ]
    wrong: dict[str, list[Any]] = {"kind": ["audio"], "grid": [(1, 4.0, 6), (1, "4", 6), (1, 4), None]}
    wrong["cells"] = [
        *map(torch.tensor, cells),
        torch.arange(6).int(),
        torch.arange(6.0),
        torch.ones(6).bool(),
    ]
    for name, values in wrong.items():
        for value in values:
            with subtests.test(f"{name} {value}"), pytest.raises(InputError, match=f"{name}.* given"):
                pipeline.encode_items([replace(item, **{name: value}), item])
