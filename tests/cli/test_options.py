"""Names of options, short forms, dtypes, and the generated page of the command line."""

import json
import os
import re
import subprocess
import tomllib
from typing import Any

import pytest
from typer.main import get_command

from tests.cli.lines import SCRIPT, vlexport
from tests.repo.tree import script
from vlexport.cli import app
from vlexport.specs import SHORT_DTYPES, backend_name

GROUP: Any = get_command(app)


@pytest.mark.seconds
def test_h_is_help(subtests):
    for words in ((), *((name,) for name in GROUP.commands)):
        with subtests.test(words):
            short, long = vlexport(*words, "-h"), vlexport(*words, "--help")
            assert (short.code, short.out) == (0, long.out)
            assert "-h, --help" in short.out


@pytest.mark.seconds
def test_short_names_of_dtypes_are_those_of_torch(checkpoint, tmp_path, subtests):
    rtx = ("--backend", "tensorrt_rtx", "--targets", "sm89", "--profile", "thumbnail")
    for short, name in SHORT_DTYPES.items():
        with subtests.test(short):
            first, second = (
                vlexport("plan", checkpoint, *rtx, "--dtype", dtype, "-o", tmp_path, "--json").ends(0)
                for dtype in (short, name)
            )
            assert first.document == second.document


@pytest.mark.seconds
def test_the_decoder_takes_short_names_of_dtypes(built, checkpoint):
    words = ("run", built, "--checkpoint", checkpoint, "--prompt", "a", "--max-new-tokens", 2, "--json")
    short, long = (vlexport(*words, "--dtype", dtype).ends(0) for dtype in ("bf16", "bfloat16"))
    assert short.document["token_ids"] == long.document["token_ids"]
    assert "fp8" in json.loads(vlexport(*words, "--dtype", "fp8").ends(2).out)["error"]["message"]


def test_options_of_a_file_are_those_of_the_command_line_which_win(checkpoint, tmp_path):
    file = tmp_path / "build.toml"
    options = ("--backend", "eager", "--dtype", "bf16", "--max-pixels", 50176, "-o", tmp_path)
    words = ("plan", checkpoint, *options)
    written = vlexport(*words, "--write-config", file, "--json").ends(0)
    keys = {"checkpoint", "backend", "dtype", "max-pixels", "output-dir"}
    assert set(tomllib.loads(file.read_text("utf-8"))) == keys
    assert vlexport("plan", "--config", file, "--json").ends(0).document == written.document
    other = vlexport("plan", "--config", file, "--dtype", "float32", "--json").document
    assert other["path"] != written.document["path"]
    assert other == vlexport(*words, "--dtype", "float32", "--json").document
    odd = ("plan", checkpoint, "--write-config", file, "--output-dir")
    vlexport(*odd, tmp_path / "a\x7f").ends(0)
    assert tomllib.loads(file.read_text("utf-8"))["output-dir"].endswith("a\x7f")
    assert "TOML holds UTF-8 alone" in vlexport(*odd, tmp_path / "a\udcff").ends(2).err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("dtipe = 'float16'", "no option 'dtipe'. Did you mean 'dtype'? Known: backend, build-memory"),
        ("dtype = ['float16']", "'dtype' is ['float16']; a text or a number expected"),
        ("max-pixels = true", "'max-pixels' is True; a text or a number expected"),
        ("dtype = ", "not valid TOML"),
        ("max-pixels = 'many'", "Invalid value for '--max-pixels'"),
        (None, "cannot be read (No such file"),
    ],
)
def test_a_file_of_options_that_makes_no_sense_is_refused(checkpoint, tmp_path, content, words):
    file = tmp_path / "build.toml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    assert words in vlexport("plan", checkpoint, "--backend", "eager", "--config", file).ends(2).err


@pytest.mark.seconds
def test_the_page_is_what_the_commands_print():
    made = script("docs/generate_cli.py")
    assert made.PAGE.read_text(encoding="utf-8") == made.reference(), "run `make docs`"


def test_every_option_of_every_command_has_a_help_text():
    group: Any = get_command(app)
    bare = [
        f"{name} {param.opts[0]}"
        for name, command in group.commands.items()
        for param in command.params
        if not getattr(param, "help", None)
    ]
    assert bare == []


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--backend", "onnxruntim"), r"no backend 'onnxruntim'\. Did you mean 'onnxruntime'\?"),
        (("--dtype", "bf17"), r"does not serve bf17\. Did you mean 'bf16'\?"),
        (("--profile", "imag"), r"no profile 'imag'\. Did you mean 'image'\?"),
        (("--selector", "evz"), r"no pruning method 'evz'\. Did you mean 'evs'\?"),
        (("--recipe", "qwen25_vl"), r"no recipe 'qwen25_vl'\. Did you mean 'qwen2_5_vl'\?"),
    ],
)
def test_a_value_that_is_almost_a_name_is_suggested(checkpoint, words, message):
    assert re.search(message, vlexport("plan", checkpoint, *words).ends(2).err)


def test_backends_have_short_names(checkpoint, tmp_path):
    places = [
        vlexport("plan", checkpoint, "--backend", name, "-o", tmp_path, "--json").document["path"]
        for name in ("ort", "onnxruntime")
    ]
    assert places[0] == places[1]
    assert [backend_name(name) for name in ("ov", "tensorrt-rtx", "a-b.py")] == [
        "openvino", "tensorrt_rtx", "a-b.py",
    ]  # fmt: skip


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("plan x --backend o", ["onnxruntime", "openvino"]),
        ("build x --dtype b", ["bfloat16"]),
        ("build x --recipe qwen", ["qwen2_5_vl", "qwen2_vl", "qwen3_vl"]),
        ("encode x --prune-before stat", ["static", "static-frames"]),
    ],
)
def test_a_shell_completes_values(words, offered):
    line = f"vlexport {words}"
    variables = {"_VLEXPORT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": "4"}
    done = subprocess.run(
        [SCRIPT], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == offered


def test_the_help_has_every_command_in_a_group_and_its_whole_sentence_at_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = vlexport("-h").out
    group: Any = get_command(app)
    found = {
        title: re.findall(r"^  (\S+)  ", rows, flags=re.MULTILINE)
        for title, rows in re.findall(r"^(\w[\w ]*):\n((?:  .*\n)+)", text, flags=re.MULTILINE)
    }
    assert found.pop("Options")
    assert list(found) == ["Build", "Use", "Check", "Share", "This machine"]
    assert sorted(name for names in found.values() for name in names) == sorted(group.commands)
    assert "..." not in text.replace("[ARGS]...", "")
