"""Peers beside us: what the tables say of each, and one small tower in real processes."""

import argparse
import json
import sys

import numpy as np
import pytest
from PIL import Image

from benchmarks.first_hour import GIB, step
from benchmarks.peers import ANSWER, PEERS, WRONG, Run, compared, main, named, text_of

CALL = {"opening": 2.0, "opened": 2**30, "first": 5.0, "peak": 2**31, "load": 1.0, "versions": {"torch": "2"}}


def run_in(folder, rounds=2, depth=2):
    given = argparse.Namespace(
        rounds=rounds, depth=depth, threads=2, seconds=9, shapes={"56x56": (1, 56, 56)}, pictures={}
    )
    return Run(folder, given)


def told(run, peers=PEERS):
    lines = text_of(run, peers).splitlines()
    return {
        line.split(" | ")[0].strip("| "): line for line in lines[: lines.index("### First token about 56x56")]
    }


def test_a_ratio_is_of_the_same_round_and_has_its_interval(tmp_path):
    run = run_in(tmp_path)
    ours = next(peer for peer in PEERS if peer.kind == "vlexport")
    run.exports[ours.files] = {"seconds": 60.4, "bytes": 2_000_000}
    for at, (base, own) in enumerate([(4.0, 2.0), (9.0, 3.0)]):
        run.calls[f"{PEERS[0].name}, 56x56, {at}"] = CALL | {"later": [base, base]}
        run.calls[f"{ours.name}, 56x56, {at}"] = CALL | {"later": [own, own], "error": 1e-6, "worst": 2e-6}
    row = told(run)[ours.name]
    assert (
        "| 60 / 2 | 2.00 | 5.00 | 2.50 (2.00 to 3.00) | 2.50 (2.00 to 3.00) | 1.0 / 2.0 | 1.0e-06 / 2.0e-06 |"
        in row
    )
    assert "**A trial of 2 blocks, not a result.** 2 blocks, 2 rounds, 2 threads" in text_of(run, PEERS)
    run.settings.depth = 32
    assert "trial" not in text_of(run, PEERS)


def test_a_name_is_one_peer_and_a_beginning_is_all_that_begin_so():
    whole, beginning = named(["vlexport onnxruntime int8"]), named(["vlexport onnxruntime i"])
    assert [peer.files for peer in whole] == ["onnxruntime-int8"]
    assert [peer.files for peer in beginning] == ["onnxruntime-int8", "onnxruntime-int8"]
    assert named([""]) == list(PEERS)


def test_one_round_has_no_interval_and_a_library_may_have_two_versions(tmp_path):
    run = run_in(tmp_path, rounds=1)
    run.calls[f"{PEERS[0].name}, 56x56, 0"] = CALL | {"later": [4.0]}
    run.calls[f"{PEERS[2].name}, 56x56, 0"] = CALL | {"later": [2.0], "versions": {"torch": "3"}}
    assert "| 2.00 (one round) | 2.00 (one round) |" in told(run)[PEERS[2].name]
    assert text_of(run, PEERS).endswith("torch 2 and 3.")


def test_one_who_fails_or_did_not_run_has_a_row_with_the_reason(tmp_path):
    run = run_in(tmp_path)
    run.calls[f"{PEERS[0].name}, 56x56, 0"] = {"reason": "died, exit code -9", "load": 1.0}
    run.exports[PEERS[2].files] = {"seconds": 1.0, "bytes": 0, "reason": "no such model"}
    rows = told(run)
    assert "| died, exit code -9 | - |" in rows[PEERS[0].name]
    assert "| no such model | - |" in rows[PEERS[2].name]
    assert "| not run | - |" in rows[PEERS[1].name]


@pytest.mark.parametrize(
    ("rows", "reason"), [(3.0, "rows of shape"), (1 + 2 * WRONG, "wrong rows, no error")]
)
def test_other_rows_than_the_reference_has_are_named(rows, reason):
    exact = np.ones((4, 3))
    assert reason in compared(np.ones((2, 3)) if rows == 3.0 else exact * rows, exact)["reason"]
    assert compared(exact * 1.001, exact)["error"] == pytest.approx(1e-3)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise SystemExit('no such | model')", "no such / model"),
        ("raise SystemExit(124)", "stopped after 9 s"),
        ("import os; os.kill(os.getpid(), 9)", "died, exit code -9"),
    ],
)
def test_a_failure_has_its_last_words_or_what_ended_it(tmp_path, code, reason):
    ended = step("x", [sys.executable, "-c", code], {}, GIB, tmp_path / "log")
    assert run_in(tmp_path).failure(ended) == {"reason": reason}


@pytest.mark.slow
def test_peers_are_measured_in_processes_of_their_own_and_a_run_goes_on(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- measured, written by `python -m benchmarks.peers` -->\n<!-- end of measured -->\n")
    options = ["--depth", "1", "--sizes", "56x84", "--threads", "1", "--rounds", "1", "--page"]
    words = [str(tmp_path), *options, str(page)]
    main([*words, "--peers", "transformers float32"])
    calls = tmp_path / "depth-1" / "results.json"
    before = json.loads(calls.read_text())
    assert before["calls"][f"{PEERS[0].name}, 56x84, 0"]["error"] < 1e-5
    assert f"{PEERS[0].name}, {ANSWER}56x84, 0" in before["calls"]
    main([*words, "--peers", "transformers"])
    after = json.loads(calls.read_text())
    assert {name: after["calls"][name] for name in before["calls"]} == before["calls"]
    assert 1e-4 < after["calls"][f"{PEERS[1].name}, 56x84, 0"]["error"] < WRONG
    assert "| transformers bfloat16 | - |" in page.read_text()
    assert page.read_text().splitlines()[1] == capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow
def test_a_picture_is_encoded_whole_by_others_and_without_plain_cells_by_ours(tmp_path, capsys):
    pixels = np.full((112, 112, 3), 255, np.uint8)
    pixels[:28] = np.random.default_rng(0).integers(0, 256, (28, 112, 3))
    Image.fromarray(pixels).save(tmp_path / "slide.png")
    peers = ["transformers float32", "vlexport onnxruntime int8 predicted"]
    words = ["--depth", "1", "--threads", "1", "--rounds", "1", "--sizes", str(tmp_path / "slide.png")]
    main([str(tmp_path), *words, "--peers", *peers])
    table = capsys.readouterr().out
    whole, ours = (
        next(line for line in table.splitlines() if line.startswith(f"| {name} ")) for name in peers
    )
    assert "| 16 rows |" in whole
    # A row of noise, and one plain cell that stands for all others.
    assert "| 5 rows |" in ours
    assert ANSWER not in table.lower()
