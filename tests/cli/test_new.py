"""`new`: recipes and backends that pass their own tests and build, and how private files are found again."""

from __future__ import annotations

import json
import runpy
import shutil
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.classes import write_checkpoint
from tests.cli.lines import bundle_of, vlexport
from vlexport import backends
from vlexport.bundle import Bundle
from vlexport.bundle.trust import Programs
from vlexport.recipe import find_recipe


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint("gemma3", tmp_path / "checkpoint")


def build(folder: Path, *words: object) -> Path:
    return bundle_of(*words, "--output-dir", folder / "engines")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["siglip2", "gemma3"])
def test_a_new_recipe_passes_its_own_test(tmp_path: Path, model_type: str) -> None:
    tiny = write_checkpoint(model_type, tmp_path / "checkpoint")
    ran = vlexport("new", "recipe", tiny, "-o", tmp_path / "mine.py", "--json").ends(0)
    assert ran.document["files"] == [str(tmp_path / "mine.py"), str(tmp_path / "test_mine.py")]
    assert find_recipe(str(tmp_path / "mine.py")).model_types == (model_type,)
    runpy.run_path(str(tmp_path / "test_mine.py"))["test_the_recipe_conforms"]()


@pytest.mark.slow
def test_a_recipe_of_a_trusted_bundle_is_found_until_it_changes(checkpoint: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    assert vlexport("new", "recipe", checkpoint, "-o", mine).code == 0
    bundle = build(tmp_path, checkpoint, "--recipe", mine, "--backend", "eager")
    assert vlexport("check", bundle).code == 0
    assert vlexport("check", bundle, "--accuracy").code == 0
    text = mine.read_text(encoding="utf-8")
    for state in ("changed", "gone"):
        mine.write_text(text + "raise SystemExit('it ran')\n", encoding="utf-8")
        if state == "gone":
            mine.unlink()
        ran = vlexport("check", bundle)
        assert (ran.code, "--recipe FILE" in ran.err, str(mine) in ran.err) == (4, True, True), ran.err
    moved = tmp_path / "moved.py"
    moved.write_text(text, encoding="utf-8")
    assert vlexport("check", bundle, "--recipe", moved).code == 0
    assert vlexport("check", bundle).code == 0, "the file that was given last is remembered"


@pytest.mark.slow
def test_elsewhere_a_recipe_is_remembered_once_its_bundle_is_approved(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine.py"
    assert vlexport("new", "recipe", checkpoint, "-o", mine).code == 0
    bundle = build(tmp_path, checkpoint, "--recipe", mine, "--backend", "eager")
    digest = Bundle.inspect(bundle).digest
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "elsewhere"))
    assert vlexport("check", bundle, "--recipe", mine).code == 5
    assert Programs.of().recall(digest, "recipe") is None
    assert vlexport("trust", bundle, digest).code == 0
    assert vlexport("check", bundle).code == 4
    assert vlexport("check", bundle, "--recipe", mine).code == 0
    assert vlexport("check", bundle).code == 0


@pytest.mark.slow
def test_a_new_backend_passes_its_own_test_and_is_found_until_it_changes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "_GIVEN", {})
    mine = tmp_path / "plain_torch.py"
    assert vlexport("new", "backend", "plain_torch", "-o", mine).code == 0
    runpy.run_path(str(tmp_path / "test_plain_torch.py"))["test_the_backend_conforms"]()
    bundle = build(tmp_path, checkpoint, "--backend", mine)
    image, out = tmp_path / "image.png", tmp_path / "out.safetensors"
    Image.new("RGB", (112, 84), (200, 30, 90)).save(image)
    for words in (("encode", bundle, "--image", image, "--output", out), ("check", bundle, "--accuracy")):
        # As in another process.
        backends._GIVEN.clear()
        vlexport(*words).ends(0)
    backends._GIVEN.clear()
    mine.write_text(mine.read_text(encoding="utf-8") + "# Changed.\n", encoding="utf-8")
    ran = vlexport("check", bundle)
    assert (ran.code, str(mine) in ran.err, "build with it again" in ran.err) == (4, True, True), ran.err
    assert build(tmp_path, checkpoint, "--backend", mine) != bundle, "its source is a part of the key"


@pytest.mark.seconds
def test_files_of_entry_points_are_found_and_a_broken_one_costs_no_other(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "package").mkdir(parents=True)
    (site / "package" / "__init__.py").write_text("", encoding="utf-8")
    (site / "package" / "wrong.py").write_text("RECIPE = BACKEND = 1\n", encoding="utf-8")
    assert vlexport("new", "recipe", checkpoint, "-o", site / "package" / "mine.py").code == 0
    assert vlexport("new", "backend", "plain_torch", "-o", site / "package" / "plain_torch.py").code == 0
    (site / "package-1.0.dist-info").mkdir()
    (site / "package-1.0.dist-info" / "METADATA").write_text("Name: package\nVersion: 1.0\n")
    (site / "package-1.0.dist-info" / "entry_points.txt").write_text(
        "[vlexport.recipes]\nabsent = package.absent\nmine = package.mine\nwrong = package.wrong\n"
        "[vlexport.backends]\nlost = lost\nplain_torch = package.plain_torch\nwrong = package.wrong\n"
    )
    monkeypatch.syspath_prepend(site)
    ran = vlexport("list", "--json").ends(0)
    assert "mine" in [recipe["name"] for recipe in ran.document["recipes"]]
    told = vlexport("doctor", "--json")
    assert {"plain_torch", "eager"} <= {backend["name"] for backend in told.document["backends"]}
    lines = ran.err + told.err
    assert [lines.count(f"'{name}' of entry point") for name in ("absent", "lost", "wrong")] == [1, 1, 2]
    assert vlexport("plan", checkpoint, "--recipe", "mine", "--backend", "plain_torch").code == 0


def test_a_file_that_is_there_a_wrong_name_and_an_unknown_model_are_refused(
    checkpoint: Path, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    unknown, there = tmp_path / "unknown", tmp_path / "test_there.py"
    shutil.copytree(checkpoint, unknown)
    (unknown / "config.json").write_text('{"model_type": "abacus"}', encoding="utf-8")
    there.write_text("", encoding="utf-8")
    hostile = Path(shutil.copytree(checkpoint, tmp_path / "hostile"), "preprocessor_config.json")
    settings = json.loads(hostile.read_text(encoding="utf-8"))
    hostile.write_text(json.dumps({**settings, "image_processor_type": '"""\nraise SystemExit\n"""'}))
    for words, message in (
        (("recipe", tmp_path / "nowhere"), "nowhere"),
        (("recipe", tmp_path), "holds no config.json"),
        (("recipe", unknown), "no class with get_image_features for model type 'abacus'"),
        (("recipe", hostile.parent, "-o", tmp_path / "x.py"), "the name of a class expected"),
        (("recipe", checkpoint, "-o", tmp_path / "there.py"), "test_there.py: is there"),
        (("recipe", checkpoint, "-o", tmp_path / "my-own.py"), "letters, digits and _"),
        (("recipe", checkpoint, "-o", tmp_path / "mine"), "ends in .py"),
        (("backend", "eager"), "a new name"),
        (("backend", "my-own"), "letters, digits and _"),
        (("backend", "true", "-o", tmp_path / "true.py"), "that is no word of"),
        (("backend", "_1", "-o", tmp_path / "_1.py"), "a letter first"),
        (("backend", "mine", "-o", tmp_path / "other.py"), "which the file has too"),
    ):
        with subtests.test(message):
            assert message in vlexport("new", *words).ends(2).err
    assert sorted(path.name for path in tmp_path.glob("*.py")) == ["test_there.py"]
