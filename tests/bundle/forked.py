"""Stores of an entry, each in a fork that a `FaultLayer` ends: orders in JSON by line, then answers."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import NoReturn

from tests.bundle.examples import store
from tests.fault_layer import FaultLayer, install
from vlexport.errors import VlexportError


def _store(writer: int, *, into: str, data: str, content: str, at: int, action: str) -> NoReturn:
    layer, error = FaultLayer(roots=[into, data], at=at, action=action), ""
    try:
        install(layer)
        store(Path(into), Path(data), payloads={"engine.bin": content.encode()})
    except (VlexportError, OSError) as raised:
        error = f"{type(raised).__name__}: {raised}"
    finally:
        os.write(writer, json.dumps({"operations": layer.found, "error": error}).encode())
        os._exit(0)


def main() -> None:
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _store(writer, **json.loads(line))
        os.close(writer)
        with os.fdopen(reader) as file:
            found = json.loads(file.read() or "{}")
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(json.dumps({"status": status, **found}), flush=True)


if __name__ == "__main__":
    main()
