"""PyTorch, operator by operator: needs nothing but torch, and is the yardstick for the others."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.backends import Capability, EngineSpec, Options, Payloads, Runner, _torch
from vlexport.estimate import MEASURED, Costs
from vlexport.target import Target, platform_here

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from vlexport.graph import Graph

PROGRAM = "program.pt2"


class Eager:
    """The exported program as it is."""

    name = "eager"
    extra = None
    summary = "the exported program, operator by operator in PyTorch"
    form = "runs"
    capabilities = (
        Capability(
            dtype="float32",
            costs=Costs(
                base=336,
                opening=2.04,
                weights=1.65,
                values=0.76,
                build_base=445,
                build_weights=3.02,
                check_values=2.43,
                disk=5.5,
                origin=MEASURED,
            ),
        ),
        Capability(
            dtype="bfloat16",
            note="norm statistics, rotary and softmax in float32",
            costs=Costs(
                base=342,
                opening=2.0,
                weights=1.0,
                values=1.5,
                build_base=200,
                build_weights=3.87,
                check_values=2.69,
                disk=3.0,
                origin=MEASURED,
                compile_base=474,
                compile_weights=4.19,
            ),
        ),
    )

    def missing(self) -> str | None:
        return None

    def versions(self) -> dict[str, str]:
        import torch

        return {"torch": torch.__version__}

    def target(self) -> Target:
        import torch

        return Target(backend=self.name, version=torch.__version__, platform=platform_here(), device="cpu")

    def build(self, graph: Graph, options: Options, out: Path) -> None:
        _torch.save_program(graph.program, out / PROGRAM)

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        import torch

        import vlexport.vision.segments  # noqa: F401  defines the attention operator that programs call

        program = torch.export.load(io.BytesIO(payloads.read(PROGRAM)))
        return _Runner(program.module(), options.threads)


class _Runner:
    def __init__(self, module: Module, threads: int) -> None:
        self._module: Module | None = module
        self._threads = threads

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        assert self._module is not None
        try:
            with torch.inference_mode(), _torch.torch_threads(self._threads):
                result: dict[str, Tensor] = self._module(dict(tensors))
        except RuntimeError as error:
            raise _torch.explained(error, "eager", tensors) from error
        return result

    def close(self) -> None:
        self._module = None


BACKEND = Eager()
