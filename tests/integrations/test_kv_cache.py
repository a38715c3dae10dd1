"""Order, binding and sharing of key-value caches."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from vlexport.errors import InputError
from vlexport.integrations.vllm.kv_cache import bind_caches, bind_order, layer_index, share_groups

GOLDEN = Path(__file__).parents[1] / "golden"
# What the reference raises, and what we raise for it.
OURS = {"AssertionError": InputError, "KeyError": InputError}


def golden(kind):
    arrays = np.load(GOLDEN / "worker.npz")
    for index, case in enumerate(json.loads(bytes(arrays["__meta__"]))["cases"]):
        prefix = f"{index:04d}."
        if case["kind"] == kind:
            yield case, {key[5:]: arrays[key] for key in arrays.files if key.startswith(prefix)}


class Layer:
    cache = None

    def bind(self, cache):
        self.cache = cache


def caches_of(names):
    return {name: torch.full((1,), float(index)) for index, name in enumerate(names)}


def test_caches_are_bound_in_the_reference_order_each_to_its_own_layer():
    checked = 0
    for case, arrays in golden("bind"):
        caches = caches_of(case["names"])
        layers = {name: Layer() for name in case["names"]}
        ours = bind_caches(caches, layers)
        assert [int(cache) for cache in ours] == arrays["out.order"].tolist()
        assert all(layers[name].cache is caches[name] for name in case["names"])
        checked += 1
    assert checked == 16


@pytest.mark.parametrize("case", [case for case, _ in golden("layer_index")], ids=lambda case: case["name"])
def test_layer_names_give_the_reference_index_or_error(case):
    if case["error"] is None:
        recorded = next(arrays for other, arrays in golden("layer_index") if other == case)
        assert layer_index(case["name"]) == int(recorded["out.index"])
    else:
        with pytest.raises(OURS[case["error"]]):
            layer_index(case["name"])


def test_sharing_layers_join_the_reference_groups():
    checked = 0
    for case, _ in golden("kv_sharing"):
        ours = share_groups(case["groups"], case["share"])
        assert [list(group) for group in ours.groups] == case["result"]
        assert sorted(ours.borrowers) == sorted(case["runner_only"])
        checked += 1
    assert checked == 8


def test_order_is_by_index_and_stable_inside_an_index():
    random_number = random.Random(0)
    for _ in range(100):
        indices = [random_number.randint(0, 9) for _ in range(12)]
        names = [f"layers.{index}.{letter}" for index, letter in zip(indices, "abcdefghijkl", strict=True)]
        by_index = sorted(zip(indices, names, strict=True), key=lambda pair: pair[0])
        assert bind_order(names, may_share_index=True) == [name for _, name in by_index]


def test_modules_of_a_layer_get_neighbouring_indices():
    names = ["layers.1.attn.1", "layers.0.attn.1", "layers.1.attn.0", "layers.0.attn.0"]
    assert [layer_index(name, modules_per_layer=2) for name in names] == [3, 1, 2, 0]
    assert bind_order(names, modules_per_layer=2) == [names[3], names[1], names[2], names[0]]


def refused(fragment):
    return pytest.raises(InputError, match=re.escape(fragment))


def test_a_name_without_exactly_one_number_is_refused():
    with refused("layer name 'a.b' holds 0 numbers between its dots, 1 expected: the layer."):
        layer_index("a.b")
    with refused("layer name 'l.1' holds 1 numbers between its dots, 2 expected: the layer and which"):
        layer_index("l.1", modules_per_layer=2)
    with refused("layer name 'l.1.m.2': module 2 given, a layer has 2 (0 to 1)."):
        layer_index("l.1.m.2", modules_per_layer=2)


def test_two_layers_of_one_index_are_refused_unless_allowed():
    with refused("layers l.1.a, l.1.b all have index 1; expected one layer per index."):
        bind_order(["l.1.a", "l.0.a", "l.1.b"])


def test_a_cache_without_a_layer_is_refused_before_anything_is_bound():
    layers = {"l.0": Layer()}
    with refused("no layer for the caches l.1; layers given: l.0."):
        bind_caches(caches_of(["l.0", "l.1"]), layers)
    assert layers["l.0"].cache is None


@pytest.mark.parametrize("targets", [{"l.9": "l.5"}, {"l.2": "l.1", "l.9": "l.2"}])
def test_borrowing_from_a_layer_that_owns_no_cache_is_refused(targets):
    target = targets["l.9"]
    fragment = f"layer 'l.9' wants the cache of '{target}', which owns none; layers that own one: l.0, l.1."
    with refused(fragment):
        share_groups([["l.0"], ["l.1"]], targets)


def test_an_owner_cannot_borrow():
    with refused("layer 'l.0' has a cache of its own and cannot use the one of 'l.1'."):
        share_groups([["l.0"], ["l.1"]], {"l.0": "l.1"})
