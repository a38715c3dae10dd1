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

from vlexport.backends import base
from vlexport.backends._torch import TorchRunner
from vlexport.errors import UnsupportedError
from vlexport.processes import compile_caches
from vlexport.specs import ShapeProfile, TensorSpec
from vlexport.target import NO_GPU, Target, device_here, platform_here

if TYPE_CHECKING:
    from torch import Tensor, nn

    from vlexport._build.graph import Graph

PROGRAM, PARTITION = "program.pt2", "partition.json"
DEVICE, ABSENT = "cuda", "absent"
# How the library names the parts that it has cut a program into.
ENGINE_PART, TORCH_PART = "_run_on_acc", "_run_on_gpu"


class TorchTensorRt(base.Backend):
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
        base.Capability(dtype="float32"),
        base.Capability(dtype="bfloat16", note="norm statistics and rotary in float32"),
        base.Capability(dtype="float16", note="the same, and what overflows, found by measuring"),
    )

    def missing(self) -> str | None:
        """Read package versions without importing: the library fails to load without a driver."""
        ours, theirs = installed("torch"), installed("torch-tensorrt")
        if theirs == ABSENT:
            package = "'vlexport[tensorrt]'"
            return f"the package torch-tensorrt is not installed. pip install {package} installs it."
        if _minor(ours) != _minor(theirs):
            return f"torch_tensorrt {theirs} goes with torch {_minor(theirs)}, and this is torch {ours}."
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

    def build(
        self, graph: Graph, options: base.Options, out: Path, progress: base.Progress = base.log_progress
    ) -> None:
        import torch_tensorrt
        from torch.export.passes import move_to_device_pass

        # The pass moves the weights of the program that it is given, and the caller's is still in use.
        with warnings.catch_warnings():
            # torch's own use of its tree library.
            warnings.simplefilter("ignore", FutureWarning)
            program = move_to_device_pass(copy.deepcopy(graph.program), DEVICE)
        inputs = ({spec.name: _input(torch_tensorrt, spec, graph.profile) for spec in graph.inputs},)
        module = torch_tensorrt.dynamo.compile(
            program,
            arg_inputs=inputs,
            # Types are the program's: no choice is left to the library.
            use_explicit_typing=True,
            disable_tf32=True,
            truncate_double=False,
            # Whatever it can take it takes, and what it then cannot build is an error.
            min_block_size=1,
            pass_through_build_failures=True,
        )
        found = partition_of(module)
        if not found["engines"]:
            raise UnsupportedError(
                f"torch_tensorrt took nothing of the program; {sum(found['in_torch'].values())} operators "
                "stay in torch. Build with backend tensorrt, which takes all or names what it cannot take."
            )
        (out / PARTITION).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        torch_tensorrt.save(module, str(out / PROGRAM), output_format="exported_program", retrace=False)

    def open(self, payloads: base.Payloads, spec: base.EngineSpec, options: base.Options) -> base.Runner:
        import torch
        import torch_tensorrt  # noqa: F401  defines the operator that runs engines

        from vlexport.vision.static_shapes import to_device

        content, device = payloads.read(PROGRAM), torch.device(DEVICE)
        with base.refused_by(f"torch_tensorrt {installed('torch-tensorrt')}"), compile_caches():
            module = torch.export.load(io.BytesIO(content)).module()

        def call(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            """Return results on the device."""
            found: dict[str, Tensor] = module(
                {name: to_device(each, device) for name, each in tensors.items()}
            )
            return found

        return TorchRunner(call)


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
    for graph in (each.graph for each in (module, *rest) if isinstance(each, GraphModule)):
        # Taking one of several results is no work.
        counts.update(
            str(node.target)
            for node in graph.nodes
            if node.op == "call_function" and getattr(node.target, "__name__", "") != "getitem"
        )
    engines = sum(ENGINE_PART in name for name in parts)
    return {"engines": engines, "torch_parts": len(rest), "in_torch": dict(sorted(counts.items()))}


def _minor(release: str) -> str:
    return ".".join(release.split(".")[:2])


def _input(library: Any, spec: TensorSpec, profile: ShapeProfile) -> Any:
    import torch

    low, usual, high = profile.shapes_of(spec)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return library.Input(min_shape=low, opt_shape=usual, max_shape=high, dtype=dtype, name=spec.name)


BACKEND = TorchTensorRt()
