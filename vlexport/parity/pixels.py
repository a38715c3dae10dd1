"""Pixels for the reference where an engine takes bytes: normalised here, by what the files name.

Nothing comes from the tower or its config, so that a wrong mean inside an engine meets a right one here.
N patches, K values of a channel.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vlexport._build.spec import BuildSpec
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import Reference
from vlexport.specs import BYTES, MediaItem

# norm_mean and norm_std in the published code of releases whose files name none.
HALF = (0.5, 0.5, 0.5)


def reference_of(subject: BuildSpec, checkpoint: Checkpoint | None = None) -> Reference:
    """Return the recipe's reference, for bytes where the engine takes them; by default of its checkpoint."""
    reference = subject.recipe.reference(checkpoint or subject.checkpoint)
    return OfBytes(reference, subject.checkpoint) if subject.input_dtype == BYTES else reference


class OfBytes:
    """A reference that takes items of bytes, channel by channel, and gives its own one float32 pixels."""

    def __init__(self, reference: Reference, checkpoint: Checkpoint) -> None:
        self.reference, self.module = reference, reference.module
        settings = raw_settings(checkpoint)
        self.mean, self.std = mean_and_std(settings) or (HALF, HALF)
        if not settings.get("do_normalize", True):
            self.mean, self.std = (0.0,) * 3, (1.0,) * 3
        self.scale = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0

    def run(self, items: Sequence[MediaItem]) -> dict[str, Tensor]:
        return self.reference.run(self._normalised(items))

    def blocks(self, items: Sequence[MediaItem]) -> tuple[dict[str, Tensor], list[tuple[Tensor, Tensor]]]:
        return self.reference.blocks(self._normalised(items))

    def _normalised(self, items: Sequence[MediaItem]) -> list[MediaItem]:
        """Compute as processors do, in numpy and float32, or in float64 where the reference does.

        On faint pixels float32 rounds by 5e-6 of them; limits of what an engine rounds follow from that.
        """
        kinds = {weight.dtype for weight in self.module.parameters()}
        kind = torch.float64 if torch.float64 in kinds else next(self.module.parameters()).dtype
        number = np.float64 if kind == torch.float64 else np.float32
        mean_31, std_31 = (np.array(values, number)[:, None] for values in (self.mean, self.std))
        normalised = []
        for item in items:
            levels_N3K = item.patches.unflatten(1, (3, -1)).numpy().astype(number)
            pixels_N3K = (levels_N3K * number(self.scale) - mean_31) / std_31
            normalised.append(replace(item, patches=torch.from_numpy(pixels_N3K).flatten(1).to(kind)))
        return normalised


def raw_settings(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return the image processor's settings from the files themselves, or those of config.json."""
    combined = _json(checkpoint, "processor_config.json").get("image_processor")
    alone = _json(checkpoint, "preprocessor_config.json")
    inside = checkpoint.config.get("slice_config")
    settings = [section for section in (combined, alone, inside) if isinstance(section, Mapping) and section]
    return settings[0] if settings else checkpoint.config


def mean_and_std(settings: Mapping[str, Any]) -> tuple[Sequence[float], Sequence[float]] | None:
    """Return mean and deviation under either of their names, if the files name both."""
    mean, std = (settings.get(f"norm_{name}") or settings.get(f"image_{name}") for name in ("mean", "std"))
    return (mean, std) if mean and std else None


def _json(checkpoint: Checkpoint, name: str) -> Mapping[str, Any]:
    path = checkpoint.path / name
    content: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content
