"""Every way in which tables, cuts, words and weights of sliced calls can be wrong is a finding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.tiny_minicpmv import VERSIONS, Tiny, write_tiny_minicpmv
from vlexport.checkpoint import Checkpoint
from vlexport.parity.decoders import check_decoder
from vlexport.parity.integers import integer_rows
from vlexport.parity.slice_calls import check_slice_tables, count_tokens
from vlexport.parity.slice_sizes import check_sizes
from vlexport.parity.subject import Subject
from vlexport.parity.words import check_words
from vlexport.recipe import find_recipe
from vlexport.specs import MediaItem

RECIPE = find_recipe("minicpmv")


def subject_of(folder, version):
    path = write_tiny_minicpmv(folder / version, Tiny(version=version, drop_last=True))
    checkpoint = Checkpoint.open(path)
    config = RECIPE.read_config(checkpoint)
    return Subject(recipe=RECIPE, config=config, checkpoint=checkpoint, form="runs", dtype="float32")


def item(sizes, groups=()):
    rows = torch.zeros(sum(down * across for down, across in sizes), 588)
    return MediaItem(
        kind="image", patches=rows, grid=(1, *sizes[-1]), slices=tuple(sizes), frame_groups=groups
    )


ITEMS = [item([(4, 3), (2, 5), (2, 5)]), item([(3, 4)] * 3, ((0, 7), (-1,))), item([(1, 1)])]
TABLES = ("order", "runs", "group_runs", "group_inverse", "position_ids", "cells", "frames")


@pytest.mark.parametrize("version", VERSIONS)
def test_right_calls_have_no_faults_and_every_table_is_checked(version, tmp_path):
    subject = subject_of(tmp_path, version)
    rows = integer_rows(subject, 0)
    assert [row.check for row in rows if row.verdict != "passed"] == []
    inputs = RECIPE.prepare(subject.config, ITEMS[2:], "runs")
    integers = {name for name, table in inputs.items() if table.dtype == torch.int32}
    assert integers <= {row.check for row in rows}


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    return subject_of(tmp_path_factory.mktemp("timed"), "4.5")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("change", [lambda x: x.flip(0), lambda x: x + 1, lambda x: x.roll(1, 0)])
def test_a_table_with_other_entries_is_found(timed, name, change):
    tables = RECIPE.prepare(timed.config, ITEMS, "runs")
    found = check_slice_tables({**tables, name: change(tables[name])}, ITEMS, timed.config.tower)
    assert any(finding.wrong for finding in found)
    assert not any(finding.wrong for finding in check_slice_tables(tables, ITEMS, timed.config.tower))


def test_frames_of_a_group_are_counted_once(timed):
    assert count_tokens(ITEMS, 4) == [12, 8, 4] == [RECIPE.num_tokens(timed.config, each) for each in ITEMS]


@pytest.mark.parametrize("name", ["depth", "side", "eps", "queries", "heads"])
def test_a_size_other_than_that_of_the_checkpoint_is_found(timed, name):
    wrong = replace(timed.config.tower, **{name: 2 * getattr(timed.config.tower, name)})
    (found,) = check_sizes(timed.checkpoint.config, wrong)
    assert (found.wrong, found.first.split()[0]) == (1, name)


def without(subject, **changes):
    language = replace(subject.recipe.language, **changes)
    return replace(subject, recipe=replace(subject.recipe, language=language))


def test_a_decoder_whose_scalings_were_left_out_is_found(tmp_path):
    oldest = subject_of(tmp_path, "2.0")
    assert check_decoder(oldest)[0].wrong == 0
    # The table of embeddings, the output layer, two branches of each of two layers.
    assert check_decoder(without(oldest, scales=lambda _: {}))[0].wrong == 6


def test_of_a_large_decoder_the_factors_are_checked_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("vlexport.parity.decoders.READ_AGAIN", 0)
    oldest = subject_of(tmp_path, "2.0")
    assert check_decoder(oldest)[0].wrong == 0
    assert check_decoder(without(oldest, scales=lambda _: {}))[0].wrong == 4


def test_a_text_without_room_for_its_embeddings_is_found(timed):
    assert RECIPE.language is not None
    short = replace(RECIPE.language.prompt, expand=lambda _, __: "<unk>" * 4)
    assert check_words(timed, 0)[0].wrong == 0
    assert check_words(without(timed, prompt=short), 0)[0].wrong > 0
