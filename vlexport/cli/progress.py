"""Progress on stderr: one bar over all phases with share and time left; lines where there is no terminal."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Column, Table

from vlexport.cli.interrupts import raise_again
from vlexport.cli.output import EVENTS, UNDER_BAR, console_of, is_quiet, print_error, print_line

if TYPE_CHECKING:
    from vlexport._build.timings import Timings
    from vlexport.backends import Progress

# A line at least this often off a terminal.
LINE_SECONDS = 20.0
# Off a terminal, parts of a phase that are counted have a line for each such share of it.
LINE_SHARE = 0.05
EVENT_SECONDS, EVENT_SHARE = 2.0, 0.01
# Of all that is expected, how much counts as gone as expected before it is.
DOUBT = 0.03
# Of a phase that counts them: how many are done, of how many where that is known, and how fast.
TOKENS = re.compile(
    r"(?P<tokens>\d+)( of (?P<all_tokens>\d+))? tokens(, (?P<tokens_per_second>\d+) a second)?$"
)


class Overall:
    """The share of a command that is done and the seconds left, from the phases that it reports.

    expected  what its phases will take; corrected by what those that ended took, so that one time is for all
              of them. Without it each phase counts for half of what is left, and has its own time
    """

    def __init__(self, expected: Timings | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.expected = expected.phases if expected else {}
        self.clock = clock
        self.started = self.entered = clock()
        self.phase, self.words, self.inside, self.done = "", "", 0.0, 0.0
        self.seconds: dict[str, float] = {}

    def advance(self, phase: str, share: float) -> None:
        """Take the report of a phase; `round 3 of 11` is a part of `round`, and what follows a comma none."""
        raise_again()
        name = re.sub(r" \d+( of \d+)?(, .*)?$", "", phase)
        if name != self.phase:
            self._leave()
            self.phase, self.inside = name, 0.0
        self.words = phase
        self.inside = max(self.inside, min(1.0, share))

    def _leave(self) -> None:
        now = self.clock()
        if self.phase:
            if not self.expected:
                self.done += (1 - self.done) / 2
            self.seconds[self.phase] = self.seconds.get(self.phase, 0.0) + now - self.entered
        self.entered = now

    def finish(self) -> dict[str, float]:
        self._leave()
        return self.seconds

    def share(self) -> float:
        """Return the share that is done, which never falls."""
        if not self.expected:
            return min(0.99, self.done + (1 - self.done) / 2 * self.inside)
        elapsed = self.clock() - self.started
        self.done = min(0.99, max(self.done, elapsed / (elapsed + self.left() or 1.0)))
        return self.done

    def left(self) -> float:
        """Return the seconds left, of this phase where nothing is known about the others; 0: unknown."""
        elapsed = self.clock() - self.entered
        if not self.expected:
            is_known = self.inside >= 0.1 or (self.inside > 0 and elapsed >= LINE_SECONDS)
            return elapsed * (1 / self.inside - 1) if is_known else 0.0
        # A phase that was skipped is behind; one of which nothing is known changes nothing.
        names = list(self.expected)
        begun = [names.index(name) for name in (*self.seconds, self.phase) if name in names]
        later = sum(self.expected[name] for name in names[max(begun, default=-1) + 1 :])
        usual = self.pace() * self.expected.get(self.phase, 0.0)
        inside = max(self.inside, min(0.95, elapsed / usual)) if usual else 1.0
        return self.pace() * later + max(usual, elapsed) * (1 - inside)

    def pace(self) -> float:
        """Return how many times as long as expected this takes, from the phases that ended."""
        ended = {name: taken for name, taken in self.seconds.items() if name in self.expected}
        # Short phases say little: as much weighs what is expected.
        doubt = DOUBT * sum(self.expected.values())
        return (sum(ended.values()) + doubt) / (sum(self.expected[name] for name in ended) + doubt or 1.0)

    def text(self) -> str:
        """Return share and time left."""
        left = self.left()
        if not self.expected:
            return f"{self.inside:.0%} of it, about {duration(left)} left" if left else ""
        return f"{self.share():.0%}, about {duration(left)} left"

    def event(self, title: str) -> str:
        """Return the state as a line of JSON; `seconds_left` is of the phase without an earlier time."""
        state = {"verb": title, "phase": self.words, "share": round(self.share(), 3)}
        seconds = {"seconds": round(self.clock() - self.started, 1), "seconds_left": round(self.left(), 1)}
        counts = TOKENS.search(self.words)
        numbers = {name: int(text) for name, text in counts.groupdict().items() if text} if counts else {}
        return json.dumps({"event": "progress", **state, **numbers, **seconds})


def duration(seconds: float) -> str:
    """Return seconds as a person writes them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def phases(title: str, overall: Overall | None = None) -> Iterator[Progress]:
    """Show the progress of the block: a bar on a terminal, else a line for every phase and every 20 s.

    With `--progress json` a line of JSON for every phase, hundredth of one, and two seconds.
    """
    overall, console = overall or Overall(), console_of(stderr=True)
    if is_quiet() and not EVENTS.get():
        yield overall.advance
    elif not EVENTS.get() and console.is_terminal and not console.is_dumb_terminal:
        bar = _bar(title, overall)
        with Live(get_renderable=bar, console=console, refresh_per_second=10, transient=True):
            UNDER_BAR.append(console)
            try:
                yield overall.advance
            finally:
                UNDER_BAR.remove(console)
    else:
        with _lines(title, overall) as advance:
            yield advance


def _bar(title: str, overall: Overall) -> Callable[[], Table]:
    spinner = Spinner("dots")

    def draw() -> Table:
        times = (duration(overall.clock() - overall.started), overall.text())
        bar = ProgressBar(total=1.0, completed=overall.share(), width=40)
        row = Table.grid(*(Column(no_wrap=True) for _ in range(4)), padding=(0, 1))
        row.add_row(spinner, overall.words or title, bar, ", ".join(filter(None, times)))
        return row

    return draw


@contextmanager
def _lines(title: str, overall: Overall) -> Iterator[Progress]:
    is_event = EVENTS.get()
    every, step = (EVENT_SECONDS, EVENT_SHARE) if is_event else (LINE_SECONDS, LINE_SHARE)

    def line() -> None:
        if is_event:
            print_error(overall.event(title))
            return
        left = overall.text()
        seconds = overall.clock() - overall.started
        print_line(f"{seconds:6.1f} s  {overall.words}{f' ({left})' if left else ''}")

    def tick() -> None:
        while not done.wait(every):
            if overall.words:
                line()

    shown = ("", 0.0)

    def advance(phase: str, share: float) -> None:
        nonlocal shown
        is_new = is_event or phase != overall.words
        overall.advance(phase, share)
        if is_new and (overall.phase != shown[0] or share >= shown[1] + step):
            shown = (overall.phase, share)
            line()

    done, thread = threading.Event(), threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        done.set()
        thread.join()
