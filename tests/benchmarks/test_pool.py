"""Real processes: they answer, and they are ended when they take too much."""

from dataclasses import replace

import pytest

from benchmarks.contenders import BASELINE, Contender
from benchmarks.plans import Plan, Workload
from benchmarks.pool import Child, Pool, Stage
from benchmarks.towers import TowerSize, default_recipe, write_tower
from benchmarks.worker import Failure

pytestmark = pytest.mark.slow

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
EAGER = Contender(name=BASELINE, kind="eager")


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("children")
    tower = write_tower(folder / "tower", default_recipe(), PLAN.size)
    return Stage(plan=PLAN, tower=tower, folder=folder, threads=1, memory_cap=0)


@pytest.fixture(scope="module")
def pool(stage):
    with Pool(stage) as found:
        found.take(EAGER, SMALL)
        yield found


def answered(answer):
    assert not isinstance(answer, Failure), answer.reason
    return answer


def test_another_workload_is_taken_by_the_process_that_runs(pool):
    (before,) = pool._running.values()
    assert answered(pool.sample(EAGER, replace(SMALL, name="wider", grids=((1, 8, 16),))))["seconds"] > 0
    assert list(pool._running.values()) == [before]


def test_what_a_library_raises_comes_back_as_a_reason(stage):
    child = Child(stage, EAGER, SMALL)
    try:
        answer = child.ask(60, "take", [(1, 8, 7)], None, None)
    finally:
        child.close()
    assert isinstance(answer, Failure)
    assert "Error: " in answer.reason


def test_a_contender_that_takes_too_long_is_ended_and_not_asked_again(stage):
    hurried = replace(stage, plan=replace(PLAN, prepare_seconds=0))
    with Pool(hurried) as pool:
        assert pool.take(EAGER, SMALL) == Failure(reason="more than the time allowed", too_slow=True)
        assert pool.too_slow(EAGER) == "ran out of time at 'small'"
        assert pool._running == {}


def test_a_contender_that_outgrows_the_cap_is_ended(stage):
    with Pool(replace(stage, memory_cap=50 * 2**20)) as pool:
        answer = pool.take(EAGER, SMALL)
    assert answer == Failure(reason="more than the cap of 0.0 GiB of memory")


def test_the_contender_used_longest_ago_makes_room(stage):
    other = Contender(name="another", kind="eager")
    with Pool(stage) as pool:
        held = answered(pool.take(EAGER, SMALL))["most"]
        pool.stage = replace(stage, memory_cap=int(1.5 * held))
        pool.take(other, SMALL)
        assert list(pool._running) == ["another"]
        assert answered(pool.sample(EAGER, SMALL))["seconds"] > 0
        assert list(pool._running) == [BASELINE]
