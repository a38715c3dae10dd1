"""Where checkpoints come from: folders, pinned hub commits, and what each refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.bundle.manifest import CheckpointIdentity
from vlexport.checkpoint import Checkpoint
from vlexport.errors import CheckpointError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen2_5_vl(tmp_path_factory.mktemp("source") / "tiny", depth=1, shards=3)


@pytest.fixture
def copied(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copied"))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache, and no way online."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def add_snapshot(hub_cache: Path, tiny: Path) -> Path:
    """The folder layout of the hub cache: a snapshot of links into blobs."""
    entry = hub_cache / "models--org--tiny"
    snapshot, blobs = entry / "snapshots" / COMMIT, entry / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for index, file in enumerate(sorted(tiny.iterdir())):
        shutil.copy(file, blobs / f"{index:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{index:040x}")
    return snapshot


def test_importing_checkpoints_config_names_shapes_and_digest_need_no_torch(tiny: Path) -> None:
    code = (
        "import sys, vlexport.recipes.demo.writing; from vlexport.checkpoint import Checkpoint; "
        "c = Checkpoint.open(sys.argv[1]); "
        "names = c.tensor_names(); c.stored(names[0]); c.digest(names); c.model_type; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny)], check=True)


def test_a_local_folder_has_no_revision(tiny: Path) -> None:
    checkpoint = Checkpoint.open(str(tiny))
    assert (checkpoint.source, checkpoint.path, checkpoint.revision) == (str(tiny), tiny, None)


NO_SOURCE = [
    ("EMPTY/nowhere", None, r"nowhere' does not exist.*expected a folder with config\.json"),
    ("./nowhere/at/all", None, r"'\./nowhere/at/all' does not exist here; expected a folder"),
    ("TINY/config.json", None, r"config\.json' is not a folder.*Pass its folder, .*tiny"),
    ("https://hub.example/org/name", None, r"a URL; expected a folder or a hub id\. Pass org/name alone"),
    ("EMPTY", None, r"holds no config\.json; expected the folder of a Hugging Face"),
    ("TINY", "main", "is a local folder, but revision 'main' is given"),
    ("org/name@../main", None, r"revision '\.\./main'; expected a branch, a tag or a commit"),
    ("org/name", "-x", r"revision '-x'; expected a branch"),
    (f"org/name@{COMMIT}", "f" * 40, "expected one revision"),
]


def test_a_source_that_is_no_folder_or_revision_is_refused(tiny, tmp_path, subtests):
    for source, revision, message in NO_SOURCE:
        given = source.replace("TINY", str(tiny)).replace("EMPTY", str(tmp_path))
        with subtests.test(source), pytest.raises(CheckpointError, match=message):
            Checkpoint.open(given, revision=revision)
    with pytest.raises(CheckpointError, match="int given as a checkpoint; expected the path of a folder"):
        Checkpoint.open(3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("hub_cache")
def test_offline_without_a_cached_copy_is_a_clear_error() -> None:
    with pytest.raises(
        CheckpointError, match=rf"org/tiny@{COMMIT} is not in the hub cache.*HF_HUB_OFFLINE is set"
    ):
        Checkpoint.open(f"org/tiny@{COMMIT}")
    with pytest.raises(CheckpointError, match=r"org/tiny@main is not in the hub cache"):
        Checkpoint.open("org/tiny")


@pytest.mark.parametrize("source", ["org/tiny", "org/tiny@main", "org/tiny@refs/pr/3"])
def test_a_branch_is_resolved_to_its_commit_and_printed(
    hub_cache: Path, tiny: Path, caplog, source: str
) -> None:
    entry = add_snapshot(hub_cache, tiny).parent.parent
    for name in ("main", "refs/pr/3"):
        (entry / "refs" / name).parent.mkdir(parents=True, exist_ok=True)
        (entry / "refs" / name).write_text(COMMIT, encoding="utf-8")
    with caplog.at_level("INFO"):
        checkpoint = Checkpoint.open(source)
    assert (checkpoint.source, checkpoint.revision) == (f"org/tiny@{COMMIT}", COMMIT)
    assert f"{source.partition('@')[2] or 'main'} is commit {COMMIT}" in caplog.text
    assert checkpoint.digest(checkpoint.tensor_names()) == Checkpoint.open(tiny).digest(
        checkpoint.tensor_names()
    )


def test_a_local_checkpoint_is_found_from_any_folder_and_never_looked_up_on_the_hub(
    tiny: Path, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "tiny").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    place = Checkpoint.open("org/tiny").location.place
    monkeypatch.chdir("/")
    monkeypatch.setattr("vlexport.checkpoint.source.download", None)
    known = CheckpointIdentity(source=place, revision=None, weights="d" * 64)
    assert Checkpoint.open(known.place).path.samefile(tiny)
    for gone in (place + "-moved", "org/tiny"):
        with pytest.raises(CheckpointError, match="does not exist; expected a folder"):
            Checkpoint.open(replace(known, source=gone).place)


def test_a_hub_checkpoint_is_opened_at_its_commit_from_any_folder(hub_cache: Path, tiny: Path) -> None:
    add_snapshot(hub_cache, tiny)
    opened = Checkpoint.open("org/tiny", revision=COMMIT)
    known = CheckpointIdentity(source=opened.location.place, revision=COMMIT, weights="d" * 64)
    assert known.place == replace(known, source="org/tiny").place == f"org/tiny@{COMMIT}"
    assert Checkpoint.open(known.place).revision == COMMIT


def test_a_cached_commit_opens_offline(hub_cache: Path, tiny: Path) -> None:
    snapshot = add_snapshot(hub_cache, tiny)
    checkpoint = Checkpoint.open("org/tiny", revision=COMMIT)
    assert (checkpoint.source, checkpoint.revision) == (f"org/tiny@{COMMIT}", COMMIT)
    assert checkpoint.path.samefile(snapshot)
    assert checkpoint.digest(checkpoint.tensor_names()) == Checkpoint.open(tiny).digest(
        checkpoint.tensor_names()
    )
    assert checkpoint.complete() == checkpoint.path


def test_a_shard_missing_from_the_cache_is_only_missed_when_needed(hub_cache: Path, tiny: Path) -> None:
    snapshot = add_snapshot(hub_cache, tiny)
    (snapshot / "model-00001-of-00003.safetensors").unlink()
    checkpoint = Checkpoint.open(f"org/tiny@{COMMIT}")
    names = [name for name in checkpoint.tensor_names() if name.startswith("visual.merger.")]
    assert set(checkpoint.read(names)) == set(names)
    with pytest.raises(CheckpointError, match=r"shard model-00001-of-00003\.safetensors is missing"):
        checkpoint.read(["lm_head.weight"])


def test_a_snapshot_folder_opens_as_a_local_folder_and_knows_its_commit(hub_cache: Path, tiny: Path) -> None:
    assert Checkpoint.open(add_snapshot(hub_cache, tiny)).revision == COMMIT


def read_all(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.read(checkpoint.tensor_names())


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "model-00003-of-00003.safetensors"]
)
def test_files_that_link_out_of_the_folder_are_refused(copied: Path, tiny: Path, name: str) -> None:
    (copied / name).unlink()
    (copied / name).symlink_to(tiny / name)
    with pytest.raises(CheckpointError, match="outside the checkpoint; expected files inside it"):
        read_all(copied)


def test_links_inside_the_folder_and_to_it_are_followed(copied: Path, tmp_path: Path) -> None:
    (copied / "config.json").rename(copied / "config-2.json")
    (copied / "config.json").symlink_to("config-2.json")
    (tmp_path / "link").symlink_to(copied)
    assert Checkpoint.open(tmp_path / "link").model_type == "qwen2_5_vl"


def test_a_pipe_in_place_of_a_file_is_refused_at_once(copied: Path) -> None:
    (copied / "generation_config.json").unlink()
    os.mkfifo(copied / "generation_config.json")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        Checkpoint.open(copied).read_json("generation_config.json")
