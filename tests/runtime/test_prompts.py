"""Chats, templates, markers, and the room that items get in a prompt's ids."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from tests.golden_data import FOLDER
from tests.runtime.made import IMAGE, VIDEO, image, prompt, video
from tests.runtime.recorded import CHECKPOINT
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError, InputError, LimitError, MediaError, MisfitError
from vlexport.recipe import PromptItem, PromptRule
from vlexport.runtime import chat_template
from vlexport.runtime.chat_template import ChatTemplate
from vlexport.runtime.prompt import Prompter, chat_of
from vlexport.runtime.request import Request, RequestLimits
from vlexport.runtime.tokenizer import CheckpointTokenizer
from vlexport.specs import MediaItem

SLOTS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
PARTS: PromptRule = PromptRule(
    markers=SLOTS, slots=SLOTS, expand=lambda _, item: SLOTS[item.kind] * item.num_rows
)
TEXT: PromptRule = PromptRule(
    markers={"image": "(<image>)"},
    slots={"image": "<|vision_pad|>"},
    expand=lambda _, item: "<|box_start|>no. 1\n" + "<|vision_pad|>" * item.num_rows + "<|box_end|>",
    content="text",
)
LIMITS = RequestLimits()


@pytest.fixture(scope="module")
def tokenizer() -> CheckpointTokenizer:
    return CheckpointTokenizer(Checkpoint.open(CHECKPOINT))


def prompter(tokenizer, rule=PARTS) -> Prompter:
    return Prompter(tokenizer, rule, lambda item: rule.expand(None, item))


def item(kind: str, num_rows: int) -> PromptItem:
    media = MediaItem(kind=kind, patches=torch.empty(0), grid=(1, 2, 2))
    return PromptItem(item=media, number=0, num_rows=num_rows)


def test_media_of_a_raw_prompt_are_taken_by_kind_in_the_order_of_its_placeholders(tokenizer):
    first, second, film = image(0), image(1), video(2)
    request = Request(raw_prompt=prompt(IMAGE, VIDEO, IMAGE), images=[first, second], videos=[film])
    marked = prompter(tokenizer).mark(request, LIMITS)
    assert marked.kinds == ("image", "video", "image")
    assert marked.sources == (first, film, second)


def test_every_item_has_one_slot_for_each_row(tokenizer):
    made = prompter(tokenizer)
    marked = made.mark(Request(raw_prompt=prompt("a", IMAGE, "b", VIDEO), images=["1"], videos=["2"]), LIMITS)
    expanded = made.expand(marked, [item("image", 3), item("video", 5)], LIMITS)
    rooms = expanded.placeholders
    assert [room.length for room in rooms] == [3, 5]
    assert all(room.is_embed is None for room in rooms)
    for room, kind in zip(rooms, ("image", "video"), strict=True):
        ids = expanded.ids[room.offset : room.offset + room.length]
        assert set(ids) == {tokenizer.id_of(SLOTS[kind])}


def test_slots_inside_other_tokens_are_distinguished(tokenizer):
    made = prompter(tokenizer, TEXT)
    marked = made.mark(Request(raw_prompt="<|vision_pad|> a (<image>) b", images=["1"]), LIMITS)
    expanded = made.expand(marked, [item("image", 2)], LIMITS)
    (room,) = expanded.placeholders
    assert room.is_embed is not None
    assert room.is_embed[-3:] == (True, True, False)
    assert not any(room.is_embed[:-3])
    assert expanded.ids[room.offset] == tokenizer.id_of("<|box_start|>")


def test_ids_around_media_are_those_of_the_text_itself(tokenizer):
    made = prompter(tokenizer)
    words = prompt("what is ", IMAGE, " this?")
    marked = made.mark(Request(raw_prompt=words, images=["1"]), LIMITS)
    one = made.expand(marked, [item("image", 1)], LIMITS)
    assert one.ids == tokenizer.encode(words, add_special=True).ids


def test_media_and_placeholders_are_equally_many(tokenizer):
    hint = r"1 images given, the prompt has placeholders for 0\. Write one <\|image_pad\|> for each\."
    for words, message in (("", hint), (IMAGE * 2, "1 images given, the prompt has placeholders for 2")):
        with pytest.raises(InputError, match=message):
            prompter(tokenizer).mark(Request(raw_prompt=prompt(words), images=["1"]), LIMITS)


def test_a_kind_that_the_model_does_not_take_is_refused(tokenizer):
    with pytest.raises(InputError, match=r"a part of type 'video' given, this model takes image, text"):
        prompter(tokenizer, TEXT).mark(Request(prompt="x", videos=["1"]), LIMITS)
    with pytest.raises(InputError, match=r"1 videos given, .* for 0\. This model takes no videos\."):
        prompter(tokenizer, TEXT).mark(Request(raw_prompt="x", videos=["1"]), LIMITS)


def test_too_many_tokens_letters_and_items_are_refused_before_their_text_is_made(tokenizer):
    made = prompter(tokenizer)
    marked = made.mark(Request(raw_prompt=prompt(IMAGE), images=["1"]), LIMITS)
    with pytest.raises(LimitError, match=r"1000000000000 tokens, at most 131072 expected"):
        made.expand(marked, [item("image", 10**12)], LIMITS)
    with pytest.raises(LimitError, match=r"641 characters, at most 640 expected"):
        made.mark(Request(raw_prompt="x" * 641), RequestLimits(max_prompt_tokens=10))
    request = Request(raw_prompt=prompt(IMAGE * 3), images=["1", "2", "3"])
    with pytest.raises(LimitError, match="3 images and videos, at most 2 expected"):
        made.mark(request, RequestLimits(max_items=2))


def test_a_question_has_images_then_videos_then_the_text(tokenizer):
    messages, media = chat_of(Request(prompt="why?", images=["1", "2"], videos=["3"]), PARTS)
    assert [part["type"] for part in messages[0]["content"]] == ["image", "image", "video", "text"]  # type: ignore[attr-defined]
    assert media == {"image": ["1", "2"], "video": ["3"]}
    assert tokenizer.render(messages) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
        f"{IMAGE}{IMAGE}{VIDEO}why?<|im_end|>\n<|im_start|>assistant\n"
    )


def user(*parts: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": list(parts)}]


def test_parts_with_data_keep_it_and_the_others_take_what_is_given_in_order():
    messages = user({"type": "image"}, {"type": "image", "image": "mine"}, {"type": "image"})
    _, media = chat_of(Request(messages=messages, images=["a", "b"]), PARTS)
    assert media["image"] == ["a", "mine", "b"]
    assert messages[0]["content"][1] == {"type": "image", "image": "mine"}  # type: ignore[index]


def test_parts_may_have_the_form_of_openai_and_of_transformers():
    messages = user(
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa", "detail": "low"}},
        {"type": "image_url", "image_url": "b.png"},
        {"type": "image", "url": "c.png"},
        {"type": "video_url", "video_url": {"url": "d.mp4"}},
        {"type": "video", "path": "e.mp4"},
        {"type": "text", "text": "https://is.text"},
    )
    plain, media = chat_of(Request(messages=messages), PARTS)
    assert media == {"image": ["data:image/png;base64,aa", "b.png", "c.png"], "video": ["d.mp4", "e.mp4"]}
    assert [part["type"] for part in plain[0]["content"]] == ["image"] * 3 + ["video"] * 2 + ["text"]  # type: ignore[attr-defined]


def test_a_template_of_text_gets_a_line_with_a_marker_for_each_item():
    messages, _ = chat_of(Request(prompt="why?", images=["1", "2"]), TEXT)
    assert messages[0]["content"] == "(<image>)\n(<image>)\nwhy?"


BAD_MESSAGES = {
    "no role": ([{"content": "x"}], InputError, "without a role"),
    "not an object": (["x"], InputError, "message 0: str without a role"),
    "no content": ([{"role": "user"}], InputError, "content of NoneType"),
    "part of text": (user("x"), InputError, "a part of str given"),
    "unknown part": (user({"type": "audio"}), InputError, "part of type 'audio' .* takes image, text, video"),
    "url": (user({"type": "image", "url": "https://x"}), MediaError, "opens no network connections"),
    "image_url": (user({"type": "image_url", "image_url": {"url": "http://x"}}), MediaError, "download it"),
    "no type": (user({"image": "a.png"}), InputError, r"a part without a type given \(image\); expected one"),
    "no text": (user({"type": "text"}), InputError, "part of type 'text' has NoneType under 'text'"),
    "a number for a text": (user({"type": "text", "text": 5}), InputError, "has int under 'text', a text"),
    "no data": (user({"type": "image"}), InputError, "no further image is given"),
}


def test_messages_of_another_form_are_refused_with_what_is_wrong(subtests):
    for name, (messages, kind, text) in BAD_MESSAGES.items():
        with subtests.test(name), pytest.raises(kind, match=text):
            chat_of(Request(messages=messages), PARTS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="2 images given, the messages have parts for 1"):
        chat_of(Request(messages=user({"type": "image"}), images=["1", "2"]), PARTS)


def test_a_url_given_as_a_path_is_refused_with_a_hint(fresh):
    for url in ("https://host/x.png", "data:image/png,xx", "s3://bucket/x"):
        request = Request(raw_prompt=prompt(IMAGE), images=[url])
        with pytest.raises(MediaError, match="opens no network connections; download it first"):
            fresh().generate(request)


def test_a_question_is_put_in_one_way_and_media_of_a_kind_in_one_place():
    with pytest.raises(InputError, match="prompt and raw_prompt given; exactly one"):
        Request(prompt="a", raw_prompt="b")
    with pytest.raises(InputError, match="no question given"):
        Request()
    with pytest.raises(InputError, match="their order in the prompt would be unclear"):
        Request(prompt="a", images=["1"], image_embeds=["2"])  # type: ignore[list-item]


def test_a_checkpoint_without_a_tokenizer_or_a_token_of_the_family_is_refused(tmp_path, tokenizer):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((CHECKPOINT / name).read_bytes())
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        CheckpointTokenizer(Checkpoint.open(tmp_path))
    with pytest.raises(CheckpointError, match="has no token '<unheard>'"):
        tokenizer.id_of("<unheard>")


CALL = {"type": "function", "function": {"name": "find", "arguments": {"what": ["é", 1, None, True, 2.5]}}}
CHATS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "user", "content": "hi"}],
    "turns": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "image"}, {"type": "text", "text": "<b>é</b>"}, {"type": "video"}],
        }
    ],
    "call": [{"role": "assistant", "content": "", "tool_calls": [CALL], "name": None}],
    "thoughts": [{"role": "assistant", "content": "a", "reasoning": "because"}],
}
FEATURES = (
    "{%- for m in messages %}\n  {{ m | tojson }}\n"
    "{% if loop.index0 == 9 %}{% break %}{% endif %}{% endfor %}"
    "{% set n = namespace(a=1) %}{% set n.a = n.a + 1 %}{{ n.a }}{{ bos_token }}{{ tools is none }}"
    "{% generation %}{{ messages[0].reasoning_content }}{% endgeneration %}{{ dict(a=1).a }}"
    "{% if add_generation_prompt %}<go>{% endif %}{{ messages | tojson(indent=2) }}{{ strftime_now('%Y') }}"
)
TEMPLATES = {
    "features": FEATURES,
    "golden": (FOLDER / "e2e" / "checkpoint" / "chat_template.jinja").read_text(),
}


def test_a_template_gives_what_it_gives_in_transformers(subtests: pytest.Subtests) -> None:
    theirs = PreTrainedTokenizerFast.from_pretrained(str(FOLDER / "e2e" / "checkpoint"), bos_token="<s>")
    names = {"tools": None, "add_generation_prompt": True, **theirs.special_tokens_map}
    for name, template in TEMPLATES.items():
        ours = ChatTemplate(template, names, Path())
        for chat, messages in CHATS.items():
            with subtests.test(f"{name} {chat}"):
                expected = theirs.apply_chat_template(
                    messages, chat_template=template, tokenize=False, add_generation_prompt=True
                )
                assert ours.render(messages) == expected


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "power": "{{ 2 ** (2 ** 40) }}",
    "product": "{{ 'a' * 10 ** 12 }}",
    "doubling": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x * 2 %}{% endfor %}",
    "format": "{{ '%9999999999d' % 1 }}",
    "text": "{% for i in range(99999) %}{{ 'a' * 9000 }}{% endfor %}",
    "memory": "{% for i in [30] %}{{ ('a' * 2 ** i) | length }}{% endfor %}",
    "python": "{{ ''.__class__.__mro__ }}",
    "underscores": "{% set n = namespace(_x=1) %}",
    "syntax": "{% for",
    "its own words": "{{ raise_exception('no roles') }}",
}


@pytest.mark.seconds
@pytest.mark.parametrize("name", [*ENDLESS, pytest.param("loops", marks=pytest.mark.slow)])
def test_a_template_without_an_end_is_refused_and_leaves_no_process(name: str) -> None:
    template = ChatTemplate({**ENDLESS, "loops": LOOP}[name], {}, Path("place"))
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"place: the checkpoint's chat template (refuses|takes more than)"):
        template.render([{"role": "user", "content": "a"}])
    assert time.monotonic() - begun < chat_template.DEADLINE_SECONDS
    process = template._running
    template.close()
    assert process is None or process.returncode is not None


def test_a_process_that_was_ended_is_begun_again() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {}, Path())
    assert template.render([{"content": "one"}]) == "one"
    assert template._running is not None
    os.kill(template._running.pid, 9)
    template._running.wait()
    assert template.render([{"content": "two"}]) == "two"


def test_data_of_parts_is_not_handed_to_the_template() -> None:
    template = ChatTemplate("{{ messages[0].content[0].image }}", {}, Path())
    assert template.render([{"content": [{"image": object()}]}]) == "<object>"


@pytest.mark.parametrize("found", ["3.1.5", "2.11"])
def test_an_old_jinja_is_refused_with_its_version(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "version", lambda _: found)
    with pytest.raises(MisfitError, match=rf"jinja2 {found} is .*pip install 'jinja2>=3\.1\.6'"):
        ChatTemplate("a", {}, Path()).render([])
