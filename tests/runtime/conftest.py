"""Bundles of the recorded checkpoint, built once for a session, and pipelines on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runtime.recorded import CHECKPOINT
from vlexport import build
from vlexport.runtime.decoder import Language, language_of
from vlexport.runtime.generate import RuntimeOptions
from vlexport.runtime.pipeline import Pipeline, load

BACKENDS = ("eager", "onnxruntime")


@pytest.fixture(scope="session")
def bundles(shared: Path) -> Callable[[str], Path]:
    """The bundle of a backend; only the first call of the run builds."""
    into = shared / "engines"
    built: dict[str, Path] = {}

    def bundle(backend: str) -> Path:
        if backend not in built:
            built[backend] = build(CHECKPOINT, backend, output_dir=into).path
        return built[backend]

    return bundle


@pytest.fixture(scope="session")
def language(opened: Pipeline) -> Language:
    """Decoder and tokenizer, loaded once; they keep nothing between answers."""
    return language_of(opened.recipe, CHECKPOINT, RuntimeOptions().decoder)


@pytest.fixture(scope="session", params=BACKENDS)
def answering(
    request: pytest.FixtureRequest, bundles: Callable[[str], Path], language: Language
) -> Iterator[Pipeline]:
    """A pipeline of either backend, shared by tests that do not look at its cache."""
    with load(bundles(request.param), checkpoint=language) as pipeline:
        yield pipeline


@pytest.fixture(scope="session")
def opened(bundles: Callable[[str], Path]) -> Iterator[Pipeline]:
    """The eager bundle, opened once."""
    with load(bundles("eager")) as pipeline:
        yield pipeline


@pytest.fixture
def fresh(opened: Pipeline, language: Language) -> Callable[..., Pipeline]:
    """A pipeline on the opened engine that has seen nothing yet, with options of a test's own."""

    def pipeline(**options: object) -> Pipeline:
        runtime = RuntimeOptions(**options)  # type: ignore[arg-type]
        return Pipeline(opened.bundle, opened.engine, opened.recipe, language, runtime)

    return pipeline
