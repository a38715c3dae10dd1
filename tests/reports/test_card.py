"""The card of a bundle: its header as the Hub's own client reads it, and what it shows of the manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from tests.bundle.examples import MANIFEST
from tests.reports.test_page import ROWS
from tests.tiny_qwen2_5_vl import write_tiny_qwen2_5_vl
from vlexport.bundle.manifest import CheckpointIdentity, Verdict
from vlexport.checkpoint import Checkpoint
from vlexport.parity.report import ParityReport
from vlexport.reports.card import card, licence_of

REPORT = ParityReport(rows=ROWS)
HUB = CheckpointIdentity(source=f"org/name@{'c' * 40}", revision="c" * 40, weights="d" * 64)
MADE = replace(MANIFEST, checkpoint=HUB, parity=Verdict(status="passed", table=REPORT.to_json()))


@pytest.fixture
def tiny(tmp_path):
    return write_tiny_qwen2_5_vl(tmp_path / "tiny", depth=1)


def header_of(text):
    found = ModelCard(text, ignore_metadata_errors=False)
    return found.data.to_dict()


def test_the_header_is_that_of_a_model_repository():
    assert header_of(card(MADE, "entry", "apache-2.0")) == {
        "library_name": "vlexport",
        "base_model": "org/name",
        "license": "apache-2.0",
        "pipeline_tag": "image-feature-extraction",
        "tags": ["vlexport", "eager", "a_recipe"],
    }


def test_only_a_checkpoint_of_the_hub_is_a_base_model_and_no_folder_of_this_machine_is_named():
    local = replace(MADE, checkpoint=replace(HUB, source=str(Path.home() / "models/tiny"), revision="c" * 40))
    text = card(local, "entry", None)
    assert "base_model" not in header_of(text)
    assert "license" not in header_of(text)
    assert str(Path.home()) not in text
    assert "The vision tower of `tiny` as an engine of eager" in text
    assert "It names no licence that could be read." in text
    int8 = replace(MADE, precision=replace(MADE.precision, quantisation="int8"))
    assert header_of(card(int8, "entry", None))["base_model_relation"] == "quantized"


def test_the_card_shows_accuracy_sizes_and_origin_of_the_manifest():
    text = card(MADE, "entry", "mit")
    assert f"{REPORT.summary()}\n\n```\n{REPORT.table()}\n```" in text
    assert "| patches | 4 | 1,024 | 4,096 |" in text
    for words in (MADE.key, "d" * 64, "2026-01-31T12:00:00Z", "torch 2.13.0+cpu", MADE.target.tag):
        assert words in text
    unchecked = replace(MADE, parity=Verdict(status="not_run"))
    assert "\nnot run.\n" in card(unchecked, "entry", None)


def test_nothing_in_a_manifest_ends_a_cell_or_begins_markup():
    row = replace(ROWS[1], shapes="```", note="```\n<script>", metrics={"relative_l2": 1.0})
    report = ParityReport(rows=(row,))
    odd = replace(
        MADE,
        parity=Verdict(status=report.status, table=report.to_json()),
        checkpoint=replace(HUB, source="a`|<b>\n\x1b", revision=None),
        versions={"x|`<i>": "1\n| y |"},
        recipe=replace(MADE.recipe, name="r`|<script>"),
    )
    text = card(odd, "n`|<b>", None)
    for words in ("<b>", "<i>", "<script>", "\x1b", "1\n"):
        assert words not in text
    # Of the commands, the program and the table.
    assert text.count("```") == 6


@pytest.mark.parametrize(
    ("readme", "licence"),
    [
        (None, None),
        ("---\nlicense: apache-2.0\ntags: [a]\n---\n# A\n", "apache-2.0"),
        ("---\r\nlicense: 'mit'\r\n---\r\n", "mit"),
        ("# A\n\nlicense: mit\n", None),
        ("---\ntags: [a]\n---\nlicense: mit\n", None),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\nlicense: x: y\n---\n", None),
    ],
)
def test_the_licence_is_what_the_checkpoints_own_card_names(readme, licence, tiny):
    if readme is not None:
        (tiny / "README.md").write_bytes(readme.encode())
    assert licence_of(Checkpoint.open(tiny)) == licence


def test_a_card_outside_the_checkpoint_is_not_read(tiny, tmp_path):
    (tmp_path / "other.md").write_text("---\nlicense: mit\n---\n")
    (tiny / "README.md").symlink_to(tmp_path / "other.md")
    assert licence_of(Checkpoint.open(tiny)) is None


def test_a_card_that_links_to_itself_is_none_whatever_its_folder_is_called(tiny, tmp_path):
    checkpoint = tiny.rename(tmp_path / "out of memory")
    (checkpoint / "README.md").symlink_to("README.md")
    assert licence_of(Checkpoint.open(checkpoint)) is None
