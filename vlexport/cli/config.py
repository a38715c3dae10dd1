"""Options of a build in a TOML file: `--config` reads them, `--write-config` writes them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import typer

from vlexport.errors import RequestError
from vlexport.os_errors import replacing, shortage

# What is about one run, not about what is built.
_OF_ONE_RUN = {"config", "write_config", "as_json", "help"}


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options of a file the defaults of this command; those on the command line win."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_defaults(context, path)}
    return path


def write_options(context: typer.Context, path: Path) -> None:
    """Write the options that were given, on the command line or in a file."""
    spelled = {name: key for key, name in _keys(context).items()}
    given = {
        spelled[name]: str(value) if isinstance(value, Path) else value
        for name, value in context.params.items()
        if name in spelled and context.get_parameter_source(name).name in ("COMMANDLINE", "DEFAULT_MAP")  # type: ignore[union-attr]
    }
    # Strings of JSON are strings of TOML.
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in given.items()]
    try:
        with replacing(path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise shortage(error) or RequestError(
            f"--write-config {path}: cannot be written ({error.strerror}). Name a file in a folder of yours."
        ) from error


def _keys(context: typer.Context) -> dict[str, str]:
    """Return the keys of a file, which are the options as they are spelled, and the parameters they mean."""
    params: list[Any] = [each for each in context.command.params if each.name not in _OF_ONE_RUN]
    return {max(each.opts, key=len).removeprefix("--"): each.name for each in params}


def _defaults(context: typer.Context, path: Path) -> dict[str, object]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise shortage(error) or RequestError(
            f"--config {path}: cannot be read ({error.strerror}). Name a TOML file."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"--config {path}: not valid TOML ({error}). Correct the line.") from error
    keys = _keys(context)
    for key, value in found.items():
        if key not in keys:
            known = ", ".join(sorted(keys))
            raise RequestError(f"--config {path}: no option '{key}'. Known: {known}.")
        if isinstance(value, dict | list):
            raise RequestError(f"--config {path}: '{key}' is {value!r}; a text or a number expected.")
    return {keys[key]: value for key, value in found.items()}
