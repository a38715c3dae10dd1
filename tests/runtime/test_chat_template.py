"""Chat templates: what transformers renders, and the end of one that has none."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.golden_data import FOLDER
from vlexport.errors import InputError, MisfitError
from vlexport.runtime import chat_template
from vlexport.runtime.chat_template import ChatTemplate

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
