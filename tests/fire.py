"""Builds that a test can kill, starve and interrupt, each a process with the whole command line in it.

Loading torch takes longer than what is to be disturbed. So one process, the stove, loads it, makes a first
build to be warm, and forks for every further one: from the words of the command line to its exit code.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.fault_layer import FaultLayer, install

# In the environment of a command, and so of whatever it starts.
MARK = "VLEXPORT_TEST_STOVE"
_LIMITS = {"file": resource.RLIMIT_FSIZE, "memory": resource.RLIMIT_AS}


@dataclass(frozen=True, kw_only=True)
class Fire:
    """A build that was started; `log` is where its stderr goes."""

    stove: Stove
    pid: int
    log: Path

    def wait(self) -> int:
        """Its exit code; of a killed one the signal's number below zero."""
        return int(self.stove.send({"wait": self.pid}))

    def stop(self, number: int) -> tuple[int, float]:
        """Send a signal and wait: its exit code, and the seconds between."""
        begun = time.monotonic()
        os.kill(self.pid, number)
        return self.wait(), time.monotonic() - begun

    @property
    def messages(self) -> str:
        return self.log.read_text(encoding="utf-8") if self.log.exists() else ""

    @property
    def operations(self) -> list[str]:
        """The operations that a `FaultLayer` counted."""
        return list(json.loads(self.log.with_suffix(".json").read_text(encoding="utf-8")))

    @property
    def printed(self) -> list[str]:
        return self.log.with_suffix(".out").read_text(encoding="utf-8").splitlines()


class Stove:
    """The parent of the builds, from here."""

    def __init__(self, process: subprocess.Popen[str], logs: Path, mark: str) -> None:
        self.process, self.logs, self.mark, self.num_builds = process, logs, mark, 0

    def running(self) -> list[int]:
        """Return the processes of its builds."""
        return [pid for pid in running(self.mark) if pid != self.process.pid]

    def build(self, *words: object, limit: str = "", size: int = 0) -> Fire:
        """Start `vlexport build WORDS`, with a limit on file sizes or on memory beyond what it has."""
        return self.start("build", *words, limit=limit, size=size)

    def start(self, *words: object, limit: str = "", size: int = 0, fault: object = None) -> Fire:
        self.num_builds += 1
        log = self.logs / f"{self.num_builds}.err"
        order = {"words": [*map(str, words)], "log": str(log), "limit": limit, "size": size, "fault": fault}
        return Fire(stove=self, pid=int(self.send(order)), log=log)

    def send(self, order: dict[str, object]) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


def running(mark: str) -> list[int]:
    """Return the processes that began with a mark in their environment, whoever their parent is by now."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*"):
        # A process may end while one looks.
        with suppress(OSError):
            if wanted in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


@contextmanager
def stove(warm_up: Sequence[object], logs: Path) -> Iterator[Stove]:
    """A stove that has made the build `warm_up` (words of the command line)."""
    command = [sys.executable, "-m", "tests.fire", *map(str, warm_up)]
    mark = uuid.uuid4().hex
    environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: mark}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Stove(process, logs, mark)
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    """Do what the lines of stdin order: fork a build, or wait for one."""
    from vlexport.cli import run

    # Answers have a stream of their own; what the first build prints is not one.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    assert run(["build", *sys.argv[1:]]) == 0
    answers.write("ready\n")
    for line in sys.stdin:
        order = json.loads(line)
        if "wait" in order:
            answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(order['wait'], 0)[1])}\n")
            continue
        child = os.fork()
        if child == 0:
            _burn(**order)
        answers.write(f"{child}\n")


def _burn(*, words: list[str], log: str, limit: str, size: int, fault: dict[str, Any] | None) -> NoReturn:
    from vlexport.cli import run

    code, layer = 99, FaultLayer(**fault) if fault else None
    try:
        for stream, name in ((1, f"{Path(log).with_suffix('.out')}"), (2, log)):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), stream)
        if limit:
            most = size + (_memory() if limit == "memory" else 0)
            resource.setrlimit(_LIMITS[limit], (most, most))
        if layer:
            install(layer)
        code = run(words)
        sys.stdout.flush()
    finally:
        if layer:
            Path(log).with_suffix(".json").write_text(json.dumps(layer.found), encoding="utf-8")
        os._exit(code)


def _memory() -> int:
    """Bytes of address space that this process has."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    main()
