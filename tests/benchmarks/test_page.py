"""Conclusions from samples that were made up, so that every one is known; runs are read back as stored."""

import json
from dataclasses import replace

import pytest

from benchmarks.page import (
    BEGIN,
    END,
    answer_table,
    bounds,
    goal_table,
    growth,
    is_void,
    kept_rounds,
    log_slope,
    summary,
    timed,
    timings,
    twin,
)
from benchmarks.plans import BASELINE
from benchmarks.results import Answered, Cell, Entry, QuestionCell, Result, Round, read_result
from benchmarks.tables import write_between
from vlexport.errors import RequestError
from vlexport.evaluate.intervals import Interval

STEADY = {BASELINE: [4.0, 4.0, 4.0, 4.0], "x float32": [2.0, 2.0, 2.0, 2.0]}
MACHINE = {"threads": 2, "processors": 2, "processor": "p", "memory_gib": 8, "versions": {"torch": "2"}}


def made_entry(seconds, kind="ours", status="timed", dtype="float32"):
    """The second of three peaks is an outlier."""
    return Entry(
        status=status,
        kind=kind,
        dtype=dtype,
        base_bytes=[1e9] * 3,
        peak_bytes=[1e9 + 5e7, 9e9, 1e9 + 4e7],
        seconds=list(seconds),
    )


def made_cell(seconds, products=None, patches=1000, name="made", twins=()):
    """1 GFLOP of work in the call and in the product; one round per sample, its dtype the last word."""
    num_rounds = len(next(iter(seconds.values())))
    entries = {
        each: made_entry(values, kind, dtype=each.rsplit(" ", maxsplit=1)[-1])
        for kind, made in (("ours", seconds), ("product", products or {}))
        for each, values in made.items()
    }
    return Cell(
        workload=name,
        series="frames",
        grids=[[1, 10, 100]],
        patches=patches,
        operations=1e9,
        scores={"window": [4096.0, 4096.0], "full": [30.0, 20.0]},
        product_operations=1e9,
        rounds=[
            Round(order=list(seconds), twins=[[2.0, each] for each in twins], load=0.5, stolen_seconds=0.0)
        ]
        * num_rounds,
        entries=entries,
    )


def result_of(cells, **more):
    return Result(plan={"slow_probe": 0.6, "name": "made"}, key="k", machine=MACHINE, cells=cells, **more)


def cells_of(seconds):
    """A cell for each size of call, with what the baseline takes there."""
    return {
        str(size): made_cell({BASELINE: [each] * 3}, patches=size, name=str(size))
        for size, each in seconds.items()
    }


def x_of(cell):
    return next(timing for timing in timings(cell, 0.6) if timing.name == "x float32")


def test_baseline_and_ceiling_are_those_of_the_same_round():
    cell = made_cell({BASELINE: [4.0, 40.0, 4.0], "x float32": [2.0, 20.0, 2.0]})
    assert x_of(cell).faster.low == 2.0
    cell = made_cell(STEADY, {"product in a float32": [1.0] * 4, "product in b float32": [0.5] * 4})
    assert x_of(cell).over_floor.median == 4.0


def test_rounds_with_a_slow_product_do_not_count_unless_too_few_would_be_left():
    for products, kept in (([0.5, 0.5, 2.0, 0.5], [0, 1, 3]), ([0.5, 2.0, 2.0, 0.5], [0, 1, 2, 3])):
        assert kept_rounds(made_cell(STEADY, {"product in a float32": products}), 0.6) == kept


def test_a_contender_that_gave_up_between_rounds_has_no_time():
    cell = made_cell(STEADY)
    entries = {**cell.entries, "y float32": made_entry([1.0], status="failed")}
    assert "y float32" not in timed(replace(cell, entries=entries))


def test_a_cell_counts_where_its_twin_equals_itself():
    for seconds, void in (([2.02, 1.98], False), ([2.2, 2.2], True), ([1.0, 3.0], True), ([], True)):
        assert is_void(twin(made_cell(STEADY, twins=seconds), 0.6)) is void, seconds


def test_memory_is_the_median_that_runs_took_on_top_and_unknown_where_it_fell():
    entry = made_entry([1.0])
    assert entry.growth_bytes == 5e7
    assert replace(entry, base_bytes=[2e9], peak_bytes=[1.9e9]).growth_bytes is None
    assert replace(entry, base_bytes=[], peak_bytes=[]).growth_bytes is None


HALVES = {
    **STEADY,
    "Hugging Face eager bfloat16": [2.0, 4.0, 2.0, 2.0],
    "x bfloat16": [1.0, 2.0, 1.0, 1.0],
    "y bfloat16": [1.5, 1.5, 1.5, 1.5],
    "x int8": [1.0, 1.0, 1.0, 1.0],
}


def ends(found: Interval | None) -> tuple[float, float]:
    assert found is not None
    return found.low, found.high


def test_smaller_dtypes_are_compared_with_bfloat16_of_the_same_round():
    found = {each.name: each for each in timings(made_cell(HALVES), 0.6)}
    assert (found["x float32"].over_half, found["x bfloat16"].over_best) == (None, None)
    assert ends(found["x bfloat16"].over_half) == (2.0, 2.0)
    assert ends(found["x int8"].over_half) == (2.0, 4.0)
    # y was the fastest in the second round.
    assert ends(found["x int8"].over_best) == (1.0, 1.5)


def test_goals_are_judged_by_the_best_of_ours_and_by_the_largest_frame():
    cell = made_cell(HALVES, {"product in x bfloat16": [0.625] * 4}, twins=[2.0, 2.0])
    cells = {"small": cell, "middle": replace(cell, workload="middle", grids=[[2, 64, 65], [1, 2, 2]])}
    cells["large"] = replace(cells["middle"], workload="large", grids=[[1, 128, 128]])
    lines = list(goal_table(result_of(cells)))
    rows = [line.split(" | ") for line in lines if " | " in line][1:]
    assert [row[1] for row in rows] == ["1,000", "4,160", "16,384"]
    assert {row[2] for row in rows} == {"met: 2.00 (2.00 to 2.00), x"}
    assert [row[3].split(" (")[0] for row in rows] == ["met: 1.60", "met: 1.60", "no goal: 1.60"]
    assert [row[4] for row in rows] == ["missed: 1.00 (1.00 to 1.50), x |"] * 3
    assert list(goal_table(result_of({"a": made_cell(STEADY)}))) == []


def test_of_a_series_the_ends_have_tables_and_the_table_of_growth_has_the_times():
    text = summary(result_of(cells_of({size: size / 100 for size in (400, 100, 800, 200)})))
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        "### 100",
        "### 800",
        "### Growth with frames",
    ]
    assert f"| {BASELINE} | 1, 2, 4, 8 | 1.00 |" in text


def test_growth_is_an_exponent_over_four_sizes_that_one_outlier_does_not_move():
    cells = cells_of({size: size**1.2 for size in (100, 200, 400, 800)})
    found = growth(result_of(cells), "frames")[BASELINE]
    assert (len(found.times), found.steady) == (4, None)
    assert found.seconds == pytest.approx(1.2, rel=1e-9)
    assert found.memory == pytest.approx(0.0, abs=1e-9)
    del cells["800"]
    assert growth(result_of(cells), "frames") == {}


def test_a_machine_that_slows_down_moves_the_exponent_of_seconds_alone():
    cells = {
        str(size): made_cell(
            {BASELINE: [size * slower] * 3},
            {"product in a float32": [slower] * 3},
            patches=size,
            name=str(size),
        )
        for size, slower in ((100, 1.0), (200, 2.0), (400, 4.0), (800, 8.0))
    }
    found = growth(result_of(cells), "frames")[BASELINE]
    assert found.seconds == pytest.approx(2.0)
    assert found.steady == pytest.approx(1.0)


def test_one_outlier_does_not_move_an_exponent():
    known = [1.0, 2.0, 4.0, 8.0, 16.0]
    assert log_slope(known, [1.0, 2.0, 12.0, 8.0, 16.0]) == pytest.approx(1.0, abs=0.1)


def answered(rate, prompt_tokens, prefill, per_token):
    """Preprocessing takes a second and the tower two, whatever the rate."""
    stages = {"preprocess": 1.0, "tower": 2.0, "prune": 0.25 if rate else 0.0, "positions": 0.0}
    first = sum(stages.values()) + prefill
    seconds = {**stages, "prefill": prefill, "first_token": first, "per_token": per_token}
    return Answered(rate=rate, prompt_tokens=prompt_tokens, visual_tokens=prompt_tokens, rounds=[seconds] * 3)


QUESTION = QuestionCell(
    question="asked",
    frames=8,
    side=224,
    new_tokens=4,
    answers=[answered(0.0, 1000, 5.0, 0.5), answered(0.75, 400, 1.75, 0.25)],
)


@pytest.fixture
def result():
    lost = replace(made_entry([], status="wrong"), reason="wrong tokens, no error raised")
    cell = made_cell(STEADY)
    cells = {"made": replace(cell, entries={**cell.entries, "y": lost})}
    return result_of(cells, questions={"asked": QUESTION})


def test_the_page_shows_losers_with_the_reason_padding_memory_and_questions(result):
    text = summary(result)
    assert "| y | wrong: wrong tokens, no error raised |" in text
    assert "scores computed over needed: window 1.00, full 1.50." in text
    assert "| x float32 | 2 | 2.00 (2.00 to 2.00) |  |  |  | 50 |  |" in text
    assert "no twin ran. **Void" in text
    assert "### Asked\n" in text


def test_a_gain_is_bounded_by_what_pruning_leaves_alone():
    whole, pruned = QUESTION.answers
    assert bounds(whole, whole)[0] == 1.0
    # 3 s are left whatever is dropped, and 5 s of prefill become 2 with 400 tokens of 1,000.
    assert bounds(whole, pruned) == (8.0 / 5.0, 8.0 / 3.0)


def test_the_table_shows_every_rate_with_its_bounds():
    head, whole, pruned = (line.split(" | ") for line in answer_table(QUESTION) if line.startswith("| "))
    assert len(head) == len(whole) == len(pruned)
    assert pruned[:7] == ["| 75%", "400", "1", "2", "0.25", "1.75", "5"]
    assert pruned[7:] == ["1.60 (1.60 to 1.60)", "1.60", "2.67", "4.0", "2.00 (2.00 to 2.00) |"]


def test_only_the_marked_part_of_a_page_is_written_and_a_page_without_marks_refused(result, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_between(page, BEGIN, END, summary(result))
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{BEGIN}\nPlan `made`")
    assert text.endswith(f"\n{END}\nafter\n")
    assert "\nold\n" not in text
    page.write_text("nothing", encoding="utf-8")
    with pytest.raises(RequestError, match="no place for the results"):
        write_between(page, BEGIN, END, "new")


def test_a_run_is_read_back_as_it_was_stored_and_leaves_nothing_beside(result, tmp_path):
    result.save(tmp_path / "run.json")
    assert read_result(tmp_path / "run.json") == result
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    for text, reason in (
        (json.dumps({"schema": 1}), r"schema 1 given, 2 expected\. Measure again with --fresh\."),
        ("[]", "not a benchmark result"),
    ):
        (tmp_path / "run.json").write_text(text, encoding="utf-8")
        with pytest.raises(RequestError, match=reason):
            read_result(tmp_path / "run.json")
