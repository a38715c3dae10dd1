"""Outputs of encoders, scattered over placeholders and gathered again, and deepstack levels.

N tokens of the prompt, V visual rows of the prompt, L slots of one placeholder, K of them embeddings,
D width of the decoder, S deepstack levels, W = D * (1 + S). All compile without graph breaks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.splice import Placeholder, check_count, visual_slots


def embed_slots(placeholder: Placeholder) -> Tensor:
    """Return slots of one placeholder that hold rows, counted from its start, int64 on the host."""
    return visual_slots([replace(placeholder, offset=0)], placeholder.length)


def check_encoder_outputs(outputs: Sequence[Tensor] | Tensor, num_items: int) -> None:
    """Refuse what is not one [tokens, width] tensor per media item; a stack of equal ones counts too."""
    if not isinstance(outputs, list | tuple | Tensor) or (isinstance(outputs, Tensor) and outputs.ndim == 0):
        raise InputError(
            f"encoder outputs: {type(outputs).__name__} given; "
            f"expected a list or tuple with one [tokens, width] tensor per media item, or their stack."
        )
    if len(outputs) != num_items:
        raise InputError(
            f"encoder outputs: {len(outputs)} given for {num_items} media items; "
            f"return one for each, in input order."
        )
    for index, output in enumerate(outputs):
        if not isinstance(output, Tensor) or output.ndim != 2:
            given = f"shape {list(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"encoder output {index}: a tensor of shape [tokens, width] expected, {given} given; "
                f"split what the encoder returned by media item."
            )


def scatter_rows(rows_KD: Tensor, slots_K: Tensor | None, num_slots: int) -> Tensor:
    """Return rows at their slots of a placeholder, NaN in the others; without slots the rows as they are."""
    if slots_K is None:
        return rows_KD
    check_count(rows_KD.shape[0], slots_K.shape[0], "the placeholder")
    blank_LD = rows_KD.new_full((num_slots, rows_KD.shape[1]), torch.nan)
    return blank_LD.index_copy(0, slots_K, rows_KD)


def gather_rows(placed_LD: Tensor, slots_K: Tensor | None) -> Tensor:
    """Return the rows that `scatter_rows` placed."""
    return placed_LD if slots_K is None else placed_LD.index_select(0, slots_K)


def split_levels(features_VW: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Split columns `main | level 0 | level 1 ...` into main embeddings [V, D] and levels [S, V, D]."""
    columns = features_VW.shape[1]
    if width < 1 or columns < width or columns % width:
        raise InputError(
            f"features are {columns} wide: expected the decoder's width {width} once for the main output "
            f"and once per deepstack level."
        )
    levels_VSD = features_VW[:, width:].reshape(features_VW.shape[0], columns // width - 1, width)
    return features_VW[:, :width], levels_VSD.transpose(0, 1)


def deepstack_tables(levels_SVD: Tensor, slots_V: Tensor, num_tokens: int) -> Tensor:
    """Return terms for the hidden states after decoder layer 0, 1, ...: [S, N, D], zero on text rows."""
    check_count(levels_SVD.shape[1], slots_V.shape[0], "the prompt")
    blank_SND = levels_SVD.new_zeros((levels_SVD.shape[0], num_tokens, levels_SVD.shape[2]))
    return blank_SND.index_copy(1, slots_V, levels_SVD)
