"""Names, shapes and shards: what is missing, left over, misshaped or misplaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.tiny_qwen2_5_vl import Tiny, tower_tensors, write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError

PREFIXES = ("visual.", "model.visual.")
INDEX = "model.safetensors.index.json"
EXPECTED = {name: tensor.shape for name, tensor in tower_tensors(Tiny(depth=1)).items()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("weights") / "tiny", depth=1, shards=2)


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copied"))


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> Path:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_both_generations_of_names_resolve(tmp_path):
    for naming in PREFIXES:
        checkpoint = Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path / naming, depth=1, naming=naming))
        prefix = checkpoint.resolve_prefix(PREFIXES)
        assert prefix == naming
        assert checkpoint.check_names(EXPECTED, prefix) == {name: naming + name for name in EXPECTED}


def without(name: str) -> dict[str, tuple[int, ...]]:
    return {each: tuple(shape) for each, shape in EXPECTED.items() if each != name}


REFUSED: dict[str, tuple[Callable[[Checkpoint], object], str]] = {
    "no tower": (lambda it: it.resolve_prefix(("vision_tower.", "vit.")),
        r"no tensor below 'vision_tower\.', 'vit\.'; its names begin with lm_head\., model\., visual\."),
    "two sets of names": (lambda it: it.resolve_prefix(("visual.", "model.")),
        r"tensors below 'visual\.' and 'model\.'; expected one of"),
    "missing": (lambda it: it.check_names({**EXPECTED, "blocks.7.b": (64,), "blocks.7.a": (64,)}, "visual."),
        r"lacks 2 of 20 expected tensors below 'visual\.': visual\.blocks\.7\.a, visual\.blocks\.7\.b\."),
    "unexpected": (lambda it: it.check_names(without("merger.ln_q.weight"), "visual."),
        r"has 1 unexpected tensors below 'visual\.': visual\.merger\.ln_q\.weight; expected 17"),
    "misshaped": (lambda it: it.check_names({**EXPECTED, "merger.ln_q.weight": (32,)}, "visual."),
        r"1 tensors of another shape .*: visual\.merger\.ln_q\.weight \[64\] instead of \[32\]"),
    "a long list": (
        lambda it: it.check_names({f"x.{index:02d}": (1,) for index in reversed(range(30))}, "visual."),
        r"lacks 30 of 30 .*visual\.x\.00, visual\.x\.01, .*visual\.x\.09 and 20 more"
    ),
    "unknown": (lambda it: it.stored("visual.absent"), r"has no tensor 'visual\.absent'"),
}  # fmt: skip


def test_names_and_shapes_that_differ_are_listed(tiny, subtests):
    for name, (read, message) in REFUSED.items():
        with subtests.test(name), pytest.raises(CheckpointError, match=message):
            read(Checkpoint.open(tiny))


def test_shapes_and_dtypes_are_known_without_reading(tiny: Path) -> None:
    stored = Checkpoint.open(tiny).stored("visual.patch_embed.proj.weight")
    assert (stored.dtype, stored.shape, stored.num_bytes) == ("float32", (64, 3, 2, 14, 14), 64 * 1176 * 4)


def without_weights(folder: Path) -> Path:
    for path in folder.glob("model*"):
        path.unlink()
    return folder


def test_pickles_are_never_loaded(copied, subtests):
    without_weights(copied)
    for suffix in ("bin", "pt", "pth", "ckpt"):
        path = copied / f"pytorch_model.{suffix}"
        path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
        words = r"pickles only.*runs code, so vlexport never does\. Convert"
        with subtests.test(suffix), pytest.raises(CheckpointError, match=words):
            Checkpoint.open(copied)
        path.unlink()


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


def place(file: Any) -> Callable[[Path], object]:
    """Let the index place a tensor in another file."""
    return lambda folder: edit_index(folder, lambda names: names.update({"visual.merger.ln_q.weight": file}))


def twice(folder: Path) -> None:
    shutil.copy(folder / SECOND, folder / "model-3.safetensors")
    edit_index(folder, lambda names: names.update({"extra": "model-3.safetensors"}))


OUTSIDE = r"places tensor 'visual\.merger\.ln_q\.weight' in .*next to the index"
EMPTY = "'weight_map' is missing or empty"
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (without_weights, r"holds no weights; expected model\.safetensors or"),
    "no index": (lambda it: (it / INDEX).unlink(), r"model-00002-of-00002\.safetensors, but neither"),
    "two sets": (lambda it: shutil.copy(it / FIRST, it / "model.safetensors"), "expected one set of weights"),
    "no shard": (lambda it: (it / SECOND).unlink(), r"shard model-00002-.* is missing, .* \d+ tensors"),
    "above": (place("../model.safetensors"), OUTSIDE),
    "elsewhere": (place("/tmp/x.safetensors"), OUTSIDE),
    "below": (place("sub/x.safetensors"), OUTSIDE),
    "another kind": (place("x.bin"), OUTSIDE),
    "a folder": (place(".."), OUTSIDE),
    "nothing": (place(""), OUTSIDE),
    "a drive": (place("C:x.safetensors"), OUTSIDE),
    "a number": (place(3), OUTSIDE),
    "the wrong shard": (place(FIRST), r"in other shards|lacks 1 tensors"),
    "in two shards": (twice, r"model-3\.safetensors holds \d+ tensors that .* in other shards"),
    "a name twice": (
        lambda it: (it / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "duplicate key 'a'"
    ),
    "no map": (lambda it: (it / INDEX).write_text("{}"), EMPTY),
    "an empty map": (lambda it: (it / INDEX).write_text('{"weight_map": {}}'), EMPTY),
    "a list": (lambda it: (it / INDEX).write_text('{"weight_map": []}'), EMPTY),
    "cut": (lambda it: (it / SECOND).write_bytes((it / SECOND).read_bytes()[:-1]),
        r"model-00002-of-00002\.safetensors is truncated: it holds \d+ bytes"),
}  # fmt: skip


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.read(checkpoint.tensor_names())


def test_shards_and_an_index_that_contradict_each_other_are_refused(tiny, tmp_path, subtests):
    for name, (spoil, message) in SPOILT.items():
        folder = Path(shutil.copytree(tiny, tmp_path / name))
        spoil(folder)
        with subtests.test(name), pytest.raises(CheckpointError, match=message):
            read_all(folder)


def test_a_shard_that_changes_between_header_and_data_is_refused(copied: Path) -> None:
    checkpoint = Checkpoint.open(copied)
    wanted = checkpoint.check_names(EXPECTED, "visual.")
    (copied / SECOND).write_bytes((copied / SECOND).read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        checkpoint.read(wanted)


@pytest.fixture
def tower(tmp_path: Path) -> Checkpoint:
    """A tower with tensors that it has no use for."""
    (tmp_path / "config.json").write_text('{"model_type": "any"}')
    names = ("tower.weight", "tower.bias", "tower.head.weight", "tower.heads.weight", "other.weight")
    tensors = {name: torch.full((2,), float(index)) for index, name in enumerate(names)}
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path)


def test_ignored_names_may_be_there_and_are_not_read_and_others_are_unexpected(tower: Checkpoint) -> None:
    module = nn.LayerNorm(2)
    tower.load_into(module, prefixes=("tower.",), ignore=("head.", "heads."))
    assert (module.weight.tolist(), module.bias.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    assert tower.check_names({"weight": (2,)}, "other.", ignore=("head.",)) == {"weight": "other.weight"}
    with pytest.raises(CheckpointError, match=r"1 unexpected tensors below 'tower\.': tower\.heads\.weight"):
        tower.check_names({"weight": (2,), "bias": (2,)}, "tower.", ignore=("head.",))
