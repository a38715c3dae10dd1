"""The examples of docs/vllm.md and docs/serving.md, run."""

import re
from pathlib import Path

import pytest
import torch

from vlexport.positions.mrope import pruned_positions

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"
MODULES, FIELDS, CHUNKS = re.findall(
    r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL
)


@pytest.mark.slow
def test_the_example_of_a_tower_as_a_part_holds():
    page = PAGE.with_name("serving.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (block,) = (each for each in blocks if "run_packed" in each)
    exec(block, {})


def test_the_examples_of_modules_and_processors_hold():
    for block in (MODULES, FIELDS):
        exec(block, {})


def test_the_example_of_chunks_ends_with_the_positions_of_the_whole_prompt():
    for chunk in (1, 3, 8, 20):
        names: dict = {}
        exec(CHUNKS.replace("length, chunk = 20, 8", f"length, chunk = 20, {chunk}"), names)
        whole = pruned_positions(names["length"], [names["video"]], [names["pruned"].kept], names["rule"])
        assert torch.equal(names["known"].table_RN, whole.table_RN)
        assert torch.equal(names["known"].delta, whole.delta)
