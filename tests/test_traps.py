"""A folder of files with the names of libraries: no command, and no process of one, imports from it."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import typer

from tests._build.test_build_faults import SCRIPT
from tests.media.made_videos import video
from tests.repo.test_packaging import wheel
from tests.repo.tree import ROOT
from vlexport import system
from vlexport._build import token_graphs
from vlexport.backends import BuildLimits, _child
from vlexport.cli import app
from vlexport.errors import VlexportError
from vlexport.media import read_video

__all__ = ["wheel"]

# Read when an interpreter starts, or imported where they are found: libraries that may be missing.
NAMES = {"sitecustomize", "usercustomize", "tensorrt", "tensorrt_rtx", "torch_tensorrt", "triton", "cupy"}
NAMES |= {"torchvision", "decord", "matplotlib", "pandas", "scipy", "recipes", "tests", "main"}
PACKAGES = {"vlexport", "numpy"}


@pytest.fixture
def traps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a trap for every module that can be imported here; each writes its name."""
    folder = tmp_path / "traps"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *packages_distributions(), *NAMES, *PACKAGES}:
        path = folder / (f"{name}/__init__.py" if name in PACKAGES else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(folder / 'RAN')!r}, 'a').write('{name}\\n')\n")
    (folder / "beside.pth").write_text(f"import sys; open({str(folder / 'RAN')!r}, 'a').write('pth\\n')\n")
    monkeypatch.chdir(folder)
    for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
        monkeypatch.delenv(name, raising=False)
    return folder


def ran(traps: Path) -> list[str]:
    return (traps / "RAN").read_text().split() if (traps / "RAN").exists() else []


def test_the_traps_catch_a_process_that_looks_there(traps: Path) -> None:
    subprocess.run([sys.executable, "-c", "import json, numpy"], check=True)
    assert ran(traps) == ["json", "numpy"]


def test_no_process_that_the_library_starts_imports_from_the_current_folder(
    traps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in a notebook, and of a process that was started where its own program lies.
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    assert len(read_video(video(num=4)).frames) == 4
    job = _child.Work(function="os:not_there", job="{}", library="no library", limits=BuildLimits(seconds=60))
    with pytest.raises(VlexportError, match="AttributeError"):
        _child.run(job, lambda *_: None)
    # A process in that process, as torch's compiler has them.
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import json'], check=True)"
    subprocess.run(system.command(program), env=system.environment(), check=True)
    assert ran(traps) == []


@pytest.mark.slow
def test_the_process_that_compiles_graphs_beside_a_build_imports_nothing_from_the_current_folder(
    traps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_child, "end", subprocess.Popen.wait)
    planned = token_graphs.planned_graphs("evs", "cpu")
    with token_graphs.compiling(planned, tmp_path, "float32"):
        pass
    assert [each.name for each in tmp_path.glob("*/graphs/*.pt2")] == ["tokens.pt2"]
    assert ran(traps) == []


def test_python_m_in_a_checkout_imports_libraries_from_where_they_are(traps: Path, tmp_path: Path) -> None:
    """`-m` itself looks in the current folder first, so only what this package imports can be kept out."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("vlexport", "recipes"):
        (checkout / name).symlink_to(ROOT / name)
    for name in ("json", "typer", "rich", "torch", "numpy", "logging"):
        (checkout / f"{name}.py").write_text((traps / "json.py").read_text())
    words = [sys.executable, "-m", "vlexport", "--version"]
    done = subprocess.run(words, cwd=checkout, check=False, capture_output=True, text=True)
    assert (done.returncode, ran(traps)) == (0, []), done.stderr


def verbs() -> list[str]:
    """Every command and subcommand, as typed."""
    group = typer.main.get_command(app)
    return sorted(
        f"{name} {inner}" if inner else name
        for name, command in group.commands.items()  # type: ignore[attr-defined]
        for inner in getattr(command, "commands", {None: None})
    )


def commands(clip: Path) -> dict[str, list[str]]:
    """Words of every verb, in an order in which each finds what it needs; `*` is in the place of a key."""
    engines, checkpoint = "engines/[a-z]*-onnxruntime-*", "demo-output/qwen2_5_vl-trained"
    decoder, compiled = ["--checkpoint", checkpoint], "engines/[a-z]*-inductor-*"
    return {
        "demo": [],
        "plan": [checkpoint],
        "build": [checkpoint, "--backend", "inductor", "--profile", "image", "--build-seconds", "500"],
        "encode": [compiled, "--image", "demo-output/image.png", "--output", "image.safetensors"],
        "encode ": [engines, "--video", str(clip), "--prune", "0.5", "--output", "clip.safetensors"],
        "encode  ": [engines, "--list", "list.txt", "--output-dir", "collection"],
        "run": [engines, "--video", str(clip), "--prompt", "which", "--max-new-tokens", "1", *decoder],
        "watch": [engines, str(clip), "--as-fast", "--ask", "1:which", "--max-new-tokens", "1", *decoder],
        "sweep": [engines, "--video", str(clip), "--prompt", "which", "--rates", "0,0.5", *decoder],
        "bench": [engines, "--rounds", "1"],
        "inspect": [engines],
        "check": [engines, "--run", "--accuracy"],
        "trust": [engines, "DIGEST"],
        "report": [engines, "--output", "report.html"],
        "compare": [engines, compiled],
        "push": [engines, "./hub"],
        "pull": ["./hub", "--output-dir", "pulled"],
        "repro": [engines, "--output", "repro.zip"],
        "repro ": [engines, "--inputs-only", "--output", "inputs"],
        "list": [],
        "doctor": ["--deep"],
        "explain": ["untrusted"],
        "bundles ls": ["--check"],
        "bundles tag": [engines, "mine"],
        "bundles rm": ["mine"],
        "new recipe": [checkpoint, "--output", "my_recipe.py"],
        "new backend": ["my_backend"],
        "cache ls": [],
        "cache prune": ["--dry-run"],
    }


def test_every_verb_is_among_the_commands() -> None:
    assert sorted({name.strip() for name in commands(Path())}) == verbs()


def run_all(program: list[str | Path], traps: Path, clip: Path, names: set[str] | None = None) -> None:
    """Run the commands in the folder of traps; each succeeds there."""
    (traps / "list.txt").write_text(f"{clip}\ndemo-output/image.png\n")
    for name, given in commands(clip).items():
        if names is None or name.strip() in names:
            words = [str(next(traps.glob(word))) if "*" in word else word for word in given]
            if "DIGEST" in words:
                words[-1] = hashlib.sha256(Path(words[0], "manifest.json").read_bytes()).hexdigest()
            done = subprocess.run(
                [*program, *name.split(), *words], cwd=traps, capture_output=True, text=True, check=False
            )
            assert (name, done.returncode, ran(traps)) == (name, 0, []), done.stderr


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "clip.mp4"
    path.write_bytes(video())
    return path


@pytest.mark.slow
def test_no_verb_of_a_checkout_imports_from_the_current_folder(traps: Path, clip: Path) -> None:
    run_all([SCRIPT], traps, clip)


@pytest.mark.full
def test_no_verb_of_an_installed_wheel_imports_from_the_current_folder(
    wheel: Path, traps: Path, clip: Path, tmp_path: Path
) -> None:
    """Its libraries are those of this environment; commands start as `pip install` writes them."""
    place = tmp_path / "environment"
    venv.create(place, with_pip=False)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    words = ["from vlexport.cli import main; main()", "#!" + str(place / "bin" / "python") + "\n"]
    (place / "bin" / "vlexport").write_text("".join(reversed(words)))
    (place / "bin" / "vlexport").chmod(0o755)
    home = subprocess.run(
        [place / "bin" / "python", "-P", "-c", "import vlexport; print(vlexport.__file__)"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert Path(home.strip()).is_relative_to(site)
    run_all([place / "bin" / "vlexport"], traps, clip, {"demo", "build", "encode", "doctor"})
