"""A tiny random Qwen2.5-VL checkpoint on disk, for tests; what it holds is the demo's own."""

from __future__ import annotations

from pathlib import Path

from vlexport.recipes.demo.qwen2_5_vl import (
    CHAT_TEMPLATE,
    SPECIAL_TOKENS,
    Tiny,
    contents,
    token,
    tower_tensors,
)

from vlexport.checkpoint.writing import write_checkpoint

__all__ = ["CHAT_TEMPLATE", "SPECIAL_TOKENS", "Tiny", "token", "tower_tensors", "write_tiny_qwen2_5_vl"]


def write_tiny_qwen2_5_vl(
    folder: str | Path,
    *,
    depth: int = 4,
    hidden: int = 64,
    heads: int = 4,
    seed: int = 0,
    shards: int = 1,
    dtype: str = "float32",
    naming: str = "visual.",
    config_style: str = "nested",
    with_decoder: bool = True,
) -> Path:
    """Write it; `naming` is the prefix of the tower, `config_style` is `flat` (older) or `nested`."""
    wanted = Tiny(
        depth=depth,
        hidden=hidden,
        heads=heads,
        inner=2 * hidden,
        naming=naming,
        config_style=config_style,
        dtype=dtype,
        with_decoder=with_decoder,
    )
    return write_checkpoint(folder, contents(wanted), seed=seed, shards=shards)
