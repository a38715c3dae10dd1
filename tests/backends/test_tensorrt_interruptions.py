"""Builds with TensorRT for RTX that are killed, interrupted and starved: a whole bundle or none."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._build.test_build_faults import builds, in_namespace, leftovers, visible
from tests.backends.test_tensorrt_build_process import eventually, workers_of
from tests.fire import Fire, Stove, stove
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.backends.tensorrt_rtx import BACKEND as RTX
from vlexport.bundle import Bundle

pytestmark = [pytest.mark.slow, pytest.mark.skipif(RTX.missing() is not None, reason=str(RTX.missing()))]
OPTIONS = ("--backend", "tensorrt_rtx", "--targets", "sm89", "--profile", "thumbnail", "--dtype")
# In the parent alone, in both, in the library, in the check.
PHASES = ("measure ranges", "export", "translate", "parse", "Building engine", "check engine")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("interrupted") / "tiny", depth=1)


@pytest.fixture(scope="module")
def caught_interrupts() -> Iterator[None]:
    """Shells start background jobs with Ctrl-C ignored, and children inherit that; here it is caught."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def warm(
    caught_interrupts: None, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stove]:
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


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_each_phase_leaves_nothing_but_a_built_engine(
    warm: Stove, words, tmp_path: Path, phase: str
):
    fire = warm.build(*words)
    pids = reach(fire, phase)
    os.kill(fire.pid, signal.SIGINT)
    assert fire.wait() == 130, fire.messages
    assert "interrupted; no incomplete result is stored" in fire.messages
    kept = leftovers(tmp_path / "engines")
    assert (visible(tmp_path / "engines"), len(kept)) == ([], phase.startswith("check"))
    check_gone(pids)


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


@pytest.mark.parametrize("size", [100_000, 2_500_000])
def test_a_limit_on_file_sizes_is_exit_code_7_and_leaves_nothing(warm: Stove, words, tmp_path, size: int):
    fire = warm.build(*words, limit="file", size=size)
    assert fire.wait() == 7, fire.messages
    assert "the disk is full, or a quota or size limit is reached" in fire.messages
    assert (visible(tmp_path / "engines"), leftovers(tmp_path / "engines")) == ([], [])


# Full while the graph is written, while its weights are, while the engine is.
@pytest.mark.parametrize("room", ["100k", "800k", "3m"])
def test_a_full_disk_is_exit_code_7_and_leaves_nothing(checkpoint: Path, tmp_path: Path, room: str):
    program = f"""
        mkdir disk && mount -t tmpfs -o size={room} none disk && cd disk || exit 9
        "$1" build {checkpoint} {" ".join(OPTIONS)} bfloat16 -o engines; echo "code $?"; ls -A engines
    """
    ran = in_namespace(program, tmp_path)
    code, *entries = ran.stdout.splitlines()
    assert code == "code 7", ran.stderr
    assert [entry for entry in entries if not entry.startswith(".lock-")] == []
    assert "vlexport: engines: the disk is full" in ran.stderr
