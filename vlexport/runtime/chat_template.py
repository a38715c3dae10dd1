"""Chat templates of checkpoints, each rendered in a process of its own.

A template is a program of a checkpoint's publisher. jinja2's sandbox keeps it from Python's objects, but not
from loops that never end or texts that fill the memory: these end the process, and one request.
"""

from __future__ import annotations

import os
import re
import subprocess
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock, Timer

from vlexport import system
from vlexport.errors import InputError, MisfitError

LEAST_JINJA = (3, 1, 6)
START = "from vlexport.runtime._render import main; main()"
# Of waiting, on a busy machine; processor time is limited first.
DEADLINE_SECONDS = 60.0
MAX_TEXT_BYTES = 2**27


class ChatTemplate:
    """A template and the names that it sees besides messages; its process begins with the first rendering."""

    def __init__(self, template: str, names: Mapping[str, object], where: Path) -> None:
        self.template, self.names, self.where = template, dict(names), where
        self._turn = Lock()
        self._running: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize | None = None  # type: ignore[type-arg]
        self._owner = 0

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        with self._turn:
            if self._running is None or self._running.poll() is not None or self._owner != os.getpid():
                self._start()
            return self._answer({**self.names, "messages": list(map(_plain, messages))})

    def _start(self) -> None:
        self.close()
        _require_library()
        self._running = process = subprocess.Popen(
            system.command(START),
            env=system.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._owner = os.getpid()
        self._end = weakref.finalize(self, _stop, process)
        self._answer(self.template)

    def _answer(self, message: object) -> str:
        # Imports jinja2, which an encode does without.
        from vlexport.runtime import _render

        process = self._running
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        timer = Timer(DEADLINE_SECONDS, process.kill)
        timer.start()
        answer = None
        try:
            with suppress(BrokenPipeError):
                _render.send(process.stdin, message)  # type: ignore[arg-type]
                answer = _render.receive(process.stdout, MAX_TEXT_BYTES)  # type: ignore[arg-type]
        finally:
            timer.cancel()
            timer.join()
            if answer is None:
                self.close()
        if answer is None:
            raise InputError(
                f"{self.where}: the checkpoint's chat template takes more than {_render.SECONDS} s, "
                f"{_render.MEMORY_BYTES >> 20} MiB or {MAX_TEXT_BYTES >> 20} MiB of text for these messages "
                f"(its process ended with status {process.returncode}). Send shorter ones, or pass the whole "
                "prompt as raw_prompt."
            )
        if "refused" in answer:
            raise InputError(
                f"{self.where}: the checkpoint's chat template refuses these messages ({answer['refused']}). "
                "Expected roles and parts as in the checkpoint's own examples."
            )
        return str(answer.get("text", ""))

    def close(self) -> None:
        """End the process; the next rendering begins another."""
        if self._end is not None and self._owner == os.getpid():
            self._end()
        self._running = self._end = None


def _require_library() -> None:
    try:
        installed = version("jinja2")
    except PackageNotFoundError:
        installed = "none"
    if tuple(int(part) for part in re.findall(r"\d+", installed)[:3]) < LEAST_JINJA:
        least = ".".join(map(str, LEAST_JINJA))
        raise MisfitError(
            f"jinja2 {installed} is installed; chat templates need {least} or newer: older sandboxes have "
            f"known ways out. pip install 'jinja2>={least}' installs it; `vlexport doctor` names such "
            "libraries."
        )


def _plain(message: Mapping[str, object]) -> dict[str, object]:
    plain = {name: value for name, value in message.items() if value is not None}
    thoughts = [plain[name] for name in ("reasoning_content", "thinking", "reasoning") if name in plain]
    return {"thinking": thoughts[0], **plain, "reasoning_content": thoughts[0]} if thoughts else plain


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # Closes its pipes and waits for its end.
    with suppress(BrokenPipeError), process:
        pass
