"""Building from Python: what a request checks, when a bundle is reused, what a failed one is worth."""

import importlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import onnx_ir as ir
import pytest
import torch

import vlexport
from tests.bundle.test_store import left_by
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport import specs, system
from vlexport._build.export import example_inputs, trace, with_weights, without_weights
from vlexport._build.plan import forecast
from vlexport.backends import find_backend, runs_here
from vlexport.bundle import Bundle, Trust
from vlexport.bundle.manifest import Precision, Verdict
from vlexport.bundle.trust import Verdicts
from vlexport.bundle.user_folders import DIGEST_BYTES, CacheFile, user_cache
from vlexport.checkpoint import Checkpoint
from vlexport.errors import ParityError, ResourceError, UnsupportedError
from vlexport.onnx.to_onnx import graph_model
from vlexport.parity.report import ParityReport, Row, exact_row
from vlexport.reports.card import CARD
from vlexport.runtime.opening import open_engine

# `vlexport.build` names the public function; this is the module around it.
building = importlib.import_module("vlexport._build.build")

TWICE = """
import sys
import vlexport._build.build  # the module
from vlexport.checkpoint import Checkpoint
building = sys.modules["vlexport._build.build"]
for folder in sys.argv[2:]:
    spec = building.request(Checkpoint.open(folder), backend="inductor", output_dir=sys.argv[1])
    print(building.build_checkpoint(spec).bundle.verdict.status)
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("checkpoints") / "tiny", depth=1))


@pytest.fixture(scope="module")
def graph(checkpoint):
    return vlexport.export(vlexport.find_recipe("qwen2_5_vl"), checkpoint)


@pytest.fixture(scope="module")
def stored(checkpoint, tmp_path_factory):
    """A finished build; tests that change it take a copy of the whole folder."""
    spec = building.request(checkpoint, backend="eager", output_dir=tmp_path_factory.mktemp("engines"))
    return building.build_checkpoint(spec)


@pytest.fixture
def spec(checkpoint, stored, tmp_path):
    """A request whose bundle is there already, and is nobody else's."""
    into = shutil.copytree(stored.bundle.path.parent, tmp_path / "engines")
    # A verdict holds for every copy of a digest.
    (Verdicts.of().folder / stored.bundle.digest).unlink(missing_ok=True)
    return building.request(checkpoint, backend="eager", output_dir=into)


@pytest.fixture
def path(spec, stored):
    return spec.output_dir / stored.bundle.path.name


def phases_of(spec):
    seen = []
    built = building.build_checkpoint(spec, lambda phase, _: seen.append(phase))
    return built, [phase.split()[0] for phase in dict.fromkeys(seen)]


@pytest.mark.slow
def test_a_graph_and_its_checkpoint_give_the_same_bundle(graph, spec, path):
    bundle = vlexport.build(graph, backend="eager", output_dir=spec.output_dir)
    assert bundle.path == path


def test_a_graph_of_another_form_than_the_backend_wants_is_refused(graph, tmp_path):
    other = replace(graph, form="padded")
    words = r"form 'padded', and backend 'eager' wants 'grouped'.*Export it with"
    with pytest.raises(UnsupportedError, match=words):
        vlexport.build(other, backend="eager", output_dir=tmp_path)


def test_phases_come_in_order_nothing_temporary_is_left_and_a_hit_has_only_the_first(
    spec, tmp_path, monkeypatch
):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    fresh = replace(spec, output_dir=tmp_path / "fresh")
    built, phases = phases_of(fresh)
    left = left_by(fresh.output_dir, name=built.bundle.path.name)
    again, few = phases_of(fresh)
    assert not left.exists(), "left by a builder that was killed after it published the entry"
    assert (built.cached, again.cached) == (False, True)
    assert list(dict.fromkeys(phases)) == ["hash", "export", "build", "graphs", "check", "store"]
    assert few == ["hash"]
    assert again.bundle == built.bundle
    assert list((tmp_path / "tmp").iterdir()) == []


def test_builds_in_threads_of_a_process_have_caches_of_their_own(spec, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)

    def caches(name):
        seen = []

        def progress(phase, _):
            if not phase.startswith("hash"):
                seen.append(os.environ.get("TORCHINDUCTOR_CACHE_DIR"))

        building.build_checkpoint(replace(spec, output_dir=tmp_path / name), progress)
        return set(seen)

    with ThreadPoolExecutor() as pool:
        (one,), (other,) = pool.map(caches, ("one", "other"))
    assert None not in (one, other)
    assert one != other


def test_two_threads_trace_one_after_the_other(checkpoint):
    recipe = vlexport.find_recipe("qwen2_5_vl")
    with ThreadPoolExecutor() as pool:
        graphs = pool.map(lambda _: vlexport.export(recipe, checkpoint), range(2))
    assert len({str(graph.program) for graph in graphs}) == 1


def interrupted(spec, at="check reference"):
    """Interrupt a build in its check; return what it kept."""

    def progress(phase, _):
        if phase == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        building.build_checkpoint(spec, progress)
    assert [each for each in spec.output_dir.iterdir() if each.name[0] != "."] == []
    return next(spec.output_dir.glob(".staging-*/bundle"), None)


@pytest.mark.slow
def test_an_interrupted_build_goes_on_with_its_engine_and_is_checked_whole(spec, stored, tmp_path):
    fresh = replace(spec, output_dir=tmp_path / "fresh")
    assert interrupted(fresh, "build") is None
    engine = next(interrupted(fresh).glob("*.pt2")).stat().st_ino
    assert interrupted(fresh) is not None  # and once more
    built, phases = phases_of(fresh)
    assert list(dict.fromkeys(phases)) == ["hash", "resume", "check", "store"]
    assert next(built.bundle.path.glob("*.pt2")).stat().st_ino == engine
    # The card has the time of the build.
    first, second = (dict(each.bundle.manifest.files) for each in (built, stored))
    assert {first.pop(CARD).size} == {second.pop(CARD).size}
    assert first == second
    assert built.bundle.verdict == stored.bundle.verdict
    assert list(fresh.output_dir.glob(".staging-*")) == []


def another_key(kept):
    draft = Bundle.open(kept).manifest
    other = replace(draft, key="0" * 64)
    (kept / "manifest.json").write_bytes(other.encoded())
    Trust.of().record(other.digest(), "built")


class BeganError(Exception):
    """A build got as far as the export; the rest of it takes seconds."""


def began(*_):
    raise BeganError


def check_begins(spec, monkeypatch):
    """Require that a build begins with its export, and removes what was kept."""
    monkeypatch.setattr("vlexport._build.export.trace", began)
    with pytest.raises(BeganError):
        building.build_checkpoint(spec)
    assert list(spec.output_dir.glob(".staging-*")) == []


SPOILT = {
    "a byte": lambda kept: next(kept.glob("*.pt2")).write_bytes(b"x"),
    "a file more": lambda kept: (kept / "more").write_bytes(b""),
    "nobody vouches for it": lambda kept: (Trust.of().folder / Bundle.open(kept).digest).unlink(),
    "another key": another_key,
    "a link": lambda kept: kept.rename(kept.parent / "x") and kept.symlink_to(kept.parent / "x"),
}


@pytest.mark.seconds
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(each, id=name, marks=() if name == "a byte" else pytest.mark.slow)
        for name, each in SPOILT.items()
    ],
)
def test_what_an_interrupted_build_kept_is_not_used_if_anything_about_it_is_wrong(
    spec, tmp_path, spoil, monkeypatch
):
    fresh = replace(spec, output_dir=tmp_path / "fresh")
    spoil(interrupted(fresh))
    check_begins(fresh, monkeypatch)


@pytest.fixture
def heavy(spec, tmp_path, monkeypatch):
    """The same build into an empty folder, of a tower that counts as one whose export takes long."""
    monkeypatch.setattr("vlexport._build.spec.HEAVY", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return replace(spec, output_dir=tmp_path / "fresh")


def kept_graph(spec):
    assert interrupted(spec, "build") is None
    assert list(spec.output_dir.glob(".staging-*")) == []
    (graph,) = (user_cache() / "exports").iterdir()
    return graph


@pytest.mark.seconds
def test_a_stored_graph_is_translated_as_a_new_one(checkpoint, tmp_path):
    """torch loads ranges of products as if of sizes, and then translates nothing."""
    spec = building.request(checkpoint, backend="onnxruntime", output_dir=tmp_path)
    graph = trace(spec)
    again = with_weights(spec, without_weights(graph))
    ours, expected = (ir.to_proto(graph_model(each)).SerializeToString() for each in (again, graph))
    assert ours == expected


@pytest.mark.slow
def test_a_build_interrupted_after_its_export_goes_on_with_the_graph(heavy, stored):
    content = kept_graph(heavy).read_bytes()
    with zipfile.ZipFile(io.BytesIO(content[DIGEST_BYTES:])) as archive:
        sizes = [each.file_size for each in archive.infolist() if "/weights/weight_" in each.filename]
    assert len(sizes) > 10
    assert set(sizes) == {4}, "weights are read from the checkpoint again"
    assert kept_graph(heavy).read_bytes() == content  # and once more
    built, phases = phases_of(heavy)
    assert list(dict.fromkeys(phases)) == ["hash", "resume", "build", "graphs", "check", "store"]
    inputs = example_inputs(heavy.recipe, heavy.config, "float32", heavy.form)
    ours, expected = (open_engine(each.bundle).run(inputs)["embeds"] for each in (built, stored))
    assert torch.equal(ours, expected)
    assert built.bundle.verdict.status == "passed"
    assert list(heavy.output_dir.glob(".staging-*")) == []
    assert list((user_cache() / "exports").iterdir()) == []


SPOILT_GRAPHS = {
    "a byte": lambda graph: graph.write_bytes(graph.read_bytes() + b"x"),
    "others can write there": lambda graph: graph.parent.chmod(0o777),
    "of another key": lambda graph: graph.rename(graph.with_name(f"x{graph.name}")),
}


@pytest.mark.parametrize("spoil", SPOILT_GRAPHS.values(), ids=SPOILT_GRAPHS)
@pytest.mark.slow
def test_a_kept_graph_is_not_read_if_anything_about_it_is_wrong(heavy, spoil, monkeypatch):
    spoil(kept_graph(heavy))

    def read(*_):
        raise AssertionError("The graph was read.")

    monkeypatch.setattr("vlexport._build.export.with_weights", read)
    check_begins(heavy, monkeypatch)


@pytest.fixture
def begins(spec, monkeypatch):
    """Whether a build exports anything, rather than hand out what is there."""
    monkeypatch.setattr("vlexport._build.export.trace", began)

    def begun():
        try:
            return not building.build_checkpoint(spec).cached
        except BeganError:
            return True

    return begun


@pytest.mark.seconds
def test_only_a_bundle_that_passed_with_a_table_that_can_be_read_is_reused(begins, path):
    bundle = Bundle.open(path)
    for status in ("failed", "not_run", "blocked", "observed"):
        bundle.with_verdict(Verdict(status=status))
        assert begins(), status
    for table in ({"schema": 5}, {}, {"rows": 3}):
        bundle.with_verdict(Verdict(status="passed", table=table))
        assert begins(), table
    bundle.with_verdict(bundle.manifest.parity)
    assert not begins()


def test_room_is_checked_before_anything_is_exported(spec, tmp_path, monkeypatch):
    known = forecast(spec).needs
    assert known is not None
    need = known.disk
    assert need > 1_000_000
    fresh, phases = replace(spec, output_dir=tmp_path / "fresh"), []
    monkeypatch.setattr(system, "free_bytes", lambda _: need - 1)
    with pytest.raises(ResourceError, match=rf"{need / 1e6:.1f} MB needed"):
        building.build_checkpoint(fresh, lambda phase, _: phases.append(phase))
    assert set(phases) == {"hash weights"}


@pytest.mark.slow
def test_a_process_builds_with_inductor_twice_and_leaves_nothing(spec, tmp_path, monkeypatch):
    """Slow because a compiler runs; in a process of its own, since torch fixes a folder when imported."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    folders = [str(write_tiny_qwen2_5_vl(tmp_path / str(seed), depth=1, seed=seed)) for seed in (0, 1)]
    words = [sys.executable, "-c", TWICE, str(tmp_path / "fresh"), *folders]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["passed", "passed"], done.stderr[-2000:]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_bundle_that_did_not_pass_or_was_never_run_is_not_handed_out(path):
    marked = Bundle.open(path).with_verdict(Verdict(status="blocked"))
    with pytest.raises(ParityError, match=r"marked 'blocked' and will not run: .*`vlexport check .* -v"):
        building.Built(bundle=marked, cached=False).require_passed()
    unrun = building.Built(bundle=Bundle.open(path).with_verdict(Verdict(status="not_run")), cached=False)
    assert not unrun.is_good
    with pytest.raises(ParityError, match="marked 'not_run' and will not run"):
        unrun.require_passed()


def test_what_loses_too_much_in_a_precision_names_the_numbers_and_what_to_build_instead(path):
    bundle = Bundle.open(path)
    report = ParityReport.from_json(bundle.verdict.table)
    noisy = Row(
        level="L2", check="embeds", shapes="two images", metrics={"ratio": 1.763}, limits={"ratio": 1.4}
    )
    half = replace(bundle, manifest=replace(bundle.manifest, precision=Precision(dtype="bfloat16")))

    def refusal(*rows):
        table = replace(report, rows=(*report.rows, *rows)).to_json()
        marked = replace(half, checked=Verdict(status="failed", table=table))
        with pytest.raises(ParityError) as caught:
            building.Built(bundle=marked, cached=False).require_passed()
        return str(caught.value)

    assert "loses too much on 'two images': ratio 1.76 x noise, 1.40 allowed. " in refusal(noisy)
    # What is wrong before precision comes in is no matter of precision.
    assert "loses too much" not in refusal(exact_row("order", ["row 3 differs"], "-"), noisy)
    bfloat16 = specs.Precision(dtype="bfloat16")
    others = [each for each in ("inductor", "openvino") if runs_here(find_backend(each), bfloat16)]
    assert f"Build bfloat16 with --backend {' or '.join(others)}, or float32." in refusal(noisy)


def test_profiles_and_bounds_make_different_bundles_and_the_place_of_one_does_not(checkpoint, tmp_path):
    named = [building.request(checkpoint, profile=each) for each in (None, "image", "video")]
    named += [building.request(checkpoint, max_pixels=10_000, max_images=1)]
    keys = [building.key_of(building.build_key(each)) for each in named]
    assert len(set(keys)) == 4
    own = building.request(checkpoint, profile=named[1].profile, output_dir=tmp_path / "elsewhere")
    assert building.key_of(building.build_key(own)) == keys[1]


@pytest.mark.slow
def test_a_wrong_graph_of_the_cache_fails_one_build_and_is_named(tmp_path, monkeypatch, checkpoint, caplog):
    """Every portable graph takes the place of another once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "/nowhere/g++")

    def built(name):
        spec = building.request(checkpoint, backend="onnxruntime", output_dir=tmp_path / name)
        return building.build_checkpoint(spec).bundle.verdict.status

    assert built("first") == "passed"
    kept = {path: CacheFile(path=path).recall() for path in (tmp_path / "cache").rglob("*.cache")}
    graphs = [path for path, content in kept.items() if content and content.startswith(b"\x08\x0a")]
    assert len(graphs) == 3
    for path, wrong in zip(graphs, [*graphs[1:], graphs[0]], strict=True):
        CacheFile(path=path).keep(kept[wrong] or b"")
    assert built("second") == "failed"
    assert [f"{path} held a graph of the bundle that failed" in caplog.text for path in graphs] == [True] * 3
    assert built("third") == "passed"
