"""`run` without a prompt on a terminal: what is typed, and what `generate` gives for the same messages."""

import importlib
import shlex

import pytest

from tests.cli.lines import Terminal, vlexport
from vlexport import load


@pytest.fixture
def talk(built, monkeypatch):
    def run(*lines, words=()):
        monkeypatch.setattr("sys.stdin", Terminal("".join(f"{line}\n" for line in lines)))
        monkeypatch.setattr(importlib.import_module("vlexport.cli.run"), "_is_terminal", lambda: True)
        ran = vlexport("run", built, "--max-new-tokens", 6, *words).ends(0)
        return ran.out.split("> "), ran.err

    return run


def turns(*parts):
    """Messages of questions and answers in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": part} for at, part in enumerate(parts)]


@pytest.mark.seconds
def test_answers_are_those_of_the_whole_conversation(talk, built, checkpoint, image, video, tmp_path):
    moved = tmp_path / "a photo.png"
    moved.write_bytes(image.read_bytes())
    words = ("--fps", 2)
    typed = (f"{shlex.quote(str(moved))} what's this?", str(video), "and then?")
    (_, first, quiet, second, end), told = talk(*typed, words=words)
    text = lambda words: {"type": "text", "text": words}  # noqa: E731
    with load(built, checkpoint=checkpoint) as pipeline:
        question = [{"type": "image", "image": moved}, text("what's this?")]
        answer = pipeline.generate(turns(question), max_new_tokens=6, fps=2).text
        again = [{"type": "video", "video": video}, text("and then?")]
        later = pipeline.generate(turns(question, [text(answer)], again), max_new_tokens=6, fps=2).text
    assert (first, quiet, second, end) == (f"{answer}\n", "", f"{later}\n", "\n")
    assert (f"image: {moved}" in told, f"video: {video}" in told) == (True, True)


@pytest.mark.seconds
def test_a_line_that_cannot_be_served_costs_no_other(talk, built, checkpoint, image, video, tmp_path):
    cut = tmp_path / "cut.png"
    cut.write_bytes(image.read_bytes()[:-100])
    lines = (
        "/prune 2",
        "/prune",
        "/nonsense",
        "/help",
        "/prune 0.5",
        f"{video} what?",
        "/reset",
        f"{cut}",
        "what?",
        "what?",
        "/quit",
        "x",
    )
    out, told = talk(*lines, words=("--fps", 2))
    for words in (
        "0 <= ",
        "/prune: no such command",
        "/nonsense: no such command",
        "/reset       forget",
        "damaged or cut short",
    ):
        assert words in told, told
    with load(built, checkpoint=checkpoint) as pipeline:
        pruned = pipeline.generate("what?", videos=video, fps=2, prune=0.5, max_new_tokens=6).text
        alone = pipeline.generate("what?", max_new_tokens=6).text
    assert out == ["", "", "", "", "", "", f"{pruned}\n", "", "", "", f"{alone}\n", ""]


@pytest.mark.seconds
def test_files_of_the_command_wait_for_the_first_question(talk, built, checkpoint, image):
    (_, answer, _), told = talk("what?", words=(image,))
    with load(built, checkpoint=checkpoint) as pipeline:
        assert answer == pipeline.generate("what?", images=image, max_new_tokens=6).text + "\n"
    assert f"image: {image}" in told
