"""torch-tensorrt against a stand-in: what it is given, what is kept, what is raised where it cannot run."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.export import export
from vlexport.backends import Options, find_backend
from vlexport.backends import torch_tensorrt as file
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UnsupportedError

building = importlib.import_module("vlexport._build.build")
BACKEND = find_backend("torch_tensorrt")
TOGETHER = {"torch": "2.13.0", "torch-tensorrt": "2.13.0"}


class Casting(nn.Module):
    """What the stand-in leaves in torch: two operators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1


class StandIn(ModuleType):
    """Takes the whole program as one engine, and has one part left over; keeps what it was given."""

    def __init__(self, engines: int = 1) -> None:
        super().__init__("torch_tensorrt")
        self.engines = engines
        self.given: dict[str, Any] = {}
        self.dynamo = SimpleNamespace(compile=self.compile)

    def Input(self, **given: object) -> dict[str, object]:
        return given

    def compile(self, program: torch.export.ExportedProgram, **given: object) -> GraphModule:
        # The check compiles more, such as a twin in float32.
        self.given, self.program = self.given or given, program
        names = [f"_run_on_acc_{number}" for number in range(self.engines)]
        parts = {**{name: nn.Identity() for name in names}, "_run_on_gpu_1": symbolic_trace(Casting())}
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        for name in parts:
            x = graph.call_module(name, (x,))
        graph.output(x)
        return GraphModule(nn.ModuleDict(parts), graph)

    def save(self, module: GraphModule, path: str, **given: object) -> None:
        self.saved = (module, given)
        torch.export.save(self.program, path)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A machine that has the library, a GPU and versions that go together."""
    found = StandIn()
    monkeypatch.setitem(sys.modules, "torch_tensorrt", found)
    monkeypatch.setattr(file, "installed", {**TOGETHER, "tensorrt": "11.0"}.get)
    monkeypatch.setattr(file, "device_here", lambda: "sm89")
    monkeypatch.setattr(file, "DEVICE", "cpu")
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("tiny") / "tiny", depth=1, with_decoder=False)
    return Checkpoint.open(str(path))


def build(checkpoint: Checkpoint, into: Path, dtype: str = "float32"):
    spec = building.request(
        checkpoint, backend="torch_tensorrt", dtype=dtype, profile="thumbnail", output_dir=into
    )
    return building.build_checkpoint(spec)


@pytest.mark.slow
def test_a_build_requests_the_programs_types_and_shapes_and_counts_what_stays_in_torch(
    library: StandIn, checkpoint, tmp_path
):
    made = build(checkpoint, tmp_path, "bfloat16")
    (inputs,) = library.given.pop("arg_inputs")
    assert (inputs["patches"]["dtype"], inputs["order"]["dtype"]) == (torch.bfloat16, torch.int32)
    low, usual, high = (inputs["patches"][f"{end}_shape"][0] for end in ("min", "opt", "max"))
    assert low < usual < high
    assert library.given == {
        "use_explicit_typing": True,
        "disable_tf32": True,
        "truncate_double": False,
        "min_block_size": 1,
        "pass_through_build_failures": True,
    }
    assert library.saved[1] == {"output_format": "exported_program", "retrace": False}
    manifest = made.bundle.manifest
    assert manifest.parity.status == "passed"
    assert (manifest.target.device, manifest.target.version) == ("sm89", "2.13.0")
    assert manifest.attention_form == "padded"
    partition = json.loads((made.bundle.path / "partition.json").read_text())
    assert (partition["engines"], partition["torch_parts"]) == (1, 1)
    assert sum(partition["in_torch"].values()) == 2


@pytest.mark.seconds
def test_a_program_of_which_nothing_is_taken_is_refused(library: StandIn, checkpoint, tmp_path: Path):
    library.engines = 0
    with pytest.raises(UnsupportedError, match=r"took nothing of the program; 2 operators stay in torch"):
        build(checkpoint, tmp_path)
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("versions", "device", "message"),
    [
        ({**TOGETHER, "torch-tensorrt": "absent"}, "sm89", "the package torch-tensorrt is not installed"),
        ({**TOGETHER, "torch-tensorrt": "2.12.1"}, "sm89", "2.12.1 goes with torch 2.12, and this is torch"),
        ({**TOGETHER, "torch": "2.13.0+cpu"}, "sm89", "needs a CUDA build of torch"),
        (TOGETHER, "none", "for the GPU at hand, and there is none"),
    ],
    ids=["no package", "another minor version", "torch for CPUs", "no GPU"],
)
def test_where_it_cannot_run_the_reason_is_given(library, monkeypatch, versions, device, message):
    monkeypatch.setattr(file, "installed", versions.get)
    monkeypatch.setattr(file, "device_here", lambda: device)
    reason = BACKEND.missing()
    assert reason is not None
    assert message in reason


@pytest.mark.seconds
def test_the_callers_graph_stays_where_it_is(library: StandIn, checkpoint, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(file, "DEVICE", "meta")
    spec = building.request(checkpoint, backend="torch_tensorrt", profile="thumbnail")
    graph = export(spec.recipe, checkpoint, profile=spec.profile, form="padded")
    monkeypatch.setattr(library, "save", lambda *_, **__: None)
    BACKEND.build(graph, Options(), tmp_path)
    assert {tensor.device.type for tensor in library.program.state_dict.values()} == {"meta"}
    assert {tensor.device.type for tensor in graph.program.state_dict.values()} == {"cpu"}
