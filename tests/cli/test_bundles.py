"""`check`, `trust` and `inspect`."""

import hashlib
import importlib
import math
import re
import shlex
import shutil
from dataclasses import replace

import pytest
from PIL import Image
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.classes import write_checkpoint as write_class
from tests.cli.lines import bundle_of, change_manifest, flip, vlexport
from vlexport import load
from vlexport.backends import backend_names, eager, find_backend
from vlexport.bundle import Bundle, Verdict
from vlexport.checkpoint import Checkpoint
from vlexport.parity.report import ParityReport
from vlexport.recipe import list_recipes


def digest(bundle):
    return hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()


def mark(bundle, status):
    """The bundle with a verdict that nobody computed."""
    return Bundle.open(bundle).with_verdict(Verdict(status=status, table={}))


def summary(bundle):
    """The line about a bundle that passed: its rows, the worst number with its limit and place."""
    line = ParityReport.from_json(Bundle.open(bundle, trust=digest(bundle)).verdict.table).summary()
    pattern = r"\d+ exact, \d+ numeric, (\d+ observed, )?(\d+ not run, )?worst \S+ of \S+ \(.+\), passed"
    assert re.fullmatch(pattern, line), line
    return line


def test_verify_prints_what_was_checked_and_as_json_has_digest_target_verdict_and_hashes(built):
    ran = vlexport("check", built).ends(0)
    assert re.fullmatch(rf"{re.escape(str(built))}: \d+ files intact, trusted, fits eager@\S+\n", ran.out)
    found = vlexport("check", built, "--json").document
    manifest = Bundle.open(built).manifest
    assert (found["schema"], found["verb"], found["bundle"]) == (1, "check", str(built))
    assert (found["digest"], found["target"]) == (digest(built), manifest.target.tag)
    assert (found["parity"], found["summary"]) == ("passed", summary(built))
    assert f"accuracy check: {summary(built)}" in ran.err
    assert found["files"] == {name: record.sha256 for name, record in manifest.files.items()}


def test_a_private_recipe_is_verified_named_or_as_its_build_remembers_it(failed, wrong_recipe):
    for words in ((), ("--recipe", wrong_recipe)):
        ran = vlexport("check", failed, *words).ends(0)
        assert re.search(r"accuracy check: \d.*, failed$", ran.err, re.MULTILINE)


def test_parity_stores_the_verdict_and_leaves_every_byte_and_the_trust_in_copies(bundle, tmp_path):
    mark(bundle, "not_run")
    before = {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()}
    copy = shutil.copytree(bundle, tmp_path / "copy")
    ran = vlexport("check", bundle, "--accuracy")
    assert (ran.code, len(ran.lines), ran.lines[-1].endswith(", passed")) == (0, 1, True)
    assert "verdict stored" in ran.err
    assert {path: path.read_bytes() for path in bundle.rglob("*") if path.is_file()} == before
    assert vlexport("trust", copy, digest(bundle)).code == 0
    assert vlexport("check", copy, "--json").ends(0).document["parity"] == "passed"


def test_the_report_is_one_page_with_every_row_that_loads_nothing(bundle, tmp_path):
    out = tmp_path / "report.html"
    ran = vlexport("report", bundle, "-o", out)
    assert (ran.code, ran.out) == (0, f"{out}\n"), ran.err
    assert "Not measured: drift by block, latency" in ran.err
    text, made = out.read_text("utf-8"), Bundle.open(bundle)
    assert not re.search(r"<script|src=|href=(?!\"#)|https?:|@import|url\(", text)
    verdicts = [row.verdict for row in ParityReport.from_json(made.verdict.table).rows]
    assert re.findall(r'<span class="(\w+)">\1</span></td></tr>', text) == verdicts
    for words in (made.digest, made.manifest.key, *(each.sha256 for each in made.manifest.files.values())):
        assert words in text
    refused = vlexport("report", bundle, "-o", tmp_path / "report.txt")
    assert (refused.code, "--output" in refused.err, ".html" in refused.err) == (2, True, True)
    assert "- given; files" in vlexport("report", bundle, "-", "-o", out).ends(2).err


@pytest.mark.slow
def test_the_report_measures_what_it_lacks_and_names_what_that_needs(bundle, checkpoint, image, tmp_path):
    out = tmp_path / "report.html"
    assert "given without measure" in vlexport("report", bundle, image, "-o", out).ends(2).err
    ran = vlexport("report", bundle, image, "--measure", "-o", out).ends(0)
    assert "Not measured: pruning, kept tokens: a video is needed." in ran.err
    text = out.read_text("utf-8")
    places = re.findall(r'<section id="([a-z-]*)">', text)
    assert places[:4] == ["accuracy", "drift-by-block", "latency", "padding-and-memory"]
    assert {"pruning", "kept-tokens"} & set(places) == set()
    assert f"<td>{image.name}</td>" in text
    assert ParityReport.from_json(Bundle.open(bundle).verdict.table).layers is not None
    change_manifest(bundle, parity=Verdict(status="not_run"))
    assert "Not measured: accuracy, drift by block, latency" in vlexport("report", bundle, "-o", out).err
    ran = vlexport("report", bundle, image, "--measure", "-o", out)
    assert "Not measured: pruning, kept tokens: a video is needed." in ran.err
    assert Bundle.open(bundle).verdict.status == "passed"
    gone = ("report", bundle, "--measure", "--checkpoint", tmp_path / "absent", "-o", out, "--json")
    document = vlexport(*gone).document
    assert document["unmeasured"].startswith("Not measured: latency, padding and memory: '")
    assert "absent' does not exist" in document["unmeasured"]


@pytest.mark.seconds
def test_a_portable_bundle_opens_with_a_newer_library_once_it_passed_its_check_there(bundle, monkeypatch):
    monkeypatch.setattr(eager.Eager, "reads_older", True)
    change_manifest(bundle, target={"version": "2.10.0"})
    before = digest(bundle)
    refused = vlexport("check", bundle)
    assert (refused.code, "built with eager 2.10.0" in refused.err) == (4, True), refused.err
    (command,) = re.findall(r"it opens: vlexport (.+)", refused.err)
    assert vlexport(*shlex.split(command)).code == 0
    assert (vlexport("check", bundle).code, digest(bundle)) == (0, before)
    # Another version, and a check that failed, are not covered.
    here = eager.BACKEND.target()
    monkeypatch.setattr(eager.Eager, "target", lambda _: replace(here, version="2.99.0"))
    assert vlexport("check", bundle).code == 4
    monkeypatch.setattr(eager.Eager, "target", lambda _: here)
    Bundle.open(bundle).with_verdict(Verdict(status="failed", table={}), here)
    assert vlexport("check", bundle).code == 4


@pytest.mark.parametrize(("version", "reads_older"), [("2.10.0", False), ("999.0", True), ("odd", True)])
def test_another_version_is_refused_without_a_way_where_no_newer_one_of_a_portable_format_is_here(
    version, reads_older, bundle, monkeypatch
):
    monkeypatch.setattr(eager.Eager, "reads_older", reads_older)
    change_manifest(bundle, target={"version": version})
    for words in ((), ("--accuracy",)):
        ran = vlexport("check", bundle, *words)
        assert (ran.code, "Build it on this machine" in ran.err) == (4, True), ran.err
        assert "--accuracy" not in ran.err


def test_formats_that_newer_libraries_read_are_those_of_onnx_runtime_and_openvino():
    found = {name for name in backend_names() if find_backend(name).reads_older}
    assert found == {"onnxruntime", "openvino"}


@pytest.mark.slow
def test_layers_are_shown_block_by_block_and_in_the_one_document(bundle):
    ran = vlexport("check", bundle, "--accuracy", "--layers").ends(0)
    stages = [line.split()[0] for line in ran.lines if line.startswith(("begin", "block"))]
    assert stages == ["begin", "block"]
    assert "first bad stage on" in ran.out
    found = vlexport("check", bundle, "--accuracy", "--layers", "--json").document
    assert (found["schema"], found["verb"], found["bundle"]) == (1, "check", str(bundle))
    assert (found["status"], found["stored"]) == ("passed", True)
    assert {row["check"] for row in found["table"]["rows"]} >= {"weights", "settings", "embeds"}
    assert found["table"]["layers"]["first_bad"] is None


@pytest.mark.seconds
def test_parity_against_other_weights_leaves_the_verdict_alone(bundle, tiny):
    before = digest(bundle)
    ran = vlexport("check", bundle, "--accuracy", "--checkpoint", tiny(seed=5), "--json").ends(3)
    assert (ran.document["status"], ran.document["stored"]) == ("failed", False)
    assert "accuracy check 'failed', 'passed' expected" in ran.err
    assert digest(bundle) == before


@pytest.mark.slow
def test_parity_against_a_copy_of_the_same_weights_counts(bundle, checkpoint, tmp_path):
    mark(bundle, "not_run")
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    ran = vlexport("check", bundle, "--accuracy", "--checkpoint", copy, "--json").ends(0)
    assert ran.document["stored"]
    assert Bundle.open(bundle).verdict.status == "passed"
    (tmp_path / "table.json").write_text(ran.out)
    found = vlexport("compare", bundle, tmp_path / "table.json", "--json").document
    assert (found["kind"], found["identity"]) == ("accuracy table", [])
    assert found["summaries"][0] == found["summaries"][1]


@pytest.mark.seconds
def test_a_source_that_changed_since_the_build_does_not_condemn_the_bundle(bundle, tiny):
    before = change_manifest(bundle, checkpoint={"source": str(tiny(seed=6))}).digest()
    ran = vlexport("check", bundle, "--accuracy").ends(3)
    assert "not the one that the bundle was built from" in ran.out
    assert "verdict not stored: the reference has other weights" in ran.err
    assert digest(bundle) == before


@pytest.mark.seconds
def test_a_source_that_is_gone_can_be_named_anew(bundle):
    change_manifest(bundle, checkpoint={"source": "/nowhere/any/more"})
    assert "'/nowhere/any/more' does not exist" in vlexport("check", bundle, "--accuracy").ends(2).err


def test_inspect_describes_a_bundle_without_trusting_it(bundle):
    foreign = change_manifest(bundle, trusted=False, created="2032-01-01T00:00:00Z")
    found = vlexport("inspect", bundle, "--json").document
    assert (found["schema"], found["verb"], found["kind"]) == (1, "inspect", "bundle")
    assert (found["trusted"], found["problem"], found["parity"]) == (False, None, "passed")
    assert found["summary"] == summary(bundle)
    assert found["created"] == "2032-01-01T00:00:00Z"
    assert found["files"]["program.json"] == (bundle / "program.json").stat().st_size
    form = f"compiled for {foreign.graphs.target}"
    assert found["forms"] == {"prune": form, "positions": form}
    change_manifest(bundle, trusted=False, graphs={"target": None, "reason": "no x"})
    forms = vlexport("inspect", bundle, "--json").document["forms"]
    assert forms == {"prune": "eager: no x", "positions": "eager: no x"}


def test_inspect_names_an_accuracy_table_that_was_altered(bundle):
    table = Bundle.open(bundle).manifest.parity.table
    change_manifest(bundle, trusted=False, parity={"table": {**table, "seal": "0" * 64}})
    found = vlexport("inspect", bundle, "--json").document
    assert "altered since it was written" in found["summary"]


def test_inspect_shows_that_contents_were_not_hashed(bundle):
    flip(bundle / "program.safetensors")
    found = vlexport("inspect", bundle, "--json").document
    assert found["problem"] is None
    assert found["contents"] == f"sizes compared, bytes not hashed; run: vlexport check {bundle}"
    assert vlexport("check", bundle).code == 5


def test_inspect_shows_of_a_damaged_or_hostile_bundle_what_can_be_read_and_steers_no_terminal(bundle):
    name = b"\\u001b]0;title\\u0007\\n:bomb:"
    (bundle / "manifest.json").write_bytes(b'{"recipe": {"name": "' + name + b'"}, "schema": 99}')
    ran = vlexport("inspect", bundle).ends(0)
    assert "recipe\tname: " + r"\x1b]0;title\x07\n:bomb:" in ran.out
    assert "problem: " in ran.err
    assert "\x1b" not in ran.out + ran.err


def test_inspect_describes_a_checkpoint(checkpoint):
    found = vlexport("inspect", checkpoint, "--json").document
    assert (found["kind"], found["model_type"], found["recipe"]) == ("checkpoint", "qwen2_5_vl", "qwen2_5_vl")
    assert found["tensors"] == len(Checkpoint.open(checkpoint).tensor_names())
    assert sum(found["tensors_by_prefix"].values()) == found["tensors"]
    assert found["modules"]["connector"] == ["visual.merger."]


def test_inspect_in_plain_words_has_a_line_for_each_tensor_and_symbol(built):
    ran = vlexport("inspect", built)
    assert ": ," not in ran.out, "values that are empty are left out"
    rows = [line.split("\t") for line in ran.lines]
    assert {len(row) for row in rows} == {2}
    assert ["kind", "bundle"] in rows
    assert ["inputs.patches", "dtype: float32, shape: [4*tokens, 1176]"] in rows
    assert ["summary", summary(built)] in rows
    assert "tokens: [1, 1024, 65536]" in dict(rows)["profile.ranges"]
    assert "mappingproxy" not in ran.out


@pytest.mark.seconds
@pytest.mark.parametrize(
    "name",
    [
        "generic",
        *(pytest.param(each.name, marks=pytest.mark.slow) for each in list_recipes() if each.model_types),
    ],
)
def test_a_bundle_of_every_recipe_passes_its_check_again_from_disk(name, tmp_path):
    if name == "generic":
        # Its settings hold lists, which are tuples in a manifest.
        source = write_class("gemma3", tmp_path / "tiny")
    else:
        contents = importlib.import_module(f"vlexport.recipes.demo.{name}").contents
        source = write_checkpoint(tmp_path / "tiny", contents(), seed=0)
    bundle = bundle_of(source, "--recipe", name, "--backend", "eager", "--output-dir", tmp_path)
    mark(bundle, "not_run")
    assert vlexport("check", bundle, "--accuracy").ends(0).lines[-1].endswith(", passed")
    assert Bundle.open(bundle).verdict.status == "passed"


@pytest.mark.seconds
def test_media_of_ones_own_have_a_row_each_at_their_size(bundle, video, tmp_path, monkeypatch):
    page = Image.new("RGB", (130, 90), "white")
    page.paste("black", (10, 10, 60, 20))
    page.save(tmp_path / "page.png")
    words = ("check", bundle, "--accuracy", tmp_path / "page.png", video, "--fps", 2)
    ran = vlexport(*words, "--json").ends(0)
    assert not ran.document["stored"]
    rows = {(row["level"], row["shapes"]): row["verdict"] for row in ran.document["table"]["rows"]}
    assert rows["L1", "own page.png"] == rows["L1", f"own {video.name}"] == "passed"
    with load(bundle) as pipeline:
        size = math.prod(pipeline.encode(tmp_path / "page.png").grid)
    module = importlib.import_module("vlexport.parity.check")
    plain = module._run

    def wrong(engine, inputs):
        outputs, problem = plain(engine, inputs)
        factor = 1.01 if len(inputs["patches"]) == size else 1.0
        return {name: rows * factor for name, rows in outputs.items()}, problem

    monkeypatch.setattr(module, "_run", wrong)
    assert "own page.png" in vlexport(*words).ends(3).err
    assert "files given without accuracy" in vlexport("check", bundle, tmp_path / "page.png").ends(2).err
    assert "absent.png" in vlexport("check", bundle, "--accuracy", tmp_path / "absent.png").ends(2).err
