"""The process that builds: what crashes, hangs or eats memory there is an error, and leaves nothing behind.

A stand-in for the library misbehaves; where a test is marked so, the real one is behind it.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests._build.test_build_faults import (
    build_on_a_full_disk,
    builds,
    caught_interrupts,
    leftovers,
    visible,
)
from tests.backends.test_tensorrt_network import ragged_job
from tests.fire import Fire, Stove, stove
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.backends import BuildLimits
from vlexport.backends._tensorrt import build_process
from vlexport.backends._tensorrt.messages import Job, Record
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.bundle import Bundle
from vlexport.errors import RequestError, ResourceError, UnsupportedError, VlexportError

__all__ = ["caught_interrupts"]

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
    return ragged_job(tmp_path, ("lengths",), library="misbehaving")


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)

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
    phases: list[str] = []
    record = build_process.build(job, limits or BuildLimits(), lambda phase, _: phases.append(phase))
    return record, phases


@REAL
@pytest.mark.thirty("crashes of a build", 1)
def test_a_crash_is_tried_once_more(job: Job, library):
    library(CRASH_ONCE)
    record, phases = build(job)
    assert record.engine_bytes == Path(job.engine).stat().st_size > 0
    assert phases[0] == "again after a crash"


@pytest.mark.thirty("crashes of a build", 1)
def test_two_crashes_are_an_error_with_their_signal(job: Job, library):
    library(CRASH)
    with pytest.raises(VlexportError, match=r"misbehaving crashed twice while building: status -11") as error:
        build(job)
    assert "vlexport repro" in str(error.value)
    assert not Path(job.engine).exists()


@pytest.mark.parametrize(
    ("source", "gibibytes", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 0, r" \(the system killed it\)\."),
        ("bytearray(3 * 2**30)", 2, ""),
        ("raise RuntimeError('std::bad_alloc')", 2, ""),
        # What the library prints disturbs nobody.
        ("print('a banner'); raise MemoryError", 0, ""),
    ],
)
@pytest.mark.thirty("builds short of memory", 1)
def test_a_build_without_memory_is_an_error_with_ways_out(job, library, source, gibibytes, reason):
    library(source)
    with pytest.raises(ResourceError, match=rf"ran out of memory{reason}.*Three ways out: name a smaller"):
        build(job, BuildLimits(gibibytes=gibibytes))
    assert not Path(job.engine).exists()


@REAL
def test_two_gibibytes_are_enough_for_a_small_engine(job: Job):
    record, _ = build(replace(job, library="tensorrt_rtx"), BuildLimits(gibibytes=2))
    assert record.engine_bytes > 0
    assert record.peak_bytes < 2 * 2**30


@REAL
@pytest.mark.parametrize("mebibytes", [16, 64])
def test_the_library_itself_out_of_memory_is_reported_as_such(job: Job, mebibytes: int):
    with pytest.raises(ResourceError, match=r"ran out of memory.*Three ways out: name a smaller profile"):
        build(replace(job, library="tensorrt_rtx"), BuildLimits(gibibytes=mebibytes / 1024))
    assert not Path(job.engine).exists()


def test_a_build_that_takes_too_long_is_stopped(job: Job, library):
    library("import time; time.sleep(600)")
    with pytest.raises(ResourceError, match=r"took longer than 2 seconds and was stopped"):
        build(job, BuildLimits(seconds=2.0))


def test_without_a_limit_of_time_a_build_is_not_stopped_and_errors_of_ours_keep_their_class(job, library):
    ours = "import time; time.sleep(0.5); from vlexport.errors import UnsupportedError as E; "
    for raised in ("raise E('end')", "raise type('Own', (E,), {})('end')"):
        library(ours + raised)
        with pytest.raises(UnsupportedError, match=r"^end$"):
            build(job, BuildLimits(seconds=0))


def test_a_limit_that_means_nothing_is_refused():
    for wrong in (-1.0, float("nan"), float("inf"), 1e10):
        with pytest.raises(RequestError, match=r"seconds given; 0 \(no limit\) to 1000000000 expected"):
            BuildLimits(seconds=wrong)
        with pytest.raises(RequestError, match=r"GiB given; 0 \(no limit\) to 1048576 expected"):
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
    with pytest.raises(OSError, match=r"No space left on device") as raised:
        build(replace(job, library="tensorrt_rtx", engine="/dev/full"))
    assert raised.value.errno == 28


@pytest.mark.seconds
@REAL
def test_a_file_of_timings_is_read_and_written_by_the_library(job: Job, tmp_path: Path):
    """TensorRT for RTX has the interface and keeps nothing there, so its file stays as small as it is."""
    spec = replace(job, library="tensorrt_rtx", timings=str(tmp_path / "timings.cache"))
    for _ in range(2):
        build(spec)
        assert 0 < (tmp_path / "timings.cache").stat().st_size < 4096
    (tmp_path / "timings.cache").write_bytes(b"damaged" * 100)
    assert build(spec)[0].engine_bytes > 0


def test_the_child_ends_with_its_parent(job: Job, library, tmp_path: Path):
    """A parent that is killed cannot inform its child, so the child watches the pipe."""
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


OPTIONS = ("--backend", "tensorrt_rtx", "--targets", "sm89", "--profile", "thumbnail", "--dtype")
# In the parent alone, in both, in the library, in the check.
PHASES = ("measure ranges", "export", "translate", "parse", "Building engine", "check engine")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("interrupted") / "tiny", depth=1)


@pytest.fixture(scope="module")
def warm(caught_interrupts, checkpoint, tmp_path_factory):
    into, logs = tmp_path_factory.mktemp("warm"), tmp_path_factory.mktemp("logs")
    with stove([checkpoint, *OPTIONS, "float32", "--output-dir", into], logs) as found:
        yield found


@pytest.fixture
def words(checkpoint: Path, tmp_path: Path) -> tuple[object, ...]:
    return (checkpoint, *OPTIONS, "float16", "--output-dir", tmp_path / "engines")


def reach(fire: Fire, phase: str) -> list[int]:
    """Wait for a phase; processes that the build has started by then."""
    eventually(bool, lambda: f"s  {phase}" in fire.messages)
    return workers_of(fire.pid)


def check_gone(pids: list[int]) -> None:
    eventually(bool, lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.slow
@REAL
@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_each_phase_leaves_nothing_but_a_built_engine(warm, words, tmp_path, phase):
    fire = warm.build(*words)
    pids = reach(fire, phase)
    os.kill(fire.pid, signal.SIGINT)
    assert fire.wait() == 130, fire.messages
    assert "interrupted; no incomplete result is stored" in fire.messages
    kept = leftovers(tmp_path / "engines")
    assert (visible(tmp_path / "engines"), len(kept)) == ([], phase.startswith("check"))
    check_gone(pids)


@pytest.mark.slow
@REAL
def test_a_build_killed_inside_the_library_leaves_no_half_bundle(warm: Stove, words, tmp_path: Path):
    fire = warm.build(*words)
    pids = reach(fire, "parse")
    os.kill(fire.pid, signal.SIGKILL)
    assert fire.wait() == -signal.SIGKILL
    assert visible(tmp_path / "engines") == []
    check_gone(pids)
    path = builds(warm, *words)
    assert (visible(tmp_path / "engines"), leftovers(tmp_path / "engines")) == ([path], [])
    # It waits for its device, and everything else about it is right.
    assert Bundle.open(path).manifest.parity.status == "not_run"


@pytest.mark.slow
@REAL
@pytest.mark.parametrize("size", [100_000, 2_500_000])
def test_a_limit_on_file_sizes_is_exit_code_7_and_leaves_nothing(warm: Stove, words, tmp_path, size: int):
    fire = warm.build(*words, limit="file", size=size)
    assert fire.wait() == 7, fire.messages
    assert "the disk is full, or a quota or size limit is reached" in fire.messages
    assert (visible(tmp_path / "engines"), leftovers(tmp_path / "engines")) == ([], [])


# Full while the graph is written, while its weights are, while the engine is.
@pytest.mark.slow
@REAL
@pytest.mark.parametrize("room", ["100k", "800k", "3m"])
def test_a_full_disk_is_exit_code_7_and_leaves_nothing(checkpoint: Path, tmp_path: Path, room: str):
    build_on_a_full_disk(f"{checkpoint} {' '.join(OPTIONS)} bfloat16", room, tmp_path)
