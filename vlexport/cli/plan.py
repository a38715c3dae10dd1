"""`plan`: what a build would be and need; nothing is built or written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from vlexport.cli.build import Words, request_of
from vlexport.cli.fields import command_of
from vlexport.cli.output import show_json, show_table

if TYPE_CHECKING:
    from vlexport.forecast import Forecast


def register(app: typer.Typer) -> None:
    app.command("plan")(command_of(Words, plan))


def plan(words: Words) -> None:
    """Shapes, padding, disk, memory and cache hit of a build. Writes nothing."""
    from vlexport.forecast import forecast

    found = forecast(request_of(words))
    if words.json:
        show_json("plan", found.to_json())
        return
    show_table(("of a call", "smallest", "usual", "largest"), calls_of(found))
    show_table(("of the build", ""), build_of(found))


def calls_of(found: Forecast) -> list[tuple[str, str, str, str]]:
    """What depends on the size of a call."""
    used = {symbol for spec in found.inputs for symbol in spec.symbols()}
    ranges = {symbol: known for symbol, known in found.profile.ranges.items() if symbol in used}
    low, usual, high = found.needs.run_memory if found.needs else (None, None, None)
    return [
        *((str(symbol), str(r.min), str(r.opt), str(r.max)) for symbol, r in ranges.items()),
        ("patches", str(found.patches[0]), str(found.patches[1]), str(found.patches[2])),
        ("memory", told(low), told(usual), told(high)),
    ]


def build_of(found: Forecast) -> list[tuple[str, str]]:
    """What does not."""
    needs = found.needs
    worst = ", ".join(f"{kind} {share:.0%}" for kind, share in found.padding.items())
    shapes = [(spec.name, f"{spec.dtype} [{', '.join(map(str, spec.shape))}]") for spec in found.inputs]
    return [
        *shapes,
        ("profile", found.profile.name),
        ("memory to build and check", told(needs.build_memory if needs else None)),
        ("disk", told(needs.disk if needs else None)),
        *device_of(found),
        ("padding of attention, worst mix", worst),
        ("numbers are from", _origin(found)),
        ("bundle", str(found.path)),
        ("already built", "yes" if found.cached else "no"),
    ]


def device_of(found: Forecast) -> list[tuple[str, str]]:
    """What the GPU will hold that runs the engine."""
    if found.device is None:
        return []
    calls = [(f"GPU, a largest call of {name}", told(size)) for name, size in found.device.calls.items()]
    return [("engine", told(found.device.engine)), ("GPU, weights", told(found.device.weights)), *calls]


def _origin(found: Forecast) -> str:
    known = found.needs or found.device
    return known.origin if known else "nowhere: this backend was not measured"


def told(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"
