"""What every test runs under: no network, no waiting for the disk, approvals that vanish."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests import thirty

# Read by huggingface_hub when it is imported, so it is set before any test module is.
os.environ["HF_HUB_OFFLINE"] = "1"

# Read by ONNX Runtime when it is imported, which some tests do by themselves.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# The same examples every time, and no verdict that depends on how busy the machine is.
settings.register_profile(
    "house", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("house")


# Long files first, so that neither process waits at the end. In a fresh checkout the first build compiles the
# graphs of bundles for half a minute, for which others wait: seven files that need none come before the next.
FIRST = [
    "strangers/test_strangers.py",
    "parity/test_check.py",
    "media/test_hostile_videos.py",
    "reference/test_large_calls.py",
    "media/test_videos.py",
    "bundle/test_crashes.py",
    "mutation/test_mutants.py",
    "reference/test_tables.py",
    "cli/test_refusals.py",
    "onnx/test_portable.py",
    "runtime/test_recorded_answers.py",
    "recipes/test_recorded_requests.py",
    "backends/test_boundaries.py",
    "recipes/test_qwen2_5_vl.py",
    "_build/test_build.py",
    "backends/test_openvino.py",
    "cli/test_run.py",
    "cli/test_encode.py",
    "cli/test_build.py",
    "onnx/test_passes.py",
    "recipes/test_minicpmv.py",
    "cli/test_bench.py",
    "_build/test_build_faults.py",
    "backends/test_tensorrt_build_process.py",
    "repo/test_no_effects.py",
    "recipes/test_families.py",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, help="run at most so many cases of each test, the first ones")


# Behind the choice by marks.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if most := config.getoption("cases"):
        tests = Counter[str]()
        further = {item for item in items if _count(tests, item) > most}
        config.hook.pytest_deselected(items=list(further))
        items[:] = [item for item in items if item not in further]
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(FIRST)}
    for item in items:
        item.user_properties += [mark.args for mark in item.iter_markers("thirty")]
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def _count(tests: Counter[str], item: pytest.Item) -> int:
    """Count one more case of its test."""
    test = item.nodeid.partition("[")[0]
    tests[test] += 1
    return tests[test]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep how many cases of the thirty fault tests a test that passed has run."""
    # Workers send their reports to the process that started them.
    if report.when == "call" and report.passed and "PYTEST_XDIST_WORKER" not in os.environ:
        for kind, count in report.user_properties:
            if kind in thirty.KINDS:
                thirty.note(kind, int(str(count)), report.nodeid, round(report.duration, 1))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of the run that all workers see: a bundle built there by one is a cache hit for the others."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def once(shared: Path) -> Callable[[str, Callable[[], Any]], Any]:
    """Make a JSON value once per run: the first worker stores it, the others read it."""

    def value(name: str, make: Callable[[], Any]) -> Any:
        path = shared / f"{name}.json"
        with FileLock(path.with_suffix(".lock")):
            if not path.exists():
                path.write_text(json.dumps(make()), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))

    return value


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_the_disk() -> Iterator[None]:
    """Write without fsync: only a machine that loses power would differ; tests of syncing count the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def data_folder(shared: Path, pytestconfig: pytest.Config) -> Iterator[None]:
    """The user's data folder vanishes, the cache is this checkout's own; child processes see them too.

    Compiled graphs are kept from one run to the next, as a user's are.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(shared / "data"))
        kept = getattr(pytestconfig, "cache", None)
        patch.setenv("XDG_CACHE_HOME", str(kept.mkdir("user") if kept else shared / "cache"))
        yield
