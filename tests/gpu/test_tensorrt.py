"""TensorRT on a GPU: build, run, parity, profiles by shape, replays, refusals; each flavour by itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from benchmarks.towers import random_items
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.build import build_checkpoint
from vlexport._build.export import cast_floats, export
from vlexport._build.request import request
from vlexport._build.spec import BuildSpec
from vlexport.backends import Engine, EngineSpec, Folder
from vlexport.backends._tensorrt.backend import ENGINE, RECORD, TensorRt
from vlexport.backends._tensorrt.messages import Record
from vlexport.backends._tensorrt.runner import EngineRunner, open_runner
from vlexport.backends.tensorrt import BACKEND as DATA_CENTRE
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import LimitError, MisfitError
from vlexport.parity.check import check
from vlexport.runtime.opening import open_engine
from vlexport.specs import union
from vlexport.target import NO_GPU, device_here

FLAVOURS = {"tensorrt": DATA_CENTRE, "tensorrt_rtx": RTX}
PROFILES = ("thumbnail", "image")
# Square images, by their sides in patches; the first calls are of thumbnails, the last one is of an image.
CALLS = [[(1, side, side) for side in sides] for sides in ((2,), (4, 6), (8,) * 9, (10, 4, 10), (60, 24))]


def lacking(name: str) -> str:
    """What this machine lacks to build and run engines of a flavour; empty if nothing."""
    backend = FLAVOURS[name]
    if device_here() == NO_GPU:
        return "no NVIDIA GPU, or no driver for it"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA device"
    return backend.missing() or backend.cannot_run(backend.target()) or ""


pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> TensorRt:
    reason = lacking(request.param)
    if reason:
        pytest.skip(f"{request.param}: {reason}")
    return FLAVOURS[request.param]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "tiny", depth=2)))


@pytest.fixture(scope="module")
def spec(flavour: TensorRt, checkpoint: Checkpoint, tmp_path_factory) -> BuildSpec:
    into = tmp_path_factory.mktemp("engines")
    names = ",".join(PROFILES)
    return request(checkpoint, backend=flavour.name, dtype="bfloat16", profile=names, output_dir=into)


@pytest.fixture(scope="module")
def bundle(spec: BuildSpec) -> Bundle:
    """Built and checked on this GPU: a build ends with the accuracy check of the engine itself."""
    return build_checkpoint(spec).require_passed()


@dataclass
class Opened:
    """An engine, and calls for it."""

    spec: BuildSpec
    engine: Engine

    @property
    def runner(self) -> EngineRunner:
        runner = self.engine._runner
        assert isinstance(runner, EngineRunner)
        return runner

    def calls(self) -> list[dict[str, torch.Tensor]]:
        recipe = self.spec.recipe
        config = recipe.read_config(self.spec.checkpoint)
        return [
            cast_floats(recipe.prepare(config, random_items(recipe, config, grids), "padded"), "bfloat16")
            for grids in CALLS
        ]


@pytest.fixture
def opened(spec: BuildSpec, bundle: Bundle):
    with open_engine(bundle) as engine:
        yield Opened(spec=spec, engine=engine)


def test_a_build_on_its_gpu_is_checked_there(bundle: Bundle) -> None:
    assert bundle.manifest.parity.status == "passed"
    assert bundle.manifest.target.device == device_here()


def test_parity_of_the_stored_engine_passes_again(bundle: Bundle, checkpoint: Checkpoint) -> None:
    report = check(bundle, against=checkpoint)
    assert report.status == "passed", report.table()


def test_replays_equal_the_uncaptured_call_in_every_profile(opened: Opened) -> None:
    for tensors in opened.calls():
        first, *later = (opened.engine.run(tensors)["embeds"] for _ in range(4))
        for each in later:
            # The same kernels on the same numbers; RTX compiles others for a shape after its first call.
            exact = opened.runner._captures
            torch.testing.assert_close(each, first, atol=0 if exact else 0.05, rtol=0 if exact else 0.02)
    if opened.runner._captures:
        assert opened.runner.num_replays == 3 * len(CALLS)
    # Every profile is run by its shapes.
    assert {profile for profile, _ in opened.runner._kept} == {0, 1}


def test_a_replay_is_not_touched_by_the_next_one(opened: Opened) -> None:
    first, second, *_ = opened.calls()
    for _ in range(3):
        rows = opened.engine.run(first)["embeds"]
        kept = rows.clone()
        opened.engine.run(second)
        assert torch.equal(rows, kept)


def test_inputs_on_the_gpu_give_the_same(opened: Opened) -> None:
    tensors = opened.calls()[0]
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    torch.testing.assert_close(opened.engine.run(there)["embeds"], opened.engine.run(tensors)["embeds"])


def test_a_call_outside_every_profile_is_refused(opened: Opened) -> None:
    record = Record.from_json(bytes(open_files(opened, RECORD)).decode())
    most = max(bounds["patches"][2][0] for bounds in record.profiles.values())
    tensors = opened.calls()[0]
    tensors["patches"] = torch.zeros(most + 4, tensors["patches"].shape[1], dtype=torch.bfloat16)
    with pytest.raises(LimitError):
        opened.runner.run(tensors)


def open_files(opened: Opened, name: str) -> bytes:
    return build_checkpoint(opened.spec).bundle.read(name)


def test_an_engine_for_another_gpu_is_refused_by_its_manifest(checkpoint: Checkpoint, tmp_path: Path) -> None:
    reason = lacking("tensorrt_rtx")
    if reason:
        pytest.skip(f"tensorrt_rtx: {reason}")
    other = "sm120" if device_here() != "sm120" else "sm89"
    words = {"backend": "tensorrt_rtx", "dtype": "bfloat16", "profile": "thumbnail"}
    made = build_checkpoint(request(checkpoint, targets=(other,), output_dir=tmp_path, **words))  # type: ignore[arg-type]
    with pytest.raises(MisfitError, match=rf"device is {other} in the bundle and {device_here()}"):
        open_engine(made.bundle, allow_failed=True)


def test_whether_an_engine_for_rtx_runs_on_a_gpu_of_the_data_centre(checkpoint, tmp_path, record_property):
    """The library names no target for sm90. Whatever it answers is recorded; it may not crash or lie."""
    if device_here() != "sm90" or not torch.cuda.is_available():
        pytest.skip(f"needs an sm90 GPU; this machine has {device_here()}")
    if RTX.missing():
        pytest.skip(f"tensorrt_rtx: {RTX.missing()}")
    answers = {target: answer_of(RTX, checkpoint, target, tmp_path) for target in ("sm89", "sm120")}
    record_property("tensorrt_rtx on sm90", answers)
    print(f"tensorrt_rtx on sm90: {answers}")
    assert all(answers.values())


def answer_of(backend: TensorRt, checkpoint: Checkpoint, target: str, folder: Path) -> str:
    """Refused, with the library's reason; or how far from the reference it runs."""
    recipe = request(checkpoint).recipe
    config = recipe.read_config(checkpoint)
    profiles = [recipe.profiles(config)[name] for name in PROFILES]
    graph = export(recipe, checkpoint, profile=union(profiles), dtype="bfloat16", form="padded")
    out = folder / target
    out.mkdir()
    backend.build(graph, backend.options((target,), profiles), out)
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    record = Record.from_json((out / RECORD).read_text("utf-8"))
    try:
        runner = open_runner("tensorrt_rtx", Folder(out).read(ENGINE), record, spec)
    except MisfitError as error:
        return str(error)
    items = random_items(recipe, config, CALLS[-1])
    found = runner.run(cast_floats(recipe.prepare(config, items, "padded"), "bfloat16"))["embeds"].float()
    expected = recipe.reference(checkpoint).run(items)["embeds"]
    return f"runs, relative L2 {float((found - expected).norm() / expected.norm()):.3g}"
