"""Write what pip resolves from the pins of the tests for this platform, each package with its hash.

`pip install --require-hashes -r tests/lock.txt` installs exactly these files. Pins of what a user installs go
into vlexport/tools/tested.txt too, for `vlexport doctor`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def tested() -> str:
    """Return the pins of the dependencies of pyproject.toml, those of extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = (texts for name, texts in project["optional-dependencies"].items() if name != "dev")
    wanted = {Requirement(text).name for text in itertools.chain(project["dependencies"], *extras)}
    lines = (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        line.partition("==")[0].lower(): line.lower() for line in lines if "==" in line and line[0] != "#"
    }
    return "".join(f"{pins[name]}\n" for name in sorted(wanted & set(pins)))


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.lock", description=__doc__)
    options.add_argument("--write", type=Path, default=ROOT / "tests" / "lock.txt", metavar="FILE")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        words += ["--no-build-isolation", "--report", str(report), "-c", "tests/constraints.txt", ".[dev]"]
        subprocess.run(words, cwd=ROOT, check=True)
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    lines = [
        "# Written by `make lock`, for "
        + sys.platform
        + f" and Python {sys.version_info[0]}.{sys.version_info[1]}."
    ]
    for each in sorted(found, key=lambda each: each["metadata"]["name"].lower()):
        hashes = each["download_info"].get("archive_info", {}).get("hashes", {})
        if hashes:
            name, release = each["metadata"]["name"], each["metadata"]["version"]
            lines.append(f"{name}=={release} --hash=sha256:{hashes['sha256']}")
    given.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    (ROOT / "vlexport" / "tools" / "tested.txt").write_text(tested(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
