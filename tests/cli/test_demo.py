"""`demo`: the whole line, twice."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.trained import scenes
from benchmarks.trained.evaluate import Reference
from benchmarks.trained.task import HELD_OUT_SEED
from tests.cli.lines import Ran, vlexport
from vlexport.bundle import Bundle


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


def demo(place: Path, *words: object) -> Ran:
    folders = ("--folder", place / "output", "--output-dir", place / "engines")
    return vlexport("demo", "--backend", "eager", *folders, *words)


@pytest.fixture(scope="module")
def first(place: Path) -> Ran:
    return demo(place)


@pytest.mark.slow
def test_the_demo_prints_what_it_did_and_where_it_lies(first, place):
    assert first.code == 0, first.err
    fields = dict(line.split(maxsplit=1) for line in first.lines if not line.startswith(" "))
    places = ["checkpoint", "bundle", "parity", "media", "tokens"]
    assert list(fields) == [*places, "question", "answer", "picture", "report", "next"]
    assert "(built and stored)" in fields["bundle"]
    assert ", passed " in fields["parity"]
    assert Path(fields["tokens"]).is_file()
    assert all(Path(path).is_file() for path in fields["media"].split(", "))
    assert Path(fields["picture"].split()[0]).read_bytes().startswith(b"\x89PNG")
    assert "37 of 75 video tokens kept" in fields["question"]
    assert fields["answer"].endswith("(right)")
    page = Path(fields["report"].split()[0]).read_text(encoding="utf-8")
    # Two more engines would be built for it.
    assert page.count("Not measured") == page.count("<p>Not measured: drift by block: <code>") == 1
    sections = ("latency", "padding-and-memory", "pruning", "kept-tokens")
    assert all(f'<section id="{section}">' in page for section in sections)
    assert "data:image/png;base64," in page
    assert Bundle.open(fields["bundle"].split()[0]).path.parent == place / "engines"


def theirs(document) -> str:
    """The answer of transformers to the same question, from all tokens of the video."""
    moving = scenes.draw_scene("video", HELD_OUT_SEED, 0)
    assert np.array_equal(np.load(document["video"]), moving.frames)
    (question,) = (each for each in moving.questions if each.prompt == document["question"])
    return Reference.open(Path(document["checkpoint"])).answers([(moving, question)])[0]


@pytest.mark.slow
def test_a_second_demo_is_a_cache_hit_and_as_json_one_document(first, place):
    again = demo(place, "--json")
    assert (again.code, again.document["schema"], again.document["verb"]) == (0, 1, "demo")
    assert (again.document["cached"], again.document["parity"]) == (True, "passed")
    assert "export" not in again.err
    assert again.document["answer"] == again.document["expected"] == theirs(again.document)
    names = {"image.0.embeds", "image.0.grid", "video.0.embeds", "video.0.grid"}
    assert set(again.document["tensors"]) == names
