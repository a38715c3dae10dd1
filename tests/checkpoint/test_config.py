"""Config files of both generations read alike; what is wrong with one or its values has its own words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint, ConfigView
from vlexport.checkpoint.error_context import checkpoint_errors, reads_checkpoint
from vlexport.errors import CheckpointError

VALUES: dict[str, object] = {
    "depth": 4,
    "epsilon": 1e-6,
    "name": "tower",
    "tied": False,
    "blocks": [1, 3],
    "mean": [0.5, 1],
    "nothing": None,
    "inner": {"depth": 2},
    "huge": 10**400,
}
VIEW = ConfigView(values=VALUES, file="config.json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("styles")
    styles = ("flat", "nested")
    return {
        style: write_tiny_qwen2_5_vl(base / style, config_style=style, with_decoder=False) for style in styles
    }


def write_folder(folder: Path, **files: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"")
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text)
    return folder


def test_values_come_back_with_their_types() -> None:
    assert VIEW.require_int("depth") == 4
    assert VIEW.require_float("epsilon") == 1e-6
    assert VIEW.require_float("depth") == 4.0
    assert VIEW.require_str("name") == "tower"
    assert VIEW.get_bool("tied", True) is False
    assert VIEW.require_ints("blocks") == (1, 3)
    assert VIEW.get_floats("mean", ()) == (0.5, 1.0)
    assert VIEW.require_int("inner.depth") == 2
    assert VIEW.section("inner").require_int("depth") == 2


def test_a_missing_or_null_key_gives_the_default_and_a_falsy_value_does_not():
    for key in ("absent", "nothing", "inner.absent", "absent.deeper", "name.deeper"):
        assert (VIEW.get_int(key, 7), VIEW.has(key)) == (7, False), key
    view = ConfigView(values={"zero": 0, "no": False, "empty": "", "none": []}, file="f")
    assert view.get_int("zero", 7) == 0
    assert view.get_bool("no", True) is False
    assert view.get_str("empty", "x") == ""
    assert view.get_ints("none", (1,)) == ()


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: VIEW.require_int("inner.width"), r"json: 'inner\.width' is missing; expected a whole"),
    (lambda: VIEW.section("inner").require_int("width"), r"'inner\.width' is missing"),
    (lambda: VIEW.require_int("epsilon"), "'epsilon' is 1e-06; expected a whole number"),
    (lambda: VIEW.require_int("tied"), "'tied' is False; expected a whole number"),
    (lambda: VIEW.require_float("tied"), "'tied' is False; expected a finite number"),
    (lambda: VIEW.require_float("huge"), r"'huge' is 1000.*\.\.\.; expected a finite number"),
    (lambda: VIEW.require_str("depth"), "'depth' is 4; expected a string"),
    (lambda: VIEW.get_bool("depth", True), "'depth' is 4; expected true or false"),
    (lambda: VIEW.require_ints("mean"), r"'mean' is \[0.5, 1\]; expected a list of whole numbers"),
    (lambda: VIEW.get_ints("depth", ()), "'depth' is 4; expected a list of whole numbers"),
    (lambda: VIEW.section("depth"), "'depth' is 4; expected an object"),
]  # fmt: skip


def test_a_missing_value_or_one_of_another_type_is_named(subtests):
    for read, message in WRONG:
        with subtests.test(message), pytest.raises(CheckpointError, match=message):
            read()


def test_flat_and_nested_text_and_rotary_settings_read_alike(folders: dict[str, Path]) -> None:
    flat, nested = (Checkpoint.open(folders[style]).text_config for style in ("flat", "nested"))
    shared = {"hidden_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "vocab_size"}
    assert {key: flat.values[key] for key in shared} == {key: nested.values[key] for key in shared}
    assert dict(flat.rope().items()) == dict(nested.rope().items())
    assert flat.rope().require_ints("mrope_section") == (2, 3, 3)
    assert flat.rope().require_str("rope_type") == "default"


def test_rotary_settings_keep_their_base_type_and_factor():
    view = ConfigView(values={"rope_theta": 5e5, "rope_scaling": None}, file="config.json")
    assert dict(view.rope().items()) == {"rope_theta": 5e5, "rope_type": "default"}
    scaling = {"type": "yarn", "factor": 4.0}
    rope = ConfigView(values={"rope_theta": 1e6, "rope_scaling": scaling}, file="config.json").rope()
    assert (rope.require_str("rope_type"), rope.require_float("factor")) == ("yarn", 4.0)


def test_the_combined_processor_file_comes_first_and_images_settings_serve_videos(tmp_path):
    combined = {"image_processor": {"patch_size": 16}, "video_processor": {"patch_size": 18}}
    older = {"config": {}, "preprocessor_config": {"patch_size": 14}}
    checkpoint = Checkpoint.open(write_folder(tmp_path / "c", processor_config=combined, **older))
    assert checkpoint.image_processor().require_int("patch_size") == 16
    assert checkpoint.video_processor().require_int("patch_size") == 18
    folder = write_folder(tmp_path / "older", **older)
    assert Checkpoint.open(folder).video_processor().require_int("patch_size") == 14


def test_an_absent_json_file_and_a_missing_model_type_are_named(tmp_path):
    checkpoint = Checkpoint.open(write_folder(tmp_path / "c", config={}))
    words = r"holds no preprocessor_config\.json; expected it next to config\.json"
    with pytest.raises(CheckpointError, match=words):
        checkpoint.image_processor()
    with pytest.raises(CheckpointError, match="'model_type' is missing; expected a string"):
        _ = checkpoint.model_type


def test_json_files_are_only_read_from_the_folder(tmp_path, subtests):
    (tmp_path / "secret.json").write_text("{}")
    folder = write_folder(tmp_path / "c", config={})
    (folder / "a").mkdir()
    (folder / "a" / "b.json").write_text("{}")
    words = r"plain name inside the checkpoint's folder|holds no "
    for name in ("../secret.json", "/etc/passwd", "a/b.json", "..", "a\\b.json"):
        with subtests.test(name), pytest.raises(CheckpointError, match=words):
            Checkpoint.open(folder).read_json(name)


BROKEN = {
    "cut": (b"{", "is not valid JSON"),
    "empty": (b"", "is not valid JSON"),
    "a list": (b"[]", "holds a JSON list; expected an object"),
    "a key twice": (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
    "NaN": (b'{"a": NaN}', "NaN is not a JSON number"),
    "deep": (b'{"a": ' + b"[" * 100_000, "is not valid JSON"),
    "no text": (b"\xff\xfe{}", "is not valid JSON"),
    "large": (b" " * 33 * 2**20, "is larger than 33554432 bytes"),
}


def test_a_broken_config_is_refused(tmp_path, subtests):
    folder = write_folder(tmp_path / "c", config={})
    for name, (text, message) in BROKEN.items():
        (folder / "config.json").write_bytes(text)
        with subtests.test(name), pytest.raises(CheckpointError, match=message):
            Checkpoint.open(folder)


def test_infinity_in_a_config_is_read_and_is_no_number(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "c", config={})
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity], "low": -Infinity}')
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.config["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    with pytest.raises(CheckpointError, match=r"'low' is {'__float__': '-Infinity'}; expected a"):
        checkpoint.view.require_float("low")


def test_remote_code_is_listed_by_file(tmp_path: Path, folders: dict[str, Path]) -> None:
    assert Checkpoint.open(folders["nested"]).remote_code == ()
    auto_map = {
        "AutoConfig": "configuration_x.XConfig",
        "AutoModel": "modeling_x.XModel",
        "AutoModelForCausalLM": "other/repo--modeling_y.Y",
        "AutoTokenizer": [None, "tokenization_x.XTokenizer"],
    }
    checkpoint = Checkpoint.open(write_folder(tmp_path / "c", config={"auto_map": auto_map}))
    expected = ("configuration_x.py", "modeling_x.py", "other/repo--modeling_y.py", "tokenization_x.py")
    assert checkpoint.remote_code == expected


def reject(error: Exception, module: str) -> None:
    """Raise an error in a function that belongs to a module of this name."""
    scope = {"__name__": module, "error": error}
    exec(compile("def load_state_dict():\n    raise error", f"/lib/site-packages/{module}.py", "exec"), scope)
    scope["load_state_dict"]()  # type: ignore[operator]


def test_what_a_library_raises_is_an_error_about_the_checkpoint(subtests):
    words = r"config\.json: its settings do not make a model \(KeyError: 3"
    for module in ("transformers.models.any", "tokenizers", "safetensors.torch", "torch.nn.modules.module"):
        with (
            subtests.test(module),
            pytest.raises(CheckpointError, match=words),
            checkpoint_errors("config.json"),
        ):
            reject(KeyError(3), module)


def test_a_bug_of_a_recipe_keeps_its_type_and_traceback():
    @reads_checkpoint
    def tower(given):
        raise given.error

    for error in (AttributeError("x"), TypeError("x"), ZeroDivisionError("x")):
        with pytest.raises(type(error)) as caught:
            tower(SimpleNamespace(path=Path("x"), error=error))
        assert caught.traceback[-1].name == "tower"


def test_a_missing_attribute_of_a_tower_is_no_fault_of_the_checkpoint():
    # torch's own frame is the innermost.
    tower = reads_checkpoint(lambda _: nn.Linear(1, 1).wieght)
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'wieght'"):
        tower(SimpleNamespace(path=Path("x")))


def test_a_bug_that_a_library_calls_into_is_still_a_bug():
    def ours():
        raise AttributeError("ours")

    scope = {"__name__": "transformers.any", "call": ours}
    exec(compile("def run():\n    call()", "/lib/site-packages/transformers/any.py", "exec"), scope)
    with pytest.raises(AttributeError, match="ours"), checkpoint_errors("config.json"):
        scope["run"]()  # type: ignore[operator]


def test_memory_that_ran_out_is_not_blamed_on_the_checkpoint():
    with pytest.raises(RuntimeError, match="out of memory"), checkpoint_errors("config.json"):
        reject(RuntimeError("out of memory"), "transformers")
