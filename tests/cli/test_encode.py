"""`encode`: the tensors of each item, and what pruning does to videos."""

import io
import json
import os
import re
import signal
import stat
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file

from tests.cli.lines import SCRIPT, vlexport
from vlexport._build import token_graphs
from vlexport._build.aoti import target_here
from vlexport.bundle import Bundle
from vlexport.cli.interrupts import Stopped
from vlexport.pruning import evs
from vlexport.runtime.pipeline import Pipeline


@pytest.fixture
def encode(built, tmp_path):
    def run(*words):
        out = tmp_path / "features.safetensors"
        vlexport("encode", built, "--output", out, *words).ends(0)
        return load_file(out)

    return run


def test_items_are_numbered_by_kind_in_the_order_given(encode, image, video):
    words = ("--video", video, "--image", image, "--image", image, "--fps", 2)
    found = encode(*words)
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        "image.0.embeds": [8, 64],
        "image.0.grid": [3],
        "image.1.embeds": [8, 64],
        "image.1.grid": [3],
        "video.0.embeds": [48, 64],
        "video.0.grid": [3],
    }
    assert found["video.0.grid"].tolist() == [4, 6, 8]
    assert torch.equal(found["image.0.embeds"], found["image.1.embeds"])


@pytest.mark.seconds
def test_stdout_is_the_file_and_stderr_or_json_names_its_tensors(built, image, tmp_path):
    out = tmp_path / "x.safetensors"
    words = ("encode", built, "--image", image, "--output", out)
    ran, found = vlexport(*words), vlexport(*words, "--json").document
    assert ran.out == f"{out}\n"
    lines = ran.err.splitlines()
    phases = ["open", "read 1 of 1", "encode 1 of 1, 0 of 8 tokens"]
    assert [line.split(" s  ")[-1] for line in lines[:3]] == phases
    assert lines[3:] == ["image.0.embeds [8, 64]", "image.0.grid [3]"]
    assert (found["schema"], found["verb"], found["out"]) == (1, "encode", str(out))
    assert found["tensors"] == {"image.0.embeds": [8, 64], "image.0.grid": [3]}


def test_an_interrupt_says_what_is_kept_of_one_file(built, image, tmp_path, monkeypatch):
    def stop(*_, **__):
        raise Stopped(signal.SIGINT)

    monkeypatch.setattr(Pipeline, "encode_all", stop)
    out = tmp_path / "x.safetensors"
    ran = vlexport("encode", built, image, "--output", out)
    assert (ran.code, out.exists()) == (130, False)
    assert f"{out}: nothing is kept: one file is whole or absent." in ran.err


@pytest.mark.seconds
def test_folders_globs_and_stdin_are_media(built, image, tmp_path, monkeypatch):
    folder, out = tmp_path / "photos", tmp_path / "x.safetensors"
    folder.mkdir()
    for name in ("b.png", "a.png", ".hidden"):
        (folder / name).write_bytes(image.read_bytes() if name[0] != "." else b"")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(image.read_bytes())))
    words = ("--image", folder, "--image", folder / "*.png", "--image", "-")
    assert vlexport("encode", built, *words, "--output", out, "-q").ends(0).err == ""
    with safe_open(out, framework="pt") as file:
        found = file.metadata()
    assert [found[f"image.{at}.file"] for at in range(5)] == ["a.png", "b.png"] * 2 + ["stdin"]
    (tmp_path / "empty").mkdir()
    for place, reason in (
        (tmp_path / "empty", "a folder without files"),
        (tmp_path / "*.jpg", "No such file"),
    ):
        assert reason in vlexport("encode", built, "--image", place, "--output", out).ends(2).err


@pytest.mark.seconds
def test_files_are_images_or_videos_by_their_content(built, image, video, tmp_path):
    photo, clip = (tmp_path / name for name in ("photo.dat", "clip.dat"))
    photo.write_bytes(image.read_bytes())
    clip.write_bytes(video.read_bytes())
    found, named = tmp_path / "found.safetensors", tmp_path / "named.safetensors"
    words = ("encode", built, "--fps", 2, "--output")
    # As a shell expands `--image *.dat`: the option takes the first, the others stand alone.
    assert vlexport(*words, found, "--image", photo, clip).code == 0
    assert vlexport(*words, named, "--image", image, "--video", video).code == 0
    (kept, expected) = (load_file(path) for path in (found, named))
    assert {name: rows.tolist() for name, rows in kept.items()} == {
        name: rows.tolist() for name, rows in expected.items()
    }
    ran = vlexport(*words, found, clip, tmp_path / "absent.png")
    assert (ran.code, "image.0" in ran.err, "absent.png" in ran.err) == (2, True, True)
    assert "video.0.embeds" in load_file(found)
    folder = tmp_path / "shards"
    assert vlexport("encode", built, "--fps", 2, "--output-dir", folder, photo, clip).code == 0
    shard = load_file(next(folder.glob("*.safetensors")))
    assert torch.equal(shard["item.1.embeds"], expected["video.0.embeds"])


@pytest.mark.seconds
def test_embeddings_go_to_stdout(built, image, tmp_path):
    done = subprocess.run([SCRIPT, "encode", built, image, "-q", "-o", "-"], capture_output=True, check=True)
    assert done.stderr == b""
    assert vlexport("encode", built, image, "-o", tmp_path / "x.safetensors").code == 0
    found, expected = load(done.stdout), load_file(tmp_path / "x.safetensors")
    assert found.keys() == expected.keys()
    assert torch.equal(found["image.0.embeds"], expected["image.0.embeds"])
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        vlexport("encode", built, image, "-o", "-", stdout=closed).ends(0)
    ran = vlexport("encode", built, image, "--output", "-", "--json")
    assert (ran.code, "--output - given with --json" in ran.err) == (2, True)


@pytest.mark.seconds
def test_the_file_names_what_made_it_and_no_folder_of_this_machine(built, image, video, tmp_path):
    out = tmp_path / "x.safetensors"
    words = ("encode", built, "--image", image, "--video", video, "--fps", 2, "--prune", 0.5, "--output", out)
    assert vlexport(*words).code == 0
    with safe_open(out, framework="pt") as file:
        found = file.metadata()
    bundle = Bundle.open(built)
    assert (found["bundle_key"], found["bundle_digest"]) == (bundle.manifest.key, bundle.digest)
    assert (found["image.0.file"], found["video.0.file"]) == (image.name, video.name)
    assert (found["prune"], found["fps"]) == ("0.5", "2.0")
    assert (found["recipe"], found["backend"], found["precision"]) == ("qwen2_5_vl", "eager", "float32")
    assert not [value for value in found.values() if "/" in value]


@pytest.mark.seconds
def test_pruning_adds_kept_and_mask_to_videos_and_leaves_images_alone(encode, image, video):
    words = ("--image", image, "--video", video, "--fps", 2)
    whole, pruned = encode(*words), encode(*words, "--prune", 0.5)
    kept, mask = pruned["video.0.kept"], pruned["video.0.mask"]
    expected = evs.prune(whole["video.0.embeds"], (4, 6, 8), 2, 0.5)
    assert (kept.dtype, mask.dtype) == (torch.int64, torch.bool)
    assert torch.equal(kept, expected.kept)
    assert torch.equal(pruned["video.0.embeds"], whole["video.0.embeds"][kept])
    assert torch.equal(mask.nonzero().flatten(), kept)
    assert len(mask) == len(whole["video.0.embeds"])
    assert len(kept) == evs.EvsSelector().retained_count(12, 4, 0.5)
    assert torch.equal(pruned["image.0.embeds"], whole["image.0.embeds"])
    assert set(pruned) - set(whole) == {"video.0.kept", "video.0.mask"}


@pytest.mark.seconds
def test_how_videos_were_pruned_is_told_and_a_reason_once(built, video, tmp_path, monkeypatch):
    out = tmp_path / "x.safetensors"
    words = ("encode", built, "--video", video, "--fps", 2, "--prune", 0.5, "--output", out)
    assert vlexport(*words, "--json").document["forms"] == {"video.0": {"prune": "compiled"}}
    told = vlexport(*words).err
    assert "video.0 prune compiled" in told
    assert "video.0 kept 24 of 48 tokens" in told
    token_graphs.warn_once.cache_clear()
    here = replace(target_here(), torch="9.0")
    monkeypatch.setattr(token_graphs, "target_here", lambda _: here)
    ran, again = vlexport(*words, "--json"), vlexport(*words[:-1], tmp_path / "y.safetensors")
    (form,) = ran.document["forms"]["video.0"].values()
    assert re.fullmatch("eager: packages for inductor.* differ from this machine in torch", form)
    reason = f"pruning and positions run {form.replace('eager', 'eagerly')}"
    assert (ran.err.count(reason), again.err.count(reason)) == (1, 0)
    assert f"video.0 prune {form}" in again.err


WHOLE = {
    "prune by the bundle's method": (
        ("--prune", 0.5),
        "prune 0.5 by 'evs': not for images, which stay whole",
    ),
    "before the tower": (("--prune-before", "static:0.7"), "prune_before 'static:0.7': not for images"),
}


@pytest.mark.seconds
@pytest.mark.parametrize("case", WHOLE)
def test_a_method_for_media_that_are_not_given_is_told_with_one_that_is_for_these(
    built, image, tmp_path, case
):
    options, words = WHOLE[case]
    out = ("--output", tmp_path / "x.safetensors")
    ran = vlexport("encode", built, "--image", image, *options, *out).ends(0)
    assert words in ran.err
    ways = "for images give prune_before predicted or contrast:0.5, or prune 0.5 with method divprune."
    assert ways in ran.err
    for instead in (("--prune-before", "contrast:0.5"), ("--prune", 0.5, "--method", "divprune")):
        ran = vlexport("encode", built, "--image", image, *instead, *out)
        assert "stay whole" not in ran.err
        assert "image.0 kept 4 of 8 tokens" in ran.err


@pytest.mark.seconds
def test_images_alone_can_be_pruned_without_a_rate_of_frames(encode, image):
    assert set(encode("--image", image, "--prune", 0.5)) == {"image.0.embeds", "image.0.grid"}


@pytest.mark.seconds
def test_a_failed_bundle_runs_when_that_is_requested(failed, wrong_recipe, image, tmp_path):
    words = ("--recipe", wrong_recipe, "--image", image, "--output", tmp_path / "x.safetensors")
    vlexport("encode", failed, "--allow-failed", *words).ends(0)


@pytest.mark.seconds
def test_an_older_result_is_replaced_and_keeps_ordinary_rights(encode, image, tmp_path):
    out = tmp_path / "features.safetensors"
    out.write_bytes(b"old")
    assert encode("--image", image)
    fresh = tmp_path / "fresh"
    fresh.touch()
    assert stat.S_IMODE(out.stat().st_mode) == stat.S_IMODE(fresh.stat().st_mode)


@pytest.mark.seconds
def test_the_number_of_threads_changes_rounding_alone(encode, image):
    one, two = (encode("--image", image, "--threads", count)["image.0.embeds"] for count in (1, 2))
    # Measured: up to 5.1e-7 in PyTorch; room for other processors.
    assert (one - two).norm() < 2e-6 * one.norm()


@pytest.mark.seconds
def test_a_full_disk_leaves_the_older_result(built, image, tmp_path, monkeypatch):
    import safetensors.torch
    from safetensors import SafetensorError

    def save_file(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    out = tmp_path / "x.safetensors"
    out.write_bytes(b"old")
    monkeypatch.setattr(safetensors.torch, "save_file", save_file)
    ran = vlexport("encode", built, "--image", image, "--output", out, "--json").ends(7)
    assert json.loads(ran.out)["error"]["exit_code"] == 7
    assert out.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_good_items_are_written_and_bad_ones_named_with_a_code(built, image, video, tmp_path):
    out, absent, bad = tmp_path / "x.safetensors", tmp_path / "none.png", tmp_path / "bad.png"
    bad.write_bytes(b"no picture")
    words = ("--image", image, "--image", bad, "--image", image, "--image", absent, "--video", video)
    ran = vlexport("encode", built, "--output", out, *words, "--json").ends(2)
    found = json.loads(ran.out)
    assert set(load_file(out)) == set(found["tensors"])
    assert {name.rpartition(".")[0] for name in found["tensors"]} == {"image.0", "image.2", "video.0"}
    assert {name: each["exit_code"] for name, each in found["failed"].items()} == {"image.1": 2, "image.3": 2}
    assert "none.png" in found["failed"]["image.3"]["message"]
    assert "vlexport: image.1: " in ran.err
    assert vlexport("encode", built, "--output", out, *words).out == f"{out}\n"


def test_a_result_of_nothing_is_not_written(built, tmp_path):
    out = tmp_path / "x.safetensors"
    words = ("--image", tmp_path / "a.png", "--image", tmp_path / "b.png")
    ran = vlexport("encode", built, "--output", out, *words)
    assert (ran.code, ran.out) == (2, "")
    assert "b.png" in ran.err
    assert not out.exists()


@pytest.mark.seconds
def test_embeddings_are_compared_by_their_digests(built, image, tmp_path):
    words = ("encode", built, "--image", image, "--image", image)
    files = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for path in files:
        assert vlexport(*words, "--output", path).code == 0
    same = vlexport("compare", *files, "--json").document
    assert (same["kind"], same["identity"]) == ("embeddings", [])
    assert [item["first"] == item["second"] for item in same["items"]] == [True, True]
    tensors, metadata = load_file(files[1]), safe_open(files[1], framework="pt").metadata()
    tensors["image.1.embeds"] = tensors["image.1.embeds"] * 1.5
    metadata |= {"image.1.rows_sha256": "f" * 64, "precision": "int8"}
    save_file(tensors, files[1], metadata)
    ran = vlexport("compare", *files)
    assert "items: 1 of 2 have the same bits" in ran.out
    assert next(line.split() for line in ran.lines if line.startswith("image.1"))[-1] == "3.3e-01"
    assert next(line.split() for line in ran.lines if line.startswith("precision"))[1:] == ["float32", "int8"]
    assert "graph 'x' given with embeddings" in vlexport("compare", *files, "--graph", "x").ends(2).err
    (tmp_path / "c.safetensors").write_bytes(b"\0" * 20)
    (tmp_path / "deep.jsonl").write_text("[" * 200_000)
    for name in ("c.safetensors", "deep.jsonl"):
        assert "no embeddings of vlexport" in vlexport("compare", files[0], tmp_path / name).ends(2).err
    save_file({}, files[1], metadata)
    assert "a digest of image.1 without its rows" in vlexport("compare", *files).ends(2).err


@pytest.mark.seconds
def test_an_index_of_a_collection_is_a_file_of_digests(built, image, tmp_path):
    (tmp_path / "list").write_text(f"{image}\nmissing.png\n")
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        vlexport("encode", built, "--list", tmp_path / "list", "--output-dir", folder)
    pairs = [
        [folder / name for folder, name in zip(folders, names, strict=True)]
        for names in (("index.jsonl",) * 2, ("shard-000000.safetensors", "index.jsonl"))
    ]
    for pair in pairs:
        (item,) = vlexport("compare", *pair, "--json").document["items"]
        assert (item["name"], item["first"]) == ("item.0", item["second"])
