"""Weights of adapted and quantised checkpoints, computed a second time: the reference of the check has these.

Bytes are read from the files by their headers, settings from the JSON as it is. Integers are unpacked bit by
bit with numpy, an adapter is applied by matrix products, all in float64, so that a wrong scale, order or
pattern in `vlexport.checkpoint` meets a right one here. O outputs of a layer, I inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vlexport.checkpoint import Checkpoint, StoredTensor
from vlexport.checkpoint.joined import JoinedWeights
from vlexport.checkpoint.safetensors import Weights

Array = npt.NDArray[Any]
DTYPES = {
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1", "U8": "<u1",
}  # fmt: skip
KINDS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
# Endings of tensors that quantised modules have, by method.
MARKERS = {
    "fp8": ("weight_scale_inv",),
    "fbgemm_fp8": ("weight_scale",),
    "compressed-tensors": ("weight_scale",),
    "awq": ("qweight",),
    "gptq": ("qweight",),
    "bitsandbytes": ("SCB", "weight.absmax"),
}


def _float8(fraction_bits: int, bias: int, numbers: int) -> Array:
    """Return the value of every byte: sign, exponent, fraction; codes from `numbers` on are none."""
    codes = np.arange(256)
    exponent, fraction = (codes & 127) >> fraction_bits, codes & ((1 << fraction_bits) - 1)
    parts = (exponent > 0) + fraction / (1 << fraction_bits)
    values = np.where(codes & 128, -1.0, 1.0) * parts * 2.0 ** (np.maximum(exponent, 1) - bias)
    return np.where((codes & 127) >= numbers, np.nan, values)


EXPONENTS = np.append(2.0 ** np.arange(-127.0, 128.0), np.nan)
FLOAT8 = {"F8_E4M3": _float8(3, 7, 0x7F), "F8_E5M2": _float8(2, 15, 0x7C), "F8_E8M0": EXPONENTS}


class Raw:
    """Tensors in the safetensors files of a folder: 8 bytes of header length, a JSON header, the values."""

    def __init__(self, folder: Path) -> None:
        self.headers: dict[str, tuple[Path, int, dict[str, Any]]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self.headers |= {name: (path, 8 + length, entry) for name, entry in header.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.headers

    def dtype(self, name: str) -> str:
        """Return the dtype as the header has it."""
        return str(self.headers[name][2]["dtype"])

    def bytes_of(self, name: str) -> bytes:
        path, begin, entry = self.headers[name]
        start, stop = entry["data_offsets"]
        with path.open("rb") as file:
            file.seek(begin + start)
            return file.read(stop - start)

    def tensor(self, name: str) -> Tensor:
        """Return a tensor of a floating dtype as it is stored."""
        values = torch.frombuffer(bytearray(self.bytes_of(name)), dtype=KINDS[self.dtype(name)])
        return values.reshape(self.headers[name][2]["shape"])

    def array(self, name: str) -> Array:
        """Return the values of a tensor, floating ones in float64."""
        kind = self.dtype(name)
        if kind in KINDS:
            return self.tensor(name).double().numpy()
        raw = self.bytes_of(name)
        values = (
            FLOAT8[kind][np.frombuffer(raw, "u1")] if kind in FLOAT8 else np.frombuffer(raw, DTYPES[kind])
        )
        return values.reshape(self.headers[name][2]["shape"])

    def bits(self, name: str, width: int) -> Array:
        """Return the unsigned integers of `width` bits in a row of words, the lowest bits first."""
        words = np.frombuffer(self.bytes_of(name), "u1").reshape(*self.headers[name][2]["shape"], 4)
        each = np.unpackbits(words, axis=-1, bitorder="little").reshape(*words.shape[:-1], -1, width)
        return (each @ (1 << np.arange(width))).reshape(*words.shape[:-2], -1)


def second(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with weights of this module; one whose tensors are read as they are, as it is."""
    if checkpoint.adapter is None and checkpoint.quantisation is None:
        return checkpoint
    return replace(checkpoint, weights=JoinedWeights(SecondWeights(checkpoint)))


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
        for wanted, stored in names.items():
            parts = [self._one(part) for part in self._parts(stored)]
            if not parts:
                continue
            found = torch.cat(parts) if len(parts) > 1 else parts[0]
            kind: torch.dtype = getattr(torch, dtype) if dtype else found.dtype
            yield wanted, found.to(kind)

    def _parts(self, stored: str) -> list[str]:
        """Return the tensors of the files that make one: queries, then keys, then values may lie apart."""
        module, _, last = stored.rpartition(".")
        several = [
            [f"{module.removesuffix('qkv')}{part}{ending}.{last}" for part in ("q", "k", "v")]
            for ending in ("", "_proj")
            if module.endswith("qkv")
        ]
        return next((each for each in ([stored], *several) if all(map(self._is_there, each))), [])

    def _is_there(self, stored: str) -> bool:
        return stored in self._raw or self._is_quantised(stored)

    def _one(self, stored: str) -> Tensor:
        """Return one tensor of the files as it should be read."""
        if self._is_quantised(stored):
            found = torch.from_numpy(self._dequantised(stored.removesuffix("weight")))
        else:
            found = self._raw.tensor(stored)
        found = self._adapted(stored, found)
        return found.float() if self._is_changed(stored) else found

    def is_computed(self, stored: str) -> bool:
        """Return whether a tensor, or a part of it, is read as something else than its bytes."""
        return any(map(self._is_changed, self._parts(stored)))

    def _is_changed(self, stored: str) -> bool:
        return _bare(stored) in self._factors or self._is_quantised(stored)

    @cached_property
    def _raw(self) -> Raw:
        return Raw(self.checkpoint.complete())

    # Adapters.

    @cached_property
    def _factors(self) -> dict[str, dict[str, Tensor]]:
        """Tensors of the adapter by parameter and by what follows the module in their name."""
        found: dict[str, dict[str, Tensor]] = {}
        if self.checkpoint.adapter is None:
            return found
        raw = Raw(Path(self.checkpoint.adapter.source).expanduser())
        for name in raw.headers:
            module, _, part = name.partition(".lora_")
            whole = name.replace(".base_layer.", ".")
            owner = f"{module}.{'bias' if part == 'B.bias' else 'weight'}" if part else whole
            found.setdefault(_bare(owner), {})[part] = raw.tensor(name).double()
        return found

    @cached_property
    def _adapter_settings(self) -> Mapping[str, Any]:
        assert self.checkpoint.adapter is not None
        path = Path(self.checkpoint.adapter.source).expanduser() / "adapter_config.json"
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _adapted(self, stored: str, weight: Tensor) -> Tensor:
        """Return one tensor with the adapter's terms added."""
        parts = self._factors.get(_bare(stored))
        if parts is None:
            return weight
        # The first reading adds to float32 as well.
        total = parts.get("", weight.float()).double()
        alpha, rank = (
            self._setting(stored, name, pattern)
            for name, pattern in (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern"))
        )
        scale = alpha / (rank**0.5 if self._adapter_settings.get("use_rslora") else rank)
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
        return total

    def _setting(self, stored: str, name: str, patterns: str) -> float:
        """Return alpha or rank of a tensor's module; `model.` before it may be there in a pattern or not."""
        module = _bare(stored).rpartition(".")[0]
        for pattern, value in (self._adapter_settings.get(patterns) or {}).items():
            ends = re.compile(f"(?:.*[.])?(?:{pattern})")
            if any(ends.fullmatch(each) for each in (f"model.{module}", module)):
                return float(value)
        return float(self._adapter_settings[name])

    # Quantised weights.

    @cached_property
    def _settings(self) -> Mapping[str, Any]:
        config = self.checkpoint.config
        inner = config.get("text_config")
        inner = inner.get("quantization_config") if isinstance(inner, Mapping) else None
        found = config.get("quantization_config") or config.get("compression_config") or inner
        return found if isinstance(found, Mapping) else {}

    def _is_quantised(self, stored: str) -> bool:
        module, _, last = stored.rpartition(".")
        markers = MARKERS.get(str(self._settings.get("quant_method")), ())
        return last == "weight" and any(f"{module}.{marker}" in self._raw for marker in markers)

    def _dequantised(self, module: str) -> Array:
        """Return the weight of a module, whose name ends in a dot."""
        raw, method = self._raw, self._settings["quant_method"]
        if method in ("awq", "gptq"):
            return self._of_groups(module, awq=method == "awq")
        if f"{module}SCB" in raw:
            return raw.array(f"{module}weight") * raw.array(f"{module}SCB")[:, None] / 127
        if f"{module}weight.absmax" in raw:
            return self._of_table(module)
        scale = raw.array(f"{module}{MARKERS[method][0]}")
        if raw.dtype(f"{module}{MARKERS[method][0]}") == "U8":
            scale = EXPONENTS[scale]
        weights = [each.get("weights") or {} for each in (self._settings.get("config_groups") or {}).values()]
        zero = f"{module}weight_zero_point"
        if weights and all(each.get("symmetric", True) for each in weights):
            zero = ""
        if f"{module}weight_packed" in raw:
            return self._of_words(module, scale, zero)
        values = raw.array(f"{module}weight").astype(np.float64)
        if zero in raw:
            values = values - self._spread(raw.array(zero), values.shape)
        return values * self._spread(scale, values.shape)

    def _spread(self, grid: Array, shape: tuple[int, ...]) -> Array:
        """Return the entry of a grid that each weight lies in."""
        grid = grid.reshape(-1, 1) if grid.ndim < 2 else grid
        weights = [each.get("weights") or {} for each in (self._settings.get("config_groups") or {}).values()]
        sizes = self._settings.get("weight_block_size")
        sizes = sizes or next(
            (each["block_structure"] for each in weights if each.get("block_structure")), None
        )
        places = []
        for axis in (0, 1):
            length = shape[axis] // grid.shape[axis]
            if sizes and grid.shape[axis] not in (1, shape[axis]):
                length = sizes[axis]
            places.append(np.minimum(np.arange(shape[axis]) // length, grid.shape[axis] - 1))
        return grid[np.ix_(*places)]

    def _of_words(self, module: str, scale: Array, zero: str) -> Array:
        """Return integers of compressed-tensors: words along the inputs, those of zeros along the outputs."""
        rows, columns = (int(each) for each in self._raw.array(f"{module}weight_shape"))
        words = self._raw.headers[f"{module}weight_packed"][2]["shape"][1]
        given = [each.get("weights") or {} for each in self._settings["config_groups"].values()]
        bits = min(
            each["num_bits"] for each in given if each and -(-columns * each["num_bits"] // 32) == words
        )
        values = self._raw.bits(f"{module}weight_packed", bits)[:, :columns] - 2 ** (bits - 1)
        group = np.arange(columns) * scale.shape[1] // columns
        order = f"{module}weight_g_idx"
        if order in self._raw and (self._raw.array(order) >= 0).all():
            group = self._raw.array(order)
        if zero in self._raw:
            shape = self._raw.headers[zero][2]["shape"]
            stored = np.frombuffer(self._raw.bytes_of(zero), "<u4").reshape(shape)
            shifts = np.arange(rows) * bits % 32
            zeros = (stored[np.arange(rows) * bits // 32] >> shifts[:, None].astype("u4")) & (2**bits - 1)
            values = values - (zeros.astype(int) - 2 ** (bits - 1))[:, group]
        found: Array = values * scale[:, group]
        return found

    def _of_groups(self, module: str, *, awq: bool) -> Array:
        """Return integers of AWQ, words along outputs in an order of their own, or GPTQ, along inputs."""
        raw, scale = self._raw, self._raw.array(f"{module}scales")
        size = self._settings.get("group_size", 128)
        if awq:
            values, zeros = raw.bits(f"{module}qweight", 4), raw.bits(f"{module}qzeros", 4)
            # Columns of a word lie in it as 0 2 4 6 1 3 5 7.
            order = np.arange(values.shape[1]).reshape(-1, 4, 2).transpose(0, 2, 1).ravel()
            values, zeros = (each[:, np.argsort(order)] for each in (values, zeros))
        else:
            bits = self._settings.get("bits", 4)
            words = np.frombuffer(raw.bytes_of(f"{module}qweight"), "<u4")
            words = words.reshape(raw.headers[f"{module}qweight"][2]["shape"])
            inputs = np.arange(len(words) * 32 // bits)
            places = (inputs * bits % 32).astype("u4")
            values = (words[inputs * bits // 32] >> places[:, None]) & (2**bits - 1)
            words = np.frombuffer(raw.bytes_of(f"{module}qzeros"), "<u4").reshape(len(scale), -1)
            if self._settings.get("checkpoint_format", "gptq") == "gptq":
                words = words + np.uint32(0xFFFFFFFF // (2**bits - 1))
            outputs = np.arange(values.shape[1])
            zeros = (words[:, outputs * bits // 32] >> (outputs * bits % 32).astype("u4")) & (2**bits - 1)
        group = np.arange(len(values)) // (size if size > 0 else len(values))
        if f"{module}g_idx" in raw and (raw.array(f"{module}g_idx") >= 0).all():
            group = raw.array(f"{module}g_idx")
        found: Array = (values.astype(int) - zeros.astype(int)[group]) * scale[group]
        return found.T

    def _of_table(self, module: str) -> Array:
        """Return a 4-bit weight of bitsandbytes: two codes in a byte, the first one in its upper half."""
        raw, begin = self._raw, f"{module}weight."
        state = next(raw.bytes_of(name) for name in raw.headers if name.startswith(f"{begin}quant_state"))
        settings = json.loads(state)
        codes = np.stack(np.divmod(raw.array(f"{module}weight").ravel(), 16), 1).ravel()
        size = int(np.prod(settings["shape"]))
        largest = raw.array(f"{begin}absmax")
        if f"{begin}nested_absmax" in raw:
            runs = np.arange(len(largest)) // settings["nested_blocksize"]
            table = raw.array(f"{begin}nested_quant_map")
            largest = table[largest] * raw.array(f"{begin}nested_absmax")[runs] + settings["nested_offset"]
        each = np.arange(size) // settings["blocksize"]
        values: Array = raw.array(f"{begin}quant_map")[codes[:size]] * largest[each]
        return values.reshape(settings["shape"])


def _bare(name: str) -> str:
    """Return a parameter's name without what PEFT and the classes of transformers put before it."""
    return name.removeprefix("base_model.model.").removeprefix("model.")
