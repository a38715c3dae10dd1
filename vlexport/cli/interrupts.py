"""Ctrl-C and SIGTERM: work is unwound, and a process that does not get there in time ends all the same."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# A call into a library is not interrupted, and an exception may get lost in one; people wait five seconds.
GRACE_SECONDS = 4.0

_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Stopped(BaseException):
    """A signal, raised where the program stands, so that staged work is removed on the way out."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number
        self.message = f"{_WORDS[signal.Signals(number)]}; no half bundle is left."


class Heard:
    """What was heard so far: libraries (torch while it traces) turn `Stopped` into errors of their own."""

    stop: Stopped | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals."""
        # A second Ctrl-C must not stop the cleaning up.
        for heeded in _WORDS:
            signal.signal(heeded, signal.SIG_IGN)
        self.stop = Stopped(number)
        raise self.stop


@contextmanager
def stoppable() -> Iterator[Heard]:
    """Within, the first SIGINT or SIGTERM raises `Stopped`, and the process is gone after `GRACE_SECONDS`.

    Signals that are ignored already, as in a shell's background jobs, stay ignored.
    """
    heard = Heard()
    if threading.current_thread() is not threading.main_thread():
        yield heard
        return
    heeded = [number for number in _WORDS if signal.getsignal(number) is not signal.SIG_IGN]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    done = threading.Event()
    watchdog = threading.Thread(target=_watch, args=(reading, done), daemon=True)
    watchdog.start()
    handlers = {number: signal.signal(number, heard.take) for number in heeded}
    # Written by the system's own handler, so it arrives even while a library keeps Python waiting.
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield heard
    finally:
        done.set()
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(writing)
        watchdog.join()


def _watch(reading: int, done: threading.Event) -> None:
    with os.fdopen(reading, "rb", buffering=0) as signals:
        for (number,) in iter(lambda: signals.read(1), b""):
            if number in set(_WORDS) and not done.wait(GRACE_SECONDS):
                word = _WORDS[signal.Signals(number)]
                text = f"vlexport: {word} in the middle of a long step; the next build tidies up.\n"
                os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
                os._exit(128 + number)
