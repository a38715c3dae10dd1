"""Names of options: short forms, dtypes, and old spellings that are accepted for one version."""

import json
import tomllib
from typing import Any

import pytest
from typer.main import get_command

from tests.cli.lines import vlexport
from vlexport.cli import app, options
from vlexport.specs import SHORT_DTYPES

GROUP: Any = get_command(app)
OLD = "{old} is deprecated and will be removed in the next version; use {new}."


def test_h_is_help_and_help_names_no_old_spelling(subtests):
    for words in ((), *((name,) for name in GROUP.commands)):
        with subtests.test(words):
            short, long = vlexport(*words, "-h"), vlexport(*words, "--help")
            assert (short.code, short.out) == (0, long.out)
            assert "-h, --help" in short.out
            assert not set(options.RENAMED) & {word.strip(",=") for word in short.out.split()}


def test_the_store_of_a_plan_has_an_old_and_a_short_name(checkpoint, tmp_path):
    for old in ("--into", "--into=", "--output-dir", "-o"):
        words = [f"{old}{tmp_path}"] if "=" in old else [old, tmp_path]
        ran = vlexport("plan", checkpoint, "--backend", "eager", *words, "--json")
        assert ran.code == 0, ran.err
        assert ran.document["path"].startswith(str(tmp_path))
        noted = [f"vlexport: {OLD.format(old='--into', new='--output-dir')}"] if "into" in old else []
        assert [line for line in ran.err.splitlines() if "deprecated" in line] == noted, old


def test_the_file_of_encode_and_the_folder_of_export_inputs_have_their_old_names(built, image, tmp_path):
    file, folder = tmp_path / "x.safetensors", tmp_path / "inputs"
    ran = vlexport("encode", built, "--image", image, "--out", file)
    assert (ran.code, ran.lines, file.exists()) == (0, [str(file)], True), ran.err
    assert OLD.format(old="--out", new="--output") in ran.err
    ran = vlexport("export-inputs", built, "--out", folder)
    assert (ran.code, ran.lines, folder.is_dir()) == (0, [str(folder)], True), ran.err
    assert OLD.format(old="--out", new="--output-dir") in ran.err


def test_quantise_is_quantize(checkpoint, tmp_path):
    old, new = (
        vlexport("plan", checkpoint, "--backend", "openvino", word, "int3", "-o", tmp_path)
        for word in ("--quantise", "--quantize")
    )
    assert (old.code, new.code) == (2, 2)
    note, message = old.err.splitlines()
    assert OLD.format(old="--quantise", new="--quantize") in note
    assert [message] == new.err.splitlines()
    assert "--quantize int3 given, int8 expected" in message


def test_old_names_are_none_where_there_is_no_new_one_and_after_two_dashes(built):
    for words, message in (
        (("verify", built, "--into", "x"), "No such option: --into"),
        (("plan", "--", "--into"), "'--into' does not exist here"),
    ):
        ran = vlexport(*words)
        assert ran.code == 2
        assert message in ran.err
        assert "deprecated" not in ran.err


def test_short_names_of_dtypes_are_those_of_torch(checkpoint, tmp_path, subtests):
    rtx = ("--backend", "tensorrt_rtx", "--targets", "sm89", "--profile", "thumbnail")
    for short, name in SHORT_DTYPES.items():
        found = [
            vlexport("plan", checkpoint, *rtx, "--dtype", dtype, "-o", tmp_path, "--json")
            for dtype in (short, name)
        ]
        with subtests.test(short):
            assert [ran.code for ran in found] == [0, 0], found[0].err
            assert found[0].document == found[1].document


def test_the_decoder_takes_short_names_of_dtypes(built, checkpoint):
    words = ("run", built, "--decoder", checkpoint, "--prompt", "a", "--max-new-tokens", 2, "--json")
    short, long = (vlexport(*words, "--dtype", dtype) for dtype in ("bf16", "bfloat16"))
    assert (short.code, long.code) == (0, 0), short.err
    assert short.document["token_ids"] == long.document["token_ids"]
    refused = vlexport(*words, "--dtype", "fp8")
    assert refused.code == 2
    assert "fp8" in json.loads(refused.out)["error"]["message"]


def test_options_of_a_file_are_those_of_the_command_line_which_win(checkpoint, tmp_path):
    file = tmp_path / "build.toml"
    words = (
        "plan",
        checkpoint,
        "--backend",
        "eager",
        "--dtype",
        "bf16",
        "--max-pixels",
        50176,
        "-o",
        tmp_path,
    )
    written = vlexport(*words, "--write-config", file, "--json")
    assert written.code == 0, written.err
    keys = {"checkpoint", "backend", "dtype", "max-pixels", "output-dir"}
    assert set(tomllib.loads(file.read_text("utf-8"))) == keys
    read = vlexport("plan", "--config", file, "--json")
    assert (read.code, read.document) == (0, written.document), read.err
    other = vlexport("plan", "--config", file, "--dtype", "float32", "--json").document
    assert other["path"] != written.document["path"]
    assert other == vlexport(*words, "--dtype", "float32", "--json").document


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("dtipe = 'float16'", "no option 'dtipe'. Known: backend, build-memory"),
        ("dtype = ['float16']", "'dtype' is ['float16']; a text or a number expected"),
        ("dtype = ", "not valid TOML"),
        ("max-pixels = 'many'", "Invalid value for '--max-pixels'"),
        (None, "cannot be read (No such file"),
    ],
)
def test_a_file_of_options_that_makes_no_sense_is_refused(checkpoint, tmp_path, content, words):
    file = tmp_path / "build.toml"
    if content is not None:
        file.write_text(content, encoding="utf-8")
    ran = vlexport("plan", checkpoint, "--backend", "eager", "--config", file)
    assert ran.code == 2
    assert words in ran.err
