"""A build as a process of its own, to be killed, starved and raced: `builder.py INTO DATA NAME [options]`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from tests.bundle.examples import MANIFEST
from vlexport.bundle import store
from vlexport.bundle.store import Staging, finished, staged
from vlexport.errors import VlexportError


def write_slowly(staging: Staging, num_files: int, pause: float) -> None:
    """Many small files, as a backend would that writes for minutes."""
    for number in range(num_files):
        path = staging.folder / f"part{number % 3}" / f"{number}.bin"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            file.write(bytes([number]) * 4096)
        time.sleep(pause)


def build(into: Path, data: Path, name: str, options: argparse.Namespace) -> str:
    """One build, or a hit; returns what it was and the digest."""
    with staged(into, name, user_data=data) as staging:
        hit = None if options.force else finished(staging.final, MANIFEST.key, user_data=data)
        if hit is not None:
            return f"hit {hit.digest}"
        write_slowly(staging, options.files, options.pause)
        manifest = replace(MANIFEST, files=staging.files(), options={"builder": os.getpid() % 7})
        return f"built {staging.publish(manifest).digest}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("into", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--files", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--force", action="store_true")
    parser.add_argument("--no-lock", action="store_true")
    options = parser.parse_args()
    # A killed process loses nothing of what it wrote, and dozens of builds would wait for the disk.
    os.fsync = lambda _: None  # type: ignore[assignment]
    if options.no_lock:
        store._entry_lock = lambda *_: nullcontext(False)  # type: ignore[assignment]
    print("ready", flush=True)
    sys.stdin.readline()
    try:
        for name in options.names:
            print(build(options.into, options.data, name, options), flush=True)
    except VlexportError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
