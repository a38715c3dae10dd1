"""torch-tensorrt: the exported program with TensorRT engines inside it, and the rest of it in torch.

Never run: it is imported with a CUDA build of torch and a GPU only, and none was at hand. Its contract is
tested against a stand-in for the library.
"""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.backends import log_progress
from vlexport.backends._engine import refused_by
from vlexport.backends._torch import TorchRunner
from vlexport.backends.base import Backend, Capability, EngineSpec, Options, Payloads, Progress, Runner
from vlexport.errors import UnsupportedError
from vlexport.system import VARIABLES, compile_caches
from vlexport.target import NO_GPU, Target, device_here, platform_here

if TYPE_CHECKING:
    from torch import nn

    from vlexport._build.graph import Graph

PROGRAM, PARTITION = "program.pt2", "partition.json"
DEVICE, ABSENT = "cuda", "absent"
# How the library names the parts that it has cut a program into.
ENGINE_PART, TORCH_PART = "_run_on_acc", "_run_on_gpu"


class TorchTensorRt(Backend):
    """Typed as the program is; one profile; for the GPU at hand."""

    name = "torch_tensorrt"
    extra = "tensorrt"
    summary = "torch-tensorrt: TensorRT engines inside an exported program, for the GPU at hand; never run"
    form = "padded"
    rows_on = "cuda"
    # Builders of TensorRT end by signals: KataGo#1225, CTranslate2#150.
    may_crash = True
    cannot_take_bytes = (
        "its engines have not run with inputs of 8 bits. Leave it out, or build with backend tensorrt_rtx."
    )
    capabilities = (
        Capability(dtype="float32"),
        Capability(dtype="bfloat16", note="norm statistics and rotary in float32"),
        Capability(dtype="float16", note="norm statistics, rotary and layers that overflow in float32"),
    )

    def missing(self) -> str | None:
        """Read package versions without importing: the library fails to load without a driver."""
        ours, theirs = installed("torch"), installed("torch-tensorrt")
        if theirs == ABSENT:
            return (
                "the package torch-tensorrt is not installed. pip install 'vlexport[tensorrt]' installs it."
            )
        if ours.split(".")[:2] != theirs.split(".")[:2]:
            minor = ".".join(theirs.split(".")[:2])
            return f"torch_tensorrt {theirs} goes with torch {minor}, and this is torch {ours}."
        if ours.endswith("+cpu"):
            return f"torch_tensorrt needs a CUDA build of torch, and this is torch {ours}."
        if device_here() == NO_GPU:
            return "torch_tensorrt builds for the GPU at hand, and there is none."
        return None

    def target(self) -> Target:
        return Target(
            backend=self.name,
            version=installed("torch-tensorrt"),
            platform=platform_here(),
            device=device_here(),
            torch=installed("torch"),
        )

    def versions(self) -> dict[str, str]:
        return {name: installed(name) for name in ("torch", "torch-tensorrt", "tensorrt")}

    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        import torch
        import torch_tensorrt
        from torch.export.passes import move_to_device_pass

        # The pass moves the weights of the program that it is given, and the caller's is still in use.
        with warnings.catch_warnings():
            # torch's own use of its tree library.
            warnings.simplefilter("ignore", FutureWarning)
            program = move_to_device_pass(copy.deepcopy(graph.program), DEVICE)
        inputs = {}
        for spec in graph.inputs:
            low, usual, high = graph.profile.shapes_of(spec)
            inputs[spec.name] = torch_tensorrt.Input(
                min_shape=low,
                opt_shape=usual,
                max_shape=high,
                dtype=getattr(torch, spec.dtype),
                name=spec.name,
            )
        module = torch_tensorrt.dynamo.compile(
            program,
            arg_inputs=(inputs,),
            # Types are the program's: no choice is left to the library.
            use_explicit_typing=True,
            disable_tf32=True,
            truncate_double=False,
            # Whatever it can take it takes, and what it then cannot build is an error.
            min_block_size=1,
            pass_through_build_failures=True,
        )
        partition = partition_of(module)
        if not partition["engines"]:
            raise UnsupportedError(
                f"torch_tensorrt took nothing of the program; {sum(partition['in_torch'].values())} "
                "operators stay in torch. Build with backend tensorrt, which takes all or names what it "
                "cannot take."
            )
        (out / PARTITION).write_text(json.dumps(partition, indent=1) + "\n", encoding="utf-8")
        torch_tensorrt.save(module, str(out / PROGRAM), output_format="exported_program", retrace=False)

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        import torch
        import torch_tensorrt  # noqa: F401  defines the operator that runs engines

        from vlexport.vision.static_shapes import to_device

        content, device = payloads.read(PROGRAM), torch.device(DEVICE)
        with refused_by(f"torch_tensorrt {installed('torch-tensorrt')}"), VARIABLES, compile_caches():
            module = torch.export.load(io.BytesIO(content)).module()

        return TorchRunner(
            lambda tensors: module({name: to_device(tensor, device) for name, tensor in tensors.items()})
        )


def installed(package: str) -> str:
    """Return the version of a package, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def partition_of(module: nn.Module) -> dict[str, Any]:
    """Count the engines, the parts in torch, and the operators in these parts and around all."""
    from torch.fx import GraphModule

    parts = dict(module.named_children())
    rest = [part for name, part in parts.items() if TORCH_PART in name]
    counts: Counter[str] = Counter()
    for graph in (part.graph for part in (module, *rest) if isinstance(part, GraphModule)):
        # Taking one of several results is no work.
        counts.update(
            str(node.target)
            for node in graph.nodes
            if node.op == "call_function" and getattr(node.target, "__name__", "") != "getitem"
        )
    engines = sum(ENGINE_PART in name for name in parts)
    return {"engines": engines, "torch_parts": len(rest), "in_torch": dict(sorted(counts.items()))}


BACKEND = TorchTensorRt()
