"""`list` and `doctor`."""

import importlib.metadata
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
import torch.nn.functional as F

from tests.cli.lines import vlexport
from vlexport import errors
from vlexport.backends import backend_names, eager, find_backend
from vlexport.positions import mrope
from vlexport.recipe import list_recipes, recipe_folder
from vlexport.tools import doctor


def test_list_names_every_recipe_with_its_model_types_in_plain_columns():
    ran = vlexport("list")
    rows = [line.split("\t") for line in ran.lines]
    assert ran.code == 0
    assert rows[1:] == [[card.name, ", ".join(card.model_types), card.summary] for card in list_recipes()]
    found = vlexport("list", "--json").document
    assert (found["schema"], found["verb"]) == (1, "list")
    assert [each["name"] for each in found["recipes"]] == [card.name for card in list_recipes()]


def test_doctor_names_every_backend_with_its_precisions_and_what_it_lacks(monkeypatch):
    monkeypatch.setattr(eager.Eager, "missing", lambda _: "its library is not installed.")
    rows = [line.split("\t") for line in vlexport("doctor").lines]
    assert ["eager", "float32, bfloat16", find_backend("eager").summary] in rows
    assert ["backend eager", "note", "its library is not installed.", ""] in rows
    found = {each["name"]: each for each in vlexport("doctor", "--json").document["backends"]}
    assert sorted(found) == sorted(backend_names())
    assert found["eager"]["missing"] == "its library is not installed."


def test_every_error_prints_a_code_that_explain_knows_offline():
    listed = [line.split("\t") for line in vlexport("explain").lines[1:]]
    codes = {
        errors.code_of(kind): kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.VlexportError)
    }
    del codes[""]  # the root
    assert codes.keys() < {code for code, _ in listed}
    for code, summary in listed:
        ran = vlexport("explain", code)
        exits = f" (exit code {codes[code].exit_code})" if code in codes else ""
        assert ran.lines[0] == f"{code}{exits}: {summary}"
        assert [line.partition(":")[0] for line in ran.lines[1:]] == ["Causes", "What to do"]
    assert vlexport("explain", "not_run").lines == vlexport("explain", "not-run").ends(0).lines
    found = vlexport("explain", "untrusted", "--json").document
    assert (found["code"], found["exit_code"]) == ("untrusted", 5)
    assert vlexport("explain", "invented").ends(2).err.startswith("vlexport: [request] ")


def test_help_list_and_inspect_load_no_torch(built):
    program = (
        "import sys; from vlexport.cli import run\n"
        f"verbs = ['--help'], ['list'], ['explain', 'L1'], ['inspect', {str(built)!r}]\n"
        "codes = list(map(run, verbs))\n"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0


def test_doctor_looks_at_memory_disk_locks_devices_libraries_and_backends():
    ran = vlexport("doctor", "--json")
    found = {each["name"]: each for each in ran.document["findings"]}
    wanted = {"python", "memory", "disk", "file locks", "gpu", "torch", "transformers", "onnx", "pillow"}
    assert wanted | {f"backend {name}" for name in backend_names()} <= set(found)
    assert {each["state"] for each in found.values()} <= {"fine", "note", "broken"}
    assert all(each["advice"] for each in found.values() if each["state"] == "broken")
    rows = [line.split("\t") for line in vlexport("doctor").lines]
    assert rows[0] == ["check", "state", "found", "do"]
    assert {len(row) for row in rows} == {4, 3}


def test_a_broken_machine_is_exit_code_4_with_advice_and_still_one_document(monkeypatch):
    monkeypatch.setattr(doctor, "FLOORS", {"torch": "999", "no-such-package": "1"})
    ran = vlexport("doctor", "--json")
    found = {each["name"]: each for each in ran.document["findings"]}
    assert ran.code == 4
    assert found["torch"]["advice"] == "Known flaws below 999: pip install 'torch>=999'"
    assert found["no-such-package"]["found"] == "not installed"
    assert "not fit for use: torch, no-such-package" in ran.err


def test_a_library_below_the_oldest_supported_version_is_a_note(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _: ["numpy>=999", "rich>=1", "no-such-package>=2", "av"])
    found = {each.name: each for each in doctor.examine() if each.name.startswith("supported ")}
    assert list(found) == ["supported numpy"]
    assert found["supported numpy"].state == "note"
    assert found["supported numpy"].advice == "Not supported below 999: pip install 'numpy>=999'"


def test_a_library_above_the_tested_version_is_a_note_and_another_build_of_it_is_not(monkeypatch, tmp_path):
    tested = tmp_path / "tested.txt"
    tested.write_text("numpy==0.1\ntorch==2.13.0\nrich==999\n")
    monkeypatch.setattr(doctor, "TESTED", tested)
    real = importlib.metadata.version
    monkeypatch.setattr(doctor, "version", lambda name: "2.13.0+cpu" if name == "torch" else real(name))
    found = {each.name: each for each in doctor.examine() if each.name.startswith("supported ")}
    assert list(found) == ["supported numpy"]
    assert found["supported numpy"].state == "note"
    assert found["supported numpy"].advice.endswith("If something fails: pip install 'numpy==0.1'")


def wheel_of_onnxruntime(folder: Path, name: str) -> None:
    made = folder / f"{name.replace('-', '_')}-1.31.1.dist-info"
    made.mkdir(parents=True)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.31.1\n")


def test_two_wheels_of_onnx_runtime_each_have_a_row_and_the_command_that_leaves_one(monkeypatch, tmp_path):
    wheel_of_onnxruntime(tmp_path, "onnxruntime")
    wheel_of_onnxruntime(tmp_path, "onnxruntime-gpu")
    monkeypatch.syspath_prepend(tmp_path)
    found = {each.name: each for each in doctor.examine()}
    command = (
        "pip uninstall --yes onnxruntime-gpu onnxruntime && "
        "pip install --force-reinstall --no-deps onnxruntime-gpu==1.31.1"
    )
    for name in ("onnxruntime", "onnxruntime-gpu"):
        assert (found[name].state, found[name].found, found[name].advice) == ("note", "1.31.1", command)
    assert found["backend onnxruntime"].state == "fine"
    others = [each.advice for name, each in found.items() if name not in ("onnxruntime", "onnxruntime-gpu")]
    assert not [advice for advice in others if "--force-reinstall" in advice]


@pytest.mark.parametrize("left", ["a folder without a module", "a module that does not import"])
def test_a_wheel_of_onnx_runtime_that_lost_its_files_is_diagnosed(left, monkeypatch, tmp_path):
    wheel_of_onnxruntime(tmp_path, "onnxruntime-gpu")
    monkeypatch.syspath_prepend(tmp_path)
    broken = ModuleType("onnxruntime")
    # A folder without `__init__.py` is a module with no file, and no attributes.
    broken.__spec__ = ModuleSpec("onnxruntime", None, origin=None if "folder" in left else "here")
    monkeypatch.setitem(sys.modules, "onnxruntime", broken)
    row = next(each for each in doctor.examine() if each.name == "backend onnxruntime")
    assert row.state == "note"
    assert row.advice == "pip install --force-reinstall --no-deps onnxruntime-gpu==1.31.1"
    if "folder" in left:
        assert "files of it were removed" in row.found
        vlexport("doctor").ends(0)


def test_a_check_that_fails_by_itself_is_a_finding_and_the_others_run(monkeypatch):
    def fails():
        raise ValueError("no such thing")

    monkeypatch.setattr(doctor, "_memory", fails)
    monkeypatch.setattr(doctor, "compiler", fails)
    found = {each.name: each for each in doctor.examine()}
    assert (found["memory"].state, found["memory"].found) == ("note", "ValueError: no such thing")
    assert found["c++ compiler"].state == "note"
    assert found["backend eager"].state == "fine"


def test_little_disk_and_memory_are_notes_and_not_refusals(monkeypatch):
    monkeypatch.setattr(doctor, "LEAST_DISK_GIB", 10**9)
    monkeypatch.setattr(doctor, "LEAST_MEMORY_GIB", 10**9)
    found = {each.name: each for each in doctor.examine()}
    assert (found["disk"].state, found["memory"].state) == ("note", "note")
    assert found["disk"].advice
    assert found["memory"].advice


def test_a_backend_that_does_not_start_is_a_finding_and_no_crash(monkeypatch):
    def target(self):
        raise ImportError("libsomething.so.1: cannot open shared object file")

    monkeypatch.setattr(eager.Eager, "target", target)
    found = {each.name: each for each in doctor.examine()}
    assert found["backend eager"].state == "note"
    assert "libsomething.so.1" in found["backend eager"].found


def test_doctor_deep_compares_pixels_positions_and_pruning_with_stored_values():
    ran = vlexport("doctor", "--deep", "--json")
    states = {each["name"]: each["state"] for each in ran.document["findings"]}
    with_demo = [
        card.name for card in list_recipes() if (recipe_folder() / "demo" / f"{card.name}.py").exists()
    ]
    deep = [*(f"pixels, {name}" for name in with_demo), "positions", "pruning"]
    assert len(with_demo) >= 5
    assert {name: states[name] for name in deep} == dict.fromkeys(deep, "fine")
    assert not {*deep} & {each["name"] for each in vlexport("doctor", "--json").document["findings"]}


@pytest.mark.seconds
def test_a_library_that_resizes_or_counts_otherwise_is_exit_code_4(monkeypatch):
    plain = F.interpolate
    monkeypatch.setattr(
        F, "interpolate", lambda *given, **known: plain(*given, **{**known, "antialias": False})
    )
    ran = vlexport("doctor", "--deep").ends(4)
    assert (
        "not fit for use: pixels, kimi_vl, pixels, minicpmv, pixels, nemotron_vl, pixels, qwen2_5_vl, "
        "pixels, qwen2_vl" in ran.err
    )
    monkeypatch.undo()
    right = mrope.initial_positions

    def shifted(*given):
        found = right(*given)
        return replace(found, table_RN=found.table_RN + 1)

    monkeypatch.setattr(mrope, "initial_positions", shifted)
    assert "not fit for use: positions." in vlexport("doctor", "--deep").err


def test_doctor_shows_what_is_missing_without_torch(monkeypatch):
    def version(name):
        if name == "torch":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    real = importlib.metadata.version
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "version", version)
    found = {each.name: each for each in doctor.examine()}
    assert found["gpu"].found == "unknown without torch"
    assert (found["torch"].state, found["torch"].advice) == ("broken", "pip install 'torch>=2.10'")
