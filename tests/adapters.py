"""A LoRA on disk without PEFT, for the judge of planted bugs; tests that have PEFT let it write its own."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vlexport.checkpoint import Checkpoint

RANK, ALPHA = 4, 10
# Ends of modules with a rank and an alpha of their own; matrices of attention's output are square.
RANKS, ALPHAS = {r"attn\.proj": 2, r"mlp\.down_proj": 6}, {"qkv": 3}


def write_adapter(folder: Path, checkpoint: Checkpoint, part: str = ".blocks.", seed: int = 0) -> Path:
    """Write random factors for every matrix of a checkpoint whose name has this part; the folder."""
    noise = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in checkpoint.tensor_names():
        shape = checkpoint.stored(name).shape
        if part not in name or len(shape) != 2:
            continue
        module = f"base_model.model.model.{name.removesuffix('.weight')}"
        rank = next((each for end, each in RANKS.items() if module.endswith(end.replace("\\", ""))), RANK)
        for letter, sizes in (("A", (rank, shape[1])), ("B", (shape[0], rank))):
            values = torch.randn(sizes, generator=noise) * sizes[1] ** -0.5
            tensors[f"{module}.lora_{letter}.weight"] = values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    patterns = {"rank_pattern": RANKS, "alpha_pattern": ALPHAS}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **patterns}), encoding="utf-8")
    return folder
