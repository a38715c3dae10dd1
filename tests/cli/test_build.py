"""`build`: what it prints, what it stores, and what it refuses before it starts."""

import contextlib
import importlib
import io
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image

from tests.cli.lines import flip, vlexport
from vlexport.bundle import Bundle
from vlexport.cli.build import report_of
from vlexport.cli.output import show_report
from vlexport.parity.report import ParityReport


def test_the_last_line_of_stdout_is_the_bundle_and_nothing_else_is_there(build, engines):
    assert build.code == 0
    assert len(build.lines) == 1
    assert Path(build.lines[-1]).parent == engines
    assert Bundle.open(build.lines[-1]).manifest.parity.status == "passed"


def test_phases_times_and_one_line_of_the_accuracy_check_go_to_stderr(build):
    phases = re.findall(r"^ *\d+\.\d s  (\w+)", build.err, re.MULTILINE)
    assert [each for index, each in enumerate(phases) if each not in phases[:index]] == [
        "hash", "export", "build", "graphs", "check", "store",
    ]  # fmt: skip
    *_, summary, built = build.err.splitlines()
    assert re.fullmatch(
        r"\d+ exact, \d+ numeric(, \d+ (observed|not run))*, "
        r"worst \S+ of \S+ \([^()]+, token \d+\), passed",
        summary,
    )
    assert built == "built"


def test_every_row_of_the_accuracy_check_is_printed_with_verbose(checkpoint, engines, built):
    ran = vlexport("build", checkpoint, "--backend", "eager", "--output-dir", engines, "-v")
    lines = [" ".join(line.split()) for line in ran.err.splitlines()]
    assert "level check shapes rel L2 worst token limit verdict" in lines
    stored = ParityReport.from_json(Bundle.open(built).manifest.parity.table).rows
    exact = [row for row in stored if row.level == "L0" and row.verdict == "passed"]
    assert sum(re.match(r"L\d ", line) is not None for line in lines) == len(stored) - len(exact) + 1


def test_a_verdict_has_a_colour_where_the_terminal_has_one(built, monkeypatch):
    def shown():
        with contextlib.redirect_stderr(io.StringIO()) as err:
            show_report(report_of(Bundle.open(built).verdict), stderr=True)
        return err.getvalue()

    assert "\x1b" not in shown()
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert shown().endswith(", \x1b[32mpassed\x1b[0m\n")
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in shown()


def test_without_a_terminal_nothing_steers_one(build):
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", build.out + build.err)


def test_a_second_build_is_a_cache_hit_and_exports_nothing(checkpoint, engines, built):
    again = vlexport("build", checkpoint, "--backend", "eager", "--output-dir", engines)
    assert (again.code, again.lines) == (0, [str(built)])
    assert "already built" in again.err
    assert "export" not in again.err


def test_json_is_one_document_with_bundle_status_and_parity(checkpoint, engines, built):
    ran = vlexport("build", checkpoint, "--backend", "eager", "--output-dir", engines, "--json")
    found = ran.document
    assert (ran.code, found["schema"], found["verb"]) == (0, 1, "build")
    assert (found["bundle"], found["status"]) == (str(built), "cached")
    assert found["parity"]["status"] == "passed"
    assert found["parity"]["table"]["rows"]


def test_a_build_that_fails_its_check_is_marked_and_exits_3_with_one_document(failed_build, failed):
    found = failed_build.document
    assert failed_build.code == 3
    assert (found["status"], found["parity"]["status"]) == ("failed", "failed")
    assert Bundle.open(failed).manifest.parity.status == "failed"
    assert "was not shown to agree with the reference: the bundle is marked 'failed'" in failed_build.err
    assert f"`vlexport check {failed} --accuracy -v --recipe FILE` repeats the check" in failed_build.err
    assert re.search(r"\. L1, .+ on '.*': failed, \w+ \S+ of \S+", failed_build.err)


def test_a_failed_build_in_plain_words_still_ends_with_its_path(
    checkpoint, engines, wrong_recipe, failed, monkeypatch
):
    # The build itself takes seconds; tests/_build/test_build.py has that a failed bundle is no cache hit.
    building = importlib.import_module("vlexport._build.build")
    built = building.Built(bundle=Bundle.open(failed), cached=False)
    monkeypatch.setattr(building, "build_checkpoint", lambda *_: built)
    words = ("--recipe", wrong_recipe, "--backend", "eager", "--output-dir", engines)
    ran = vlexport("build", checkpoint, *words)
    assert (ran.code, ran.lines) == (3, [str(failed)])
    lines = ran.err.splitlines()
    summary = next(at for at, line in enumerate(lines) if line.endswith(", failed"))
    level, stage, kind = lines[summary + 1 :][:3]
    assert level.startswith("level: L")
    assert re.fullmatch(r"stage: \S.*", stage)
    assert re.fullmatch(r"kind:  \S.*", kind)


@pytest.mark.slow
def test_a_bundle_that_rotted_on_disk_is_built_again(checkpoint, built, tmp_path):
    place = tmp_path / "engines" / built.name
    shutil.copytree(built, place)
    flip(place / "program.safetensors")
    ran = vlexport("build", checkpoint, "--backend", "eager", "--output-dir", place.parent)
    assert (ran.code, ran.lines) == (0, [str(place)])
    assert "is built again" in ran.err
    assert Bundle.open(place).manifest.parity.status == "passed"


@pytest.mark.slow
def test_limits_make_a_profile_and_go_into_the_manifest(checkpoint, engines):
    words = ("--backend", "eager", "--output-dir", engines, "--max-pixels", 28 * 56, "--max-images", 2)
    ran = vlexport("build", checkpoint, *words, "--max-frames", 2, "--json")
    profile = Bundle.open(ran.document["bundle"]).manifest.profile
    assert profile.name.startswith("custom-")
    assert max(each.max for each in profile.ranges.values()) < 100


@pytest.mark.seconds
def test_files_are_compared_at_their_own_sizes_where_a_bundle_is_there_already(
    checkpoint, engines, built, image, video
):
    words = ("build", checkpoint, "--backend", "eager", "--output-dir", engines)
    ran = vlexport(*words, "--check", image, video, "--fps", 2)
    assert (ran.code, ran.lines) == (0, [str(built)])
    for file in (image, video):
        assert re.search(rf"^own {file.name}: .*1 numeric, worst .*, passed$", ran.err, re.MULTILINE), ran.err
    document = vlexport(*words, "--check", image.parent, "--json").document
    assert f"own {image.name}" in {row["shapes"] for row in document["files"]["rows"]}
    assert (document["status"], document["files"]["status"]) == ("cached", "passed")


def test_files_outside_the_profile_are_refused_before_the_export(checkpoint, tmp_path, video):
    words = ("build", checkpoint, "--backend", "eager", "--output-dir", tmp_path / "engines")
    ran = vlexport(*words, "--max-pixels", 1_000, "--max-images", 1, "--check", video, "--fps", 2).ends(6)
    assert f"{video}: " in ran.err
    assert "does not fit profile" in ran.err
    assert "hash weights" not in ran.err
    assert "absent.png" in vlexport(*words, "--check", tmp_path / "absent.png").err
    assert not list((tmp_path).glob("engines/*"))


OFF = """\
from vlexport.backends.eager import Eager


class Off(Eager):
    name = "off"

    def open(self, payloads, spec, options):
        runner = super().open(payloads, spec, options)
        run = runner.run

        def off(inputs):
            wrong = 1e-2 * (len(inputs["patches"]) == 148)
            return {name: rows + wrong for name, rows in run(inputs).items()}

        runner.run = off
        return runner


BACKEND = Off()
"""


@pytest.mark.slow
def test_nothing_is_stored_where_a_file_fails_and_what_was_there_stays(checkpoint, tmp_path, image):
    backend, wide, place = tmp_path / "off.py", tmp_path / "wide.png", tmp_path / "engines"
    backend.write_text(OFF, encoding="utf-8")
    # 2 x 74 patches, which no drawn call has.
    Image.new("RGB", (74 * 14, 28), "red").save(wide)
    words = ("build", checkpoint, "--backend", backend, "--output-dir", place)
    ran = vlexport(*words, "--check", image, wide)
    assert (ran.code, ran.lines) == (3, []), ran.err
    assert re.search(r"on 'own wide.png': failed, relative_l2 .*\. Nothing is stored\.", ran.err), ran.err
    assert not list(place.glob("*/manifest.json"))
    vlexport(*words, "--check", image).ends(0)
    assert "was there before, and stays" in vlexport(*words, wide).ends(3).err
    assert list(place.glob("*/manifest.json"))
