"""ONNX Runtime: one graph with a fused attention kernel per run of equal segments, weights next to it."""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport._build.estimate import Costs
from vlexport.backends import log_progress
from vlexport.backends._engine import VNNI, has_vnni, is_large, refused_by
from vlexport.backends._inspection import GraphCall, Inside, Portable, Sums, as_arrays, write_run
from vlexport.backends.base import Backend, Capability, EngineSpec, Options, Payloads, Progress, Runner
from vlexport.errors import MisfitError
from vlexport.onnx import header
from vlexport.specs import Precision, Quantisation, bind, size_of
from vlexport.system import release, released
from vlexport.target import Target, platform_here

if TYPE_CHECKING:
    import numpy as np
    import onnxruntime
    from torch import Tensor

    from vlexport._build.graph import Graph

logger = logging.getLogger(__name__)

MODEL = "model.onnx"
WEIGHTS = "model.weights"
CPU = "CPUExecutionProvider"
PROVIDERS = {"cpu": CPU, "cuda": "CUDAExecutionProvider"}
# The arena at width 1280: peak growth of 76 to 87 kB per patch; without it 64 kB for large calls, but 150 kB
# for small ones and a fifth more time on 10,764 patches, spent on pages that are new for every layer. Buffers
# that are reused in place, or planned ahead, live longer and take 150 kB or more.
MEMORY = {"enable_cpu_mem_arena": True, "enable_mem_pattern": False, "enable_mem_reuse": False}
INT8 = Quantisation(name="int8", group=0, activations=0)
ROUNDED = "RoundedRows"


class OnnxRuntime(Backend):
    """The CPU's provider, or that of CUDA where a build asks for it; never one in the other's place."""

    name = "onnxruntime"
    summary = "ONNX Runtime, fused attention per run of equal segments"
    form = "grouped"
    by_item = True
    devices = ("cpu", "cuda")
    mapped = (WEIGHTS,)
    reads_older = True
    has_trtexec = False
    distributions = ("torch", "onnx", "onnxscript", "onnx-ir", "onnxruntime")
    wheels = ("onnxruntime-gpu", "onnxruntime", "onnxruntime-openvino", "onnxruntime-directml")
    capabilities = (
        Capability(
            dtype="float32",
            costs=Costs(
                base=249, opening=1.1, weights=1.0, values=1.3, disk=2.3,
                build_base=480, build_weights=2.1, check_values=2.9,
            ),
        ),
        Capability(
            dtype="float32",
            quantisation=INT8,
            note="weights and inputs of the blocks' products in 8 bits",
            costs=Costs(
                base=260, opening=2.5, weights=1.7, values=1.0, disk=2.3,
                build_base=700, build_weights=2.14, check_values=1.72,
            ),
        ),
        Capability(dtype="float16", note="with `--device cuda`, which has not run so far"),
        Capability(dtype="bfloat16", note="the same, where the library has kernels"),
    )  # fmt: skip

    def versions(self) -> dict[str, str]:
        # The distribution is called otherwise where it is built for a GPU.
        return {name: version(name) for name in self.distributions[:-1]} | {self.name: _library().__version__}

    def target(self) -> Target:
        return Target(
            backend=self.name,
            version=_library().__version__,
            platform=platform_here(),
            device="cpu",
            instruction_set=VNNI if has_vnni() else None,
        )

    def here(self, target: Target) -> Target:
        on_gpu = target.device == "cuda" and no_cuda() is None
        return replace(self.target(), device="cuda") if on_gpu else self.target()

    def cannot_compute(self, precision: Precision, device: str | None = None) -> str | None:
        if device == "cuda":
            if precision.quantisation is not None:
                return "its kernels for integers are those of the CPU. Leave it or the device out."
            return no_cuda()
        if precision.dtype != "float32":
            return "on the CPU it computes in float32 and int8 alone. Add --device cuda where a GPU is."
        return None

    def build_target(self, options: Options, precision: Precision) -> Target:
        needed = self.target().instruction_set if precision.quantisation is not None else None
        return replace(self.target(), device=options.kind or "cpu", instruction_set=needed)

    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        from vlexport.onnx import fusions, passes, quantize, to_onnx

        model = to_onnx.graph_model(graph)
        for fusion in fusions.FUSIONS:
            fusions.fuse(model, fusion)
        if graph.quantisation is not None:
            found = quantize.multiply(model, signed=has_vnni())
            quantize.check_complete(found, quantize.read_weights(graph.program))
        passes.store_as_taken(model)
        passes.drop_unused(model)
        passes.save(model, out / MODEL, WEIGHTS)

    def write_portable(
        self, graph: Graph, selector: str | None, out: Path, cells: Sequence[str] = ()
    ) -> None:
        from vlexport.onnx import portable

        for name, content in portable.portable_graphs(graph, selector, cells).items():
            (out / name).write_bytes(content)

    def portable(self, payloads: Payloads, selector: str | None, cells: Sequence[str] = ()) -> Portable:
        from vlexport.onnx.portable import CELL_TABLES, POSITIONS, PRUNE, SELECT, TABLES

        return Portable(
            tables=_call(payloads.read(TABLES)),
            prune=_call(payloads.read(PRUNE)) if selector is not None else None,
            positions=_call(payloads.read(POSITIONS)),
            cell_tables=_call(payloads.read(CELL_TABLES)) if cells else None,
            selects={name: _call(payloads.read(SELECT.format(name))) for name in cells},
        )

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        model, weights = payloads.read(MODEL), payloads.map(WEIGHTS)
        with _refused():
            header.check_model(model, {WEIGHTS: len(weights)})
        return _Runner(_session(bytes(model), weights, options), spec)

    def write_standalone(self, graph: Graph, options: Options, folder: Path) -> str:
        self.build(graph, options, folder)
        return write_run(folder, self.job(options, graph.quantisation))

    def job(self, options: Options, _: Quantisation | None) -> dict[str, object]:
        device = PROVIDERS[options.kind or "cpu"]
        return {"library": self.name, "model": MODEL, "device": device, "settings": MEMORY}

    def inside(self, payloads: Payloads) -> Inside:
        import onnx

        model = onnx.load_model_from_string(bytes(payloads.read(MODEL)))
        weights = payloads.map(WEIGHTS)
        return Inside(
            weights=_initializers(model, weights),
            release=lambda: release(weights),
            # In half precision no kernel of the CPU runs its parts.
            sums=_sums(model, weights) if model.graph.output[0].type.tensor_type.elem_type == 1 else None,
            rounded=_rounded(model),
        )


def _call(content: bytes) -> GraphCall:
    import torch

    library = _library()
    settings = library.SessionOptions()
    settings.log_severity_level = 3
    settings.intra_op_num_threads = 1
    with _refused():
        header.check_model(content, {})
        session = library.InferenceSession(bytes(content), settings, providers=[CPU])
    taken, returned = ([end.name for end in ends] for ends in (session.get_inputs(), session.get_outputs()))

    def run(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        arrays = as_arrays(tensors)
        with _refused(tensors):
            results = session.run(returned, {name: arrays[name] for name in taken})
            return {name: torch.from_numpy(rows) for name, rows in zip(returned, results, strict=True)}

    return run


def _refused(tensors: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
    library = _library()
    return refused_by(f"ONNX Runtime {library.__version__}", *_errors(library), tensors=tensors)


def _initializers(model: Any, weights: memoryview) -> dict[str, Tensor]:
    import onnx
    import torch

    arrays = _stored(model, weights)
    for tensor in model.graph.initializer:
        if tensor.name not in arrays:
            arrays[tensor.name] = onnx.numpy_helper.to_array(tensor).copy()
    with warnings.catch_warnings():
        # Bytes cannot be written, and nobody writes weights.
        warnings.filterwarnings("ignore", message="The given", category=UserWarning)
        return {
            name: torch.from_numpy(array.view("int16")).view(torch.bfloat16)
            if array.dtype.name == "bfloat16"
            else torch.from_numpy(array)
            for name, array in arrays.items()
        }


def _stored(model: Any, weights: memoryview) -> dict[str, np.ndarray]:
    import numpy as np
    import onnx

    arrays = {}
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if place:
            kind = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type))
            start, length = int(place.get("offset", 0)), int(place["length"])
            arrays[tensor.name] = np.frombuffer(weights[start : start + length], kind).reshape(
                tuple(tensor.dims)
            )
    return arrays


def _session(model: bytes, weights: memoryview, options: Options) -> Any:
    """Open a model on weights where they lie; a model whose weights the library changes gets copies."""
    library, provider = _library(), PROVIDERS[options.kind or "cpu"]
    with _refused():
        if provider == CPU:
            try:
                return _session_in_place(library, model, weights, _settings(options))
            except _errors(library) as error:
                logger.debug("weights are copied: %s", error)
        settings, whole = _settings(options), bytes(weights)
        settings.log_severity_level = 3
        settings.add_external_initializers_from_files_in_memory([WEIGHTS], [whole], [len(whole)])
        import torch

        # That of CUDA takes torch's current device, not the first.
        chosen = provider if provider == CPU else (provider, {"device_id": torch.cuda.current_device()})
        session = library.InferenceSession(model, settings, providers=[chosen])
    _require_provider(library, session, provider)
    return session


def _settings(options: Options) -> Any:
    settings = _library().SessionOptions()
    settings.intra_op_num_threads = options.threads
    for name, value in MEMORY.items():
        setattr(settings, name, value)
    if options.shared_weights:
        # Weights rearranged for faster products are a copy.
        settings.add_session_config_entry("session.disable_prepacking", "1")
    return settings


def _require_provider(library: Any, session: Any, provider: str) -> None:
    """Refuse a session that the library has opened with another provider, which it only logs."""
    chosen = session.get_providers()[0]
    if chosen == provider:
        return
    part = Path(library.__file__).parent / "capi" / "libonnxruntime_providers_cuda.so"
    reason = f"{part.name} loads, and the library has logged why it is not used"
    try:
        ctypes.CDLL(str(part))
    except OSError as error:
        reason = str(error)
    raise MisfitError(
        f"ONNX Runtime {library.__version__} opened the engine with {chosen}, {provider} expected: {reason}. "
        "Install the CUDA and cuDNN that this version names, or build with --device cpu."
    )


def _session_in_place(library: Any, model: bytes, weights: memoryview, settings: Any) -> Any:
    import onnx

    stored = _stored(onnx.load_model_from_string(model), weights)
    values = [library.OrtValue.ortvalue_from_numpy(array) for array in stored.values()]
    for name, value in zip(stored, values, strict=True):
        settings.add_initializer(name, value)
    # What fails is tried again, with words.
    settings.log_severity_level = 4
    with tempfile.TemporaryDirectory(prefix="vlexport-") as folder, released(weights):
        # A file of weights has to exist. This one is empty, so that reading it instead of ours is an error.
        Path(folder, WEIGHTS).touch()
        settings.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        session = library.InferenceSession(
            model, settings, providers=[CPU], disabled_optimizers=["ConstantFolding"]
        )
    # The library does not keep them.
    session.kept = values
    return session


def _sums(model: Any, weights: memoryview) -> Sums:
    import onnx
    import torch

    every = [node.output[0] for node in model.graph.node if node.op_type == "Add"]

    # A check feeds the same sums three times in a row.
    @lru_cache(maxsize=1)
    def opened(names: tuple[str, ...], widths: tuple[tuple[str, int], ...]) -> Any:
        tapped = onnx.ModelProto()
        tapped.CopyFrom(model)
        del tapped.graph.output[:]
        tapped.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        for node in tapped.graph.node:
            node.input[:] = [f"{name}.fed" if name in dict(widths) else name for name in node.input]
        for name, width in widths:
            tapped.graph.input.append(_floats(f"{name}.fed", ["rows", width]))
        return _session(tapped.SerializeToString(), weights, Options(shared_weights=True))

    def run(
        inputs: Mapping[str, Tensor], fed: Mapping[str, Tensor], only: Collection[str] = ()
    ) -> Mapping[str, Tensor]:
        names = tuple(name for name in every if name in only or not only)
        session = opened(names, tuple((name, rows.shape[1]) for name, rows in fed.items()))
        settings = _library().RunOptions()
        settings.only_execute_path_to_fetches = bool(only)
        arrays = as_arrays({**inputs, **{f"{name}.fed": rows for name, rows in fed.items()}})
        results = session.run(names, arrays, settings)
        release(weights)
        return {name: torch.from_numpy(rows) for name, rows in zip(names, results, strict=True)}

    return run


def _rounded(model: Any) -> Callable[[Tensor], Tensor] | None:
    import onnx
    import torch

    body = [function for function in model.functions if function.name == ROUNDED]
    if not body:
        return None

    def run(rows: Tensor) -> Tensor:
        steps = onnx.helper.make_tensor_value_info("steps", onnx.TensorProto.UINT8, [None, None])
        node = onnx.helper.make_node(ROUNDED, ["rows"], ["steps", "step"], domain=body[0].domain)
        ends = [_floats("rows", list(rows.shape))], [steps, _floats("step", [None, None])]
        alone = onnx.ModelProto(
            ir_version=model.ir_version,
            graph=onnx.helper.make_graph([node], "rounding", *ends),
            functions=body,
            opset_import=model.opset_import,
        )
        session = _library().InferenceSession(alone.SerializeToString(), providers=[CPU])
        integers, step = (torch.from_numpy(array) for array in session.run(None, {"rows": rows.numpy()}))
        return (integers.float() - 128) * step

    return run


def _floats(name: str, shape: list[Any]) -> Any:
    import onnx

    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)


def _library() -> Any:
    """Import the library without its telemetry, which official builds have from 1.29 on.

    The variable is read when the library is loaded, and then no cache file or number of this machine is made
    either; where it was loaded before, only the call is left.
    """
    os.environ["ORT_DISABLE_TELEMETRY"] = "1"
    import onnxruntime

    onnxruntime.disable_telemetry_events()
    return onnxruntime


def _errors(library: Any) -> tuple[type[Exception], ...]:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    state = vars(library.capi.onnxruntime_pybind11_state).values()
    return (DecodeError, *(kind for kind in state if isinstance(kind, type) and issubclass(kind, Exception)))


def no_cuda() -> str | None:
    """Return why engines do not run on CUDA here, or None."""
    import torch

    if PROVIDERS["cuda"] not in (available := _library().get_available_providers()):
        return f"onnxruntime has {', '.join(available)}; its package for GPUs is onnxruntime-gpu."
    if not torch.cuda.is_available():
        return "torch finds no GPU that it can use."
    return None


class _Runner(Runner):
    # Sessions of the CPU and CUDA providers take calls from several threads.
    reentrant = True

    def __init__(self, session: onnxruntime.InferenceSession, spec: EngineSpec) -> None:
        self._session = session
        self._spec = spec

    def run(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        import torch

        on_gpu = PROVIDERS["cuda"] in self._session.get_providers()
        inputs = {
            name: (tensor if on_gpu else tensor.cpu()).detach().contiguous()
            for name, tensor in tensors.items()
        }
        sizes = bind(self._spec.inputs, {name: tuple(tensor.shape) for name, tensor in inputs.items()})
        # Rows are wanted where pixels are.
        place = max(inputs.values(), key=lambda tensor: tensor.nbytes).device
        outputs = {}
        for spec in self._spec.outputs:
            shape = [size_of(dim, sizes) or 0 for dim in spec.shape]
            outputs[spec.name] = torch.empty(shape, dtype=getattr(torch, spec.dtype), device=place)
        settings = _library().RunOptions()
        if is_large(inputs):
            # The arena would keep sixteen times the inputs.
            settings.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        with _refused(tensors):
            binding = self._session.io_binding()
            for name, tensor in inputs.items():
                binding.bind_input(name, *_memory(tensor))
            for name, tensor in outputs.items():
                binding.bind_output(name, *_memory(tensor))
            if place.type == "cuda":
                # The library's stream is another than torch's.
                torch.cuda.current_stream(place).synchronize()
            self._session.run_with_iobinding(binding, settings)
        return outputs


def _memory(tensor: Tensor) -> tuple[str, int, Any, tuple[int, ...], int]:
    """Return device, its index, type, shape and address; the library neither copies nor keeps the rows."""
    import numpy as np

    name = str(tensor.dtype).removeprefix("torch.")
    # numpy has no bfloat16; the number is ONNX's.
    kind = 16 if name == "bfloat16" else np.dtype(name)
    return tensor.device.type, tensor.device.index or 0, kind, tuple(tensor.shape), tensor.data_ptr()


BACKEND = OnnxRuntime()
