"""Which form every stage between tower and decoder runs in, and that none waits for the device.

Rows of a GPU are stand-ins (tests/devices.py), and so are packages: each runs its own program on tensors of
its device alone, and is counted. Nothing here has run on a GPU. Tensors of the meta device hold no numbers,
so a stage that reads one (`.item()`, `.tolist()`, a mask as an index, a copy to the host) raises here; the
same stages run on a GPU in tests/gpu/test_no_waits.py."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.devices import stand_in
from tests.recipes.test_recorded_requests import TRUTHS
from tests.recipes.test_recorded_requests import recorded as written
from tests.runtime.recorded import CHECKPOINT, recorded
from vlexport import build
from vlexport._build import token_graphs
from vlexport._build.key import build_key
from vlexport._build.parts import Part
from vlexport._build.request import request as spec_of
from vlexport._build.token_graphs import TokenGraphs, eager_graphs, open_graphs, planned_graphs, write_graphs
from vlexport.backends import Folder, backend_names, find_backend
from vlexport.parity.graphs import NUM_PROMPTS, graph_rows
from vlexport.positions.plan import write_kept_positions
from vlexport.positions.rules import PositionOptions
from vlexport.pruning.evs import EVS
from vlexport.pruning.selectors import BestRows, Selection
from vlexport.runtime.decoder import DecoderOptions, TransformersDecoder
from vlexport.runtime.generate import AnswerGenerator, RuntimeOptions
from vlexport.runtime.outputs import Encoded
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.prune import Pruner
from vlexport.runtime.request import Request, RequestState
from vlexport.target import Target

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "graphs.md"
STAGES = ("prune", "layout", "positions")
WHOLE, PRUNED, OUTER = "two_images", "evs_q50_tall_fps1", "evs_outer_q50"
Run = Callable[..., Any]
NAMES = {BestRows: "prune", token_graphs._Rows: "positions", token_graphs._Kept: "kept"}
Families = dict[str, tuple[Pipeline, Request, Request]]


@dataclass
class Packages:
    """Stand-ins for what torch compiles and loads."""

    calls: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def begin(self, device: str, path: Path, settings: object) -> Iterator[Callable[[], object]]:
        yield lambda: path.write_bytes(device.encode())

    def functions(self, device: str, parts: Sequence[Part]) -> Iterator[Run]:
        for part in parts:
            yield partial(self.run, part, device)

    def run(self, part: Part, device: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        name = NAMES[type(part.program)]
        assert {each.device.type for each in tensors} == {device}, f"{name} is for {device}"
        self.calls[name] += 1
        found = part.program(*tensors)
        return found if isinstance(found, tuple) else (found,)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Packages:
    found = Packages()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_graphs, "compiler", lambda: "g++")
    monkeypatch.setattr(token_graphs, "begun_package", found.begin)
    monkeypatch.setattr(token_graphs, "load_function", lambda content, _: content.decode())
    monkeypatch.setattr(token_graphs, "functions", found.functions)
    monkeypatch.setattr(token_graphs, "exported", lambda _, device: device)
    monkeypatch.setattr(token_graphs, "TRIED_APART", ())
    monkeypatch.setattr(token_graphs, "_try", lambda *_: None)
    return found


def built(backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> TokenGraphs:
    """The graphs of a bundle of this backend, built and opened on a machine that has what it needs."""
    folder.mkdir()
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: True)
        planned = planned_graphs("evs", find_backend(backend).rows_on)
    return open_graphs(write_graphs(planned, folder, "float32"), Folder(folder), "float32")


@pytest.fixture(scope="module")
def spelled(shared: Path) -> Iterator[Pipeline]:
    """A family that writes out time, with its decoder."""
    checkpoint = ROOT / "tests/golden/e2e_qwen3_vl/checkpoint"
    bundle = build(checkpoint, "eager", output_dir=shared / "engines")
    with load(bundle, checkpoint=checkpoint) as pipeline:
        yield pipeline


@pytest.fixture
def families(fresh: Callable[..., Pipeline], spelled: Pipeline) -> Families:
    """Pipelines with a whole request and one that is pruned."""
    case = {each["name"]: each for each in TRUTHS["qwen3_vl"]}
    return {
        "time in steps": (fresh(), recorded(WHOLE).request, recorded(PRUNED).request),
        "time written out": (spelled, written(case[WHOLE])[0], written(case[OUTER])[0]),
    }


def ran(
    pipeline: Pipeline, graphs: TokenGraphs, given: Request, device: str, **options: Any
) -> dict[str, str]:
    """Answer up to the prompt's embeddings, with rows that arrive on a device; return the forms as told."""
    steps = pipeline.require_generator()
    pruner = Pruner(pipeline.recipe, pipeline.pruner.merge, graphs)
    steps = AnswerGenerator(pipeline.encoder, pruner, steps.language, RuntimeOptions(**options))
    (state,) = steps.encode([steps.preprocess(given)])
    assert not isinstance(state, Exception)
    with stand_in():
        state.encoded = tuple(on(each, device) for each in state.encoded)
        steps.embed(steps.prune(state))
    return dict(state.forms)


def on(item: Encoded, device: str) -> Encoded:
    moved = {name: rows.to(device) for name, rows in item.layers.items()}
    return replace(item, embeds=item.embeds.to(device), layers=moved)


def rows_of(
    families: Families, packages: Packages, graphs: TokenGraphs, device: str
) -> Iterator[tuple[str, ...]]:
    """Yield the forms of both kinds of requests of both families; where one is compiled, it was called."""
    for family, (pipeline, whole, pruned) in families.items():
        for kind, given in (("whole", whole), ("pruned", pruned)):
            packages.calls.clear()
            forms = ran(pipeline, graphs, given, device)
            called = {"prune": packages.calls["prune"], "positions": packages.calls["positions"]}
            called["positions"] += packages.calls["kept"]
            for stage, form in forms.items():
                assert (form == "compiled") == bool(called.get(stage, 0)), (family, kind, stage, form)
            assert sum(packages.calls.values()) == sum(form == "compiled" for form in forms.values())
            yield family, kind, *(forms.get(stage, "-") for stage in STAGES)


@pytest.mark.seconds
def test_the_page_has_the_forms_of_every_backend_and_a_compiled_one_was_called(
    families, packages, tmp_path, monkeypatch
):
    table: dict[tuple[str, ...], list[str]] = {}
    for name in backend_names():
        device = find_backend(name).rows_on
        for row in rows_of(families, packages, built(name, tmp_path / name, monkeypatch), device):
            table.setdefault((device, *row), []).append(f"`{name}`")
    lines = [
        "| backends | rows arrive on | positions | request | `prune` | `layout` | `positions` |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join((', '.join(names), *row))} |" for row, names in table.items()),
    ]
    assert "\n".join(lines) in PAGE.read_text(encoding="utf-8"), "\n".join(lines)


@pytest.mark.seconds
def test_what_packages_do_not_take_runs_eagerly_and_says_why(
    families, packages, tmp_path, monkeypatch, caplog
):
    token_graphs.warn_once.cache_clear()
    graphs = built("onnxruntime", tmp_path / "bundle", monkeypatch)
    pipeline, _, pruned = families["time in steps"]
    moved = ran(pipeline, graphs, pruned, "cuda")
    assert moved == {
        "prune": "eager: embeddings are float32 on cuda, the package takes float32 on cpu",
        "positions": "eager: positions are on cuda, the package takes cpu",
    }
    assert not packages.calls
    longest = ran(pipeline, graphs, pruned, "cpu", positions=PositionOptions(pruned_resume="max"))
    assert longest == {
        "prune": "compiled",
        "positions": "eager: text that resumes by the largest position has no package",
    }
    assert packages.calls == {"prune": 1}
    ran(pipeline, graphs, pruned, "cuda")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == len(set(said)) == 3


@pytest.mark.seconds
@pytest.mark.parametrize("name", backend_names())
def test_a_build_plans_packages_for_where_rows_arrive(name, packages, monkeypatch):
    backend = find_backend(name)
    engine = Target(backend=name, version="1", platform="linux-x86_64", device="sm89")
    monkeypatch.setattr(type(backend), "versions", lambda _: {"torch": "2.13.0"})
    monkeypatch.setattr(type(backend), "build_target", lambda *_: engine)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    target = build_key(replace(spec_of(CHECKPOINT, backend="eager"), backend=backend)).graphs.target
    assert target is not None
    assert target.device == backend.rows_on


@pytest.mark.parametrize("backend", ["tensorrt_rtx", "cudagraphs"])
def test_the_check_calls_the_packages_on_the_device_of_rows(backend, packages, tmp_path, monkeypatch):
    graphs = built(backend, tmp_path / "bundle", monkeypatch)
    with stand_in():
        rows = list(graph_rows(graphs, "float32"))
    assert [(row.check, row.verdict, row.note) for row in rows] == [
        ("pruning graph", "passed", "evs, compiled"),
        ("positions graph", "passed", "compiled"),
    ]
    # Two scenes of four videos at three rates; a video of one frame needs no package.
    assert packages.calls == {"prune": 2 * 4 * 3, "kept": NUM_PROMPTS, "positions": NUM_PROMPTS}


@pytest.fixture(scope="module")
def steps(opened, language) -> AnswerGenerator:
    """The stages with the decoder on the meta device."""
    model = copy.deepcopy(language.decoder.model).to("meta")
    decoder = TransformersDecoder(model, DecoderOptions())
    on_meta = replace(language, decoder=decoder)
    return AnswerGenerator(opened.encoder, opened.pruner, on_meta, RuntimeOptions())


def prefilled(steps: AnswerGenerator, name: str) -> RequestState:
    """Take a recorded request through the stages behind the tower, on the meta device."""
    (state,) = steps.encode([steps.preprocess(recorded(name).request)])
    assert isinstance(state, RequestState)
    state.encoded = tuple(on(each, "meta") for each in state.encoded)
    steps.prefill(steps.embed(steps.prune(state)))
    return state


def test_stages_after_the_tower_read_nothing_back(steps: AnswerGenerator) -> None:
    for name in ("evs_q50_tall_fps1", "evs_image_then_video", "evs_chunked_q50", "two_images"):
        state = prefilled(steps, name)
        assert (state.embeds.is_meta, state.logits.is_meta) == (True, True), name
        assert len(state.embeds) == len(recorded(name).case["prompt_token_ids"]), name


def test_compiled_graphs_stand_between_tower_and_prefill_without_a_wait(steps: AnswerGenerator) -> None:
    """Packages of a GPU, in whose place the same programs run on the meta device and are counted."""
    plain, calls = steps.pruner.graphs, list[str]()

    def counted(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(name)
            return run(*given)

        return call

    graphs = replace(
        eager_graphs("evs"),
        selection=Selection(selector=plain.selection.selector, run=counted("prune", EVS.run)),
        form="compiled",
        dtype="float32",
        device="meta",
        packaged_kept=counted("kept", write_kept_positions),
    )
    embedder = steps.embedder
    steps.pruner.graphs, steps.embedder = graphs, replace(embedder, graphs=graphs)
    try:
        state = prefilled(steps, "evs_image_then_video")
    finally:
        steps.pruner.graphs, steps.embedder = plain, embedder
    assert calls == ["prune", "kept"]
    assert state.forms == {"prune": "compiled", "positions": "compiled"}


def test_the_meta_device_notices_a_number_that_is_read() -> None:
    with pytest.raises(NotImplementedError, match="meta tensor"):
        torch.zeros(3, device="meta").tolist()
