"""Products of a decoder's prompt in float32 on processors for which torch's library has no fast kernel.

torch multiplies float32 by MKL, which keeps to AVX2 on processors that are not Intel's. oneDNN, which torch
brings too and multiplies bfloat16 by, takes AVX-512 on all of them. With 589 rows a thread of a Xeon reaches
91 GFLOP/s in MKL held to AVX2 (`MKL_ENABLE_INSTRUCTIONS`), 140 in oneDNN, and 150 in MKL as it is: there MKL
stays.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from vlexport.target import processor_here

# Single tokens read the weights once, whatever multiplies: 7 GFLOP/s in MKL, 6 in oneDNN.
LEAST_ROWS = 16
# oneDNN and torch's own layer above it each keep 1,024 products by their sizes, 0.3 MB a product: with these,
# 100 prompts of different lengths took 300 MB. Kept for the layers of a prompt, or of a few: a product that
# is made anew takes 0.5 ms.
CACHES = {"LRU_CACHE_CAPACITY": "16", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}


def bound_caches() -> None:
    """Let a process keep few of oneDNN's products; both read their bound at the first product."""
    for name, products in CACHES.items():
        os.environ.setdefault(name, products)


class OneDnnLinear(nn.Linear):
    """A layer whose products of many rows are oneDNN's, on weights as they are."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-2] < LEAST_ROWS:
            return super().forward(x)
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # noqa: SLF001
        return product


def choose_products(body: nn.Module, processor: str | None = None) -> None:
    """Let oneDNN multiply in the float32 layers of a model on a processor that MKL is slow on."""
    has_wide = torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkldnn.is_available()
    if not has_wide or "Intel" in (processor_here() if processor is None else processor):
        return
    for module in body.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.is_cpu:
            module.__class__ = OneDnnLinear
