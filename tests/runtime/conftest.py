"""Bundles of the recorded checkpoint, built once for a session, and pipelines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.recorded import CHECKPOINT
from vlexport.build import build_checkpoint, request
from vlexport.checkpoint import Checkpoint
from vlexport.runtime.languages import Language, language_of
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.speaking import RuntimeOptions

BACKENDS = ("eager", "onnxruntime")


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The bundle of a backend; only the first call builds."""
    into = tmp_path_factory.mktemp("engines")
    built: dict[str, Path] = {}

    def bundle(backend: str) -> Path:
        if backend not in built:
            asked = request(Checkpoint.open(CHECKPOINT), backend=backend, into=into)
            built[backend] = build_checkpoint(asked).require_passed().path
        return built[backend]

    return bundle


@pytest.fixture(scope="session")
def language(bundles: Callable[[str], Path]) -> Language:
    """Decoder and tokenizer, loaded once; they keep nothing between answers."""
    with load(bundles("eager")) as pipeline:
        return language_of(pipeline.recipe, CHECKPOINT, RuntimeOptions().decoder)


@pytest.fixture(scope="session", params=BACKENDS)
def answering(
    request: pytest.FixtureRequest, bundles: Callable[[str], Path], language: Language
) -> Iterator[Pipeline]:
    """A pipeline of either backend, shared by tests that do not look at its cache."""
    with load(bundles(request.param), decoder=language) as pipeline:
        yield pipeline


@pytest.fixture
def fresh(bundles: Callable[[str], Path], language: Language) -> Iterator[Callable[..., Pipeline]]:
    """A pipeline of the eager bundle that has seen nothing yet, with options of a test's own."""
    opened: list[Pipeline] = []

    def pipeline(**options: object) -> Pipeline:
        runtime = RuntimeOptions(**options)  # type: ignore[arg-type]
        opened.append(load(bundles("eager"), decoder=language, runtime=runtime))
        return opened[-1]

    yield pipeline
    for each in opened:
        each.close()
