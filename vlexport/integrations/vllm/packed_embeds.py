"""Interchange with systems that carry positions as trailing columns of the embeddings.

K rows, D width of an embedding, C position channels (4 or 5).

Inside vlexport positions stay integers; columns of a half-precision tensor round them, so packing and
unpacking refuse values that the dtype cannot hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vlexport.errors import InputError
from vlexport.positions.rules import check_integers

# The largest n such that every integer up to n is exact in the dtype.
_LARGEST_EXACT = {torch.bfloat16: 256, torch.float16: 2048, torch.float32: 2**24, torch.float64: 2**53}


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionedRows:
    """Embedding rows of one media item, or of a window of it, with their position channels."""

    embeds_KD: Tensor
    channels_CK: Tensor
    modality: str | None = None

    def __post_init__(self) -> None:
        check_integers("position channels", self.channels_CK)
        embeds, channels = list(self.embeds_KD.shape), list(self.channels_CK.shape)
        if len(embeds) != 2 or len(channels) != 2 or channels[0] not in (4, 5) or channels[1] != embeds[0]:
            raise InputError(
                f"embeddings {embeds} with position channels {channels}: expected (rows, width) "
                f"with (4, rows) or (5, rows)."
            )


def pack(rows: PositionedRows) -> Tensor:
    """Append the channels as columns in the dtype of the embeddings: (K, D + C). Reads values back."""
    dtype = rows.embeds_KD.dtype
    largest = _largest_exact(dtype)
    top = int(rows.channels_CK.amax()) if rows.channels_CK.numel() else 0
    if top > largest:
        raise _cannot_hold(top, dtype, largest)
    packed_KE = torch.cat([rows.embeds_KD, rows.channels_CK.T.to(dtype)], dim=1)
    return with_modality(packed_KE, rows.modality)


def unpack(packed_KE: Tensor, hidden: int) -> PositionedRows:
    """Split (K, D + 4) or (K, D + 5) into embeddings of width `hidden` and int64 channels. Reads values back.

    A half-precision column that reads exactly its largest exact integer may have been rounded by the sender;
    only the sender can know, which is why `pack` refuses first.
    """
    width = packed_KE.shape[-1]
    if packed_KE.dim() != 2 or width - hidden not in (4, 5):
        raise InputError(
            f"packed embeddings of shape {list(packed_KE.shape)} for a width of {hidden}: expected "
            f"(rows, {hidden + 4}) or (rows, {hidden + 5})."
        )
    columns_KC = packed_KE[:, hidden:]
    largest = _largest_exact(packed_KE.dtype)
    if columns_KC.numel():
        wide_KC = columns_KC.double()
        off_KC = (wide_KC - wide_KC.round()).abs()
        low, high, off = torch.stack([wide_KC.amin(), wide_KC.amax(), off_KC.amax()]).tolist()
        if not (low >= 0 and off == 0):
            raise InputError(
                f"the last {width - hidden} columns hold {low} to {high}, not positions; expected whole "
                f"numbers of 0 or more. Check the embedding width ({hidden})."
            )
        if high > largest:
            raise _cannot_hold(int(high), packed_KE.dtype, largest)
    return PositionedRows(
        embeds_KD=packed_KE[:, :hidden],
        channels_CK=columns_KC.to(torch.int64).T,
        modality=modality_of(packed_KE),
    )


def modality_of(embeds: Tensor) -> str | None:
    """Return the `modality` attribute that a caller may have set on a tensor."""
    modality = getattr(embeds, "modality", None)
    return modality if isinstance(modality, str) else None


def with_modality(embeds: Tensor, modality: str | None) -> Tensor:
    """Return the tensor, marked with the modality when there is one."""
    if modality is not None:
        embeds.modality = modality  # type: ignore[attr-defined]
    return embeds


def _largest_exact(dtype: torch.dtype) -> int:
    if dtype not in _LARGEST_EXACT:
        raise InputError(
            f"packed embeddings are {dtype}; expected one of: "
            f"{', '.join(sorted(str(known).removeprefix('torch.') for known in _LARGEST_EXACT))}."
        )
    return _LARGEST_EXACT[dtype]


def _cannot_hold(value: int, dtype: torch.dtype, largest: int) -> InputError:
    name = str(dtype).removeprefix("torch.")
    return InputError(
        f"position {value} in a {name} column, which is exact up to {largest} only. "
        f"Keep positions in an integer tensor (PositionedRows), or pack float32."
    )
