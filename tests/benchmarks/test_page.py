"""Conclusions from samples that were made up, so that every one is known."""

from dataclasses import replace

import pytest

from benchmarks.contenders import BASELINE
from benchmarks.page import (
    BEGIN,
    END,
    answer_table,
    bounds,
    findings,
    growth,
    is_void,
    kept_rounds,
    log_slope,
    summary,
    timed,
    twin,
    write_between,
)
from benchmarks.results import Answered, QuestionCell, Result, read_result
from tests.benchmarks.made_cells import made_cell, made_entry
from vlexport.errors import RequestError

STEADY = {BASELINE: [4.0, 4.0, 4.0, 4.0], "x float32": [2.0, 2.0, 2.0, 2.0]}


def by_name(cell):
    return {finding.name: finding for finding in findings(cell, 0.6)}


def test_a_contender_is_measured_against_the_baseline_of_the_same_round():
    cell = made_cell({BASELINE: [4.0, 40.0, 4.0], "x float32": [2.0, 20.0, 2.0]})
    assert by_name(cell)["x float32"].faster.low == 2.0


def test_the_ceiling_is_the_fastest_product_of_the_same_round():
    cell = made_cell(STEADY, {"product in a": [1.0] * 4, "product in b": [0.5] * 4})
    assert by_name(cell)["x float32"].of_ceiling.median == 0.25


def test_rounds_with_a_slow_product_do_not_count():
    cell = made_cell(STEADY, {"product in a": [0.5, 0.5, 2.0, 0.5]})
    assert kept_rounds(cell, 0.6) == [0, 1, 3]


def test_all_rounds_count_where_too_few_would_be_left():
    cell = made_cell(STEADY, {"product in a": [0.5, 2.0, 2.0, 0.5]})
    assert kept_rounds(cell, 0.6) == [0, 1, 2, 3]


def test_a_contender_that_gave_up_between_rounds_has_no_time():
    cell = made_cell(STEADY)
    entries = {**cell.entries, "y float32": made_entry([1.0], status="failed")}
    assert "y float32" not in timed(replace(cell, entries=entries))


def test_a_twin_that_equals_itself_makes_the_cell_count():
    cell = made_cell({**STEADY, "x float32 (twin)": [2.0, 2.02, 1.98, 2.0]})
    assert not is_void(twin(cell, 0.6))


@pytest.mark.parametrize("seconds", [[2.2, 2.2, 2.2, 2.2], [1.0, 3.0, 1.0, 3.0]], ids=["shifted", "blurred"])
def test_a_twin_that_is_not_itself_voids_the_cell(seconds):
    assert is_void(twin(made_cell({**STEADY, "x float32 (twin)": seconds}), 0.6))


def test_memory_is_what_a_run_took_on_top():
    assert made_entry([1.0]).growth_bytes == 5e7


def test_memory_that_fell_during_a_run_is_unknown_and_no_growth():
    entry = replace(made_entry([1.0]), base_bytes=2e9, peak_bytes=1.9e9)
    assert entry.growth_bytes is None


def test_growth_needs_four_sizes_and_is_an_exponent():
    cells = {
        str(size): made_cell({BASELINE: [size**1.2] * 3}, patches=size, name=str(size))
        for size in (100, 200, 400, 800)
    }
    result = Result(plan={"slow_probe": 0.6}, key="", machine={}, cells=cells)
    sizes, of_seconds, _ = growth(result, "frames")[BASELINE]
    assert sizes == 4
    assert of_seconds == pytest.approx(1.2, rel=1e-9)


def a_result():
    lost = replace(made_entry([], status="wrong"), reason="wrong tokens, no error raised")
    cell = made_cell(STEADY)
    machine = {"threads": 2, "processors": 2, "processor": "p", "memory_gib": 8, "versions": {"torch": "2"}}
    cells = {"made": replace(cell, entries={**cell.entries, "y": lost})}
    return Result(plan={"slow_probe": 0.6, "name": "made"}, key="", machine=machine, cells=cells)


def test_the_page_lists_those_who_lost_with_the_reason():
    assert "| y | wrong: wrong tokens, no error raised |" in summary(a_result())


def test_the_page_shows_padding_and_memory_per_patch():
    text = summary(a_result())
    assert "scores computed over needed: window 1.00, full 1.50." in text
    assert "| x float32 | 2 | 2.00 (2.00 to 2.00) |  | 50 |  |" in text


def test_one_outlier_does_not_move_a_slope_of_five_sizes_to_that_of_a_square():
    sizes = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert log_slope(sizes, [1.0, 2.0, 12.0, 8.0, 16.0]) == pytest.approx(1.0, abs=0.1)


def test_a_run_without_a_twin_says_that_it_is_void():
    assert "no twin ran. **Void" in summary(a_result())


def test_only_the_marked_part_of_a_page_is_written(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_between(page, BEGIN, END, summary(a_result()))
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\nPlan `made`")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "\nold\n" not in text


def test_a_page_without_marks_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(RequestError, match="no place for the results"):
        write_between(page, BEGIN, END, summary(a_result()))


def made(rate: float, prompt_tokens: int, prefill: float, per_token: float) -> Answered:
    """Preprocessing takes a second and the tower two, whatever the rate."""
    stages = {"preprocess": 1.0, "tower": 2.0, "prune": 0.25 if rate else 0.0, "positions": 0.0}
    first = sum(stages.values()) + prefill
    seconds = {**stages, "prefill": prefill, "first_token": first, "per_token": per_token}
    return Answered(rate=rate, prompt_tokens=prompt_tokens, visual_tokens=prompt_tokens, rounds=[seconds] * 3)


CELL = QuestionCell(
    question="made",
    frames=8,
    side=224,
    new_tokens=4,
    answers=[made(0.0, 1000, 5.0, 0.5), made(0.75, 400, 1.75, 0.25)],
)


def test_a_gain_is_bounded_by_what_pruning_leaves_alone():
    whole, pruned = CELL.answers
    assert bounds(whole, whole)[0] == 1.0
    # 3 s are left whatever is dropped, and 5 s of prefill become 2 with 400 tokens of 1,000.
    assert bounds(whole, pruned) == (8.0 / 5.0, 8.0 / 3.0)


def test_the_table_shows_every_rate_with_its_bounds():
    head, whole, pruned = (line.split(" | ") for line in answer_table(CELL) if line.startswith("| "))
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
