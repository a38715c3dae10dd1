"""Gains of pruning from samples that were made up, and a whole question of a tiny plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.test_children import PLAN
from tests.bench.test_run import still, watch
from vlexport.bench.gains import gains, table
from vlexport.bench.page import summary
from vlexport.bench.plans import FULL, QUICK, Question
from vlexport.bench.results import Answered, QuestionCell, Result, read_result
from vlexport.bench.run import Asked, run


def made(rate: float, prompt_tokens: int, prefill: float, per_token: float) -> Answered:
    """Preprocessing takes a second and the tower two, whatever the rate."""
    stages = {"preprocess": 1.0, "tower": 2.0, "prune": 0.25 if rate else 0.0, "positions": 0.0}
    first = sum(stages.values()) + prefill
    seconds = {**stages, "prefill": prefill, "first_token": first, "per_token": per_token}
    return Answered(rate=rate, prompt_tokens=prompt_tokens, visual_tokens=prompt_tokens, rounds=[seconds] * 3)


__all__ = ["still"]

CELL = QuestionCell(
    question="made",
    frames=8,
    side=224,
    new_tokens=4,
    answers=[made(0.0, 1000, 5.0, 0.5), made(0.75, 400, 1.75, 0.25)],
)


def test_no_pruning_is_held_against_itself():
    whole, _ = gains(CELL)
    assert (whole.sooner.median, whole.allowed, whole.faster.median) == (1.0, 1.0, 1.0)


def test_a_gain_stands_beside_what_the_share_of_the_tower_allows():
    _, pruned = gains(CELL)
    assert pruned.first_token == 5.0
    assert pruned.sooner.median == 8.0 / 5.0
    # 3 s are left whatever is dropped, and 5 s of prefill become 2 with 400 tokens of 1,000.
    assert pruned.allowed == 8.0 / 5.0
    assert pruned.ceiling == 8.0 / 3.0
    assert (pruned.tokens_per_second, pruned.faster.median) == (4.0, 2.0)


def test_the_table_shows_every_rate_with_its_bounds():
    head, whole, pruned = (line.split(" | ") for line in table(CELL) if line.startswith("| "))
    assert len(head) == len(whole) == len(pruned)
    assert pruned[:7] == ["| 75%", "400", "1", "2", "0.25", "1.75", "5"]
    assert pruned[7:] == ["1.60 (1.60 to 1.60)", "1.60", "2.67", "4.0", "2.00 (2.00 to 2.00) |"]


def test_questions_are_stored_with_the_run_and_shown_with_it(tmp_path):
    result = Result(
        plan={"name": "made", "slow_probe": 0.6},
        key="k",
        machine={"processors": 2, "threads": 2, "processor": "x", "memory_gib": 1, "versions": {}},
        cells={},
        questions={"made": CELL},
    )
    result.save(tmp_path / "run.json")
    found = read_result(tmp_path / "run.json")
    assert found == result
    assert "### Made\n" in summary(found)


def test_a_question_is_asked_at_every_rate_and_pays_for_its_tower_every_time(tmp_path, still):
    question = Question(name="asked", frames=4, side=56, new_tokens=3, rounds=2)
    size = replace(PLAN.size, out=32)
    plan = replace(PLAN, size=size, questions=(question,))
    path = tmp_path / "run.json"
    asked, phases = Asked(plan=plan, out=path, threads=1, only=("asked",)), list[str]()
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
