"""Facts of MiniCPM-V releases for whatever judges their recipe, gathered without it.

A number comes from the shape of a stored tensor where one shows it, else from raw config.json, else from the
code published with the release. The reference and the checks take every number from here, none from a
recipe's config, so that a wrong number there meets a right one here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from vlexport.errors import CheckpointError

PARTS = ("vpm.", "resampler.")
# One tensor of every stored layer of the tower, under either naming.
LAYERS = (".mlp.fc1.weight",)


class Source(Protocol):
    """A checkpoint: raw config.json and the shapes of its tensors."""

    @property
    def config(self) -> Mapping[str, object]: ...

    def shapes(self, prefixes: tuple[str, ...]) -> dict[str, tuple[int, ...]]: ...


# resampler.py of every release: `num_heads=embed_dim // 128`.
RESAMPLER_HEAD = 128
# SigLIP so400m/14: heads of 72 in 1152 columns. The norms of timm and of transformers agree on the epsilon.
TOWER_HEADS, EPSILON = 16, 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """Behaviour that no tensor shows, from modeling_minicpmv.py and processing_minicpmv.py of one release.

    version        as in config.json
    grid_in_tower  `tgt_sizes` are passed to the tower; 2.5 passes none
    frame_times    the resampler adds `temporal_ids` to its keys
    videos         the processor has a `video` branch
    image_ids      the processor writes `<image_id>` before an image
    slice_words    the processor writes `<slice>` round each cell, not once round all of them
    """

    version: str
    grid_in_tower: bool
    frame_times: bool
    videos: bool
    image_ids: bool
    slice_words: bool


def _release(version: str, *flags: int) -> Release:
    grid, times, videos, ids, words = map(bool, flags)
    return Release(
        version=version,
        grid_in_tower=grid,
        frame_times=times,
        videos=videos,
        image_ids=ids,
        slice_words=words,
    )


# Columns: grid in the tower, frame times, videos, numbers of images, words of slices.
RELEASES: Mapping[tuple[int, int], Release] = {
    (2, 0): _release("2.0", 1, 0, 0, 0, 0),
    (2, 5): _release("2.5", 0, 0, 0, 0, 0),
    (2, 6): _release("2.6", 1, 0, 1, 1, 1),
    (4, 0): _release("4.0", 1, 0, 1, 1, 1),
    (4, 5): _release("4.5", 1, 1, 1, 1, 1),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceFacts:
    """Everything about one checkpoint's tower and resampler; named like the fields of `TowerSizes`."""

    release: Release
    depth: int
    width: int
    heads: int
    inner: int
    patch: int
    side: int
    eps: float
    queries: int
    out_width: int
    out_heads: int
    learned_tables: bool
    activation: str

    @property
    def grid_in_tower(self) -> bool:
        """Whether positions of patches follow the grid of their slice."""
        return self.release.grid_in_tower

    @property
    def frame_times(self) -> bool:
        """Whether keys of the resampler carry frame numbers."""
        return self.release.frame_times


def release_of(config: Mapping[str, object]) -> Release:
    """Return the release that raw config.json names, or shows by the sizes of 2.0."""
    named = config.get("version")
    if named is None:
        oldest = config.get("hidden_size") == 2304 and config.get("query_num") == 64
        named = "2.0" if oldest else "2.5"
    major, _, minor = str(named).partition(".")
    try:
        return RELEASES[int(major), int(minor or 0)]
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"config.json: 'version' is {named!r}; there are no facts of that release to judge by."
        ) from error


def facts_of(checkpoint: Source) -> SliceFacts:
    """Return the facts of a checkpoint from raw config.json and the shapes of its tensors."""
    config, shapes = checkpoint.config, checkpoint.shapes(PARTS)
    oldest = "vpm.pos_embed" in shapes
    stem = "vpm.patch_embed.proj" if oldest else "vpm.embeddings.patch_embedding"
    table = "vpm.pos_embed" if oldest else "vpm.embeddings.position_embedding.weight"
    layers = "vpm.blocks." if oldest else "vpm.encoder.layers."
    stored = [name for name in shapes if name.endswith(LAYERS)]
    named = config.get("vision_config")
    vision: Mapping[str, object] = named if isinstance(named, Mapping) else {}
    queries, out_width = shapes["resampler.query"]
    return SliceFacts(
        release=release_of(config),
        depth=len(stored) - (config.get("drop_vision_last_layer") is True),
        width=shapes[f"{stem}.weight"][0],
        heads=int(str(vision.get("num_attention_heads", TOWER_HEADS))),
        inner=shapes[f"{layers}0.mlp.fc1.weight"][0],
        patch=shapes[f"{stem}.weight"][-1],
        side=math.isqrt(shapes[table][-2]),
        eps=float(str(vision.get("layer_norm_eps", EPSILON))),
        queries=queries,
        out_width=out_width,
        out_heads=max(1, out_width // RESAMPLER_HEAD),
        learned_tables="resampler.pos_embed" in shapes,
        activation="gelu" if oldest else "gelu_pytorch_tanh",
    )


def stored_names(checkpoint: Source, depth: int) -> dict[str, str]:
    """Return stored names of tower and resampler by those of transformers' tower, which later releases use.

    The fused projection of 2.0 keeps a name of its own, `self_attn.qkv`.
    """
    renamed = {}
    shapes = checkpoint.shapes(PARTS)
    for name in shapes:
        later = name
        if "vpm.pos_embed" in shapes and name.startswith("vpm."):
            for theirs, others in TIMM:
                later = later.replace(theirs, others)
        if _is_run(later, depth):
            renamed[later] = name
    return renamed


TIMM = (
    ("vpm.patch_embed.proj.", "vpm.embeddings.patch_embedding."),
    ("vpm.pos_embed", "vpm.embeddings.position_embedding.weight"),
    ("vpm.blocks.", "vpm.encoder.layers."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".attn.qkv.", ".self_attn.qkv."),
    (".attn.proj.", ".self_attn.out_proj."),
    ("vpm.norm.", "vpm.post_layernorm."),
)
RUN = ("vpm.embeddings.", "vpm.encoder.layers.", "vpm.post_layernorm.", "resampler.")


def _is_run(name: str, depth: int) -> bool:
    """Return whether the release runs this tensor; pooling heads and a dropped last layer it does not."""
    if name.startswith("vpm.encoder.layers."):
        return int(name.split(".")[3]) < depth
    return name.startswith(RUN)
