"""Every way in which tables, cuts, words and weights of sliced calls can be wrong is a finding."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, make_dataclass, replace

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
from vlexport.specs import MediaItem, Precision
from vlexport.vision.slice_facts import facts_of

RECIPE = find_recipe("minicpmv")


def subject_of(folder, version):
    path = write_tiny_minicpmv(folder / version, Tiny(version=version, drop_last=True))
    checkpoint = Checkpoint.open(path)
    config = RECIPE.read_config(checkpoint)
    return Subject(
        recipe=RECIPE,
        config=config,
        checkpoint=checkpoint,
        form="grouped",
        precision=Precision(dtype="float32"),
        profile=next(iter(RECIPE.profiles(config).values())),
        tensors=RECIPE.stored_tensors(checkpoint, config),
    )


def item(sizes, groups=()):
    rows = torch.zeros(sum(down * across for down, across in sizes), 588)
    return MediaItem(
        kind="image", patches=rows, grid=(1, *sizes[-1]), slices=tuple(sizes), frame_groups=groups
    )


ITEMS = [item([(4, 3), (2, 5), (2, 5)]), item([(3, 4)] * 3, ((0, 7), (-1,))), item([(1, 1)])]
TABLES = ("order", "slice_runs", "group_runs", "group_inverse", "position_ids", "cells", "frames")


@pytest.mark.parametrize("version", VERSIONS)
def test_right_calls_have_no_faults_and_every_table_is_checked(version, tmp_path):
    subject = subject_of(tmp_path, version)
    rows = integer_rows(subject, 0)
    assert [row.check for row in rows if row.verdict != "passed"] == []
    inputs = RECIPE.prepare(subject.config, ITEMS[2:], "grouped")
    integers = {name for name, table in inputs.items() if table.dtype == torch.int32}
    assert integers <= {row.check for row in rows}


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    return subject_of(tmp_path_factory.mktemp("timed"), "4.5")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("change", [lambda x: x.flip(0), lambda x: x + 1, lambda x: x.roll(1, 0)])
def test_a_table_with_other_entries_is_found(timed, name, change):
    tables = RECIPE.prepare(timed.config, ITEMS, "grouped")
    found = check_slice_tables({**tables, name: change(tables[name])}, ITEMS, facts_of(timed.checkpoint))
    assert any(finding.wrong for finding in found)
    assert not any(finding.wrong for finding in check_slice_tables(tables, ITEMS, facts_of(timed.checkpoint)))


def test_frames_of_a_group_are_counted_once(timed):
    assert count_tokens(ITEMS, 4) == [12, 8, 4] == [RECIPE.num_tokens(timed.config, each) for each in ITEMS]


def leaves(config, path=()):
    for field in fields(config):
        value = getattr(config, field.name)
        at = (*path, field.name)
        yield from leaves(value, at) if is_dataclass(value) else [at]


def with_leaf(config, path, change):
    value = getattr(config, path[0])
    new = with_leaf(value, path[1:], change) if path[1:] else change(value)
    return replace(config, **{path[0]: new})


def other(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return "2.6" if value == "2.5" else "2.5"
    return (0.25,) * 3 if isinstance(value, tuple) else 2 * value


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_of_the_config_has_a_fact_and_another_value_is_found(version, tmp_path):
    subject = subject_of(tmp_path, version)
    assert check_sizes(subject.checkpoint, subject.config)[0].first == ""
    for path in leaves(subject.config):
        (found,) = check_sizes(subject.checkpoint, with_leaf(subject.config, path, other))
        assert (found.wrong, found.first.split()[0]) == (1, ".".join(path))


def test_a_field_without_a_fact_is_found(timed):
    names = [(field.name, field.type) for field in fields(timed.config)]
    further = make_dataclass("Further", [*names, ("further", int)])
    given = {name: getattr(timed.config, name) for name, _ in names}
    (found,) = check_sizes(timed.checkpoint, further(**given, further=0))
    assert found.first.startswith("further is 0, and nothing says what it should be")


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
