"""Ctrl-C, SIGTERM and SIGHUP: unwind the work; end the process even where it cannot unwind in time.

`Stopped` is raised where the program is. An end without unwinding removes the working folders first.

Processes that this one has started end with it: a compiler whose driver is killed would go on by itself.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import NoReturn

from vlexport.cli.output import print_error
from vlexport.system import unpacked

# A call into a library is not interrupted, and an exception may get lost in one; people wait five seconds.
# With a grace of 4 the end came after 5.96 s on two processors that 17 processes shared.
GRACE_SECONDS = 3.0
# For compilers to remove their files.
CHILDREN_SECONDS = 0.5

_WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
if sys.platform != "win32":
    _WORDS[signal.SIGHUP] = "hung up"

STOPPED_CODES = {128 + number for number in _WORDS}


class Stopped(BaseException):
    """A signal, raised where the program is, so that staged work is removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number
        self.message = f"{_WORDS[number]}; no incomplete result is stored."


@contextmanager
def kept_if_stopped(words: Callable[[], str]) -> Iterator[None]:
    """Print what is left of the work of the block where a signal ends it."""
    try:
        yield
    except Stopped:
        print_error(words())
        raise


class Received:
    """The signal received so far: libraries (torch while it traces) turn `Stopped` into other errors."""

    stop: Stopped | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        # A second Ctrl-C must not stop the cleaning up.
        for heeded in _WORDS:
            signal.signal(heeded, signal.SIG_IGN)
        self.stop = Stopped(number)
        _end_children(signal.SIGTERM)
        raise self.stop


RECEIVED: ContextVar[Received | None] = ContextVar("received", default=None)


def raise_again() -> None:
    """Raise `Stopped` where a signal was received and the program goes on: a library has lost it."""
    if (received := RECEIVED.get()) is not None and received.stop is not None:
        raise received.stop


@contextmanager
def stoppable() -> Iterator[None]:
    """Raise `Stopped` in the block on the first of the signals; end the process after `GRACE_SECONDS`.

    Signals that are ignored already, as in a shell's background jobs, stay ignored.
    """
    received = Received()
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heeded = [number for number in _WORDS if signal.getsignal(number) is not signal.SIG_IGN]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    done = threading.Event()
    watchdog = threading.Thread(target=_watch, args=(reading, done), daemon=True)
    watchdog.start()
    token = RECEIVED.set(received)
    handlers = {number: signal.signal(number, received.take) for number in heeded}
    # Written by the system's own handler, so it arrives even while a library keeps Python waiting.
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        done.set()
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        RECEIVED.reset(token)
        os.close(writing)
        watchdog.join()


def _watch(reading: int, done: threading.Event) -> None:
    with os.fdopen(reading, "rb", buffering=0) as signals:
        for (number,) in iter(lambda: signals.read(1), b""):
            if number in _WORDS and not done.wait(GRACE_SECONDS):
                _end(number)


def _end_children(number: int) -> None:
    """Send a signal to the processes that this one has started, and to theirs; give them a moment to end."""
    until = time.monotonic() + CHILDREN_SECONDS
    for pid in (running := _descendants()):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    while running and time.monotonic() < until:
        time.sleep(0.01)
        running = _descendants()


def _descendants() -> list[int]:
    """Return those processes where the system lists them in /proc; elsewhere they end by themselves.

    torch starts compilers in this process's own group, which may be that of a shell's script as well.
    """
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may end while one looks.
        with suppress(OSError):
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(path.parent.name)] = int(parent)
    family = [os.getpid()]
    for pid in family:
        family += [child for child, parent in parents.items() if parent == pid]
    return family[1:]


def _end(number: int) -> NoReturn:
    """End the process at once with the signal's exit code, without unwinding."""
    # Loaded by whatever has begun to build; nothing is left of anything else.
    store = sys.modules.get("vlexport.bundle.store")
    try:
        _end_children(signal.SIGKILL)
        if store is not None:
            store.remove_own()
        text = f"vlexport: {_WORDS[number]} in the middle of a long step; no incomplete result is stored.\n"
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
    finally:
        end_at_once(128 + number)


def end_at_once(code: int) -> NoReturn:
    """End the process without tearing libraries down, which takes up to 7 s and waits for threads."""
    try:
        # Programs that torch has unpacked, which it removes itself where a process is torn down.
        for folder in unpacked():
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(code)
