"""TensorRT of the data centre: engines for the GPU at hand."""

from __future__ import annotations

from vlexport.backends._tensorrt.flavour import Flavour, TensorRt

BACKEND = TensorRt(
    "tensorrt",
    extra="tensorrt",
    summary="TensorRT, strongly typed, for the GPU at hand",
    flavour=Flavour(
        module="tensorrt",
        packages=("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
        targets=(),
        install="pip install 'vlexport[tensorrt]'",
    ),
)
