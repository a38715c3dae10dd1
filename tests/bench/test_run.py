"""A whole run of a tiny plan: measured, stored, taken up again."""

from dataclasses import replace

import pytest

from tests.bench.test_children import PLAN
from vlexport.bench.cells import order_of
from vlexport.bench.clock import rounds_budget
from vlexport.bench.contenders import BASELINE, Contender, contenders
from vlexport.bench.plans import FULL, QUICK, Workload
from vlexport.bench.results import Entry, read_result
from vlexport.bench.run import Asked, run
from vlexport.errors import RequestError

TINY = replace(
    PLAN,
    dense_patches=512,
    kinds=("eager", "exporter", "dense"),
    exporters=("onnx",),
    dtypes=("float32",),
    workloads=(Workload(name="off the grid", grids=((1, 10, 14),), rounds=2),),
)


def watch(phases):
    def progress(phase, share):
        phases.append(phase)

    return progress


@pytest.fixture(scope="module")
def still():
    """Somebody may edit the library while tests run; its sources are part of what is taken up again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vlexport.bench.run.source_digest", lambda *_: "still")
        yield


@pytest.fixture(scope="module")
def stored(tmp_path_factory, still):
    path = tmp_path_factory.mktemp("run") / "tiny.json"
    phases: list[str] = []
    run(Asked(plan=TINY, out=path, threads=1), watch(phases))
    return path


def test_a_run_stores_a_sample_of_every_contender_and_round(stored):
    cell = read_result(stored).cells["off the grid"]
    assert {name: len(entry.seconds) for name, entry in cell.entries.items() if entry.status == "timed"} == {
        BASELINE: 2,
        "dense masks in onnxruntime": 2,
    }
    assert [len(each.order) for each in cell.rounds] == [2, 2]


def test_a_contender_is_held_against_the_baseline_before_it_is_timed(stored):
    entry = read_result(stored).cells["off the grid"].entries["dense masks in onnxruntime"]
    assert entry.relative_l2 is not None
    assert entry.min_cosine is not None
    # 3e-6 measured: float32 rounding of a tower of depth 2.
    assert entry.relative_l2 < 2e-5
    assert entry.min_cosine > 0.9999


def test_a_contender_with_wrong_tokens_gets_no_time_and_says_so(stored):
    entry = read_result(stored).cells["off the grid"].entries["transformers exporter onnx"]
    assert (entry.status, entry.seconds) == ("wrong", [])
    assert entry.reason.startswith("wrong tokens, no error raised: relative L2 ")


def test_cells_that_are_stored_are_not_measured_again(stored):
    phases: list[str] = []
    run(Asked(plan=TINY, out=stored, threads=1), watch(phases))
    assert phases == []


def test_cells_are_taken_up_by_a_run_with_more_time_and_by_no_other_plan(stored):
    assert replace(TINY, seconds=7200).digest() == TINY.digest()
    assert replace(TINY, least_rounds=4).digest() != TINY.digest()
    phases: list[str] = []
    run(Asked(plan=replace(TINY, seconds=7200), out=stored, threads=1), watch(phases))
    assert phases == []


def test_an_unknown_workload_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(RequestError, match=r"no workload 'three' in plan 'made'\. Known: 'off the grid'\."):
        run(Asked(plan=TINY, out=tmp_path / "x.json", only=("three",)), watch([]))


def test_a_round_goes_back_the_way_the_one_before_came():
    names = ["a", "b", "c", "d", "e"]
    assert order_of(names, 3, 0) == order_of(names, 2, 0)[::-1]
    assert sorted(order_of(names, 0, 0)) == names
    assert order_of(names, 0, 0) != order_of(names, 2, 0)


def test_dense_masks_are_not_given_calls_that_they_cannot_hold():
    dense = Contender(name="dense", kind="dense", library="onnxruntime")
    large = [each.name for each in FULL.workloads if not dense.refuses(FULL, each)]
    assert large == ["one 448x448 image", "32 images of 10x14 patches", "five sizes, one a video"]


@pytest.mark.parametrize("plan", [FULL, QUICK], ids=["full", "quick"])
def test_a_plan_shows_growth_over_four_sizes_or_more(plan):
    assert len({each.patches for each in plan.workloads if each.series == "frames"}) >= 4


def test_the_baseline_comes_first_and_every_backend_takes_part():
    everybody = contenders(FULL)
    assert everybody[0].name == BASELINE
    assert {"eager float32", "onnxruntime float32", "onnxruntime float32 (twin)"} <= {
        each.name for each in everybody
    }


def entries_of(seconds):
    return {"x": Entry(status="timed", kind="ours", dtype="float32", first_seconds=seconds)}


def test_the_only_workload_left_gets_all_the_time():
    (workload,) = TINY.workloads
    assert rounds_budget(100.0, [workload], entries_of(1.0)) == 100.0


def test_time_is_put_aside_for_later_workloads_to_get_ready():
    first = Workload(name="a", grids=((1, 10, 10),), rounds=2)
    second = Workload(name="b", grids=((1, 10, 30),), rounds=2)
    # 300 patches at 0.01 s, twice, are 6 s; a quarter of all rounds' patches is the first one's.
    assert rounds_budget(100.0, [first, second], entries_of(1.0)) == pytest.approx(94.0 / 4)


def test_time_that_is_gone_is_gone():
    assert rounds_budget(-5.0, list(TINY.workloads), entries_of(1.0)) == 0.0
