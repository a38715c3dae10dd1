"""The check sees one wrong bit of any tensor that is read as it is stored."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.adapters import write_adapter
from tests.quantised import write_quantised
from tests.subjects import subject_of
from vlexport.checkpoint import Checkpoint
from vlexport.parity.inputs_exact import check_weights

KINDS = ("plain", "adapter", "fp8")


class Wrong:
    """Weights of which one value of one tensor is read otherwise, by a rounding of float32."""

    def __init__(self, weights: Any, name: str) -> None:
        self.weights, self.name = weights, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.read(names, dtype):
            if name == self.name:
                tensor = tensor.clone()
                place = int(tensor.abs().argmax())
                tensor.view(-1)[place] *= 1 + torch.finfo(torch.float32).eps
            yield name, tensor


@pytest.fixture(scope="module", params=KINDS)
def subject(request: Any, towers: Any, tmp_path_factory: Any) -> Any:
    plain, folder = towers(), Path(tmp_path_factory.mktemp("weights"))
    if request.param == "adapter":
        return subject_of(Checkpoint.open(plain.path, lora=write_adapter(folder, plain)))
    if request.param == "plain":
        return subject_of(plain)
    return subject_of(Checkpoint.open(write_quantised(folder / "quantised", plain.path, request.param)))


def test_one_value_of_any_tensor_is_seen_but_for_those_that_are_computed(subject: Any) -> None:
    checkpoint, config = subject.checkpoint, json.loads((subject.checkpoint.path / "config.json").read_text())
    is_plain = checkpoint.adapter is None and "quantization_config" not in config
    assert check_weights(subject) == {"weights": ""}
    for name, stored in subject.recipe.weight_names(checkpoint, subject.config).items():
        wrong = replace(checkpoint, weights=Wrong(checkpoint.weights, name))
        is_computed = not is_plain and ".blocks." in stored and len(checkpoint.stored(stored).shape) == 2
        seen = "" if is_computed else f"{name}, 1 in all"
        assert check_weights(replace(subject, checkpoint=wrong)) == {"weights": seen}, name
