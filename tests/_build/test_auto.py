"""`auto`: every backend of the machine has a row, the best is within the bound, and a failure is a row."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from torch import nn

import vlexport
from benchmarks.classes import write_checkpoint as write_class
from tests.cli.lines import vlexport as command
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build import auto
from vlexport._build.auto import Choice
from vlexport._build.export import trace
from vlexport._build.spec import BuildSpec
from vlexport.backends import backend_names, find_backend, runs_here
from vlexport.backends._engine import has_vnni
from vlexport.bundle import Bundle
from vlexport.errors import InputError, LimitError, MediaError, RequestError, UnsupportedError
from vlexport.system import ONE_BUILD


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("checkpoints") / "tiny", depth=1)


@pytest.fixture(scope="module")
def choice(checkpoint: Path) -> Choice:
    """A choice where engines of torch's own operators can be built, and all others fail."""

    def traced(spec: BuildSpec, module: nn.Module) -> vlexport.Graph:
        if spec.backend != find_backend("eager"):
            raise ZeroDivisionError("planted")
        return trace(spec, module)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "trace", traced)
        patch.setattr(auto, "ROUNDS", 1)
        return vlexport.choose(checkpoint)


@pytest.mark.seconds
def test_every_backend_has_a_row_and_every_precision_of_one_that_runs_here(choice: Choice) -> None:
    assert {candidate.backend for candidate in choice.candidates} == set(backend_names())
    here = {name for name in backend_names() if runs_here(find_backend(name))}
    precisions = [
        (name, capability.spelled) for name in here for capability in find_backend(name).capabilities
    ]
    rows = [(row.backend, row.quantize or row.dtype) for row in choice.candidates if row.backend in here]
    assert sorted(set(rows)) == sorted(precisions)


@pytest.mark.seconds
def test_rows_have_numbers_or_a_reason_and_the_fastest_come_first(choice: Choice) -> None:
    reasons = {row.name: row.reason for row in choice.candidates}
    assert reasons["inductor float32"] == "planted"
    assert "--device cuda" in reasons["onnxruntime float16"]
    assert all(bool(row.reason) == (row.seconds is None) for row in choice.candidates)
    seconds = [row.seconds for row in choice.candidates if row.seconds is not None]
    assert seconds == sorted(seconds)
    exact, half = (
        next(row for row in choice.candidates if row.name == f"eager {dtype}")
        for dtype in ("float32", "bfloat16")
    )
    assert (choice.blocks, choice.depth) == (1, 1)
    assert (exact.error, exact.seconds) == (exact.whole_error, exact.whole_seconds)
    assert (exact.error or 1.0) < 1e-5 < 1e-3 < (half.error or 0.0) < 0.1


def test_the_best_is_within_the_bound_and_a_bound_too_low_is_refused_with_one_that_is_not(
    choice: Choice,
) -> None:
    assert choice.best.whole_error is not None
    assert choice.best.whole_error <= choice.most_error
    assert replace(choice, most_error=1e-4).best.name == "eager float32"
    assert replace(choice, most_error=1.0).best == choice.candidates[0]
    with pytest.raises(RequestError, match=r"most_error 1e-09 given, and none of 2 measured") as refused:
        _ = replace(choice, most_error=1e-9).best
    (allowed,) = re.findall(r"--most-error ([\d.e-]+)\)", str(refused.value))
    assert replace(choice, most_error=float(allowed)).best.name == "eager float32"


def test_a_machine_on_which_nothing_can_be_measured_is_told_why(choice: Choice) -> None:
    failed = tuple(row for row in choice.candidates if row.reason)
    with pytest.raises(RequestError, match=r"nothing could be measured here\. .*inductor float32: planted"):
        _ = replace(choice, candidates=failed).best


def test_plan_prints_the_table_and_the_plan_of_the_best_and_builds_nothing(
    choice: Choice, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def chosen(_: object, **arguments: object) -> Choice:
        given.update(arguments)
        return choice

    monkeypatch.setattr(vlexport, "choose", chosen, raising=False)
    into = tmp_path / "engines"
    words = ("plan", checkpoint, "--backend", "auto", "-o", into)
    ran = command(*words)
    assert ran.code == 0, ran.err
    assert any(line.startswith("eager\tfloat32\t\t") for line in ran.lines)
    assert any(line.startswith("inductor\tbfloat16\t\t\t\t\t\tplanted") for line in ran.lines)
    assert f"-{choice.best.backend}-" in next(line for line in ran.lines if line.startswith("bundle\t"))
    assert given.keys() == {"input_dtype", "progress"}
    document = command(*words, "--dtype", "fp32", "--most-error", 0.5, "--json").document
    assert len(document["choice"]["candidates"]) == len(choice.candidates)
    assert (given["dtype"], given["most_error"]) == ("float32", 0.5)
    assert not into.exists()
    monkeypatch.setattr(vlexport, "choose", lambda *_, **__: replace(choice, most_error=1e-9))
    ran = command(*words)
    assert (ran.code, "eager\tfloat32" in ran.out, "--most-error" in ran.err) == (2, True, True)


def test_plan_sizes_a_rate_of_images_by_what_is_measured_here(
    choice: Choice, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}
    # Two pictures of 30 rows a call of half a second: four a second.
    best = replace(choice.best, whole_seconds=0.5)
    other = replace(best, device="cuda", whole_seconds=0.1)
    alone = replace(choice, candidates=(other, best), media=2, rows=60)

    def chosen(_: object, **arguments: object) -> Choice:
        given.update(arguments)
        return alone

    monkeypatch.setattr(vlexport, "choose", chosen, raising=False)
    words = ("plan", checkpoint, "-o", tmp_path, "--rate", 9)
    ran = command(*words)
    assert ran.code == 0, ran.err
    assert ran.lines[-4:] == [
        "9 images a second\t", "of a machine like this one\t4", "machines\t3", "rows a second\t270",
    ]  # fmt: skip
    assert (given["backend"], given["dtype"]) == ("onnxruntime", "float32")
    alone = replace(alone, candidates=(best,))
    fleet = command(*words, "--backend", "auto", "--json").document["fleet"]
    assert fleet == {"rate": 9.0, "per_machine": 4.0, "rows": 270.0, "machines": 3}
    failed = replace(choice.candidates[-1], reason="planted", whole_seconds=None)
    alone = replace(alone, candidates=(failed,))
    ran = command(*words)
    assert (ran.code, "could not be measured here: planted" in ran.err) == (2, True)


@pytest.mark.seconds
def test_one_backend_alone_is_measured_where_it_is_named(checkpoint: Path) -> None:
    choice = vlexport.choose(checkpoint, backend="eager", dtype="float32")
    assert [candidate.name for candidate in choice.candidates] == ["eager float32"]
    assert (choice.media, choice.rows) == (1, choice.patches // 4)
    with pytest.raises(UnsupportedError, match="openvino"):
        vlexport.choose(checkpoint, backend="openvino", dtype="float16")


@pytest.mark.seconds
def test_no_other_thread_may_build_while_engines_to_be_measured_are_built(checkpoint, monkeypatch) -> None:
    held: list[bool] = []
    turns: Any = ONE_BUILD
    kind = type(find_backend("eager"))

    def build(*_: object) -> None:
        held.append(turns._is_owned())
        raise UnsupportedError("planted")

    monkeypatch.setattr(kind, "build", build)
    vlexport.choose(checkpoint, backend="eager", dtype="float32")
    assert held == [True]


@pytest.mark.seconds
def test_what_only_measurements_take_is_refused_without_them_and_a_wrong_bound_with_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    image, folder = tmp_path / "image.png", ("-o", tmp_path)
    Image.new("RGB", (56, 56)).save(image)
    for words, message in (
        (("--most-error", 0.1), "most_error given with backend onnxruntime: nothing is chosen. Leave it"),
        (("--media", image, "--most-error", 1), "most_error and media given"),
        (
            ("--most-error", 0.1, "--rate", 5, "--media", image),
            "most_error given with backend onnxruntime: nothing",
        ),
        (("--rate", 0), "rate: 0.0 given, a finite number of images a second above 0 expected"),
        (("--backend", "tensorrt_rtx", "--rate", 5, "--targets", "sm89"), "this machine is measured. Leave"),
        (("--backend", "auto", "--targets", "sm89"), "targets given with backend auto"),
        (("--backend", "auto", "--most-error", "nan"), "most_error: nan given, a finite number above 0"),
        (("--backend", "auto", "--most-error", 0), "most_error: 0.0 given"),
        (
            ("--backend", "auto", "--dtype", "bf16", "--quantize", "int4"),
            "quantize int4 given, int8 expected",
        ),
    ):
        ran = command("plan", checkpoint, *words, *folder)
        assert (ran.code, message in ran.err) == (2, True), (words, ran.err)
    with pytest.raises(InputError, match="most_error: 0 given"):
        vlexport.choose(checkpoint, most_error=0)
    with pytest.raises(MediaError):
        vlexport.choose(checkpoint, media=[tmp_path / "nothing.png"])
    with pytest.raises(LimitError, match="does not fit profile"):
        vlexport.choose(checkpoint, media=[image] * 10, max_pixels=56 * 56, max_images=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto, "reference_of", lambda *_: int("blocks"))
        with pytest.raises(UnsupportedError, match="does not run with 1 of its 1 blocks"):
            vlexport.choose(checkpoint)
    with pytest.raises(InputError, match="a Graph and most_error given"):
        vlexport.build(vlexport.export(*_parts(checkpoint)), "eager", most_error=0.1)


def _parts(checkpoint: Path) -> tuple[vlexport.Recipe, vlexport.Checkpoint]:
    return vlexport.find_recipe("qwen2_5_vl"), vlexport.Checkpoint.open(checkpoint)


@pytest.mark.slow
def test_a_whole_tower_is_about_what_its_first_blocks_let_expect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks add as little as in models when they are initialised: 1 / sqrt(2 * depth) of what they take in.
    deep = write_tiny_qwen2_5_vl(tmp_path / "deep", depth=16, branch_gain=0.18)
    monkeypatch.setattr(auto, "backend_names", lambda: ["eager"])
    part = vlexport.choose(deep, dtype="bfloat16", most_error=1)
    monkeypatch.setattr(auto, "LEAST_BLOCKS", 16)
    whole = vlexport.choose(deep, dtype="bfloat16", most_error=1)
    assert (part.blocks, part.depth, whole.blocks) == (4, 16, 16)
    expected, actual = part.best.whole_error, whole.best.error
    assert expected is not None
    assert actual is not None
    assert actual / 2 < expected < 2 * actual


@pytest.mark.slow
def test_a_class_of_transformers_is_measured_with_as_few_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "backend_names", lambda: ["eager"])
    monkeypatch.setattr(auto, "LEAST_BLOCKS", 2)
    # The second takes the rows of its last layer but one.
    for kind in ("gemma3", "llava"):
        choice = vlexport.choose(write_class(kind, tmp_path / kind), dtype="float32")
        assert (choice.blocks, choice.depth) == (2, 3)
        assert choice.best.name == "eager float32"


@pytest.mark.slow
def test_a_build_has_the_backend_and_precision_that_were_measured(checkpoint: Path, tmp_path: Path) -> None:
    image = tmp_path / "image.png"
    Image.new("RGB", (84, 112), (200, 30, 90)).save(image)
    words = ("--backend", "auto", "--most-error", 1e-4, "--media", image, "-o", tmp_path / "engines")
    ran = command("build", checkpoint, *words)
    assert ran.code == 0, ran.err
    (path,) = ran.lines
    table = dict.fromkeys(re.findall(r"^(\w+)  (?:float32|bfloat16|int8)", ran.err, flags=re.MULTILINE))
    assert set(table) >= {name for name in backend_names() if runs_here(find_backend(name))}
    manifest = Bundle.open(path).manifest
    assert (manifest.precision.dtype, manifest.parity.status) == ("float32", "passed")
    assert f"{manifest.target.backend}  float32" in ran.err


@pytest.mark.slow
@pytest.mark.skipif(not has_vnni(), reason="the processor has no VNNI, inductor no int8")
def test_engines_in_8_bits_have_no_more_blocks_than_the_others(tmp_path: Path) -> None:
    """inductor traces a second time, and once took the whole tower."""
    source = write_tiny_qwen2_5_vl(tmp_path / "tiny", depth=9)
    choice = vlexport.choose(source, quantize="int8")
    assert choice.blocks < choice.depth == 9
    errors = {row.backend: row.error for row in choice.candidates if row.error is not None}
    assert errors["inductor"] < 1.5 * errors["onnxruntime"]
