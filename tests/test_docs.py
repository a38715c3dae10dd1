"""The pages: their commands and flags exist, their links resolve, their examples run."""

import importlib
import importlib.util
import re
import sys
import textwrap

import pytest

import vlexport.backends
from tests.cli.lines import vlexport as command
from tests.pages import GUIDES, MAKEFILE, PAGES, ROOT, arguments_of, name_of, problem, shell_lines, words_of
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl

# What a test cannot run, and why; a command belongs to the longest of these beginnings.
NOT_RUN = {
    "python BUNDLE/proof/check.py": "a file of a bundle; tests/runtime/test_proof.py runs it",
    "python -m tests.sharp": "ten minutes; tests/parity/test_sharp.py builds the same towers",
    "docker run": "no docker daemon where the tests run; tests/repo/test_images.py reads the container files",
    "make bench": "45 minutes",
    "make check": "`.ci/run` runs it before the tests",
    "make demo": "sets up an environment from a package index; `vlexport demo` is run",
    "make docs": "rewrites pages; tests/repo/test_readme.py and tests/cli/test_options.py compare them",
    "make fuzz": "half an hour, and a package index; tests/fuzz/test_corpus.py reads what it kept",
    "make gpu": "needs a GPU; tests/gpu/test_runner.py runs its tables",
    "make gpu-rehearsal": "sets up another environment from a package index",
    "make image": "no docker daemon where the tests run; `make check` lints the files",
    "make lock": "needs a package index",
    "make peers": "hours, and a package index; tests/benchmarks/test_peers.py measures a small tower",
    "make mutants": "many minutes; tests/mutation plants a sample",
    "make sbom": "sets up an environment from a package index",
    "make soak": "many minutes; `make test-full` has its short form",
    "make test": "is the tests",
    "make trained": "three hours; tests/benchmarks/test_trained.py trains a few steps",
    "make test-examples": "sets up an environment from a package index, and needs a browser",
    "make test-gpu": "needs a GPU",
    "make test-ray": "sets up an environment from a package index",
    "make test-vllm": "sets up an environment from a package index",
    "make test-wheel": "sets up environments from a package index",
    "make test-newest": "sets up environments from a package index",
    "pip install": "needs a package index; tests/repo/test_packaging.py builds the wheel and installs it",
    "polygraphy run": "another project's program",
    "python -m benchmarks": "minutes to hours; tests/benchmarks has the parts",
    "python -m tests.mutation": "many minutes; tests/mutation plants a sample",
    "python -m tests.fuzz": "as make fuzz",
    "python -m tests.thirty": "rewrites a page from what ran; tests/repo/test_security.py reads its kinds",
    "python build.py": "the program of an archive for TensorRT; tests/cli/test_ahead_of_time.py",
    "python examples/watch_page.py": "a service that does not end; tests/examples has its page",
    "python examples/watch_webcam.py": "needs a camera; tests/runtime/test_examples.py has one in its place",
    "python run.py": "the program of an archive; tests/cli/test_repro.py runs it",
    "python -m tests.runtime.test_three_billion": "17 GB of memory",
    "python3 -m benchmarks.gpu": "needs the results of GPUs; tests/gpu/test_runner.py",
    "python3 -m pip install": "as pip install",
    "uvx vlexport demo": "needs a package index; tests/wheel.py runs it",
}


@pytest.fixture
def named(tmp_path, monkeypatch):
    """A folder with the names that the pages use for folders and files, empty."""
    for name in ("SOURCE", "CHECKPOINT", "BUNDLE", "OTHER", "ADAPTER"):
        (tmp_path / name).mkdir()
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).touch()
    (tmp_path / "build.toml").write_text('checkpoint = "SOURCE"', encoding="utf-8")
    monkeypatch.chdir(tmp_path)


def problems(text):
    return {line: found for line in shell_lines(text) if (found := problem(line))}


def test_every_command_of_a_page_is_one_that_the_programs_take(named):
    texts = {name_of(page): page.read_text(encoding="utf-8") for page in GUIDES}
    assert sum(len(shell_lines(text)) for text in texts.values()) > 150
    assert {name: found for name, text in texts.items() if (found := problems(text))} == {}


def test_a_command_with_an_invented_word_is_found(named):
    shown = {
        "vlexport build SOURCE --backends eager": "No such option: --backends",
        "vlexport -q build SOURCE --backend": "requires an argument",
        "vlexport bench BUNDLE --rounds many": "a valid integer",
        "vlexport bench BUNDLE --rounds 0": "greater than or equal to 1",
        "vlexport inspect": "",  # a name
        "vlexport plan --dtype fp16": "Missing argument",
        "vlexport invent BUNDLE": "No such command 'invent'",
        "vlexport cache list": "No such command 'list'",
        "vlexport check NOWHERE": "does not exist",
        "make coffee": "no coffee",
        "make gpu CUPS=2": "no CUPS=2",
        "python -m vlexport.nothing": "no module vlexport.nothing",
        "python -m benchmarks.sizes plan FOLDER --size 3": "has no --size",
        "docker run --rm vlexport:tpu doctor": "no image vlexport:tpu",
        'docker run -v "$PWD:/work" vlexport:cpu doctor --depth': "No such option: --depth",
        "uvx vlexport demonstrate": "demonstrate",
        ".venv/bin/vlexport build SOURCE --backend eager  # a comment": "",
    }
    for line, found in shown.items():
        assert shell_lines(f"One runs `{line}`.") == shell_lines(f"```bash\n{line}\n```") == [line]
        assert (found in problem(line)) if found else problem(line) == "", line


def test_what_is_not_run_has_a_reason_and_the_makefile_runs_what_exists(named):
    lines = {line for page in GUIDES for line in shell_lines(page.read_text(encoding="utf-8"))}
    others = {" ".join(words_of(line)) for line in lines if arguments_of(line) is None}
    reasons = {
        line: max((each for each in NOT_RUN if line.startswith(each)), key=len, default=None)
        for line in others
    }
    assert [line for line, reason in reasons.items() if reason is None] == []
    assert set(NOT_RUN) - set(reasons.values()) == set()
    recipes = re.findall(r"^\t(?:\w+=\$?\w+ )?\$\(bin\)/(.*)$", MAKEFILE, flags=re.MULTILINE)
    assert len(recipes) > 5
    assert {line: found for line in recipes if (found := problem(line))} == {}


def test_every_link_leads_to_a_file_and_to_a_heading_of_it():
    links = [
        (page, path, section)
        for page in PAGES
        for path, _, section in re.findall(
            r"\]\((?!https?:|mailto:)([^)#]*)(#([^)]+))?\)", page.read_text(encoding="utf-8")
        )
    ]
    assert len(links) > 50
    assert [
        (name_of(page), path, section) for page, path, section in links if _lost(page, path, section)
    ] == []


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
        listed = command("doctor", "--json").document
        assert "plain_torch" in [backend["name"] for backend in listed["backends"]]
        built = command("build", checkpoint, "--backend", "plain_torch", "--output-dir", engines)
        assert built.code == 0, built.err
        assert ", passed\n" in built.err
        encoded = command("encode", built.lines[-1], "--image", image, "--output", out, "--json")
        assert encoded.code == 0, encoded.err
        assert out.stat().st_size > 0
    finally:
        sys.modules.pop("vlexport.backends.plain_torch", None)
