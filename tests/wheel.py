"""`make test-wheel`: sdist and wheel, installed into fresh environments and used as a first user would.

Two lanes: `pinned` installs the libraries of tests/constraints.txt, `newest` what the index gives today with
the pinned torch. `.ci/run` runs `newest` with one interpreter.

Not part of `make test`: an environment takes up to 7 GB, because torch's wheels for Linux bring CUDA, and
some minutes. pip's own configuration of the machine decides where packages come from; no interpreter is
downloaded. What cannot be tested here is listed as skipped, by name.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
PINS = ROOT / "tests" / "constraints.txt"
LANES = ("pinned", "newest")
# 571,391 in November 2026 before the trained checkpoint of the demo, whose weights are 2,229,302 deflated.
MOST_BYTES = 3_500_000


class Environment:
    """A folder with a virtual environment and an empty folder to work in; this checkout is out of sight."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.work, self.bin = folder / "work", folder / "env" / "bin"
        self.work.mkdir(parents=True)
        mine = ("PYTHON", "VIRTUAL_ENV", "XDG_", "HF_", "TORCHINDUCTOR_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(mine)}
        own = {"XDG_CACHE_HOME": folder / "cache", "XDG_DATA_HOME": folder / "data", "HF_HUB_OFFLINE": "1"}
        self.variables = kept | {name: str(value) for name, value in own.items()}

    def run(self, *words: object, code: int = 0, shown: str | None = None) -> tuple[str, str]:
        """Run a command, return what it printed on stdout and stderr; another exit code ends the test."""
        began = time.monotonic()
        done = subprocess.run(
            list(map(str, words)), capture_output=True, text=True, check=False, cwd=self.work,
            env=self.variables, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        text = shown or " ".join(map(str, words))
        if done.returncode != code:
            found = f"{self.name}: {text}: exit code {done.returncode}, not {code}"
            sys.exit(f"FAILED  {found}\n{done.stdout}{done.stderr}")
        seconds = time.monotonic() - began
        print(f"passed  {self.name}  {seconds:6.1f} s  {text}  (exit code {code})", flush=True)
        return done.stdout, done.stderr

    def pip(self, *words: object) -> None:
        shown = " ".join(Path(str(word)).name for word in words)
        self.run(self.bin / "python", "-m", "pip", "--quiet", *words, shown=f"pip {shown}")

    def vlexport(self, *words: object, code: int = 0) -> str:
        """Run the installed command; return its stdout, or of a refusal its stderr."""
        shown = " ".join(Path(str(word)).name for word in words)
        out, err = self.run(self.bin / "vlexport", *words, code=code, shown=f"vlexport {shown}")
        assert "Traceback" not in err, err
        return out if code == 0 else err


@contextmanager
def fresh(version: str, interpreter: Path, folder: Path) -> Iterator[Environment]:
    """Make an environment, and remove it: the next one needs the room."""
    made = Environment(f"Python {version}", folder / version)
    try:
        made.run(interpreter, "-m", "venv", folder / version / "env", shown="python -m venv")
        yield made
    finally:
        shutil.rmtree(folder / version)


def build(interpreter: Path, folder: Path) -> Path:
    """Build the sdist from the tracked files, and the wheel from the sdist; check what they hold."""
    words = ["git", "ls-files", "-z"]
    tracked = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    with fresh("build", interpreter, folder) as place:
        place.pip("install", "setuptools>=77")
        for each in filter(None, tracked):
            (place.work / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / each, place.work / each)
        made = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
        place.run(place.bin / "python", "-c", made, folder, shown="build_sdist")
        (sdist,) = folder.glob("vlexport-*.tar.gz")
        place.pip("wheel", "--no-deps", "--wheel-dir", folder, sdist)
        # The tree at another time gives the same bytes.
        for path in (each for each in place.work.rglob("*") if each.is_file()):
            os.utime(path, (time.time() + 86400,) * 2)
        place.pip("wheel", "--no-deps", "--wheel-dir", place.folder, place.work)
        (wheel,), (again,) = (where.glob("vlexport-*.whl") for where in (folder, place.folder))
        assert wheel.read_bytes() == again.read_bytes(), "two builds gave different wheels"
    check_contents(wheel, tracked)
    print(f"passed  {sdist.name} {sdist.stat().st_size:,} bytes, {wheel.name} {wheel.stat().st_size:,} bytes")
    return wheel


def check_contents(wheel: Path, tracked: list[str]) -> None:
    """Compare the wheel with the tracked files of the library, and read its metadata."""
    library = {
        name.replace("recipes/", "vlexport/recipes/", 1) if name.startswith("recipes/") else name
        for name in tracked
        if name.startswith(("vlexport/", "recipes/"))
    }
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (information,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(information).decode())
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == library, sorted(inside ^ library)
    assert {"vlexport/py.typed", "vlexport/recipes/qwen2_5_vl.py"} <= inside
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names), names
    assert (metadata["License-Expression"], metadata["Requires-Python"]) == ("Apache-2.0", ">=3.11")
    classifiers = {f"Programming Language :: Python :: {version}" for version in PYTHONS}
    assert classifiers <= set(metadata.get_all("Classifier", []))
    assert {"openvino", "tensorrt", "rtx", "plots"} <= set(metadata.get_all("Provides-Extra", []))
    assert wheel.stat().st_size <= MOST_BYTES


def find_python(version: str) -> Path | None:
    """Return an interpreter of a version that starts: of pyenv, of PATH, or one that uv knows."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    places = [
        *map(str, root.glob(f"versions/{version}.*/bin/python")),
        shutil.which(f"python{version}") or "",
    ]
    if uv := shutil.which("uv"):
        words = [uv, "python", "find", "--no-python-downloads", version]
        places.append(subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip())
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        done = subprocess.run([place, "-c", code], capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return Path(place)
    return None


# Its projection is zero in a new model, so everything with two axes or more gets values.
GEMMA = """
import json, pathlib, sys, torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
vision = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
          "image_size": 32, "patch_size": 8}
text = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 12, "vocab_size": 96}
config = Gemma3Config(vision_config=vision, text_config=text, mm_tokens_per_image=4)
model = Gemma3ForConditionalGeneration(config)
torch.manual_seed(0)
for weight in (each for each in model.parameters() if each.ndim > 1):
    torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
model.save_pretrained(sys.argv[1])
pixels = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
          "do_rescale": True, "rescale_factor": 1 / 255, "resample": 2}
pathlib.Path(sys.argv[1], "preprocessor_config.json").write_text(json.dumps(pixels))
"""


def use_newest(place: Environment, wheel: Path, constraints: Path) -> None:
    """Install what the index gives today beside the pinned torch; from the demo to a generic build."""
    torch = next(line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    place.pip("install", torch)
    place.pip("install", wheel, torch, "pytest")
    place.pip("check")
    words = (place.bin / "python", "-m", "pip", "list", "--format", "freeze")
    print(f"newest  {place.name}  {' '.join(place.run(*words, shown='pip list')[0].split())}")
    findings = json.loads(place.vlexport("doctor", "--deep", "--json"))["findings"]
    assert "broken" not in {each["state"] for each in findings}, findings
    assert ", passed  (" in place.vlexport("demo")
    (bundle,), media = (place.work / "engines").glob("qwen2_5_vl-*onnxruntime-*"), place.work / "demo-output"
    checkpoint = media / "qwen2_5_vl-trained"
    shown = (bundle, "--checkpoint", checkpoint, "--video", media / "video.npy", "--fps", 2)
    question = "Which shape came first?"
    assert place.vlexport("run", *shown, "--prompt", question).strip() == "Triangle"
    place.vlexport("sweep", *shown, "--prompt", question, "--rates", "0,0.5", "--selectors", "evs")
    place.run(place.bin / "python", "-c", GEMMA, place.work / "gemma", shown="python writes a tiny Gemma 3")
    place.vlexport("build", "gemma", "--output-dir", "generic")
    (bundle,) = (place.work / "generic").glob("gemma-onnxruntime-*")
    place.vlexport("check", bundle, "--accuracy")
    # Decoders of all families: this file imports nothing of the tests.
    families = shutil.copy(ROOT / "tests" / "reference" / "test_decoder_parts.py", place.work)
    place.run(place.bin / "python", "-m", "pytest", "-q", families, shown="pytest test_decoder_parts.py")


def diagnosed(place: Environment) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in json.loads(place.vlexport("doctor", "--json"))["findings"]}


def use(place: Environment, wheel: Path, constraints: Path) -> None:
    """Install the wheel without extras, then with one, then without libraries that it needs."""
    place.pip("install", "--no-cache-dir", "--constraint", constraints, wheel)
    place.pip("check")
    assert place.vlexport("--version").strip() == wheel.name.split("-")[1]
    assert "Usage: vlexport" in place.vlexport("--help")
    listed = json.loads(place.vlexport("list", "--json"))
    assert "qwen2_5_vl" in {each["name"] for each in listed["recipes"]}
    findings = json.loads(place.vlexport("doctor", "--json"))["findings"]
    states = {each["name"]: each["state"] for each in findings}
    assert states["backend onnxruntime"] == "fine"
    assert "broken" not in states.values(), states
    assert ", passed  (" in place.vlexport("demo")
    checkpoint = place.work / "demo-output" / "qwen2_5_vl-trained"
    for backend, extra in (("openvino", "openvino"), ("tensorrt", "tensorrt"), ("tensorrt_rtx", "rtx")):
        message = place.vlexport("build", checkpoint, "--backend", backend, code=4)
        assert f"pip install 'vlexport[{extra}]'" in message, message
    with_extra = f"vlexport[openvino] @ {wheel.as_uri()}"
    place.pip("install", "--no-cache-dir", "--constraint", constraints, with_extra)
    assert ", passed  (" in place.vlexport("demo", "--backend", "openvino")
    # Two wheels of ONNX Runtime, and then the files that one of them took with it.
    place.pip("install", "--no-deps", "onnxruntime")
    assert {"onnxruntime", "onnxruntime-gpu"} <= set(diagnosed(place))
    place.pip("uninstall", "--yes", "onnxruntime")
    advice = diagnosed(place)["backend onnxruntime"]["advice"]
    assert advice.startswith("pip install --force-reinstall"), advice
    place.pip(*advice.split()[1:])
    assert diagnosed(place)["backend onnxruntime"]["state"] == "fine"
    (bundle,) = (place.work / "engines").glob("qwen2_5_vl-*onnxruntime-*")
    words = ("encode", bundle, "--image", place.work / "demo-output" / "image.png", "-o", "x.safetensors")
    place.pip("uninstall", "--yes", "onnxruntime-gpu")
    message = place.vlexport(*words, code=4)
    assert "package onnxruntime is not installed. pip install vlexport" in message, message
    place.pip("uninstall", "--yes", "transformers")
    message = place.vlexport("build", checkpoint, "--backend", "eager", code=4)
    assert "package 'transformers' is not installed" in message, message
    assert "transformers" in place.vlexport("doctor", code=4)
    place.pip("uninstall", "--yes", "torch")
    assert "Usage: vlexport" in place.vlexport("--help")
    message = place.vlexport("build", checkpoint, code=4)
    assert "the package torch is not installed. pip install vlexport" in message, message
    assert "torch" in place.vlexport("doctor", code=4)


def use_uvx(uvx: str, interpreter: Path, wheel: Path, folder: Path, constraints: Path) -> None:
    """Run the demo as `uvx vlexport demo` does, from the wheel in place of the index."""
    place = Environment("uvx", folder / "uvx")
    place.variables |= {"UV_CACHE_DIR": str(place.folder / "uv"), "UV_NO_PROGRESS": "1"}
    words = ("--quiet", "--python", interpreter, "--constraints", constraints, "--from", wheel)
    out, _ = place.run(uvx, *words, "vlexport", "demo", shown="uvx --from WHEEL vlexport demo")
    assert ", passed  (" in out
    shutil.rmtree(place.folder)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.wheel", description=__doc__)
    parser.add_argument("--python", nargs="*", default=PYTHONS, metavar="3.X", help="versions to test")
    parser.add_argument("--lanes", nargs="*", choices=LANES, default=LANES, help="lanes to run")
    given = parser.parse_args()
    found = {version: find_python(version) for version in given.python}
    skipped = [f"Python {version}: no interpreter here" for version, path in found.items() if path is None]
    with tempfile.TemporaryDirectory(prefix="vlexport-wheel-") as name:
        folder, first = Path(name), next((path for path in found.values() if path), Path(sys.executable))
        wheel = build(first, folder)
        passed = 1
        for lane, version in itertools.product(given.lanes, found):
            if (interpreter := found[version]) is not None:
                with fresh(version, interpreter, folder) as place:
                    (use_newest if lane == "newest" else use)(place, wheel, PINS)
                passed += 1
        uvx = shutil.which("uvx")
        if "pinned" in given.lanes and uvx is not None:
            use_uvx(uvx, first, wheel, folder, PINS)
            passed += 1
        elif "pinned" in given.lanes:
            skipped.append("uvx vlexport demo: no uvx here")
    for each in skipped:
        print(f"skipped {each}")
    if passed == 1:
        sys.exit("FAILED  no environment was made")
    print(f"{passed} passed, 0 failed, {len(skipped)} skipped")


if __name__ == "__main__":
    main()
