"""Rows of a sweep from outcomes, against numbers worked out by hand, and charts."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from vlexport.errors import MediaError
from vlexport.evaluate.intervals import wilson
from vlexport.reports.chart import Curve, Panel, Point, draw
from vlexport.reports.sweep import Outcome, Row, Sweep, rows_of


def outcome(right: float | None, top1: float, kl: float, ms: float, kept: int = 6) -> Outcome:
    return Outcome(
        kept=kept,
        tokens=12,
        right=right,
        top1=top1,
        kl=kl,
        exact=float(top1 == 1),
        first_token=ms / 1e3,
        encode=ms / 2e3,
    )


def question(evs: Outcome, *random: Outcome, whole: float | None = 1.0) -> dict:
    first = outcome(whole, 1.0, 0.0, 40.0, kept=12)
    return {("none", 0.0): [first], ("evs", 0.5): [evs], ("random", 0.5): list(random)}


JUDGED = [
    question(outcome(1.0, 1.0, 0.1, 20.0), outcome(0.0, 0.5, 0.4, 21.0), outcome(1.0, 1.0, 0.2, 23.0)),
    question(outcome(1.0, 0.5, 0.3, 30.0), outcome(0.0, 0.0, 0.8, 24.0), outcome(0.0, 0.5, 0.6, 26.0)),
    question(outcome(0.0, 0.0, 0.5, 22.0), outcome(0.0, 0.5, 0.5, 20.0), outcome(1.0, 1.0, 0.1, 20.0)),
]


@pytest.fixture
def rows() -> dict[tuple[str, float], Row]:
    return {(row.selector, row.rate): row for row in rows_of(JUDGED, [["order"], ["order"], ["when"]])}


def test_scores_are_means_over_questions_and_a_questions_draws_are_averaged_first(rows):
    assert list(rows) == [("none", 0.0), ("evs", 0.5), ("random", 0.5)]
    evs, drawn = rows["evs", 0.5].scores, rows["random", 0.5].scores
    assert evs.accuracy == wilson(2, 3)
    # Half of two draws, none, half: one of three questions, not two of six.
    assert drawn.accuracy == wilson(1, 3)
    assert drawn.questions == 3
    assert [evs.top1.value, drawn.top1.value] == pytest.approx([0.5, (0.75 + 0.25 + 0.75) / 3])
    assert [evs.kl.value, drawn.kl.value] == pytest.approx([0.3, (0.3 + 0.7 + 0.3) / 3])
    assert [evs.exact.value, drawn.exact.value] == pytest.approx([1 / 3, (0.5 + 0 + 0.5) / 3])


def test_differences_pair_the_outcomes_of_each_question(rows):
    evs, drawn, whole = rows["evs", 0.5].scores, rows["random", 0.5].scores, rows["none", 0.0].scores
    assert evs.over_whole.value == pytest.approx(-1 / 3)
    # 1 - 0.5, 1 - 0, 0 - 0.5.
    assert evs.over_random.value == pytest.approx(1 / 3)
    assert drawn.over_whole.value == pytest.approx(-2 / 3)
    assert (drawn.over_random, whole.over_whole, whole.over_random) == (None, None, None)


def test_a_difference_between_paired_answers_is_narrower_than_between_two_crowds():
    # Twenty questions of which both answer the same half, and one more on one side.
    hard = [
        question(outcome(1.0, 1.0, 0.0, 1.0), outcome(float(at > 0), 1.0, 0.0, 1.0), whole=float(at % 2))
        for at in range(20)
    ]
    row = rows_of(hard, [[]] * 20)[1]
    found = row.scores.over_random
    assert found is not None
    assert found.value == pytest.approx(0.05)
    # Resampled numbers of the one question are binomial (20, 0.05): 0 to 3 of 20.
    assert (found.low, found.high) == pytest.approx((0.0, 0.15))


def test_tokens_are_summed_and_times_are_medians(rows):
    assert [(row.kept, row.tokens) for row in rows.values()] == [(36, 36), (18, 36), (18, 36)]
    assert rows["evs", 0.5].scores.first_token == pytest.approx(0.022)
    assert rows["random", 0.5].scores.first_token == pytest.approx(0.022)  # of 22, 25 and 20


def test_categories_have_rows_of_their_own(rows):
    order, when = (rows["evs", 0.5].categories[name] for name in ("order", "when"))
    assert (order.accuracy, order.questions) == (wilson(2, 2), 2)
    assert (when.accuracy, when.questions) == (wilson(0, 1), 1)
    assert when.over_random.value == -0.5


def sweep_of(bundle: str, digest: str) -> Sweep:
    return Sweep(
        bundle=bundle,
        digest=digest,
        task="task.jsonl",
        seeds=2,
        chance={"all": 0.25},
        forms={"evs": "compiled", "random": "eager"},
        rows=rows_of(JUDGED, [["order"], ["order"], ["when"]]),
        failed={"line 7": MediaError("gone. Pass another.")},
    )


@pytest.fixture
def found() -> Sweep:
    return sweep_of("engines/tiny", "d" * 64)


def test_tables_have_every_row_and_a_second_one_the_categories(found):
    (head, cells), (by, per) = found.tables()
    assert head[:5] == ["selector", "rate", "kept", "accuracy %", "top-1 %"]
    assert [line[:3] for line in cells] == [
        ["none", "0", "36 of 36"],
        ["evs", "0.5", "18 of 36"],
        ["random", "0.5", "18 of 36"],
    ]
    assert dict(zip(head, cells[1], strict=True)) == {
        "selector": "evs",
        "rate": "0.5",
        "kept": "18 of 36",
        "accuracy %": wilson(2, 3).text(100),
        "top-1 %": "50.0",
        "KL": "0.3000",
        "exact %": wilson(1, 3).text(100),
        "over rate 0": "-33.3",
        "over random": "+33.3",
        "encode ms": "11.0",
        "first token ms": "22.0",
    }
    assert by == ["accuracy %", "rate", "order", "when"]
    assert per[1] == ["evs", "0.5", wilson(2, 2).text(100), wilson(0, 1).text(100)]
    assert found.about() == (
        "3 questions, 95 % intervals; 2 draws of each baseline; chance 25.0%; 1 failed and left out"
    )


def test_videos_stand_alone_where_a_task_has_images_too(found):
    parts = [["order", "videos"], ["videos"], ["images"]]
    mixed = replace(found, rows=rows_of(JUDGED, parts), chance={"all": 0.5, "videos": 0.2})
    _, (head, cells), (by, _) = mixed.tables()
    assert (head[0], by[2:]) == ("videos alone", ["images", "order", "videos"])
    # Times of two questions, 20 and 30 ms; the third one's 22 is of the image.
    assert (cells[1][3], cells[1][8], cells[1][10]) == (wilson(2, 2).text(100), "+75.0", "25.0")
    picture = mixed.svg()
    assert "evs: 100 (34.24 to 100) at 50" in picture
    assert {">Accuracy on videos, %<", ">chance 20<"} <= set(re.findall(r">[^<]*<", picture))


def test_json_holds_rows_and_failures(found):
    document = found.to_json()
    assert document["failed"] == {
        "line 7": {
            "type": "MediaError",
            "code": "media",
            "message": "gone. Pass another.",
            "exit_code": 2,
        }
    }
    row = document["rows"][1]
    assert (row["selector"], row["kept"], row["scores"]["accuracy"]["value"]) == ("evs", 18, 2 / 3)
    assert row["categories"]["when"]["questions"] == 1


def test_the_picture_has_a_curve_for_each_selector_from_rate_0_on(found):
    root = ElementTree.fromstring(found.svg())
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"tiny", "Accuracy, %", "Time to first token, median, ms", "evs", "random", "chance 25"} < set(
        texts
    )
    hints = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "evs: 66.67 (20.77 to 93.85) at 50" in hints
    assert "evs: 40 at 100" in hints
    assert "none" not in texts


SVG = "{http://www.w3.org/2000/svg}"
CURVES = [
    Curve(name="a<b", points=[Point(x=0, y=0, low=0, high=20), Point(x=100, y=100)]),
    Curve(name="other", points=[Point(x=50, y=50)]),
]


def drawn(**panel):
    text = draw("a & b", "about", "share, %", [Panel(title="Score", curves=CURVES, **panel)])
    return text, ElementTree.fromstring(text)


def paths(root, kind):
    return [each.get("d") for each in root.iter(f"{SVG}path") if each.get("class") == kind]


def test_points_stand_where_their_values_are():
    _, root = drawn()
    line, interval, start, _ = paths(root, "c0")[:4]
    # 0 to 100 on both axes: x from 78 to 722, y from 324 up to 84. The curves stand 5 pixels apart.
    assert line == "M75.5 324.0L719.5 84.0"
    assert interval == "M75.5 324.0V276.0"
    assert start.startswith("M75.5 324.0m")
    assert paths(root, "c1")[1].startswith("M402.5 204.0m")
    labels = [each.text for each in root.iter(f"{SVG}text")]
    assert labels[:3] == ["a & b", "about", "Score"]
    assert labels[3:15] == [*map(str, range(0, 101, 20)), *map(str, range(0, 101, 20))]
    assert labels[15:] == ["share, %", "a<b", "other"]


def test_an_axis_holds_what_it_has_to_and_ends_where_values_do():
    near = [Curve(name="a", points=[Point(x=1, y=97, low=93, high=99.9), Point(x=2, y=98)])]
    free, bound, low = (
        ElementTree.fromstring(draw("t", "a", "x", [Panel(title="p", curves=near, **more)]))
        for more in ({}, {"most": 100.0}, {"holds": [0.0], "level": ("chance", 25.0)})
    )

    def ticks(root):
        return [each.text for each in root.iter(f"{SVG}text") if each.get("text-anchor") == "end"][:-1]

    assert ticks(free) == ticks(bound) == ["92", "94", "96", "98", "100"]
    assert ticks(low) == ["0", "20", "40", "60", "80", "100"]
    assert paths(low, "level") == ["M64 264.0H736"]
    assert "chance 25" in [each.text for each in low.iter(f"{SVG}text")]


def test_points_of_few_questions_have_no_curve_through_them(found):
    lines = r'<path [^>]*stroke-dasharray="[^"]*" style="fill: none"'
    few, many = found, replace(found, rows=rows_of(JUDGED * 4, [["order"]] * 12))
    assert (len(re.findall(lines, few.svg())), len(re.findall(lines, many.svg()))) == (0, 4)
    # Nor a piece of one in the legend.
    assert "stroke-dasharray=" not in few.svg()
    assert few.svg().count("<title>evs: ") == many.svg().count("<title>evs: ") == 4


def test_a_chart_of_one_value_has_an_axis():
    text = draw("t", "a", "x", [Panel(title="p", curves=[Curve(name="a", points=[Point(x=0, y=0)])])])
    assert "nan" not in text


def test_names_are_escaped_and_nothing_is_loaded_in_light_and_dark():
    text, root = drawn(level=("<script>", 10))
    assert "<script" not in text
    assert "a<b" in {each.text for each in root.iter(f"{SVG}text")}
    assert re.findall(r"(?:href|src|url|@import|https?:)\S*", text.replace(SVG[1:-1], "")) == []
    style = root.find(f"{SVG}style").text
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for scheme in (light, dark):
        assert set(re.findall(r"--(\w+): #", scheme)) == {"paper", "ink", "line"}
        assert len(re.findall(r"\.c\d ", scheme)) == 6
    # Colours, dashes and markers, each enough by itself.
    curves = [each for each in root.iter(f"{SVG}path") if each.get("stroke-dasharray")]
    assert {(each.get("class"), each.get("stroke-dasharray")) for each in curves} == {
        ("c0", "none"),
        ("c1", "7 3"),
    }
