"""Write what pip resolves from the pins of the tests for this platform, each package with its hash.

`pip install --require-hashes -r tests/lock.txt` installs exactly these files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Run the program."""
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
