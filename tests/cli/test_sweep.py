"""`sweep`: what it prints and writes, its exit codes, and that Python gives the same."""

from __future__ import annotations

import json

import pytest

from tests.cli.lines import vlexport
from vlexport.evaluate import sweep as sweeps
from vlexport.evaluate.intervals import wilson

SHORT = ("--rates", "0,0.5", "--selectors", "evs,random", "--max-new-tokens", 2)


@pytest.fixture
def sweep(built, checkpoint):
    def run(*words):
        return vlexport("sweep", built, "--checkpoint", checkpoint, *words)

    return run


@pytest.fixture
def task(tmp_path, video, image):
    """A question about a video and one about an image."""
    path = tmp_path / "task.jsonl"
    lines: list[dict[str, object]] = [
        {"id": "moves", "video": str(video), "fps": 2, "category": "order"},
        {"id": "stays", "image": str(image), "category": "colour"},
    ]
    texts = [json.dumps({"prompt": "what?", "answer": "a", "choices": ["a", "b"], **line}) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.mark.seconds
def test_the_tables_have_a_row_for_every_selector_and_rate(sweep, task, tmp_path):
    plot = tmp_path / "plot.svg"
    ran = sweep("--task", task, *SHORT, "--seeds", 2, "--plot", plot).ends(0)
    assert plot.read_text("utf-8").startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    assert f"plot: {plot}" in ran.err
    lines = [line.split("\t") for line in ran.lines]
    assert [line[:3] for line in lines[:4]] == [
        ["selector", "rate", "kept"],
        ["none", "0", "48 of 48"],
        ["evs", "0.5", "24 of 48"],
        ["random", "0.5", "24 of 48"],
    ]
    # Random weights answer nothing right.
    assert lines[1][3] == wilson(0, 2).text(100)
    assert lines[4][:4] == ["videos alone", "rate", "kept", "accuracy %"]
    assert lines[5][3] == wilson(0, 1).text(100)
    assert lines[8] == ["accuracy %", "rate", "colour", "images", "order", "videos"]
    assert "2 questions, 95 % intervals; 2 draws of each baseline; chance 50.0%" in ran.err


@pytest.mark.seconds
def test_a_method_with_a_number_for_each_frame_keeps_no_more_than_the_others(sweep, video):
    words = ("--rates", "0,0.09", "--selectors", "evs,evs-frames", "--max-new-tokens", 2)
    ran = sweep("--video", video, "--fps", 2, *words).ends(0)
    rows = [line.split("\t")[:3] for line in ran.lines[2:4]]
    # 12 of the first frame and 10 of 12 of three others.
    assert rows == [["evs", "0.09", "43 of 48"], ["evs-frames", "0.09", "42 of 48"]]


@pytest.mark.seconds
def test_videos_need_no_task_and_a_bad_one_ends_with_its_own_exit_code(sweep, video, tmp_path, monkeypatch):
    bad, made = tmp_path / "bad.npy", []
    bad.write_bytes(b"no video")
    python = sweeps.sweep

    def kept(*given, **more):
        made.append(python(*given, **more))
        return made[-1]

    monkeypatch.setattr(sweeps, "sweep", kept)
    ran = sweep("--video", video, "--video", bad, "--fps", 2, *SHORT, "--most-lost", 100, "--json")
    (found,) = made
    assert ran.code == 2
    assert [(row.selector, row.rate) for row in found.rows] == [("none", 0), ("evs", 0.5), ("random", 0.5)]
    assert f"vlexport: {bad}: " in ran.err
    assert found.advice(100) in ran.err.splitlines()
    assert found.about() == "1 question, 95 % intervals; 1 draw of each baseline; 1 failed and left out"
    document, expected = ran.document, json.loads(json.dumps(found.to_json()))
    failed = document.pop("failed")
    assert (list(failed), failed[str(bad)]["exit_code"]) == ([str(bad)], 2)
    assert expected.pop("failed").keys() == {str(bad)}
    assert document == {"schema": 1, "verb": "sweep", **expected}


REFUSED = {
    "no media": ((), 2, "neither a task nor videos given, one of them expected: task, or videos with"),
    "an absent task": (("--task", "{folder}/t.jsonl"), 2, "t.jsonl: No such file or directory; a task file"),
    "an absent video": (("--video", "{folder}/v.npy"), 2, "v.npy: No such file or directory"),
    "a prompt of a task": (("--task", "t", "--prompt", "a"), 2, "--prompt given together with --task"),
    "words for rates": (("--video", "{video}", "--rates", "half"), 2, "--rates half: numbers with commas"),
    "no svg": (("--video", "{video}", "--plot", "{folder}/a.png"), 2, "a file name that ends in .svg"),
    "no folder": (("--video", "{video}", "--plot", "{folder}/no/a.svg"), 2, "does not exist. Make it first"),
}


def test_what_cannot_be_swept_is_refused_with_what_to_do(sweep, video, tmp_path, subtests):
    for name, (words, code, message) in REFUSED.items():
        with subtests.test(name):
            filled = (word.format(video=video, folder=tmp_path) for word in words)
            assert message in sweep(*filled).ends(code).err


@pytest.mark.slow
def test_a_bundle_that_failed_its_check_is_swept_only_when_that_is_requested(
    failed, checkpoint, wrong_recipe, video
):
    words = ("sweep", failed, "--checkpoint", checkpoint, "--recipe", wrong_recipe)
    media = ("--video", video, "--fps", 2)
    vlexport(*words, *media, *SHORT).ends(3)
    vlexport(*words, *media, *SHORT, "--allow-failed").ends(0)
