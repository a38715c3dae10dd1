"""`push` and `pull`: a repository in a folder, a card, approval before use, and a stand-in for the Hub."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bundle.examples import store
from tests.cli.hub_server import hub as served
from tests.cli.lines import flip, vlexport
from vlexport.bundle import Bundle, Manifest, Trust, hub
from vlexport.errors import BundleError, RequestError, UntrustedError
from vlexport.reports.facts import BundleFacts

COMMIT = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def repository(tmp_path):
    """A folder with one bundle of a stranger."""
    store(tmp_path / "repository", tmp_path / "strangers-data")
    return tmp_path / "repository"


def test_a_bundle_comes_back_as_it_went_with_a_card(built, tmp_path):
    ran = vlexport("push", built, tmp_path / "hub", "--json").ends(0)
    page = (tmp_path / "hub" / "README.md").read_text("utf-8")
    own = (built / "card.md").read_text("utf-8")
    assert page == (
        f"{own}\n## Get it\n\n```bash\nvlexport pull {tmp_path / 'hub'} {built.name}"
        f"\nvlexport trust engines/{built.name} {ran.document['digest']}\n```\n"
    )
    found = vlexport("pull", tmp_path / "hub", "-o", tmp_path / "mine", "--json").ends(0)
    assert found.document["trusted"]  # built here
    copy = tmp_path / "mine" / built.name
    assert vlexport("check", copy).code == 0
    assert {each.name: each.read_bytes() for each in copy.iterdir() if each.is_file()} == {
        each.name: each.read_bytes() for each in built.iterdir() if each.is_file()
    }
    # Again is fine, and so is another push.
    assert vlexport("pull", tmp_path / "hub", "-o", tmp_path / "mine").lines == [str(copy)]
    assert vlexport("push", built, tmp_path / "hub", "-q").err == ""
    flip(tmp_path / "hub" / built.name / "program.safetensors")
    assert vlexport("push", built, tmp_path / "hub").code == 0
    assert vlexport("check", tmp_path / "hub" / built.name).code == 0


def test_a_strangers_bundle_is_placed_and_not_opened_before_it_is_approved(repository, tmp_path):
    pulled = hub.pull(str(repository), output_dir=tmp_path / "mine")
    path, digest = pulled.bundle, pulled.digest
    assert not Trust.of().knows(digest)
    with pytest.raises(UntrustedError):
        Bundle.open(path)
    ran = vlexport("pull", repository, "-o", tmp_path / "again")
    assert (ran.code, ran.lines) == (0, [str(tmp_path / "again" / "entry")])
    assert f"vlexport trust {tmp_path / 'again' / 'entry'} {digest}" in ran.err
    assert Bundle.open(path, trust=digest).digest == digest


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="no second account: it takes root")
@pytest.mark.parametrize(("mask", "readable"), [(0o022, True), (0o027, False)])
def test_what_is_pushed_and_pulled_is_for_whom_the_umask_lets_read_it(built, mask, readable):
    place, before = Path(tempfile.mkdtemp()), os.umask(mask)
    try:
        place.chmod(0o755)
        hub.push(Bundle.open(built), str(place / "pushed"))
        hub.pull(str(place / "pushed"), output_dir=place / "pulled")
        for folder in ("pushed", "pulled"):
            words = ["find", str(place / folder), "-type", "f", "-exec", "cat", "{}", "+"]
            done = subprocess.run(words, user=65534, group=65534, capture_output=True, check=False)
            assert (done.returncode == 0 and len(done.stdout) > 1000) == readable, done.stderr
    finally:
        os.umask(before)
        shutil.rmtree(place)


def test_the_line_to_paste_works_where_the_folder_has_a_space(tmp_path):
    store(tmp_path / "another", tmp_path / "strangers-data", payloads={"engine.bin": b"another"})
    ran = vlexport("pull", tmp_path / "another", "-o", tmp_path / "my engines")
    words = shlex.split(ran.err[ran.err.index("vlexport trust") :])
    assert words[:3] == ["vlexport", "trust", str(tmp_path / "my engines" / "entry")]
    assert vlexport(*words[1:]).code == 0


def test_what_a_killed_pull_leaves_is_what_rm_removes(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "copy_payload", lambda *_, **__: os._exit(9))
    child = os.fork()
    if child == 0:
        hub.pull(str(repository), output_dir=tmp_path / "mine")
    os.waitpid(child, 0)
    assert len(list((tmp_path / "mine").iterdir())) == 1
    assert vlexport("bundles", "rm", "--unfinished", "-o", tmp_path / "mine").code == 0
    assert list((tmp_path / "mine").iterdir()) == []


def spoil(folder, how):
    payload = folder / "engine.bin"
    if how == "changed":
        payload.write_bytes(payload.read_bytes()[:-1] + b"x")
    elif how == "missing":
        payload.unlink()
    elif how == "link":
        shutil.move(payload, folder.parent / "outside")
        payload.symlink_to(folder.parent / "outside")
    else:
        (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("how", ["changed", "missing", "link", "manifest"])
def test_a_spoilt_bundle_leaves_nothing_behind(repository, tmp_path, how):
    spoil(repository / "entry", how)
    with pytest.raises((BundleError, OSError)):
        hub.pull(str(repository), output_dir=tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []


@pytest.mark.parametrize("how", ["changed", "missing", "link"])
def test_a_copy_that_was_damaged_since_is_replaced(repository, tmp_path, how, caplog):
    path = hub.pull(str(repository), output_dir=tmp_path / "mine").bundle
    spoil(path, how)
    hub.pull(str(repository), output_dir=tmp_path / "mine")
    assert "the damaged copy is replaced" in caplog.text
    assert Bundle.open(path, user_data=tmp_path / "strangers-data").path == path
    assert list(path.parent.glob(".staging-*")) == []


def test_what_is_no_repository_or_has_several_bundles_is_refused(repository, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, words in (
        ("nowhere", "org/name on the Hub"),
        ("~an-unknown-user/hub", "no user of this name"),
        (tmp_path / "empty", "0 bundles there"),
    ):
        assert not (tmp_path / "mine").exists()
        with pytest.raises(RequestError, match=words):
            hub.pull(str(source), output_dir=tmp_path / "mine")
    shutil.copytree(repository / "entry", repository / "second")
    with pytest.raises(RequestError, match=r"2 bundles there.*It has: entry, second"):
        hub.pull(str(repository), output_dir=tmp_path / "mine")
    assert hub.pull(str(repository), output_dir=tmp_path / "mine", name="second").bundle.name == "second"
    with pytest.raises(RequestError, match="no bundle 'third'"):
        hub.pull(str(repository), output_dir=tmp_path / "mine", name="third")


def test_the_hub_is_read_at_one_commit_and_given_a_folder_and_a_card(
    repository, built, tmp_path, monkeypatch
):
    calls = []

    def download(repo, *, revision, allow_patterns, local_dir=None):
        calls.append((repo, revision, allow_patterns))
        folder = local_dir or tmp_path / "snapshots" / COMMIT
        shutil.copytree(repository, folder, dirs_exist_ok=True)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    path = hub.pull("org/name@v1", output_dir=tmp_path / "mine").bundle
    assert path == tmp_path / "mine" / "entry"
    named = Manifest.parse((repository / "entry" / "manifest.json").read_bytes()).files
    wanted = ["entry/manifest.json", *(f"entry/{name}" for name in named)]
    assert calls == [("org/name", "v1", ["*/manifest.json"]), ("org/name", COMMIT, wanted)]
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["entry"]

    made: list[object] = []
    pages = []
    monkeypatch.setattr(
        "huggingface_hub.HfApi.create_repo", lambda _, repo, **named: made.append((repo, named))
    )

    def upload(_, *, folder_path, **_named):
        made.append(sorted(each.name for each in folder_path.iterdir()))
        pages.append((folder_path / "README.md").read_text("utf-8"))

    monkeypatch.setattr("huggingface_hub.HfApi.upload_folder", upload)
    assert vlexport("push", built, "org/name").ends(0).lines == [f"org/name/{built.name}"]
    assert made == [("org/name", {"private": True, "exist_ok": True}), sorted(["README.md", built.name])]
    assert f"vlexport pull org/name {built.name}\nvlexport trust " in pages[0]


def test_a_bundle_without_a_card_gets_its_page_and_a_later_check_is_on_it(built, repository, tmp_path):
    data = tmp_path / "strangers-data"
    bare = Bundle.open(repository / "entry", user_data=data)
    opened = Bundle.open(built)
    checked = replace(bare, manifest=replace(bare.manifest, parity=opened.verdict), checked=opened.verdict)
    hub.push(checked, str(tmp_path / "hub"))
    page = (tmp_path / "hub" / "README.md").read_text("utf-8")
    summary = BundleFacts.of(opened).summary
    assert page.endswith(f"\nChecked again after the build: {summary}.\n")
    assert "| backend | `eager` |" in page
    assert "# entry\n" in page


COMMANDS = """
import json, sys
from vlexport.cli import run
for line in sys.stdin:
    print("code", run(json.loads(line)), flush=True)
"""


@contextmanager
def online(url, folder):
    """Commands of a user of the Hub at this address, in a process of their own: it is read at import."""
    known = {"HF_ENDPOINT": url, "HF_TOKEN": "secret", "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "0"}
    environment = os.environ | known | {"XDG_DATA_HOME": str(folder / "data")}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with (
        (folder / "err").open("w") as err,
        subprocess.Popen([sys.executable, "-c", COMMANDS], stderr=err, env=environment, **pipes) as process,
    ):
        assert process.stdin is not None
        write, close = process.stdin.write, process.stdin.close

        def run(*words):
            before = (folder / "err").stat().st_size
            write(json.dumps([str(word) for word in words]) + "\n")
            *out, last = _until_code(process.stdout)
            return int(last.split()[1]), "".join(out), (folder / "err").read_bytes()[before:].decode()

        yield run
        close()


def _until_code(lines):
    found = []
    for line in lines:
        found.append(line)
        if line.startswith("code "):
            return found
    raise AssertionError(f"the process ended: {found}")


@pytest.mark.slow
def test_a_bundle_goes_through_a_server_and_is_checked_on_its_way(built, tmp_path):
    name = built.name
    with served("org/name") as (url, repository), online(url, tmp_path) as run:
        code, _, err = run("pull", "org/name", "-o", tmp_path / "mine")
        assert (code, "org/name@main cannot be downloaded" in err) == (2, True), err
        code, out, err = run("trust", built, Bundle.open(built).digest)
        assert code == 0, err
        code, out, err = run("push", built, "org/name")
        assert (code, out) == (0, f"org/name/{name}\n"), err
        assert repository.private
        files = [each.relative_to(built) for each in built.rglob("*") if each.is_file()]
        assert set(repository.files) == {"README.md", *(f"{name}/{each}" for each in files)}
        code, out, err = run("pull", "org/name", "-o", tmp_path / "mine")
        assert (code, out) == (0, f"{tmp_path / 'mine' / name}\n"), err
        for each in files:
            assert (tmp_path / "mine" / name / each).read_bytes() == (built / each).read_bytes()

        engine = f"{name}/program.safetensors"
        repository.files[engine] = repository.files[engine][:-1] + b"x"
        code, out, err = run("pull", "org/name", "-o", tmp_path / "changed")
        assert (code, out) == (5, ""), err
        assert "program.safetensors" in err
        repository.token = "another"
        code, out, err = run("push", built, "org/name")
        assert (code, "org/name: cannot be written" in err) == (2, True), err
        assert list((tmp_path / "changed").iterdir()) == []
