"""Each promise of SECURITY.md names a test that exists; each kind of the thirty has tests that count it."""

import re

from tests.repo.tree import ROOT
from tests.thirty import KINDS, exists, page


def test_the_tests_that_hold_the_promises_exist():
    named = re.findall(r"`(tests/\S+::\w+)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) >= 15
    assert [name for name in named if not (ROOT / name.partition("::")[0]).exists() or not exists(name)] == []


def test_every_kind_of_the_thirty_is_counted_by_a_test():
    paths = [path for path in (ROOT / "tests").rglob("*.py") if path.name != "thirty.py"]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert [kind for kind in KINDS if f'"{kind}"' not in sources and not kind.startswith("fuzzed: ")] == []
    assert {row.number for row in KINDS.values()} == set(range(1, 31))


def test_a_row_has_the_commits_of_its_runs_and_an_earlier_page_is_read():
    where = "tests/repo/test_security.py::test_every_kind_of_the_thirty_is_counted_by_a_test"
    record = {"lane": "full", "where": where, "date": "2026-11-25", "seconds": 1.2}
    records = [
        record | {"kind": "attacks by path", "count": 60, "commit": "fefc214+"},
        record | {"kind": "hostile videos", "count": 100},
    ]
    shown = where.removeprefix("tests/")
    kept = f"| 7 | damaged configs | 1,000 | 999 (fewer) | `{shown}` | full | 2026-11-23, 53 s |"
    written = list(page(records, kept))
    assert kept in written
    (row,) = (line for line in written if "attacks by path" in line)
    assert row.endswith("| full | 2026-11-25, `fefc214+`, 1 s |")
    (row,) = (line for line in written if "hostile videos" in line)
    assert row.endswith("| full | 2026-11-25, 1 s |")


def test_the_lock_has_the_pins_of_the_tests_each_with_a_hash():
    locked = (ROOT / "tests" / "lock.txt").read_text(encoding="utf-8").splitlines()[1:]
    pins = (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8")
    known = {_plain(name): release for name, release in re.findall(r"^([\w.-]+)==(\S+)", pins, re.MULTILINE)}
    assert len(locked) > 50
    wrong = []
    for line in locked:
        found = re.fullmatch(r"([\w.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        if found is None or known.get(_plain(found[1]), found[2]) != found[2].partition("+")[0]:
            wrong.append(line)
    assert wrong == []


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
