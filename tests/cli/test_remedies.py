"""Commands that messages print: each is one that the program takes, and runs where it is printed."""

from __future__ import annotations

import ast
import html
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement

import vlexport.backends
from benchmarks.classes import write_checkpoint as write_class
from tests.cli.lines import bundle_of
from tests.cli.lines import vlexport as command
from vlexport.backends.base import Backend
from vlexport.bundle import Bundle
from vlexport.cli import app
from vlexport.specs import MediaBounds

ROOT = Path(__file__).parents[2]
VERBS = typer.main.get_group(app).commands
# Of other programs, in a text about them.
FOREIGN = {
    **dict.fromkeys(("--force-reinstall", "--no-deps", "--upgrade", "--yes"), "pip"), "--link": "cp",
    "--data-loader-script": "polygraphy", "--max-model-len": "vllm", "--mm-encoder-tp-mode": "vllm",
    "--mm-processor-kwargs": "vllm", "--no-enable-prefix-caching": "vllm", "--useProfile": "trtexec",
    "--shapes": "trtexec", "--loadInputs": "trtexec",
}  # fmt: skip
BEFORE_VERBS = {"-q", "-v", "--quiet", "--verbose", "--debug", "--progress", "--version", "--help", "-h"}


def options_of(verb):
    group = VERBS[verb]
    known = [group, *getattr(group, "commands", {}).values()]
    return BEFORE_VERBS | {
        name for each in known for param in each.params for name in (*param.opts, *param.secondary_opts)
    }


EVERY = {name for verb in VERBS for name in options_of(verb)}


def texts():
    """Yield file, line and text of every string that is no docstring; X stands for values in it."""
    for path in sorted((*(ROOT / "vlexport").rglob("*.py"), *(ROOT / "recipes").rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        bodies = [
            node.body
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        ]
        skipped = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                skipped |= {id(each) for each in node.values}
        for node in ast.walk(tree):
            if id(node) in skipped:
                continue
            if isinstance(node, ast.JoinedStr):
                parts = (each.value if isinstance(each, ast.Constant) else "X" for each in node.values)
                yield path, node.lineno, "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.lineno, node.value


def commands_in(text):
    """Return the words after `vlexport` of each command in a text; the words of a sentence end it."""
    found = re.findall(
        r"(?:`|: |^|\(|prog_name=)vlexport ([a-z][a-z-]*(?: (?:-{1,2}[a-z][\w-]*|[A-Z]\w*|\.\.\.|'X'))*)",
        text,
        re.MULTILINE,
    )
    # A text that begins with the name may be a sentence.
    return [each.split() for each in found if each.split()[0] in VERBS or f"`vlexport {each}" in text]


def problems(text):
    wrong = []
    for verb, *rest in commands_in(text):
        known = options_of(verb) if verb in VERBS else None
        if known is None:
            wrong.append(f"no verb {verb}")
        else:
            wrong += [f"{verb} has no {word}" for word in rest if word.startswith("-") and word not in known]
    flags = re.findall(r"(?<![\w(-])--[a-z][\w-]*(?![\w-]*[:)])", text)
    return wrong + [f"nothing has {flag}" for flag in flags if flag not in EVERY and flag not in FOREIGN]


@pytest.mark.seconds
def test_every_command_and_flag_in_a_text_of_the_library_is_one_that_the_program_takes():
    found, count = {}, 0
    for path, line, text in texts():
        count += len(commands_in(text))
        if wrong := problems(text):
            found[f"{path.relative_to(ROOT)}:{line}"] = wrong
    assert found == {}
    assert count > 25


def test_an_invented_verb_or_flag_is_found():
    assert problems("Try `vlexport invent X`.") == ["no verb invent"]
    assert problems("run: vlexport check X --blocks --accuracy") == [
        "check has no --blocks",
        "nothing has --blocks",
    ]
    assert problems("Leave --layer out.") == ["nothing has --layer"]
    assert problems("`vlexport check -v X --accuracy --layers`, and vlexport opens nothing") == []


def printed(text, verb):
    """Return the words after `vlexport` of the one command of a verb that a text prints."""
    (line,) = set(re.findall(rf"vlexport {verb} [^`\n]+", text))
    return shlex.split(line)[1:]


@pytest.mark.seconds
def test_what_is_printed_about_a_bundle_of_a_private_recipe_names_its_file_and_runs(
    failed, failed_build, wrong_recipe, image, tmp_path
):
    def filled(words):
        assert "FILE" in words
        return [str(wrong_recipe) if word == "FILE" else word for word in words]

    command(*filled(printed(command("inspect", failed).out, "check"))).ends(0)
    refused = command("encode", failed, "--image", image, "--output", tmp_path / "out.safetensors").err
    again = filled(printed(refused, "check"))
    assert again[:1] == ["check"]
    ran = command(*again)
    assert (ran.code, "epsilon" in ran.out + ran.err or "failed" in ran.out) == (3, True), ran.err
    assert "FILE" in printed(failed_build.err, "check")


def rebuilt(bundle, **filled):
    """Return what `plan` finds of the bundle that a rebuild command makes."""
    _, *words = shlex.split(bundle.rebuild_command())
    words = ["plan", *(filled.get(word, word) for word in words[1:])]
    return command(*words, "--output-dir", bundle.path.parent)


def test_the_command_to_build_again_builds_the_same_bundle(built, failed, wrong_recipe):
    assert "already built\tyes" in rebuilt(Bundle.open(built)).out
    ran = rebuilt(Bundle.open(failed), FILE=wrong_recipe)
    assert "already built" in ran.out, ran.err


@pytest.mark.slow
def test_the_command_to_build_again_names_bounds(checkpoint, tmp_path):
    bounds = ("--max-pixels", 28 * 56, "--max-images", 2)
    bundle = Bundle.open(bundle_of(checkpoint, "--backend", "eager", "--output-dir", tmp_path, *bounds))
    ran = rebuilt(bundle)
    assert "already built\tyes" in ran.out, ran.err
    other = replace(
        bundle, manifest=replace(bundle.manifest, target=replace(bundle.manifest.target, torch="1.0"))
    )
    assert shlex.split(other.rebuild_command())[-8:-4] == ["--min-pixels", "1", "--max-pixels", str(28 * 56)]


@pytest.mark.parametrize(("hard", "raised"), [(64, None), (500, 500), (8192, 4096)])
def test_the_printed_limit_on_open_files_can_be_set_and_is_higher(hard, raised):
    program = "import errno; from vlexport.system import shortage; print(shortage(OSError(errno.EMFILE, '')))"
    given = f"ulimit -n {hard} && ulimit -Sn 64"
    shell = ["bash", "-c", f"{given} && exec {shlex.join([sys.executable, '-c', program])}"]
    text = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"`(ulimit[^`]*)`", text)
    assert len(lines) == (raised is not None), text
    for line in lines:
        shell = ["bash", "-c", f"{given} && {line} && ulimit -Sn"]
        assert subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split() == [
            str(raised)
        ]


def test_every_package_to_install_is_a_requirement_with_an_extra_that_exists(monkeypatch):
    backends = [vlexport.backends.find_backend(name) for name in vlexport.backends.backend_names()]
    extras = set(re.findall(r"^Provides-Extra: (\S+)", metadata_text(), re.MULTILINE))
    commands = [each.mend() for each in backends if each.installed()]
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    monkeypatch.setattr(Backend, "installed", lambda _: {})
    commands += filter(None, (each.missing() for each in backends))
    packages = [
        package for text in commands for package in re.findall(r"pip install (?:--\S+ )*('[^']+'|\S+)", text)
    ]
    assert len(packages) > 5
    for package in packages:
        assert Requirement(package.strip("'")).extras <= extras


def metadata_text():
    from importlib.metadata import metadata

    return str(metadata("vlexport"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["own", "generic"])
def test_each_command_on_a_page_runs_for_that_bundle(kind, built, checkpoint, video, tmp_path, monkeypatch):
    bundle, source = built, checkpoint
    if kind == "generic":
        source = write_class("gemma3", tmp_path / "tiny")
        bundle = bundle_of(source, "--backend", "eager", "--output-dir", tmp_path)
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.html"
    assert command("report", bundle, "--output", page).code == 0
    lines = [
        html.unescape(each) for each in re.findall(r"<code>(vlexport [^<]*)</code>", page.read_text("utf-8"))
    ]
    verbs = {shlex.split(line)[1] for line in lines}
    assert verbs == {"check", "report"}
    assert ("VIDEO" in " ".join(lines)) == (kind == "own")
    values = {"BUNDLE": bundle, "VIDEO": video, "FILE": tmp_path / "measured.html"}
    # The array has no frame rate.
    less = {"report": ("--fps", "2")}
    for line in lines:
        words = [values.get(word, word) for word in shlex.split(line)[1:]]
        command(*words, *less.get(words[0], ())).ends(0)
    assert "Not measured" not in (tmp_path / "measured.html").read_text("utf-8")


def test_bounds_are_read_from_the_name_of_their_profile_and_from_no_other():
    bounds = MediaBounds(max_pixels=3136, max_images=1)
    assert MediaBounds.of(bounds.profile) == bounds
    names = ("any", "custom", "custom-1-2", "custom-a-b-c-d", "custom-0-0-0-0", f"custom-1-{'9' * 5000}-1-0")
    assert [MediaBounds.of(name) for name in names] == [None] * len(names)
