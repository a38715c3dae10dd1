"""The reference of MiniCPM-V: one slice, then one group, at a time.

Its encoder is transformers', its attention is torch.nn.MultiheadAttention, its positions are written out
place by place; nothing here is packed, sorted or traced, and no number comes from the recipe.
A number comes from the shape of a stored tensor where one shows it, else from raw config.json, else from the
code published with the release, so that a wrong number in a recipe's config meets a right one here.
N patches of a slice or group, C width.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError
from vlexport.specs import MediaItem
from vlexport.vision.packed_reference import with_blocks
from vlexport.vision.slices import Slice, groups_of, image_of_rows

PARTS = ("vpm.", "resampler.")
# One tensor of every stored layer of the tower, under either naming.
LAYERS = (".mlp.fc1.weight",)


# resampler.py of every release: `num_heads=embed_dim // 128`.
RESAMPLER_HEAD = 128
# SigLIP so400m/14: heads of 72 in 1152 columns. The norms of timm and of transformers agree on the epsilon.
TOWER_HEADS, EPSILON = 16, 1e-6


class Release(NamedTuple):
    """Behaviour that no tensor shows, from modeling_minicpmv.py and processing_minicpmv.py of one release.

    version        as in config.json
    grid_in_tower  `tgt_sizes` are passed to the tower; 2.5 passes none
    frame_times    the resampler adds `temporal_ids` to its keys
    videos         the processor has a `video` branch
    image_ids      the processor writes `<image_id>` before an image
    """

    version: str
    grid_in_tower: bool
    frame_times: bool
    videos: bool
    image_ids: bool


RELEASES: Mapping[tuple[int, int], Release] = {
    (2, 0): Release("2.0", True, False, False, False),
    (2, 5): Release("2.5", False, False, False, False),
    (2, 6): Release("2.6", True, False, True, True),
    (4, 0): Release("4.0", True, False, True, True),
    (4, 5): Release("4.5", True, True, True, True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceFacts:
    """Facts of one checkpoint's tower and resampler, named like `TowerSizes` and read apart from it."""

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
        return self.release.grid_in_tower

    @property
    def frame_times(self) -> bool:
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


def facts_of(checkpoint: Checkpoint) -> SliceFacts:
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


def stored_names(checkpoint: Checkpoint, depth: int) -> dict[str, str]:
    """Return stored names by those of later releases, but for 2.0's fused projection, `self_attn.qkv`."""
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


Floats = npt.NDArray[np.float32]


class SliceReference:
    """An independent encoder and attention, float32. `encoder` has the parts of a SigLIP-like tower."""

    def __init__(self, facts: SliceFacts, encoder: nn.Module) -> None:
        self.facts = facts
        self.encoder: Any = encoder
        self.resampler = SingleQuery(facts)
        self.module: nn.Module = nn.ModuleDict({"vpm": encoder, "resampler": self.resampler}).eval()

    @torch.inference_mode()
    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        patches = torch.cat([item.patches for item in items])
        answers = []
        for group in groups_of(items):
            seen = [self.see(patches, piece) for piece in group]
            answers.append(self.resampler(torch.cat(seen), group))
        return {"embeds": torch.cat(answers)}

    def see(self, patches: Tensor, piece: Slice) -> Tensor:
        """Run one slice through the tower; buckets by numpy, which no mode of torch reaches."""
        image = image_of_rows(
            patches[piece.start : piece.start + piece.length], piece.rows, piece.columns, self.facts.patch
        )
        parts = self.encoder.embeddings
        x_NC = parts.patch_embedding(image[None]).flatten(2)[0].T
        table = parts.position_embedding.weight
        learned = self.facts.learned_tables
        x_NC = x_NC + (resized(table, piece, antialias=True) if learned else table[self.buckets(piece)])
        seen_NC = self.encoder.encoder(inputs_embeds=x_NC[None]).last_hidden_state
        out_NC: Tensor = self.encoder.post_layernorm(seen_NC)[0]
        return out_NC

    def buckets(self, piece: Slice) -> Tensor:
        side = self.facts.side
        rows, columns = (piece.rows, piece.columns) if self.facts.grid_in_tower else (1, piece.length)
        borders = np.arange(1 / side, 1.0, 1 / side).astype(np.float32)
        row, column = (
            np.searchsorted(borders, np.arange(n, dtype=np.float32) / np.float32(n), side="right")
            for n in (rows, columns)
        )
        return torch.from_numpy((row[:, None] * side + column).ravel())

    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        return with_blocks(self.encoder.encoder.layers, lambda: self.run(items), lambda rows: rows[0])


class SingleQuery(nn.Module):
    """One group's queries through torch.nn.MultiheadAttention; key positions place by place."""

    of_places: Tensor
    of_frames: Tensor

    def __init__(self, facts: SliceFacts) -> None:
        super().__init__()
        width = facts.out_width
        self.query = nn.Parameter(torch.empty(facts.queries, width))
        self.proj = nn.Parameter(torch.empty(width, width))
        same = facts.width == width
        self.kv_proj = nn.Identity() if same else nn.Linear(facts.width, width, bias=False)
        self.attn = nn.MultiheadAttention(width, facts.out_heads)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(width, eps=1e-6) for _ in range(3))
        if facts.learned_tables:
            self.pos_embed = nn.Parameter(torch.empty(facts.queries, width))
        else:
            self.register_buffer("of_places", falling(width // 2), persistent=False)
        if facts.frame_times:
            self.register_buffer("of_frames", falling(width), persistent=False)
        self.facts = facts

    def forward(self, x_NC: Tensor, group: Sequence[Slice]) -> Tensor:
        values, queries = self.ln_kv(self.kv_proj(x_NC)), self.ln_q(self.query)
        if self.facts.learned_tables:
            queries = queries + self.pos_embed
            places = [resized(self.pos_embed, piece, antialias=False) for piece in group]
        else:
            places = [torch.from_numpy(self.waves(piece)) for piece in group]
        keys = values + torch.cat(places).to(values.dtype)
        mixed, _ = self.attn(queries, keys, values, need_weights=False)
        answer: Tensor = self.ln_post(mixed) @ self.proj
        return answer

    def waves(self, piece: Slice) -> Floats:
        """Return sines and cosines of places, column first; a frame number is added over the whole width."""
        columns = np.tile(np.arange(piece.columns), piece.rows)
        rows = np.repeat(np.arange(piece.rows), piece.columns)
        places = np.concatenate([wave(columns, self.of_places), wave(rows, self.of_places)], axis=1)
        timed = self.facts.frame_times and piece.frame >= 0
        return places + wave(np.array([piece.frame]), self.of_frames) if timed else places


def falling(width: int) -> Tensor:
    """Return the frequencies of waves of this width, in float32 as models were trained."""
    fractions = np.arange(width // 2, dtype=np.float32) / np.float32(width // 2)
    return torch.from_numpy(1 / np.float32(10000) ** fractions)


def wave(place: npt.NDArray[np.int64], frequencies: Tensor) -> Floats:
    """Return sines, then cosines, of places; in float32 in every reference."""
    angle = place.astype(np.float32)[:, None] * frequencies.float().numpy()
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1)


def resized(table: Tensor, piece: Slice, *, antialias: bool) -> Tensor:
    side = math.isqrt(table.shape[-2])
    square = table.reshape(1, side, side, -1).permute(0, 3, 1, 2).float()
    size = (piece.rows, piece.columns)
    image = F.interpolate(square, size, mode="bicubic", antialias=antialias, align_corners=False)
    return image.flatten(2)[0].T.to(table.dtype)


def slice_reference(checkpoint: Checkpoint) -> SliceReference:
    """Return the tower of transformers and the attention of torch with the same weights, nothing packed."""
    from transformers import Idefics2VisionConfig
    from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

    facts = facts_of(checkpoint)
    with torch.device("meta"):
        encoder = Idefics2VisionTransformer(
            Idefics2VisionConfig(
                hidden_size=facts.width,
                intermediate_size=facts.inner,
                num_hidden_layers=facts.depth,
                num_attention_heads=facts.heads,
                image_size=facts.side * facts.patch,
                patch_size=facts.patch,
                layer_norm_eps=facts.eps,
                hidden_act=facts.activation,
            )
        )
        slow = SliceReference(facts, encoder)
    weights = as_others(checkpoint.tensors(stored_names(checkpoint, facts.depth), dtype="float32"))
    slow.module.load_state_dict(dict(weights), strict=True, assign=True)
    return slow


def as_others(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of 2.0 in the shapes of later releases: a fused projection in its parts, a flat table."""
    for name, tensor in weights:
        if ".qkv." in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            yield from ((name.replace("qkv", f"{part}_proj"), rows) for part, rows in parts)
        elif name.endswith("position_embedding.weight"):
            yield name, tensor.flatten(0, -2)
        else:
            yield name, tensor
