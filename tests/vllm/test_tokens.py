"""Recorded requests inside vLLM with a bundle as the tower: the tokens that stock vLLM gave."""

from __future__ import annotations

import json
from itertools import groupby

import pytest

from tests.golden_data import FOLDER

SETS = ("e2e", "e2e_qwen2_vl", "e2e_qwen3_vl")


def cases(name: str, *, truth: bool = True) -> list[dict]:
    # In layout `bare` of Qwen3-VL prompts are written by an older transformers, which this vLLM cannot have.
    found = json.loads((FOLDER / name / "cases.json").read_text())
    return [case for case in found if case["truth"] == truth and case.get("layout") in (None, "outer")]


def _engine(case: dict) -> tuple:
    return case["q"], case["chunk_budget"] or 0, case["embeds"]


GROUPS = [
    pytest.param(name, [case["name"] for case in group], id="-".join(map(str, (name, *engine))))
    for name in SETS
    for engine, group in groupby(sorted(cases(name), key=_engine), key=_engine)
]


@pytest.mark.parametrize(("name", "names"), GROUPS)
def test_tokens_are_those_of_stock_vllm(bundle, answers, name, names):
    found = answers(FOLDER / name, names, bundle(FOLDER / name / "checkpoint"))
    recorded = {case["name"]: case for case in cases(name)}
    assert found["tokens"] == {each: recorded[each]["token_ids"] for each in names}
    assert found["parameters"] == 0
    encoded = [each for each in names if recorded[each]["media"] and not recorded[each]["embeds"]]
    assert found["calls"] >= len(encoded)
