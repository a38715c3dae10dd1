"""Tensors below a prefix that a tower has no use for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "any"}')
    names = ("tower.weight", "tower.bias", "tower.head.weight", "tower.heads.weight", "other.weight")
    save_file(
        {name: torch.full((2,), float(index)) for index, name in enumerate(names)},
        tmp_path / "model.safetensors",
    )
    return tmp_path


def test_ignored_names_may_be_there_and_are_not_read(folder: Path) -> None:
    module = nn.LayerNorm(2)
    Checkpoint.open(folder).load_into(module, prefixes=("tower.",), ignore=("head.", "heads."))
    assert module.weight.tolist() == [0.0, 0.0]
    assert module.bias.tolist() == [1.0, 1.0]


def test_what_is_not_ignored_is_still_unexpected(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"1 unexpected tensors below 'tower\.': tower\.heads\.weight"):
        Checkpoint.open(folder).check_names({"weight": (2,), "bias": (2,)}, "tower.", ignore=("head.",))


def test_ignored_names_need_not_be_there(folder: Path) -> None:
    wanted = Checkpoint.open(folder).check_names({"weight": (2,)}, "other.", ignore=("head.",))
    assert wanted == {"weight": "other.weight"}
