"""The process that builds: what crashes, hangs or eats memory there is told, and leaves nothing behind.

A stand-in for the library misbehaves; where a test says so, the real one is behind it.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.backends.test_tensorrt_faults import ragged_job
from vlexport.backends import BuildLimits
from vlexport.backends._tensorrt import build_process
from vlexport.backends._tensorrt.backend import ENGINE
from vlexport.backends._tensorrt.messages import Job, Network, Record
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.errors import RequestError, ResourceError, UnsupportedError, VlexportError

REAL = pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))
CRASH = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
# The first process that loads this crashes; for later ones it is the library itself.
CRASH_ONCE = """
import os, signal, sys
from pathlib import Path
mark = Path(__file__).with_suffix(".crashed")
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGSEGV)
import tensorrt_rtx
sys.modules[__name__] = tensorrt_rtx
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job that needs no checkpoint; its library is named by each test."""
    none: dict[str, int] = {}
    plan = Network(
        inputs={},
        outputs={},
        unread=(),
        products=none,
        attention=none,
        statistics=none,
        angles=none,
        activations=none,
    )
    asked = Job(
        library="misbehaving",
        model="",
        engine=str(tmp_path / ENGINE),
        targets=("sm89",),
        profiles={},
        plan=plan,
    )
    return ragged_job(asked, tmp_path, ("lengths",))


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the library that the child process will load."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def write(source: str) -> None:
        (folder / "misbehaving.py").write_text(source)

    return write


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """No test here leaves a process, whatever became of its build."""
    yield
    assert workers_of(os.getpid()) == []


def workers_of(parent: int) -> list[int]:
    """Child processes that are still there, those that wait to be counted apart."""
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in listed}
    return [pid for pid, command in commands.items() if b"_tensorrt.build_process" in command]


def build(job: Job, limits: BuildLimits | None = None) -> tuple[Record, list[str]]:
    told: list[tuple[str, float]] = []
    record = build_process.build(
        job, limits or BuildLimits(), lambda phase, share: told.append((phase, share))
    )
    return record, [phase for phase, _ in told]


@REAL
def test_a_crash_is_tried_once_more(job: Job, library):
    library(CRASH_ONCE)
    record, phases = build(job)
    assert record.engine_bytes == Path(job.engine).stat().st_size > 0
    assert phases[0] == "again after a crash"


def test_two_crashes_are_told_with_their_signal(job: Job, library):
    library(CRASH)
    with pytest.raises(VlexportError, match=r"misbehaving crashed twice while building: status -11") as told:
        build(job)
    assert "vlexport repro" in str(told.value)
    assert not Path(job.engine).exists()


def test_a_process_that_the_system_kills_is_out_of_memory(job: Job, library):
    library("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ResourceError, match=r"ran out of memory \(the system killed it\)\. Three ways out"):
        build(job)


@pytest.mark.parametrize("source", ["bytearray(3 * 2**30)", "raise RuntimeError('std::bad_alloc')"])
def test_two_gibibytes_are_not_exceeded(job: Job, library, source: str):
    library(source)
    with pytest.raises(ResourceError, match=r"ran out of memory.*Three ways out: name a smaller profile"):
        build(job, BuildLimits(gibibytes=2))
    assert not Path(job.engine).exists()


@REAL
def test_two_gibibytes_are_enough_for_a_small_engine(job: Job):
    record, _ = build(replace(job, library="tensorrt_rtx"), BuildLimits(gibibytes=2))
    assert record.engine_bytes > 0
    assert record.peak_bytes < 2 * 2**30


@REAL
@pytest.mark.parametrize("mebibytes", [16, 64])
def test_the_library_itself_out_of_memory_is_told_as_such(job: Job, mebibytes: int):
    with pytest.raises(ResourceError, match=r"ran out of memory.*Three ways out: name a smaller profile"):
        build(replace(job, library="tensorrt_rtx"), BuildLimits(gibibytes=mebibytes / 1024))
    assert not Path(job.engine).exists()


def test_a_build_that_takes_too_long_is_stopped(job: Job, library):
    library("import time; time.sleep(600)")
    with pytest.raises(ResourceError, match=r"took longer than 2 seconds and was stopped"):
        build(job, BuildLimits(seconds=2.0))


def test_without_a_limit_of_time_a_build_is_not_stopped(job: Job, library):
    library("import time; time.sleep(0.5); from vlexport.errors import UnsupportedError as E; raise E('end')")
    with pytest.raises(UnsupportedError, match=r"^end$"):
        build(job, BuildLimits(seconds=0))


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 1e10])
def test_a_limit_of_time_that_means_nothing_is_refused(wrong: float):
    with pytest.raises(RequestError, match=r"seconds was asked for; 0 \(no limit\) to 1000000000 expected"):
        BuildLimits(seconds=wrong)


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), 2.0**21])
def test_a_limit_of_memory_that_means_nothing_is_refused(wrong: float):
    with pytest.raises(RequestError, match=r"GiB was asked for; 0 \(no limit\) to 1048576 expected"):
        BuildLimits(gibibytes=wrong)


@REAL
def test_an_exception_of_the_parent_ends_the_child(job: Job):
    def interrupted(phase: str, share: float) -> None:
        raise KeyboardInterrupt(phase, share)

    with pytest.raises(KeyboardInterrupt):
        build_process.build(replace(job, library="tensorrt_rtx"), BuildLimits(), interrupted)
    assert not Path(job.engine).exists()


@REAL
def test_a_disk_that_is_full_keeps_its_error_number(job: Job):
    with pytest.raises(OSError, match=r"No space left on device") as told:
        build(replace(job, library="tensorrt_rtx", engine="/dev/full"))
    assert told.value.errno == 28


@REAL
def test_a_file_of_timings_is_read_and_written_by_the_library(job: Job, tmp_path: Path):
    """TensorRT for RTX has the interface and keeps nothing there, so its file stays as small as it is."""
    asked = replace(job, library="tensorrt_rtx", timings=str(tmp_path / "timings.cache"))
    for _ in range(2):
        build(asked)
        assert 0 < (tmp_path / "timings.cache").stat().st_size < 4096
    (tmp_path / "timings.cache").write_bytes(b"damaged" * 100)
    assert build(asked)[0].engine_bytes > 0


def test_errors_of_ours_keep_their_class_and_words(job: Job, library):
    library("from vlexport.errors import UnsupportedError\nraise UnsupportedError('not this one.')")
    with pytest.raises(UnsupportedError, match=r"^not this one\.$"):
        build(job)


def test_what_the_library_prints_disturbs_nobody(job: Job, library):
    library("print('a banner'); raise MemoryError")
    with pytest.raises(ResourceError, match=r"the build ran out of memory"):
        build(job)


def test_the_child_ends_with_its_parent(job: Job, library, tmp_path: Path):
    """A parent that is killed cannot tell its child, so the child watches the pipe."""
    started = tmp_path / "started"
    library(f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)")
    parent = os.fork()
    if parent == 0:
        try:
            build(job)
        finally:
            os._exit(0)
    pid = int(eventually(started.read_text, started.exists))
    os.kill(parent, 9)
    os.waitpid(parent, 0)
    eventually(bool, lambda: not Path(f"/proc/{pid}").exists())


def eventually(value, true, seconds: float = 60.0):
    """What `value` gives as soon as `true` is."""
    end = time.monotonic() + seconds
    while not (true() and (value() or value is bool)):
        assert time.monotonic() < end
        time.sleep(0.02)
    return value()
