"""Every refusal by its exit code and its words: what was given, what was expected, what to do next."""

import errno
import importlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.cli.lines import Ran, vlexport
from vlexport import backends
from vlexport.backends import eager
from vlexport.bundle import Manifest, Trust, os_errors

# `vlexport.build` names the public function; this is the module around it.
building = importlib.import_module("vlexport._build")


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

    def tensors(self, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
        """The checkpoint with other tensors."""
        file = self.checkpoint / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        return self.checkpoint

    def config(self, **wanted: object) -> Path:
        """The checkpoint with another config.json."""
        file = self.checkpoint / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | wanted), encoding="utf-8")
        return self.checkpoint

    def manifest(self, change: Callable[[Manifest], Manifest], *, approve: bool = True) -> Path:
        """The bundle with another manifest, whoever vouches for it."""
        file = self.bundle / "manifest.json"
        changed = change(Manifest.parse(file.read_bytes()))
        file.write_bytes(changed.encoded())
        if approve:
            Trust.of().record(changed.digest(), "approved")
        return self.bundle

    def build(self, *words: object) -> Ran:
        return vlexport("build", self.checkpoint, "--backend", "eager", "-o", self.folder / "e", *words)

    def encode(self, *words: object) -> Ran:
        return vlexport("encode", self.bundle, "--output", self.folder / "out.safetensors", *words)


@pytest.fixture
def world(tmp_path, checkpoint, bundle, failed, wrong_recipe, image, video, monkeypatch) -> World:
    return World(
        folder=tmp_path,
        checkpoint=shutil.copytree(checkpoint, tmp_path / "checkpoint"),
        bundle=bundle,
        failed=failed,
        wrong_recipe=wrong_recipe,
        image=image,
        video=video,
        patch=monkeypatch,
    )


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


def cut(tensors, name):
    tensors[name] = tensors[name][:-1].clone()


def missing_tensor(world: World) -> Ran:
    world.tensors(lambda tensors: tensors.pop("visual.blocks.0.norm1.weight"))
    return world.build()


def unexpected_tensor(world: World) -> Ran:
    world.tensors(lambda tensors: tensors.update({"visual.blocks.0.norm3.weight": torch.ones(4)}))
    return world.build()


def misshaped_tensor(world: World) -> Ran:
    world.tensors(lambda tensors: cut(tensors, "visual.blocks.0.norm1.weight"))
    return world.build()


def no_tower(world: World) -> Ran:
    world.tensors(lambda tensors: [tensors.pop(name) for name in list(tensors) if "visual" in name])
    return world.build()


def pickles_only(world: World) -> Ran:
    (world.checkpoint / "model.safetensors").rename(world.checkpoint / "pytorch_model.bin")
    return world.build()


def no_weights(world: World) -> Ran:
    (world.checkpoint / "model.safetensors").unlink()
    return world.build()


def truncated_weights(world: World) -> Ran:
    os.truncate(world.checkpoint / "model.safetensors", 50)
    return world.build()


def remote_code(world: World) -> Ran:
    world.config(model_type="own_thing", auto_map={"AutoModel": "modeling_own.OwnModel"})
    return world.build()


def unknown_type(world: World) -> Ran:
    world.config(model_type="gpt2")
    return world.build()


def recipe_of_another_type(world: World) -> Ran:
    world.config(model_type="gpt2")
    return world.build("--recipe", world.wrong_recipe)


def config_without_what_is_needed(world: World) -> Ran:
    vision = json.loads((world.checkpoint / "config.json").read_text("utf-8"))["vision_config"]
    world.config(vision_config={**vision, "depth": "two"})
    return world.build()


def no_config(world: World) -> Ran:
    (world.checkpoint / "config.json").unlink()
    return world.build()


def hub_id_without_revision(world: World) -> Ran:
    return vlexport("build", "organisation/name")


def image_beyond_the_ratio(world: World) -> Ran:
    Image.new("RGB", (2010, 10)).save(world.folder / "wide.png")
    return world.encode("--image", world.folder / "wide.png")


def missing_media(world: World) -> Ran:
    return world.encode("--image", world.folder / "none.png")


def unreadable_media(world: World) -> Ran:
    (world.folder / "image.png").write_bytes(b"no picture")
    return world.encode("--image", world.folder / "image.png")


def video_as_floats(world: World) -> Ran:
    np.save(world.folder / "video.npy", np.zeros((2, 28, 28, 3), np.float32))
    return world.encode("--video", world.folder / "video.npy")


def nothing_to_encode(world: World) -> Ran:
    return world.encode()


def no_place_for_the_result(world: World) -> Ran:
    return vlexport("encode", world.bundle, "--image", world.image)


def prune_without_time(world: World) -> Ran:
    return world.encode("--video", world.video, "--prune", 0.5)


def prune_everything(world: World) -> Ran:
    return world.encode("--video", world.video, "--fps", 2, "--prune", 1)


def out_in_no_folder(world: World) -> Ran:
    return vlexport("encode", world.bundle, "--image", world.image, "--output", "nowhere/x.safetensors")


def out_of_another_kind(world: World) -> Ran:
    return vlexport("encode", world.bundle, "--image", world.image, "--output", world.folder / "x.pt")


def out_is_a_folder(world: World) -> Ran:
    (world.folder / "x.safetensors").mkdir()
    return vlexport("encode", world.bundle, "--image", world.image, "-o", world.folder / "x.safetensors")


def unwritable_out(world: World) -> Ran:
    real = os.access
    world.patch.setattr(os, "access", lambda path, mode: Path(path) != world.folder and real(path, mode))
    return world.encode("--image", world.image)


def unwritable_into(world: World) -> Ran:
    real = Path.mkdir

    def refused(self, *words, **named):
        if self == world.folder / "e":
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, *words, **named)

    world.patch.setattr(Path, "mkdir", refused)
    return world.build()


def into_is_a_file(world: World) -> Ran:
    (world.folder / "e").write_text("here")
    return world.build()


def into_where_no_folder_can_be(world: World) -> Ran:
    return vlexport("build", world.checkpoint, "--backend", "eager", "--output-dir", "/proc/x")


def into_with_an_endless_name(world: World) -> Ran:
    return vlexport("plan", world.checkpoint, "--backend", "eager", "-o", world.folder / ("x" * 999))


def checkpoint_as_bundle(world: World) -> Ran:
    return vlexport("verify", world.checkpoint)


def plain_folder_as_bundle(world: World) -> Ran:
    return vlexport("encode", world.folder, "--image", world.image, "-o", world.folder / "x.safetensors")


def no_room(world: World) -> Ran:
    world.patch.setattr(os_errors, "free_bytes", lambda _: 1_000)
    return world.build()


def absent_library(world: World) -> Ran:
    world.patch.setattr(eager.Eager, "missing", lambda _: "its library is not installed. Install it.")
    return world.build()


def absent_library_of_a_bundle(world: World) -> Ran:
    world.patch.setattr(eager.Eager, "missing", lambda _: "its library is not installed. Install it.")
    return vlexport("verify", world.bundle)


def of_another_machine(world: World) -> Ran:
    def change(manifest):
        return replace(manifest, target=replace(manifest.target, platform="plan9-x86_64"))

    return vlexport("verify", world.manifest(change))


def of_another_backend(world: World) -> Ran:
    def change(manifest):
        return replace(manifest, target=replace(manifest.target, backend="later"))

    return vlexport("verify", world.manifest(change))


def from_recipe(world: World, **wanted: str) -> Path:
    return world.manifest(lambda manifest: replace(manifest, recipe=replace(manifest.recipe, **wanted)))


def without_patches(world: World) -> Ran:
    def change(manifest):
        return replace(manifest, inputs=tuple(each for each in manifest.inputs if each.name != "patches"))

    world.manifest(change)
    return world.encode("--image", world.image)


def of_another_recipe_version(world: World) -> Ran:
    bundle = from_recipe(world, digest="0" * 64)
    return vlexport("encode", bundle, "--image", world.image, "--output", world.folder / "out.safetensors")


def of_a_private_recipe(world: World) -> Ran:
    return vlexport("verify", from_recipe(world, name="mine"))


def recipe_name_that_is_a_path(world: World) -> Ran:
    program = world.folder / "program.py"
    program.write_text("RECIPE = Recipe(name='x', summary='', model_types=())\nraise SystemExit(77)\n")
    return vlexport("verify", from_recipe(world, name=str(program)))


def altered_payload(world: World) -> Ran:
    payload = world.bundle / "program.pt2"
    data = bytearray(payload.read_bytes())
    data[100] ^= 1
    payload.write_bytes(data)
    return vlexport("verify", world.bundle)


def altered_payload_at_load(world: World) -> Ran:
    altered_payload(world)
    return world.encode("--image", world.image)


def extra_file(world: World) -> Ran:
    (world.bundle / "more.bin").write_bytes(b"x")
    return vlexport("verify", world.bundle)


def untrusted(world: World) -> Ran:
    bundle = world.manifest(lambda manifest: replace(manifest, created=LATER), approve=False)
    return vlexport("verify", bundle)


def trusted_by_another_digest(world: World) -> Ran:
    return vlexport("verify", world.bundle, "--trust", "0" * 64)


def newer_schema(world: World) -> Ran:
    file = world.bundle / "manifest.json"
    file.write_bytes(re.sub(rb'("schema": ?)2', rb"\g<1>3", file.read_bytes()))
    return vlexport("verify", world.bundle)


def manifest_of_somebody_else(world: World) -> Ran:
    (world.bundle / "manifest.json").write_text('{"name": "a web application", "icons": []}')
    return vlexport("verify", world.bundle)


def failed_bundle(world: World) -> Ran:
    words = ("--image", world.image, "--output", world.folder / "out.safetensors")
    return vlexport("encode", world.failed, "--recipe", world.wrong_recipe, *words)


def outside_profile(world: World) -> Ran:
    ran = world.build("--max-pixels", 28 * 28, "--max-images", 1, "--max-frames", 0)
    Image.new("RGB", (300, 300)).save(world.folder / "large.png")
    words = ("--image", world.folder / "large.png", "--output", world.folder / "out.safetensors")
    return vlexport("encode", ran.lines[-1], *words)


def image_beyond_limits(world: World) -> Ran:
    header = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (20000).to_bytes(4, "big") * 2 + b"\x08\x02\0\0\0"
    (world.folder / "large.png").write_bytes(header + b"\0" * 64)
    return world.encode("--image", world.folder / "large.png")


def full_disk(world: World) -> Ran:
    def build(self, graph, options, out, progress):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))

    world.patch.setattr(eager.Eager, "build", build)
    return world.build()


def out_of_memory(world: World) -> Ran:
    def run(self, tensors):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory")

    world.patch.setattr(backends.Engine, "run", run)
    return world.encode("--image", world.image)


def locked(world: World) -> Ran:
    """Another process of this test would be slow to start; another lock object is as good."""
    world.patch.setattr(building, "staged", partial(building.staged, wait_seconds=0.2))
    path = building.entry_path(world.folder / "e", building.build_key(asked(world)))
    path.parent.mkdir()
    with FileLock(path.parent / f".lock-{path.name}"):
        return world.build()


def asked(world: World):
    checkpoint = building.Checkpoint.open(str(world.checkpoint))
    return building.request(checkpoint, backend="eager", into=world.folder / "e")


def unexpected(world: World) -> Ran:
    def build(self, graph, options, out, progress):
        raise ZeroDivisionError("of all things")

    world.patch.setattr(eager.Eager, "build", build)
    return world.build()


LATER = "2030-01-01T00:00:00Z"
DIGEST = "[0-9a-f]{64}"
COMMANDS = [
    ((), 2, r"Usage: vlexport"),
    (("bild",), 2, r"No such command 'bild'.*See `vlexport --help`"),
    (("build",), 2, r"Missing argument 'CHECKPOINT'.*`vlexport build --help`"),
    (("build", "x", "--fast"), 2, r"No such option: --fast"),
    (("verify", "nowhere"), 2, r"'nowhere' does not exist"),
    (("build", "nowhere"), 2, r"'nowhere' does not exist here; .*safetensors"),
]
BUILD_OPTIONS = [
    (("--max-pixels", "many"), 2, r"'--max-pixels': .*valid integer"),
    (("--recipe", "none"), 2, r"no recipe 'none'\. Known: .*qwen2_5_vl"),
    (("--backend", "abacus"), 2, r"no backend 'abacus'\. Known: .*eager, .*onnxruntime"),
    (("--dtype", "float64"), 2, r"'eager' does not serve float64\. It serves: .*float32"),
    (("--dtype", "float8"), 2, r"No backend serves float8; precisions are bfloat16, float16, float32, int8"),
    (("--profile", "image", "--max-images", "1"), 2, r"--profile given together with --min-pixels"),
    (("--profile", "huge"), 2, r"no profile 'huge'\. It has: any, image, thumbnail"),
]
CASES = [
    (nothing_to_encode, 2, r"nothing to encode: at least one image or video"),
    (no_place_for_the_result, 2, r"Missing option '--output'"),
    (hub_id_without_revision, 2, r"no revision; expected a full commit .*organisation/name@COMMIT"),
    (missing_tensor, 2, r"lacks.*blocks\.0\.norm1\.weight|blocks\.0\.norm1\.weight.*(missing|lack)"),
    (unexpected_tensor, 2, r"blocks\.0\.norm3\.weight"),
    (misshaped_tensor, 2, r"blocks\.0\.norm1\.weight.*\[?\(?63.*64"),
    (no_tower, 2, r"visual\."),
    (pickles_only, 2, r"pickles only \(pytorch_model\.bin\); expected safetensors.*Convert"),
    (no_weights, 2, r"holds no weights; expected model\.safetensors"),
    (truncated_weights, 2, r"model\.safetensors"),
    (no_config, 2, r"holds no config\.json"),
    (config_without_what_is_needed, 2, r"'vision_config\.depth' is 'two'; expected a whole number"),
    (
        remote_code,
        2,
        r"no recipe for model type 'own_thing'.*remote code, which vlexport never runs",
    ),
    (unknown_type, 2, r"no recipe for model type 'gpt2'\. Known: .*qwen2_5_vl.*recipes/README\.md"),
    (recipe_of_another_type, 2, r"'wrong_epsilon' serves qwen2_5_vl, but .* is 'gpt2'"),
    (absent_library, 2, r"backend 'eager' cannot be used here: its library is not installed"),
    (into_is_a_file, 2, r"is a file; a folder is expected"),
    (into_where_no_folder_can_be, 2, r"--output-dir /proc/x: no folder can be made there \(No such file"),
    (into_with_an_endless_name, 2, r"no folder can be made there \(File name too long\)"),
    (checkpoint_as_bundle, 2, r"not a bundle: it looks like a checkpoint\. .*: vlexport build /"),
    (plain_folder_as_bundle, 2, r"not a bundle: it holds no manifest\.json"),
    (no_room, 7, r"not enough room\): \d+\.\d MB needed, 0\.0 MB free.*Free some space"),
    (unwritable_into, 2, r"cannot be written \(Permission denied\).*Give another with --output-dir"),
    (missing_media, 2, r"none\.png: No such file or directory\. Pass a media file that exists"),
    (unreadable_media, 2, r"image\.png: .*PNG, JPEG"),
    (video_as_floats, 2, r"float32 .*given, uint8 \[frames, height, width, 3\]"),
    (prune_without_time, 2, r"needs the time between its frames.*Pass the frame rate with --fps"),
    (prune_everything, 2, r"pruning rate 1\.0: expected 0 <= rate < 1"),
    (out_in_no_folder, 2, r"--output nowhere/x\.safetensors: the folder nowhere does not exist\. Make"),
    (out_of_another_kind, 2, r"x\.pt: a file name that ends in \.safetensors is expected"),
    (out_is_a_folder, 2, r"x\.safetensors: is a folder, a file is expected"),
    (unwritable_out, 2, r"cannot be written \(Permission denied\)\. Name a place that you may write to"),
    (failed_bundle, 3, r"accuracy check says 'failed', 'passed' expected.*--allow-failed"),
    (of_another_machine, 4, r"platform is plan9-\w+ in the bundle and linux.* here.*vlexport build "),
    (of_another_backend, 4, r"for backend 'later', which this vlexport does not have\. It has: .*eager"),
    (absent_library_of_a_bundle, 4, r"'eager', which cannot be used here: its library is not installed"),
    (of_another_recipe_version, 4, r"has changed since the build \(0{12} then.*Build again: vlexport build"),
    (of_a_private_recipe, 4, r"built by recipe 'mine', which is not here.*pass its file with --recipe"),
    (recipe_name_that_is_a_path, 4, r"program\.py', which is not here"),
    (altered_payload, 5, rf"'program\.pt2' has SHA-256 {DIGEST}; expected {DIGEST}"),
    (altered_payload_at_load, 5, rf"'program\.pt2' has SHA-256 {DIGEST}; expected {DIGEST}"),
    (extra_file, 5, r"more\.bin"),
    (untrusted, 5, rf"neither built here nor approved.*--trust {DIGEST}"),
    (trusted_by_another_digest, 5, rf"its digest is {DIGEST}, and 0{{64}} was approved"),
    (without_patches, 5, r"contradict each other \(InputError: no input 'patches' found"),
    (newer_schema, 5, r"schema 3"),
    (manifest_of_somebody_else, 5, r"manifest"),
    (outside_profile, 6, r"does not fit profile 'custom' \(\d+ to \d+\); the nearest legal size is \d+"),
    (image_beyond_limits, 6, r"20000x20000 pixels, at most \d+.* MediaLimits\.max_pixels \(Python API\)"),
    (image_beyond_the_ratio, 6, r"/wide\.png: image of 2010x10 pixels: sides of at most 200:1 expected"),
    (full_disk, 7, r"disk is full.*No space left on device.*Free some space"),
    (out_of_memory, 7, r"out of memory .*Give fewer or smaller media.*smaller profile"),
    (locked, 8, r"another process is building it and did not finish within 0\.2 s\. Wait for it"),
    (unexpected, 1, r"unexpected ZeroDivisionError: of all things.*--debug"),
]


def named(each: object) -> str | None:
    return " ".join(each) if isinstance(each, tuple) else getattr(each, "__name__", "")


def check(ran: Ran, code: int, words: str) -> None:
    assert ran.code == code, ran.err
    assert re.search(words, ran.err), ran.err
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(("given", "code", "words"), COMMANDS, ids=named)
def test_a_command_that_cannot_be_read_says_where_help_is(given, code, words):
    check(vlexport(*given), code, words)


@pytest.mark.parametrize(("given", "code", "words"), BUILD_OPTIONS, ids=named)
def test_an_option_that_cannot_be_served_is_refused_before_the_build(world, given, code, words):
    check(world.build(*given), code, words)


@pytest.mark.parametrize(("case", "code", "words"), CASES, ids=named)
def test_a_refusal_has_its_exit_code_and_says_what_to_do(world, case, code, words):
    check(case(world), code, words)
    assert [path for path in world.folder.rglob(".*") if not path.name.startswith(".lock-")] == []


def test_the_cases_reach_every_exit_code_that_an_error_can_have():
    assert {code for _, code, _ in CASES} == {1, 2, 3, 4, 5, 6, 7, 8}


@pytest.mark.parametrize("words", [("--debug", "build", "nowhere"), ("build", "nowhere", "--debug")])
def test_the_traceback_comes_with_debug_before_or_after_the_verb(words):
    ran = vlexport(*words)
    assert ran.code == 2
    assert "Traceback (most recent call last)" in ran.err
    assert "vlexport: 'nowhere' does not exist here" in ran.err


def test_with_json_an_error_is_the_only_document():
    ran = vlexport("build", "nowhere", "--json")
    found = ran.document
    assert (found["schema"], found["verb"]) == (1, "error")
    assert (found["error"]["type"], found["error"]["exit_code"]) == ("CheckpointError", 2)
    assert found["error"]["message"] in ran.err


def test_nothing_is_loaded_or_encoded_before_the_place_for_the_result_is_known(world, monkeypatch):
    monkeypatch.setattr(eager.Eager, "open", lambda *_: pytest.fail("the engine was loaded"))
    assert out_in_no_folder(world).code == 2


def test_a_program_named_in_a_manifest_is_not_run(world):
    assert recipe_name_that_is_a_path(world).code != 77
