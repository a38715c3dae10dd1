"""TorchInductor: an AOTInductor package that runs where no compiler is, its weights in a file next to it.

Attention stays the eager operator, called once per run of equal segments.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport._build.aoti import Settings, compiler, load_package, target_here, write_package
from vlexport._build.estimate import Costs
from vlexport.backends import _torch, log_progress
from vlexport.backends._engine import VNNI, has_vnni, refused_by
from vlexport.backends._inspection import Inside
from vlexport.backends.base import Backend, Capability, EngineSpec, Options, Payloads, Progress, Runner
from vlexport.errors import UnsupportedError
from vlexport.specs import Precision, Quantisation, is_quantizable
from vlexport.system import release
from vlexport.target import Target

if TYPE_CHECKING:
    from torch import Tensor
    from torch.export import ExportedProgram

    from vlexport._build.graph import Graph

PACKAGE = "program.pt2"
WEIGHTS = "program.safetensors"
INT8 = Quantisation(name="int8", group=0, activations=0)
# Weights stay outside the shared object. What lies between loops is taken from the system at once: new pages
# for every loop took a quarter of a call of 3,700 patches.
SETTINGS: Settings = {"aot_inductor.package_constants_in_so": False, "memory_planning": True}
# Of bfloat16, with weights in 8 bits too.
HALF = Costs(
    base=324, opening=1.0, weights=1.01, values=2.7, disk=3.0,
    build_base=100, build_weights=2.03, check_values=4.1, compile_base=890, compile_weights=0.95,
)  # fmt: skip


class Inductor(Backend):
    """Compiled for this processor's level and this torch; both are in the target."""

    name = "inductor"
    summary = "AOTInductor package: fused C++ loops, loadable without a compiler"
    form = "grouped"
    by_item = True
    mapped = (WEIGHTS,)
    capabilities = (
        Capability(
            dtype="float32",
            note="building needs a C++ compiler, running does not",
            costs=Costs(
                base=330, opening=0.92, weights=1.04, values=1.3, disk=3.5,
                build_base=224, build_weights=2.17, check_values=3.17, compile_base=750, compile_weights=1.12,
            ),
        ),
        Capability(dtype="bfloat16", note="norm statistics and rotary in float32", costs=HALF),
        Capability(
            dtype="bfloat16",
            quantisation=INT8,
            note="weights and inputs of the blocks' products in 8 bits, with VNNI",
            costs=HALF,
        ),
    )  # fmt: skip

    def target(self) -> Target:
        return _with_vnni(target_here()) if has_vnni() else target_here()

    def build_target(self, options: Options, precision: Precision) -> Target:
        return target_here() if precision.quantisation is None else _with_vnni(target_here())

    def cannot_compute(self, precision: Precision, device: str | None = None) -> str | None:
        if precision.quantisation is None or has_vnni():
            return None
        return (
            f"the processor has no {VNNI}, without which sums of products of 8 bits may saturate. "
            "Build with onnxruntime or openvino."
        )

    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        if compiler() is None:
            raise UnsupportedError(
                "backend 'inductor' builds with a C++ compiler and found none: set CXX or install g++. "
                "A bundle that another machine built runs here without one."
            )
        program = graph.program if graph.quantisation is None else _integers(graph)
        _torch.in_whole_blocks(program)
        _compute_once(program)
        write_package(program, out / PACKAGE, SETTINGS)
        _torch.write_weights(out / WEIGHTS, program)

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        content, stored = payloads.read(PACKAGE), payloads.map(WEIGHTS)
        with refused_by(f"torch {version('torch')}"):
            package = _package(content)
            weights = _torch.read_weights(stored)
            constants = {name: weights[name] for name in package.get_constant_fqns()}
            _use(package, constants)

        def call(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            results: dict[str, Tensor] = package(
                {name: tensor.contiguous() for name, tensor in tensors.items()}
            )
            return results

        # The package reads its constants in place.
        return _torch.TorchRunner(call, options.threads, kept=constants)

    def inside(self, payloads: Payloads) -> Inside:
        stored = payloads.map(WEIGHTS)
        weights = _torch.read_weights(stored)
        opened = functools.cache(lambda: _package(payloads.read(PACKAGE)))

        @functools.cache
        def zeros() -> Tensor:
            import torch

            return torch.zeros(max(weight.nbytes for weight in weights.values()), dtype=torch.uint8)

        def partly(inputs: Mapping[str, Tensor], off: Callable[[str], bool]) -> Mapping[str, Tensor]:
            """Run the package with some weights at zero, all in one buffer."""
            import torch

            package = opened()
            names = package.get_constant_fqns()
            constants = {
                name: zeros()[: weight.nbytes].view(weight.dtype).view(weight.shape) if off(name) else weight
                for name, weight in weights.items()
                if name in names
            }
            _use(package, constants)
            with torch.inference_mode():
                results = {name: rows.clone() for name, rows in package(dict(inputs)).items()}
            # Each call reads other weights.
            release(stored)
            return results

        return Inside(weights=weights, release=lambda: release(stored), partly=partly)


def _with_vnni(target: Target) -> Target:
    return replace(target, instruction_set=f"{target.instruction_set}+{VNNI}")


def _compute_once(program: ExportedProgram) -> None:
    """Store cosines and sines, which torch would compute in each loop that reads them, for each head."""
    import torch
    from torch._inductor import test_operators  # noqa: F401  defines the operator

    aten, graph = torch.ops.aten, program.graph
    kept = torch.ops._inductor_test.realize.default  # noqa: SLF001  there is no other
    for function in (aten.cos.default, aten.sin.default):
        for node in graph.find_nodes(op="call_function", target=function):
            with graph.inserting_after(node):
                stored = graph.call_function(kept, (node,))
            stored.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(stored, delete_user_cb=lambda user, stored=stored: user is not stored)
    program.graph_module.recompile()


def _integers(graph: Graph) -> ExportedProgram:
    """Trace the module again, with integers for the matrices of its blocks as the checkpoint has them."""
    from vlexport._build.export import trace
    from vlexport.backends._integers import in_integers
    from vlexport.onnx.quantize import check_complete, read_weights

    # A copy with the same tensors: the graph's own module stays as it was traced.
    tensors = graph.module.state_dict(keep_vars=True).values()
    tower = deepcopy(graph.module, {id(tensor): tensor for tensor in tensors})
    weights = read_weights(graph.program)
    names = graph.recipe.weight_names(graph.checkpoint, graph.config)
    chosen = {
        name: stored
        for name, stored in names.items()
        if name in weights and is_quantizable(name, weights[name].ndim)
    }
    check_complete(in_integers(tower, graph.checkpoint.tensors(chosen)), weights)
    return trace(graph, tower).program


def _package(content: bytes) -> Any:
    import vlexport.vision.attention.kernels  # noqa: F401  defines the attention operator that packages call

    return load_package(content, PACKAGE)


def _use(package: Any, constants: Mapping[str, Tensor]) -> None:
    """Let the package read constants in place, which the caller keeps.

    torch never lets go of the tensors that it is given for this, so these own no memory.
    """
    import torch

    borrowed = {}
    for name, tensor in constants.items():
        memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        borrowed[name] = torch.frombuffer(memory, dtype=tensor.dtype).view(tensor.shape)
    package.load_constants(borrowed, check_full_update=True, user_managed=True)


BACKEND = Inductor()
