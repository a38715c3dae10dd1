"""The plugin: recorded tokens with a bundle as the tower, what it refuses, and several ranks."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.golden_data import FOLDER
from vlexport.bundle import Bundle
from vlexport.bundle.manifest import Bounds, Proof
from vlexport.bundle.trust import Proved, Trust

E2E = FOLDER / "e2e"
CHECKPOINT = E2E / "checkpoint"
RECORDED = {
    case["name"]: case["token_ids"] for case in json.loads((E2E / "cases.json").read_text()) if case["truth"]
}
SEEN = ["two_images", "image_then_video"]
EXPECTED = {name: RECORDED[name] for name in SEEN}


def test_a_model_without_a_bundle_is_vllms_own(answers):
    found = answers(E2E, SEEN)
    assert found["tokens"] == EXPECTED
    assert found["parameters"] > 0
    assert found["calls"] is None


@pytest.mark.parametrize("mode", ["host", "bytes", "openvino"])
def test_tokens_are_the_same_however_pixels_come(bundle, answers, mode):
    """Normalised on the host, or as bytes that the engine normalises; and on another backend."""
    if mode == "host":
        found = answers(E2E, SEEN, bundle(CHECKPOINT), mm_device_do_normalize=False)
    elif mode == "bytes":
        found = answers(E2E, SEEN, bundle(CHECKPOINT, input_dtype="uint8"))
    else:
        found = answers(E2E, SEEN, bundle(CHECKPOINT, backend="openvino"))
    assert found["tokens"] == EXPECTED


@pytest.fixture(scope="module")
def others(tmp_path_factory) -> Path:
    """The recorded checkpoint with a tower of other numbers."""
    folder: Path = tmp_path_factory.mktemp("others")
    for path in CHECKPOINT.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: tensor.flip(0) for name, tensor in tensors.items() if "visual.merger.mlp" in name}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_bundle_of_other_weights_is_refused_and_unchecked_gives_other_tokens(bundle, answers, others):
    other = bundle(others)
    with pytest.raises(AssertionError, match=r"MisfitError: .* weights \w{12} of .* are in it"):
        answers(E2E, SEEN, other)
    found = answers(E2E, SEEN, other, entry={"check_weights": False})
    assert all(found["tokens"][name] != EXPECTED[name] for name in SEEN)


def test_what_does_not_fit_is_refused_at_start(bundle, answers):
    """Another family; images that a prompt has room for and the bundle's profile has not."""
    with pytest.raises(AssertionError, match=r"MisfitError: .* built by recipe 'qwen2_vl', which serves"):
        answers(E2E, SEEN, bundle(FOLDER / "e2e_qwen2_vl" / "checkpoint"))
    small = bundle(CHECKPOINT, max_pixels=112 * 112, max_images=2, max_frames=8)
    with pytest.raises(AssertionError, match=r"LimitError: 1 frame of .* the largest that fits is \d+ x \d+"):
        answers(E2E, SEEN, small)


def test_a_misspelt_entry_is_refused(bundle, answers):
    with pytest.raises(AssertionError, match=r"InputError: additional_config: vlexport="):
        answers(E2E, SEEN, bundle(CHECKPOINT), entry={"cache": 1})


def test_a_bundle_from_another_machine_proves_itself_at_start(bundle, answers, tmp_path):
    copy = Path(shutil.copytree(bundle(CHECKPOINT), tmp_path / "copy"))
    manifest = Bundle.open(copy).manifest

    def approved(proof: Proof) -> str:
        (copy / "manifest.json").write_bytes(replace(manifest, proof=proof).encoded())
        digest = Bundle.inspect(copy).digest
        Trust.of().record(digest, "built")
        return digest

    digest = approved(replace(manifest.proof, machine="another"))
    assert answers(E2E, SEEN, copy, entry={"prove": "new"})["tokens"] == EXPECTED
    assert len(Proved.of().read(digest)) == 1
    bounds = {"embeds": Bounds(relative_l2=0.0, worst_token=0.0)}
    calls = tuple(replace(call, bounds=bounds) for call in manifest.proof.calls)
    approved(replace(manifest.proof, machine="another", calls=calls))
    with pytest.raises(AssertionError, match=r"ParityError: .* its proof failed on this machine"):
        answers(E2E, SEEN, copy, entry={"prove": "new"})


@pytest.mark.parametrize("mode", ["weights", "data"])
def test_two_ranks_give_the_same_tokens(bundle, answers, another, mode):
    """Every rank runs the whole tower, or a share of the items."""
    options = {"tensor_parallel_size": 2, "mm_encoder_tp_mode": mode}
    process = another(VLLM_CPU_OMP_THREADS_BIND="0|1")
    found = answers(E2E, SEEN, bundle(CHECKPOINT), process=process, **options)
    assert found["tokens"] == EXPECTED


def test_two_ranks_prune_alike(bundle, answers, another):
    name = "evs_image_then_video"
    options = {"tensor_parallel_size": 2, "process": another(VLLM_CPU_OMP_THREADS_BIND="0|1")}
    assert answers(E2E, [name], bundle(CHECKPOINT), **options)["tokens"] == {name: RECORDED[name]}


@pytest.mark.parametrize("names", [SEEN, ["evs_image_then_video"]])
def test_speculation_by_the_words_of_the_prompt_gives_the_same_tokens(bundle, answers, another, names):
    # vLLM cannot start a second engine in a process where words were looked up.
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    found = answers(E2E, names, bundle(CHECKPOINT), speculative_config=speculation, process=another())
    assert found["tokens"] == {name: RECORDED[name] for name in names}


def test_options_with_which_pruned_requests_would_get_other_positions_are_refused(bundle, answers):
    pruned = ["evs_image_then_video"]
    with pytest.raises(
        AssertionError, match=r"UnsupportedError: prefix caching .* not where videos are pruned"
    ):
        answers(E2E, pruned, bundle(CHECKPOINT), enable_prefix_caching=True)
    other = FOLDER / "e2e_qwen2_vl"
    with pytest.raises(AssertionError, match=r"UnsupportedError: video_pruning_rate: vLLM prunes no videos"):
        answers(other, ["text_only"], bundle(other / "checkpoint"), video_pruning_rate=0.5)


def test_a_consumer_of_embeddings_gives_the_same_tokens_without_a_call_of_its_tower(
    bundle, answers, another, tmp_path
):
    """Encoder and decoder in processes of their own, by a connector that vLLM has."""

    def run(role: str) -> dict:
        transfer = {
            "ec_connector": "ECExampleConnector",
            "ec_role": role,
            "ec_buffer_device": "cpu",
            "ec_connector_extra_config": {"shared_storage_path": str(tmp_path / "embeddings")},
        }
        options = {"process": another(), "ec_transfer_config": transfer}
        found: dict = answers(E2E, SEEN, bundle(CHECKPOINT), **options)
        return found

    # Two images in one call or in two, an image and a video.
    assert run("ec_producer")["calls"] in (3, 4)
    found = run("ec_consumer")
    assert (found["tokens"], found["calls"]) == (EXPECTED, 0)


SETS = ("e2e", "e2e_qwen2_vl", "e2e_qwen3_vl")


def cases(name: str, *, truth: bool = True) -> list[dict]:
    # In layout `bare` of Qwen3-VL prompts are written by an older transformers, which this vLLM cannot have.
    found = json.loads((FOLDER / name / "cases.json").read_text())
    return [case for case in found if case["truth"] == truth and case.get("layout") in (None, "outer")]


def _engine(case: dict) -> tuple:
    return case["q"], case["chunk_budget"] or 0, case["embeds"]


GROUPS = [
    pytest.param(name, [case["name"] for case in group], id="-".join(map(str, (name, *engine))))
    for name in SETS
    for engine, group in groupby(sorted(cases(name), key=_engine), key=_engine)
]


@pytest.mark.parametrize(("name", "names"), GROUPS)
def test_tokens_are_those_of_stock_vllm(bundle, answers, name, names):
    found = answers(FOLDER / name, names, bundle(FOLDER / name / "checkpoint"))
    recorded = {case["name"]: case for case in cases(name)}
    assert found["tokens"] == {each: recorded[each]["token_ids"] for each in names}
    assert found["parameters"] == 0
    encoded = [each for each in names if recorded[each]["media"] and not recorded[each]["embeds"]]
    assert found["calls"] >= len(encoded)
