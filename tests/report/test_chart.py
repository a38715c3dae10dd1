"""Charts: where points stand, both colour schemes, and nothing that is loaded or unescaped."""

import re
from xml.etree import ElementTree

from vlexport.report.chart import Curve, Panel, Point, draw

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
