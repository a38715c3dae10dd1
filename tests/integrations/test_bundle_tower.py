"""A bundle in the place of a model's tower, as far as it goes without vLLM; tests/vllm has the rest."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.integrations.refusals import refused
from tests.runtime.recorded import CHECKPOINT
from vlexport._build import build_checkpoint, request
from vlexport.checkpoint import Checkpoint
from vlexport.errors import MisfitError
from vlexport.integrations import vllm as plugin
from vlexport.integrations.vllm.bundle_tower import (
    BundleSettings,
    BundleTower,
    open_tower,
    tower_prefixes,
    without,
)
from vlexport.runtime.encoder import Tower

READ = ("spatial_merge_size", "out_hidden_size", "input_norm")


@pytest.fixture(scope="module")
def bundle(shared: Path) -> Path:
    """The eager bundle of the recorded checkpoint; tests of the runtime share it."""
    asked = request(Checkpoint.open(CHECKPOINT), backend="eager", into=shared / "engines")
    return build_checkpoint(asked).require_passed().path


@pytest.fixture(scope="module")
def tower(bundle: Path) -> Iterator[Tower]:
    opened = open_tower(BundleSettings(bundle=str(bundle)), Checkpoint.open(CHECKPOINT), given_bytes=True)
    yield opened
    opened.engine.close()


class Norm(nn.Module):
    """What vLLM puts before its tower: bytes are normalised, the rest only cast."""

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return (x.to(dtype) / 255 - 0.5) / 0.25 if x.dtype == torch.uint8 else x.to(dtype)


def stock(tower: Tower, width: int | None = None) -> nn.Module:
    replaced = nn.Linear(2, 2)
    replaced.spatial_merge_size = 2
    replaced.out_hidden_size = width or tower.bundle.manifest.outputs[0].shape[1]
    replaced.input_norm = Norm()
    replaced.dtype, replaced.device = torch.bfloat16, torch.device("cpu")
    return replaced


def test_settings_are_those_of_additional_config_and_others_are_refused(subtests) -> None:
    for nothing in (None, {}, {"other": 1}, 3):
        assert BundleSettings.of(nothing) is None
    assert BundleSettings.of({"vlexport": {"bundle": "a", "threads": 2}}) == BundleSettings(
        bundle="a", threads=2
    )
    for given in ({}, {"bundel": "a"}, {"bundle": "a", "cache": 1}, "a"):
        with subtests.test(str(given)), refused("an object with 'bundle' expected"):
            BundleSettings.of({"vlexport": given})
    with refused("threads: '2' (str) given, a whole number expected"):
        BundleSettings.of({"vlexport": {"bundle": "a", "threads": "2"}})


def test_rows_are_normalised_once_and_come_in_the_models_dtype(tower: Tower) -> None:
    module = BundleTower(tower, stock(tower), READ)
    assert list(module.parameters()) == []
    grids = torch.tensor([[1, 4, 6], [2, 4, 4]])
    levels = torch.randint(0, 256, (56, 1176), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = Norm()(levels, torch.float32)
    rows = module(levels, grid_thw=grids)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, tower.run_packed(pixels, grids.tolist()).bfloat16())
    assert torch.equal(rows, module(pixels, grids.tolist()))


def test_a_tower_opens_while_tensors_are_made_in_the_models_dtype_and_place(
    bundle: Path, tower: Tower
) -> None:
    served = Checkpoint.open(CHECKPOINT)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            opened = open_tower(BundleSettings(bundle=str(bundle)), served, given_bytes=True)
            assert tower_prefixes(opened, served) == ("visual.", "visual.merger.")
    finally:
        torch.set_default_dtype(torch.float32)
    patches = torch.ones(24, 1176)
    assert torch.equal(opened.run_packed(patches, [(1, 4, 6)]), tower.run_packed(patches, [(1, 4, 6)]))
    opened.engine.close()


def test_a_model_of_another_width_is_refused(tower: Tower) -> None:
    with pytest.raises(MisfitError, match="rows of 128 values, 256 expected"):
        BundleTower(tower, stock(tower, 256), READ)


def changed(folder: Path) -> Checkpoint:
    """The recorded checkpoint with one other number in its tower."""
    for path in CHECKPOINT.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if "visual" in name and "bias" in name)
    tensors[name][0] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def test_weights_that_are_not_those_of_the_checkpoint_are_refused_unless_told(
    bundle: Path, tmp_path: Path
) -> None:
    other = changed(tmp_path)
    with pytest.raises(
        MisfitError, match=r"weights \w{12} of .*golden/e2e/checkpoint are in it.*vlexport build"
    ):
        open_tower(BundleSettings(bundle=str(bundle)), other, given_bytes=True)
    unchecked = BundleSettings(bundle=str(bundle), check_weights=False)
    open_tower(unchecked, other, given_bytes=True).engine.close()


def test_a_bundle_of_another_family_is_refused(bundle: Path) -> None:
    served = Checkpoint.open(CHECKPOINT.parents[1] / "e2e_qwen2_vl" / "checkpoint")
    with pytest.raises(MisfitError, match=r"recipe 'qwen2_5_vl', which serves qwen2_5_vl; .* is 'qwen2_vl'"):
        open_tower(BundleSettings(bundle=str(bundle)), served, given_bytes=True)


def test_the_weights_of_the_tower_are_left_out_and_all_others_kept(tower: Tower) -> None:
    served = Checkpoint.open(CHECKPOINT)
    names = [*served.tensor_names()]
    kept = [
        name for name, _ in without(tower_prefixes(tower, served), ((name, torch.ones(1)) for name in names))
    ]
    assert kept == [name for name in names if "visual" not in name]
    assert 0 < len(kept) < len(names)


def test_models_are_registered_by_name_and_each_has_a_class(monkeypatch) -> None:
    given: dict[str, str] = {}
    registry = SimpleNamespace(register_model=given.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(ModelRegistry=registry))
    plugin.register()
    plugin.register()
    source = Path(plugin.__file__).with_name("models.py").read_text(encoding="utf-8")
    classes = {node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    assert {reference.partition(":")[2] for reference in given.values()} <= classes
    assert {reference.partition(":")[0] for reference in given.values()} == {
        "vlexport.integrations.vllm.models"
    }
