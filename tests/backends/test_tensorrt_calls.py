"""Calls by shape: replays, buffers that stay, what is given up and when. The GPU is a stand-in."""

import logging

import pytest
import torch
from torch import Tensor

from tests.backends.stand_in import SILENT, Context, HostGpu
from vlexport.backends._tensorrt import calls as module
from vlexport.backends._tensorrt.calls import MOST_CALLS, Calls


@pytest.fixture
def gpu() -> HostGpu:
    return HostGpu()


@pytest.fixture
def contexts() -> list[Context]:
    """All that were ever made."""
    return []


@pytest.fixture
def calls(gpu: HostGpu, contexts: list[Context]) -> Calls:
    def create(profile: int) -> Context:
        contexts.append(Context(gpu, profile))
        return contexts[-1]

    return Calls(create=create, outputs={"y": "float32"}, own_capture=True, gpu=gpu, log=SILENT)


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))


def check(calls: Calls, given: Tensor, profile: int = 0) -> Tensor:
    found = calls.run(profile, {"x": given})["y"]
    torch.testing.assert_close(found, given.sum(1) * (profile + 1))
    return found


def test_the_first_call_runs_as_it_is_and_later_ones_replay_one_capture(calls: Calls, gpu: HostGpu):
    for seed in range(5):
        check(calls, rows(4, seed))
    assert (calls.num_replays, gpu.num_captures) == (4, 1)


def test_each_shape_and_each_profile_has_a_graph_of_its_own(calls: Calls, gpu: HostGpu, contexts):
    for seed in range(3):
        check(calls, rows(4, seed))
        check(calls, rows(4, seed), profile=1)
        check(calls, rows(3, seed))
    assert (calls.num_replays, gpu.num_captures, len(contexts)) == (6, 3, 3)


def test_a_result_is_not_touched_by_the_next_call(calls: Calls):
    first = check(calls, rows(4, 0))
    kept = first.clone()
    check(calls, rows(4, 1))
    assert torch.equal(first, kept)


def test_rows_that_do_not_lie_side_by_side_are_taken_as_they_are(calls: Calls):
    for _ in range(3):
        check(calls, rows(3).T)


def test_the_call_that_was_not_used_longest_is_given_up(calls: Calls, contexts: list[Context]):
    check(calls, rows(MOST_CALLS + 1))
    for count in range(1, MOST_CALLS + 1):
        check(calls, rows(count))
    assert len(contexts) == MOST_CALLS + 1
    check(calls, rows(1))
    assert len(contexts) == MOST_CALLS + 1
    check(calls, rows(MOST_CALLS + 1))
    assert len(contexts) == MOST_CALLS + 2


def test_buffers_take_no_more_of_the_gpu_than_they_may(calls: Calls, contexts, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    # 64 bytes each: three numbers and their sum in four rows, twelve and four.
    for profile in (0, 1, 0, 1):
        check(calls, rows(4), profile)
    assert len(contexts) == 4
    check(calls, rows(40))
    assert len(calls._kept) == 1, "one call is always kept, whatever it takes"


def test_a_call_that_needs_more_scratch_memory_ends_the_graphs_over_the_old_one(calls: Calls, gpu, contexts):
    for seed in range(3):
        check(calls, rows(4, seed))
    check(calls, rows(400))
    for seed in range(3):
        check(calls, rows(4, seed))
    assert (gpu.num_captures, len(contexts)) == (2, 3)
    assert {context.scratch for context in contexts[1:]} == {contexts[1].scratch}


def test_where_capturing_fails_calls_run_as_they_are_and_it_is_told_once(calls: Calls, gpu, caplog):
    gpu.refuses = True
    with caplog.at_level(logging.WARNING):
        for seed in range(4):
            check(calls, rows(4, seed))
            check(calls, rows(3, seed))
    assert (calls.num_replays, gpu.num_captures) == (0, 1)
    (told,) = caplog.messages
    assert "which costs time only: operation not permitted when stream is capturing" in told


def test_what_the_library_says_cannot_be_captured_is_not_tried(calls: Calls, gpu: HostGpu, monkeypatch):
    monkeypatch.setattr(Context, "is_stream_capturable", lambda *_: False)
    for seed in range(3):
        check(calls, rows(4, seed))
    assert (calls.num_replays, gpu.num_captures) == (0, 0)


def test_a_library_that_captures_by_itself_is_left_alone(calls: Calls, gpu: HostGpu):
    calls.own_capture = False
    for seed in range(3):
        check(calls, rows(4, seed))
    assert (calls.num_replays, gpu.num_captures) == (0, 0)


def test_after_closing_nothing_is_held(calls: Calls, gpu: HostGpu):
    check(calls, rows(4))
    calls.close()
    assert [found() for found in gpu.memory.values() if found() is not None] == []
