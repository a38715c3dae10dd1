"""Libraries that report to their makers when loaded do not do so: no file is written, no socket opened."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport._build.export import export
from vlexport.backends import Options, find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.recipe import recipe_for

BACKENDS = [name for name in ("onnxruntime", "openvino") if find_backend(name).missing() is None]

# Opens the engine, and prints which files and sockets outside of it the process holds then.
OPEN = """
import os, sys, time
from contextlib import closing
from pathlib import Path
from vlexport.backends import EngineSpec, Folder, Options, find_backend
from vlexport.specs import ShapeProfile

# Opening needs the names of outputs only to run.
spec = EngineSpec(inputs=(), outputs=(), profile=ShapeProfile("any", {}))
with closing(find_backend(sys.argv[1]).open(Folder(Path(sys.argv[2])), spec, Options(threads=1))):
    time.sleep(0.5)
    held = {os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.exists()}
print(sorted(path for path in held if "socket:" in path or path.startswith(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
def test_opening_an_engine_reports_nothing_to_anybody(name: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_tiny_qwen2_5_vl(tmp_path / "checkpoint", depth=1))
    backend, engine, home = find_backend(name), tmp_path / "engine", tmp_path / "home"
    engine.mkdir()
    home.mkdir()
    graph = export(recipe_for(checkpoint), checkpoint, dtype="float32", form=backend.form)
    backend.build(graph, Options(), engine)
    known = ("ORT_DISABLE_TELEMETRY", "CI", "TF_BUILD", "JENKINS_URL", "GITHUB_ACTIONS", "XDG_CACHE_HOME")
    environment = {key: value for key, value in os.environ.items() if key not in known}
    ran = subprocess.run(
        [sys.executable, "-c", OPEN, name, str(engine), str(home)],
        env={**environment, "HOME": str(home)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
    assert sorted(path.name for path in home.rglob("*")) == []
