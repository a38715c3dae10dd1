"""CUDA graphs: the exported program, captured once for each budget of tokens; attention by bounds.

A call runs in the smallest budget that holds it, padded with zeros; one above the largest runs uncaptured.
Outputs stay on the device. Pruning and positions come after the engine, so graphs stay on with them.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.backends import _torch, log_progress
from vlexport.backends._engine import refused_by
from vlexport.backends._program import CALLS, WEIGHTS, read_program, write_program
from vlexport.backends.base import Backend, Capability, EngineSpec, Options, Payloads, Progress, Runner
from vlexport.specs import Symbol
from vlexport.target import NO_GPU, device_here

if TYPE_CHECKING:
    from vlexport._build.graph import Graph
    from vlexport.backends._captured import CapturedCalls

SIZES = "sizes.json"
SMALLEST, LARGEST = 64, 16384
# From here on the device, not the host, takes the time of a call, and padding costs more than launches.
PADDED = 1024
# Each budget is captured for a few frames of any length, and for many short ones; other calls run uncaptured.
FRAMES = (8, 256)
# Of the kernel of varlen_attn, and of its argument `scale`.
LEAST_CAPABILITY, LEAST_TORCH = 80, (2, 11)


class CudaGraphs(Backend):
    """Half precision only, as the attention kernel."""

    name = "cudagraphs"
    summary = "the exported program in captured CUDA graphs, one for each budget of tokens"
    form = "cu_seqlens"
    device = rows_on = "cuda"
    mapped = (WEIGHTS,)
    capabilities = (Capability(dtype="bfloat16", note="measured on an H100 with torch 2.11"),)

    def missing(self) -> str | None:
        # Without importing torch, which `list` does not load.
        device, torch = device_here(), version("torch")
        if device == NO_GPU:
            return "there is no NVIDIA GPU, or no driver for it. Take a machine that has one."
        if int(device.removeprefix("sm")) < LEAST_CAPABILITY:
            return f"the GPU is {device}; attention in half precision needs sm{LEAST_CAPABILITY} or newer."
        if "+cpu" in torch:
            return f"torch {torch} is built without CUDA. Install a torch for CUDA."
        if tuple(map(int, torch.split(".")[:2])) < LEAST_TORCH:
            return f"torch {torch} has no varlen_attn with a scale. Install torch 2.11 or newer."
        return None

    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        write_program(graph.program, out)
        (out / SIZES).write_text(json.dumps(sizes_of(graph)), encoding="utf-8")

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        with refused_by(f"torch {version('torch')}"):
            return _Runner(captured_calls(payloads, json.loads(payloads.read(SIZES)), spec, "cuda"))


def sizes_of(graph: Graph) -> list[dict[str, int]]:
    """Return every symbol's size, for each budget that the profile has use for."""
    from vlexport.vision.static_shapes import doubling

    calls: list[dict[str, int]] = []
    tokens = graph.outputs[0].shape[0]
    if isinstance(tokens, int):
        return calls
    largest = min(LARGEST, graph.profile.range_of(tokens).max)
    packing = graph.recipe.packing(graph.config)
    doubled = doubling(min(SMALLEST, largest), largest)
    between = [3 * budget // 2 for budget in doubled if budget >= PADDED and 3 * budget // 2 < largest]
    for budget, frames in product(sorted([*doubled, *between]), FRAMES):
        sizes = packing.capture_sizes(budget, min(budget, frames))
        named = {str(symbol): size for symbol, size in sizes.items()}
        # Where one item has more tokens than the smallest budget, the first ones are one.
        calls += [named] if named not in calls else []
    return calls


def captured_calls(
    payloads: Payloads, sizes: list[dict[str, int]], spec: EngineSpec, device: str
) -> CapturedCalls:
    """Return the program on a device, in calls of these sizes."""
    import torch

    from vlexport.backends._captured import CapturedCalls

    # With a number: the current device may be another one in a later call.
    numbered = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
    program = read_program(payloads.read(CALLS), payloads.map(WEIGHTS), numbered)
    return CapturedCalls(program.run, spec, known_sizes(sizes), device)


def known_sizes(sizes: list[dict[str, int]]) -> list[dict[Symbol, int]]:
    """Return the sizes of calls, by symbol."""
    return [{Symbol(name): size for name, size in named.items()} for named in sizes]


class _Runner(_torch.TorchRunner):
    def __init__(self, calls: CapturedCalls) -> None:
        super().__init__(calls.run)
        self.calls, self.budgets = calls, calls.budgets

    def warm_up(self) -> None:
        self.calls.warm_up()


BACKEND = CudaGraphs()
