"""`--trace`: stages, engine calls and operators in Chrome's trace format, as ui.perfetto.dev reads it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.cli.lines import vlexport

# Of the document "Trace Event Format": what an event of a phase must have, and of which type.
NUMBER = (int, float)
ALWAYS = {"name": str, "ph": str, "pid": int, "tid": int}
REQUIRED: dict[str, dict[str, Any]] = {
    "X": {**ALWAYS, "cat": str, "ts": NUMBER, "dur": NUMBER},
    "M": {**ALWAYS, "args": dict},
}
ABOUT = {"process_name": "name", "process_labels": "labels", "process_sort_index": "sort_index",
    "thread_name": "name", "thread_sort_index": "sort_index"}  # fmt: skip


def spans_of(path):
    """The complete events of a file, by thread, after every event was held to the format."""
    document = json.loads(path.read_text("utf-8"))
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in document["traceEvents"]:
        for key, kind in REQUIRED[event["ph"]].items():
            assert isinstance(event[key], kind), event
        if event["ph"] == "M":
            assert ABOUT[event["name"]] in event["args"], event
        else:
            assert event["dur"] >= 0
            threads.setdefault((event["pid"], event["tid"]), []).append(event)
    assert threads
    return threads


def nested(events):
    """Hold the events of a thread to one tree: they lie inside each other or apart; returns (event, parent).

    Times are written in microseconds with three digits behind the point.
    """
    found: list[tuple[Any, Any]] = []
    above: list[Any] = []
    for event in sorted(events, key=lambda each: (each["ts"], -each["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while above and above[-1]["ts"] + above[-1]["dur"] <= start + 0.002:
            above.pop()
        if above:
            assert end <= above[-1]["ts"] + above[-1]["dur"] + 0.002, (event, above[-1])
        found.append((event, above[-1] if above else None))
        above.append(event)
    return found


def check_sums(pairs):
    """Hold the durations inside an event to its own."""
    inside: Counter[int] = Counter()
    for event, parent in pairs:
        if parent is not None:
            inside[id(parent)] += event["dur"]
    for event, _ in pairs:
        assert inside[id(event)] <= event["dur"] + 0.002 * len(pairs), event


def stages_of(pairs):
    """The parts of the command in their order, with the part that each lies in."""
    return [
        (event["name"], parent and parent["name"])
        for event, parent in pairs
        if event["cat"] == "user_annotation"
    ]


@pytest.mark.seconds
def test_a_run_is_recorded_stage_by_stage_with_the_engine_inside_the_tower(
    built, checkpoint, image, tmp_path
):
    out = tmp_path / "trace.json"
    words = ("--checkpoint", checkpoint, "--max-new-tokens", 4, "--prompt", "what?", "--image", image)
    ran = vlexport("run", built, *words, "--trace", out, "--json").ends(0)
    threads = spans_of(out)
    pairs = {thread: nested(events) for thread, events in threads.items()}
    for each in pairs.values():
        check_sums(each)
    (main,) = (each for each in pairs.values() if ("tower", None) in stages_of(each))
    assert list(dict.fromkeys(stages_of(main))) == [
        ("preprocess", None),
        ("tower", None),
        ("engine", "tower"),
        ("prune", None),
        ("positions", None),
        ("prefill", None),
        ("decode", None),
    ]
    counts = Counter(name for name, _ in stages_of(main))
    assert (counts["engine"], counts["decode"]) == (1, 3)
    # The answer's own stages are timed around those of the trace, by another clock: torch makes seconds of
    # the processor's ticks, 0.4 % too many beside other work (measured).
    taken: Counter[str] = Counter()
    for event, _ in main:
        taken[event["name"]] += event["dur"] / 1e6
    for stage in ("preprocess", "positions", "prefill", "decode"):
        assert 0 < taken[stage] <= 1.01 * ran.document["stages"][stage] + 1e-4
    (engine,) = (event for event, _ in main if event["name"] == "engine")
    products = [
        event
        for event, _ in main
        if event["name"] in ("aten::mm", "aten::addmm")
        and engine["ts"] <= event["ts"] <= engine["ts"] + engine["dur"]
    ]
    assert products


@pytest.mark.seconds
def test_an_encode_is_recorded_item_by_item_and_names_no_machine_or_folder(built, image, video, tmp_path):
    out = tmp_path / "trace.json"
    media = ("--image", image, "--video", video, "--fps", 2, "--prune", 0.5)
    words = ("encode", built, *media, "--output", tmp_path / "x.safetensors")
    assert vlexport(*words, "--trace", out).code == 0
    pairs = [pair for events in spans_of(out).values() for pair in nested(events)]
    check_sums(pairs)
    assert stages_of(pairs) == [
        ("preprocess", None),
        ("preprocess", None),
        ("tower", None),
        ("engine", "tower"),
        ("prune", None),
        ("prune", None),
    ]
    text = out.read_text("utf-8")
    assert "host_name" not in text
    assert str(tmp_path) not in text
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["trace.json", "x.safetensors"]


@pytest.mark.parametrize(
    "words", [("encode", "--output", "{folder}/x.safetensors"), ("run", "--prompt", "a")]
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_loaded(
    words, built, checkpoint, image, tmp_path
):
    verb, *rest = (word.format(folder=tmp_path) for word in words)
    more = ("--checkpoint", checkpoint) if verb == "run" else ()
    for trace, message in (
        (tmp_path / "no" / "t.json", "Make it first"),
        (tmp_path / "t.txt", "ends in .json"),
    ):
        assert message in vlexport(verb, built, *more, "--image", image, *rest, "--trace", trace).ends(2).err
