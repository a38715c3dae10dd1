"""Every refusal by its exit code and its words: what was given, what was expected, what to do next."""

import errno
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.cli.lines import Ran, change_manifest, flip, own_copy, vlexport
from vlexport import backends, system
from vlexport.backends import eager
from vlexport.bundle import Manifest

# `vlexport.build` names the public function; this is the module around it.
building = importlib.import_module("vlexport._build.build")


@dataclass(frozen=True, kw_only=True)
class World:
    """What a case may use; everything in it may be spoilt."""

    folder: Path
    checkpoint: Path
    bundle: Path
    failed: Path
    wrong_recipe: Path
    image: Path
    video: Path
    patch: pytest.MonkeyPatch

    def write(self, name: str, content: bytes) -> Path:
        (self.folder / name).write_bytes(content)
        return self.folder / name

    def picture(self, width: int, height: int) -> Path:
        Image.new("RGB", (width, height)).save(self.folder / "made.png")
        return self.folder / "made.png"

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        file = self.checkpoint / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)

    def config(self, **wanted: object) -> None:
        file = self.checkpoint / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | wanted), encoding="utf-8")

    def manifest(self, **changes: object) -> None:
        change_manifest(self.bundle, **changes)  # type: ignore[arg-type]

    def build(self, *words: object) -> Ran:
        return vlexport("build", self.checkpoint, "--backend", "eager", "-o", self.folder / "e", *words)

    def encode(self, *words: object) -> Ran:
        return vlexport("encode", self.bundle, "--output", self.folder / "out.safetensors", *words)

    def encode_into(self, out: object) -> Ran:
        return vlexport("encode", self.bundle, "--image", self.image, "--output", out)


@pytest.fixture
def worlds(tmp_path, checkpoint, built, failed, wrong_recipe, image, video):
    @contextmanager
    def world(name):
        folder = tmp_path / name.replace(" ", "_")
        with pytest.MonkeyPatch.context() as patch:
            yield World(
                folder=folder,
                checkpoint=shutil.copytree(checkpoint, folder / "checkpoint"),
                bundle=own_copy(built, folder / "bundle"),
                failed=failed,
                wrong_recipe=wrong_recipe,
                image=image,
                video=video,
                patch=patch,
            )

    return world


def absent_library(world):
    world.patch.setattr(eager.Eager, "missing", lambda _: "its library is not installed. Install it.")


def failing_build(error):
    def build(self, graph, options, out, progress):
        raise error(out)

    return lambda world: world.patch.setattr(eager.Eager, "build", build)


def unwritable_folder_of_bundles(world):
    real = Path.mkdir

    def refused(self, *words, **named):
        if self == world.folder / "e":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *words, **named)

    world.patch.setattr(Path, "mkdir", refused)


NORM, DIGEST = "visual.blocks.0.norm1.weight", "[0-9a-f]{64}"
# What is spoilt before a build, its exit code, and its words.
BUILDS = {
    "missing tensor": (lambda w: w.tensors(lambda tensors: tensors.pop(NORM)), 2,
        r"lacks.*blocks\.0\.norm1\.weight|blocks\.0\.norm1\.weight.*(missing|lack)"),
    "unexpected tensor": (
        lambda w: w.tensors(lambda tensors: tensors.update({"visual.blocks.0.norm3.weight": torch.ones(4)})),
        2, r"blocks\.0\.norm3\.weight"
    ),
    "misshaped tensor": (
        lambda w: w.tensors(lambda tensors: tensors.update({NORM: tensors[NORM][:-1].clone()})), 2,
        r"blocks\.0\.norm1\.weight.*\[?\(?63.*64"
    ),
    "no tower": (
        lambda w: w.tensors(lambda found: [found.pop(name) for name in list(found) if "visual" in name]), 2,
        r"visual\."
    ),
    "truncated weights": (lambda w: os.truncate(w.checkpoint / "model.safetensors", 50), 2,
        r"model\.safetensors"),
    "remote code": (
        lambda w: w.config(model_type="own_thing", auto_map={"AutoModel": "modeling_own.OwnModel"}), 2,
        r"no recipe for model type 'own_thing'.*remote code, which vlexport never runs"
    ),
    "unknown type": (lambda w: w.config(model_type="gpt2"), 2,
        r"no recipe for model type 'gpt2'\. Known: .*qwen2_5_vl.*recipes/README\.md"),
    "absent library": (absent_library, 4,
        r"backend 'eager' cannot be used here: its library is not installed"),
    "file for a folder": (lambda w: w.write("e", b"here"), 2, r"is a file; a folder is expected"),
    "unwritable folder": (unwritable_folder_of_bundles, 2,
        r"cannot be written \(Permission denied\).*Give another folder"),
    "no room": (lambda w: w.patch.setattr(system, "free_bytes", lambda _: 1_000), 7,
        r"not enough room\): \d+\.\d MB needed, 0\.0 MB free.*Free some space"),
    "full disk": (failing_build(lambda out: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))), 7,
        r"disk is full.*No space left on device.*Free some space"),
    "missing package": (failing_build(lambda _: ModuleNotFoundError("no module", name="one.part")), 4,
        r"the package 'one' is not installed\. `pip install vlexport` installs what is missing"),
    "unexpected": (failing_build(lambda _: ZeroDivisionError("of all things")), 1,
        r"unexpected ZeroDivisionError: of all things.*--debug"),
}  # fmt: skip
# What is spoilt before a bundle is verified.
VERIFIES = {
    "absent library of a bundle": (absent_library, 4,
        r"'eager', which cannot be used here: its library is not installed"),
    "another machine": (lambda w: w.manifest(target={"platform": "plan9-x86_64"}), 4,
        r"platform is plan9-\w+ in the bundle and linux.* here.*vlexport build "),
    "another backend": (lambda w: w.manifest(target={"backend": "later"}), 4,
        r"for backend 'later', which this vlexport does not have\. It has: .*eager"),
    "private recipe": (lambda w: w.manifest(recipe={"name": "mine"}), 4,
        r"built by recipe 'mine', which is not here.*pass its file as recipe"),
    # The program would end with a code that no refusal has.
    "recipe name that is a path": (
        lambda w: w.manifest(recipe={"name": str(w.write("program.py", b"raise SystemExit(77)\n"))}), 4,
        r"program\.py', which is not here"
    ),
    "altered payload": (lambda w: flip(w.bundle / "program.json"), 5,
        rf"'program\.json' has SHA-256 {DIGEST}; expected {DIGEST}"),
    "untrusted": (lambda w: w.manifest(created="2030-01-01T00:00:00Z", trusted=False), 5,
        rf"neither built here nor approved.*found {DIGEST}.*vlexport trust .*{DIGEST}"),
}  # fmt: skip


def without_patches(world):
    made = Manifest.parse((world.bundle / "manifest.json").read_bytes())
    world.manifest(inputs=tuple(each for each in made.inputs if each.name != "patches"))


def out_of_memory(world):
    def run(self, tensors):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    world.patch.setattr(backends.Engine, "run", run)


def unwritable_out(world):
    real = os.access
    world.patch.setattr(os, "access", lambda path, mode: Path(path) != world.folder and real(path, mode))


# What is spoilt before an image is encoded.
ENCODES = {
    "unwritable out": (unwritable_out, 2,
        r"cannot be written \(Permission denied\)\. Name a place that you may write to"),
    "another version of the recipe": (lambda w: w.manifest(recipe={"digest": "0" * 64}), 4,
        r"has changed since the build \(0{12} then.*Build again: vlexport build"),
    "no input for patches": (without_patches, 5,
        r"contradict each other \(InputError: no input 'patches' found"),
    "out of memory": (out_of_memory, 7, r"out of memory .*Give fewer or smaller media.*smaller profile"),
}  # fmt: skip


def recipe_of_another_type(world):
    world.config(model_type="gpt2")
    return world.build("--recipe", world.wrong_recipe)


def out_is_a_folder(world):
    (world.folder / "x.safetensors").mkdir()
    return world.encode_into(world.folder / "x.safetensors")


def failed_bundle(world):
    words = ("--recipe", world.wrong_recipe, "--image", world.image)
    return vlexport("encode", world.failed, *words, "--output", world.folder / "x.safetensors")


def outside_profile(world):
    ran = world.build("--max-pixels", 28 * 28, "--max-images", 1, "--max-frames", 0)
    words = ("--image", world.picture(300, 300), "--output", world.folder / "out.safetensors")
    return vlexport("encode", ran.lines[-1], *words)


def locked(world):
    """Another process of this test would be slow to start; another lock object is as good."""
    world.patch.setattr(building, "staged", partial(building.staged, wait_seconds=0.2))
    checkpoint = building.Checkpoint.open(str(world.checkpoint))
    spec = building.request(checkpoint, backend="eager", output_dir=world.folder / "e")
    path = building.entry_for(world.folder / "e", building.build_key(spec), spec.model)
    path.parent.mkdir()
    with FileLock(path.parent / f".lock-{path.name}"):
        return world.build()


LARGE = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (20000).to_bytes(4, "big") * 2 + b"\x08\x02" + bytes(67)
LONG = "x" * 300


def patch_size_in_a_list(world):
    file = world.checkpoint / "video_preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"patch_size": [14]}), encoding="utf-8")
    return vlexport("plan", world.checkpoint, "--backend", "eager", "-o", world.folder / "e")


def a_line_without_an_end(world):
    listed = world.write("list.txt", b"a.png\n" + b"x" * 2**19 + b"\n")
    return vlexport("encode", world.bundle, "--list", listed, "--output-dir", world.folder / "c")


COMMANDS = {
    "an endless name for the result": (lambda w: w.encode_into(w.folder / f"{LONG}.safetensors"), 2,
        "File name too long"),
    "an endless name of an image": (lambda w: w.encode("--image", w.folder / LONG), 2, "File name too long"),
    "an endless name of a bundle": (("check", LONG), 2, "does not exist"),
    "an endless name of a checkpoint": (("plan", LONG), 2, "File name too long"),
    "an endless name of a collection": (
        lambda w: vlexport("encode", w.bundle, "--image", w.image, "--output-dir", w.folder / LONG), 2,
        "File name too long"
    ),
    "an endless name of a list": (
        lambda w: vlexport("encode", w.bundle, "--list", w.folder / LONG, "--output-dir", w.folder / "c"), 2,
        "File name too long"
    ),
    "an endless name of a checkpoint to compare": (
        lambda w: vlexport("check", w.bundle, "--accuracy", "--checkpoint", w.folder / LONG), 2,
        "File name too long"
    ),
    "an endless name in a list": (a_line_without_an_end, 2, "line 2: path of 524288 characters given"),
    "a list for a number": (patch_size_in_a_list, 2,
        r"video_preprocessor_config\.json: 'patch_size' is \[14\]; expected a whole number"),
    "nothing": ((), 2, r"Usage: vlexport"),
    "no such verb": (("bild",), 2, r"No such command 'bild'.*See `vlexport --help`"),
    "a verb misspelled": (("biuld",), 2, r"Did you mean 'build'\? See `vlexport --help`"),
    "a verb of before": (("parity", "x"), 2, r"parity is now `vlexport check --accuracy`"),
    "an option of before": (("run", "x", "--decoder", "y"), 2, r"decoder is now --checkpoint"),
    "a bundle as checkpoint": (lambda w: vlexport("plan", w.bundle), 2,
        r"bundle looks like a bundle; a checkpoint is expected\. Pass the one that it was built from"),
    "a scheme as dtype": (lambda w: w.build("--dtype", "int8"), 2,
        r"dtype 'int8' given, a floating dtype expected\. Pass it as quantize"),
    "inputs where no folder can be": (
        lambda w: vlexport("repro", w.bundle, "--inputs-only", "-o", "/proc/x"), 2,
        r"/proc/x: no folder can be made there \(No such file"),
    "threads below none": (lambda w: w.encode("--image", w.image, "--threads", -2), 2,
        "threads: -2 given, 0 .* to 1024 expected"),
    "threads above the most": (lambda w: w.encode("--image", w.image, "--threads", 2**31), 2,
        "threads: 2147483648 given, 0 .* to 1024 expected"),
    "all media missing": (lambda w: w.encode("--image", "a.png", "--video", "b.mp4"), 2,
        r"(?s)b\.mp4: No such file.*a\.png: No such file"),
    "no argument": (("build",), 2, r"Missing argument 'CHECKPOINT'.*`vlexport build --help`"),
    "no such option": (("build", "x", "--fast"), 2, r"No such option: --fast"),
    "no such bundle": (("check", "nowhere"), 2, r"'nowhere' does not exist"),
    "no such checkpoint": (("build", "nowhere"), 2, r"'nowhere' does not exist here; .*safetensors"),
    "pixels in words": (lambda w: w.build("--max-pixels", "many"), 2,
        r"'--max-pixels': 'many' given\. .*valid integer"),
    "no such recipe": (lambda w: w.build("--recipe", "none"), 2, r"no recipe 'none'\. Known: .*qwen2_5_vl"),
    "a type of no backend": (lambda w: w.build("--dtype", "float8"), 2,
        r"No backend serves float8; precisions are bfloat16, float16, float32, int8"),
    "a type of other backends": (lambda w: w.build("--dtype", "float64"), 2,
        r"'eager' does not serve float64\. It serves: .*float32"),
    "profile and bounds": (lambda w: w.build("--profile", "image", "--max-images", "1"), 2,
        r"profile given together with max_images; "),
    "no such profile": (lambda w: w.build("--profile", "huge"), 2,
        r"no profile 'huge'\. It has: any, image, thumbnail"),
    "no place for the result": (lambda w: vlexport("encode", w.bundle, "--image", w.image), 2,
        r"neither --output nor --output-dir given; one of them is expected"),
    "recipe of another type": (recipe_of_another_type, 2,
        r"'wrong_epsilon' serves qwen2_5_vl, but .* is 'gpt2'"),
    "where no folder can be": (
        lambda w: vlexport("build", w.checkpoint, "--backend", "eager", "--output-dir", "/proc/x"), 2,
        r"/proc/x: no folder can be made there \(No such file"
    ),
    "below a file": (lambda w: vlexport("plan", w.checkpoint, "-o", w.write("file", b"here") / "below"), 2,
        r"file is a file; a folder is expected\. Name another one"),
    "an endless name": (
        lambda w: vlexport("plan", w.checkpoint, "--backend", "eager", "-o", w.folder / ("x" * 999)), 2,
        r"no folder can be made there \(File name too long\)"
    ),
    "demo below a file": (lambda w: vlexport("demo", "--folder", w.write("file", b"here") / "below"), 2,
        r"cannot be made \(Not a directory\)"),
    "missing media": (lambda w: w.encode("--image", w.folder / "none.png"), 2,
        r"none\.png: No such file or directory\. Pass a media file that exists"),
    "unreadable media": (lambda w: w.encode("--image", w.write("image.png", b"no picture")), 2,
        r"image\.png: .*PNG, JPEG"),
    "out of another kind": (lambda w: w.encode_into(w.folder / "x.pt"), 2,
        r"x\.pt: a file name that ends in \.safetensors is expected"),
    "out is a folder": (out_is_a_folder, 2, r"x\.safetensors: is a folder, a file is expected"),
    "failed bundle": (failed_bundle, 3, r"accuracy check is 'failed'.*--allow-failed .* runs"),
    "outside profile": (outside_profile, 6,
        r"of 300x300 pixels: .* \(at most 29\); the nearest legal size is 153x153 pixels"),
    "image beyond the limits": (lambda w: w.encode("--image", w.write("large.png", LARGE)), 6,
        r"20000x20000 pixels, at most \d+.* MediaLimits\.max_pixels \(Python API\)"),
    "locked": (locked, 8, r"another process is building it and did not finish within 0\.2 s\. Wait for it"),
}  # fmt: skip
VERBS = {
    "build": (BUILDS, World.build),
    "check": (VERIFIES, lambda world: vlexport("check", world.bundle)),
    "encode": (ENCODES, lambda world: world.encode("--image", world.image)),
    "other": (COMMANDS, None),
}


@pytest.mark.seconds
@pytest.mark.parametrize("verb", VERBS)
def test_a_refusal_has_its_exit_code_and_what_to_do(worlds, subtests, verb):
    table, command = VERBS[verb]
    for name, (case, code, words) in table.items():
        with subtests.test(name), worlds(name) as world:
            ran = vlexport(*case) if isinstance(case, tuple) else case(world)
            if command is not None:
                ran = command(world)
            assert ran.code == code, ran.err
            assert re.search(words, ran.err), ran.err
            assert "Traceback" not in ran.err
            left = [path for path in world.folder.rglob(".*") if not path.name.startswith(".lock-")]
            assert left == []


def test_the_cases_reach_every_exit_code_that_an_error_can_have():
    assert {code for table, _ in VERBS.values() for _, code, _ in table.values()} == {1, 2, 3, 4, 5, 6, 7, 8}


def test_the_traceback_comes_with_debug_before_or_after_the_verb_but_not_behind_two_dashes():
    for words in (("--debug", "build", "nowhere"), ("build", "nowhere", "--debug")):
        ran = vlexport(*words).ends(2)
        assert "Traceback (most recent call last)" in ran.err
        assert "vlexport: [checkpoint] 'nowhere' does not exist here" in ran.err
    assert "'--debug' does not exist here" in vlexport("build", "--", "--debug").err


def test_with_json_an_error_is_the_only_document():
    ran = vlexport("build", "nowhere", "--json")
    found = ran.document
    assert (found["schema"], found["verb"]) == (1, "error")
    named = [found["error"][name] for name in ("type", "code", "exit_code")]
    assert named == ["CheckpointError", "checkpoint", 2]
    assert found["error"]["message"] in ran.err


@pytest.mark.seconds
def test_nothing_is_loaded_or_encoded_before_the_place_for_the_result_is_known(worlds, monkeypatch):
    monkeypatch.setattr(eager.Eager, "open", lambda *_: pytest.fail("the engine was loaded"))
    with worlds("nowhere") as world:
        ran = world.encode_into("nowhere/x.safetensors")
    assert ran.code == 2
    assert re.search(r"--output nowhere/x\.safetensors: the folder nowhere does not exist\. Make", ran.err)
