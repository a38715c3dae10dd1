"""TensorRT of the data centre: engines for the GPU at hand."""

from __future__ import annotations

from vlexport.backends._tensorrt.backend import TensorRt, Variant

BACKEND = TensorRt(
    "tensorrt",
    extra="tensorrt",
    summary="TensorRT, strongly typed, for the GPU at hand",
    flavour=Variant(
        module="tensorrt",
        packages=("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        targets=(),
        install="pip install 'vlexport[tensorrt]'",
    ),
)
