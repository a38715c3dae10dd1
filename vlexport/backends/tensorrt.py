"""TensorRT of the data centre: engines for the GPU at hand."""

from __future__ import annotations

from vlexport.backends._tensorrt.backend import TensorRt


class DataCentre(TensorRt):
    """TensorRT, whose builds time kernels on the GPU."""

    name = module = extra = "tensorrt"
    summary = "TensorRT, strongly typed, for the GPU at hand"
    packages = ("tensorrt", "tensorrt-cu13", "tensorrt-cu12")


BACKEND = DataCentre()
