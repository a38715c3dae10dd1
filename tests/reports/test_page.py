"""The page of a bundle: every number as in the JSON that it is made from; nothing runs or is loaded."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import PIL.Image
import pytest
import torch
from PIL.PngImagePlugin import PngInfo

from tests.bundle.examples import MANIFEST
from tests.reports.test_sweep import SVG, sweep_of
from vlexport._build.plan import Forecast, Needs
from vlexport.bundle import Bundle, Manifest, Verdict
from vlexport.bundle.files import FileRecord
from vlexport.bundle.manifest import DIGITS
from vlexport.checkpoint.names import ModuleMapping
from vlexport.codec import decode, encode
from vlexport.errors import InputError, RequestError
from vlexport.evaluate.bench import Contender, Timings, machine_here
from vlexport.evaluate.intervals import Interval
from vlexport.parity.report import LayerCurve, LayerPoint, ParityReport, Row
from vlexport.reports.page import page
from vlexport.reports.results import Results, read_results
from vlexport.reports.sweep import Sweep

MIB = 2**20
VOID = ("meta", "br", "img")
ROWS = (
    Row(level="L0", check="weights", metrics={"wrong": 0}, limits={"wrong": 0}, origin="the files"),
    Row(
        level="L1",
        check="embeds",
        shapes="one window",
        metrics={"relative_l2": 1.2345e-6, "worst_token": 4.9876e-5, "half_share": 0.25},
        limits={"relative_l2": 1e-5, "worst_token": 5e-5},
        origin="measured",
    ),
    Row(level="L3", check="caps", metrics={"zero_rows": 0}, limits={"zero_rows": 0}, origin="measured"),
)
CURVE = LayerCurve(
    shapes="mix",
    points=(
        LayerPoint(stage="begin", own=1.5e-7, drift=1.5e-7, worst_token=2.25e-7),
        LayerPoint(stage="block 00", own=None, drift=1e-4, worst_token=None),
    ),
    first_bad="block 00",
    cause="a <mask>",
)


def bundle_with(tmp_path, report):
    files = {"engine.bin": FileRecord(size=1_234_567, sha256="e" * 64)}
    made = replace(MANIFEST, files=files, parity=Verdict(status=report.status, table=report.to_json()))
    return Bundle(path=tmp_path / f"a_recipe-{made.key[:DIGITS]}", manifest=made, digest=made.digest())


@pytest.fixture
def bundle(tmp_path):
    return bundle_with(tmp_path, ParityReport(rows=ROWS, layers=CURVE))


def bench_of(bundle, tokens, milliseconds):
    """A file of `bench`: the reference takes twice as long as the bundle."""

    def contender(name, base, ms, **more):
        return Contender(
            name=name,
            device="cpu",
            dtype="float32",
            base=base,
            call=torch.empty(0).clone,
            rounds=[[ms / 1e3]],
            **more,
        )

    reference, own = "reference float32 cpu", str(bundle.path)
    identity = bundle.manifest.identity()
    ratio = Interval(median=2.0625, low=1.8125, high=2.3)
    contenders = [
        contender(reference, reference, 2 * milliseconds, ratio=Interval(median=1.0, low=1.0, high=1.0)),
        contender(own, reference, milliseconds, ratio=ratio, relative_l2=1.76e-6, identity=identity),
        contender(f"{own} (twin)", own, 1.01 * milliseconds, peak_bytes=3 * MIB, identity=identity),
    ]
    found = Timings(
        patches=4 * tokens,
        tokens=tokens,
        items="i",
        weights="w",
        machine=machine_here(),
        contenders=contenders,
    )
    return {"schema": 1, "verb": "bench", **encode(found.to_json())}


def plan_of(bundle):
    forecast = Forecast(
        path=bundle.path,
        cached=True,
        profile=bundle.manifest.profile,
        inputs=bundle.manifest.inputs,
        patches=(4, 1024, 4096),
        padding={"window": 0.3125, "full": 0.0},
        needs=Needs(
            disk=20 * MIB, build_memory=900 * MIB, run_memory=(90 * MIB, 95 * MIB, 120 * MIB), origin="cores"
        ),
        modules=ModuleMapping(tower=("a.",), connector=(), language_model=()),
        merges=(4, 1),
        seconds=(12.0, "measured"),
    )
    return {"schema": 1, "verb": "plan", **encode(forecast.to_json())}


def swept(bundle):
    rows = sweep_of(str(bundle.path), bundle.digest).to_json()
    return {"schema": 1, "verb": "sweep", **encode(rows)}


def picture_of(bundle, digest=None):
    entries, file = PngInfo(), io.BytesIO()
    entries.add_itxt("bundle_digest", digest or bundle.digest)
    PIL.Image.new("RGB", (20, 10), (1, 2, 3)).save(file, format="PNG", pnginfo=entries)
    return file.getvalue()


@pytest.fixture
def documents(bundle):
    """What a page can show, by the option that takes it."""
    return {
        "bench": [bench_of(bundle, 64, 8.2), bench_of(bundle, 16, 3.1)],
        "plan": plan_of(bundle),
        "sweep": swept(bundle),
    }


def written(tmp_path, documents, picture=None):
    """The files of documents, as arguments of `read_results`."""
    given: dict[str, Any] = {}
    for name, known in documents.items():
        paths = []
        for at, document in enumerate(known if isinstance(known, list) else [known]):
            paths.append(tmp_path / f"{name}{at}.json")
            paths[-1].write_text(json.dumps(document), encoding="utf-8")
        given[name] = paths if isinstance(known, list) else paths[0]
    if picture is not None:
        given["overlay"] = tmp_path / "kept.png"
        given["overlay"].write_bytes(picture)
    return given


class Parsed(HTMLParser):
    """A page: its tags and attributes, `data` elements, text elsewhere, and rows of cells by section."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes = [], [], []
        self.numbers, self.rest, self.rows = [], [], {}
        self.feed(text)

    @property
    def section(self):
        return next((name for tag, name in reversed(self.open) if tag == "section"), None)

    def handle_starttag(self, tag, attrs):
        known = dict(attrs)
        self.tags.append(tag)
        self.attributes += known
        if tag == "data":
            self.numbers.append((known["value"], ""))
        if tag == "tr":
            self.rows.setdefault(self.section, []).append([])
        if tag in ("td", "th"):
            self.rows[self.section][-1].append("")
        if tag not in VOID:
            self.open.append((tag, known.get("id")))

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open[-1][0] == tag, (tag, self.open)
        self.open.pop()

    def handle_data(self, data):
        inside = [tag for tag, _ in self.open]
        if "td" in inside or "th" in inside:
            self.rows[self.section][-1][-1] += data
        if "data" in inside:
            value, before = self.numbers[-1]
            self.numbers[-1] = (value, before + data)
        elif not {"style", "svg", "title"} & set(inside):
            self.rest.append((self.section, data))


def leaves(document):
    if isinstance(document, dict):
        for name, each in document.items():
            yield name
            yield from leaves(each)
    elif isinstance(document, list):
        for each in document:
            yield from leaves(each)
    else:
        yield document


def is_shown(value, text):
    """Whether a text is a value in plain numbers, per cent or MiB, rounded as far as it goes."""
    digits = re.sub(r"e.*", "", text)
    places = len(digits.partition(".")[2]) - int((re.findall(r"e(.*)", text) or ["0"])[0])
    shown = float(text.replace(",", ""))
    return any(abs(value * unit - shown) <= 0.5000001 * 10.0**-places for unit in (1, 100, 1 / MIB))


def test_every_number_is_that_of_the_json(bundle, documents, tmp_path):
    found = Parsed(page(bundle, read_results(bundle, **written(tmp_path, documents))))
    assert not found.open
    manifest = json.loads(bundle.manifest.encoded())
    # Times at quantiles are in the files too; names of fields and of groups count as texts.
    known = list(leaves([manifest, encode(bundle.manifest.target.fields()), *documents.values()]))
    numbers = {float(each) for each in known if isinstance(each, int | float) and not isinstance(each, bool)}
    assert len(found.numbers) > 60
    for value, text in found.numbers:
        assert float(value) in numbers
        assert is_shown(float(value), text), (value, text)
    # Elsewhere a digit is a part of a text of the JSON, or of a sentence.
    texts = {each for each in known if isinstance(each, str)} | {
        bundle.digest,
        bundle.path.name,
        "relative L2",
        "All 3 rows",
        "1e-8 to 1",
        "contain 1,",
        "ms p50",
        "ms p90",
    }
    for section, text in found.rest:
        if section in ("accuracy", "pruning"):
            continue  # below, word by word
        rest = text
        for each in sorted(texts, key=len, reverse=True):
            rest = rest.replace(each, "")
        assert not re.search(r"\d", rest), (section, text)


def test_the_rows_of_each_section_are_those_of_its_file(bundle, documents, tmp_path):
    found = Parsed(page(bundle, read_results(bundle, **written(tmp_path, documents))))
    accuracy = found.rows["accuracy"]
    assert accuracy[1:] == [
        ["L0", "weightslimit: the files", "-", "wrong0 of 0", "passed"],
        [
            "L1",
            "embedslimit: measured",
            "one window",
            "relative_l21.23e-06 of 1e-05worst_token4.99e-05 of 5e-05half_share 0.25",
            "passed",
        ],
        ["L3", "caps", "-", "zero_rows0 of 0", "passed"],
    ]
    assert found.rows["drift-by-block"][1:] == [
        ["begin", "1.50e-07", "2.25e-07", "1.50e-07", "", ""],
        ["block 00", "", "", "1.00e-04", "", "first bad"],
    ]
    small, own, *_ = found.rows["latency"][1:]
    assert small == ["64", "16", "reference float32 cpu", "6.20", "6.20", "1.00 (1.00 to 1.00)", "", ""]
    assert own == ["64", "16", "this bundle", "3.10", "3.10", "2.06 (1.81 to 2.30)", "1.8e-06", ""]
    assert found.rows["latency"][6][:3] + found.rows["latency"][6][7:] == [
        "256",
        "64",
        "this bundle (twin)",
        "3.0",
    ]
    assert found.rows["padding-and-memory"] == [
        ["attention scores that are padding, at most", "%"],
        ["window", "31.2"],
        ["full", "0.0"],
        ["memory", "MiB"],
        ["on disk", "20.0"],
        ["peak of the build", "900.0"],
        ["peak of the smallest call, 4 patches", "90.0"],
        ["peak of the usual call, 1,024 patches", "95.0"],
        ["peak of the largest call, 4,096 patches", "120.0"],
    ]
    assert found.rows["sizes"][:3] == [
        ["size", "smallest", "usual", "largest"],
        ["patches", "4", "1,024", "4,096"],
        ["tokens", "1", "256", "1,024"],
    ]
    assert ["engine.bin", "1,234,567", "e" * 64] in found.rows["provenance"]
    assert ["checkpoint.weights", "d" * 64] in found.rows["provenance"]
    assert ["versions.torch", "2.13.0+cpu"] in found.rows["environment"]
    assert ["preprocessing.mean", "0.48, 0.46, 0.41"] in found.rows["settings"]
    words = " ".join(text for section, text in found.rest if section == "accuracy")
    assert ParityReport(rows=ROWS).summary() in words
    assert "By level: L0: 1 passed; L1: 1 passed; L3: 1 passed" in words
    assert "Nearest to its limit: L1 embeds on one window, worst_token takes 99.8% of it." in words


def test_the_pruning_sweep_of_a_file_is_shown_as_its_tables_and_picture(bundle, documents, tmp_path):
    text = page(bundle, read_results(bundle, **written(tmp_path, documents)))
    content = {name: each for name, each in documents["sweep"].items() if name not in ("schema", "verb")}
    tables = Sweep.from_json(content).tables()
    assert Parsed(text).rows["pruning"] == [row for head, rows in tables for row in (head, *rows)]
    assert [len(rows) for _, rows in tables] == [3, 3]
    assert "<title>evs: 66.67 (20.77 to 93.85) at 50</title>" in text
    assert "1 failed and left out" in text


PLANTED = "<script>alert('1')</script>\"&"


def planted(kind, value, whole=None):
    """A value with the script in every text that its type lets through; how many there are."""
    whole, count = whole or encode(value), 0

    def replaced(document, path, text):
        if not path:
            return text
        at, *rest = path
        if isinstance(document, list):
            return [
                replaced(each, rest, text) if at == index else each for index, each in enumerate(document)
            ]
        return {name: replaced(each, rest, text) if at == name else each for name, each in document.items()}

    def paths(document, before=()):
        if isinstance(document, dict | list):
            items = document.items() if isinstance(document, dict) else enumerate(document)
            for at, each in items:
                yield from paths(each, (*before, at))
        elif isinstance(document, str):
            yield before

    for path in list(paths(whole)):
        tried = replaced(whole, path, PLANTED)
        try:
            value = decode(kind, tried)
        except InputError:
            continue
        whole, count = tried, count + 1
    return value, count


ALLOWED = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "br", "section", "details",
    "summary", "div", "span", "small", "code", "table", "tr", "th", "td", "data", "i", "img", "nav", "a",
    "svg", "desc", "rect", "path", "text",
}  # fmt: skip


def test_a_script_in_any_text_is_shown_and_not_run(tmp_path):
    made, count = planted(Manifest, replace(MANIFEST, parity=Verdict(status="not_run")))
    assert count >= 11
    row, in_row = planted(Row, ROWS[1])
    curve, in_curve = planted(LayerCurve, CURVE)
    assert (in_row, in_curve) == (5, 5)
    report = ParityReport(
        rows=(row, replace(row, metrics={PLANTED: 2.0}, limits={PLANTED: 1.0})), layers=curve
    )
    made = replace(
        made,
        options={PLANTED: [PLANTED, {PLANTED: True}]},
        versions={PLANTED: PLANTED},
        parity=Verdict(status=report.status, table=report.to_json()),
    )
    bundle = Bundle(path=tmp_path / f"a_recipe-{made.key[:DIGITS]}", manifest=made, digest=made.digest())
    timed = bench_of(bundle, 16, 2.0)
    timed["machine"] = {PLANTED: PLANTED}
    timed["contenders"][0]["ratio"] = None
    for name in ("name", "reason"):
        timed["contenders"][0][name] = PLANTED
    documents = {"bench": [timed, bench_of(bundle, 32, 3.0)], "plan": plan_of(bundle)}
    documents["plan"] |= {"origin": PLANTED, "padding": {PLANTED: 0.5}}
    documents["sweep"] = swept(bundle) | {"bundle": PLANTED}
    for each in documents["sweep"]["rows"]:
        each["selector"] = PLANTED
        each["categories"] = {PLANTED: each["categories"]["when"]}
    text = page(bundle, read_results(bundle, **written(tmp_path, documents, picture_of(bundle))))
    found = Parsed(text)
    assert set(found.tags) <= ALLOWED
    assert not [name for name in found.attributes if name.startswith("on")]
    assert text.count("&lt;script&gt;") >= count + in_row + in_curve + 15
    assert "<script" not in text
    assert "alert('1')" not in text


def test_the_page_loads_nothing_and_has_both_colour_schemes(bundle, documents, tmp_path):
    text = page(bundle, read_results(bundle, **written(tmp_path, documents, picture_of(bundle))))
    places = re.findall(r"(?:href|src)=\"?([^\"]{0,22})|url\((.*?)\)|(@import)|(https?:[^\"' ]*)", text)
    assert {"".join(each) for each in places if each[0][:1] != "#"} == {"data:image/png;base64,", SVG[1:-1]}
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in text
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    style, *_ = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    light, dark = style.split("(prefers-color-scheme: dark)")
    names = set(re.findall(r"var\((--\w+)\)", light + dark))
    assert names == set(re.findall(r"(--\w+):", light)) == set(re.findall(r"(--\w+):", dark))
    # A table or picture that is wider than a phone scrolls in a box of its own.
    assert len(re.findall(r"<(?:table|svg|img)\b", text)) == text.count('<div class="wide"><') > 10


def test_what_was_not_measured_is_named_in_one_line_with_the_command_that_does(tmp_path):
    bare = bundle_with(tmp_path, ParityReport(rows=ROWS))
    text = page(bare)
    line = "drift by block, latency, padding and memory, pruning, kept tokens: "
    assert f"<p>Not measured: {line}<code>vlexport report BUNDLE VIDEO --measure --output FILE" in text
    assert text.count("Not measured") == 1
    unchecked = replace(bare, manifest=replace(bare.manifest, parity=Verdict(status="not_run")))
    assert 'Accuracy check: <b class="not_run">not_run</b>' in page(unchecked)
    assert "<p>Not measured: accuracy, drift" in page(unchecked)
    unmet = {"Latency": "'x' is gone. Look.", "Padding and memory": "'x' is gone. Look."}
    expected = "kept tokens: <code>vlexport report BUNDLE VIDEO --measure"
    assert "latency, padding and memory: &#x27;x&#x27; is gone. Look.</p>" in page(bare, Results(unmet=unmet))
    assert expected in page(bare, Results(unmet=unmet))


def test_the_contents_lead_to_every_section_and_the_machine_is_named(bundle, documents, tmp_path):
    documents["bench"][0]["machine"] |= {"processor": "Some CPU", "gpu": "A <GPU>", "threads": 2}
    documents["bench"][1]["file"] = "photos/mine.png"
    text = page(bundle, read_results(bundle, **written(tmp_path, documents, picture_of(bundle))))
    assert "Not measured" not in text
    links = re.findall(r'<a href="#([^"]*)">', text)
    assert links == re.findall(r'<section id="([^"]*)">', text)
    assert len(links) == 10
    assert 'Some CPU with A &lt;GPU&gt;, <data value="2">2</data> threads' in text
    rows = Parsed(text).rows["latency"]
    assert [row[0] for row in rows] == ["file", *["mine.png"] * 3, *[""] * 3]


def test_a_failed_check_is_open_with_three_lines_to_act_on_and_marks_what_is_over(tmp_path):
    over = replace(ROWS[1], metrics={"relative_l2": float("nan"), "worst_token": 1e-3})
    report = ParityReport(rows=(ROWS[0], over), layers=CURVE)
    text = page(bundle_with(tmp_path, report))
    assert f'<b class="{report.status}">' in text
    assert report.status == "failed"
    assert "<details open><summary>All 2 rows" in text
    assert text.count('class="over"') == 2
    for line in report.conclusion():
        assert line.replace("'", "&#x27;").replace("<", "&lt;").replace(">", "&gt;") in text


# By name: the option, the file that is changed, its other fields, and the message.
REFUSED: dict[str, tuple[str, str, dict[str, object], str]] = {
    "another verb": ("bench", "plan", {}, "verb 'plan' found; expected 1 and bench"),
    "a later schema": ("sweep", "sweep", {"schema": 2}, "schema 2"),
    "another plan": ("plan", "plan", {"path": "engines/x-1"}, "forecast of x-1 found"),
    "another sweep": ("sweep", "sweep", {"digest": "0" * 64}, "a sweep of "),
    "a sweep of nothing": ("sweep", "sweep", {"rows": []}, "sweep.rows: at least one expected"),
    "text for rows": ("sweep", "sweep", {"rows": ["x"]}, "sweep.rows[0]: 'x'"),
    "no contenders": ("bench", "bench", {"contenders": 3}, "contenders"),
    "another bundle": ("bench", "bench", {"contenders": []}, "no contender is a_recipe-"),
    "text for numbers": ("bench", "bench", {"tokens": "x"}, "bench.tokens: 'x'"),
}


def test_files_about_something_else_are_refused_by_name_with_the_command(
    bundle, documents, tmp_path, subtests
):
    path = tmp_path / "given"
    documents["bench"] = documents["bench"][0]
    for name, (option, source, changes, message) in REFUSED.items():
        path.write_text(json.dumps({**documents[source], **changes}), encoding="utf-8")
        with subtests.test(name), pytest.raises(RequestError) as raised:
            read_results(bundle, **{option: [path] if option == "bench" else path})  # type: ignore[arg-type]
        assert f"--{option} {path}: " in str(raised.value)
        assert message in str(raised.value)
        assert f"`vlexport {option} " in str(raised.value)
    rows = documents["sweep"]["rows"]
    path.write_text(json.dumps({**documents["sweep"], "rows": [*rows, {**rows[0], "categories": {}}]}))
    with pytest.raises(RequestError, match="the same categories in every row expected"):
        read_results(bundle, sweep=path)
    path.write_text("{")
    with pytest.raises(RequestError, match="expected strict JSON"):
        read_results(bundle, plan=path)
    with pytest.raises(RequestError, match="No such file or directory"):
        read_results(bundle, plan=tmp_path / "absent")


def test_a_picture_of_another_bundle_is_refused(bundle, tmp_path):
    path = tmp_path / "kept.png"
    path.write_bytes(picture_of(bundle, "0" * 64))
    with pytest.raises(RequestError, match="a picture of bundle 000000000000 found"):
        read_results(bundle, overlay=path)
    path.write_bytes(b"\x89PNG")
    with pytest.raises(RequestError, match=r"--overlay .*cannot identify image file.*`vlexport run BUNDLE"):
        read_results(bundle, overlay=path)
