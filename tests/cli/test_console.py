"""The installed command, in a process of its own: streams, terminals, exit codes."""

import json
import os
import pty
import re
import subprocess
import threading
from pathlib import Path

import pytest

import vlexport as package
from tests.cli.lines import SCRIPT, vlexport
from vlexport.bundle import Bundle

COLOUR = re.compile(rb"\x1b\[[0-9;]*(?:3[0-9]|4[0-9]|9[0-7])[0-9;]*m")


def command(*words, **named):
    return subprocess.run([SCRIPT, *map(str, words)], capture_output=True, text=True, check=False, **named)


def on_a_terminal(*words, stdout=None, **variables):
    """Exit code, stdout, and what a terminal on the other streams was sent."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", **variables}
    environment.pop("NO_COLOR", None)
    environment.update({name: value for name, value in variables.items() if name == "NO_COLOR"})
    process = subprocess.Popen(
        [SCRIPT, *map(str, words)], stdin=theirs, stdout=stdout or theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = []
    reader = threading.Thread(target=lambda: shown.extend(chunks(ours)))
    reader.start()
    out, _ = process.communicate()
    reader.join()
    os.close(ours)
    return process.returncode, out, b"".join(shown)


def chunks(descriptor):
    try:
        while data := os.read(descriptor, 4096):
            yield data
    except OSError:  # Linux raises it when the other end is closed
        return


def test_the_version_goes_to_stdout():
    ran = command("--version")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, f"{package.__version__}\n", "")


@pytest.mark.seconds
def test_exit_codes_and_documents_reach_the_shell():
    ran = command("build", "nowhere")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("vlexport: [checkpoint] 'nowhere' does not exist here")
    assert json.loads(command("list", "--json").stdout)["verb"] == "list"


def test_a_reader_that_has_enough_is_no_error():
    process = subprocess.Popen([SCRIPT, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 0


@pytest.mark.seconds
def test_a_stream_that_is_closed_is_no_error_and_no_file_takes_its_place(tmp_path):
    for closed in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
        ran = subprocess.run(["sh", "-c", f"'{SCRIPT}' list {closed}"], capture_output=True, check=False)
        assert ran.returncode == 0, closed
    ran = subprocess.run(["sh", "-c", f"'{SCRIPT}' build nowhere >&- 2>&-"], cwd=tmp_path, check=False)
    assert ran.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_a_reader_of_messages_that_has_enough_changes_no_exit_code():
    process = subprocess.Popen([SCRIPT, "build", "nowhere"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for pipe in (process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
    assert process.wait() == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_full_disk_under_stdout_is_exit_code_7():
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([SCRIPT, "list"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 7
    assert "the disk is full" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_a_terminal_gets_tables_with_lines_and_without_colours_where_those_are_off():
    code, _, shown = on_a_terminal("list", NO_COLOR="1")
    assert code == 0
    assert "─" in shown.decode()
    assert not COLOUR.search(shown)


@pytest.mark.seconds
@pytest.mark.parametrize("width", ["40", "80"])
def test_a_narrow_terminal_gets_digests_and_paths_whole(built, width):
    code, _, shown = on_a_terminal("inspect", built, NO_COLOR="1", COLUMNS=width)
    assert code == 0
    cells = [line.split("│")[2].strip() for line in shown.decode().splitlines() if line.count("│") == 3]
    found = "".join(cells)
    assert Bundle.open(built).digest in found
    assert str(built) in found
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown.decode()


@pytest.mark.slow
def test_the_last_line_of_stdout_is_the_path_while_a_terminal_shows_progress(checkpoint, tmp_path):
    words = ("build", checkpoint, "--backend", "eager", "--output-dir", tmp_path)
    code, out, shown = on_a_terminal(*words, stdout=subprocess.PIPE, NO_COLOR="1")
    assert code == 0, shown.decode()
    assert Path(out.decode().splitlines()[-1]).parent == tmp_path
    assert b"export" in shown
    assert not COLOUR.search(shown)


@pytest.mark.seconds
def test_a_dumb_terminal_gets_plain_lines(built, checkpoint):
    words = ("build", checkpoint, "--backend", "eager", "--output-dir", built.parent)
    _, _, shown = on_a_terminal(*words, stdout=subprocess.PIPE, TERM="dumb", NO_COLOR="1")
    assert b"\x1b" not in shown
    assert b"s  hash weights" in shown


def test_commands_run_in_threads_other_than_the_main_one():
    codes = []
    thread = threading.Thread(target=lambda: codes.append(vlexport("list").code))
    thread.start()
    thread.join()
    assert codes == [0]


def test_the_variable_of_the_script_completes_commands():
    variables = {"_VLEXPORT_COMPLETE": "complete_bash", "COMP_WORDS": "vlexport bui", "COMP_CWORD": "1"}
    ran = subprocess.run(
        [SCRIPT], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert ran.stdout.split() == ["build"]
