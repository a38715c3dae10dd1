"""Builds that are killed, starved, interrupted, run side by side: there is a whole bundle or none."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.fire import Fire, Stove, stove
from tests.thirty import cases
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.bundle import Bundle
from vlexport.cli import interrupts
from vlexport.parity.inputs_exact import guarded

SCRIPT = Path(sys.executable).with_name("vlexport")
MEBI = 2**20
# From a signal to the end of the process, as people are promised; of these, four are the grace of a library.
SECONDS = 5.0


@pytest.fixture(scope="module", autouse=True)
def caught_interrupts() -> Iterator[None]:
    """Catch Ctrl-C, which shells have background jobs ignore and their children inherit, the stove too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("checkpoints") / "tiny", depth=1)


@pytest.fixture(scope="module")
def warm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stove]:
    into, logs = tmp_path_factory.mktemp("warm"), tmp_path_factory.mktemp("logs")
    with stove([checkpoint, "--backend", "eager", "--output-dir", into], logs) as found:
        yield found


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "engines"


def visible(into: Path) -> list[Path]:
    return sorted(path for path in into.glob("*") if not path.name.startswith("."))


def leftovers(into: Path) -> list[str]:
    return [path.name for path in into.glob(".*") if not path.name.startswith(".lock-")]


def check_whole(into: Path) -> None:
    """Every entry that can be seen is complete, unaltered, trusted and passed."""
    for path in visible(into):
        assert Bundle.open(path).manifest.parity.status == "passed"


@contextmanager
def watched(into: Path) -> Iterator[threading.Lock]:
    """Somebody looks at the folder all the time, and never sees half an entry; the lock shuts the eyes."""
    done, eyes, seen = threading.Event(), threading.Lock(), []

    def look() -> None:
        while not done.wait(0.02):
            try:
                with eyes:
                    check_whole(into)
            except Exception as error:  # noqa: BLE001  shown by the assertion below
                seen.append(error)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield eyes
    finally:
        done.set()
        watcher.join()
    assert seen == []


def meet(fire: Fire, words: str) -> None:
    """Wait until a build has printed these words."""
    begun = time.monotonic()
    while words not in fire.messages:
        assert time.monotonic() - begun < 120, fire.messages
        time.sleep(0.01)


def builds(warm: Stove, *words: object) -> Path:
    """One build that nobody disturbs."""
    fire = warm.build(*words)
    assert fire.wait() == 0, fire.messages
    return Path(fire.printed[-1])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", pytest.param("onnxruntime", marks=pytest.mark.full)])
def test_a_build_killed_at_a_random_moment_leaves_no_half_bundle(
    warm, checkpoint, into, backend, record_property
):
    attempts = cases("kills of a build") // 2
    words = (checkpoint, "--backend", backend, "--output-dir", into)
    started = time.monotonic()
    path = builds(warm, *words)
    usual = time.monotonic() - started
    shutil.rmtree(path)
    source, outcomes = random.Random(backend), list[tuple[int, tuple[Path, ...]]]()
    with watched(into) as eyes:
        for _ in range(attempts):
            fire, moment = warm.build(*words), source.uniform(0.0, usual)
            time.sleep(moment)
            os.kill(fire.pid, signal.SIGKILL)
            outcomes.append((fire.wait(), tuple(visible(into))))
            check_whole(into)
            if path.exists():
                # It came through: builds are quicker than thought, and the next would be a cache hit.
                usual = min(usual, moment)
                with eyes:
                    shutil.rmtree(path)
        assert outcomes.count((-signal.SIGKILL, ())) >= attempts / 2
        assert set(outcomes) <= {(-signal.SIGKILL, ()), (-signal.SIGKILL, (path,)), (0, (path,))}
        assert len(leftovers(into)) <= 1, "every build removes what the ones before it left"
        assert builds(warm, *words) == path
    check_whole(into)
    assert visible(into) == [path]
    assert leftovers(into) == []
    record_property("kills of a build", attempts)


# The engine of this tower is one file of 2.6 MB, or two of 90 kB and 800 kB; its manifest takes 19 kB.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("eager", 1_000_000),
        ("onnxruntime", 50_000),
        *(
            pytest.param(*each, marks=pytest.mark.full)
            for each in (("eager", 20_000), ("onnxruntime", 400_000))
        ),
    ],
)
def test_a_limit_on_file_sizes_is_exit_code_7_and_leaves_nothing(warm, checkpoint, into, backend, size):
    words = (checkpoint, "--backend", backend, "--output-dir", into)
    fire = warm.build(*words, limit="file", size=size)
    assert fire.wait() == 7, fire.messages
    reason = "the disk is full, or a quota or size limit is reached"
    assert f"vlexport: [resource] {into}: {reason}" in fire.messages
    assert "Free some space or give another folder" in fire.messages
    assert (visible(into), leftovers(into)) == ([], [])
    builds(warm, *words)


@pytest.mark.slow
@pytest.mark.parametrize("megabytes", [1, 16, 32])
@pytest.mark.thirty("builds short of memory", 1)
def test_too_little_memory_is_exit_code_7_and_leaves_nothing(warm, checkpoint, into, megabytes):
    words = (checkpoint, "--backend", "onnxruntime", "--output-dir", into)
    fire = warm.build(*words, limit="memory", size=megabytes * MEBI)
    assert fire.wait() == 7, fire.messages
    assert "vlexport: [resource] out of memory" in fire.messages
    assert "smaller profile, or free memory" in fire.messages
    assert (visible(into), leftovers(into)) == ([], [])


@pytest.mark.slow
def test_two_builds_at_once_do_the_work_once_and_agree(warm, checkpoint, into):
    words = (checkpoint, "--backend", "eager", "--output-dir", into)
    with watched(into):
        first = warm.build(*words)
        meet(first, "s  export")
        os.kill(first.pid, signal.SIGSTOP)
        second = warm.build(*words)
        meet(second, "waiting for process")
        os.kill(first.pid, signal.SIGCONT)
        assert (first.wait(), second.wait()) == (0, 0), first.messages + second.messages
    assert first.printed == second.printed == [str(path) for path in visible(into)]
    assert ["already built" in fire.messages for fire in (first, second)] == [False, True]
    assert leftovers(into) == []


@pytest.mark.slow
def test_builds_of_different_things_do_not_wait_for_each_other(warm, checkpoint, into):
    words = (checkpoint, "--backend", "eager", "--output-dir", into)
    first, second = warm.build(*words), warm.build(*words, "--profile", "image")
    assert (first.wait(), second.wait()) == (0, 0), first.messages + second.messages
    assert len(visible(into)) == 2
    assert "waiting for" not in first.messages + second.messages


def in_namespace(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """A shell script with a small file system of its own, where the system lets an ordinary user have one."""
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", program, "sh", str(SCRIPT)]
    mount = "mount -t tmpfs -o size=1m none ."
    probe = [*command[:5], mount]
    if shutil.which("unshare") is None or subprocess.run(probe, cwd=folder, check=False).returncode:
        pytest.skip("no mount namespaces here: unshare --map-root-user --mount does not work")
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def build_on_a_full_disk(words: str, room: str, folder: Path) -> None:
    """Build where there is so much room: exit code 7, and nothing is left."""
    program = f"""
        mkdir disk && mount -t tmpfs -o size={room} none disk && cd disk || exit 9
        "$1" build {words} --output-dir engines; echo "code $?"; ls -A engines
    """
    ran = in_namespace(program, folder)
    code, *entries = ran.stdout.splitlines()
    assert code == "code 7", ran.stderr
    assert [entry for entry in entries if not entry.startswith(".lock-")] == []
    assert "vlexport: [resource] engines: the disk is full" in ran.stderr


# Rooms that are full while the engine is written, and while the manifest is.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "room"), [("eager", "600k"), ("eager", "2560k"), ("onnxruntime", "300k")]
)
def test_a_full_file_system_is_exit_code_7_and_leaves_nothing(checkpoint, tmp_path, backend, room):
    build_on_a_full_disk(f"{checkpoint} --backend {backend}", room, tmp_path)


@pytest.mark.slow
def test_once_there_is_room_again_the_next_build_succeeds(checkpoint, tmp_path):
    build = f'"$1" build {checkpoint} --backend eager --output-dir engines; echo "code $?"'
    program = f"""
        mkdir disk && mount -t tmpfs -o size=300k none disk && cd disk || exit 9
        {build}; mount -o remount,size=50m . && {build}; ls -A engines
    """
    first, path, second, *entries = in_namespace(program, tmp_path).stdout.splitlines()
    assert (first, second) == ("code 7", "code 0")
    assert [f"engines/{entry}" for entry in entries if not entry.startswith(".lock-")] == [path]


@pytest.mark.seconds
def test_a_read_only_folder_is_exit_code_2_before_anything_is_exported(checkpoint, tmp_path):
    program = f"""
        mkdir disk && mount -t tmpfs -o ro none disk || exit 9
        "$1" build {checkpoint} --backend eager --output-dir disk/engines; echo "code $?"; ls -A disk
    """
    ran = in_namespace(program, tmp_path)
    assert ran.stdout == "code 2\n", ran.stderr
    assert "disk/engines: cannot be written (Read-only file system)" in ran.stderr
    assert "s  export" not in ran.stderr


def started(*words: object) -> subprocess.Popen[str]:
    """The real command, as a shell starts it."""
    return subprocess.Popen(
        [SCRIPT, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def until(process: subprocess.Popen[str], phase: str) -> None:
    assert process.stderr is not None
    # With the time left, where an earlier build shows how long it takes.
    begins = re.compile(rf"s  {phase}( \(|$)")
    assert any(begins.search(line.rstrip()) for line in process.stderr), f"no phase '{phase}'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "phase", "code", "word"),
    [(signal.SIGINT, "check reference", 130, "interrupted"), (signal.SIGHUP, "build", 129, "hung up")],
    ids=["Ctrl-C in the check", "SIGHUP in the build"],
)
def test_a_signal_ends_a_build_with_one_line_and_leaves_no_half_result(
    checkpoint, into, number, phase, code, word
):
    process = started("build", checkpoint, "--backend", "eager", "--output-dir", into)
    until(process, phase)
    process.send_signal(number)
    # More than the five seconds that people are promised, for machines that are busy.
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "")
    assert err.splitlines()[-1] == f"vlexport: {word}; no incomplete result is stored."
    assert "Traceback" not in err
    # An engine that was built is kept for the next build.
    assert (visible(into), len(leftovers(into))) == ([], phase.startswith("check"))
    assert ("the engine is built and kept" in err) == phase.startswith("check")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_build_that_is_stopped_in_its_check_goes_on_with_the_check(warm, checkpoint, into, number):
    words = (checkpoint, "--backend", "eager", "--output-dir", into)
    fire = warm.build(*words)
    meet(fire, "s  check")
    os.kill(fire.pid, number)
    assert fire.wait() in (130, -signal.SIGKILL)
    assert visible(into) == []
    again = warm.build(*words)
    assert again.wait() == 0, again.messages
    assert "s  resume" in again.messages, fire.messages
    assert "s  export" not in again.messages
    check_whole(into)
    assert leftovers(into) == []


def ends_of_signalled_builds(
    warm: Stove, words: tuple[object, ...], into: Path, count: int, source: random.Random
) -> Counter[tuple[int, int]]:
    """Send a signal to each of `count` builds, which end in time; return how often each met each code."""
    started = time.monotonic()
    path = builds(warm, *words)
    usual = time.monotonic() - started
    shutil.rmtree(path)
    ends, longest = Counter[tuple[int, int]](), 0.0
    for number in (signal.SIGINT, signal.SIGTERM) * (count // 2):
        with watched(into):
            fire = warm.build(*words)
            while "s  hash weights" not in fire.messages:
                time.sleep(0.01)
            time.sleep(source.uniform(0.0, 0.8 * usual))
            code, seconds = fire.stop(number)
            ends[number, code] += 1
            longest = max(longest, seconds)
            assert code in {128 + number, 0}, f"{ends}\n{fire.messages}"
            assert warm.running() == []
            assert len(leftovers(into)) <= 1, "at most one engine, kept for the next build"
        # Unwatched: taking an entry away file by file is no build's doing.
        shutil.rmtree(path, ignore_errors=True)
    builds(warm, *words)
    assert leftovers(into) == []
    print(f"{dict(ends)}, the longest after {longest:.2f} s")
    assert longest < SECONDS
    return ends


@pytest.mark.slow
def test_a_signal_at_the_begin_of_any_phase_ends_a_build(warm, checkpoint, into, record_property):
    words = (checkpoint, "--backend", "eager", "--output-dir", into)
    whole = warm.build(*words)
    assert whole.wait() == 0, whole.messages
    phases = list(dict.fromkeys(re.findall(r"s  ([a-z][a-z ,0-9]*?)(?: \(|$)", whole.messages, re.MULTILINE)))
    assert len(phases) >= 8
    rounds, answers = -(-cases("signals in every phase") // (2 * len(phases))), []
    for phase, number in product(phases, (signal.SIGINT, signal.SIGTERM)):
        for _ in range(rounds):
            shutil.rmtree(into, ignore_errors=True)
            fire, begun = warm.build(*words), time.monotonic()
            while f"s  {phase}" not in fire.messages:
                assert time.monotonic() - begun < 120, f"no phase {phase}\n{fire.messages}"
                time.sleep(0.002)
            code, seconds = fire.stop(number)
            # The last phases may be over by then.
            assert code in {128 + number, 0}, f"{phase}\n{fire.messages}"
            assert warm.running() == []
            check_whole(into)
            assert len(leftovers(into)) <= 1
            answers.append((seconds, phase))
    print("the longest answers:", *(f"{phase} {seconds:.2f} s" for seconds, phase in sorted(answers)[:-4:-1]))
    assert max(answers)[0] < SECONDS
    record_property("signals in every phase", len(answers))


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep processes busy that have nothing to do with the builds."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


@pytest.mark.full
@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
@pytest.mark.thirty("signals to a build", cases("signals to a build") // 2)
def test_every_signal_ends_a_build_as_promised_beside_two_busy_processes(warm, checkpoint, into, backend):
    words = (checkpoint, "--backend", backend, "--output-dir", into)
    count = cases("signals to a build") // 2
    with busy(2):
        ends = ends_of_signalled_builds(warm, words, into, count, random.Random(count))
    for number in (signal.SIGINT, signal.SIGTERM):
        assert ends[number, 128 + number] >= count / 4, "too few met a build"


@pytest.mark.slow
def test_a_signal_during_a_parity_command_keeps_the_verdict(warm, checkpoint, into):
    path = builds(warm, checkpoint, "--backend", "eager", "--output-dir", into)
    before = (path / "manifest.json").read_bytes()
    process = started("check", path, "--accuracy")
    until(process, "check")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert (path / "manifest.json").read_bytes() == before
    assert leftovers(into) == []


def ended(program: str, number: int, *words: object) -> tuple[int, str]:
    """Send a signal to a program that has printed "ready"; return its exit code and stderr."""
    command = [sys.executable, "-c", program, *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


STUCK = """
import {imports}, sys, threading, time
from vlexport.cli import interrupts
interrupts.GRACE_SECONDS = 0.5
try:
    with interrupts.stoppable():
        threading.Timer(0.5, print, ("ready",), {{"flush": True}}).start()
        {work}
except interrupts.Stopped as stop:
    sys.exit(stop.exit_code)
"""


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("imports", "work", "number", "code"),
    [
        ("hashlib", "hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)", signal.SIGINT, 130),
        ("time", "exec('try: time.sleep(600)\\nexcept BaseException: time.sleep(600)')", signal.SIGTERM, 143),
    ],
    ids=["a library that does not come back", "a library that swallows the exception"],
)
def test_what_cannot_be_interrupted_is_ended_after_the_grace(imports, work, number, code):
    found, err = ended(STUCK.format(imports=imports, work=work), number)
    assert found == code
    assert "in the middle of a long step; no incomplete result is stored" in err


AT_WORK = """
import sys, threading, time
from pathlib import Path
from vlexport.bundle import store
from vlexport.cli import interrupts
interrupts.GRACE_SECONDS = 0.5
with interrupts.stoppable(), store.working_folder(Path(sys.argv[1]), "entry") as folder:
    (folder / "payload").write_bytes(b"half")
    threading.Timer(0.2, print, ("ready",), {"flush": True}).start()
    try:
        time.sleep(600)
    except BaseException:
        time.sleep(600)
"""


def test_an_end_without_unwinding_removes_the_working_folder(into):
    into.mkdir()
    assert ended(AT_WORK, signal.SIGTERM, into)[0] == 143
    assert leftovers(into) == []


def test_handlers_are_put_back_and_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.stoppable():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_terminal_that_closes_unwinds_the_work_and_hides_nothing():
    """Nobody reads the message any longer, and writing it fails."""
    code = (
        "import os, signal, sys, vlexport.cli as cli\n"
        "def work(*_, **__):\n"
        "    try:\n"
        "        os.close(0); os.close(2); signal.raise_signal(signal.SIGHUP)\n"
        "    finally:\n"
        "        print('unwound', flush=True)\n"
        "cli.app = work\n"
        "cli.main(['list'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (129, "unwound\n")


@pytest.mark.parametrize("last", ["advance('store', 0.0); print('stored')", "return 3"])
def test_a_signal_that_a_library_loses_ends_the_command_all_the_same(last):
    code = (
        "import signal, vlexport.cli as cli\n"
        "from vlexport.cli.progress import phases\n"
        "def work(*_, **__):\n"
        "    with phases('build') as advance:\n"
        "        try:\n"
        "            signal.raise_signal(signal.SIGTERM)\n"
        "        except BaseException:\n"
        "            pass\n"
        f"        {last}\n"
        "cli.app = work\n"
        "cli.main(['list'])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (143, "")


def interrupted_in_a_mode() -> dict[str, str]:
    with torch.device("meta"):
        # As where a signal comes while torch has taken its mode off for an operator.
        torch.overrides._pop_mode()
        raise KeyboardInterrupt


def test_a_check_that_an_interruption_broke_has_found_nothing():
    with pytest.raises(RuntimeError, match="empty mode stack"):
        interrupted_in_a_mode()
    with pytest.raises(KeyboardInterrupt):
        guarded("weights", interrupted_in_a_mode)


INTERRUPTED_TWICE = """
import signal, sys
from pathlib import Path
from vlexport.cli import interrupts
try:
    with interrupts.stoppable():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            Path(sys.argv[1]).write_text("done")
except interrupts.Stopped as stop:
    print("unwound")
    sys.exit(stop.exit_code)
"""


def test_a_second_signal_does_not_stop_the_cleaning_up(tmp_path):
    # In a process of its own: one that the machine holds up for longer than the grace is ended at once.
    command = [sys.executable, "-c", INTERRUPTED_TWICE, tmp_path / "cleaned"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (130, "unwound\n"), ran.stderr
    assert (tmp_path / "cleaned").read_text() == "done"


TRACED = """
import signal, sys
from vlexport import cli
def traced(words, **settings):
    try:
        signal.raise_signal(signal.SIGTERM)
    except BaseException as stop:
        raise RuntimeError("while tracing") from stop
cli.app = traced
sys.exit(cli.run(["list"]))
"""


def test_a_library_that_makes_an_error_of_its_own_from_a_signal_hides_nothing():
    ran = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, check=False)
    assert ran.returncode == 143
    assert ran.stderr == "vlexport: terminated; no incomplete result is stored.\n"
