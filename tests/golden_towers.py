"""Checkpoints on disk that hold the weights of recorded towers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from vlexport.recipes.demo.qwen2_5_vl import processor_json

from tests.golden_data import Case, cases
from vlexport.specs import MediaItem


def write_recorded_tower(
    folder: Path, model: int, weights: dict[str, torch.Tensor] | None = None, depth: int | None = None
) -> Path:
    """The tower of the `q25_tower` family; `weights` replaces the recorded ones, `depth` cuts blocks off."""
    case = next(case for case in cases("q25_tower", "weights") if case.meta["model"] == model)
    folder.mkdir(parents=True, exist_ok=True)
    vision = {**case.meta["config"], "depth": depth or case.meta["config"]["depth"]}
    vision["fullatt_block_indexes"] = [at for at in vision["fullatt_block_indexes"] if at < vision["depth"]]
    config = {"model_type": "qwen2_5_vl", "vision_config": vision, "text_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    settings = processor_json("image") | {"patch_size": case.meta["config"]["patch_size"]}
    settings["size"] = {"shortest_edge": 64, "longest_edge": 2**20}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    cut = tuple(f"blocks.{at}." for at in range(vision["depth"], case.meta["config"]["depth"]))
    tensors = {
        f"visual.{name}": tensor
        for name, tensor in (weights or case.inputs).items()
        if not name.startswith(cut)
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def recorded_runs(model: int) -> list[Case]:
    return [case for case in cases("q25_tower", "run") if case.meta["model"] == model]


def items_of(patches: torch.Tensor, grids: list[list[int]]) -> list[MediaItem]:
    counts = [frames * rows * columns for frames, rows, columns in grids]
    return [
        MediaItem(kind="video" if frames > 1 else "image", patches=rows_NP, grid=(frames, rows, columns))
        for rows_NP, (frames, rows, columns) in zip(patches.split(counts), grids, strict=True)
    ]


def sharp_weights(model: int, seed: int) -> dict[str, torch.Tensor]:
    """Std 1/sqrt(fan_in), query and key rows doubled: attention far from uniform, so bugs show."""
    generator = torch.Generator().manual_seed(seed)
    case = next(case for case in cases("q25_tower", "weights") if case.meta["model"] == model)
    found = {}
    for name, like in case.inputs.items():
        noise = torch.randn(like.shape, generator=generator)
        if like.ndim == 1:
            found[name] = (1 if "norm" in name or "ln_q" in name else 0) + 0.1 * noise
        else:
            found[name] = noise / like.flatten(1).shape[1] ** 0.5
        if "qkv" in name:
            found[name][: 2 * len(like) // 3] *= 2
    return found
