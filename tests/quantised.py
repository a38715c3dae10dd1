"""Checkpoints with quantised matrices, packed by the formulas of each format, without its library."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = (48, 40)  # sides that widths of the tiny towers are no multiples of
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
RUN, NESTED = 64, 256
Parts = Mapping[str, Tensor]


def in_fp8(weight_OI: Tensor) -> Parts:
    """Store blocks of 8 bits with the largest value of each as 448."""
    rows, columns = (torch.arange(size) // side for size, side in zip(weight_OI.shape, BLOCK, strict=True))
    largest = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    places = (rows[:, None] * largest.shape[1] + columns).flatten()
    largest = largest.flatten().scatter_reduce(0, places, weight_OI.abs().flatten(), "amax").view_as(largest)
    scale = largest / 448
    return {
        "weight": (weight_OI / scale[rows[:, None], columns]).to(torch.float8_e4m3fn),
        "weight_scale_inv": scale,
    }


def _in_groups(weight_OI: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return four bits for each weight, and scales and zeros of groups of inputs."""
    grouped = weight_OI.unflatten(1, (-1, GROUP))
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    steps = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return steps.flatten(1).int(), scale, zero.int()


def _packed(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Put eight values of a row into one word."""
    words = torch.zeros(values.shape[0], values.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= values[:, column::8].long() << (4 * place)
    return (words - (words >> 31 << 32)).int()


def in_awq(weight_OI: Tensor) -> Parts:
    steps, scale, zero = _in_groups(weight_OI)
    stored = {"qweight": _packed(steps.T, AWQ_ORDER), "qzeros": _packed(zero.T, AWQ_ORDER)}
    return {**stored, "scales": scale.T.half()}


def in_gptq(weight_OI: Tensor) -> Parts:
    steps, scale, zero = _in_groups(weight_OI)
    groups = torch.arange(weight_OI.shape[1], dtype=torch.int32) // GROUP
    stored = {"qweight": _packed(steps).T, "qzeros": _packed((zero - 1).T), "g_idx": groups}
    return {**stored, "scales": scale.T.half()}


def in_words(weight_OI: Tensor) -> Parts:
    steps, scale, zero = _in_groups(weight_OI)
    return {
        "weight_packed": _packed(steps),
        "weight_zero_point": _packed(zero.T).T,
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight_OI.shape),
    }


def in_nf4(weight_OI: Tensor) -> Parts:
    """Store the nearest of 16 values, halves of a byte from the upper one on, with sizes in 8 bits."""
    table = torch.linspace(-1, 1, 16) ** 3
    runs = weight_OI.reshape(-1, RUN)
    largest = runs.abs().amax(-1)
    codes = (runs / largest[:, None]).flatten()[:, None].sub(table).abs().argmin(-1)
    offset = float(largest.mean())
    coarse = torch.stack([each.abs().amax() for each in (largest - offset).split(NESTED)])
    nested = torch.linspace(-1, 1, 256)
    sizes = ((largest - offset) / coarse.repeat_interleave(NESTED)[: len(largest)])[:, None]
    state = {
        "quant_type": "nf4", "blocksize": RUN, "dtype": "float32", "shape": list(weight_OI.shape),
        "nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset,
    }  # fmt: skip
    return {
        "weight": (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        "weight.absmax": sizes.sub(nested).abs().argmin(-1).to(torch.uint8),
        "weight.quant_map": table,
        "weight.nested_absmax": coarse,
        "weight.nested_quant_map": nested,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


_INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}
FORMATS: Mapping[str, tuple[Callable[[Tensor], Parts], Mapping[str, object]]] = {
    "fp8": (in_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": BLOCK}),
    "awq": (in_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (in_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False}),
    "int4": (
        in_words,
        {"quant_method": "compressed-tensors", "format": "pack-quantized",
         "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}}},
    ),
    "nf4": (in_nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}  # fmt: skip


def write_quantised(folder: Path, source: Path, kind: str, part: str = ".blocks.") -> Path:
    """Write a copy of a checkpoint whose matrices with this part in their names are quantised; the folder."""
    shutil.copytree(source, folder)
    pack, settings = FORMATS[kind]
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        module, _, last = name.rpartition(".")
        if part in name and tensor.ndim == 2 and last == "weight":
            tensors |= {
                f"{module}.{ending}": each.contiguous() for ending, each in pack(tensor.float()).items()
            }
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
