"""A whole run of a tiny plan: measured, stored, taken up again."""

from dataclasses import replace

import pytest

from tests.bench.test_children import PLAN
from vlexport.bench.cells import order_of
from vlexport.bench.contenders import BASELINE, Contender, contenders
from vlexport.bench.plans import FULL, QUICK, Workload
from vlexport.bench.results import read_result
from vlexport.bench.run import Asked, run
from vlexport.errors import RequestError

TINY = replace(
    PLAN,
    dense_patches=512,
    kinds=("eager", "dense"),
    workloads=(Workload(name="two", grids=((1, 8, 12), (2, 4, 4)), rounds=2),),
)


def watch(phases):
    def progress(phase, share):
        phases.append(phase)

    return progress


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "tiny.json"
    phases: list[str] = []
    run(Asked(plan=TINY, out=path, threads=1), watch(phases))
    return path


def test_a_run_stores_a_sample_of_every_contender_and_round(stored):
    cell = read_result(stored).cells["two"]
    assert {name: entry.reason for name, entry in cell.entries.items()} == dict.fromkeys(cell.entries, "")
    assert [len(entry.seconds) for entry in cell.entries.values()] == [2, 2]
    assert [len(each.order) for each in cell.rounds] == [2, 2]


def test_a_contender_is_held_against_the_baseline_before_it_is_timed(stored):
    entry = read_result(stored).cells["two"].entries["dense masks in onnxruntime"]
    assert entry.relative_l2 is not None
    assert entry.min_cosine is not None
    # 3e-6 measured: float32 rounding of a tower of depth 2.
    assert entry.relative_l2 < 2e-5
    assert entry.min_cosine > 0.9999


def test_cells_that_are_stored_are_not_measured_again(stored):
    phases: list[str] = []
    run(Asked(plan=TINY, out=stored, threads=1), watch(phases))
    assert phases == []


def test_an_unknown_workload_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(RequestError, match=r"no workload 'three' in plan 'made'\. Known: 'two'\."):
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
