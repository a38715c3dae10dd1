"""Bugs planted in one block: the first bad stage and its likely cause."""

import pytest
import torch

from vlexport.parity.check import curve_of
from vlexport.parity.diagnosis import MASK, ORDER, OVERFLOW, TYPE, VALUE
from vlexport.testing import in_torch

# Blocks 1 and 3 attend in whole frames, the others in windows.
DEPTH, FULL, PLACE = 5, 1, 2


def around(module, change):
    """Give a layer's own result to `change`."""
    original = module.forward
    module.forward = lambda *given: change(original, *given)


def cast(dtype):
    def change(original, *given):
        return original(
            *(
                each.to(dtype).float() if torch.is_tensor(each) and each.is_floating_point() else each
                for each in given
            )
        )

    return change


def rows_of(part, change):
    """A block of which a part, or the whole, gives what `change` makes of its rows."""
    return lambda block: around(block.get_submodule(part), lambda original, *given: change(original(*given)))


def zeroed(out):
    return torch.cat([out[:-1], torch.zeros_like(out[-1:])])


def swapped(out):
    changed = out.clone()
    changed[[0, 60]] = out[[60, 0]]
    return changed


def set_to(path, change):
    """A block with one tensor changed in place."""

    def bug(block):
        weight = block.get_parameter(path)
        weight.data = change(weight.data).clone()

    return bug


def infinite(block):
    around(block.mlp, lambda original, x: original(x * 1e5).half().float())


def stuck_norm(block):
    around(block.norm2, lambda original, x: original(x).clamp(-1.5, 1.5))


def wrong_epsilon(block):
    block.norm1.eps = 1e-3


def swap_norms(block):
    block.norm1, block.norm2 = block.norm2, block.norm1


def exchange_kind(block):
    block.segmentation = "window" if block.segmentation == "frame" else "frame"


def rounded(path, dtype):
    return lambda block: around(block.get_submodule(path), cast(dtype))


scale_up = set_to("mlp.down_proj.weight", lambda weight: weight * 1.01)
BUGS = {
    "clamp": (rows_of("", lambda out: out.clamp(-3, 3)), OVERFLOW),
    "infinite": (infinite, OVERFLOW),
    "drop bias": (set_to("attn.qkv.bias", torch.zeros_like), VALUE),
    "drop output bias": (set_to("attn.proj.bias", torch.zeros_like), VALUE),
    "wrong epsilon": (wrong_epsilon, VALUE),
    "swap norms": (swap_norms, VALUE),
    "other weights": (set_to("mlp.up_proj.weight", lambda weight: weight.flip(0)), VALUE),
    "scale up": (scale_up, VALUE),
    "no residual": (rows_of("mlp", lambda out: out * 1.001), VALUE),
    "stuck norm": (stuck_norm, VALUE),
    "zero row": (rows_of("", zeroed), VALUE),
    "shift attention": (rows_of("attn", lambda out: out.roll(4, 0)), ORDER),
    "reverse attention": (rows_of("attn", lambda out: out.flip(0)), ORDER),
    "swap two rows": (rows_of("attn", swapped), ORDER),
    "exchange kind": (exchange_kind, MASK),
    "round norm": (rounded("norm1", torch.bfloat16), TYPE),
    "round mlp": (rounded("mlp", torch.bfloat16), TYPE),
    "round mlp to half": (rounded("mlp", torch.float16), TYPE),
    "round attention output": (rows_of("attn", lambda out: out.bfloat16().float()), TYPE),
    "round weights": (rounded("mlp.gate_proj", torch.bfloat16), TYPE),
}


@pytest.fixture(scope="module")
def curve(subject_of):
    with in_torch(subject_of(DEPTH)) as engine:
        profile, inputs = engine.spec.profile, engine.inputs

    def made(bug, place=PLACE):
        def change(tower):
            bug(tower.blocks[place])

        return curve_of(subject_of(DEPTH, change=change if bug else None), profile, inputs)

    return made


def test_a_right_tower_has_no_bad_stage(curve):
    found = curve(None)
    assert found.first_bad is None
    assert [point.stage for point in found.points] == [
        "begin",
        *(f"block {index:02d}" for index in range(DEPTH)),
        "embeds",
    ]


@pytest.mark.slow
def test_the_bad_block_is_named_and_the_cause_is_right_for_nine_tenths_in_either_kind_of_block(curve):
    wrong = {}
    for name, (bug, cause) in BUGS.items():
        for place in (FULL, PLACE):
            found = curve(bug, place)
            if place == PLACE:
                assert found.first_bad == f"block {PLACE:02d}", name
            if (named := found.cause.split(":")[0]) != cause:
                wrong[name, place] = (named, cause)
    assert len(wrong) <= 0.1 * 2 * len(BUGS), wrong


def test_drift_goes_on_after_the_bad_block_and_the_table_marks_it(curve):
    found = curve(scale_up)
    points = {point.stage: point for point in found.points}
    assert points["block 03"].own < 1e-6
    assert points["block 03"].drift > 1e-4
    lines = found.table().splitlines()
    assert [line.split()[:2] for line in lines if "first bad" in line and line.startswith("block")] == [
        ["block", "02"]
    ]
    assert lines[-1].startswith("first bad stage on")
