"""TensorRT for RTX: engines for GeForce and RTX GPUs, built ahead of time on any machine."""

from __future__ import annotations

from vlexport.backends._tensorrt.backend import TensorRt


class Rtx(TensorRt):
    """TensorRT for RTX, whose builds need no GPU."""

    name = module = "tensorrt_rtx"
    extra = "rtx"
    summary = "TensorRT for RTX, strongly typed; builds without a GPU, runs on sm75 to sm121"
    packages = ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12")
    # Of version 1.7.1.116; there is none for sm90 and sm100.
    targets = ("sm75", "sm80", "sm86", "sm89", "sm120", "sm121")


BACKEND = Rtx()
