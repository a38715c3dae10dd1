"""Order, binding and sharing of key-value caches."""

import random
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch

from tests.golden_data import cases, counted
from tests.integrations.refusals import refused
from vlexport.errors import InputError
from vlexport.integrations.vllm.kv_cache import bind_caches, bind_order, layer_index, share_groups


class Layer:
    cache = None

    def bind(self, cache):
        self.cache = cache


def caches_of(names):
    return {name: torch.full((1,), float(index)) for index, name in enumerate(names)}


def test_caches_are_bound_in_the_reference_order_each_to_its_own_layer():
    for case in counted("worker", "bind", number=16):
        caches, layers = caches_of(case.meta["names"]), {name: Layer() for name in case.meta["names"]}
        ours = bind_caches(caches, layers)
        assert [int(cache) for cache in ours] == case.outputs["order"].tolist()
        assert all(layer.cache is caches[name] for name, layer in layers.items())


def test_layer_names_give_the_reference_index_or_error(subtests):
    for case in cases("worker", "layer_index"):
        name = case.meta["name"]
        with (
            subtests.test(name),
            nullcontext() if case.meta["error"] is None else pytest.raises(InputError),
        ):
            assert layer_index(name) == int(case.outputs["index"])


def test_sharing_layers_join_the_reference_groups():
    found = [case.meta for case in cases("worker", "kv_sharing")]
    assert len(found) == 8
    for case in found:
        ours = share_groups(case["groups"], case["share"])
        assert [list(group) for group in ours.groups] == case["result"]
        assert sorted(ours.borrowers) == sorted(case["runner_only"])


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


def test_a_cache_without_a_layer_is_refused_before_anything_is_bound():
    layers = {"l.0": Layer()}
    with pytest.raises(InputError, match=r"no layer for the caches l\.1; layers given: l\.0\."):
        bind_caches(caches_of(["l.0", "l.1"]), layers)
    assert layers["l.0"].cache is None


NO_OWNER = "layer 'l.9' wants the cache of '{}', which owns none; layers that own one: l.0, l.1."


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: layer_index("a.b"), "'a.b' holds 0 numbers between its dots, 1 expected: the layer."),
    (lambda: layer_index("l.1", modules_per_layer=2),
        "layer name 'l.1' holds 1 numbers between its dots, 2 expected: the layer and which"),
    (lambda: layer_index("l.1.m.2", modules_per_layer=2),
        "layer name 'l.1.m.2': module 2 given, a layer has 2 (0 to 1)."),
    (lambda: bind_order(["l.1.a", "l.0.a", "l.1.b"]),
        "layers l.1.a, l.1.b all have index 1; expected one layer per index."),
    (lambda: share_groups([["l.0"], ["l.1"]], {"l.9": "l.5"}), NO_OWNER.format("l.5")),
    (lambda: share_groups([["l.0"], ["l.1"]], {"l.2": "l.1", "l.9": "l.2"}), NO_OWNER.format("l.2")),
    (lambda: share_groups([["l.0"], ["l.1"]], {"l.0": "l.1"}), "'l.0' has a cache of its own and cannot"),
]  # fmt: skip


def test_names_orders_and_groups_that_are_none_are_refused(subtests):
    for call, message in WRONG:
        with subtests.test(message), refused(message):
            call()
