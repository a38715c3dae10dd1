"""The check's second readings see one wrong value of any tensor, and its tolerances are one rounding."""

from __future__ import annotations

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
from vlexport.parity.exact import check_weights

KINDS = ("plain", "adapter", "fp8")


class Wrong:
    """Weights of which one value of one tensor is read otherwise."""

    def __init__(self, weights: Any, name: str, change: float) -> None:
        self.weights, self.name, self.change = weights, name, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.weights.read(names, dtype):
            if name == self.name:
                tensor = tensor.clone()
                place = int(tensor.abs().argmax())
                tensor.view(-1)[place] *= 1 + self.change
            yield name, tensor


@pytest.fixture(scope="module", params=KINDS)
def subject(request: Any, towers: Any, tmp_path_factory: Any) -> Any:
    plain, folder = towers(), Path(tmp_path_factory.mktemp("weights"))
    if request.param == "adapter":
        return subject_of(Checkpoint.open(plain.path, lora=write_adapter(folder, plain)))
    if request.param == "plain":
        return subject_of(plain)
    return subject_of(Checkpoint.open(write_quantised(folder / "quantised", plain.path, request.param)))


def test_one_value_of_any_tensor_is_seen(subject: Any) -> None:
    """Computed weights may differ by their last rounding, those that are read may not at all."""
    assert set(check_weights(subject).values()) == {""}
    names = sorted(subject.recipe.weight_names(subject.checkpoint, subject.config))
    for name in names:
        checkpoint = subject.checkpoint
        changed = replace(
            checkpoint, weights=Wrong(checkpoint.weights, name, 3 * torch.finfo(torch.float32).eps)
        )
        found = check_weights(replace(subject, checkpoint=changed))["weights"]
        assert found == f"{name}, 1 in all", name
