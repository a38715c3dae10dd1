"""The backend that TensorRT and TensorRT for RTX share."""

from __future__ import annotations

import importlib.util
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport._build.estimate import ITEMSIZE, MIB, DeviceNeeds, TowerScale
from vlexport.backends import Runner, log_progress
from vlexport.backends._engine import refused_by
from vlexport.backends._tensorrt import build_process, network_check, standalone_build
from vlexport.backends._tensorrt.messages import Bounds, Job, Record
from vlexport.backends.base import Backend, BuildLimits, Capability, EngineSpec, Options, Payloads, Progress
from vlexport.bundle.user_folders import CacheFile
from vlexport.codec import encode
from vlexport.errors import UnsupportedError
from vlexport.specs import Precision, ShapeProfile, TensorSpec
from vlexport.target import NO_GPU, Target, device_here, platform_here

if TYPE_CHECKING:
    from vlexport._build.graph import Graph

ENGINE, RECORD = "engine.trt", "network.json"
# Attention and norms are operators of their own from here on.
OPSET = 23
# The library reserves memory for the largest shape of everything at once: 2^22 cells of a bucket are 40 GB
# for one tensor of a tower of width 1280 in half precision.
MOST_PLACES = 2**22

# Blocks of width 64 to 1280, 2 to 8 deep; profiles thumbnail, image and video.
SOURCE = "TensorRT for RTX 1.7.1.116 while it builds for sm89; never compared with a GPU"
# MiB of the engine's file for each profile, without weights.
KERNELS = {"float32": 3.5, "bfloat16": 7.0, "float16": 7.0}
# Scratch memory over all that a block computes for a patch: 2.94 to 3.15 in halves. In float32 the scores of
# attention are stored: 7 GB at width 320 with `image`, 59 GB with `video`, by no simple rule of blocks.
SCRATCH = {"bfloat16": 3.05, "float16": 3.05}
SIZES = {**ITEMSIZE, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorRtOptions(Options):
    """GPUs to build for, by compute capability, and one optimisation profile for each of `profiles`."""

    targets: tuple[str, ...] = ()
    profiles: tuple[ShapeProfile, ...] = ()
    limits: BuildLimits = field(default_factory=BuildLimits)

    def to_json(self) -> dict[str, object]:
        profiles = {profile.name: encode(profile.ranges) for profile in self.profiles}
        return {"targets": list(self.targets), "profiles": profiles}


class TensorRt(Backend):
    """Strongly typed engines with optimisation profiles, from packed rows.

    module    name of the library, whose functions are the same in both
    packages  names under which the library is installed, best first
    targets   compute capabilities it builds for without such a GPU; empty where it builds for the one at hand
    """

    module: str
    packages: tuple[str, ...]
    targets: tuple[str, ...] = ()

    form = "padded"
    can_limit_builds = has_trtexec = True
    capabilities = (
        Capability(dtype="float32", note="attention decomposed"),
        Capability(dtype="bfloat16", note="norm statistics and rotary in float32"),
        Capability(dtype="float16", note="norm statistics, rotary and layers that overflow in float32"),
    )

    def missing(self) -> str | None:
        if importlib.util.find_spec(self.module) is None:
            install = f"pip install 'vlexport[{self.extra}]'"
            return f"the package {self.module} is not installed. {install} installs it."
        if not self.targets and device_here() == NO_GPU:
            return f"{self.module} builds for the GPU at hand, and there is none."
        return None

    def cannot_run(self, target: Target | None = None) -> str | None:
        here, served = device_here(), self.targets
        target = target or self.target()
        if here != NO_GPU and served and here not in served:
            return f"{self.module} has no kernels for {here}, only for {', '.join(served)}"
        if here in target.device.split("+"):
            return "this machine has no GPU" if here == NO_GPU else None
        return f"built for {target.device}; this machine has {'no GPU' if here == NO_GPU else here}"

    def versions(self) -> dict[str, str]:
        names = ("torch", "onnx", "onnxscript", "onnx-ir")
        return {**{name: version(name) for name in names}, self.module: self._version()}

    def _version(self) -> str:
        for name in self.packages:
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return "unknown"

    def target(self) -> Target:
        return self._target(device_here())

    def build_target(self, options: Options, precision: Precision) -> Target:
        return self._target("+".join(self._targets(options)))

    def _target(self, device: str) -> Target:
        return Target(backend=self.name, version=self._version(), platform=platform_here(), device=device)

    def options(
        self,
        targets: Sequence[str] = (),
        profiles: Sequence[ShapeProfile] = (),
        limits: BuildLimits | None = None,
    ) -> Options:
        return TensorRtOptions(
            targets=tuple(targets), profiles=tuple(profiles), limits=limits or BuildLimits()
        )

    def memory_estimate(
        self, options: Options, tower: TowerScale, inputs: Sequence[TensorSpec], dtype: str
    ) -> DeviceNeeds | None:
        assert isinstance(options, TensorRtOptions)
        if not self.targets:
            return None
        weights = tower.stored(dtype, None)
        calls: dict[str, int | None] = {}
        for profile in options.profiles:
            largest = {name: high for name, (_, _, high) in shapes_of(profile, inputs).items()}
            input_bytes = sum(math.prod(largest[spec.name]) * SIZES[spec.dtype] for spec in inputs)
            rows = largest["patches"][0]
            calls[profile.name] = (
                round(input_bytes + SCRATCH[dtype] * tower.block_values * ITEMSIZE[dtype] * rows)
                if dtype in SCRATCH
                else None
            )
        return DeviceNeeds(
            # Layers in float32 that float16 may need are not counted.
            engine=round(weights + KERNELS[dtype] * MIB * len(options.profiles)),
            weights=weights,
            calls=calls,
            origin=SOURCE,
        )

    def _targets(self, options: Options) -> tuple[str, ...]:
        requested = options.targets if isinstance(options, TensorRtOptions) else ()
        served = self.targets or (device_here(),)
        requested = requested or tuple(target for target in (device_here(),) if target in served)
        wrong = [target for target in requested if target not in served]
        if wrong or not requested:
            problem = (
                f"{', '.join(wrong)} given"
                if wrong
                else f"no target given, and this machine has {device_here()}"
            )
            raise UnsupportedError(
                f"backend '{self.name}': {problem}. It builds for: {', '.join(served)}. "
                f"Name some of them, as in {','.join(served[-2:])}."
            )
        return tuple(sorted(set(requested), key=served.index))

    def build(self, graph: Graph, options: Options, out: Path, progress: Progress = log_progress) -> None:
        mine = options if isinstance(options, TensorRtOptions) else TensorRtOptions()
        with tempfile.TemporaryDirectory(dir=out) as folder:
            progress("translate", 0.0)
            job = self._job(graph, mine, Path(folder), out / ENGINE)
            record = build_process.build(job, mine.limits, progress)
        (out / RECORD).write_text(record.to_json(indent=1) + "\n", encoding="utf-8")

    def _job(self, graph: Graph, options: TensorRtOptions, folder: Path, engine: Path) -> Job:
        timings = CacheFile.of("tensorrt", "timings", self.module, self._version(), device_here())
        profiles = options.profiles or (graph.profile,)
        shapes = {profile.name: shapes_of(profile, graph.inputs) for profile in profiles}
        return Job(
            library=self.module,
            model=str(write_model(graph, folder)),
            engine=str(engine),
            targets=self._targets(options),
            profiles=shapes,
            plan=network_check.expected(graph),
            # Timings of kernels, which the next build on this GPU need not repeat.
            timings="" if self.targets else str(timings.path),
        )

    def write_standalone(self, graph: Graph, options: Options, folder: Path) -> str:
        assert isinstance(options, TensorRtOptions)
        job = replace(
            self._job(graph, options, folder, folder / ENGINE), model="model.onnx", engine=ENGINE, timings=""
        )
        (folder / "job.json").write_text(job.to_json() + "\n", encoding="utf-8")
        (folder / "build.py").write_text(
            Path(standalone_build.__file__).read_text(encoding="utf-8"), encoding="utf-8"
        )
        return (
            f"  python build.py      parses model.onnx and builds engine.trt with {self.module} alone;\n"
            "                       prints its messages\n"
            "  */trtexec.txt        flags of trtexec for that case\n"
            "  job.json             targets, profiles, dtypes that the parsed network should have"
        )

    def network_checks(self, out: Path) -> Mapping[str, str]:
        record = Record.from_json((out / RECORD).read_text(encoding="utf-8"))
        kernels = {f"attention: {shape}": how for shape, how in record.attention.items()}
        return {**{finding.check: finding.found for finding in record.findings}, **kernels}

    def open(self, payloads: Payloads, spec: EngineSpec, options: Options) -> Runner:
        from vlexport.backends._tensorrt.runner import open_runner

        record, engine = payloads.read(RECORD), payloads.read(ENGINE)
        with refused_by(f"{self.module} {self._version()}"):
            return open_runner(self.module, engine, Record.from_json(bytes(record).decode()), spec)


def write_model(graph: Graph, folder: Path) -> Path:
    """Write the graph as ONNX that the library's parser reads, weights next to it."""
    from vlexport.onnx import passes, to_onnx

    model = to_onnx.graph_model(graph, OPSET)
    passes.drop_unused(model)
    path = folder / "model.onnx"
    passes.save(model, path, "model.weights")
    return path


def shapes_of(profile: ShapeProfile, inputs: Sequence[TensorSpec]) -> dict[str, Bounds]:
    """Return smallest, usual and largest shape of every input."""
    shapes: dict[str, Bounds] = {}
    for spec in inputs:
        _, _, high = shapes[spec.name] = profile.shapes_of(spec)
        if spec.dtype.startswith("int") and math.prod(high) > MOST_PLACES:
            raise UnsupportedError(
                f"profile '{profile.name}': the largest {spec.name} has {list(high)} entries, and TensorRT "
                f"reserves memory for the largest of everything at once. Name a smaller profile, such as "
                f"image,video, or give limits by max_pixels, max_images and max_frames."
            )
    return shapes
