"""A selection as one program: traced for an AOTInductor package, or an ONNX file.

T frames, N tokens per frame, D width, K kept tokens.

All take embeddings (T, N, D) and `share_K` (selectors.py), so one program serves every size: K is a length
that the host chooses per call. It is made for one dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.export import Dim

from vlexport._build.aoti import Settings
from vlexport._build.parts import Part
from vlexport.errors import UnsupportedError
from vlexport.pruning.pixels import Chooser
from vlexport.pruning.selectors import MAX_WIDTH, BestRows, Selector

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# No two sizes alike: equal ones may be taken for one and the same size.
EXAMPLE_TND, EXAMPLE_K = (6, 40, 96), 70
EXAMPLE_THWCB = (6, 5, 7, 3, 48)


def precision_of(selector: Selector) -> Settings:
    """Return inductor's settings for this selector, scoped to one compilation."""
    if selector.sums_are_exact:
        return {"cpp.enable_floating_point_contract_flag": "fast"}
    # Without it fused kernels keep half precision values in float32, and other tokens win.
    return {"emulate_precision_casts": True}


def selection_part(selector: Selector, dtype: str) -> Part:
    """Return the selection as a part of a package, every size free."""
    tokens = Dim.DYNAMIC(max=selector.most_packaged)
    embeds_sizes = {0: Dim.DYNAMIC(min=2), 1: tokens, 2: Dim.DYNAMIC(min=4, max=MAX_WIDTH)}
    return Part(BestRows(selector), _example(dtype), (embeds_sizes, {0: Dim.DYNAMIC}), num_results=2)


def chooser_part(name: str) -> Part:
    """Return a rule that chooses cells as a part of a package, every size free but the number of colours."""
    cells_THWCB = torch.zeros(EXAMPLE_THWCB, dtype=torch.uint8)
    room_K = torch.empty(EXAMPLE_K, dtype=torch.bool)
    sizes = (dict.fromkeys((0, 1, 2, 4), Dim.DYNAMIC), {0: Dim.DYNAMIC})
    return Part(Chooser(name), (cells_THWCB, room_K), sizes, num_results=2)


def _example(dtype: str) -> tuple[Tensor, Tensor]:
    if dtype not in DTYPES:
        raise UnsupportedError(f"dtype '{dtype}': expected one of {', '.join(sorted(DTYPES))}.")
    generator = torch.Generator().manual_seed(0)
    embeds_TND = torch.randn(EXAMPLE_TND, generator=generator).to(DTYPES[dtype])
    share_K = torch.full((EXAMPLE_K,), EXAMPLE_K / (EXAMPLE_TND[0] * EXAMPLE_TND[1]))
    return embeds_TND, share_K
