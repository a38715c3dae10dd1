"""Host code as ONNX graphs: what a program without torch and vlexport needs around an engine."""

from __future__ import annotations
