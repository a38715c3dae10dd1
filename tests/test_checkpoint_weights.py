"""Names, shapes and shards: what is missing, left over, misshaped or misplaced."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tiny_qwen2_5_vl import Tiny, tower_tensors, write_tiny_qwen2_5_vl
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError

PREFIXES = ("visual.", "model.visual.")
INDEX = "model.safetensors.index.json"
EXPECTED = {name: tensor.shape for name, tensor in tower_tensors(Tiny(depth=1)).items()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("weights") / "tiny", depth=1, shards=2)


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copied"))


def edit_index(folder: Path, edit: Callable[[dict[str, str]], object]) -> Path:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize("naming", PREFIXES)
def test_both_generations_of_names_resolve(tmp_path: Path, naming: str) -> None:
    folder = write_tiny_qwen2_5_vl(tmp_path / "t", depth=1, naming=naming)
    checkpoint = Checkpoint.open(folder)
    prefix = checkpoint.resolve_prefix(PREFIXES)
    assert prefix == naming
    assert checkpoint.check_names(EXPECTED, prefix) == {name: naming + name for name in EXPECTED}


def test_a_checkpoint_without_tower_shows_what_its_names_begin_with(tiny: Path) -> None:
    message = r"no tensor below 'vision_tower\.', 'vit\.'; its names begin with lm_head\., model\., visual\."
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tiny).resolve_prefix(("vision_tower.", "vit."))


def test_two_sets_of_names_are_refused(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tensors below 'visual\.' and 'model\.'; expected one of"):
        Checkpoint.open(tiny).resolve_prefix(("visual.", "model."))


def test_missing_tensors_are_listed(tiny: Path) -> None:
    wanted = {**EXPECTED, "blocks.7.norm1.weight": (64,), "blocks.7.norm2.weight": (64,)}
    message = (
        r"lacks 2 of 20 expected tensors below 'visual\.': "
        r"visual\.blocks\.7\.norm1\.weight, visual\.blocks\.7\.norm2\.weight\."
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tiny).check_names(wanted, "visual.")


def test_unexpected_tensors_are_listed(tiny: Path) -> None:
    wanted = {name: shape for name, shape in EXPECTED.items() if name != "merger.ln_q.weight"}
    message = r"has 1 unexpected tensors below 'visual\.': visual\.merger\.ln_q\.weight; expected 17"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tiny).check_names(wanted, "visual.")


def test_misshaped_tensors_are_listed_with_both_shapes(tiny: Path) -> None:
    wanted = {**EXPECTED, "merger.ln_q.weight": (32,)}
    message = r"1 tensors of another shape .*: visual\.merger\.ln_q\.weight \[64\] instead of \[32\]"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tiny).check_names(wanted, "visual.")


def test_long_lists_are_sorted_cut_and_counted(tiny: Path) -> None:
    wanted = {f"extra.{index:02d}": (1,) for index in reversed(range(30))}
    message = r"lacks 30 of 30 .*visual\.extra\.00, visual\.extra\.01, .*visual\.extra\.09 and 20 more"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tiny).check_names(wanted, "visual.")


def test_an_unknown_tensor_is_named(tiny: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tensor 'visual\.absent'"):
        Checkpoint.open(tiny).stored("visual.absent")


def test_shapes_and_dtypes_are_known_without_reading(tiny: Path) -> None:
    stored = Checkpoint.open(tiny).stored("visual.patch_embed.proj.weight")
    assert (stored.dtype, stored.shape, stored.num_bytes) == ("float32", (64, 3, 2, 14, 14), 64 * 1176 * 4)


@pytest.mark.parametrize("suffix", ["bin", "pt", "pth", "ckpt"])
def test_pickles_are_never_loaded(copied: Path, suffix: str) -> None:
    for path in copied.glob("model*"):
        path.unlink()
    (copied / f"pytorch_model.{suffix}").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match=r"pickles only.*runs code, so vlexport never does\. Convert"):
        Checkpoint.open(copied)


def test_a_folder_without_weights_says_so(copied: Path) -> None:
    for path in copied.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"holds no weights; expected model\.safetensors or"):
        Checkpoint.open(copied)


def test_shards_without_their_index_are_refused(copied: Path) -> None:
    (copied / INDEX).unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors, but neither"):
        Checkpoint.open(copied)


def test_two_sets_of_weights_are_refused(copied: Path) -> None:
    shutil.copy(copied / "model-00001-of-00002.safetensors", copied / "model.safetensors")
    with pytest.raises(CheckpointError, match="expected one set of weights"):
        Checkpoint.open(copied)


def test_a_missing_shard_is_named_with_what_it_should_hold(copied: Path) -> None:
    (copied / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"shard model-00002-of-00002\.safetensors is missing, .* \d+ tensors"
    ):
        Checkpoint.open(copied).check_names(EXPECTED, "visual.")


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/tmp/x.safetensors",
        "sub/x.safetensors",
        "x.bin",
        "..",
        "",
        "C:x.safetensors",
        3,
    ],
)
def test_an_index_may_only_name_safetensors_beside_it(copied: Path, file: str) -> None:
    edit_index(copied, lambda weight_map: weight_map.update({"visual.merger.ln_q.weight": file}))
    with pytest.raises(
        CheckpointError, match=r"places tensor 'visual\.merger\.ln_q\.weight' in .*beside the index"
    ):
        Checkpoint.open(copied)


def test_an_index_that_places_a_tensor_in_the_wrong_shard_is_refused(copied: Path) -> None:
    first = "model-00001-of-00002.safetensors"
    edit_index(copied, lambda weight_map: weight_map.update({"visual.merger.ln_q.weight": first}))
    with pytest.raises(CheckpointError, match=r"in other shards|lacks 1 tensors"):
        Checkpoint.open(copied).read(["visual.merger.ln_q.weight"])


def test_a_tensor_in_two_shards_is_refused(copied: Path) -> None:
    shutil.copy(copied / "model-00002-of-00002.safetensors", copied / "model-3.safetensors")
    edit_index(copied, lambda weight_map: weight_map.update({"extra": "model-3.safetensors"}))
    with pytest.raises(
        CheckpointError, match=r"model-3\.safetensors holds \d+ tensors that .* in other shards"
    ):
        Checkpoint.open(copied).stored("extra")


def test_an_index_that_lists_a_name_twice_is_refused(copied: Path) -> None:
    (copied / INDEX).write_text('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
    with pytest.raises(CheckpointError, match="duplicate key 'a'"):
        Checkpoint.open(copied)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": {}}', '{"weight_map": []}'])
def test_an_index_without_weight_map_is_refused(copied: Path, index: str) -> None:
    (copied / INDEX).write_text(index)
    with pytest.raises(CheckpointError, match="'weight_map' is missing or empty"):
        Checkpoint.open(copied)


def test_a_truncated_shard_is_called_truncated(copied: Path) -> None:
    path = copied / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002\.safetensors is truncated: it holds \d+ bytes"
    ):
        Checkpoint.open(copied).check_names(EXPECTED, "visual.")


def test_a_shard_that_changes_between_header_and_data_is_refused(copied: Path) -> None:
    checkpoint = Checkpoint.open(copied)
    wanted = checkpoint.check_names(EXPECTED, "visual.")
    path = copied / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        checkpoint.read(wanted)
