"""A whole run of a tiny plan: measured, stored, taken up again."""

from dataclasses import replace

import pytest

from benchmarks.contenders import BASELINE, Contender, contenders
from benchmarks.plans import FULL, QUICK, Question, Workload
from benchmarks.results import read_result
from benchmarks.run import RunOptions, run
from tests.benchmarks.test_pool import PLAN
from vlexport.errors import RequestError

pytestmark = pytest.mark.slow

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
        patch.setattr("benchmarks.run.source_digest", lambda *_: "still")
        yield


@pytest.fixture(scope="module")
def stored(tmp_path_factory, still):
    path = tmp_path_factory.mktemp("run") / "tiny.json"
    phases: list[str] = []
    run(RunOptions(plan=TINY, out=path, threads=1), watch(phases))
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
    run(RunOptions(plan=TINY, out=stored, threads=1), watch(phases))
    assert phases == []


def test_cells_are_taken_up_by_a_run_with_more_time_and_by_no_other_plan(stored):
    assert replace(TINY, seconds=7200).digest() == TINY.digest()
    assert replace(TINY, least_rounds=4).digest() != TINY.digest()
    phases: list[str] = []
    run(RunOptions(plan=replace(TINY, seconds=7200), out=stored, threads=1), watch(phases))
    assert phases == []


def test_an_unknown_workload_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(RequestError, match=r"no workload 'three' in plan 'made'\. Known: 'off the grid'\."):
        run(RunOptions(plan=TINY, out=tmp_path / "x.json", only=("three",)), watch([]))


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


def test_a_question_is_asked_at_every_rate_and_pays_for_its_tower_every_time(tmp_path, still):
    question = Question(name="asked", frames=4, side=56, new_tokens=3, rounds=2)
    plan = replace(PLAN, questions=(question,))
    path = tmp_path / "run.json"
    asked, phases = RunOptions(plan=plan, out=path, threads=1, only=("asked",)), list[str]()
    result = run(asked, watch(phases))
    (cell,) = result.questions.values()
    assert [(each.rate, each.visual_tokens) for each in cell.answers] == [(0.0, 8), (0.5, 4), (0.75, 4)]
    assert {len(each.rounds) for each in cell.answers} == {2}
    for answered in cell.answers:
        assert min(answered.column("tower")) > 0
        assert min(answered.column("per_token")) > 0
    run(asked, watch(phases))
    assert phases == ["questions"]


@pytest.mark.parametrize("plan", [FULL, QUICK], ids=["full", "quick"])
def test_names_of_workloads_and_questions_differ(plan):
    names = [*(each.name for each in plan.workloads), *(each.name for each in plan.questions)]
    assert len(names) == len(set(names))
