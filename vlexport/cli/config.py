"""Options of a build in a TOML file: `--config` reads them, `--write-config` writes them."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import typer

from vlexport.errors import RequestError, nearest
from vlexport.system import replacing, shortage

# What is about one run, not about what is built.
_OF_ONE_RUN = {"config", "write_config", "as_json", "help", "check", "files", "fps", "media"}


def read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make the options of a file the defaults of this command; those on the command line win."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_defaults(context, path)}
    return path


def write_options(context: typer.Context, path: Path) -> None:
    """Write the options that were given, on the command line or in a file."""
    lines = []
    for key, name in _keys(context).items():
        value, source = context.params.get(name), context.get_parameter_source(name)
        if source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP"):
            # Strings of JSON are strings of TOML, but for one character that TOML wants escaped.
            text = json.dumps(str(value) if isinstance(value, Path) else value, ensure_ascii=False)
            lines.append(f"{key} = {text}\n".replace("\x7f", "\\u007f"))
    try:
        with replacing(path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise shortage(error) or RequestError(
            f"--write-config {path}: cannot be written ({error.strerror}). Name a file in a folder of yours."
        ) from error
    except UnicodeEncodeError as error:
        line = lines[error.object.count("\n", 0, error.start)].strip()
        raise RequestError(
            f"--write-config {path}: {line} given; TOML holds UTF-8 alone. Rename the file."
        ) from error


def _keys(context: typer.Context) -> dict[str, str]:
    """Return the keys of a file, which are the options as they are spelled, and the parameters they mean."""
    params: list[Any] = [param for param in context.command.params if param.name not in _OF_ONE_RUN]
    return {max(param.opts, key=len).removeprefix("--"): param.name for param in params}


def _defaults(context: typer.Context, path: Path) -> dict[str, object]:
    try:
        stored = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise shortage(error) or RequestError(
            f"--config {path}: cannot be read ({error.strerror}). Name a TOML file."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"--config {path}: not valid TOML ({error}). Correct the line.") from error
    keys = _keys(context)
    flags = {param.name for param in context.command.params if getattr(param, "is_flag", False)}
    for key, value in stored.items():
        if key not in keys:
            raise RequestError(
                f"--config {path}: no option '{key}'.{nearest(key, keys)} Known: {', '.join(sorted(keys))}."
            )
        if isinstance(value, dict | list) or (isinstance(value, bool) and keys[key] not in flags):
            raise RequestError(f"--config {path}: '{key}' is {value!r}; a text or a number expected.")
    return {keys[key]: value for key, value in stored.items()}
