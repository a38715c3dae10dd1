"""ONNX Runtime: one graph with a fused attention kernel per run of equal segments, weights beside it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.backends import Capability, EngineSpec, Options, Payloads, Runner
from vlexport.errors import MisfitError, ResourceError, VlexportError
from vlexport.estimate import MEASURED, Costs
from vlexport.specs import Quantisation
from vlexport.target import Target, platform_here

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime
    from torch import Tensor

    from vlexport.graph import Graph

MODEL = "model.onnx"
WEIGHTS = "model.weights"
# Bytes of inputs of a call after which the arena keeps what it took, about 280 MB at most: small calls are a
# tenth faster for it, large ones not.
KEPT_INPUTS = 2**24
# Instructions that multiply 8 bits and add in 32; each serves by itself.
DOT_PRODUCTS = ("avx512_vnni", "avx_vnni")
INT8 = Quantisation(name="int8", group=0, activations=0)


class OnnxRuntime:
    """The CUDA provider where it is there, else the CPU's; never one after the other has failed."""

    name = "onnxruntime"
    extra = None
    summary = "ONNX Runtime, fused attention per run of equal segments"
    form = "runs"
    capabilities = (
        Capability(
            dtype="float32",
            costs=Costs(
                base=249,
                opening=2.66,
                weights=1.85,
                values=1.3,
                build_base=636,
                build_weights=4.47,
                check_values=1.82,
                disk=0.2,
                origin=MEASURED,
            ),
        ),
        Capability(
            dtype="float32",
            quantisation=INT8,
            note="weights of blocks and what they multiply in 8 bits, on processors with VNNI",
            costs=Costs(
                base=260,
                opening=2.5,
                weights=1.7,
                values=1.0,
                build_base=526,
                build_weights=5.4,
                check_values=0.1,
                disk=0.3,
                origin=MEASURED,
            ),
        ),
    )

    def missing(self) -> str | None:
        if importlib.util.find_spec("onnxruntime") is None:
            return "the package onnxruntime is not installed. pip install vlexport installs it."
        return None

    def versions(self) -> dict[str, str]:
        names = ("torch", "onnx", "onnxscript", "onnx-ir")
        return {**{name: version(name) for name in names}, "onnxruntime": _library().__version__}

    def target(self) -> Target:
        library = _library()
        device = "cuda" if _provider(library).startswith("CUDA") else "cpu"
        return Target(
            backend=self.name,
            version=library.__version__,
            platform=platform_here(),
            device=device,
            instruction_set="+".join(dot_products()) or None,
        )

    def unable(self, quantisation: Quantisation) -> str | None:
        if _provider(_library()) != "CPUExecutionProvider":
            return "its kernels for integers are those of the CPU, and here it runs on CUDA. Leave it out."
        if platform_here().endswith("x86_64") and not dot_products():
            return (
                "the processor has none of " + ", ".join(DOT_PRODUCTS) + ". Without them two products of "
                "8 bits are added in 16, which saturate. Leave it out."
            )
        return None

    def instructions(self, quantisation: Quantisation) -> str | None:
        return next(iter(dot_products()), None)

    def build(self, graph: Graph, options: Options, out: Path) -> None:
        import onnx_ir

        from vlexport.lowering import attention, cleanup, fusions, integers, translate

        names = [spec.name for spec in graph.inputs]
        model = translate.to_onnx(graph.program, names, [spec.name for spec in graph.outputs])
        for fusion in fusions.FUSIONS:
            fusions.fuse(model, fusion)
        attention.set_body(model, attention.onnxruntime)
        if graph.quantisation is not None:
            integers.check_complete(integers.multiply(model), graph.program.state_dict)
        cleanup.drop_unused(model)
        onnx_ir.save(model, out / MODEL, external_data=WEIGHTS, size_threshold_bytes=1024)

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        library = _library()
        settings = library.SessionOptions()
        settings.intra_op_num_threads = options.threads
        settings.log_severity_level = 3
        # The arena at width 1280: peak growth of 76 to 87 kB per patch; without it 64 kB for large calls, but
        # 150 kB for small ones and a fifth more time on 10,764 patches, spent on pages that are new for every
        # layer. Buffers that are reused in place, or planned ahead, live longer and take 150 kB or more.
        settings.enable_cpu_mem_arena = True
        settings.enable_mem_pattern = False
        settings.enable_mem_reuse = False
        weights = payloads.read(WEIGHTS)
        settings.add_external_initializers_from_files_in_memory([WEIGHTS], [weights], [len(weights)])
        try:
            session = library.InferenceSession(
                bytes(payloads.read(MODEL)), settings, providers=[_provider(library)]
            )
        except library.capi.onnxruntime_pybind11_state.Fail as error:
            raise MisfitError(
                f"ONNX Runtime {library.__version__} does not load this model: {error}"
            ) from error
        return _Runner(session, [output.name for output in spec.outputs])


def _library() -> Any:
    """The library, told not to report to its maker: official builds do from 1.29 on, on every system.

    The variable is read when the library is loaded, and means that not even a cache file or a number for
    this machine is made; where somebody has loaded it before, the call is what is left.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime


def dot_products() -> list[str]:
    """Those of this processor."""
    import torch

    has = torch.cpu.get_capabilities()
    return [name for name in DOT_PRODUCTS if has.get(name)]


def _provider(library: Any) -> str:
    """The CUDA provider if the library has it and a device answers, else the CPU's."""
    import torch

    if torch.cuda.is_available() and "CUDAExecutionProvider" in library.get_available_providers():
        return "CUDAExecutionProvider"
    return "CPUExecutionProvider"


class _Runner:
    def __init__(self, session: onnxruntime.InferenceSession, outputs: list[str]) -> None:
        self._session: onnxruntime.InferenceSession | None = session
        self._outputs = outputs

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        assert self._session is not None
        given = {name: tensor.detach().cpu().contiguous().numpy() for name, tensor in tensors.items()}
        try:
            found = self._session.run(self._outputs, given, self._settings(given))
        except RuntimeError as error:
            raise _explained(error, tensors) from error
        return {name: torch.from_numpy(array) for name, array in zip(self._outputs, found, strict=True)}

    def _settings(self, given: Mapping[str, np.ndarray]) -> Any:
        """After large calls the arena gives its memory back; it would keep sixteen times the inputs."""
        settings = _library().RunOptions()
        if sum(array.nbytes for array in given.values()) > KEPT_INPUTS:
            settings.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return settings

    def close(self) -> None:
        self._session = None


def _explained(error: RuntimeError, tensors: Mapping[str, Tensor]) -> VlexportError:
    shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    if "alloc" in str(error).lower():
        return ResourceError(f"out of memory in ONNX Runtime at {shapes}. Send fewer items at once.")
    return VlexportError(f"ONNX Runtime failed at {shapes}: {error}")


BACKEND = OnnxRuntime()
