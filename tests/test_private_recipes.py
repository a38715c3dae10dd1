"""Private recipes: a file outside of the tree builds, runs and conforms, and a broken one is named."""

from __future__ import annotations

import importlib
import shutil
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from vlexport.recipes.demo.writing import write_checkpoint

from tests.cli.lines import vlexport
from vlexport.bundle import Bundle
from vlexport.errors import RequestError
from vlexport.recipe import find_recipe, list_recipes, recipe_folder
from vlexport.testing import check_recipe

# The generic one has no checkpoint of its own; it is a recipe for those of others.
SHIPPED = [card.path for card in list_recipes() if card.model_types]
# One family in `make test`; the others are built there by their own tests.
BUILT = [
    path if path.stem == "qwen2_5_vl" else pytest.param(path, marks=pytest.mark.slow) for path in SHIPPED
]
MINE = "# A private copy.\n"
ONE_BLOCK = {"depth": 1, "levels": (0,)}


@pytest.fixture(scope="module", params=BUILT, ids=lambda path: path.stem)
def private(request, tmp_path_factory):
    """A copy of a shipped recipe under its own name with other content, and a checkpoint that it serves."""
    folder = tmp_path_factory.mktemp("private")
    copy = folder / request.param.name
    copy.write_text(request.param.read_text(encoding="utf-8") + MINE, encoding="utf-8")
    demo = importlib.import_module(f"vlexport.recipes.demo.{request.param.stem}")
    shallow = {field.name: ONE_BLOCK[field.name] for field in fields(demo.Tiny) if field.name in ONE_BLOCK}
    return copy, write_checkpoint(folder / "checkpoint", demo.contents(demo.Tiny(**shallow)), seed=0)


@pytest.fixture(scope="module")
def built(private, tmp_path_factory):
    recipe, checkpoint = private
    into = tmp_path_factory.mktemp("engines")
    words = (checkpoint, "--recipe", recipe, "--backend", "eager", "--output-dir", into)
    planned = vlexport("plan", *words)
    assert planned.code == 0, planned.err
    ran = vlexport("build", *words)
    assert ran.code == 0, ran.err
    assert "already built\tyes" in vlexport("plan", *words).out
    return Path(ran.lines[-1])


@pytest.mark.slow
def test_a_copy_of_a_shipped_recipe_builds_and_its_bundle_runs_with_that_file(private, built, tmp_path):
    recipe, checkpoint = private
    image, out = tmp_path / "image.png", tmp_path / "out.safetensors"
    importlib.import_module("PIL.Image").new("RGB", (112, 84), (200, 30, 90)).save(image)
    for words in (
        ("check", built),
        ("encode", built, "--image", image, "--output", out),
        (
            "run",
            built,
            "--checkpoint",
            checkpoint,
            "--image",
            image,
            "--prompt",
            "x",
            "--max-new-tokens",
            "2",
        ),
        ("repro", built, "--inputs-only", "--output", tmp_path / "inputs"),
    ):
        ran = vlexport(*words, "--recipe", recipe)
        assert ran.code == 0, (words[0], ran.err)
    ran = vlexport("check", built, "--accuracy", "--recipe", recipe)
    assert (ran.code, "verdict stored" in ran.err) == (0, True), ran.err


@pytest.mark.seconds
def test_without_its_file_the_shipped_recipe_of_that_name_is_refused_by_digest(
    private, built, tmp_path, monkeypatch
):
    digest = Bundle.inspect(built).digest
    # As of somebody else, who approves the bundle alone.
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert vlexport("trust", built, digest).code == 0
    for words in ((), ("--accuracy",)):
        ran = vlexport("check", built, *words)
        assert ran.code == 4, words
        assert "If a private recipe of this name built it, pass its file as recipe" in ran.err
        assert find_recipe(str(private[0])).digest[:12] in ran.err


@pytest.mark.seconds
def test_a_file_that_changed_since_the_build_is_refused(private, built, tmp_path):
    changed = tmp_path / private[0].name
    changed.write_text(private[0].read_text(encoding="utf-8") + MINE, encoding="utf-8")
    ran = vlexport("check", built, "--accuracy", "--recipe", changed)
    assert ran.code == 4
    assert f"--recipe {changed}" in ran.err, "the command to rebuild names the file"


def test_the_same_bytes_are_the_same_recipe_wherever_they_lie(tmp_path):
    for path in SHIPPED:
        copy = shutil.copy(path, tmp_path)
        assert find_recipe(str(copy)).digest == find_recipe(path.stem).digest


def test_two_private_recipes_of_one_name_live_side_by_side(tmp_path):
    paths = [tmp_path / name / "qwen2_5_vl.py" for name in ("one", "two")]
    for number, path in enumerate(paths):
        path.parent.mkdir()
        text = SHIPPED[-1].with_name("qwen2_5_vl.py").read_text(encoding="utf-8")
        path.write_text(text.replace("NORM_EPS = 1e-6", f"NORM_EPS = {number + 1}.0"), encoding="utf-8")
    modules = [sys.modules[find_recipe(str(path)).config.__module__] for path in paths]
    assert [vars(module)["NORM_EPS"] for module in modules] == [1.0, 2.0]
    again = sys.modules[find_recipe(str(paths[0])).config.__module__]
    assert again is modules[0], "a second look gives the same classes, so that configs can be compared"
    assert vars(sys.modules[find_recipe("qwen2_5_vl").config.__module__])["NORM_EPS"] == 1e-6


def test_a_changed_file_is_read_again_within_the_same_second(tmp_path):
    path = Path(shutil.copy(SHIPPED[-1].with_name("qwen2_5_vl.py"), tmp_path))
    text = path.read_text(encoding="utf-8")
    for given in ("1e-5", "1e-4"):
        path.write_text(text.replace("NORM_EPS = 1e-6", f"NORM_EPS = {given}"), encoding="utf-8")
        module = sys.modules[find_recipe(str(path)).config.__module__]
        assert vars(module)["NORM_EPS"] == float(given)
    assert list(tmp_path.rglob("__pycache__")) == [], "nothing is written beside the user's file"


RECIPE = 'RECIPE = Recipe(name="x", summary="", model_types=("x",))\n'


FAILING = {
    "line 1: NameError": RECIPE,
    "line 1: ModuleNotFoundError": f"import no_such_library\n{RECIPE}",
    "line 3: TypeError": f"from vlexport.recipe import Recipe\n\n{RECIPE}",
    "RECIPE is a dict, a Recipe is expected": f"Recipe = dict\n{RECIPE}",
    "line 2: ZeroDivisionError": f"def f():\n    return 1 / 0\n\nf()\n{RECIPE}",
    "cannot be read": "def f(:\n",
    "of 5, '' and ('x',) given, two texts": RECIPE.replace('name="x"', "name=5"),
    "of 'x', '' and 5 given": RECIPE.replace('("x",)', "5"),
    "of 'x', '' and 'x' given": RECIPE.replace('("x",)', '("x")'),
    "(maximum recursion depth": RECIPE.replace('"x", s', f"{'1+' * 20000}1, s"),
    "position_rule '?' is unknown; expected one of: linear, time_as_text, time_scaled": (
        SHIPPED[0].with_name("qwen2_vl.py").read_text(encoding="utf-8").replace('"time_scaled"', '"?"')
    ),
}


def test_a_file_that_fails_is_refused_by_line_and_leaves_no_module(tmp_path, subtests):
    for number, (message, text) in enumerate(FAILING.items()):
        path = tmp_path / f"mine{number}.py"
        path.write_text(text, encoding="utf-8")
        before = set(sys.modules)
        with subtests.test(message):
            with pytest.raises(RequestError) as refused:
                find_recipe(str(path))
            assert message in str(refused.value)
            assert str(path) in str(refused.value)
            left = {name for name in set(sys.modules) - before if "private_recipe" in name}
            assert left == set() or "a Recipe is expected" in message


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
    "name", [name if "type" in name else pytest.param(name, marks=pytest.mark.slow) for name in BROKEN]
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
