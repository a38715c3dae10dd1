"""Verbs as functions: parameters named as options are, results that are what `--json` prints."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from itertools import chain
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import typer
from PIL import Image

import vlexport
from tests.cli.lines import vlexport as command
from vlexport import specs
from vlexport.backends import backend_names, find_backend
from vlexport.cli import app
from vlexport.cli.options import Media, PrunedMedia
from vlexport.cli.run import Sampling
from vlexport.cli.watch import Clip
from vlexport.pruning.cells import RULES
from vlexport.pruning.methods import REQUESTED
from vlexport.runtime.request import Generation, GenerationKeywords, MediaOptions, RequestOptions
from vlexport.runtime.video_stream import StreamKeywords, StreamOptions

VERBS = (
    "plan", "build", "bench", "sweep", "check", "compare", "inspect", "report", "push", "pull", "doctor",
)  # fmt: skip
# Verbs without a function, and where Python has what they do.
ELSEWHERE = {
    "encode": "Pipeline.encode, Collection",
    "run": "Pipeline.generate",
    "watch": "Pipeline.watch",
    "trust": "Bundle.open(trust=...)",
    **dict.fromkeys(("demo", "new", "list", "explain", "repro", "bundles", "cache"), "a terminal's own"),
}
# Options about one run of a command, and about a chart or a line of a result. Measurements for `plan` are
# those of `choose`; files of `build --check` are for `check`, with the bundle at hand.
OPTIONS_ALONE = {
    "build": {"config", "write_config", "check", "files", "fps"},
    "plan": {"config", "write_config", "most_error", "media", "rate"},
    "sweep": {"plot", "most_lost"},
}
# A graph is built too; what Python has for authors.
PYTHON_ALONE = {"build": {"options"}, "plan": {"fp32_layers"}, "bench": {"files"}}
# A checkpoint of `build` may be a graph; paths of `bench` are bundles and files. What is repeated on a
# command line is a list.
OTHER_NAMES = {("build", "checkpoint"): "source", ("bench", "paths"): "bundles"}
REPEATED = {"image": "images", "video": "videos"}


def options_of(verb: str) -> set[str]:
    """The options of a verb as they are spelled, by the names that Python gives them."""
    names = set()
    for option in typer.main.get_command(app).commands[verb].params:  # type: ignore[attr-defined]
        name = max(option.opts, key=len).removeprefix("--").replace("-", "_")
        repeated = REPEATED.get(name, name) if option.multiple else name
        names.add(OTHER_NAMES.get((verb, name), repeated))
    return names - {"json", "help"}


def test_every_verb_is_a_function_whose_parameters_are_its_options(subtests):
    every = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert every == {*VERBS, *ELSEWHERE}
    for verb in VERBS:
        with subtests.test(verb):
            function = getattr(vlexport, verb)
            signature = inspect.signature(function)
            wanted = options_of(verb) - OPTIONS_ALONE.get(verb, set())
            assert set(signature.parameters) - {"progress"} - PYTHON_ALONE.get(verb, set()) == wanted
            annotations = [parameter.annotation for parameter in signature.parameters.values()]
            assert inspect.Signature.empty not in (*annotations, signature.return_annotation)
            assert inspect.getdoc(function)


def test_keywords_of_a_pipeline_are_options_and_the_fields_of_what_they_become():
    assert {field.name for field in fields(Generation)} == GenerationKeywords.__optional_keys__
    assert {field.name for field in fields(StreamOptions)} == StreamKeywords.__optional_keys__
    assert {field.name for field in fields(Sampling)} <= GenerationKeywords.__optional_keys__
    assert {field.name for field in fields(Clip)} <= StreamKeywords.__optional_keys__
    for options, keywords in ((Media, MediaOptions), (PrunedMedia, MediaOptions), (Media, RequestOptions)):
        names = {REPEATED.get(field.name, field.name) for field in fields(options)} - {"files"}
        assert names <= keywords.__optional_keys__


def printed(*words: object) -> dict[str, Any]:
    """The document of a command without its head."""
    document: dict[str, Any] = command(*words, "--json").ends(0).document
    assert (document.pop("schema"), document.pop("verb")) == (1, words[0])
    return document


def as_json(result: Any) -> Any:
    return json.loads(json.dumps(result if isinstance(result, dict) else result.to_json()))


Call = tuple[tuple[object, ...], Callable[[], Any]]


@pytest.fixture
def calls(checkpoint: Path, built: Path, bundle: Path, tmp_path: Path, image: Path) -> dict[str, Call]:
    """Words of a command, and the same in Python."""
    place, page, engines = tmp_path / "hub", tmp_path / "page.html", tmp_path / "engines"
    bounds = {"backend": "eager", "max_pixels": 6000, "max_images": 1, "output_dir": engines}
    words = ("--backend", "eager", "--max-pixels", 6000, "--max-images", 1, "--output-dir", engines)
    return {
        "plan": (("plan", checkpoint, *words), lambda: vlexport.plan(checkpoint, **bounds)),  # type: ignore[arg-type]
        "inspect": (("inspect", built), lambda: vlexport.inspect(built)),
        "inspect a checkpoint": (("inspect", checkpoint), lambda: vlexport.inspect(checkpoint)),
        "check": (("check", built), lambda: vlexport.check(built)),
        "check by a run": (("check", built, "--run"), lambda: vlexport.check(built, run=True)),
        "check of accuracy": (
            ("check", bundle, image, "--accuracy"),
            lambda: vlexport.check(bundle, [image], accuracy=True),
        ),
        "compare": (("compare", built, bundle), lambda: vlexport.compare(built, bundle)),
        "report": (("report", built, "--output", page), lambda: vlexport.report(built, page)),
        "push": (("push", built, place), lambda: vlexport.push(built, str(place))),
        "pull": (
            ("pull", place, "--output-dir", engines),
            lambda: vlexport.pull(str(place), output_dir=engines),
        ),
        "doctor": (("doctor",), vlexport.doctor),
    }


@pytest.mark.seconds
def test_results_are_what_json_prints(calls, subtests):
    assert {name.partition(" ")[0] for name in calls} == {*VERBS} - {"build", "bench", "sweep"}
    for name, (words, call) in calls.items():
        with subtests.test(name):
            documents = [as_json(call()), printed(*words)]
            for document in documents:
                if document.get("proof"):
                    del document["proof"]["seconds"]
            assert documents[0] == documents[1]


@pytest.mark.seconds
def test_a_bench_is_what_json_prints_but_for_times(built):
    (timings,) = vlexport.bench([built], size=(56, 84), rounds=1, threads=1)
    documents = [as_json(timings), printed("bench", built, "--size", "56x84", "--rounds", 1, "--threads", 1)]
    for document in documents:
        for contender in document["contenders"]:
            for name in ("rounds", "ratio", "ms_p50", "ms_p90"):
                del contender[name]
    assert documents[0] == documents[1]
    assert documents[0]["machine"]["threads"] == 1
    with pytest.raises(vlexport.VlexportError, match="a list of one bundle or more expected"):
        vlexport.bench(str(built))
    wrong: list[dict[str, Any]] = [
        {"threads": -1},
        {"rounds": 1.5},
        {"minutes": math.nan},
        {"size": (56, 8.4)},
    ]
    for options in wrong:
        (name,) = options
        with pytest.raises(vlexport.VlexportError, match=rf"{name}.*: .* given, .* expected"):
            vlexport.bench([built], **options)


@pytest.mark.seconds
def test_a_file_that_is_named_twice_is_timed_twice(built, tmp_path):
    Image.new("RGB", (84, 56)).save(tmp_path / "a.png")
    twice = vlexport.bench([built], [tmp_path / "a.png"] * 2, rounds=1, threads=1)
    assert [(call.file, call.tokens) for call in twice] == [(str(tmp_path / "a.png"), twice[0].tokens)] * 2
    assert twice[0].tokens == 6


def test_verbs_are_loaded_without_torch():
    code = (
        "import sys, vlexport; "
        "[getattr(vlexport, name) for name in "
        f"{sorted(set(VERBS) - {'build', 'bench', 'sweep'})}]; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_verb_returns_has_types():
    for function in (vlexport.check, vlexport.push, vlexport.pull, vlexport.doctor, vlexport.report):
        result = inspect.signature(function).return_annotation
        kind = vars(sys.modules[function.__module__])[result]
        assert get_type_hints(kind, localns={"ProofResult": object, "ParityReport": object})


def test_names_of_values_as_types_are_those_of_the_tables():
    capabilities = [backend.capabilities for backend in map(find_backend, backend_names())]
    tables: dict[str, Iterable[str]] = {
        "BackendName": [*backend_names(), *specs.SHORT_BACKENDS],
        "DtypeName": [*specs.ENGINE_DTYPES, *specs.SHORT_DTYPES],
        "InputDtype": specs.INPUT_DTYPES,
        "Scheme": {each.quantisation.name for each in chain(*capabilities) if each.quantisation},
        "DeviceName": specs.DEVICES,
        "ProfileName": specs.PROFILES,
        "MethodName": [*REQUESTED, *(name for name, rule in RULES.items() if rule.is_rated)],
    }
    for name, table in tables.items():
        literal, other = get_args(getattr(specs, name))
        assert (sorted(get_args(literal)), other) == (sorted(table), str), name
