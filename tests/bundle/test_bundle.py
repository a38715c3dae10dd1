"""An open bundle is the one that was built or approved, to the byte."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bundle.examples import MANIFEST, PAYLOADS, TARGET, store
from tests.cli.lines import flip
from tests.thirty import LANE, cases
from vlexport.bundle import MANIFEST_NAME, Bundle, Trust, Verdict
from vlexport.bundle.files import copy_payload
from vlexport.bundle.user_folders import user_cache, user_data_folder
from vlexport.errors import BundleError, InputError, MisfitError, NoBundleError, RequestError, UntrustedError
from vlexport.target import Misfit


@pytest.fixture
def private(tmp_path: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=tmp_path))


def stranger(bundle: Bundle, data: Path) -> Bundle:
    """The same bundle on a machine whose user never saw it."""
    (Trust.of(data).folder / bundle.digest).unlink()
    return bundle


def test_a_built_bundle_opens_and_reads_back(bundle: Bundle, data: Path) -> None:
    again = Bundle.open(bundle.path, user_data=data)
    assert again == bundle
    assert {name: again.read(name) for name in again.manifest.files} == PAYLOADS


def test_flips_of_bytes_all_over_the_manifest_are_refused(bundle, data, record_property):
    source, path = random.Random(0), bundle.path / MANIFEST_NAME
    good = path.read_bytes()
    places = range(0, len(good), 1 if LANE != "fast" else 5)
    record_property("changed bytes of a manifest", len(places))
    for at in places:
        path.write_bytes(good[:at] + bytes([good[at] ^ source.randint(1, 255)]) + good[at + 1 :])
        with pytest.raises(BundleError):
            Bundle.open(bundle.path, verify="lazy", user_data=data)


@pytest.mark.parametrize("name", sorted(PAYLOADS))
def test_flips_of_a_bit_of_a_payload_are_refused(bundle, data, name, record_property):
    source, path, good = random.Random(1), bundle.path / name, PAYLOADS[name]
    record_property("changed bytes of payloads", cases("changed bytes of payloads"))
    for _ in range(cases("changed bytes of payloads")):
        at = source.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << source.randrange(8)]) + good[at + 1 :])
        with pytest.raises(BundleError, match=f"'{name}' has SHA-256"):
            Bundle.open(bundle.path, user_data=data)
        with pytest.raises(BundleError, match=f"'{name}' has SHA-256"):
            Bundle.open(bundle.path, verify="lazy", user_data=data).read(name)


def test_a_payload_of_another_length_is_refused(bundle, data):
    for size in (0, 1, 1024, 2047, 2049, 4096):
        os.truncate(bundle.path / "engine.bin", size)
        with pytest.raises(BundleError, match=f"has {size} bytes; expected 2048"):
            Bundle.open(bundle.path, verify="lazy", user_data=data)


def test_an_unknown_payload_is_refused_with_the_names_there_are(bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"no payload 'x'; this bundle holds engine.bin, weights/tower.data"):
        bundle.read("x")


def test_a_foreign_bundle_is_refused_with_its_digest_and_the_way_to_approve_it(bundle, data, record_property):
    record_property("approvals", 1)
    stranger(bundle, data)
    (bundle.path / "engine.bin").write_bytes(b"x" * 2048)
    with pytest.raises(
        UntrustedError, match=rf"found {bundle.digest}\..*vlexport trust .* {bundle.digest}"
    ) as caught:
        Bundle.open(bundle.path, user_data=data)
    assert caught.value.exit_code == 5


def test_an_approved_digest_opens_now_and_later(bundle, data, record_property):
    record_property("approvals", 1)
    stranger(bundle, data)
    assert Bundle.open(bundle.path, trust=f"SHA256:{bundle.digest}".upper(), user_data=data) == bundle
    assert Bundle.open(bundle.path, user_data=data) == bundle


def test_an_approved_bundle_with_one_byte_changed_is_refused_again(bundle, data, record_property):
    record_property("approvals", 1)
    Bundle.open(stranger(bundle, data).path, trust=bundle.digest, user_data=data)
    path = bundle.path / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"org/name"', b'"org/nbme"'))
    with pytest.raises(UntrustedError, match="neither built here nor approved"):
        Bundle.open(bundle.path, user_data=data)
    with pytest.raises(UntrustedError, match=f"{bundle.digest} was approved"):
        Bundle.open(bundle.path, trust=bundle.digest, user_data=data)


def test_another_digest_approves_nothing(bundle, data):
    stranger(bundle, data)
    with pytest.raises(UntrustedError, match="was approved"):
        Bundle.open(bundle.path, trust="0" * 64, user_data=data)
    assert not any(Trust.of(data).knows(digest) for digest in ("0" * 64, bundle.digest))


def test_an_approval_of_a_bundle_that_is_refused_is_not_recorded(bundle, data):
    flip(stranger(bundle, data).path / "engine.bin")
    with pytest.raises(BundleError, match="has SHA-256"):
        Bundle.open(bundle.path, trust=bundle.digest, user_data=data)
    assert not Trust.of(data).knows(bundle.digest)


def test_a_malformed_approval_is_refused_with_where_to_find_the_digest(bundle, data, subtests):
    for digest in ("", "yes", "0" * 11, "../" + "0" * 61, "0" * 64 + "\n0"):
        with subtests.test(digest), pytest.raises(InputError, match="vlexport inspect BUNDLE"):
            Bundle.open(bundle.path, trust=digest, user_data=data)


def test_trust_lies_in_a_private_folder_one_file_per_digest(bundle: Bundle, data: Path) -> None:
    folder = data / "trusted"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == [bundle.digest]


@pytest.mark.parametrize(
    ("kind", "message"), [("trusted", "chmod 700"), ("verdicts", "others can write to these records")]
)
def test_trust_and_verdicts_that_others_can_write_are_not_believed(bundle, data, kind, message):
    bundle.with_verdict(Verdict(status="passed"), user_data=data)
    (data / kind).chmod(0o777)
    with pytest.raises(UntrustedError, match=message):
        Bundle.open(bundle.path, user_data=data)


def test_trust_behind_a_link_is_not_believed(bundle: Bundle, data: Path) -> None:
    (data / "trusted").rename(data / "elsewhere")
    (data / "trusted").symlink_to(data / "elsewhere")
    with pytest.raises(UntrustedError, match="a link or a file"):
        Bundle.open(bundle.path, user_data=data)


def test_a_digest_that_is_a_link_is_not_trusted_and_not_written_through(bundle: Bundle, data: Path) -> None:
    canary = data / "canary"
    canary.write_text("alive")
    (data / "trusted" / bundle.digest).unlink()
    (data / "trusted" / bundle.digest).symlink_to(canary)
    assert not Trust.of(data).knows(bundle.digest)
    Bundle.open(bundle.path, trust=bundle.digest, user_data=data)
    assert Trust.of(data).knows(bundle.digest)
    assert canary.read_text() == "alive"


def test_trust_lies_in_the_users_data_folder_unless_another_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Trust.of().folder.name == "trusted"
    assert Trust.of().folder.parent.name == "vlexport"


# Folders that nobody can make, root neither.
NO_FOLDERS = [Path("/dev/null/home"), Path("/proc/home")]


@pytest.mark.parametrize("home", NO_FOLDERS)
def test_without_a_folder_for_records_a_bundle_is_published_and_opens_where_it_is_approved(
    tmp_path, monkeypatch, caplog, home
):
    built = store(tmp_path / "engines", home)
    assert f"{built.path} {built.digest}" in caplog.text
    # This process knows what it made; others are told.
    assert Bundle.open(built.path, user_data=home) == built
    monkeypatch.setattr(Trust, "_HELD", set())
    with pytest.raises(UntrustedError, match=rf"found {built.digest}\..*vlexport trust .* {built.digest}"):
        Bundle.open(built.path, user_data=home)
    caplog.clear()
    assert Bundle.open(built.path, trust=built.digest, user_data=home) == built
    assert "trusted by this command alone" in caplog.text
    with pytest.raises(RequestError, match="the verdict cannot be recorded"):
        built.with_verdict(Verdict(status="failed"), user_data=home)


def test_a_build_is_told_beforehand_where_its_trust_cannot_be_recorded(data, caplog):
    Trust.of(data).probe()
    assert caplog.text == ""
    Trust.of(NO_FOLDERS[0]).probe()
    assert f"{NO_FOLDERS[0]}/trusted: the trust in a bundle cannot be recorded" in caplog.text
    (data / "trusted").chmod(0o777)
    with pytest.raises(UntrustedError, match="chmod 700"):
        Trust.of(data).probe()


def test_an_account_without_a_home_has_no_folders_in_the_current_one(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    monkeypatch.chdir(tmp_path)
    assert user_data_folder().is_absolute()
    assert user_cache().is_absolute()
    assert not user_data_folder().exists()


def test_inspect_reads_a_newer_bundle_as_far_as_it_can(bundle: Bundle, data: Path) -> None:
    path = bundle.path / MANIFEST_NAME
    path.write_bytes(path.read_bytes().replace(b'"schema": 7', b'"schema": 8'))
    found = Bundle.inspect(bundle.path, user_data=data)
    assert found.manifest is None
    assert found.content["schema"] == 8
    assert found.problem is not None
    assert "newer" in found.problem


def test_inspect_shows_what_is_wrong_with_a_damaged_bundle(bundle, data):
    for raw in (b"", b"\x00\xff", b"[1]", b'{"a": NaN}'):
        (bundle.path / MANIFEST_NAME).write_bytes(raw)
        found = Bundle.inspect(bundle.path, user_data=data)
        assert (found.content, bool(found.problem)) == ({}, True), raw


def copied(bundle: Bundle, into: Path) -> Path:
    name = "engine.bin"
    copy_payload(bundle.path, name, bundle.manifest.files[name], into / name)
    return into / name


def test_a_copy_of_altered_bytes_is_refused_and_removed(bundle: Bundle, private: Path) -> None:
    assert copied(bundle, private).stat().st_mode & 0o777 == 0o600
    (private / "engine.bin").unlink()
    (bundle.path / "engine.bin").write_bytes(b"x" * 2048)
    with pytest.raises(BundleError, match="SHA-256"):
        copied(bundle, private)
    assert list(private.iterdir()) == []


def test_a_copy_is_not_written_through_a_link(bundle: Bundle, private: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    canary.write_text("alive")
    (private / "engine.bin").symlink_to(canary)
    with pytest.raises(FileExistsError):
        copied(bundle, private)
    assert canary.read_text() == "alive"


def folder_bytes(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


def test_a_new_verdict_counts_at_once_and_leaves_the_bundle_as_it_was(bundle, data):
    before = folder_bytes(bundle.path)
    bundle.with_verdict(Verdict(status="passed"), user_data=data)
    changed = bundle.with_verdict(Verdict(status="failed", table={"rows": []}), user_data=data)
    assert Bundle.open(bundle.path, user_data=data) == changed
    assert changed.verdict == Verdict(status="failed", table={"rows": []})
    assert (changed.digest, changed.manifest) == (bundle.digest, bundle.manifest)
    assert folder_bytes(bundle.path) == before
    for kind in ("trusted", "verdicts"):
        assert [path.name for path in (data / kind).iterdir()] == [bundle.digest]


def test_a_verdict_holds_for_copies_and_for_this_user_alone(
    bundle: Bundle, tmp_path: Path, data: Path
) -> None:
    bundle.with_verdict(Verdict(status="failed"), user_data=data)
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    assert Bundle.open(copy, user_data=data).verdict.status == "failed"
    other = Bundle.open(copy, trust=bundle.digest, user_data=tmp_path / "other")
    assert other.verdict == bundle.manifest.parity


def test_a_verdict_of_or_edited_by_a_stranger_grants_nothing(bundle, data):
    raw = replace(bundle.manifest, parity=Verdict(status="failed")).encoded()
    Trust.of(data).record(hashlib.sha256(raw).hexdigest(), "approved")
    flipped = replace(bundle.manifest, parity=Verdict(status="passed"), created="2031-01-01T00:00:00Z")
    stranger(bundle, data).with_verdict(Verdict(status="passed"), user_data=data)
    for content in (bundle.manifest.encoded(), flipped.encoded()):
        (bundle.path / MANIFEST_NAME).write_bytes(content)
        with pytest.raises(UntrustedError):
            Bundle.open(bundle.path, user_data=data)


def test_a_verdict_file_beside_the_manifest_is_an_extra_file(bundle: Bundle, data: Path) -> None:
    (bundle.path / "verdict.json").write_text('{"status": "passed", "table": {}}')
    with pytest.raises(BundleError, match=r"not in the manifest: 'verdict\.json'"):
        Bundle.open(bundle.path, user_data=data)


def test_a_verdict_that_cannot_be_read_is_refused_not_taken_for_passed(bundle, data, subtests):
    bundle.with_verdict(Verdict(status="failed"), user_data=data)
    for content in (b"", b"{}", b'{"status": "fine", "table": {}}', b"\xff" * 9):
        (data / "verdicts" / bundle.digest).write_bytes(content)
        with (
            subtests.test(content),
            pytest.raises(RequestError, match="the verdict of the last check cannot be read"),
        ):
            Bundle.open(bundle.path, user_data=data)


def test_what_is_no_bundle_is_refused_with_what_to_do(bundle, tmp_path, data):
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    (tmp_path / "plain").mkdir()
    for path, words in (
        (tmp_path / "missing", "no such folder; expected a bundle"),
        (bundle.path / "manifest.json", f"a file; the folder of a bundle is expected. Pass {bundle.path}"),
        (3, "int given as a bundle; the path of its folder is expected"),
        (tmp_path / "plain", r"not a bundle: it holds no manifest\.json"),
        (tmp_path / "checkpoint", r"looks like a checkpoint.*vlexport build"),
        (bundle.path.parent, f"There is one inside it: {bundle.path}"),
    ):
        with pytest.raises(NoBundleError, match=words) as refused:
            Bundle.open(path, user_data=data)  # type: ignore[arg-type]
        assert refused.value.exit_code == 2


def test_reading_after_a_replacement_is_refused_as_such(bundle: Bundle, tmp_path: Path, data: Path) -> None:
    store(tmp_path / "engines", data, payloads={"engine.bin": b"y" * 2048})
    with pytest.raises(BundleError, match="replaced or removed since it was opened"):
        bundle.read("engine.bin")


def test_a_misfit_names_the_field_and_a_command_that_builds_the_same_again(bundle: Bundle) -> None:
    assert bundle.fit(TARGET) is None
    result = bundle.fit(replace(TARGET, torch="2.14.0"))
    assert isinstance(result, Misfit)
    assert result.fields == ("torch",)
    assert "vlexport build org/name@" in result.reason
    with pytest.raises(
        MisfitError, match=r"torch is 2\.13\.0\+cpu in the bundle and 2\.14\.0 here"
    ) as caught:
        bundle.require_fit(replace(TARGET, torch="2.14.0"))
    assert caught.value.exit_code == 4


def test_the_command_to_build_again_names_a_private_backend_by_its_file(bundle):
    for backend in ("onnxruntime", "mine"):
        manifest = replace(MANIFEST, target=replace(TARGET, backend=backend))
        command = replace(bundle, manifest=manifest).rebuild_command()
        assert f"--backend {'FILE.py' if backend == 'mine' else backend} " in command


def test_a_command_is_quoted_for_the_shell(bundle: Bundle) -> None:
    source = replace(MANIFEST.checkpoint, source="a folder; rm", revision=None)
    odd = replace(bundle, manifest=replace(bundle.manifest, checkpoint=source))
    assert odd.rebuild_command().startswith("vlexport build 'a folder; rm' --recipe")


def test_a_file_swapped_between_check_and_load_never_gets_through(
    bundle: Bundle, data: Path, private: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("swaps between check and load", cases("swaps between check and load"))
    good, bad = PAYLOADS["engine.bin"], b"\xff" * 2048
    stop, path = threading.Event(), bundle.path / "engine.bin"

    def swap() -> None:
        side = bundle.path.parent / "side"
        while not stop.is_set():
            for content in (bad, good):
                side.write_bytes(content)
                side.replace(path)

    attacker = threading.Thread(target=swap)
    attacker.start()
    outcomes = {"read": 0, "refused": 0}
    try:
        for attempt in range(cases("swaps between check and load")):
            try:
                if attempt % 4:
                    data_read = bundle.read("engine.bin")
                else:
                    copy = copied(bundle, private)
                    data_read = copy.read_bytes()
                    copy.unlink()
                assert hashlib.sha256(data_read).digest() == hashlib.sha256(good).digest()
                outcomes["read"] += 1
            except BundleError:
                outcomes["refused"] += 1
            finally:
                (private / "engine.bin").unlink(missing_ok=True)
    finally:
        stop.set()
        attacker.join()
    assert outcomes["refused"] > 0
    assert outcomes["read"] > 0
