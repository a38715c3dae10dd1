"""One engine, many threads: every call gets the outputs that it gets alone; a forked copy is refused."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.backends.test_contract import SPEC, Recorder, call
from tests.backends.towers import WIDTH, build_tower, sharp_checkpoint
from tests.golden_towers import items_of
from vlexport._build.export import export
from vlexport.backends import Engine, EngineSpec, Folder, Options, find_backend
from vlexport.backends._torch import torch_threads
from vlexport.backends.cudagraphs import _Runner, captured_calls
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError
from vlexport.recipe import recipe_for
from vlexport.specs import MediaItem

# Two of them compile for a quarter of a minute.
BACKENDS = [
    pytest.param("eager", marks=pytest.mark.slow),
    pytest.param("inductor", marks=pytest.mark.slow),
    "onnxruntime",
    pytest.param("openvino", marks=pytest.mark.slow),
    "cudagraphs on the CPU",
]
NUM_SIZES = 24
Prepare = Callable[[list[MediaItem]], Mapping[str, Tensor]]


def captured_on_cpu(checkpoint: Path, out: Path) -> tuple[Engine, Prepare]:
    source = Checkpoint.open(checkpoint)
    recipe = recipe_for(source)
    graph = export(recipe, source, form="cu_seqlens")
    find_backend("cudagraphs").build(graph, Options(), out)
    sizes = [recipe.packing(graph.config).capture_sizes(budget, 6) for budget in (8, 32, 128)]
    spec = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
    named = [{str(symbol): size for symbol, size in each.items()} for each in sizes]
    calls = captured_calls(Folder(out), named, spec, "cpu")
    return Engine(_Runner(calls), spec), lambda items: recipe.prepare(graph.config, items, "cu_seqlens")


@pytest.fixture(scope="module", params=BACKENDS)
def opened(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("threads")
    checkpoint = sharp_checkpoint(folder / "checkpoint", depth=2)
    if request.param.startswith("cudagraphs"):
        (folder / "engine").mkdir()
        engine, prepare = captured_on_cpu(checkpoint, folder / "engine")
    else:
        if (reason := find_backend(request.param).missing()) is not None:
            pytest.skip(reason)
        tower = build_tower(checkpoint, request.param, folder / "engine", options=Options(threads=0))
        engine, recipe, config, form = tower.engine, tower.recipe, tower.config, tower.form
        prepare = lambda items: recipe.prepare(config, items, form)  # noqa: E731
    drawn = random.Random(2)
    calls = []
    for seed in range(NUM_SIZES):
        grids = [
            [drawn.choice([1, 1, 2]), 2 * drawn.randint(1, 8), 2 * drawn.randint(1, 8)]
            for _ in range(drawn.randint(1, 3))
        ]
        count = sum(frames * rows * columns for frames, rows, columns in grids)
        rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
        calls.append(prepare(items_of(rows, grids)))
    return engine, calls


@pytest.mark.seconds
@pytest.mark.parametrize("count", [64, pytest.param(400, marks=pytest.mark.slow)])
def test_eight_threads_get_what_one_gets(opened, count):
    engine, calls = opened
    expected = [engine.run(each)["embeds"].clone() for each in calls]
    order = [random.Random(3 + number).randrange(len(calls)) for number in range(count)]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda place: engine.run(calls[place])["embeds"], order))
    # Kept to the end, so an output in memory that a later call writes again is found too.
    equal = [torch.equal(each, expected[place]) for place, each in zip(order, found, strict=True)]
    assert sum(equal) == count


@pytest.mark.seconds
def test_outputs_of_a_call_are_its_own_memory(opened: tuple[Engine, list[Mapping[str, Tensor]]]) -> None:
    engine, calls = opened
    first, again = (engine.run(calls[0])["embeds"] for _ in range(2))
    kept = again.clone()
    assert first.data_ptr() != again.data_ptr()
    with torch.inference_mode():
        first.zero_()
    engine.run(calls[1])
    assert torch.equal(again, kept)


class Overlapping(Recorder):
    """A library that counts how many calls are inside it."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inside = self.most = 0

    def run(self, tensors):
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.01)
        self.inside -= 1
        return super().run(tensors)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_library_gets_one_call_at_a_time_unless_it_takes_more(reentrant: bool) -> None:
    library = Overlapping(reentrant=reentrant)
    engine = Engine(library, SPEC)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: engine.run(call(4)), range(16)))
    assert (library.most > 1) is reentrant


def test_engines_of_two_threads_leave_the_number_of_threads_that_the_first_one_found() -> None:
    before, (first, second) = torch.get_num_threads(), (torch_threads(2), torch_threads(3))
    with ThreadPoolExecutor(1) as other:
        first.__enter__()
        other.submit(second.__enter__).result(60)
        first.__exit__(None, None, None)
        other.submit(second.__exit__, None, None, None).result(60)
    with ThreadPoolExecutor(1) as later:
        assert (torch.get_num_threads(), later.submit(torch.get_num_threads).result(60)) == (before, before)


def _in_fork(engine: Engine, given: dict[str, Tensor], messages: multiprocessing.SimpleQueue[str]) -> None:
    try:
        engine.run(given)
    except InputError as error:
        messages.put(str(error))
    engine.close()


def test_a_forked_copy_of_an_engine_is_refused_with_what_to_do() -> None:
    library = Recorder()
    engine, context = Engine(library, SPEC), multiprocessing.get_context("fork")
    messages: multiprocessing.SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=_in_fork, args=(engine, call(4), messages))
    # A thread of this process may hold the engine's turn while it forks; the child does not wait for it.
    with engine._turn:
        child.start()
    child.join(10)
    assert child.exitcode == 0
    assert "Open the bundle in each process" in messages.get()
    engine.run(call(4))
    assert len(library.seen) == 1
