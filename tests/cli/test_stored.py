"""`bundles` and `cache`: what is on the disk, whether it is whole, and removing what was requested."""

import os
import shutil
import time

import pytest
from filelock import FileLock

from tests.cli.lines import flip, own_copy, vlexport
from vlexport.bundle import inventory
from vlexport.bundle.store import remove_entry
from vlexport.errors import RequestError

DAY = 86400


@pytest.fixture
def store(built, tmp_path, monkeypatch):
    """Two bundles of 40 and 2 days, what a dead and a running build left, and a cached result."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "engines"
    folder.mkdir()
    for name, days in (("old", 40), ("new", 2)):
        bundle = own_copy(built, folder / name)
        aged(bundle, days)
    (folder / "README.md").write_text("no bundle", encoding="utf-8")
    shutil.copytree(built, folder / "linked-from")
    (folder / "linked-from" / "manifest.json").unlink()
    (folder / "link").symlink_to(folder / "new")
    from vlexport.bundle import store as module

    dead, running = (
        folder / f".staging-new-{module._host()}-{pid}-0011223344556677" for pid in (2**22 + 1, os.getppid())
    )
    for each in (dead, running):
        each.mkdir()
        (each / "part").write_bytes(b"x" * 1000)
    cached = tmp_path / "cache" / "vlexport" / "graphs" / "aa.cache"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"y" * 10)
    return folder


def aged(path, days):
    os.utime(path, (time.time() - days * DAY,) * 2)


def names(ran, key="entries"):
    return [each["path"].rpartition("/")[2] for each in ran.document[key]]


def test_ls_shows_bundles_and_unfinished_builds_with_their_sizes_and_tags(store):
    ran = vlexport("bundles", "ls", "-o", store, "--json")
    assert (ran.code, ran.document["verb"]) == (0, "bundles ls")
    kinds = [each["kind"] for each in ran.document["entries"]]
    assert kinds == ["bundle", "bundle", "unfinished", "unfinished"]
    assert names(ran)[:2] == ["old", "new"]
    old, new, *left = ran.document["entries"]
    assert (old["tags"], new["tags"]) == ([], ["link"])
    files = [each.stat().st_size for each in (store / "old").rglob("*") if each.is_file()]
    assert (old["bytes"], old["age_seconds"] // DAY) == (sum(files), 40)
    assert (old["backend"], old["precision"], old["parity"], old["trusted"]) == (
        "eager",
        "float32",
        "passed",
        True,
    )
    assert sorted(each["problem"] or "" for each in left) == ["", "its build has ended without removing it"]
    assert ran.document["bytes"] == sum(each["bytes"] for each in ran.document["entries"])
    rows = vlexport("bundles", "ls", "-o", store)
    assert rows.lines[0] == "kind\tname\ttags\tsize\tage\twhat\tstate"
    assert [line.split("\t")[6] for line in rows.lines[1:3]] == ["passed", "passed"]
    assert "4 entries" in rows.err


def test_ls_can_hash_every_file_and_names_the_damaged_bundle(store):
    whole = vlexport("bundles", "ls", "--check", "-o", store)
    assert (whole.code, [line.rpartition("\t")[2] for line in whole.lines[1:3]]) == (0, ["passed", "passed"])
    flip(store / "new" / "program.safetensors")
    ran = vlexport("bundles", "ls", "--check", "-o", store, "--json")
    assert (ran.code, ran.document["damaged"]) == (5, 1)
    old, new, *_ = ran.document["entries"]
    assert old["damages"] == []
    assert "'program.safetensors' has SHA-256" in new["damages"][0]
    assert "1 of 2 bundles are damaged: new" in ran.err


def test_what_dead_builds_left_is_removed_and_a_running_one_stays(store):
    before = sorted(each.name for each in store.iterdir())
    would = vlexport("bundles", "rm", "--unfinished", "-o", store, "--dry-run")
    assert (would.code, sorted(each.name for each in store.iterdir())) == (0, before)
    assert "would free 1.0 kB: 1 entries" in would.err
    assert vlexport("bundles", "rm", "--unfinished", "-o", store).ends(0).out == would.out
    (gone,) = set(before) - {each.name for each in store.iterdir()}
    assert gone.startswith(".staging-new-")
    assert str(2**22 + 1) in gone


def test_bundles_go_by_name_age_and_size_the_oldest_first(store):
    ran = vlexport("bundles", "rm", "-o", store, "--older-than", "30d", "--dry-run", "--json")
    assert names(ran, "removed") == ["old"]
    size = sum(each.stat().st_size for each in (store / "new").rglob("*") if each.is_file())
    ran = vlexport("bundles", "rm", "-o", store, "--max-size", f"{size}", "--json")
    assert (ran.code, names(ran, "removed")) == (0, ["old"])
    assert not (store / "old").exists()
    ran = vlexport("bundles", "rm", "-o", store, "absent")
    assert (ran.code, "no bundle or tag" in ran.err, (store / "new").is_dir()) == (2, True, True)
    assert "nothing named" in vlexport("bundles", "rm", "-o", store).ends(2).err
    spellings = ("new", store / "new", store / ".." / "engines" / "new")
    ran = vlexport("bundles", "rm", "-o", store, *spellings, "--json")
    assert (ran.code, names(ran, "removed")) == (0, ["new"])
    assert not (store / "link").is_symlink(), "tags go with their bundle"
    assert (store / "linked-from").is_dir()
    assert (store / "README.md").exists()


def test_a_bundle_of_the_current_folder_goes_and_not_its_namesake(store, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(store / "new", tmp_path / "new")
    ran = vlexport("bundles", "rm", "./new", "--json").ends(0)
    assert [each["path"] for each in ran.document["removed"]] == ["new"]
    assert ((tmp_path / "new").exists(), (store / "new").is_dir()) == (False, True)
    assert vlexport("bundles", "rm", "new", "--json").ends(0).document["removed"][0]["path"] == "engines/new"


def test_a_name_that_cannot_be_removed_is_refused_before_anything_is(store):
    (store / "new").rename(store / "new copy")
    ran = vlexport("bundles", "rm", "-o", store, "--older-than", "1d").ends(2)
    assert "entry name 'new copy' given" in ran.err
    assert (store / "old").is_dir()


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_what_is_removed_before_an_error_is_listed(store, monkeypatch, options):
    def fail(into, name):
        if name == "new":
            raise RequestError("no access")
        remove_entry(into, name)

    monkeypatch.setattr(inventory, "remove_entry", fail)
    ran = vlexport("bundles", "rm", "-o", store, "--older-than", "1d", *options).ends(2)
    assert "no access" in ran.err
    assert (names(ran, "removed") if options else ran.lines) == (["old"] if options else [str(store / "old")])


def test_a_tag_opens_its_bundle_moves_and_goes_alone(store):
    assert vlexport("bundles", "tag", store / "old", "mine").ends(0).lines == [str(store / "mine")]
    assert vlexport("check", store / "mine").code == 0
    assert vlexport("bundles", "tag", store / "new", "mine").code == 0
    assert (store / "mine").resolve() == store / "new"
    assert "no tag; expected a free name" in vlexport("bundles", "tag", store / "new", "old").ends(2).err
    assert vlexport("bundles", "tag", store / "new", "../up").code == 2
    assert vlexport("bundles", "rm", "-o", store, "mine").code == 0
    assert (store / "new").is_dir()
    assert not (store / "mine").is_symlink()


def test_no_other_link_is_taken_for_a_tag(store, tmp_path):
    (tmp_path / "data").mkdir()
    shutil.copytree(store / "new", tmp_path / "elsewhere")
    for target in (tmp_path / "data", tmp_path / "elsewhere", store / "linked-from"):
        (store / "mine").symlink_to(target)
        assert "no bundle or tag" in vlexport("bundles", "rm", "-o", store, "mine").ends(2).err, target
        assert "no tag; expected" in vlexport("bundles", "tag", store / "new", "mine").ends(2).err, target
        assert (store / "mine").readlink() == target
        (store / "mine").unlink()


def test_tags_of_bundles_that_are_gone_and_loops_of_links_are_removed(store):
    for target in ("gone", "mine"):
        (store / "mine").symlink_to(target)
        assert vlexport("bundles", "ls", "-o", store).code == 0, target
        assert vlexport("bundles", "rm", "-o", store, "mine").code == 0, target
        assert not (store / "mine").is_symlink(), target


def test_a_bundle_that_is_being_built_stays(store):
    with FileLock(store / ".lock-old"):
        ran = vlexport("bundles", "rm", "-o", store, "--older-than", "1w", "--json")
    assert (ran.code, names(ran, "in_use")) == (0, ["old"])
    assert (store / "old").is_dir()


def test_cached_results_go_by_age_by_size_or_all(store):
    ran = vlexport("cache", "ls", "--json")
    assert (names(ran), ran.document["bytes"]) == (["aa.cache"], 10)
    assert "graphs/aa.cache\t10 B\t" in vlexport("cache", "ls").out
    assert names(vlexport("cache", "prune", "--older-than", "1d", "--json"), "removed") == []
    assert names(vlexport("cache", "prune", "--max-size", "10", "--json"), "removed") == []
    assert names(vlexport("cache", "prune", "--json"), "removed") == ["aa.cache"]
    assert (store / "old").is_dir()


@pytest.mark.parametrize(
    ("option", "value"),
    [("--older-than", "30"), ("--older-than", "x"), ("--max-size", "3x"), ("--max-size", "9" * 300 + "TB")],
)
def test_an_age_or_a_size_without_sense_is_refused(tmp_path, option, value):
    assert "expected, such as" in vlexport("bundles", "rm", "-o", tmp_path, option, value).ends(2).err
