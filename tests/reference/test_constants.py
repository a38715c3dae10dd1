"""Constants of towers equal those of the published classes bit for bit, and no graph computes one."""

from __future__ import annotations

import importlib
import operator

import numpy as np
import pytest
import torch
from vlexport.recipes.demo.writing import write_checkpoint

from tests.mutation.trials import demo_trials, recipe_of
from tests.subjects import subject_of
from vlexport._build.export import trace
from vlexport._build.graph import TowerSpec
from vlexport.checkpoint import Checkpoint
from vlexport.parity.inputs_exact import constant_rows
from vlexport.parity.noise import tables_of
from vlexport.parity.pixels import reference_of
from vlexport.vision.rotary import inverse_frequencies

# Classes of transformers and the settings of their rotation.
CLASSES = {
    "qwen2_vl": ("Qwen2VLVisionConfig", "Qwen2VLVisionRotaryEmbedding", "embed_dim"),
    "qwen2_5_vl": ("Qwen2_5_VLVisionConfig", "Qwen2_5_VLVisionRotaryEmbedding", "hidden_size"),
    "qwen3_vl": ("Qwen3VLVisionConfig", "Qwen3VLVisionRotaryEmbedding", "hidden_size"),
}
# Head widths of released towers, of which 80, 72 and 128 showed another `pow`.
WIDTHS = (64, 72, 80, 128)
# What each library computes by a routine of its own, so that results differ by a step.
ROUNDED_OTHERWISE = {"pow", "exp", "exp2", "log", "sin", "cos", "rsqrt", "tanh", "erf"}
QUICK = ("windows", "slices")
TRIALS = [
    trial if trial in QUICK else pytest.param(trial, marks=pytest.mark.slow)
    for family in ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "kimi_vl", "minicpmv", "nemotron_vl")
    for trial in list(demo_trials(family))[:1]
]


def test_frequencies_are_those_of_transformers_bit_for_bit(subtests):
    for family, (settings, rotation, width_name) in CLASSES.items():
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        config = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        for width in WIDTHS:
            with subtests.test(f"{family} {width}"):
                made = getattr(config, settings)(**{width_name: 2 * width, "num_heads": 2})
                theirs = getattr(module, rotation)(made).inv_freq
                assert torch.equal(inverse_frequencies(width, 10000.0), theirs)


@pytest.fixture(scope="module")
def subject(request, tmp_path_factory):
    family = recipe_of(request.param)
    demo = importlib.import_module(f"vlexport.recipes.demo.{family}")
    contents = demo.contents(demo_trials(family)[request.param])
    folder = write_checkpoint(tmp_path_factory.mktemp("tower") / "checkpoint", contents, seed=0)
    return subject_of(Checkpoint.open(folder))


@pytest.mark.parametrize("subject", TRIALS, indirect=True)
def test_no_graph_computes_a_constant_and_those_of_the_reference_are_held(subject):
    shared = {"recipe", "checkpoint", "config", "precision", "form", "profile"}
    program = trace(TowerSpec(**{name: getattr(subject, name) for name in shared})).program
    signature = program.graph_signature
    known = signature.inputs_to_buffers.keys() | signature.inputs_to_lifted_tensor_constants.keys()
    fixed: set[torch.fx.Node] = {node for node in program.graph.nodes if node.name in known}
    computed = []
    for node in program.graph.nodes:
        given = node.all_input_nodes
        if node.op != "call_function" or not set(given) <= fixed:
            continue
        if isinstance(node.meta.get("val"), torch.Tensor) and node.target is not operator.getitem:
            fixed.add(node)
            name = str(node.target).removeprefix("aten.").split(".")[0]
            computed += [str(node)] if name in ROUNDED_OTHERWISE else []
    assert computed == []
    tables = list(tables_of(reference_of(subject).module).values())
    assert {row.verdict for row in constant_rows(subject, tables)} <= {"passed"}
    if subject.recipe.name == "minicpmv":
        width = subject.config.tower.out_width // 2
        omega = 1 / np.float32(10000) ** (np.arange(width // 2, dtype=np.float32) / np.float32(width // 2))
        assert any(
            torch.equal(each, torch.from_numpy(omega))
            for each in program.constants.values()
            if isinstance(each, torch.Tensor)
        )
    elif tables:
        assert [row.metrics["wrong"] for row in constant_rows(subject, tables)] == [0.0]


@pytest.mark.parametrize("subject", ["windows"], indirect=True)
def test_a_constant_one_step_of_float32_off_fails(subject):
    (theirs,) = {float(each[-1]): each for each in tables_of(reference_of(subject).module).values()}.values()
    off = theirs.clone()
    off.view(torch.int32)[-1] += 1
    (row,) = constant_rows(subject, [off])
    assert (row.level, row.verdict) == ("L0", "failed")
    assert "frequencies differs" in row.note
    held, lost = constant_rows(subject, [theirs, torch.ones(3)])
    assert (held.verdict, lost.verdict) == ("passed", "observed")
    (row,) = constant_rows(subject, [off, theirs])
    assert row.verdict == "passed"
    (row,) = constant_rows(subject, [])
    assert row.verdict == "observed"
