"""First tokens of two trees: the table, and a process that answers."""

import sys
from dataclasses import replace

import pytest

from benchmarks.first_token import EXACT, PRECISIONS, ROOT, Side, measured, text_of
from benchmarks.plans import FULL
from tests.runtime.recorded import CHECKPOINT

QUESTION = replace(FULL.questions[0], frames=4, side=56, new_tokens=3, rounds=2)


def answered(prefill: float, tokens: list[int]) -> dict[str, object]:
    stages = {"tower": 1.0, "prefill": prefill, "first_token": 1 + prefill, "busy": 1.0, "per_token": 0.1}
    return {"stages": stages, "prompt": 589, "tokens": tokens}


@pytest.mark.parametrize(("tokens", "words"), [([1, 2], "are equal"), ([1, 3], "are NOT equal")])
def test_the_table_has_ratios_of_rounds_and_compares_float32_tokens(tokens, words):
    found = {
        f"before, {EXACT}": [answered(3.0, [1, 2])] * 2,
        f"now, {EXACT}": [answered(1.0, tokens)] * 2,
        "now, tower float32, decoder bfloat16": [answered(0.5, [7, 7])] * 2,
    }
    text = text_of(QUESTION, found)
    assert "589 prompt tokens, 3 of answer, 2 rounds, medians in seconds" in text
    assert f"tokens of float32 throughout {words}." in text
    assert f"| now, {EXACT} | 1.000 | 1.000 | 2.000 | 1.000 | 0.100 | 3.00 (3.00 to 3.00) | 2.00 (2" in text


@pytest.mark.slow
def test_a_tree_answers_in_every_precision_and_with_the_same_tokens_each_time(tmp_path):
    side = Side("now", ROOT, sys.executable, tmp_path, CHECKPOINT, 1, "eager")
    found = measured([side], QUESTION)
    side.close()
    assert list(found) == [f"now, tower {tower}, decoder {dtype}" for tower, dtype in PRECISIONS]
    for answers in found.values():
        assert len(answers) == QUESTION.rounds
        assert len({tuple(each["tokens"]) for each in answers}) == 1
        assert all(0 < each["stages"]["prefill"] < each["stages"]["first_token"] for each in answers)
