"""Pruning before the tower inside vLLM: its processor chooses cells, and leaves the prompt room for these.

The choice is the entry `prune_before` of `mm_processor_kwargs`, of the server and, over it, of a request.
Of what vLLM's own processor makes of a picture, the patches of chosen cells go on to the model, and the cells
beside them in a field of their own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from vlexport.errors import InputError
from vlexport.pruning.cells import CellChoice
from vlexport.pruning.pixels import kept_cells

KEY = "prune_before"
# Fields of patches, by kind.
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
COLOURS = 3


def allows_choice(multimodal: Any) -> bool:
    """Return whether the server names a choice; null leaves it to requests."""
    return multimodal is not None and KEY in (multimodal.mm_processor_kwargs or {})


def choice_of(multimodal: Any, requested: Mapping[str, object]) -> CellChoice | None:
    """Return the choice of a request, or else of the server."""
    if KEY in requested and not allows_choice(multimodal):
        raise InputError(
            f"mm_processor_kwargs: {KEY} given by a request, and not by the server. Start it with "
            f"--mm-processor-kwargs '{{\"{KEY}\": null}}', which leaves the choice to requests."
        )
    named: Any = {**(multimodal.mm_processor_kwargs or {}), **requested}.get(KEY)
    return None if named is None else CellChoice.of(named)


class ChoosesCells:
    """Comes before vLLM's processor of a family."""

    info: Any

    def get_dummy_inputs(self, *given: Any, **named: Any) -> Any:
        inputs: Any = super().get_dummy_inputs(*given, **named)  # type: ignore[misc]
        if allows_choice(self.info.ctx.get_mm_config()):
            # vLLM measures its memory by these: they stay whole.
            inputs.hf_processor_mm_kwargs = {**inputs.hf_processor_mm_kwargs, KEY: None}
        return inputs

    def _apply_hf_processor_main(self, mm_items: Any, hf_kwargs: Mapping[str, object]) -> Any:
        try:
            choice = choice_of(self.info.ctx.get_mm_config(), hf_kwargs)
        except InputError as error:
            # vLLM answers this class with 400.
            raise ValueError(str(error)) from error
        data: Any = super()._apply_hf_processor_main(mm_items, _others(hf_kwargs))  # type: ignore[misc]
        if choice is not None:
            for kind in choice.rule.kinds:
                if PIXELS[kind] in data:
                    self._leave_kept(kind, choice, data)
        return data

    def _leave_kept(self, kind: str, choice: CellChoice, data: Any) -> None:
        merge = self.info.get_hf_config().vision_config.spatial_merge_size
        grids, parts, cells = data[f"{kind}_grid_thw"].tolist(), [], []
        items = data[PIXELS[kind]].split([math.prod(grid) for grid in grids])
        for patches, (frames, rows, columns) in zip(items, grids, strict=True):
            patches_THWUCB = patches.view(frames, rows // merge, columns // merge, merge**2, COLOURS, -1)
            kept = kept_cells(choice, patches_THWUCB.transpose(3, 4).flatten(4))
            parts.append(patches_THWUCB.flatten(0, 2)[kept].view(-1, patches.shape[1]))
            cells.append(kept.cpu())
        data[PIXELS[kind]], data[f"{kind}_cells"] = torch.cat(parts), cells

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Mapping[str, object]) -> Any:
        from vllm.multimodal.inputs import MultiModalFieldConfig as Field

        fields = dict(super()._get_mm_fields_config(hf_inputs, hf_processor_mm_kwargs))  # type: ignore[misc]
        unit = self.info.get_hf_config().vision_config.spatial_merge_size ** 2
        for kind, pixels in PIXELS.items():
            if (cells := hf_inputs.get(f"{kind}_cells")) is not None:
                fields[pixels] = Field.flat_from_sizes(
                    kind, torch.tensor([unit * len(kept) for kept in cells])
                )
                fields[f"{kind}_cells"] = Field.batched(kind, keep_on_cpu=True)
        return fields

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Mapping[str, Any], out_mm_kwargs: Any
    ) -> Sequence[Any]:
        config = self.info.get_hf_config()

        def shortened(update: Any) -> Any:
            kind, whole = update.modality, update.replacement
            token = config.image_token_id if kind == "image" else config.video_token_id

            def left(index: int) -> Any:
                cells = out_mm_kwargs[kind][index].get(f"{kind}_cells")
                return whole(index) if cells is None else _slots(whole(index), token, cells.data.tolist())

            return replace(update, replacement=left)

        others = _others(hf_processor_mm_kwargs)
        updates = super()._get_prompt_updates(mm_items, others, out_mm_kwargs)  # type: ignore[misc]
        return [shortened(update) for update in updates]


def _others(requested: Mapping[str, object]) -> dict[str, object]:
    # vLLM keeps a processor of transformers for each set of names that these do not know.
    return {name: value for name, value in requested.items() if name != KEY}


def _slots(content: Any, token: int, cells: Sequence[int]) -> Any:
    """Return what takes the place of an item in a prompt, with slots for these cells alone."""
    full = content if isinstance(content, list) else content.full
    kept, numbers = set(cells), itertools.count()
    left = [each for each in full if each != token or next(numbers) in kept]
    return left if isinstance(content, list) else replace(content, full=left)
