"""`plan`: show what a build would be and need; nothing is built or written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from vlexport.cli.build import with_build_options
from vlexport.cli.output import show_json, show_table

if TYPE_CHECKING:
    from vlexport.plan import Forecast


def register(app: typer.Typer) -> None:
    app.command()(plan)


@with_build_options
def plan(arguments: dict[str, Any], as_json: bool) -> None:
    """Estimate shapes, padding, disk and memory of a build.

    Also shows whether the bundle exists already. Nothing is built or written.
    """
    from vlexport.plan import forecast
    from vlexport.request import request

    found = forecast(request(**arguments))
    if as_json:
        show_json("plan", found.to_json())
        return
    show_table(("per call", "smallest", "typical", "largest"), calls_of(found))
    show_table(("build", ""), build_of(found))


def calls_of(found: Forecast) -> list[tuple[str, str, str, str]]:
    """Return the rows that depend on the size of a call."""
    used = {symbol for spec in found.inputs for symbol in spec.symbols()}
    ranges = {symbol: known for symbol, known in found.profile.ranges.items() if symbol in used}
    low, usual, high = found.needs.run_memory if found.needs else (None, None, None)
    return [
        *((str(symbol), str(r.min), str(r.opt), str(r.max)) for symbol, r in ranges.items()),
        ("patches", str(found.patches[0]), str(found.patches[1]), str(found.patches[2])),
        ("memory", format_bytes(low), format_bytes(usual), format_bytes(high)),
    ]


def build_of(found: Forecast) -> list[tuple[str, str]]:
    """Return the rows that do not."""
    needs = found.needs
    worst = ", ".join(f"{kind} {share:.0%}" for kind, share in found.padding.items())
    shapes = [(spec.name, f"{spec.dtype} [{', '.join(map(str, spec.shape))}]") for spec in found.inputs]
    return [
        *shapes,
        ("profile", found.profile.name),
        ("memory of build and check", format_bytes(needs.build_memory if needs else None)),
        ("disk", format_bytes(needs.disk if needs else None)),
        *device_of(found),
        ("attention padding, worst mix", worst),
        ("estimates measured on", _origin(found)),
        ("bundle", str(found.path)),
        ("already built", "yes" if found.cached else "no"),
    ]


def device_of(found: Forecast) -> list[tuple[str, str]]:
    """Return the memory of the GPU that runs the engine, for backends that build for one."""
    if found.device is None:
        return []
    sizes = {
        "engine": found.device.engine,
        "GPU, weights": found.device.weights,
        **{f"GPU, largest call of {name}": size for name, size in found.device.calls.items()},
    }
    return [(name, format_bytes(size)) for name, size in sizes.items()]


def _origin(found: Forecast) -> str:
    known = found.needs or found.device
    return known.origin if known else "unknown: this backend was not measured"


def format_bytes(num_bytes: int | None) -> str:
    return "unknown" if num_bytes is None else f"{num_bytes / 2**20:,.0f} MiB"
