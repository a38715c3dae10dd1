"""Targets name what differs, in both values, and what to do about it; profiles side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlexport.errors import InputError
from vlexport.specs import Range, ShapeProfile, Symbol, union
from vlexport.target import NO_GPU, Misfit, Target, fit, platform_here

HERE = Target(
    backend="onnxruntime",
    version="1.31.1",
    platform="linux-x86_64",
    device="cpu",
    instruction_set="avx2+avx512f+fma",
    torch="2.13.0+cpu",
)

WORDS = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,20}", fullmatch=True)

TARGETS = st.builds(
    Target,
    backend=WORDS,
    version=WORDS,
    platform=WORDS,
    device=WORDS,
    instruction_set=st.none() | WORDS,
    torch=st.none() | WORDS,
)


@given(TARGETS)
def test_a_target_parses_its_own_tag(target: Target) -> None:
    assert Target.parse(target.tag) == target


@given(st.text(max_size=80))
def test_any_text_parses_to_a_target_with_that_tag_or_is_an_input_error(text: str) -> None:
    try:
        parsed = Target.parse(text)
    except InputError:
        return
    assert parsed.tag == text


def test_the_tag_reads_as_library_platform_device() -> None:
    assert HERE.tag == "onnxruntime@1.31.1,linux-x86_64,cpu,isa=avx2+avx512f+fma,torch=2.13.0+cpu"


def test_a_target_that_needs_no_more_than_is_here_fits():
    assert fit(HERE, HERE) is None
    assert fit(replace(HERE, instruction_set=None, torch=None), HERE) is None
    assert fit(replace(HERE, instruction_set="fma+avx2"), HERE) is None


def test_a_misfit_names_the_field_both_values_and_the_command(subtests):
    for field, built in (
        ("backend", "tensorrt"),
        ("version", "1.30.0"),
        ("platform", "windows-x86_64"),
        ("device", "sm89"),
        ("instruction_set", "avx512bf16"),
        ("instruction_set", "avx2+avx512bf16"),
        ("torch", "2.12.0"),
    ):
        with subtests.test(f"{field} {built}"):
            result = fit(replace(HERE, **{field: built}), HERE, rebuild="vlexport build org/name@abc")
            assert isinstance(result, Misfit)
            shown = field.replace("_", " ")
            assert result.fields == (shown,)
            assert f"{shown} is {built} in the bundle and {getattr(HERE, field)} here" in result.reason
            assert "vlexport build org/name@abc" in result.reason


def test_a_machine_without_a_gpu_is_not_told_to_build_for_one():
    result = fit(replace(HERE, device="sm89+sm90"), replace(HERE, device=NO_GPU), rebuild="vlexport build x")
    assert isinstance(result, Misfit)
    assert "vlexport build x" not in result.reason
    assert "needs a machine with sm89 or sm90; `vlexport doctor`" in result.reason
    chosen = "vlexport build x --backend onnxruntime --device cuda"
    result = fit(replace(HERE, device="cuda"), HERE, rebuild=chosen)
    assert isinstance(result, Misfit)
    assert chosen not in result.reason
    assert "needs a machine with cuda; `vlexport doctor`" in result.reason


def test_every_differing_field_is_named_and_unknown_instructions_are_a_misfit():
    result = fit(replace(HERE, version="1.0", device="cuda"), HERE)
    assert isinstance(result, Misfit)
    assert result.fields == ("version", "device")
    assert "vlexport build SOURCE --backend onnxruntime" in result.reason
    result = fit(HERE, replace(HERE, instruction_set=None))
    assert isinstance(result, Misfit)
    assert "unknown here" in result.reason


def test_a_foreign_tag_is_refused_with_the_form_expected(subtests):
    for text in ("", "a@1", "a@1,b", "a,b,c", "a@1,b,c,isa=", "a@1,b,c,torch=1,isa=x", "a@1,b,c,d=e"):
        with subtests.test(text), pytest.raises(InputError, match="target"):
            Target.parse(text)


def test_this_platform_is_a_legal_field() -> None:
    assert replace(HERE, platform=platform_here()).platform.count("-") >= 1


ROWS, FRAMES = Symbol("rows"), Symbol("frames")
SMALL = ShapeProfile("small", {ROWS: Range(2, 4, 8), FRAMES: Range(1, 1, 1)})
LARGE = ShapeProfile("large", {ROWS: Range(4, 64, 128), FRAMES: Range(1, 2, 16)})


def test_one_profile_is_itself():
    assert union([SMALL]) is SMALL


def test_several_reach_from_the_smallest_to_the_largest_and_keep_the_first_as_usual():
    together = union([SMALL, LARGE])
    assert together.name == "small+large"
    assert together.ranges == {ROWS: Range(2, 4, 128), FRAMES: Range(1, 1, 16)}
