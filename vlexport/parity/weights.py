"""Weights of adapted checkpoints, computed a second time: the reference of the accuracy check runs on these.

Bytes are read from the files by their headers, settings from the JSON as it is, and everything is computed by
matrix products in float64, so that a wrong scale, order or pattern in `vlexport.checkpoint` meets a right one
here. O outputs of a layer, I inputs, R rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlexport.checkpoint import Checkpoint, StoredTensor
from vlexport.checkpoint.safetensors import Weights

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def raw_tensors(folder: Path, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Read safetensors: eight bytes of header length, a JSON header, then the values."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name in sorted(header if names is None else set(names) & set(header)):
                start, stop = header[name]["data_offsets"]
                file.seek(8 + length + start)
                values = torch.frombuffer(
                    bytearray(file.read(stop - start)), dtype=DTYPES[header[name]["dtype"]]
                )
                yield name, values.reshape(header[name]["shape"])


def second(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with weights of this module; one whose tensors are read as they are, as it is."""
    if checkpoint.adapter is None:
        return checkpoint
    return replace(checkpoint, weights=SecondWeights(checkpoint))


class SecondWeights:
    """Tensors as they should be read; names and shapes are those of the first reading."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.first: Weights = checkpoint.weights
        self.checkpoint = checkpoint

    def names(self) -> tuple[str, ...]:
        return self.first.names()

    def files(self) -> tuple[str, ...]:
        return self.first.files()

    def stored(self, name: str) -> StoredTensor:
        """Return dtype and shape of one tensor, without reading it."""
        return self.first.stored(name)

    def describe(self, names: Mapping[str, str]) -> dict[str, str]:
        """Return what a digest has to cover, for each wanted name."""
        return self.first.describe(names)

    def read(self, names: Mapping[str, str], dtype: str | None) -> Iterator[tuple[str, Tensor]]:
        """Yield wanted names with their tensors; those that are computed are float32 without a dtype."""
        wanted = {stored: name for name, stored in names.items()}
        for stored, tensor in raw_tensors(self.checkpoint.complete(), wanted):
            found = self._adapted(stored, tensor)
            kind: torch.dtype = getattr(torch, dtype) if dtype else found.dtype
            yield wanted[stored], found.to(kind) if found.is_floating_point() else found

    def is_computed(self, stored: str) -> bool:
        """Return whether a stored tensor is read as something else than its bytes."""
        return _bare(stored) in self._factors

    @cached_property
    def _factors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of the adapter by parameter and by what follows the module in their name."""
        found: dict[str, dict[str, Tensor]] = {}
        adapter = self.checkpoint.adapter
        for name, tensor in raw_tensors(Path(adapter.source).expanduser()) if adapter else ():
            module, _, part = name.partition(".lora_")
            whole = name.replace(".base_layer.", ".")
            owner = f"{module}.{'bias' if part == 'B.bias' else 'weight'}" if part else whole
            found.setdefault(_bare(owner), {})[part] = tensor.double()
        return found

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        assert self.checkpoint.adapter is not None
        path = Path(self.checkpoint.adapter.source).expanduser() / "adapter_config.json"
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _adapted(self, stored: str, weight: Tensor) -> Tensor:
        """Return one tensor with the adapter's terms added, in float32."""
        parts = self._factors.get(_bare(stored))
        if parts is None:
            return weight
        total = parts.get("", weight).double()
        alpha, rank = (
            self._setting(stored, name, pattern)
            for name, pattern in (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern"))
        )
        scale = alpha / (rank**0.5 if self._settings.get("use_rslora") else rank)
        if "A.weight" in parts:
            down, up = parts["A.weight"], parts["B.weight"]
            total = total + scale * torch.tensordot(up.reshape(len(up), -1), down, dims=1)
        if "embedding_A" in parts:
            total = total + scale * torch.einsum("ir,ro->oi", parts["embedding_B"], parts["embedding_A"])
        if "B.bias" in parts:
            total = total + scale * parts["B.bias"]
        size = parts.get("magnitude_vector", parts.get("magnitude_vector.weight"))
        if size is not None:
            length = torch.linalg.vector_norm(total.reshape(len(total), -1), dim=1)
            total = total * (size.flatten() / length).reshape(-1, *[1] * (total.ndim - 1))
        return total.float()

    def _setting(self, stored: str, name: str, patterns: str) -> float:
        """Return alpha or rank of a tensor's module; `model.` before it may be there in a pattern or not."""
        module = _bare(stored).rpartition(".")[0]
        for pattern, value in (self._settings.get(patterns) or {}).items():
            ends = re.compile(f"(?:.*[.])?(?:{pattern})")
            if any(ends.fullmatch(each) for each in (f"model.{module}", module)):
                return float(value)
        return float(self._settings[name])


def _bare(name: str) -> str:
    """Return a parameter's name without what PEFT and the classes of transformers put before it."""
    return name.removeprefix("base_model.model.").removeprefix("model.")
