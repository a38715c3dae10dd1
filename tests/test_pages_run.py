"""Every command and every program of the pages runs, as it stands there, on the recorded checkpoint.

The words that a page uses for a reader's own files are files of a folder: SOURCE, photo.jpg, clip.mp4.
BUNDLE is what the page has built last.
"""

from __future__ import annotations
import __future__

import base64
import importlib
import json
import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from vlexport.recipes.demo.writing import write_checkpoint

from tests.adapters import write_adapter
from tests.cli.lines import SCRIPT, Ran, vlexport
from tests.media.made_videos import video
from tests.pages import GUIDES, ROOT, arguments_of, is_name, name_of, shell_lines, shown
from tests.runtime.recorded import CHECKPOINT
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint

ALIASES = (
    "SOURCE",
    "CHECKPOINT",
    "Qwen/Qwen2.5-VL-3B-Instruct",
    "path/to/checkpoint",
    "path/to/tiny-checkpoint",
)
# What ends with another exit code, by page and command.
EXIT_CODES = {
    ("docs/results/first_hour.md", "vlexport plan SOURCE --backend onnxruntime --dtype fp16"): 2,
    ("docs/results/first_hour.md", "vlexport plan SOURCE --backend onnxruntim"): 2,
    # Without --fps.
    (
        "docs/results/first_hour.md",
        "vlexport run BUNDLE --prompt a --video clip.npy --prune 0.5",
    ): 2,
    (
        "docs/results/first_hour.md",
        "vlexport encode OTHER --image large.png --output x.safetensors",
    ): 6,  # 3000x2000 pixels
    # Without a terminal; `tests/cli/test_conversation.py` has conversations.
    ("docs/results/first_hour.md", "vlexport run BUNDLE"): 2,
    ("docs/tensorrt.md", "vlexport check BUNDLE --accuracy"): 4,  # without the GPU
    (
        "docs/backends.md",
        "vlexport build SOURCE --backend onnxruntime --device cuda --dtype float16",
    ): 2,  # without the GPU
    (
        "docs/backends.md",
        "vlexport build SOURCE --backend openvino --dtype bfloat16",
    ): 0 if "avx512_bf16" in Path("/proc/cpuinfo").read_text(encoding="utf-8") else 2,
}
# Any name will do in their place.
FREE = {"--recipe NAME": "--recipe qwen2_vl", "--backend NAME": "--backend eager"}
# Their programs are run without torch and vlexport, and on several chunks, by tests of their own.
ELSEWHERE = ("docs/portable.md",)


def piped(line: str) -> Ran:
    """Run a command that reads its input from a file, in a shell."""
    words = line.replace("vlexport", str(SCRIPT), 1)
    ran = subprocess.run(words, shell=True, capture_output=True, text=True, check=False)
    return Ran(code=ran.returncode, out=ran.stdout, err=ran.stderr)


class Desk:
    """A reader's folder: the names that pages use, the bundle at hand, and what ran before."""

    def __init__(self, bundle: str, other: str) -> None:
        self.first = self.bundle = bundle
        self.other = other
        self.ran: dict[str, Ran] = {}

    def filled(self, text: str) -> str:
        """Return a command or a program with the bundle and its digest in place."""
        url = "data:image/png;base64," + base64.b64encode(Path("after.png").read_bytes()).decode()
        words = {
            "data:image/png;base64,...": url,
            "engines/...": self.bundle,
            "engines/BUNDLE": self.bundle,
            "OTHER_BUNDLE": self.other,
            "OTHER": self.other,
            "BUNDLE": self.bundle,
            "DIGEST": Bundle.open(Path(self.bundle)).digest,
            **FREE,
        }
        return re.sub(
            "|".join(rf"(?<!\w){re.escape(each)}(?!\w)" for each in words),
            lambda found: words[found[0]],
            text,
        )

    def run(self, page: str, line: str) -> str:
        """Run a command of vlexport once; return what went wrong, or nothing."""
        whole = self.filled(line)
        if whole not in self.ran:
            Path("bug.zip").unlink(missing_ok=True)  # several pages write it, and `repro` replaces no file
            self.ran[whole] = piped(whole) if " < " in whole else vlexport(*(arguments_of(whole) or ()))
        ran = self.ran[whole]
        if ran.code != EXIT_CODES.get((page, line), 0):
            return f"{whole}: exit code {ran.code}\n{ran.err[-2000:]}"
        if " < " not in line and (target := re.search(r"\s>\s*(\S+)", line)):
            Path(target[1]).write_text(ran.out, encoding="utf-8")
        if ran.code == 0 and "build" in (arguments_of(line) or ())[:2]:
            self.bundle = ran.lines[-1]
        return ""

    def faults(self, page: str, text: str, names: dict[str, Any]) -> list[str]:
        self.bundle = self.first
        found = []
        for kind, code in shown(text):
            if kind == "python":
                found.append(self.program(code, names))
            elif arguments_of(code) is not None and not is_name(code):
                found.append(self.run(page, code))
        return [each for each in found if each]

    def program(self, code: str, names: dict[str, Any]) -> str:
        if re.search("^import ray$", code, flags=re.MULTILINE):
            return ""  # `make test-ray` runs it
        try:
            exec(compile(self.filled(code), "page", "exec", __future__.annotations.compiler_flag), names)
        except Exception as error:  # noqa: BLE001  whatever the page does wrong
            return f"{code}\n{type(error).__name__}: {error}"
        return ""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("desk")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        shutil.copytree(CHECKPOINT, "checkpoint")
        for name in ALIASES:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).symlink_to((folder / "checkpoint").resolve())
        for name in ("mine.py", "path/to/mine.py"):
            shutil.copyfile(ROOT / "recipes" / "qwen2_5_vl.py", name)
        # Of one layer: with factors for all, worst tokens were off by 7.1e-5 of 3.6e-5 allowed on far rows.
        write_adapter(Path("ADAPTER"), Checkpoint.open(CHECKPOINT), ".blocks.0.mlp.down_proj")
        Path("org/name").mkdir(parents=True)  # in place of a repository on the Hub
        noise = np.random.default_rng(1).integers(0, 256, (8, 84, 112, 3), dtype=np.uint8)
        for name in ("photo.jpg", "picture.png", "after.png", "page.png"):
            Image.fromarray(noise[0]).save(name)
        Image.new("RGB", (3000, 2000)).save("large.png")
        Path("media.jsonl").write_text(
            '{"image": "photo.jpg"}\n{"video": "clip.npy", "id": "clip"}\n', "utf-8"
        )
        np.save("clip.npy", noise)
        Path("clip.mp4").write_bytes(video(num=8))
        Path("photos").mkdir()
        shutil.copyfile("photo.jpg", "photos/photo.jpg")
        question = {"id": "1", "video": "clip.mp4", "prompt": "What happens?", "answer": "Nothing"}
        Path("task.jsonl").write_text(json.dumps(question), encoding="utf-8")
        bundles = []
        for profile in (("--profile", "image,video"), ("--max-pixels", 20000, "--max-images", 1)):
            ran = vlexport("build", "SOURCE", *profile)
            assert ran.code == 0, ran.err
            bundles.append(ran.lines[-1])
        for name, bundle in zip(("a.onnx", "b.onnx"), bundles, strict=True):
            shutil.copyfile(Path(bundle) / "model.onnx", name)
        assert vlexport("plan", "SOURCE", "--backend", "eager", "--write", "build.toml").code == 0
        table = vlexport("check", bundles[0], "--accuracy", "--json").out
        for name in ("before.json", "after.json"):
            Path(name).write_text(table, encoding="utf-8")
        yield Desk(*bundles)


def names_of(page: Path) -> dict[str, Any]:
    """Return what the programs of a page take for granted."""
    if page.name == "recipes.md":  # fragments of a recipe
        return dict(vars(importlib.import_module("vlexport.recipes.qwen2_vl")))
    if page not in (ROOT / "README.md", ROOT / "docs" / "generic.md"):
        return {}
    from transformers import (
        AutoImageProcessor,
        AutoModelForImageTextToText,
        AutoTokenizer,
        Qwen2_5_VLProcessor,
    )

    # Its class asks for a processor of videos, which needs torchvision.
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    kind: Any = type("Processor", (Qwen2_5_VLProcessor,), unchecked)
    pictures = AutoImageProcessor.from_pretrained(CHECKPOINT)
    processor = kind(pictures, AutoTokenizer.from_pretrained(CHECKPOINT))
    with Image.open("photo.jpg") as opened:
        picture = opened.convert("RGB")
    own = {"picture": picture, "prompt": "<|vision_start|><|image_pad|><|vision_end|>What?"}
    if page.name == "README.md":
        model = AutoModelForImageTextToText.from_pretrained(CHECKPOINT).eval()
        return {**own, "processor": processor, "model": model}
    inputs = processor(images=own["picture"], text=own["prompt"], return_tensors="pt")
    return {**own, "processor": pictures, "inputs": inputs}


def runnable(page: Path) -> bool:
    codes = shown(page.read_text(encoding="utf-8"))
    return any(
        kind == "python" or (arguments_of(code) is not None and not is_name(code)) for kind, code in codes
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if runnable(page)], ids=name_of)
def test_what_a_page_shows_runs(page, desk):
    text = page.read_text(encoding="utf-8")
    if name_of(page) in ELSEWHERE:
        text = re.sub(r"```python.*?```", "", text, flags=re.DOTALL)
    assert desk.faults(name_of(page), text, names_of(page)) == []


@pytest.mark.slow
def test_a_page_that_shows_what_fails_is_found(desk):
    page = (
        "Try `vlexport inspect BUNDLE`, `vlexport check SOURCE`:\n```python\nimport vlexport.nothing\n```\n"
    )
    first, second = desk.faults("", page, {})
    assert first.startswith("vlexport check SOURCE: exit code 2\n")
    assert second.endswith("ModuleNotFoundError: No module named 'vlexport.nothing'")


def test_what_ends_otherwise_is_on_its_page():
    assert [
        each for each in EXIT_CODES if each[1] not in shell_lines((ROOT / each[0]).read_text("utf-8"))
    ] == []


def test_the_fragments_of_the_page_on_recipes_make_the_tower_of_the_recipe(tmp_path):
    page = ROOT / "docs" / "recipes.md"
    names = names_of(page)
    recipe, contents = names["RECIPE"], importlib.import_module("vlexport.recipes.demo.qwen2_vl").contents
    config = recipe.read_config(Checkpoint.open(write_checkpoint(tmp_path / "tiny", contents())))
    expected = names["Tower"](config).state_dict()
    for kind, code in shown(page.read_text(encoding="utf-8")):
        if kind == "python" and "check_recipe" not in code:
            exec(compile(code, page, "exec", __future__.annotations.compiler_flag), names)
    assert set(names["Config"].__slots__) <= {field.name for field in fields(config)}
    assert {name: each.shape for name, each in names["Tower"](config).state_dict().items()} == {
        name: each.shape for name, each in expected.items()
    }
