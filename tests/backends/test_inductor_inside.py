"""What a check of a package holds in memory: no copy of the weights for each block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save

from vlexport.backends import inductor

WEIGHTS = {f"blocks.{index}.weight": torch.full((5 + index, 3), 1.0 + index) for index in range(4)}


class Package:
    """A package that keeps whatever it is given, as torch's does, and returns sums of it."""

    def __init__(self) -> None:
        self.kept: list[dict[str, torch.Tensor]] = []

    def get_constant_fqns(self) -> list[str]:
        return list(WEIGHTS)

    def load_constants(self, given: dict[str, torch.Tensor], **_: bool) -> None:
        self.kept.append(given)

    def __call__(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: inputs["x"] * each.sum() for name, each in self.kept[-1].items()}


def test_weights_at_zero_are_one_buffer_however_many_blocks_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = Package()
    monkeypatch.setattr(inductor, "_package", lambda _: package)
    payloads: Any = SimpleNamespace(read=lambda _: save(WEIGHTS))
    inside = inductor.BACKEND.inside(payloads)
    assert inside.partly is not None
    for index in range(len(WEIGHTS)):
        kept = f"blocks.{index}.weight"
        found = inside.partly({"x": torch.ones(1)}, kept.__ne__)
        assert {name for name, value in found.items() if value != 0} == {kept}
    places = {each.data_ptr() for given in package.kept for each in given.values()}
    assert len(places) == len({each.data_ptr() for each in inside.weights.values()}) + 1
    assert all(each.shape == WEIGHTS[name].shape for given in package.kept for name, each in given.items())
