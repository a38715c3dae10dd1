"""`encode --output-dir`: shards, their provenance and index; what is resumed, made again and refused."""

import errno
import hashlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image
from pyarrow import parquet
from safetensors import safe_open
from safetensors.torch import load_file

from tests.cli.lines import vlexport
from tests.media import made_videos
from vlexport import errors
from vlexport.backends import _torch
from vlexport.bundle import Bundle
from vlexport.media import videos
from vlexport.runtime import collection

SEED = 21


def photos(folder, num, side=70):
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(num)
    for at in range(num):
        size = (int(draw.integers(56, side)), side, 3)
        Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(folder / f"{at:04}.png")
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name[0] != "."}


def index(folder):
    return [json.loads(line) for line in (folder / "index.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture
def shelf(built, tmp_path, monkeypatch):
    """A folder with seven pictures, and the command that encodes them two by two."""
    monkeypatch.chdir(tmp_path)
    photos(tmp_path / "photos", 7)

    def encode(*words, out="out"):
        return vlexport("encode", built, "--output-dir", out, "--shard-items", 2, *words)

    return encode


@pytest.mark.seconds
def test_shards_hold_what_one_file_holds_and_say_what_made_it(built, shelf, video, tmp_path):
    words = ("--image", "photos", "--video", video, "--fps", 2, "--prune", 0.5)
    assert shelf(*words, "--shard-items", 8).ends(0).out == "out\n"
    assert vlexport("encode", built, "--output", "one.safetensors", *words).code == 0
    one, found = load_file("one.safetensors"), load_file("out/shard-000000.safetensors")
    names = [*(f"image.{at}" for at in range(7)), "video.0"]
    expected = {
        f"item.{at}.{key.removeprefix(f'{name}.')}": tensor
        for at, name in enumerate(names)
        for key, tensor in one.items()
        if key.startswith(f"{name}.")
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with safe_open("out/shard-000000.safetensors", framework="pt") as file:
        metadata = file.metadata()
    bundle = Bundle.open(built)
    assert (metadata["bundle_key"], metadata["bundle_digest"]) == (bundle.manifest.key, bundle.digest)
    assert (metadata["prune"], metadata["fps"]) == ("0.5", "2.0")
    assert json.loads(metadata["items"]) == index(Path("out"))
    for record in index(Path("out")):
        assert record["sha256"] == hashlib.sha256(Path(record["source"]).read_bytes()).hexdigest()
    assert index(Path("out"))[7]["kind"] == "video"


@pytest.mark.seconds
def test_parquet_has_the_shards_values_a_row_for_each_item(shelf, video):
    Path("photos/0001.png").rename(damaged := os.fsdecode(b"photos/0001-\xff.png"))
    Path(damaged).write_bytes(b"damaged")
    words = ("--image", "photos", "--video", video, "--fps", 2, "--prune", 0.5)
    assert shelf(*words, "--shard-items", 8, "--parquet").code == 2
    rows = parquet.read_table("out/shard-000000.parquet").to_pylist()
    records, shard = index(Path("out")), load_file("out/shard-000000.safetensors")
    written = [record["source"].replace("\udcff", "\\udcff") for record in records]
    assert [row["source"] for row in rows] == written
    assert (rows[1]["embeds"], rows[1]["error"]) == (None, records[1]["error"]["message"])
    for row in rows[:1] + rows[2:]:
        for column, name in (
            (name.split(".", 2)[2], name) for name in shard if name.startswith(row["item"] + ".")
        ):
            assert torch.equal(torch.tensor(row[column], dtype=shard[name].dtype), shard[name])
    before = Path("out/shard-000000.parquet").stat().st_mtime_ns
    assert shelf(*words, "--shard-items", 8, "--parquet").code == 2
    assert Path("out/shard-000000.parquet").stat().st_mtime_ns == before
    shutil.copy("photos/0000.png", damaged)
    assert shelf(*words, "--shard-items", 8, "--parquet").code == 0
    assert parquet.read_table("out/shard-000000.parquet").column("error").null_count == 8


def test_parquet_without_its_library_is_refused_before_anything_is_encoded(shelf, monkeypatch):
    monkeypatch.setattr("vlexport.runtime.parquet.find_spec", lambda _: None)
    ran = shelf("--image", "photos", "--parquet")
    assert (ran.code, Path("out").exists()) == (4, False)
    assert "pip install 'vlexport[parquet]'" in ran.err


@pytest.mark.seconds
def test_a_run_goes_on_with_what_has_no_sound_shard(shelf):
    assert shelf("--image", "photos").code == 0
    out = Path("out")
    whole = contents(out)
    assert sorted(whole)[2:] == [f"shard-{at:06}.safetensors" for at in range(4)]
    (out / "shard-000000.safetensors").unlink()
    (out / "shard-000002.safetensors").write_bytes(whole["shard-000002.safetensors"][:-1])
    (out / ".shard-000003.safetensors.0123456789abcdef").write_bytes(b"half")
    (out / ".shard-notes").write_bytes(b"of a user")
    with (out / "index.jsonl").open("a") as file:
        file.write('{"item": "item.')
    kept = (out / "shard-000001.safetensors").stat()
    ran = shelf("--image", "photos", "--json").ends(0)
    assert {name: ran.document[name] for name in ("items", "encoded", "kept", "num_failed")} == {
        "items": 7, "encoded": 7, "kept": 3, "num_failed": 0,
    }  # fmt: skip
    assert contents(out) == whole
    assert (out / "shard-000001.safetensors").stat() == kept
    assert {path.name for path in out.iterdir() if path.name[0] == "."} == {".lock", ".shard-notes"}


@pytest.mark.seconds
def test_bad_items_fail_alone_and_are_tried_again_once_they_have_changed(shelf):
    Path("photos/0001.png").write_bytes(b"no picture")
    Path("photos/0003.png").unlink()
    Path("photos/0003.png").symlink_to("../later.png")
    Path("photos/loop").symlink_to("..")
    Path("photos/\udcff \u2603.png").write_bytes(Path("photos/0000.png").read_bytes())
    os.mkfifo("photos/pipe.png")
    assert "vlexport: photos/0001.png: not an image" in shelf("--image", "photos").ends(2).err
    found = index(Path("out"))
    assert [record["item"] for record in found] == [f"item.{at}" for at in range(8)]
    assert [at for at, record in enumerate(found) if record["status"] == "error"] == [1, 3]
    assert os.fsencode(found[7]["source"]) == b"photos/\xff \xe2\x98\x83.png"
    shutil.copy("photos/0002.png", "photos/0001.png")
    shutil.copy("photos/0000.png", "later.png")
    assert shelf("--image", "photos", "--json").ends(0).document["kept"] == 4
    first, second = load_file("out/shard-000000.safetensors"), load_file("out/shard-000001.safetensors")
    torch.testing.assert_close(first["item.1.embeds"], second["item.2.embeds"])


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("program", "code"),
    [("os.kill(os.getpid(), signal.SIGKILL)", 7), ("raise ImportError('libav.so.1: cannot open')", 4)],
    ids=["killed", "not started"],
)
def test_a_video_whose_decoder_the_machine_failed_is_tried_again(shelf, monkeypatch, program, code):
    Path("clip.mp4").write_bytes(made_videos.video(num=4))
    with monkeypatch.context() as patch:
        patch.setattr(videos, "START", f"import os, signal; {program}")
        assert shelf("--image", "photos/0000.png", "--video", "clip.mp4").code == code
    assert [record["status"] for record in index(Path("out"))] == ["ok", "error"]
    ran = shelf("--image", "photos/0000.png", "--video", "clip.mp4", "--json")
    assert (ran.code, ran.document["encoded"]) == (0, 2), ran.err


@pytest.mark.slow
def test_an_item_that_has_changed_is_encoded_again_and_one_that_is_gone_stays(shelf):
    Path("list").write_text("\n".join(f"photos/{at:04}.png" for at in range(7)))
    assert shelf("--list", "list").code == 0
    before = contents(Path("out"))
    shutil.copy("photos/0006.png", "photos/0005.png")
    Path("photos/0000.png").unlink()
    assert shelf("--list", "list", "--json").ends(0).document["kept"] == 5
    after = contents(Path("out"))
    assert [name for name in before if before[name] != after[name]] == [
        "index.jsonl",
        "shard-000002.safetensors",
    ]


@pytest.mark.seconds
def test_lists_of_paths_and_of_json_lines_come_from_files_and_stdin(shelf, video, monkeypatch):
    lines = ["photos/0000.png", "", json.dumps({"video": str(video), "id": 7, "caption": "left alone"})]
    stdin = SimpleNamespace(buffer=io.BytesIO("\n".join(lines).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    assert shelf("--list", "-", "--fps", 2).code == 0
    first, second = index(Path("out"))
    assert (first["source"], first["kind"]) == ("photos/0000.png", "image")
    assert (second["id"], second["kind"], second["listed_as"]) == ("7", "video", "video")
    for line, reason in (
        ('{"image": "a.png"', "line 2: damaged JSON"),
        ('{"image": "a.png", "video": "b.mp4"}', "line 2"),
        ('{"image": 3}', "line 2"),
        ('{"image": "a.png", "id": [1]}', "line 2: id [1] given"),
        (f'{{"image": "a.png", "id": "{"i" * 5000}"}}', "line 2: id of 5000 characters given"),
        ("x" * 5000, "line 2: path of 5000 characters given"),
        ("x" * 2**21, "line 2: more than 1048576 bytes given"),
        # Together more than the header of a shard may have.
        ("\n".join("é" * 4000 for _ in range(700)), "shard_items 2000 given, and the names of item"),
    ):
        Path("list").write_text(f"photos/0000.png\n{line}\n")
        assert reason in shelf("--list", "list", "--shard-items", 2000, out="other").ends(2).err
        assert not Path("other").exists()


@pytest.mark.seconds
def test_a_longer_list_is_gone_on_with_and_another_one_refused(shelf):
    paths = [f"photos/{at:04}.png" for at in range(7)]
    Path("list").write_text("\n".join(paths[:3]))
    assert shelf("--list", "list").code == 0
    Path("list").write_text("\n".join(paths))
    assert shelf("--list", "list", "--json").document["kept"] == 2
    before = contents(Path("out"))
    for other, reason in (
        (paths[:2], "which ends at item 1"),
        (paths[:3], "item 3 is 'photos/0003.png', and none in the list given"),
        ([paths[0], *paths[2:]], "item 1 is 'photos/0001.png', and 'photos/0002.png' in the list given"),
    ):
        Path("list").write_text("\n".join(other))
        assert reason in shelf("--list", "list").ends(2).err
    assert contents(Path("out")) == before


@pytest.mark.seconds
def test_what_does_not_fit_the_folder_is_refused(built, shelf, bundle, image):
    assert shelf("--image", "photos").code == 0
    before = contents(Path("out"))
    other = vlexport("encode", bundle, "--output-dir", "out", "--shard-items", 2, "--image", "photos").ends(2)
    assert "made with bundle_digest" in other.err
    for words, code, reason in (
        (("--image", "photos", "--prune", 0.5), 2, "made with prune none, and now 0.5"),
        (("--image", "photos", "--shard-items", 3), 2, "made with shard_items 2, and now 3"),
        (("--image", "photos", "--shard-items", 0), 2, "shard_items 0 given, 1 to 10000 expected"),
        (("--image", "-"), 2, "--list -"),
        (("--image", "photos", "--trace", "t.json"), 2, "--trace"),
        (("--image", "photos", "--output", "x.safetensors"), 2, "both --output and --output-dir"),
        (("--list", "nowhere"), 2, "--list nowhere: No such file"),
        ((), 2, "nothing to encode"),
    ):
        assert reason in shelf(*words).ends(code).err
    own = [Path("photos", name) for name in (".tmp-notes", ".tmp012345", ".index.jsonl.bak")]
    for path in own:
        path.write_bytes(b"of a user")
    assert "holds other files" in shelf("--image", image, out="photos").err
    assert {path for path in Path("photos").iterdir() if path.name[0] == "."} == {*own}
    assert "neither --output nor" in vlexport("encode", built, "--image", image).err
    assert contents(Path("out")) == before
    with FileLock("out/.lock"):
        assert "another run" in shelf("--image", "photos").ends(8).err


@pytest.mark.slow
def test_results_among_the_media_are_no_media(shelf):
    assert shelf("--image", "photos", out="photos/out").code == 0
    assert shelf("--image", "photos", "--json", out="photos/out").ends(0).document["kept"] == 7


@pytest.mark.seconds
def test_a_disk_that_fails_once_before_the_first_item_leaves_a_folder_that_can_be_used(shelf, monkeypatch):
    def failing(_):
        if Path("out", collection.SETTINGS).exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO), "out")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        ran = shelf("--image", "photos/0000.png")
    assert ran.code == 1
    assert "vlexport: out: Input/output error. Nothing half-written is kept; see to the disk" in ran.err
    assert not contents(Path("out")).keys() - {"collection.json"}
    assert shelf("--image", "photos/0000.png").code == 0


@pytest.mark.slow
def test_a_full_disk_costs_one_shard(shelf, monkeypatch):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    photos(Path("photos"), 1, side=420)
    Path("photos/0000.png").rename("photos/0009.png")
    photos(Path("photos"), 1)
    whole = _torch.write_tensors

    def limited(*given):
        # The graphs of a bundle take room of their own when they are opened.
        resource.setrlimit(resource.RLIMIT_FSIZE, (15_000, before[1]))
        try:
            whole(*given)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with monkeypatch.context() as patch:
        patch.setattr(collection, "write_tensors", limited)
        ran = shelf("--image", "photos")
    assert ran.code == 7
    assert "disk is full" in ran.err
    assert sorted(contents(Path("out"))) == [
        "collection.json", "index.jsonl", *(f"shard-{at:06}.safetensors" for at in range(3)),
    ]  # fmt: skip
    assert len(index(Path("out"))) == 6
    assert shelf("--image", "photos", "--json").ends(0).document["kept"] == 6


@pytest.mark.slow
def test_a_run_killed_at_five_moments_has_every_item_once_and_the_same_bytes(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(Path("photos"), 1000, side=60)
    words = ("encode", built, "--image", "photos", "--shard-items", 20, "--threads", 1, "--output-dir")
    assert vlexport(*words, "whole").code == 0
    command = [sys.executable, "-m", "vlexport", *map(str, words), "out"]
    draw, out, killed = random.Random(SEED), Path("out"), list[int]()

    def num_shards():
        return len(list(out.glob("shard-*.safetensors")))

    while len(killed) < 5:
        wanted = num_shards() + draw.randint(1, 7)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while num_shards() < wanted and process.poll() is None:
            time.sleep(0.01)
        time.sleep(draw.random() / 10)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        killed.append(num_shards())
    assert killed == sorted(set(killed))
    assert vlexport(*words, "out").code == 0
    assert contents(out) == contents(Path("whole"))
    assert [record["item"] for record in index(out)] == [f"item.{at}" for at in range(1000)]


@pytest.mark.slow
def test_an_interrupted_run_ends_at_once_and_is_gone_on_with(built, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photos(Path("photos"), 400, side=60)
    words = ("encode", built, "--image", "photos", "--shard-items", 20, "--threads", 1, "--output-dir", "out")
    # A shell that started the tests in the background has them ignore the signal, and children inherit that.
    process = subprocess.Popen(
        [sys.executable, "-m", "vlexport", *map(str, words)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not Path("out/shard-000001.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert re.search(r"out: [1-9]\d+ of 400 items are kept.*; the same command goes on from there", err)
    assert process.returncode == 130
    assert 40 <= vlexport(*words, "--json").ends(0).document["kept"] < 400
    assert len(index(Path("out"))) == 400


def test_errors_whose_reason_is_not_the_item_are_tried_again_and_no_others(tmp_path):
    path = tmp_path / "image.png"
    path.write_bytes(b"bytes")
    facts = {"bytes": 5, "sha256": hashlib.sha256(b"bytes").hexdigest()}
    tried = set()
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.VlexportError):
            record = {**collection._outcome(kind("x"), facts), "source": str(path)}
            if collection._has_changed(record, path.stat().st_ctime_ns + 1):
                tried.add(kind.__name__)
    good = {**facts, "status": "ok", "source": str(path)}
    assert not collection._has_changed(good, path.stat().st_ctime_ns + 1)
    # Of a folder above that was swapped: the times are older.
    path.write_bytes(b"other bytes")
    assert collection._has_changed(good, path.stat().st_ctime_ns + 1)
    assert tried == {"VlexportError", "InternalError", "MisfitError", "ResourceError", "LockedError"}
