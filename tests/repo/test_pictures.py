"""The recorded pictures of the pages are what the commands print now, load nothing and fit their frame."""

import itertools
import re
from xml.etree import ElementTree

import pytest

from tests.cli.lines import vlexport
from tests.repo.tree import ROOT, script

FOLDER = ROOT / "docs" / "pictures"
NAMES = ("bar", "conversation", "error", "report", "table", "watch")
# Overlays of real media, which docs/results/pruning.md shows.
KEPT = ("kept_film", "kept_page", "kept_plots", "kept_scan")
# Of a page of examples/, taken by its test: `SHOWN_STREAM=FILE make test-examples`.
SHOWN = "watch_page"
SVG, XHTML = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xhtml}"


@pytest.fixture(scope="module")
def pictures():
    return script("docs/pictures.py")


# Of each pair, what depends on the moment, the machine or the versions becomes the second.
ALIKE = (
    # Cells of a page stand side by side without a space.
    (r"(?<=relative_l2|worst_token)(?=\d)", " "),
    (r"[━╸╺]+|#+", "="),
    (r"[⠀-⣿]", "*"),
    (r"\d{4}-\d\d-\d\dT[\d:]+Z", "time"),
    (r"(?<=-)[0-9a-f]{8}\b|\b[0-9a-f]{16,}\b", "digest"),
    (r"(?<!\w)[-+]?\d[\d,.]*(?:e[-+]\d+)?", "0"),
    (r"\b0 (?:s|min|h)\b", "0 s"),
    # The time that is left is known once something was built before.
    (r"0 s, 0%(?: of it)?, about 0 s left", "0 s"),
)


def words(picture):
    """The words of a picture, less what may differ from one run to another."""
    text = " ".join("".join(element.itertext()) for element in ElementTree.fromstring(picture))
    for pattern, word in ALIKE:
        text = re.sub(pattern, word, text)
    return text.split()


def test_pictures_of_other_times_and_digests_are_alike_and_of_other_words_are_not(pictures):
    def picture(line):
        return words(pictures.terminal([("vlexport build", [line])], "a picture"))

    first = picture("⠋ export ━━━━╸━━ 12 s, 34%, about 56 s left 4.1e-06 image-71c2623a 2026-11-23T09:10:11Z")
    assert first == picture(
        "⠹ export ━━━━━━━ 1 s, 9%, about 2 min left 1.25e-07 image-81c2623f 2027-01-02T03:04:05Z"
    )
    assert first != picture("⠋ export ━━━━╸━━ 12 s, 34%")
    assert picture("status: passed") != picture("status: failed")


def committed(name):
    return (FOLDER / f"{name}.svg").read_text(encoding="utf-8")


def test_each_picture_is_small_loads_nothing_and_is_shown_on_a_page():
    # `make trained` draws the picture of docs/trained.md.
    assert sorted({path.stem for path in FOLDER.iterdir()} - {"sweep"}) == sorted((*NAMES, *KEPT, SHOWN))
    pages = [(ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8") for page in ("quickstart", "streams")]
    assert re.findall(r"!\[[^]]+\]\(docs/pictures/(\w+)\.svg\)", (ROOT / "README.md").read_text("utf-8"))
    assert sorted(re.findall(r"!\[[^]]+\]\(pictures/(\w+)\.svg\)", "".join(pages))) == sorted(NAMES)
    for name in NAMES:
        picture = committed(name)
        assert len(picture.encode()) < 60_000
        assert "prefers-color-scheme" in picture
        assert set(re.findall(r"\w+://[^\"'< ]+", picture)) <= {SVG[1:-1], XHTML[1:-1]}
        assert not re.search(r"<script|@import|url\(|href=(?!\"#)", picture)


def test_each_overlay_is_small_and_shown_on_the_page_of_results():
    page = (ROOT / "docs" / "results" / "pruning.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"!\[[^]]+\]\(\.\./pictures/(\w+)\.webp\)", page)) == sorted(KEPT)
    for name in KEPT:
        assert (FOLDER / f"{name}.webp").stat().st_size < 200_000


def test_the_page_of_a_stream_is_small_and_shown_among_the_examples():
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"!\[[^]]+\]\(\.\./docs/pictures/(\w+)\.webp\)", readme) == [SHOWN]
    assert (FOLDER / f"{SHOWN}.webp").stat().st_size < 120_000


def test_lines_of_a_terminal_do_not_touch_and_end_inside_the_frame(pictures):
    for name in set(NAMES) - {"report"}:
        root = ElementTree.fromstring(committed(name))
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        rows = [element for element in root if element.tag == f"{SVG}text"]
        tops = [float(row.attrib["y"]) for row in rows]
        assert all(second - first >= pictures.LINE for first, second in itertools.pairwise(tops))
        assert tops[-1] + pictures.PAD / 2 <= height
        for row in rows:
            at = 0.0
            for part in row:
                if "textLength" in part.attrib:
                    assert float(part.attrib["x"]) >= at - 1e-6  # of rounding
                    at = float(part.attrib["x"]) + float(part.attrib["textLength"])
            assert at <= width - pictures.PAD


def test_the_errors_shown_are_those_of_today(pictures):
    printed = []
    for command in pictures.ERRORS:
        ran = vlexport(*command.replace(" checkpoint ", f" {pictures.CHECKPOINT} ").split()[1:]).ends(2)
        printed += ["$", *command.split(), *(line for line in ran.err.splitlines() if "vlexport:" in line)]
    root = ElementTree.fromstring(committed("error"))
    shown = "".join("".join(row.itertext()) for row in root if row.tag == f"{SVG}text")
    assert "".join(" ".join(printed).split()) == "".join(shown.split())


def test_colours_of_a_terminal_become_classes_that_both_styles_have(pictures):
    picture = pictures.terminal(
        [("vlexport x", ["\x1b[1;32mgood\x1b[0m  \x1b[31mb<d\x1b[0m", ""])], "two & more"
    )
    root = ElementTree.fromstring(picture)
    parts = [part for part in root.iter(f"{SVG}tspan") if "textLength" in part.attrib]
    assert [(part.text, part.attrib["class"]) for part in parts] == [("good", "bold green"), ("b<d", "red")]
    assert float(parts[1].attrib["x"]) == pictures.PAD + 6 * pictures.CELL
    light, dark = picture.split("@media")
    for name in pictures.COLOURS:
        assert f".{name}{{" in light
        assert f".{name}{{" in dark


def test_a_page_of_html_becomes_xml_with_its_words_in_their_cells(pictures):
    page = (
        '<!doctype html><html><meta charset="utf-8"><title>t</title><style>a > b {}</style><h1>A &amp; b</h1>'
        "<p>first<p>second<table><tr><th>x<th>y</tr>\n<tr><td>1<br>2<td width=3>&lt;i&gt;<tr><td>4</table>"
        '<svg viewBox="0 0 1 1"><path d="M0 0"/></svg></html>'
    )
    made = pictures.Markup(page)
    assert made.style == "a > b {}"
    root = ElementTree.fromstring(f"<body>{made.body}</body>")
    assert [child.tag for child in root] == ["h1", "p", "p", "table", f"{SVG}svg"]
    cells = [[("".join(cell.itertext())) for cell in row] for row in root.iter("tr")]
    assert [[cell.strip() for cell in row] for row in cells] == [["x", "y"], ["12", "<i>"], ["4"]]
    assert root[-1].attrib == {"viewBox": "0 0 1 1"}
    assert "overflow" in pictures.report(page, "a page")


@pytest.mark.slow
def test_the_pictures_are_what_the_commands_print_now(pictures, tmp_path):
    pictures.draw(tmp_path)
    for name in NAMES:
        drawn = (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
        assert words(drawn) == words(committed(name)), f"{name}: run `make pictures`"
