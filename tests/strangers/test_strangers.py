"""No file of a stranger ends in exit 1, in a signal, beyond 2 GiB or 20 s of a processor.

400 files of checkpoints, 240 of engines of four backends and 300 manifests, each named by seed, file and
field, in parts. The first part of each kind runs always, the others with the slow tests.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.strangers.cases import Watched, write_frames, write_image
from tests.strangers.mutations import (
    Mutated,
    mutate_archive,
    mutate_bytes,
    mutate_json,
    mutate_onnx,
    mutate_text,
    mutate_xml,
)
from tests.tiny_minicpmv import Tiny, write_tiny_minicpmv
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.codec import canonical, parse
from vlexport.errors import InputError

PRUNED = ("--fps", "2", "--prune", "0.5")
Damage = Callable[[bytes, str, int], Mutated]


def parts(count: int) -> list[Any]:
    return [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, count))]


class World:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image = write_image(folder / "image.png")
        self.frames = write_frames(folder / "frames.npy")
        self.checkpoints = {
            "qwen2_5_vl": write_tiny_qwen2_5_vl(folder / "qwen2_5_vl", depth=1),
            "minicpmv": write_tiny_minicpmv(folder / "minicpmv", Tiny()),
        }
        self.watched = Watched(folder / "log")
        self._bundles: dict[tuple[str, str], Path] = {}

    def bundle(self, family: str, backend: str) -> Path:
        """A sound bundle, built when first needed."""
        if (family, backend) not in self._bundles:
            into = self.folder / f"{family}-{backend}"
            words = ["build", self.checkpoints[family], "--backend", backend, "--output-dir", into]
            done = self.watched.outcome([words])
            assert list(done.codes.values()) == [0], done.output
            self._bundles[family, backend] = Path(done.output.splitlines()[-1])
        return self._bundles[family, backend]

    def copy(self, sound: Path, damaged: Mutated) -> Path:
        copy = self.folder / "damaged"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound, copy)
        (copy / damaged.file).write_bytes(damaged.content)
        return copy

    def use(self, bundle: Path, trust: str, *, check: bool) -> list[list[object]]:
        """Every verb that opens a bundle; `run` opens it as `encode` does, and a check takes seconds."""
        out = self.folder / "out.safetensors"
        return [
            ["inspect", bundle],
            ["trust", bundle, trust],
            ["check", bundle],
            ["encode", bundle, "--image", self.image, "--video", self.frames, *PRUNED, "--output", out],
            *([["check", bundle, "--accuracy"]] if check else []),
        ]

    def check(
        self, damaged: Mutated, verbs: Sequence[Sequence[object]], *, approved: bool = False
    ) -> list[str]:
        """Run verbs on a case and return what must not be; `trust` accepts what was approved."""
        done = self.watched.outcome(verbs)
        assert not approved or done.codes["1 trust"] == 0, done.output
        return [f"{damaged.name}: {fault}\n{done.output[-600:]}" for fault in done.faults()]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.seconds
@pytest.mark.parametrize("part", parts(200))
def test_damaged_files_of_checkpoints(world: World, part: int) -> None:
    faults: list[str] = []
    for seed in range(2 * part, 2 * part + 2):
        family = "minicpmv" if seed % 3 == 2 else "qwen2_5_vl"
        source = world.checkpoints[family]
        files = sorted(path.name for path in source.iterdir() if path.suffix in (".json", ".jinja"))
        # Half of all are of config.json: most verbs read it.
        file = "config.json" if seed % 2 else files[seed // 2 % len(files)]
        damage: Damage = mutate_json if file.endswith(".json") else mutate_text
        damaged = damage((source / file).read_bytes(), file, seed)
        checkpoint, bundle = world.copy(source, damaged), world.bundle(family, "eager")
        question = ["--checkpoint", checkpoint, "--prompt", "What?", "--image", world.image]
        # A check against damaged weights may have marked the bundle.
        question += ["--max-new-tokens", "2", "--allow-failed"]
        verbs: list[list[object]] = [["run", bundle, *question]]
        if file.endswith("config.json") and "token" not in file and "generation" not in file:
            into = world.folder / "into"
            shutil.rmtree(into, ignore_errors=True)
            words = [checkpoint, "--backend", "eager", "--output-dir", into]
            # A build runs the whole check: a sixth of the cases have one, of the quick ones a single one.
            verbs += [["inspect", checkpoint], ["plan", *words]]
            if seed % (6 if part else 30) == 1:
                verbs += [["build", *words], ["check", bundle, "--accuracy", "--checkpoint", checkpoint]]
        faults += world.check(damaged, verbs)
    assert not faults, "\n".join(faults)


# Each kind of file of each backend, and how it is damaged.
PAYLOADS: tuple[tuple[str, str, Damage], ...] = (
    ("onnxruntime", "model.onnx", mutate_onnx),
    ("eager", "program.json", mutate_json),
    ("openvino", "model.xml", mutate_xml),
    ("onnxruntime", "tokens.pt2", mutate_archive),
    ("inductor", "program.pt2", mutate_archive),
    ("onnxruntime", "model.weights", mutate_bytes),
    ("openvino", "model.bin", mutate_bytes),
    ("inductor", "program.safetensors", mutate_bytes),
    ("onnxruntime", "prune.onnx", mutate_onnx),
)


@pytest.mark.seconds
@pytest.mark.parametrize("part", parts(60))
def test_damaged_engines_that_were_approved(world: World, part: int) -> None:
    faults: list[str] = []
    # Quick tests build one backend.
    payloads = PAYLOADS if part else [each for each in PAYLOADS if each[0] == "onnxruntime"]
    for seed in range(4 * part, 4 * part + 4):
        backend, file, damage = payloads[seed % len(payloads)]
        sound = world.bundle("qwen2_5_vl", backend)
        damaged = damage((sound / file).read_bytes(), file, seed)
        copy = world.copy(sound, damaged)
        manifest = json.loads((copy / "manifest.json").read_bytes())
        digest = hashlib.sha256(damaged.content).hexdigest()
        manifest["files"][file] |= {"size": len(damaged.content), "sha256": digest}
        raw = canonical(manifest)
        (copy / "manifest.json").write_bytes(raw)
        trust, check = hashlib.sha256(raw).hexdigest(), part > 0 and seed % 5 == 0
        faults += world.check(damaged, world.use(copy, trust, check=check), approved=True)
    assert not faults, "\n".join(faults)


@pytest.mark.seconds
@pytest.mark.parametrize("part", parts(60))
def test_malformed_manifests_that_were_approved(world: World, part: int) -> None:
    faults: list[str] = []
    for seed in range(5 * part, 5 * part + 5):
        sound = world.bundle("minicpmv" if seed % 3 == 2 else "qwen2_5_vl", "eager")
        damaged = mutate_json((sound / "manifest.json").read_bytes(), "manifest.json", seed)
        copy = world.copy(sound, damaged)
        raw = damaged.content
        try:
            # Spelled as vlexport would, or its spelling is all that is refused.
            raw = canonical(parse(raw))
            (copy / "manifest.json").write_bytes(raw)
        except InputError:
            assert raw == damaged.content
        trust, check = hashlib.sha256(raw).hexdigest(), part > 0 or seed % 5 == 0
        faults += world.check(damaged, world.use(copy, trust, check=check))
    assert not faults, "\n".join(faults)
