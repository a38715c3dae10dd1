"""The examples of docs/vllm.md and docs/serving.md, run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


@pytest.mark.slow
def test_the_example_of_a_tower_as_a_part_holds():
    page = PAGE.with_name("serving.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (block,) = (each for each in blocks if "run_packed" in each)
    exec(block, {})


def test_the_example_of_modules_holds():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(block, {})
