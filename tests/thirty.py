"""The thirty fault tests: what is asked of each, how much of it a lane runs, and the page of what last ran.

`cases(KIND)` is the number of cases in the lane of this run (VLEXPORT_LANE: fast, full or long). Tests state
how many they had with pytest's `record_property(KIND, count)` or the marker `thirty(KIND, count)`, and
tests/conftest.py keeps the numbers of those that passed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock

ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".pytest_cache" / "thirty.json"
LANES = {"fast": "make test-ci", "full": "make test-full", "long": "make soak` and `make fuzz"}
LANE = os.environ.get("VLEXPORT_LANE", "fast")
EVERY = 0
# Targets of tests/fuzz beside the manifest.
FUZZED = ("safetensors", "config", "image", "video", "npy", "request", "onnx")


@dataclass(frozen=True)
class Kind:
    """Cases of one of the thirty: 0 asked is every one there is, a lane of 0 runs as the one before."""

    number: int
    asked: int
    fast: int
    full: int = 0
    long: int = 0


KINDS: dict[str, Kind] = {
    "damaged bundles": Kind(1, 10_000, 300, 10_200),
    "changed bytes of a manifest": Kind(2, EVERY, 400),
    "changed bytes of payloads": Kind(2, 2_000, 100, 2_000),
    "attacks by path": Kind(3, 60, 60),
    "hostile ONNX files": Kind(4, 200, 12, 200),
    "damaged safetensors files": Kind(5, 5_000, 500, 5_000),
    "pickles, by way in": Kind(6, EVERY, 1),
    "mutated manifests": Kind(7, 20_000, 2_000, 20_000),
    "damaged configs": Kind(7, 1_000, 10, 1_000),
    "fuzzed: manifest": Kind(7, 1_000_000, 0, 0, 1),
    **{f"fuzzed: {name}": Kind(7, EVERY, 0, 0, 1) for name in FUZZED},
    "foreign environments": Kind(8, 24, 24),
    "approvals": Kind(9, EVERY, 1),
    "swaps between check and load": Kind(10, 1_000, 1_000),
    "swaps while an engine is opened": Kind(10, 1_000, 40, 1_000),
    "kills of a stored entry": Kind(11, 200, 12, 200),
    "kills of the store, by operation": Kind(11, EVERY, 1),
    "kills of a build": Kind(11, 50, 16, 50),
    "kills of a build, by operation": Kind(11, EVERY, 0, 1),
    "kills of a check, by operation": Kind(11, EVERY, 0, 1),
    "kills of an encode, by operation": Kind(11, EVERY, 0, 1),
    "failed operations of the store": Kind(12, EVERY, 1),
    "failed operations of a build": Kind(12, EVERY, 0, 1),
    "failed operations of a check": Kind(12, EVERY, 0, 1),
    "failed operations of an encode": Kind(12, EVERY, 0, 1),
    "rounds of 8 builders": Kind(13, 50, 12, 50),
    "rounds of 8 builders without locks": Kind(13, 50, 12, 50),
    "reads by 32 readers": Kind(14, 10_000, 200, 10_000),
    "dead or false holders of locks": Kind(15, EVERY, 1),
    "changes of the key": Kind(16, EVERY, 1),
    "signals in every phase": Kind(17, 80, 20, 80),
    "signals to a build": Kind(17, 80, 0, 200),
    "builds short of memory": Kind(18, EVERY, 1),
    "crashes of a build": Kind(19, EVERY, 1),
    "hostile images": Kind(20, 500, 124, 502),
    "hostile videos": Kind(20, 100, 100),
    "requests round the profile": Kind(21, 10_000, 100, 10_000),
    "malformed embeddings and grids": Kind(22, 2_000, 200, 2_000),
    "combinations of pruning": Kind(23, 300, 0, 300),
    "pictures pruned by pixels": Kind(23, 10_000, 120, 10_000),
    "clips pruned by pixels": Kind(23, 200, 120, 200),
    "clips pushed frame by frame": Kind(23, 200, 6, 200),
    "trained questions of a stream": Kind(23, 2_000, 60, 2_000),
    "pairs of one stream": Kind(23, 1_000, 60, 1_000),
    "prompts beside the walk of their positions": Kind(23, EVERY, 1),
    "mixed requests": Kind(24, 1_000, 0, 1_000, 20_000),
    "minutes of hostile mix": Kind(24, 60, 0, 1, 60),
    "minutes of frames": Kind(24, 60, 1, 1, 60),
    "cache keys": Kind(25, 100_000, 5_000, 100_000),
    "requests of the soak": Kind(26, 20_000, 0, 500, 20_000),
    "runs in 5 processes": Kind(27, 100, 0, 100),
    "items among others": Kind(28, 200, 20, 200),
    "planted bugs": Kind(29, 40, 0, 0, 1),
    "results that are none": Kind(30, EVERY, 1),
}  # fmt: skip


def _commit() -> str:
    """Return the commit of this checkout, with "+" where its package differs; without git, nothing."""
    if shutil.which("git") is None:
        return ""
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    changed = ["git", "diff", "--quiet", "HEAD", "--", "vlexport", "recipes"]
    if head.returncode:
        return ""
    return head.stdout.strip() + "+" * bool(subprocess.run(changed, cwd=ROOT, check=False).returncode)


# As the run began: by its end, which may be an hour later, there may be another.
COMMIT = _commit()


def cases(kind: str) -> int:
    """Return how many cases of a kind this lane runs."""
    row, found = KINDS[kind], 0
    for lane in LANES:
        found = getattr(row, lane) or found
        if lane == LANE:
            break
    return found


def note(kind: str, count: int, where: str, seconds: float) -> None:
    """Keep what a test that passed has run, in place of its last run in this lane."""
    LOG.parent.mkdir(exist_ok=True)
    with FileLock(LOG.with_suffix(".lock")):
        known = json.loads(LOG.read_text()) if LOG.exists() else {}
        date = datetime.now(UTC).strftime("%Y-%m-%d")
        record = {
            "kind": kind,
            "count": count,
            "lane": LANE,
            "where": where,
            "date": date,
            "commit": COMMIT,
            "seconds": seconds,
        }
        known[f"{kind} {LANE} {where}"] = record
        temporary = LOG.with_suffix(".new")
        temporary.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        temporary.replace(LOG)


def held(kind: str, records: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
    """Return the largest number of a lane, all tests of it together, and the records it is made of."""
    lanes = [[each for each in records if (each["kind"], each["lane"]) == (kind, lane)] for lane in LANES]
    return max(((sum(each["count"] for each in lane), lane) for lane in lanes), key=lambda found: found[0])


def exists(where: str) -> bool:
    """Return whether a test still exists; what is no test, such as a command, does."""
    file, _, name = re.sub(r"\[.*", "", where).partition("::")
    return not name or ((ROOT / file).exists() and f"def {name}(" in (ROOT / file).read_text())


def rows_of(text: str) -> dict[str, tuple[int, str]]:
    """Return the rows of a page by kind, with the number of cases that each held."""
    kept = {}
    for line in text.splitlines():
        if re.match(r"\| \d+ \|", line):
            _, kind, _, count, where, *_ = (cell.strip() for cell in line.strip("|").split("|"))
            if all(exists(f"tests/{name}") for name in re.findall(r"`([^`]+)`", where)):
                kept[kind] = int(count.removesuffix(" (fewer)").replace(",", "")), line
    return kept


def page(records: list[dict[str, Any]], earlier: str) -> Iterator[str]:
    """Write the table; a kind of which more ran in another checkout keeps the earlier page's row."""
    known = rows_of(earlier)
    yield "# The thirty fault tests\n"
    lanes = "; ".join(f"{lane} is `{command}`" for lane, command in LANES.items())
    yield (
        "Written by `python -m tests.thirty --write docs/results/faults.md` from what tests recorded when\n"
        "they last passed; a checkout in which fewer ran keeps the row of one with more.\n"
        "A last run has its commit, with `+` where the package differed from it; older rows have none.\n"
        '"every" is every place there is, counted by the run. '
        f"Cases of several tests of one kind are added up. Lanes: {lanes}.\n"
    )
    yield "| | test | asked | held | where | lane | last run |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for kind, row in KINDS.items():
        count, found = held(kind, records)
        before, line = known.get(kind, (0, ""))
        if before > count:
            yield line
            continue
        asked = f"{row.asked:,}" if row.asked else "every"
        names = sorted({re.sub(r"\[.*", "", each["where"]).removeprefix("tests/") for each in found})
        seconds = sum(each["seconds"] for each in found)
        commits = sorted({f"`{commit}`" for each in found if (commit := each.get("commit"))})
        dates = [each["date"] for each in found]
        last = ", ".join([max(dates), *commits, f"{seconds:.0f} s"]) if found else "not run"
        mark = " (fewer)" if found and count < row.asked else ""
        where, lane = "<br>".join(f"`{name}`" for name in names), found[0]["lane"] if found else ""
        yield f"| {row.number} | {kind} | {asked} | {count:,}{mark} | {where} | {lane} | {last} |"


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.thirty", description=__doc__)
    options.add_argument("--write", type=Path, metavar="FILE")
    given = options.parse_args()
    known = json.loads(LOG.read_text()).values() if LOG.exists() else ()
    earlier = given.write.read_text(encoding="utf-8") if given.write and given.write.exists() else ""
    text = "\n".join(page([each for each in known if exists(each["where"])], earlier)) + "\n"
    if given.write:
        given.write.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
