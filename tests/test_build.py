"""Building from Python: what a request checks, when a bundle is reused, what a failed one is worth."""

import importlib
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import vlexport
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.backends import eager
from vlexport.bundle import Bundle, Verdict, os_errors
from vlexport.bundle.os_errors import shortage
from vlexport.bundle.trust import Verdicts
from vlexport.checkpoint import Checkpoint
from vlexport.cli.build import report_of
from vlexport.errors import ParityError, RequestError, ResourceError, UnsupportedError
from vlexport.parity import ParityReport
from vlexport.plan import forecast
from vlexport.specs import MediaBounds

# `vlexport.build` names the public function; this is the module around it.
building = importlib.import_module("vlexport._build")

TWICE = """
import sys
import vlexport._build  # the module
from vlexport.checkpoint import Checkpoint
building = sys.modules["vlexport._build"]
for folder in sys.argv[2:]:
    asked = building.request(Checkpoint.open(folder), backend="inductor", into=sys.argv[1])
    print(building.build_checkpoint(asked).bundle.verdict.status)
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
    asked = building.request(checkpoint, backend="eager", into=tmp_path_factory.mktemp("engines"))
    return building.build_checkpoint(asked)


@pytest.fixture
def asked(checkpoint, stored, tmp_path):
    """A request whose bundle is there already, and is nobody else's."""
    into = shutil.copytree(stored.bundle.path.parent, tmp_path / "engines")
    # A verdict holds for every copy of a digest.
    (Verdicts.of().folder / stored.bundle.digest).unlink(missing_ok=True)
    return building.request(checkpoint, backend="eager", into=into)


@pytest.fixture
def path(asked, stored):
    return asked.into / stored.bundle.path.name


def phases_of(asked):
    seen = []
    built = building.build_checkpoint(asked, lambda phase, _: seen.append(phase))
    return built, [phase.split()[0] for phase in dict.fromkeys(seen)]


def test_a_graph_and_its_checkpoint_give_the_same_bundle(graph, asked, path):
    bundle = vlexport.build(graph, backend="eager", into=asked.into)
    assert bundle.path == path


def test_a_graph_of_another_form_than_the_backend_wants_is_refused(graph, tmp_path):
    other = replace(graph, form="padded")
    with pytest.raises(
        UnsupportedError, match=r"form 'padded', and backend 'eager' wants 'grouped'.*Export it with"
    ):
        vlexport.build(other, backend="eager", into=tmp_path)


def test_phases_come_in_order_and_a_hit_has_only_the_first(checkpoint, asked, tmp_path):
    fresh = replace(asked, into=tmp_path / "fresh")
    built, phases = phases_of(fresh)
    again, few = phases_of(fresh)
    assert (built.cached, again.cached) == (False, True)
    assert list(dict.fromkeys(phases)) == ["hash", "export", "build", "check", "store"]
    assert few == ["hash"]
    assert again.bundle == built.bundle


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "status", ["failed", "not_run", *(pytest.param(each, marks=SLOW) for each in ("blocked", "observed"))]
)
def test_only_a_bundle_that_passed_is_reused(asked, path, status):
    Bundle.open(path).with_verdict(Verdict(status=status))
    built = building.build_checkpoint(asked)
    assert not built.cached
    assert built.bundle.manifest.parity.status == "passed"
    assert Bundle.open(path) == built.bundle


@pytest.mark.parametrize(
    "table",
    [{"schema": 5}, *(pytest.param(each, marks=SLOW) for each in ({}, {"rows": 3}))],
    ids=["schema", "none", "rows"],
)
def test_a_bundle_whose_table_of_the_check_cannot_be_read_is_built_again(asked, path, table):
    Bundle.open(path).with_verdict(Verdict(status="passed", table=table))
    built = building.build_checkpoint(asked)
    assert not built.cached
    assert "integers are exact" in report_of(built.bundle.manifest.parity)


def test_room_is_asked_for_before_anything_is_exported(asked, tmp_path, monkeypatch):
    known = forecast(asked).needs
    assert known is not None
    need = known.disk
    assert need > 1_000_000
    fresh, told = replace(asked, into=tmp_path / "fresh"), []
    monkeypatch.setattr(os_errors, "free_bytes", lambda _: need - 1)
    with pytest.raises(ResourceError, match=rf"{need / 1e6:.1f} MB needed"):
        building.build_checkpoint(fresh, lambda phase, _: told.append(phase))
    assert set(told) == {"hash weights"}


def test_a_build_leaves_nothing_in_the_temporary_folder(asked, tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "tmp").mkdir()
    building.build_checkpoint(replace(asked, into=tmp_path / "fresh"))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_process_builds_with_inductor_twice_and_leaves_nothing(asked, tmp_path, monkeypatch):
    """Slow because a compiler runs; in a process of its own, since torch fixes a folder when imported."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    folders = [str(write_tiny_qwen2_5_vl(tmp_path / str(seed), depth=1, seed=seed)) for seed in (0, 1)]
    words = [sys.executable, "-c", TWICE, str(tmp_path / "fresh"), *folders]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["passed", "passed"], done.stderr[-2000:]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_bundle_whose_bytes_changed_is_replaced(asked, path):
    payload = path / eager.PROGRAM
    data = bytearray(payload.read_bytes())
    data[-100] ^= 1
    payload.write_bytes(data)
    built = building.build_checkpoint(asked)
    assert not built.cached
    Bundle.open(path)


def test_a_bundle_that_did_not_pass_is_not_handed_out(asked, path):
    marked = Bundle.open(path).with_verdict(Verdict(status="blocked"))
    with pytest.raises(ParityError, match=r"marked 'blocked' and will not run: .*--layers` shows"):
        building.Built(bundle=marked, cached=False).require_passed()


def test_a_bundle_that_was_never_run_is_handed_out_only_where_it_cannot_run(asked, path):
    marked = building.Built(bundle=Bundle.open(path).with_verdict(Verdict(status="not_run")), cached=False)
    assert not marked.is_good
    with pytest.raises(ParityError, match="marked 'not_run' and will not run"):
        marked.require_passed()


def test_named_profiles_bounds_and_own_profiles_make_different_bundles(checkpoint, tmp_path):
    bounds = MediaBounds(min_pixels=1, max_pixels=10_000, max_images=1, max_frames=0)
    named = [building.request(checkpoint, profile=each) for each in (None, "image", "video", bounds)]
    keys = [building.key_of(building.build_key(each)) for each in named]
    assert len(set(keys)) == 4
    own = building.request(checkpoint, profile=named[1].profile)
    assert building.key_of(building.build_key(own)) == keys[1]


def test_where_a_bundle_goes_is_not_part_of_what_it_is(checkpoint, tmp_path):
    one, other = (building.request(checkpoint, into=tmp_path / name) for name in ("one", "other"))
    assert building.build_key(one) == building.build_key(other)


@pytest.mark.parametrize("below", [".", "below"])
def test_a_file_in_the_place_of_the_folder_is_refused(checkpoint, tmp_path, below):
    (tmp_path / "file").write_text("here")
    asked = building.request(checkpoint, backend="eager", into=tmp_path / "file" / below)
    with pytest.raises(RequestError, match=r"file is a file; a folder is expected\. Name another one"):
        building.build_checkpoint(asked)


def test_a_verdict_is_stored_for_the_bundles_own_weights_only(asked, path, checkpoint, tmp_path):
    bundle = Bundle.open(path)
    report = vlexport.check(bundle)
    other = Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path / "other", depth=1, seed=1))
    assert building.store_verdict(bundle, report, other) is None
    stored = building.store_verdict(bundle, report, checkpoint)
    assert stored == Bundle.open(path)
    assert ParityReport.from_json(stored.verdict.table) == report


WRAPPED = [
    (MemoryError(), "memory"),
    (
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        "memory",
    ),
    (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "memory"),
    (RuntimeError("std::bad_alloc"), "memory"),
    (RuntimeError("can't start new thread"), "memory"),
    (ImportError("/usr/lib/state.so: failed to map segment from shared object"), "memory"),
    (OSError(12, "Cannot allocate memory"), "memory"),
    (OSError(28, "No space left on device"), "disk"),
    (OSError(27, "File too large"), "disk"),
    (OSError(122, "Disk quota exceeded"), "disk"),
    (ValueError("I/O error: No space left on device (os error 28)"), "disk"),
]


@pytest.mark.parametrize(("error", "what"), WRAPPED, ids=lambda each: str(each)[:40] or "MemoryError")
def test_what_ran_out_is_told_from_what_libraries_make_of_it(error, what):
    assert what in str(shortage(error))
    outer = RuntimeError("the exporter failed")
    outer.__cause__ = error
    assert isinstance(shortage(outer), ResourceError)


@pytest.mark.parametrize("error", [RuntimeError("Guard failed"), OSError(2, "No such file"), ValueError("x")])
def test_other_errors_are_not_taken_for_a_shortage(error, tmp_path):
    assert shortage(error, tmp_path, tmp_path) is None


def test_a_graph_built_without_room_names_the_folder(graph, tmp_path, monkeypatch):
    def build(self, graph, options, out: Path, progress):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(eager.Eager, "build", build)
    into = tmp_path / "engines"
    with pytest.raises(ResourceError, match=rf"{into}: the disk is full"):
        vlexport.build(graph, backend="eager", into=into)
