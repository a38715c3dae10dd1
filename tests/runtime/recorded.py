"""Requests that another runtime has answered, and its answers; read from tests/golden/e2e."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.golden_data import FOLDER
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.request import Generation, Request
from vlexport.specs import MediaItem, Pixels

E2E = FOLDER / "e2e"
CHECKPOINT = E2E / "checkpoint"
ALL: list[dict[str, Any]] = json.loads((E2E / "cases.json").read_text())
TRUTHS = [case for case in ALL if case["truth"]]
# The processor that recorded it resized with another library: begin from its own patches.
FROM_PATCHES = {"image_resized"}
FORMAT = Mapping[str, Tensor]


@dataclass(frozen=True)
class Recorded:
    """One case: its description and tensors."""

    case: dict[str, Any]
    tensors: FORMAT

    @property
    def request(self) -> Request:
        """The question as it was put."""
        media: dict[str, list[Any]] = {"image": [], "video": []}
        for index, about in enumerate(self.case["media"]):
            media[about["kind"]].append(self._source(index, about))
        chunk = self.case["chunk_budget"]
        return Request(
            raw_prompt=self.case["prompt"],
            images=media["image"],
            videos=media["video"],
            prune=self.case["q"] or None,
            generation=Generation(max_new_tokens=32, prefill_chunk=chunk),
        )

    def _source(self, index: int, about: dict[str, Any]) -> Pixels | MediaItem | Encoded:
        kind = about["kind"]
        if self.case["embeds"]:
            return Encoded(
                kind=kind,
                embeds=self.tensors[f"media{index}.tower_out"],
                grid=self.grid(index),
                seconds_per_grid=float(self.tensors[f"media{index}.second_per_grid_ts"]),
                layers={},
            )
        if self.case["name"] in FROM_PATCHES:
            patches = self.tensors[f"media{index}.pixel_values"]
            return MediaItem(kind=kind, patches=patches, grid=self.grid(index))
        raw = self.tensors[f"media{index}.raw"]
        frames = raw if raw.ndim == 4 else raw[None]
        return Pixels(kind=kind, frames=frames, frames_per_second=about["fps"])

    def grid(self, index: int) -> tuple[int, int, int]:
        frames, rows, columns = self.tensors[f"media{index}.grid_thw"].tolist()
        return frames, rows, columns


def recorded(name: str) -> Recorded:
    """A case with truth, by name."""
    case = next(case for case in TRUTHS if case["name"] == name)
    return Recorded(case, load_file(E2E / case["file"]))


def with_generation(request: Request, **changed: Any) -> Request:
    return replace(request, generation=replace(request.generation, **changed))
