"""OpenVINO on the CPU: standard operators only, which it fuses by itself, attention included."""

from __future__ import annotations

import ctypes
import sys
import tempfile
import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport._build.estimate import Costs
from vlexport.backends import log_progress
from vlexport.backends._engine import is_large, refused_by
from vlexport.backends._inspection import Inside, Sums, as_arrays, write_run
from vlexport.backends.base import (
    Backend,
    Capability,
    EngineSpec,
    Folder,
    Options,
    Payloads,
    Progress,
    Runner,
)
from vlexport.specs import Precision, Quantisation
from vlexport.system import MappedFile, give_back, release, released
from vlexport.target import Target

if TYPE_CHECKING:
    from torch import Tensor

    from vlexport._build.graph import Graph

MODEL = "model.xml"
WEIGHTS = "model.bin"
# What the library makes of a model for one kind of processor, which the model names, with those weights only
# that it converts. Kept of large ones, whose compilation takes seconds.
COMPILED = "compiled.bin"
MADE_FOR = ["vlexport", "compiled_for"]
WITHOUT_WEIGHTS = {"CACHE_MODE": "OPTIMIZE_SIZE"}
LARGE = 1 << 28
REPORTER = "openvino_telemetry"
# Columns of what a layer takes that share a scale. At the widths of a 3B tower products of groups of 64 have
# 0.71 of the bare product's speed, of 128 0.79, of 256 0.83, of 320 0.84, of whole rows 0.9.
INT8 = Quantisation(name="int8", group=0, activations=256)
# The first with GELU, whose parts would round in half precision.
HALF_OPSET = 20
GROUP = ["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]
# Instructions for products of bfloat16, of processors with AMX too. Without them the library multiplies it 27
# times slower than float32 (AVX-512), or in float32 (AVX2).
BFLOAT16 = "avx512_bf16"


class OpenVino(Backend):
    """Reads the same graph as other runtimes of ONNX; stores it in OpenVINO's own format."""

    name = "openvino"
    extra = "openvino"
    summary = "OpenVINO on the CPU, attention fused over rows of windows and padded buckets of frames"
    form = "padded"
    mapped = (WEIGHTS, COMPILED)
    reads_older = True
    has_trtexec = False
    distributions = ("torch", "onnx", "onnxscript", "onnx-ir", "openvino")
    capabilities = (
        Capability(
            dtype="float32",
            costs=Costs(
                base=300, opening=1.5, weights=1.46, values=1.35, disk=2.6,
                build_base=700, build_weights=2.14, check_values=1.61,
            ),
        ),
        Capability(
            dtype="bfloat16",
            note="norm statistics and rotary in float32, on processors with AVX512-BF16; "
            "trained towers may fail the check",
        ),
        Capability(
            dtype="float32",
            quantisation=INT8,
            note="weights and inputs of the blocks' products in 8 bits; with AVX512-BF16 attention and what "
            "follows the blocks in bfloat16",
            costs=Costs(
                base=300, opening=2.2, weights=1.6, values=3.4, disk=2.6,
                build_base=830, build_weights=2.4, check_values=0.68,
            ),
        ),
    )  # fmt: skip

    def target(self) -> Target:
        return replace(super().target(), instruction_set=BFLOAT16 if _has_bfloat16() else None)

    def cannot_compute(self, precision: Precision, device: str | None = None) -> str | None:
        if precision.dtype != "bfloat16" or _has_bfloat16():
            return None
        return (
            f"the processor has no {BFLOAT16}. Without it the library multiplies bfloat16 in float32, or 27 "
            "times slower than float32. Build in float32."
        )

    def build_target(self, options: Options, precision: Precision) -> Target:
        narrow = precision.dtype == "bfloat16" or _is_narrow(precision.quantisation)
        return replace(self.target(), instruction_set=BFLOAT16 if narrow else None)

    def scheme(self, quantisation: Quantisation, target: Target) -> Quantisation:
        has = target.instruction_set == BFLOAT16
        return replace(quantisation, rest="bfloat16") if has else quantisation

    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        self._write(graph, out)
        payloads, core = Folder(out), _library().Core()
        model = _model(core, payloads.read(MODEL), payloads.map(WEIGHTS))
        if _info(model, MADE_FOR):
            settings = _settings(options, _info(model, GROUP)) | WITHOUT_WEIGHTS
            with released(model.kept):
                compiled = core.compile_model(model, "CPU", settings).export_model()
            (out / COMPILED).write_bytes(compiled.getvalue())

    def _write(self, graph: Graph, out: Path) -> None:
        from vlexport.onnx import attention, fusions, passes, quantize, to_onnx

        library = _library()
        opset = HALF_OPSET if graph.dtype == "bfloat16" else to_onnx.OPSET
        narrow = _is_narrow(graph.quantisation)
        model = to_onnx.graph_model(graph, opset, dense=attention.narrow if narrow else attention.dense)
        if graph.quantisation is not None:
            quantize.check_complete(quantize.store(model), quantize.read_weights(graph.program))
        if narrow:
            quantize.narrow_rest(model)
        passes.settle_shapes(model)
        fusions.fuse(model, "rotary_whole")
        passes.split_projections(model)
        passes.split_hidden(model)
        passes.drop_unused(model)
        with tempfile.TemporaryDirectory(dir=out) as folder:
            path = Path(folder) / "model.onnx"
            passes.save(model, path, "model.weights")
            read = library.Core().read_model(path)
            if graph.quantisation is not None:
                read.set_rt_info(str(graph.quantisation.activations), GROUP)
            if path.with_suffix(".weights").stat().st_size >= LARGE:
                read.set_rt_info(_processor(), MADE_FOR)
            _name_by_place(read)
            library.save_model(read, out / MODEL, compress_to_fp16=False)
            del read

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        return _Runner(payloads, options, [output.name for output in spec.outputs])

    def write_standalone(self, graph: Graph, options: Options, folder: Path) -> str:
        self._write(graph, folder)
        return write_run(folder, self.job(options, graph.quantisation))

    def job(self, options: Options, quantisation: Quantisation | None) -> dict[str, object]:
        settings = _settings(options, str(quantisation.activations) if quantisation else None)
        return {"library": self.name, "model": MODEL, "device": "CPU", "settings": settings}

    def inside(self, payloads: Payloads) -> Inside:
        core = _library().Core()
        model = _model(core, payloads.read(MODEL), payloads.map(WEIGHTS))
        constants = [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
        with warnings.catch_warnings():
            # Nobody writes weights.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            weights = {node.get_friendly_name(): _tensor(node.get_data(), node) for node in constants}
        return Inside(weights=weights, release=lambda: release(model.kept), sums=_sums(core, model))


def _info(model: Any, path: list[str]) -> str | None:
    return str(model.get_rt_info(path).value) if model.has_rt_info(path) else None


def _name_by_place(model: Any) -> None:
    """Name layers that the library numbered, which it does through all models of a process."""
    for place, node in enumerate(model.get_ordered_ops()):
        if node.get_friendly_name() == node.get_name():
            node.set_friendly_name(f"{node.get_type_name()}.{place}")


def _sums(core: Any, model: Any) -> Sums:
    import openvino

    def run(
        inputs: Mapping[str, Tensor], fed: Mapping[str, Tensor], only: Collection[str] = ()
    ) -> Mapping[str, Tensor]:
        sums = [node.output(0) for node in model.get_ordered_ops() if node.get_type_name() == "Add"]
        # One that the model gives already is not added again, which would move the places of all others.
        inner = [output for output in sums if not _is_result(output)]
        flat = [output.get_node() for output in inner if output.get_partial_shape().rank.get_length() == 2]
        names = [name for name in (node.get_friendly_name() for node in flat) if name in only or not only]
        tapped = model.clone()
        ends = {node.get_friendly_name(): node.output(0) for node in tapped.get_ordered_ops()}
        for name, rows in fed.items():
            kind = ends[name].get_element_type()
            entry = openvino.opset13.parameter([-1, rows.shape[1]], kind, name=f"{name}.fed")
            entry.output(0).set_names({f"{name}.fed"})
            for reader in list(ends[name].get_target_inputs()):
                reader.replace_source_output(entry.output(0))
            tapped.add_parameters([entry])
        first = len(tapped.outputs)
        tapped.add_outputs([ends[name] for name in names])
        with released(model.kept):
            request = core.compile_model(tapped, "CPU", _settings(Options(), None)).create_infer_request()
        taken = _as_taken({**inputs, **{f"{name}.fed": rows for name, rows in fed.items()}})
        request.infer(taken, share_inputs=True)
        # Rows stay in the request's own buffers, which nobody writes again.
        results = {name: request.get_output_tensor(first + place) for place, name in enumerate(names)}
        tensors = {name: _tensor(tensor.data, tensor) for name, tensor in results.items()}
        return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}

    return run


def _is_narrow(quantisation: Quantisation | None) -> bool:
    return quantisation is not None and quantisation.rest == "bfloat16"


def _has_bfloat16() -> bool:
    import torch

    return bool(torch.cpu.get_capabilities().get(BFLOAT16))


def _as_taken(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    import openvino
    import torch

    narrow = {name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.bfloat16}
    arrays = as_arrays({**tensors, **{name: tensor.view(torch.int16) for name, tensor in narrow.items()}})
    return arrays | {
        name: openvino.Tensor(arrays[name], openvino.Shape(tensor.shape), openvino.Type.bf16)
        for name, tensor in narrow.items()
    }


def _tensor(array: Any, typed: Any) -> Tensor:
    """Return an array of the library, which has bfloat16 as if it were float16, in its own type."""
    import openvino
    import torch

    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if typed.get_element_type() == openvino.Type.bf16 else tensor


def _is_result(output: Any) -> bool:
    return any(reader.get_node().get_type_name() == "Result" for reader in output.get_target_inputs())


def _library() -> Any:
    """Import the library without its telemetry, which sends an event on import and writes into $HOME.

    A module that cannot be imported is replaced by the library's own silent stand-in.
    """
    if "openvino" in sys.modules or REPORTER in sys.modules:
        import openvino

        return openvino
    sys.modules[REPORTER] = None  # type: ignore[assignment]
    try:
        import openvino
    finally:
        del sys.modules[REPORTER]
    return openvino


def _processor() -> str:
    """Name what the compiled form depends on: the library's version and the processor's instructions."""
    import torch

    instructions = (name for name, has in torch.cpu.get_capabilities().items() if has is True)
    return " ".join((version("openvino"), *sorted(instructions)))


def _settings(options: Options, group: str | None) -> dict[str, object]:
    settings: dict[str, object] = {
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "f32",
        "EXECUTION_MODE_HINT": "ACCURACY",
        "ENABLE_CPU_PINNING": False,
    }
    if group is not None:
        settings |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": int(group)}
    return settings | ({"INFERENCE_NUM_THREADS": options.threads} if options.threads else {})


def _model(core: Any, content: bytes, weights: memoryview) -> Any:
    """Read a model whose constants lie in these bytes."""
    model = core.read_model(content, _bytes(weights))
    # The library does not keep them.
    model.kept = weights
    return model


def _bytes(content: memoryview) -> Any:
    import numpy as np
    import openvino

    # The library takes writable arrays only, though it writes into none of these.
    place = np.frombuffer(content, np.uint8).ctypes.data
    array = np.ctypeslib.as_array((ctypes.c_uint8 * len(content)).from_address(place))
    return openvino.Tensor(array, shared_memory=True)


class _Runner(Runner):
    def __init__(self, payloads: Payloads, options: Options, outputs: list[str]) -> None:
        self._core = _library().Core()
        content, self._weights = payloads.read(MODEL), payloads.map(WEIGHTS)
        with refused_by(f"OpenVINO {version('openvino')}"):
            self._model = _model(self._core, content, self._weights)
        self._settings, self._outputs = _settings(options, _info(self._model, GROUP)), outputs
        self._compiled = None
        # The library finds weights of a compiled form by a path.
        path = self._weights.obj.path if isinstance(self._weights.obj, MappedFile) else None
        if path and _info(self._model, MADE_FOR) == _processor():
            self._compiled = payloads.map(COMPILED)
            self._settings |= {**WITHOUT_WEIGHTS, "WEIGHTS_PATH": path}
        self._request = self._begin()
        self._begun = False

    def _begin(self) -> Any:
        """Compile the model; of weights that the library rearranges, the mapped ones are needed once."""
        with refused_by(f"OpenVINO {version('openvino')}"), released(self._weights):
            if self._compiled is None:
                compiled = self._core.compile_model(self._model, "CPU", self._settings)
            else:
                compiled = self._core.import_model(_bytes(self._compiled), "CPU", self._settings)
            return compiled.create_infer_request()

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        # WORKAROUND(openvino 2026.4): a model whose first call has one row of patches keeps kernels that are
        # wrong for every later call (relative error 1), so such a call gets a model of its own. Its cache of
        # kernels could be switched off instead, but then attention keeps all its scores.
        one_row = "patches" in tensors and len(tensors["patches"]) == 1
        self._begun = self._begun or not one_row
        request = self._request if self._begun else self._begin()
        with refused_by(f"OpenVINO {version('openvino')}", tensors=tensors):
            results = request.infer(_as_taken(tensors), share_inputs=True)
            # `infer` copies the request's buffers, which the next call writes again.
            outputs = {name: _tensor(results[name], request.get_tensor(name)) for name in self._outputs}
        if is_large(tensors):
            compiled = request.get_compiled_model()
            # A request keeps its inputs and the buffers of its outputs.
            request = self._request = compiled.create_infer_request()
            compiled.release_memory()
            give_back()
            # Kernels may go too, so that a call of one row would be a first one again.
            self._begun = False
        return outputs


BACKEND = OpenVino()
