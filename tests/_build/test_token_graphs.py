"""Graphs of pruning and positions in bundles: compiled once, opened without a compiler, else eager."""

from __future__ import annotations

import errno
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config as inductor_config
from packaging.version import Version

from tests.runtime.conftest import bundles
from tests.runtime.recorded import CHECKPOINT, TRUTHS
from tests.strangers.mutations import mutate_bytes
from vlexport._build import aoti, token_graphs
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport._build.token_graphs import open_graphs, planned_graphs, write_graphs
from vlexport.backends import Folder
from vlexport.bundle.manifest import GraphsIdentity
from vlexport.checkpoint import Checkpoint
from vlexport.errors import BundleError, InputError, MisfitError, ResourceError, UnsupportedError
from vlexport.positions.mrope import initial_positions
from vlexport.positions.plan import write_positions
from vlexport.pruning.methods import METHODS, REQUESTED
from vlexport.target import fit

__all__ = ["bundles"]

REPOSITORY = Path(__file__).parents[2]
NOWHERE = {"PATH": "", "CXX": "/nowhere/g++", "CC": "/nowhere/gcc"}

# Tracing, compiling and starting programs raise; the recorded requests are answered all the same.
ANSWERS = """
import json, subprocess, sys
import torch
from tests.runtime.recorded import CHECKPOINT, TRUTHS, recorded
from vlexport.runtime.pipeline import load

def refused(*given, **named):
    raise AssertionError("traced, compiled or started a program")

torch.export.export = torch.compile = torch._dynamo.optimize = subprocess.Popen.__init__ = refused
with load(sys.argv[1], checkpoint=CHECKPOINT) as pipeline:
    answers = {case["name"]: pipeline.generate(recorded(case["name"]).request) for case in TRUTHS}
counts = torch._dynamo.utils.counters["stats"]
print(json.dumps({
    "form": pipeline.graphs.form,
    "compiled": sum(counts.values()),
    "forms": sorted({form for answer in answers.values() for form in answer.forms.values()}),
    "tokens": {name: list(answer.token_ids) for name, answer in answers.items()},
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["program.pt2", "tokens.pt2"])
def test_packages_name_no_folder_of_the_machine_that_made_them(bundles, name):
    bundle = bundles("inductor")
    with zipfile.ZipFile(bundle / name) as package:
        content = b"".join(map(package.read, package.namelist()))
    for place in (bundle.parent, Path(torch.__file__).parent, Path(tempfile.gettempdir())):
        assert str(place).encode() not in content


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "onnxruntime", "openvino", "inductor"])
def test_with_the_compiler_hidden_packages_give_the_recorded_tokens(bundles, backend):
    words = [sys.executable, "-c", ANSWERS, str(bundles(backend))]
    done = subprocess.run(
        words, cwd=REPOSITORY, env={**os.environ, **NOWHERE}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["form"], found["forms"], found["compiled"]) == ("compiled", ["compiled"], 0)
    assert found["tokens"] == {case["name"]: case["token_ids"] for case in TRUTHS}


STOPPED = """
import sys, time
from vlexport.cli import interrupts, main
from vlexport.runtime.pipeline import Pipeline

def wait(*given, **named):
    print("ready", flush=True)
    try:
        time.sleep(600)
    except BaseException:
        if sys.argv[1] == "unwound":
            raise
        time.sleep(600)

interrupts.GRACE_SECONDS = 0.5
Pipeline.stream = wait
main(["run", *sys.argv[2:], "--prompt", "What is this?"])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("end", ["unwound", "in the middle of a long step"])
def test_a_command_that_is_stopped_removes_the_programs_that_torch_has_unpacked(bundles, tmp_path, end):
    words = [sys.executable, "-c", STOPPED, end, str(bundles("eager")), "--checkpoint", str(CHECKPOINT)]
    own = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=own)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    # Not even a kill leaves something.
    assert list(tmp_path.iterdir()) == []
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert list(tmp_path.iterdir()) == []


def script(folder: Path, line: str) -> str:
    """Write a compiler that is a line of shell."""
    (path := folder / "g++").write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/nowhere/g++", "no C++ compiler where the bundle was built"),
        ("false", "torch could not compile tokens.pt2"),
        ("g++ -x c /dev/null -shared -o", "tokens.pt2 was compiled and does not run here"),
    ],
)
def test_without_a_compiler_that_works_a_build_has_eager_graphs_and_the_reason(
    tmp_path, monkeypatch, compiler, reason
):
    if "null" in compiler:
        empty = f"for last; do :; done; exec {compiler} $last"
        compiler = script(tmp_path, f'case "$*" in *wrapper.so) {empty};; *) exec g++ "$@";; esac')
        # torch keeps what another compiler made of the same source.
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
        # What this process has loaded may lend its parts of the library.
        monkeypatch.setattr(token_graphs, "TRIED_APART", ("cpu",))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = request(
        Checkpoint.open(CHECKPOINT), backend="eager", profile="thumbnail", output_dir=tmp_path / "engines"
    )
    # torch reads the variable when it is imported.
    with inductor_config.patch({"cpp.cxx": (None, compiler)}):
        bundle = build_checkpoint(spec).require_passed()
    graphs = bundle.manifest.graphs
    assert (graphs.selector, graphs.target) == ("evs", None)
    assert graphs.reason.startswith(reason)
    assert not [name for name in bundle.manifest.files if name == token_graphs.TOKENS]
    row = next(each for each in bundle.verdict.table["rows"] if each["check"] == "pruning graph")  # type: ignore[index,union-attr,call-overload]
    assert row["note"].startswith(f"evs, eager: {reason}")  # type: ignore[index,call-overload,union-attr]


def identity(folder: Path) -> GraphsIdentity:
    folder.mkdir()
    return write_graphs(planned_graphs("evs", "cpu"), folder, "float32")


def test_packages_of_another_machine_or_version_run_eagerly_with_the_reason(tmp_path):
    made = identity(tmp_path / "bundle")
    assert made.target is not None
    other = replace(made, target=replace(made.target, torch="2.12.0"))
    graphs = open_graphs(other, Folder(tmp_path / "bundle"), "float32")
    assert graphs.form == "eager"
    assert graphs.stated.startswith("eager: packages for inductor@")
    assert graphs.stated.endswith("differ from this machine in torch")


def test_graphs_that_are_none_are_a_damaged_bundle(tmp_path):
    folder = tmp_path / "bundle"
    made = identity(folder)
    with pytest.raises(BundleError, match=r"no pruning method 'random'.*Build the bundle again"):
        open_graphs(replace(made, selector="random"), Folder(folder), "float32")
    (folder / "tokens.pt2").write_bytes(b"no package")
    with pytest.raises(BundleError, match="the graphs of pruning and positions cannot be opened"):
        open_graphs(made, Folder(folder), "float32")
    (folder / "tokens.pt2").unlink()
    with pytest.raises(BundleError, match=r"No such file.*tokens\.pt2"):
        open_graphs(made, Folder(folder), "float32")


def test_graphs_that_find_no_memory_are_no_damaged_bundle(tmp_path, monkeypatch):
    folder = tmp_path / "bundle"
    made = identity(folder)

    def fail(*_: object) -> None:
        raise RuntimeError("Error in dlopen: model.wrapper.so: failed to map segment from shared object")

    monkeypatch.setattr(token_graphs, "load_function", fail)
    with pytest.raises(ResourceError, match="out of memory"):
        open_graphs(made, Folder(folder), "float32")


def test_loaded_programs_leave_nothing_in_the_temporary_folder(tmp_path, monkeypatch):
    made = identity(tmp_path / "bundle")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    graphs = open_graphs(made, Folder(tmp_path / "bundle"), "float32")
    assert (graphs.form, list((tmp_path / "temporary").iterdir())) == ("compiled", [])
    rows, share = torch.randn(2, 4, 4), torch.full((6,), 0.7)
    found, plain = graphs.selection.run(rows, share), graphs.pruning_by(graphs.selection.selector).selection
    assert torch.equal(found[1], plain.run(rows, share)[1])


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("missing", MisfitError, "No such file"),
        ("noexec", MisfitError, "mounted noexec"),
        ("full", ResourceError, "0.0 MB free"),
        ("filling", ResourceError, "the disk is full"),
    ],
)
def test_graphs_run_eagerly_with_a_word_where_programs_cannot_be_unpacked(
    tmp_path, monkeypatch, caplog, fault, kind, reason
):
    made, place = identity(tmp_path / "bundle"), tmp_path / "temporary"
    monkeypatch.setenv("TMPDIR", str(place))
    if fault != "missing":
        place.mkdir()
    if fault == "noexec":
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    if fault == "full":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    if fault == "filling":
        monkeypatch.setattr(tempfile, "NamedTemporaryFile", full_disk)
    with pytest.raises(kind, match=rf"TMPDIR={place}: .*{reason}"):
        aoti.load_function((tmp_path / "bundle" / "tokens.pt2").read_bytes(), "tokens.pt2")
    graphs = open_graphs(made, Folder(tmp_path / "bundle"), "float32")
    assert (graphs.form, f"TMPDIR={place}" in graphs.reason) == ("eager", True)
    assert f"run eagerly: TMPDIR={place}" in caplog.text


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_tensors_that_packages_do_not_take_run_eagerly(tmp_path):
    graphs = open_graphs(identity(tmp_path / "bundle"), Folder(tmp_path / "bundle"), "float32")
    rows = torch.randn(8, 4)
    assert graphs.selection_for(rows) == (graphs.selection, "compiled")
    for given in (rows.half(), rows.to("meta")):
        selection, form = graphs.selection_for(given)
        assert selection != graphs.selection
        assert form.startswith("eager: embeddings are ")
    selection, _ = graphs.selection_for(rows.half())
    assert selection.run(rows.half().view(2, 4, 4), torch.full((6,), 0.7))[1].shape == (6,)
    other = graphs.pruning_by(METHODS["vidcom2"])
    reason = "eager: the package prunes by another method (build with --selector vidcom2)"
    assert other.selection_for(rows)[1] == reason
    for selector in (METHODS["divprune"], REQUESTED["relevance"]):
        form = graphs.pruning_by(selector).selection_for(rows, per_frame=2000)[1]
        assert form == "eager: the package prunes by another method"


@pytest.mark.seconds
def test_a_package_is_compiled_once_and_again_where_its_copy_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[str] = []

    @contextmanager
    def begin(program, path, settings):
        made.append(path.name)
        yield lambda: path.write_bytes(b"package")

    monkeypatch.setattr(token_graphs, "begun_package", begin)
    monkeypatch.setattr(token_graphs, "load_function", lambda *_: lambda *_: [])
    identity(tmp_path / "one")
    identity(tmp_path / "two")
    assert made == ["tokens.pt2"]
    for path in (tmp_path / "cache").rglob("*.cache"):
        path.write_bytes(path.read_bytes()[:-1])
    identity(tmp_path / "three")
    assert len(made) == 2
    assert (tmp_path / "three" / "tokens.pt2").read_bytes() == b"package"
    (tmp_path / "cache" / "vlexport" / "graphs").chmod(0o777)
    identity(tmp_path / "four")
    assert len(made) == 3, "others could have written there"


@pytest.mark.slow
def test_graphs_are_compiled_by_another_process_while_a_tower_is_traced(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (scratch := tmp_path / "scratch").mkdir()

    def begin(program, path, settings):
        raise AssertionError(f"{path.name} was compiled here")

    monkeypatch.setattr(token_graphs, "begun_package", begin)
    with token_graphs.compiling(planned_graphs("evs", "cpu"), scratch, "float32"):
        deadline = time.monotonic() + 240
        while len(list((tmp_path / "cache").rglob("*.cache"))) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        made = identity(tmp_path / "bundle")
    assert open_graphs(made, Folder(tmp_path / "bundle"), "float32").form == "compiled"


@pytest.mark.slow
def test_packages_of_a_gpu_are_called_in_another_process_before_they_are_kept(tmp_path, monkeypatch):
    """Also by a g++ that finds no shared C++ library; all of <regex> in a copy of its own fails there."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("CXX", script(tmp_path, 'exec g++ -static-libstdc++ "$@"'))
    monkeypatch.setattr(token_graphs, "TRIED_APART", ("cpu",))
    made = identity(tmp_path / "bundle")
    assert open_graphs(made, Folder(tmp_path / "bundle"), "float32").form == "compiled"


@pytest.mark.seconds
def test_a_compiler_that_crashes_ends_no_build(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", script(tmp_path, 'kill -SEGV "$PPID"; sleep 5'))
    monkeypatch.setattr(token_graphs, "TRIED_APART", ("cpu",))
    made = identity(tmp_path / "bundle")
    assert made.target is None
    assert made.reason.startswith("torch's compiler crashed twice while building: status -11")
    assert list((tmp_path / "bundle").iterdir()) == []


@pytest.mark.parametrize(("uses", "has"), [(aoti._REGEX_USES, True), ((), False)])
def test_compilers_get_a_light_header_where_torch_takes_no_more_of_it(monkeypatch, tmp_path, uses, has):
    monkeypatch.setenv("CPATH", "/of/the/user")
    monkeypatch.setattr(aoti, "_REGEX_USES", uses)
    with aoti._light_header(tmp_path):
        *places, last = os.environ["CPATH"].split(os.pathsep)
        assert [Path(place, "regex").is_file() for place in places] == [True] * has
    assert last == os.environ["CPATH"] == "/of/the/user"


def test_without_levels_a_package_is_for_this_processor_alone(monkeypatch, tmp_path):
    """torch 2.11 has no setting for them, and compiles for the processor at hand."""
    monkeypatch.setattr(aoti, "LEVELS_SINCE", Version("99"))
    here = aoti.target_here()
    assert re.fullmatch("native-[0-9a-f]{16}", here.instruction_set or "")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "amx_int8": False})
    misfit = fit(here, aoti.target_here())
    assert misfit is not None
    assert misfit.fields == ("instruction set",)
    found = {}

    def write(_, package_path, **options):
        zipfile.ZipFile(package_path, "w").close()
        found.update(options)

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", write)
    aoti.write_package(None, tmp_path / "package.pt2", {})  # type: ignore[arg-type]
    assert "cpp.march" not in found["inductor_configs"]


def test_a_method_that_a_family_or_nobody_has_is_refused(tmp_path):
    source = Checkpoint.open(CHECKPOINT)
    with pytest.raises(
        UnsupportedError, match=r"no pruning method 'random'. There are: divprune, evs, evs-snap"
    ):
        request(source, selector="random", output_dir=tmp_path)
    assert request(source, selector="vidcom2", output_dir=tmp_path).selector == "vidcom2"
    assert request(source, output_dir=tmp_path).selector == "evs"


def test_prompts_without_media_need_no_graph():
    calls = []

    def write(*given):
        calls.append(given)
        return write_positions(*given)

    from vlexport.positions.rules import PositionRule

    found = initial_positions([1, 2, 3], [], PositionRule(kind="time_scaled"), write=write)
    assert (found.table_RN.tolist(), calls) == ([[0, 1, 2]] * 3, [])


def package(root: str = "prune") -> bytes:
    """A file as torch writes one: entries as they are, below the name of the file."""
    dice, file = random.Random(1), io.BytesIO()
    with zipfile.ZipFile(file, "w") as whole:
        for name in (
            "archive_format",
            "data/aotinductor/model/c.wrapper.so",
            "data/aotinductor/model/c.json",
        ):
            whole.writestr(f"{root}/{name}", dice.randbytes(40_000))
    return file.getvalue()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Packages that torch was given."""
    found: list[str] = []

    class Loader:
        def __init__(self, path: str, *_: object) -> None:
            found.append(path)

        def get_metadata(self) -> dict[str, str]:
            return {}

    monkeypatch.setattr("torch._C._aoti.AOTIModelPackageLoader", Loader)
    return found


def test_a_sound_package_is_opened(loads: list[str]) -> None:
    aoti.load_function(package(), "prune.pt2")
    assert len(loads) == 1


def test_damaged_bytes_of_a_package_never_reach_torch(loads: list[str]) -> None:
    sound, opened = package(), 0
    with zipfile.ZipFile(io.BytesIO(sound)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    for seed in range(300):
        content = mutate_bytes(sound, "prune.pt2", seed).content
        try:
            aoti.load_function(content, "prune.pt2")
        except InputError:
            continue
        # What is damaged is beside the entries: dates, versions, padding.
        opened += 1
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            assert {name: archive.read(name) for name in archive.namelist()} == entries, seed
    assert len(loads) == opened < 10


@pytest.mark.parametrize("root", ["positions", "program", "prune2", ""])
def test_a_package_that_was_written_as_another_file_is_refused(loads: list[str], root: str) -> None:
    with pytest.raises(InputError, match=r"prune\.pt2: a package of .*not of this file"):
        aoti.load_function(package(root), "prune.pt2")
    assert loads == []
