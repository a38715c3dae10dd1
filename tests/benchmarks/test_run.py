"""Real processes of a tiny plan, and one in here: measured, stored, taken up again, ended when too much."""

from dataclasses import replace

import pytest
import torch

from benchmarks.plans import BASELINE, FULL, QUICK, Contender, Plan, Question, Workload, contenders
from benchmarks.pool import Failure, Pool
from benchmarks.results import read_result
from benchmarks.run import RunOptions, run, with_twins
from benchmarks.towers import TowerSize, default_recipe, write_tower
from benchmarks.worker import Job, Server, attend_densely, segment_ids
from vlexport.backends import backend_names, find_backend, runs_here
from vlexport.errors import RequestError
from vlexport.vision.attention.kernels import segment_attention

SMALL = Workload(name="small", grids=((1, 8, 8),), rounds=2)
PLAN = Plan(
    name="made",
    size=TowerSize(depth=2, width=32, heads=2, inner=48, out=32, full_blocks=(1,)),
    workloads=(SMALL,),
    gemm=(8, 8, 8),
    dense_patches=64,
    seconds=60,
    build_seconds=300,
    prepare_seconds=300,
    sample_seconds=300,
)
TINY = replace(
    PLAN,
    dense_patches=512,
    kinds=("eager", "exporter", "dense"),
    exporters=("onnx",),
    precisions=("float32",),
    workloads=(Workload(name="off the grid", grids=((1, 10, 14),), rounds=2),),
)
EAGER = Contender(name=BASELINE, kind="eager")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def still():
    """Somebody may edit the library while tests run; its sources are part of what is taken up again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.run.source_digest", lambda *_: "still")
        yield


@pytest.fixture(scope="module")
def stored(folder, still):
    run(RunOptions(plan=TINY, out=folder / "tiny.json", threads=1), lambda _: None)
    return folder / "tiny.json"


@pytest.mark.slow
def test_a_run_stores_a_sample_of_every_contender_and_round(stored):
    cell = read_result(stored).cells["off the grid"]
    assert {name: len(entry.seconds) for name, entry in cell.entries.items() if entry.status == "timed"} == {
        BASELINE: 2,
        "dense masks in onnxruntime": 2,
    }
    assert [len(each.order) for each in cell.rounds] == [2, 2]
    for name in (BASELINE, "dense masks in onnxruntime"):
        entry = cell.entries[name]
        assert len(entry.peak_bytes) == 2
        assert all(0 < base <= peak for base, peak in zip(entry.base_bytes, entry.peak_bytes, strict=True))


@pytest.mark.slow
def test_a_twin_runs_beside_its_original_twice_a_round(tmp_path, still):
    plan = replace(TINY, kinds=("eager", "ours"), twin="eager float32")
    (cell,) = run(RunOptions(plan=plan, out=tmp_path / "x.json", threads=1), lambda _: None).cells.values()
    assert [len(each.twins) for each in cell.rounds] == [2, 2]
    for index, each in enumerate(cell.rounds):
        for name, at in (("eager float32", 0), ("eager float32 (twin)", 1)):
            mean = sum(pair[at] for pair in each.twins) / 2
            assert cell.entries[name].seconds[index] == pytest.approx(mean)


def test_the_order_of_a_round_holds_twins_together_there_and_back():
    names = ["a", "b", "c", "b (twin)"]
    for index, pair in ((0, ["b", "b (twin)"]), (1, ["b (twin)", "b"])):
        order = with_twins(names, index, 0)
        at = order.index(pair[0])
        assert order[at : at + 4] == [*pair, *reversed(pair)]
        assert sorted(set(order)) == sorted(names)
    # The original gave up.
    assert sorted(with_twins(["a", "b (twin)"], 0, 0)) == ["a"]


@pytest.mark.slow
def test_contenders_are_compared_with_the_baseline_and_wrong_ones_get_no_time(stored):
    entries = read_result(stored).cells["off the grid"].entries
    right, wrong = entries["dense masks in onnxruntime"], entries["transformers exporter onnx"]
    # 3e-6 measured: float32 rounding of a tower of depth 2.
    assert right.relative_l2 is not None
    assert right.relative_l2 < 2e-5
    assert right.min_cosine is not None
    assert right.min_cosine > 0.9999
    assert (wrong.status, wrong.seconds) == ("wrong", [])
    assert wrong.reason.startswith("wrong tokens, no error raised: relative L2 ")


@pytest.mark.slow
def test_stored_cells_are_taken_up_by_a_run_with_more_time_and_by_no_other_plan(stored):
    phases: list[str] = []
    run(RunOptions(plan=replace(TINY, seconds=7200), out=stored, threads=1), phases.append)
    assert phases == []
    assert replace(TINY, least_rounds=4).digest() != TINY.digest()


@pytest.mark.slow
def test_a_question_is_asked_at_every_rate_and_pays_for_its_tower_every_time(tmp_path, still):
    question = Question(name="asked", frames=4, side=56, new_tokens=3, rounds=2)
    options = RunOptions(
        plan=replace(PLAN, questions=(question,)), out=tmp_path / "run.json", threads=1, only=("asked",)
    )
    phases: list[str] = []
    (cell,) = run(options, phases.append).questions.values()
    assert [(each.rate, each.visual_tokens) for each in cell.answers] == [(0.0, 8), (0.5, 4), (0.75, 4)]
    assert {len(each.rounds) for each in cell.answers} == {2}
    assert min(seconds for each in cell.answers for seconds in each.column("tower")) > 0
    assert min(seconds for each in cell.answers for seconds in each.column("per_token")) > 0
    run(options, phases.append)
    assert phases == ["questions"]


def test_an_unknown_workload_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(RequestError, match=r"no workload 'three' in plan 'made'\. Known: 'off the grid'\."):
        RunOptions(plan=TINY, out=tmp_path / "x.json", only=("three",))


def test_dense_masks_are_not_given_calls_that_they_cannot_hold():
    dense = Contender(name="dense", kind="dense", library="onnxruntime")
    large = [each.patches for each in FULL.workloads if dense.refuses(FULL, each)]
    assert sorted(large) == [6360, 8192, 10764, 16384, 25024]
    assert not any(replace(dense, kind="compiled").refuses(FULL, each) for each in FULL.workloads)


def test_plans_show_growth_over_four_sizes_and_every_backend_behind_the_baseline():
    for plan in (FULL, QUICK):
        assert len({each.patches for each in plan.workloads if each.series == "frames"}) >= 4
        named = [each.name for each in plan.workloads] + [each.name for each in plan.questions]
        assert len(named) == len(set(named))
    names = [each.name for each in contenders(FULL)]
    assert names[0] == BASELINE
    assert {"eager float32", "onnxruntime float32", "onnxruntime float32 (twin)"} <= set(names)


@pytest.fixture(scope="module")
def tower(folder):
    return write_tower(folder / "tower", default_recipe(), PLAN.size)


def pool_of(tower, cap=0, **changed):
    return Pool(plan=replace(PLAN, **changed), tower=tower, folder=tower.parent, threads=1, memory_cap=cap)


@pytest.mark.slow
def test_another_workload_is_taken_by_the_process_that_runs_and_an_error_comes_back_as_a_reason(tower):
    with pool_of(tower) as pool:
        pool.take(EAGER, SMALL)
        (before,) = pool.running.values()
        assert pool.sample(EAGER, replace(SMALL, name="wider", grids=((1, 8, 16),)))["seconds"] > 0
        assert list(pool.running.values()) == [before]
        with pytest.raises(Failure, match="Error: "):
            pool.take(EAGER, replace(SMALL, grids=((1, 8, 7),)))


@pytest.mark.slow
def test_a_contender_that_takes_too_long_or_outgrows_the_cap_is_ended(tower):
    for pool, reason in (
        (pool_of(tower, prepare_seconds=0), "more than the time allowed"),
        (pool_of(tower, cap=50 * 2**20), r"more than the cap of 0\.0 GiB of memory"),
    ):
        with pool, pytest.raises(Failure, match=reason) as failure:
            pool.take(EAGER, SMALL)
        assert failure.value.too_slow == ("time" in reason)
        assert pool.running == {}


@pytest.mark.slow
def test_the_contender_used_longest_ago_makes_room(tower):
    other = Contender(name="another", kind="eager")
    with pool_of(tower) as pool:
        held = pool.take(EAGER, SMALL)["peak"]
        pool.memory_cap = int(1.5 * held)
        pool.take(other, SMALL)
        assert list(pool.running) == ["another"]
        assert pool.sample(EAGER, SMALL)["seconds"] > 0
        assert list(pool.running) == [BASELINE]


HERE = [
    pytest.param(name, marks=[pytest.mark.slow] * (name == "inductor"))
    for name in backend_names()
    if runs_here(find_backend(name))
]
SIZE = TowerSize(depth=3, width=32, heads=2, inner=64, out=16, full_blocks=(1,))
RUNS = torch.tensor([[2, 3], [1, 4], [3, 5]], dtype=torch.int32)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory):
    return write_tower(tmp_path_factory.mktemp("tower") / "tower", default_recipe(), SIZE)


def server_of(contender, windowed, folder):
    return Server(Job(contender=contender, tower=windowed, folder=folder, threads=1, gemm=(8, 16, 24)))


@pytest.mark.seconds
@pytest.mark.parametrize("library", HERE)
def test_a_bare_product_runs_in_every_library(library, windowed, tmp_path):
    """It is the yardstick; a library whose own is missing is held against another's."""
    torch.manual_seed(0)
    server = server_of(
        Contender(name="product", kind="product", library=library), windowed, tmp_path / "files"
    )
    server.open(server.build()[1])
    server.load([])
    found = server.run()
    assert found.shape == (8, 24)
    assert torch.isfinite(found).all()
    assert 0.5 < float(found.std()) < 2, "products of 16 terms of size 1/4"


def test_rows_share_a_number_with_the_rows_of_their_segment_only():
    ids = segment_ids(RUNS, 25)
    lengths = ids.unique_consecutive(return_counts=True)[1]
    assert lengths.tolist() == [3, 3, 4, 5, 5, 5]
    assert len(ids.unique()) == 6


def test_dense_masks_give_what_segments_give():
    source = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(25, 2, 8, generator=source) for _ in range(3))
    found, expected = attend_densely(q, k, v, RUNS, 0.3), segment_attention(q, k, v, RUNS, 0.3)
    # 4.8e-7 measured: both are float32 softmax attention of 25 rows, summed in another order.
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


def expected_operations(patches, window_scores, full_scores):
    width, inner, wide = SIZE.width, SIZE.inner, 4 * SIZE.width
    block = 2 * (3 * width * width + width * width + 3 * width * inner)
    merger = 2 * (wide * wide + wide * SIZE.out)
    linear = patches * (2 * 1176 * width + SIZE.depth * block) + patches // 4 * merger
    return linear + 4 * width * (2 * window_scores + full_scores)


def test_a_call_of_another_shape_is_counted_from_one_small_call(windowed, tmp_path):
    server = server_of(Contender(name="count", kind="eager"), windowed, tmp_path / "files")
    ((operations, scores),) = server.count([(1, 16, 8)], [[(1, 8, 12), (2, 8, 8)]])
    windows, full = 3 * 64**2 + 32**2, 96**2 + 2 * 64**2
    assert operations == expected_operations(96 + 128, windows, full)
    assert sorted(needed for _, needed in scores.values()) == sorted([windows, full])


def test_a_random_tower_is_the_tower_alone(windowed, tmp_path):
    checkpoint = server_of(Contender(name="x", kind="eager"), windowed, tmp_path).checkpoint
    assert {name.split(".")[0] for name in checkpoint.tensor_names()} == {"visual"}
    assert checkpoint.view.section("vision_config").get_ints("fullatt_block_indexes", ()) == (1,)
