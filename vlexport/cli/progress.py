"""Progress on stderr: one bar over all phases with share and time left; lines where there is no terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from vlexport._build.timings import Timings
from vlexport.cli.output import UNDER_BAR, console_of, is_quiet, print_line

ProgressCall = Callable[[str, float], None]

# A line at least this often off a terminal, and a look at the clock this often on one.
LINE_SECONDS, TICK_SECONDS = 20.0, 0.5
# Off a terminal, parts of a phase that are counted have a line for each such share of it.
LINE_SHARE = 0.05


class Overall:
    """The share of a command that is done, from the phases that it reports and what they took the last time.

    Without an earlier time, each phase counts for half of what is left, so that the bar never goes back.
    """

    def __init__(self, before: Timings | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.before = before.phases if before else {}
        self.clock = clock
        self.started = self.entered = clock()
        self.phase, self.words, self.inside, self.done = "", "", 0.0, 0.0
        self.seconds: dict[str, float] = {}

    def advance(self, phase: str, share: float) -> None:
        """Take the report of a phase; `round 3 of 11` is a part of the phase `round`."""
        name = phase.rstrip("0123456789 ").removesuffix(" of").rstrip("0123456789 ")
        if name != self.phase:
            self._leave()
            self.phase, self.inside = name, 0.0
        self.words = phase
        self.inside = max(self.inside, min(1.0, share))

    def _leave(self) -> None:
        now = self.clock()
        if self.phase:
            self.done = max(self.done, self._share(1.0))
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.entered
        self.entered = now

    def finish(self) -> dict[str, float]:
        """Return the seconds of all phases."""
        self._leave()
        return self.seconds

    def _share(self, inside: float) -> float:
        if not self.before:
            return self.done + (1 - self.done) / 2 * inside
        names = list(self.before)
        if self.phase not in names:
            return self.done
        place, total = names.index(self.phase), sum(self.before.values()) or 1.0
        passed = sum(list(self.before.values())[:place])
        return (passed + inside * self.before[self.phase]) / total

    def share(self) -> float:
        """Return the share of the whole; a phase that reports nothing moves with the clock."""
        usual = self.before.get(self.phase, 0.0)
        inside = max(self.inside, min(0.95, (self.clock() - self.entered) / usual) if usual else 0.0)
        return min(0.99, max(self.done, self._share(inside)))

    def text(self) -> str:
        """Return share and time left, of this phase alone where nothing is known about the others."""
        if not self.before:
            elapsed = self.clock() - self.entered
            is_known = self.inside >= 0.1 or (self.inside > 0 and elapsed >= LINE_SECONDS)
            left = elapsed * (1 / self.inside - 1) if is_known else 0.0
            return f"{self.inside:.0%} of it, about {duration(left)} left" if left else ""
        share, elapsed = self.share(), self.clock() - self.started
        # Early on, the last time is a better guide than this one.
        left = (1 - share) * (elapsed / share if share > 0.2 else sum(self.before.values()))
        return f"{share:.0%}, about {duration(left)} left"


def duration(seconds: float) -> str:
    """Return seconds as a person writes them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def phases(title: str, overall: Overall | None = None) -> Iterator[ProgressCall]:
    """Show the progress of the block: a bar on a terminal, else a line for every phase and every 20 s."""
    overall = overall or Overall()
    if is_quiet():
        yield overall.advance
    elif _has_terminal():
        with _bar(title, overall) as advance:
            yield advance
    else:
        with _lines(overall) as advance:
            yield advance


def _has_terminal() -> bool:
    console = console_of(stderr=True)
    return console.is_terminal and not console.is_dumb_terminal


@contextmanager
def _bar(title: str, overall: Overall) -> Iterator[ProgressCall]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console_of(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1.0, note="")

        def draw() -> None:
            elapsed = duration(overall.clock() - overall.started)
            note = ", ".join(filter(None, (elapsed, overall.text())))
            bar.update(task, description=overall.words or title, completed=overall.share(), note=note)

        def advance(phase: str, share: float) -> None:
            overall.advance(phase, share)
            draw()

        UNDER_BAR.append(bar.console)
        try:
            with _ticking(draw, TICK_SECONDS):
                yield advance
        finally:
            UNDER_BAR.remove(bar.console)


@contextmanager
def _lines(overall: Overall) -> Iterator[ProgressCall]:
    def line() -> None:
        known = overall.text()
        print_line(
            f"{overall.clock() - overall.started:6.1f} s  {overall.words}{f' ({known})' if known else ''}"
        )

    shown = ("", 0.0)

    def advance(phase: str, share: float) -> None:
        nonlocal shown
        is_new = phase != overall.words
        overall.advance(phase, share)
        if is_new and (overall.phase != shown[0] or share >= shown[1] + LINE_SHARE):
            shown = (overall.phase, share)
            line()

    with _ticking(line, LINE_SECONDS):
        yield advance


@contextmanager
def _ticking(call: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call every so many seconds during the block, from a thread."""
    done = threading.Event()

    def tick() -> None:
        while not done.wait(seconds):
            call()

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
