"""`vlexport.testing.check_recipe`: copies of shipped recipes conform, and broken ones are named."""

from __future__ import annotations

import importlib

import pytest
from vlexport.recipes.demo.writing import write_checkpoint

from vlexport.recipe import find_recipe, recipe_folder
from vlexport.testing import check_recipe

BROKEN = {
    "serves another type": ('model_types=("qwen2_5_vl",)', 'model_types=("other",)', "model type"),
    "another epsilon": ("NORM_EPS = 1e-6", "NORM_EPS = 1e-3", "grouped: embeds"),
    "windows of another size": (
        "window_size // rule.merge // rule.patch",
        "window_size // rule.merge // rule.patch + 1",
        "cu_seqlens: embeds",
    ),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    found = {}
    for name in ("qwen2_5_vl", "minicpmv"):
        demo = importlib.import_module(f"vlexport.recipes.demo.{name}")
        # Of Qwen2.5-VL a block with windows and one without.
        contents = demo.contents(demo.Tiny(depth=2))
        found[name] = write_checkpoint(tmp_path_factory.mktemp("tiny") / name, contents, seed=0)
    return found


# `tests/test_private_recipes.py` has a quick one.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "minicpmv"])
def test_a_copy_of_a_shipped_recipe_conforms_in_every_layout(checkpoints, tmp_path, name):
    mine = tmp_path / "mine.py"
    mine.write_text((recipe_folder() / f"{name}.py").read_text(encoding="utf-8"), encoding="utf-8")
    report = check_recipe(mine, checkpoints[name])
    assert report.passed, report.table()
    checks = {row.check for row in report.rows}
    assert {"model type", "config", "weight names"} <= checks
    assert {f"{layout}: embeds" for layout in ("grouped", "padded", "cu_seqlens")} <= checks


@pytest.mark.parametrize(
    "name",
    [name if "type" in name else pytest.param(name, marks=pytest.mark.slow) for name in BROKEN],
)
def test_a_broken_recipe_is_named_by_what_is_wrong(checkpoints, tmp_path, name):
    old, new, check = BROKEN[name]
    source = (recipe_folder() / "qwen2_5_vl.py").read_text(encoding="utf-8")
    assert source.count(old) == 1
    mine = tmp_path / "mine.py"
    mine.write_text(source.replace(old, new), encoding="utf-8")
    report = check_recipe(mine, checkpoints["qwen2_5_vl"])
    assert not report.passed
    assert check in {row.check for row in report.rows if row.verdict == "failed"}


def test_a_config_that_is_not_read_back_as_written_is_named(checkpoints, monkeypatch):
    recipe = find_recipe("qwen2_5_vl")
    monkeypatch.setattr(type(recipe), "parse_config", lambda *_: None)
    report = check_recipe(recipe, checkpoints["qwen2_5_vl"])
    assert [row.check for row in report.rows if row.verdict == "failed"] == ["config"]


def test_a_tensor_without_a_name_is_named(checkpoints, monkeypatch):
    recipe = find_recipe("qwen2_5_vl")
    names = recipe.weight_names
    lost = "blocks.0.norm1.weight"
    object.__setattr__(
        recipe, "weight_names", lambda *given: {k: v for k, v in names(*given).items() if k != lost}
    )
    report = check_recipe(recipe, checkpoints["qwen2_5_vl"])
    (row,) = [row for row in report.rows if row.verdict == "failed"]
    assert (row.check, row.note) == ("weight names", f"{lost} has no stored tensor of its shape")
