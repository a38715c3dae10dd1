"""PyTorch, operator by operator: needs nothing but torch, and is the yardstick for the others."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from vlexport._build.estimate import Costs
from vlexport.backends import _torch, base

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from vlexport._build.graph import Graph

PROGRAM = "program.pt2"
# Reading a program takes a second, so a check reads the very bytes that its engine runs no second time.
_READ: WeakValueDictionary[bytes, ExportedProgram] = WeakValueDictionary()


class Eager(base.Backend):
    """The exported program as it is."""

    name = "eager"
    summary = "the exported program, operator by operator in PyTorch"
    form = "grouped"
    capabilities = (
        base.Capability(
            dtype="float32",
            costs=Costs(
                base=336, opening=2.04, weights=1.65, values=0.76, disk=11.0,
                build_base=339, build_weights=2.54, check_values=3.74,
            ),
        ),
        base.Capability(
            dtype="bfloat16",
            note="norm statistics, rotary and softmax in float32",
            costs=Costs(
                base=342, opening=2.0, weights=1.0, values=1.5, disk=8.5,
                build_base=584, build_weights=3.76, check_values=2.54, compile_base=474, compile_weights=4.19,
            ),
        ),
    )  # fmt: skip

    def build(
        self, graph: Graph, options: base.Options, out: Path, progress: base.Progress = base.log_progress
    ) -> None:
        _torch.save_program(graph.program, out / PROGRAM)

    def open(self, payloads: base.Payloads, spec: base.EngineSpec, options: base.Options) -> base.Runner:
        import torch

        content = payloads.read(PROGRAM)
        with base.refused_by(f"torch {torch.__version__}"):
            program = _program(content)
            return _torch.TorchRunner(program.module(), options.threads, program=program)

    def inside(self, payloads: base.Payloads) -> base.Inside:
        import torch

        program = _program(payloads.read(PROGRAM))
        module = functools.cache(program.module)

        def sums(
            inputs: Mapping[str, Tensor], fed: Mapping[str, Tensor], wanted: Collection[str] = ()
        ) -> Mapping[str, Tensor]:
            """Run the program operator by operator and keep every sum."""
            found: dict[str, Tensor] = {}

            class Sums(torch.fx.Interpreter):
                def run_node(self, n: torch.fx.Node) -> object:
                    value = super().run_node(n)
                    if "add" in str(n.target) and isinstance(value, torch.Tensor):
                        found[n.name] = value
                    return fed.get(n.name, value)

            with torch.inference_mode():
                Sums(module()).run(dict(inputs))
            return {name: each for name, each in found.items() if name in wanted or not wanted}

        return base.Inside(weights=program.state_dict, sums=sums)


def _program(content: bytes) -> ExportedProgram:
    """Return the program that these bytes hold."""
    key = sha256(content).digest()
    found = _READ.get(key)
    if found is None:
        found = _READ[key] = _torch.load_program(content)
    return found


BACKEND = Eager()
