"""The pages: their commands and flags exist, their links resolve, their examples run."""

import importlib
import importlib.util
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest
import typer

import vlexport.backends
from tests.cli.lines import vlexport as command
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.cli import app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/*.md"), *ROOT.glob("engines/*.md")]
)
# The changelog names flags as they were when it was written.
GUIDES = [page for page in PAGES if page.name != "CHANGELOG.md"]
VERBS = typer.main.get_group(app).commands


def _name(page):
    return str(page.relative_to(ROOT))


def _lines(page):
    """Return commands of a page: lines of its shell blocks, and what its text spells as code."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:bash)?\n(.*?)```", text, flags=re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line.strip() for line in [*"\n".join(blocks).replace("\\\n", " ").splitlines(), *spans]]


def _unknown(line):
    """Return what a command names and vlexport, make or Python does not have."""
    try:
        first, *words = shlex.split(line, comments=True) or [""]
    except ValueError:
        return []
    if Path(first).name == "vlexport" and words and not words[0].startswith("-"):
        verb = VERBS.get(words[0])
        if verb is None:
            return [words[0]] if re.fullmatch(r"[a-z-]+", words[0]) else []
        flags = {flag for param in verb.params for flag in (*param.opts, *param.secondary_opts)}
        flags |= {"--help", "--debug"}
        return [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags]
    if first == "make" and words and re.fullmatch(r"[a-z-]+", words[0]):
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        return [] if re.search(rf"^{words[0]}:", makefile, flags=re.MULTILINE) else [words[0]]
    if Path(first).name in ("python", "python3") and words[:1] == ["-m"]:
        # Every interpreter has pip; looking for it makes setuptools warn where distutils was imported.
        return [] if words[1] == "pip" or importlib.util.find_spec(words[1]) else [words[1]]
    return []


def test_every_command_and_flag_of_a_page_exists():
    unknown = [(_name(page), line) for page in GUIDES for line in _lines(page) if _unknown(line)]
    assert unknown == []


def test_an_invented_command_is_found():
    unknown = {
        "vlexport build SOURCE --backends eager": ["--backends"],
        "vlexport explain BUNDLE": ["explain"],
        "make coffee": ["coffee"],
        "python -m vlexport.nothing": ["vlexport.nothing"],
        ".venv/bin/vlexport build SOURCE --backend eager": [],
    }
    assert {line: _unknown(line) for line in unknown} == unknown


def test_every_link_leads_to_a_file_and_to_a_heading_of_it():
    links = [
        (page, path, section)
        for page in PAGES
        for path, _, section in re.findall(
            r"\]\((?!https?:|mailto:)([^)#]*)(#([^)]+))?\)", page.read_text(encoding="utf-8")
        )
    ]
    assert len(links) > 50
    assert [(_name(page), path, section) for page, path, section in links if _lost(page, path, section)] == []


def _lost(page, path, section):
    target = (page.parent / path).resolve() if path else page
    if not section or not target.exists():
        return not target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), flags=re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return section not in slugs


def test_python_on_a_page_compiles_and_imports_what_exists():
    blocks = [
        (page.name, textwrap.dedent(block))
        for page in GUIDES
        for block in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    ]
    imported = re.compile(r"^ *from (vlexport[\w.]*) import ([\w, ]+)$", flags=re.MULTILINE)
    lost = []
    for page, block in blocks:
        compile(textwrap.dedent(block), page, "exec")
        for module, names in imported.findall(block):
            lost += [(page, module, name) for name in names.split(", ") if not _exists(module, name)]
    assert lost == []


def _exists(module, name):
    found = importlib.import_module(module)
    return hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.slow
def test_the_backend_on_the_page_is_one_file_that_builds_checks_and_encodes(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8")
    (source,) = [
        block for block in re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL) if "\nBACKEND" in block
    ]
    folder, engines, out = tmp_path / "backends", tmp_path / "engines", tmp_path / "out.safetensors"
    folder.mkdir()
    (folder / "plain_torch.py").write_text(source, encoding="utf-8")
    # As if the file lay beside the others.
    monkeypatch.setattr(vlexport.backends, "__path__", [*vlexport.backends.__path__, str(folder)])
    checkpoint = write_tiny_qwen2_5_vl(tmp_path / "checkpoint", depth=1)
    image = tmp_path / "image.png"
    importlib.import_module("PIL.Image").new("RGB", (112, 84), (200, 30, 90)).save(image)
    try:
        listed = command("list", "--json").document
        assert "plain_torch" in [backend["name"] for backend in listed["backends"]]
        built = command("build", checkpoint, "--backend", "plain_torch", "--into", engines)
        assert built.code == 0, built.err
        assert ", passed\n" in built.err
        encoded = command("encode", built.lines[-1], "--image", image, "--out", out, "--json")
        assert encoded.code == 0, encoded.err
        assert out.stat().st_size > 0
    finally:
        sys.modules.pop("vlexport.backends.plain_torch", None)
