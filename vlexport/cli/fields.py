"""Commands with more options than a signature should hold: the options are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from inspect import Parameter, Signature
from typing import Any, TypeVar, get_type_hints

D = TypeVar("D")


def command_of(options: type[D], run: Callable[[D], None]) -> Callable[..., None]:
    """A function that typer reads as if it had the dataclass's fields for parameters; it calls `run`."""
    hints = get_type_hints(options, include_extras=True)

    def command(**given: object) -> None:
        run(options(**given))

    command.__doc__ = run.__doc__
    command.__annotations__ = dict(hints)
    parameters = [
        Parameter(each.name, Parameter.KEYWORD_ONLY, default=_default(each), annotation=hints[each.name])
        for each in fields(options)  # type: ignore[arg-type]
    ]
    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return command


def _default(option: Field[Any]) -> object:
    if option.default is not MISSING:
        return option.default
    return Parameter.empty if option.default_factory is MISSING else option.default_factory()
