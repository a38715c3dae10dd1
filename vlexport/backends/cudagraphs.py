"""CUDA graphs: the exported program, captured once for each budget of tokens; attention by bounds.

A call runs in the smallest budget that holds it, padded with zeros; one above the largest runs uncaptured.
Outputs stay on the device. Pruning and positions come after the engine, so graphs stay on with them.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.backends import Capability, EngineSpec, Options, Payloads, Runner, _torch
from vlexport.backends._nvidia import NO_GPU, device_here
from vlexport.errors import UnsupportedError
from vlexport.specs import Symbol
from vlexport.target import Target, platform_here

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport.backends._captured import CapturedCalls
    from vlexport.graph import Graph

PROGRAM, SIZES = "program.pt2", "sizes.json"
SMALLEST, LARGEST = 64, 16384
# Of one call; a call with more frames runs uncaptured.
MOST_FRAMES = 256


class CudaGraphs:
    """Half precision only, as the attention kernel."""

    name = "cudagraphs"
    extra = None
    summary = "the exported program in captured CUDA graphs, one for each budget of tokens"
    form = "bounds"
    capabilities = (Capability(dtype="bfloat16", note="has not run on a GPU so far"),)

    def missing(self) -> str | None:
        # Asked without torch, which `list` does not load.
        if device_here() == NO_GPU:
            return "there is no NVIDIA GPU, or no driver for it. Take a machine that has one."
        if "+cpu" in version("torch"):
            return f"torch {version('torch')} is built without CUDA. Install a torch for CUDA."
        return None

    def versions(self) -> dict[str, str]:
        return {"torch": version("torch")}

    def target(self) -> Target:
        return Target(backend=self.name, version=version("torch"), platform=platform_here(), device="cuda")

    def build(self, graph: Graph, options: Options, out: Path) -> None:
        _torch.save_program(graph.program, out / PROGRAM)
        (out / SIZES).write_text(json.dumps(sizes_of(graph)), encoding="utf-8")

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        sizes = json.loads(payloads.read(SIZES))
        return _Runner(captured_calls(payloads.read(PROGRAM), sizes, spec, "cuda"))


def sizes_of(graph: Graph) -> list[dict[str, int]]:
    """Every symbol's size, for each budget that the profile has use for."""
    if graph.recipe.capture_sizes is None:
        raise UnsupportedError(
            f"recipe '{graph.recipe.name}' does not say what a captured call needs. Take another backend."
        )
    from vlexport.vision.static_shapes import doubling

    found: list[dict[str, int]] = []
    tokens = graph.outputs[0].shape[0]
    if isinstance(tokens, int):
        return found
    largest = min(LARGEST, graph.profile.range_of(tokens).max)
    for budget in doubling(min(SMALLEST, largest), largest):
        sizes = graph.recipe.capture_sizes(graph.config, budget, min(budget, MOST_FRAMES))
        named = {str(each): size for each, size in sizes.items()}
        # Where one item has more tokens than the smallest budget, the first ones are one.
        found += [named] if named not in found else []
    return found


def captured_calls(
    program: bytes, sizes: list[dict[str, int]], spec: EngineSpec, device: str
) -> CapturedCalls:
    """The program on a device, in calls of these sizes."""
    import torch
    from torch.export.passes import move_to_device_pass

    import vlexport.vision.bounds  # noqa: F401  defines the attention operator that programs call
    from vlexport.backends._captured import CapturedCalls

    loaded = torch.export.load(io.BytesIO(program))
    if device != "cpu":
        loaded = move_to_device_pass(loaded, device)
    known = [{Symbol(name): size for name, size in each.items()} for each in sizes]
    return CapturedCalls(loaded.module(), spec, known, device)


class _Runner:
    def __init__(self, calls: CapturedCalls) -> None:
        self._calls: CapturedCalls | None = calls
        self.budgets = calls.budgets

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self._calls is not None
        try:
            return self._calls.run(tensors)
        except RuntimeError as error:
            raise _torch.explained(error, "cudagraphs", tensors) from error

    def close(self) -> None:
        self._calls = None


BACKEND = CudaGraphs()
