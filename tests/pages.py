"""Commands and programs of the pages in their order, and what is wrong with a command before it runs."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

import typer

from vlexport.cli import _verbosity, app

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path for folder in (".", "docs", "docs/results", "recipes", "engines", "examples")
    for path in ROOT.glob(f"{folder}/*.md")
)  # fmt: skip
# The changelog names flags as they were when it was written.
GUIDES = [page for page in PAGES if page.name != "CHANGELOG.md"]

HEADS = {"vlexport", "make", "python", "python3", "pip", "uvx", "docker", "eval", "polygraphy", "trtexec"}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
VERBS = typer.main.get_group(app)
_CODE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$|`([^`\n]+)`", flags=re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def shown(text: str) -> Iterator[tuple[str, str]]:
    """Yield `("shell", line)` and `("python", program)`: blocks, and what the text spells as code."""
    for language, block, span in _CODE.findall(text):
        if language == "python":
            yield "python", textwrap.dedent(block)
        elif language in ("", "bash"):
            lines = (span or block.replace("\\\n", " ")).splitlines()
            yield from (("shell", line.strip()) for line in lines if _is_command(line.strip()))


def shell_lines(text: str) -> list[str]:
    """Return the commands of a page, each once."""
    return list(dict.fromkeys(line for kind, line in shown(text) if kind == "shell"))


def _is_command(line: str) -> bool:
    words = words_of(line)
    return len(words) > 1 and Path(words[0]).name in HEADS


def words_of(line: str) -> list[str]:
    """Return the words of a command; without settings before it, comments, redirections and `eval`."""
    line = re.sub(r'^eval "\$\((.*)\)"$', r"\1", line)
    try:
        words = shlex.split(re.sub(r"\s\d?>\s*\S+", "", line), comments=True)
    except ValueError:
        return []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def arguments_of(line: str) -> list[str] | None:
    """Return what vlexport is given by a command; None for another program."""
    words = [word for word in words_of(line) if word != "-P"]
    if Path(words[0]).name == "vlexport":
        return words[1:]
    if words[1:3] == ["-m", "vlexport"]:
        return words[3:]
    return None


def is_name(line: str) -> bool:
    """Return whether the program or a verb is named, as `vlexport build`, which needs arguments to run."""
    arguments = arguments_of(line)
    if arguments is None or len(arguments) > 1:
        return False
    return not arguments or _parsed(arguments).startswith("Missing")


def problem(line: str) -> str:
    """Return what a command names and the program does not have; empty if nothing.

    Paths of arguments must exist in the current folder, as click checks some of them.
    """
    words, arguments = words_of(line), arguments_of(line)
    if arguments is not None:
        return "" if is_name(line) else _parsed(arguments)
    program = Path(words[0]).name
    if program in ("docker", "uvx"):
        image = next((at for at, word in enumerate(words) if word.startswith("vlexport")), 0)
        if program == "docker" and f"--tag {words[image]} " not in MAKEFILE:
            return f"no image {words[image]}"
        return _parsed(words[image + 1 :])
    if program == "make":
        return next(filter(None, map(_unmade, words[1:])), "")
    if words[1:2] == ["-m"]:
        return _unknown_module(words[2], [word.partition("=")[0] for word in words[3:]])
    return ""


def _parsed(arguments: list[str]) -> str:
    words, _ = _verbosity(arguments)
    try:
        # `--help` prints.
        with contextlib.redirect_stdout(None), VERBS.make_context("vlexport", words) as context:
            command, rest = VERBS, [*context._protected_args, *context.args]
            while rest and hasattr(command, "resolve_command"):
                name, command, rest = command.resolve_command(context, rest)  # type: ignore[assignment]
                context = command.make_context(name, rest, parent=context)
                rest = [*context._protected_args, *context.args]
    except Exception as error:  # noqa: BLE001  of click or of the copy that typer brings
        return "" if type(error).__name__ == "Exit" else getattr(error, "format_message", error.__str__)()
    return ""


def _unmade(word: str) -> str:
    name, is_setting, _ = word.partition("=")
    rule = rf"^{name} \?=" if is_setting else rf"^{re.escape(name)}:"
    return "" if re.search(rule, MAKEFILE, flags=re.MULTILINE) else f"no {word} in the Makefile"


def _unknown_module(module: str, words: list[str]) -> str:
    # Every interpreter has pip; looking for it makes setuptools warn where distutils was imported.
    if module == "pip":
        return ""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return f"no module {module}"
    if module.partition(".")[0] not in ("benchmarks", "tests"):
        return ""
    origin = Path(spec.origin)
    main = origin.with_name("__main__.py") if origin.name == "__init__.py" else origin
    source = main.read_text(encoding="utf-8")
    unknown = [word for word in words if word.startswith("--") and f'"{word}"' not in source]
    return f"{module} has no {', '.join(unknown)}" if unknown else ""
