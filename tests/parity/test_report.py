"""The gate's own gate: what must never be called passed."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from vlexport.errors import InputError
from vlexport.parity.limits import compared
from vlexport.parity.metrics import Incomparable, Metrics, compare
from vlexport.parity.report import LayerCurve, LayerPoint, ParityReport, Row

LIMITS = {"relative_l2": 1e-5, "worst_token": 5e-5}


def row(level="L1", metrics=None, limits=LIMITS, given=None):
    metrics = {"relative_l2": 1e-6, "worst_token": 1e-6} if metrics is None else metrics
    return Row(
        level=level,
        check="embeds",
        shapes="mix",
        metrics=metrics,
        limits=limits,
        origin="measured",
        given=given,
    )


def report(*rows, required=("L1",), subject=None):
    return ParityReport(rows=rows, required=required, subject=subject)


def rows_of(seed=0, shape=(12, 8)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def measured(given, expected):
    found = compare(given, expected)
    assert isinstance(found, Metrics)
    return found


def judged(given, expected):
    return report(compared("L1", "embeds", "mix", (given, expected), (LIMITS, "measured")))


def test_a_report_passes_when_every_required_level_has_a_row_that_passed_and_none_is_bad():
    both = ("L0", "L1")
    nan, inf = math.nan, math.inf
    for found, status in (
        (report(row("L0"), row("L1"), required=both), "passed"),
        (report(row("L0"), required=both), "not_run"),
        (report(), "not_run"),
        (report(row(), required=()), "not_run"),
        *(
            (report(row(metrics={"relative_l2": value, "worst_token": 1e-6})), "failed")
            for value in (nan, inf, 2e-5)
        ),
        *(
            (report(row(limits=limits)), "blocked")
            for limits in ({}, {"relative_l2": nan}, {"relative_l2": inf})
        ),
        (report(row(metrics={"relative_l2": 1e-6})), "blocked"),
        (report(row(), row(given="failed"), row()), "failed"),
        (report(row(), row(given="blocked"), row()), "blocked"),
        (report(row(given="observed")), "observed"),
    ):
        assert found.status == status, found
    with pytest.raises(InputError, match="a row passes by its metrics and limits"):
        row(given="passed")


@pytest.mark.thirty("results that are none", 7)
def test_outputs_that_are_not_the_references_fail():
    wanted = rows_of()
    one_infinite = rows_of().index_fill(0, torch.tensor([3]), math.inf)
    for given in (torch.zeros(12, 8), torch.full((12, 8), math.nan), one_infinite, rows_of(1), None):
        assert judged(given, wanted).status == "failed", given
    for shape, reason in (
        ((11, 8), r"shape \[11, 8\] given, \[12, 8\] expected"),
        ((0, 8), r"shape \[0, 8\] given"),
    ):
        found = judged(rows_of(shape=shape), wanted)
        assert found.status == "failed"
        assert re.search(reason, found.rows[0].note)


@pytest.mark.thirty("results that are none", 3)
def test_what_is_no_comparison_does_not_pass():
    assert judged(rows_of(shape=(0, 8)), rows_of(shape=(0, 8)).clone()).status == "failed"
    same = rows_of()
    assert judged(same, same).status == "blocked", "the reference against itself"
    assert isinstance(compare(rows_of(), torch.full((12, 8), math.nan)), Incomparable)


def test_collapsed_rows_are_counted_and_metrics_taken_in_float64():
    expected = rows_of()
    given = expected.clone()
    given[2] *= 0.009
    assert measured(given, expected).collapsed_rows == 1.0
    expected = torch.full((4, 4), 1.0, dtype=torch.float64)
    assert measured(expected + 1e-12, expected).relative_l2 == pytest.approx(1e-12, rel=1e-3)


def test_a_report_survives_its_json():
    curve = LayerCurve(
        shapes="mix",
        points=(LayerPoint(stage="block 00", own=1e-7, drift=None, worst_token=math.inf),),
        first_bad=None,
        cause="",
    )
    found = replace(
        report(row(), row(metrics={"relative_l2": math.nan, "worst_token": 0.0}), subject="s"), layers=curve
    )
    text = json.dumps(found.to_json(), allow_nan=False)
    back = ParityReport.from_json(json.loads(text))
    assert back.to_json() == found.to_json()
    assert back.status == found.status == "failed"


def test_drift_is_drawn_as_a_bar_of_powers_of_ten():
    drifts = (None, 0.0, 1e-8, 1e-6, 1e-4, 1.0, 30.0, math.nan)
    points = [LayerPoint(stage=f"block {at:02}", own=None, drift=drift, worst_token=None)
        for at, drift in enumerate(drifts)]  # fmt: skip
    curve = LayerCurve(shapes="mix", points=tuple(points), first_bad="block 03", cause="mask")
    head, *lines, _ = curve.table().splitlines()
    assert [line.count("#") for line in lines] == [0, 0, 0, 6, 12, 24, 24, 24]
    ends = {len(line.split("  <-")[0]) for line in lines if line.count("#") == 24}
    assert ends == {len(head)}
    assert head[len(lines[4]) - 4 : len(lines[4])] == "1e-4"
    assert max(map(len, curve.table().splitlines())) <= 110


def altered(change):
    value = json.loads(json.dumps(report(row(metrics={"relative_l2": 1.0, "worst_token": 1.0})).to_json()))
    change(value)
    return value


@pytest.mark.thirty("results that are none", 1)
def test_an_altered_result_is_refused():
    metrics, limits = {"relative_l2": 1e-6, "worst_token": 1e-6}, {"relative_l2": 2.0, "worst_token": 2.0}
    for number, change in enumerate(
        (
            lambda value: value.update(status="passed"),
            lambda value: value["rows"][0].update(verdict="passed"),
            lambda value: value["rows"][0]["metrics"].update(metrics),
            lambda value: value["rows"][0]["limits"].update(limits),
            lambda value: value["rows"].clear(),
            lambda value: value.update(required=[]),
            lambda value: value.update(subject="another"),
            lambda value: value.pop("rows"),
            lambda value: value.update(further=1),
            lambda value: value.update(schema=2),
        )
    ):
        value = altered(change)
        with pytest.raises(InputError):
            pytest.fail(f"change {number} was read: {ParityReport.from_json(value)}")


def test_a_result_sealed_anew_still_has_to_agree_with_its_numbers():
    from vlexport.parity.report import _seal

    value = altered(lambda value: value.update(status="passed"))
    value["seal"] = _seal({name: entry for name, entry in value.items() if name != "seal"})
    with pytest.raises(InputError, match="'passed' stored, its rows give 'failed'"):
        ParityReport.from_json(value)


def test_a_report_of_another_bundle_is_refused():
    found = report(row()).attached_to("a")
    with pytest.raises(InputError, match="belongs to a, not to b"):
        found.attached_to("b")


def test_the_table_is_narrow_and_its_columns_stand_apart():
    long = replace(row(metrics={"relative_l2": 1882567.8, "worst_token": 5.88e-1}), shapes="x" * 90)
    exact = [replace(row("L0", {"wrong": 0.0}, {"wrong": 0.0}), check=f"table {n}") for n in range(26)]
    lines = report(*exact, long).table().splitlines()
    assert max(map(len, lines)) <= 110
    assert [line for line in lines if "integers are exact" in line] == [lines[1]]
    assert "26 checks" in lines[1]
    assert lines[2].split()[-4:] == ["1.88e+06", "5.88e-01", "1.00e-05", "failed"]


def test_a_failed_table_ends_with_level_stage_and_kind():
    curve = LayerCurve(
        shapes="mix", points=(), first_bad="block 03", cause="mask: tokens attend to the wrong tokens"
    )
    failed = row(metrics={"relative_l2": 0.5, "worst_token": 0.5})
    lines = replace(report(failed), layers=curve).table().splitlines()
    assert lines[-4:] == [
        "0 exact, 0 of 1 numeric, worst 0.5 of 1e-05 (mix), failed",
        "level: L1, embeds on 'mix': failed, relative_l2 0.5 of 1e-05, worst_token 0.5 of 5e-05",
        "stage: block 03",
        "kind:  mask: tokens attend to the wrong tokens",
    ]


def test_the_summary_counts_rows_and_names_the_metric_nearest_to_its_limit():
    exact = row("L0", {"wrong": 0.0}, {"wrong": 0.0})
    near = row("L2", {"ratio": 1.2, "token_ratio": 1.5, "worst_at": 3.0}, {"ratio": 1.5, "token_ratio": 3.0})
    small = {"relative_l2": 1e-6, "worst_token": 1e-6, "worst_at": 17.0}
    far = replace(row(metrics=small), shapes="very wide")
    for rows, line in (
        ((exact, exact, far), "2 exact, 1 numeric, worst 1e-06 of 1e-05 (very wide, token 17), passed"),
        ((far, near), "0 exact, 2 numeric, worst 1.2 of 1.5 x noise (mix, token 3), passed"),
        ((far, row(given="not_run"), row(given="observed")),
            "0 exact, 1 numeric, 1 not run, 1 observed, worst 1e-06 of 1e-05 (very wide, token 17), passed"),
        ((far, row(metrics={"relative_l2": math.nan, "worst_token": 0.0})),
            "0 exact, 1 of 2 numeric, worst nan of 1e-05 (mix), failed"),
        ((replace(exact, metrics={"wrong": 2.0}),), "0 of 1 exact, 0 numeric, failed"),
        ((), "0 exact, 0 numeric, not_run"),
    ):  # fmt: skip
        assert report(*rows).summary() == line


def test_the_short_report_has_the_rows_that_did_not_pass_and_no_other():
    wrong = row(metrics={"relative_l2": 0.5, "worst_token": 0.5})
    assert report(row()).brief() == report(row()).summary()
    lines = report(row(), wrong).brief().splitlines()
    assert [line.split()[0] for line in lines] == ["level", "L1", "limit:", "0", "level:", "stage:", "kind:"]
    assert lines[1].endswith("failed")


def test_one_wrong_row_among_many_shows_in_the_worst_token_and_is_named():
    expected = rows_of(shape=(1000, 8))
    given = expected.clone()
    given[500] = 0
    found = measured(given, expected)
    assert (found.worst_token, found.worst_at, found.median_token, found.zero_rows) == (1.0, 500, 0.0, 1.0)
    assert found.relative_l2 < 0.1
    given[700] = math.nan
    assert measured(given, expected).worst_at == 700
