"""A bundle in the place of a model's tower, as far as it goes without vLLM; tests/vllm has the rest."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vlexport.recipes.demo import kimi_vl, minicpmv
from vlexport.recipes.demo.writing import write_checkpoint

from tests.runtime.recorded import CHECKPOINT
from vlexport import build
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError, LimitError, MisfitError, UnsupportedError, VlexportError
from vlexport.integrations import vllm as plugin
from vlexport.integrations.vllm import models
from vlexport.integrations.vllm.bundle_tower import (
    BundleSettings,
    BundleTower,
    open_tower,
    tower_prefixes,
    without,
)
from vlexport.runtime.encoder import EngineSession
from vlexport.specs import Pixels
from vlexport.vision.slices import slice_sizes


@pytest.fixture(scope="module")
def bundle(shared: Path) -> Path:
    """The eager bundle of the recorded checkpoint; tests of the runtime share it."""
    return build(CHECKPOINT, "eager", output_dir=shared / "engines").path


@pytest.fixture(scope="module")
def tower(bundle: Path) -> Iterator[EngineSession]:
    opened = open_tower(BundleSettings(bundle=str(bundle)), Checkpoint.open(CHECKPOINT), given_bytes=True)
    yield opened
    opened.engine.close()


class Norm(nn.Module):
    """What vLLM puts before its tower: bytes are normalised, the rest only cast."""

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return (x.to(dtype) / 255 - 0.5) / 0.25 if x.dtype == torch.uint8 else x.to(dtype)


def stock(tower: EngineSession, width: int | None = None) -> Any:
    replaced: Any = nn.Linear(2, 2)
    replaced.spatial_merge_size = 2
    replaced.out_hidden_size = width or tower.bundle.manifest.outputs[0].shape[1]
    replaced.input_norm = Norm()
    replaced.dtype, replaced.device = torch.bfloat16, torch.device("cpu")
    return replaced


def attributes(tower: EngineSession, width: int | None = None) -> dict[str, Any]:
    return {name: getattr(stock(tower, width), name) for name in models.READ}


def test_settings_are_those_of_additional_config_and_others_are_refused(subtests) -> None:
    for nothing in (None, {}, {"other": 1}, 3):
        assert BundleSettings.of(nothing) is None
    assert BundleSettings.of({"vlexport": {"bundle": "a", "threads": 2}}) == BundleSettings(
        bundle="a", threads=2
    )
    for given in ({}, {"bundel": "a"}, {"bundle": "a", "cache": 1}, "a"):
        with subtests.test(str(given)), pytest.raises(InputError, match="an object with 'bundle' expected"):
            BundleSettings.of({"vlexport": given})
    with pytest.raises(InputError, match=r"threads: '2' \(str\) given, a whole number expected"):
        BundleSettings.of({"vlexport": {"bundle": "a", "threads": "2"}})


@pytest.mark.seconds
def test_rows_are_normalised_once_and_come_in_the_models_dtype(tower: EngineSession) -> None:
    module = BundleTower(tower, attributes(tower))
    assert list(module.parameters()) == []
    grids = torch.tensor([[1, 4, 6], [2, 4, 4]])
    levels = torch.randint(0, 256, (56, 1176), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pixels = Norm()(levels, torch.float32)
    rows = module(levels, grid_thw=grids)
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, tower.run_packed(pixels, grids.tolist()).bfloat16())
    assert torch.equal(rows, module(pixels, grids.tolist()))


def test_a_tower_opens_while_tensors_are_made_in_the_models_dtype_and_place(
    bundle: Path, tower: EngineSession
) -> None:
    served = Checkpoint.open(CHECKPOINT)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            opened = open_tower(BundleSettings(bundle=str(bundle)), served, given_bytes=True)
            assert tower_prefixes(opened, served) == ("visual.", "visual.merger.")
    finally:
        torch.set_default_dtype(torch.float32)
    patches = torch.ones(24, 1176)
    assert torch.equal(opened.run_packed(patches, [(1, 4, 6)]), tower.run_packed(patches, [(1, 4, 6)]))
    opened.engine.close()


def test_a_model_of_another_width_is_refused(tower: EngineSession) -> None:
    with pytest.raises(MisfitError, match="rows of 128 values, 256 expected"):
        BundleTower(tower, attributes(tower, 256))


def changed(folder: Path) -> Checkpoint:
    """The recorded checkpoint with one other number in its tower."""
    for path in CHECKPOINT.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if "visual" in name and "bias" in name)
    tensors[name][0] += 1e-3
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint.open(folder)


def test_weights_that_are_not_those_of_the_checkpoint_are_refused_unless_unchecked(
    bundle: Path, tmp_path: Path
) -> None:
    other = changed(tmp_path)
    with pytest.raises(
        MisfitError, match=r"weights \w{12} of .*golden/e2e/checkpoint are in it.*vlexport build"
    ):
        open_tower(BundleSettings(bundle=str(bundle)), other, given_bytes=True)
    unchecked = BundleSettings(bundle=str(bundle), check_weights=False)
    open_tower(unchecked, other, given_bytes=True).engine.close()


def test_a_bundle_of_another_family_is_refused(bundle: Path) -> None:
    served = Checkpoint.open(CHECKPOINT.parents[1] / "e2e_qwen2_vl" / "checkpoint")
    with pytest.raises(MisfitError, match=r"recipe 'qwen2_5_vl', which serves qwen2_5_vl; .* is 'qwen2_vl'"):
        open_tower(BundleSettings(bundle=str(bundle)), served, given_bytes=True)


def test_the_weights_of_the_tower_are_left_out_and_all_others_kept(tower: EngineSession) -> None:
    served = Checkpoint.open(CHECKPOINT)
    names = [*served.tensor_names()]
    kept = [
        name for name, _ in without(tower_prefixes(tower, served), ((name, torch.ones(1)) for name in names))
    ]
    assert kept == [name for name in names if "visual" not in name]
    assert 0 < len(kept) < len(names)


class Loading(nn.Module):
    """A model of vLLM, which returns the names of the weights that it has loaded."""

    def load_weights(self, weights) -> set[str]:
        return {name for name, _ in weights}


class Stock(Loading):
    """What the plugin derives a model from."""

    _processor_factory = SimpleNamespace(processor=object, info=None, dummy_inputs=None)

    def __init__(self, *, vllm_config, prefix="") -> None:
        super().__init__()
        self.visual = vllm_config.stock
        self.use_data_parallel = True
        self.prefix = prefix


class Pruning(Stock):
    """A model of vLLM that prunes, with what it calls itself; its own answers are told apart."""

    is_multimodal_pruning_enabled = True

    def __init__(self, *, vllm_config, prefix="") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        vision = SimpleNamespace(tokens_per_second=2)
        self.config = SimpleNamespace(image_token_id=5, video_token_id=6, vision_config=vision)

    def get_language_model(self) -> SimpleNamespace:
        return SimpleNamespace(embed_input_ids=lambda ids: ids)

    def embed(self, rows: Tensor, kind: str, grid: tuple[int, int, int], **given: Any) -> Tensor:
        """As vLLM calls itself once a tower has run; another item of the call comes first."""
        fields = {f"{kind}_grid_thw": torch.tensor([(1, 2, 2), grid]), **given}
        items = (torch.ones(1, 2), rows)
        found: tuple[Tensor, ...] = getattr(self, f"_postprocess_{kind}_embeds_evs")(items, fields)
        return found[-1]

    def _postprocess_image_embeds_evs(self, image_embeds_split, image_input):
        return ("own",)

    def _postprocess_video_embeds_evs(self, video_embeds_split, video_input):
        return ("own",)

    def get_mrope_input_positions(self, input_tokens, mm_features):
        return "own"

    def recompute_mrope_positions(self, *_, **__):
        return "own"


@pytest.fixture
def vllm(monkeypatch) -> SimpleNamespace:
    """As much of vLLM as the plugin needs, with one rank."""
    given: dict[str, str] = {}
    library = SimpleNamespace(
        __version__="0.32.0",
        ModelRegistry=SimpleNamespace(register_model=given.__setitem__),
        registered=given,
    )
    group = SimpleNamespace(world_size=1)
    monkeypatch.setitem(sys.modules, "vllm", library)
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(get_tp_group=lambda: group))
    registry = SimpleNamespace(
        get_processing_info=lambda _: SimpleNamespace(get_image_size_with_most_features=lambda: (140, 84)),
        register_processor=lambda *_, **__: lambda model: model,
    )
    monkeypatch.setitem(sys.modules, "vllm.multimodal", SimpleNamespace(MULTIMODAL_REGISTRY=registry))
    for architecture, module in plugin.architectures().items():
        named = SimpleNamespace(**{architecture: Pruning if "Qwen2_5" in architecture else Stock})
        monkeypatch.setitem(sys.modules, f"vllm.model_executor.models.{module}", named)
    models._model.cache_clear()
    return library


def config(tower: EngineSession, bundle: Path | None, **changed) -> SimpleNamespace:
    rate = changed.get("rate")
    multimodal = SimpleNamespace(
        mm_device_do_normalize=True,
        mm_processor_kwargs=changed.get("kwargs"),
        get_limit_per_prompt=lambda _: changed.get("limit", 1),
        is_multimodal_pruning_enabled=lambda: rate is not None,
        get_video_pruning_spec=lambda: ("evs", rate),
    )
    return SimpleNamespace(
        stock=stock(tower),
        additional_config={"vlexport": {"bundle": str(bundle)}} if bundle else {},
        model_config=SimpleNamespace(
            model=str(CHECKPOINT),
            revision=None,
            multimodal_config=multimodal,
            max_model_len=2048,
            hf_config=SimpleNamespace(vision_config=SimpleNamespace(patch_size=14)),
        ),
        lora_config=SimpleNamespace(enable_tower_connector_lora=changed.get("lora", False)),
        compilation_config=SimpleNamespace(cudagraph_mm_encoder=changed.get("graphs", False)),
        cache_config=SimpleNamespace(enable_prefix_caching=changed.get("prefixes", False)),
        speculative_config=changed.get("speculation"),
        parallel_config=SimpleNamespace(pipeline_parallel_size=changed.get("stages", 1)),
    )


def made(settings: SimpleNamespace, architecture: str = "Qwen2_5_VLForConditionalGeneration") -> Any:
    """The model that vLLM makes from what was registered."""
    module, _, name = sys.modules["vllm"].registered[architecture].partition(":")
    return getattr(sys.modules[module], name)(vllm_config=settings, prefix="p")


def test_a_registered_model_takes_the_bundle_that_is_named_and_is_vllms_own_without(
    vllm: SimpleNamespace, tower: EngineSession, bundle: Path
) -> None:
    plugin.register()
    plugin.register()
    assert {*vllm.registered} == {*plugin.architectures()}
    weights = [(name, torch.ones(1)) for name in ("visual.merger.ln_q.weight", "model.norm.weight")]
    for own in (config(tower, None), config(tower, bundle, limit=0)):
        model = made(own)
        assert (model.visual, model.use_data_parallel, model.prefix) == (own.stock, True, "p")
        assert model.load_weights(weights) == {name for name, _ in weights}
    model = made(config(tower, bundle))
    assert isinstance(model.visual, BundleTower)
    assert not model.use_data_parallel
    assert model.load_weights(weights) == {"model.norm.weight"}
    model.visual.session.engine.close()


def test_other_versions_and_options_that_need_vllms_tower_are_refused(
    vllm: SimpleNamespace, tower: EngineSession, bundle: Path
) -> None:
    plugin.register()
    with pytest.raises(UnsupportedError, match="LoRA on tower and connector: not with a tower"):
        made(config(tower, bundle, lora=True))
    with pytest.raises(UnsupportedError, match="CUDA graphs of the encoder: not with a tower"):
        made(config(tower, bundle, graphs=True))
    with pytest.raises(UnsupportedError, match="pipeline parallelism: not with a tower"):
        made(config(tower, bundle, stages=2))
    moved = config(tower, bundle)
    del moved.stock.input_norm
    with pytest.raises(MisfitError, match=r"vLLM 0\.32\.0: Linear has no input_norm"):
        made(moved)
    vllm.__version__ = "0.33.0"
    with pytest.raises(MisfitError, match=r"vLLM 0\.33\.0 found, 0\.32\.\* expected"):
        made(config(tower, bundle))
    assert made(config(tower, None)).use_data_parallel


def test_a_choice_of_cells_is_refused_by_vllms_own_tower_and_with_options_that_count_whole_media(
    vllm: SimpleNamespace, tower: EngineSession, bundle: Path
) -> None:
    plugin.register()
    chosen = {"kwargs": {"prune_before": "predicted"}}
    with pytest.raises(UnsupportedError, match="prune_before given, and vLLM's own tower takes whole media"):
        made(config(tower, None, **chosen))
    with pytest.raises(UnsupportedError, match="not with video_pruning_rate, --mm-encoder-tp-mode data"):
        made(config(tower, bundle, rate=0.5, **chosen))


def feature(kind: str, offset: int, length: int, grid: tuple[int, int, int]) -> SimpleNamespace:
    data = {f"{kind}_grid_thw": SimpleNamespace(data=torch.tensor(grid))}
    return SimpleNamespace(
        modality=kind, mm_position=SimpleNamespace(offset=offset, length=length), data=data
    )


def test_a_model_prunes_and_places_several_media_and_without_a_rate_is_vllms_own(
    vllm: SimpleNamespace, tower: EngineSession, bundle: Path
) -> None:
    """An image of 2 x 3 tokens, and a video of 4 frames of 2 x 2 that stands still after its second."""
    plugin.register()
    plain = made(config(tower, bundle))
    assert plain.embed(torch.ones(6, 2), "image", grid=(1, 4, 6)) == plain.embed(
        None, "video", grid=(4, 4, 4)
    )
    assert plain.get_mrope_input_positions([], []) == plain.recompute_mrope_positions() == "own"
    plain.visual.session.engine.close()

    model = made(config(tower, bundle, rate=0.5))
    image = model.embed(torch.ones(6, 2), "image", grid=(1, 4, 6))
    frames = torch.tensor([[1.0, 0.0]] * 4 + [[0.0, 1.0]] * 12)
    video = model.embed(frames, "video", grid=(4, 4, 4), second_per_grid_ts=torch.tensor([9.0, 1.5]))
    assert (len(image), len(video)) == (6, 8)
    ids = [1, *[5] * 6, 1, *[6] * 8, 1, 1]
    features = [feature("image", 1, 6, (1, 4, 6)), feature("video", 8, 8, (4, 4, 4))]
    table, shift = model.get_mrope_input_positions(ids, features)
    assert (table[0].tolist(), shift) == ([0, *[1] * 6, 4, *[5] * 8, 7, 8], 9 - len(ids))
    # The first chunk ends inside the video, the second begins there.
    for start, stop, parts in ((0, 11, [image, video[:3]]), (11, 18, [video[3:]])):
        clean, table, shift = model.recompute_mrope_positions(
            input_ids=ids, multimodal_embeddings=parts, mrope_positions=table, num_computed_tokens=start
        )
        assert [each.shape[1] for each in clean] == [2] * len(parts), stop
    # One second is left of 1.5, two positions a second.
    assert table.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 5, 5, 5, 7, 7, 7, 7, 7, 8],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 5, 6, 6, 5, 5, 6, 6, 7, 8],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 5, 6, 5, 6, 5, 6, 7, 8],
    ]
    assert shift == 9 - len(ids)
    model.visual.session.engine.close()


@pytest.mark.seconds
def test_pruning_is_refused_with_options_that_would_move_positions_and_for_families_without(
    vllm: SimpleNamespace, tower: EngineSession, bundle: Path
) -> None:
    plugin.register()
    with pytest.raises(UnsupportedError, match=r"prefix caching \(--no-enable-prefix-caching\): not where"):
        made(config(tower, bundle, rate=0.5, prefixes=True))
    drafts = SimpleNamespace(method="eagle")
    with pytest.raises(UnsupportedError, match="speculation other than 'ngram': not where videos are pruned"):
        made(config(tower, bundle, rate=0.5, speculation=drafts))
    with pytest.raises(
        UnsupportedError, match=r"vLLM prunes no videos of 'qwen2_5_vl'\. Leave the option out"
    ):
        made(config(tower, bundle, rate=0.5), "Qwen2VLForConditionalGeneration")
    words = SimpleNamespace(method="ngram")
    made(config(tower, bundle, rate=0.5, speculation=words)).visual.session.engine.close()
    made(config(tower, bundle, prefixes=True, speculation=drafts)).visual.session.engine.close()


class Release(Loading):
    """A model of vLLM whose images come as slices, of one release."""

    version, embed_dim = (2, 6), 256

    def __init__(self, *, vllm_config, prefix="") -> None:
        super().__init__()
        self.vpm, self.resampler, self.use_data_parallel = nn.Linear(2, 2), nn.Linear(2, 2), False

    def get_vision_hidden_states(self, data) -> Tensor:
        raise AssertionError("its own tower")


class Releases(Release):
    """What is registered: it makes a model of another class."""

    def __new__(cls, **given):
        return Release(**given)


def served(checkpoint: Path, monkeypatch, **named: type) -> tuple[SimpleNamespace, EngineSession]:
    """Give vLLM a class by its name; return settings with a bundle of the checkpoint, and this, opened."""
    session = EngineSession.open(build(checkpoint, "eager", output_dir=checkpoint.parent / "engines").path)
    (architecture,) = named
    module = f"vllm.model_executor.models.{plugin.architectures()[architecture]}"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**named))
    models._model.cache_clear()
    plugin.register()
    settings = config(session, session.bundle.path)
    settings.model_config.model = str(checkpoint)
    return settings, session


@pytest.mark.slow
def test_slices_in_strips_give_the_rows_of_their_image(vllm, monkeypatch, shared: Path) -> None:
    path = write_checkpoint(shared / "sliced", minicpmv.contents())
    settings, sliced = served(path, monkeypatch, MiniCPMV=Releases)
    model = made(settings, "MiniCPMV")
    assert isinstance(model, Release)
    weights = [(name, torch.ones(1)) for name in ("vpm.post_layernorm.weight", "resampler.proj", "llm.norm")]
    assert model.load_weights(weights) == {"llm.norm"}
    assert list(model.parameters()) == []

    frames = torch.randint(0, 256, (1, 112, 336, 3), dtype=torch.uint8)
    item = sliced.preprocess(Pixels(kind="image", frames=frames))
    sizes = slice_sizes(item)
    rows = item.patches.split([rows * columns for rows, columns in sizes])
    strips = [each.unflatten(1, (3, 14, 14)).permute(1, 2, 0, 3).flatten(2) for each in rows]
    found = model.get_vision_hidden_states({"pixel_values": strips, "tgt_sizes": torch.tensor(sizes)})
    assert found.shape == (4, 4, 256)
    # As on ranks: calls of other heights round otherwise, 1e-6 on values around 1.
    torch.testing.assert_close(found.flatten(0, 1), sliced.run([item])[0].embeds, atol=1e-5, rtol=0)

    for name, value, words in (("version", (2, 0), "hands whole images"), ("embed_dim", 128, "128 expected")):
        with monkeypatch.context() as patch:
            patch.setattr(Release, name, value)
            with pytest.raises(VlexportError, match=words):
                made(settings, "MiniCPMV")
    with monkeypatch.context() as patch:
        # Served with a processor whose slices are larger than the profile was made for.
        patch.setattr(models, "_longest_segment", lambda *_: 300_000)
        with pytest.raises(LimitError, match="1 frame of 1 x 300000 patches in one engine call"):
            made(settings, "MiniCPMV")
    # A square of 112 pixels in patches of 14, and what sides gain by rounding.
    assert 64 <= models._longest_segment(sliced, Checkpoint.open(path)) <= 80


class Split(Loading):
    """A model of vLLM whose tower takes images by rows and columns, with what it calls itself."""

    def __init__(self, *, vllm_config, prefix="") -> None:
        super().__init__()
        self.vision_tower, self.multi_modal_projector = nn.Linear(2, 2), nn.Linear(2, 2)
        self.use_data_parallel = False
        self.config = SimpleNamespace(text_config=SimpleNamespace(hidden_size=64))

    def _process_image_pixels(self, pixels: Tensor, grids: Tensor) -> list[Tensor]:
        rows = self.vision_tower(pixels, grids)
        found: Tensor = self.multi_modal_projector(torch.cat(rows))
        return list(found.split([len(each) for each in rows]))


@pytest.mark.slow
def test_images_by_rows_and_columns_give_the_rows_of_their_image(vllm, monkeypatch, shared: Path) -> None:
    architecture = "KimiVLForConditionalGeneration"
    checkpoint = Checkpoint.open(write_checkpoint(shared / "split", kimi_vl.contents()))
    settings, split = served(checkpoint.path, monkeypatch, **{architecture: Split})
    model = made(settings, architecture)
    weights = [
        (name, torch.ones(1)) for name in ("vision_tower.a", "multi_modal_projector.b", "language_model.c")
    ]
    assert model.load_weights(weights) == {"language_model.c"}
    assert list(model.parameters()) == []
    sides = ((56, 84), (112, 70))
    items = [
        split.preprocess(Pixels(kind="image", frames=torch.randint(0, 256, (1, *each, 3), dtype=torch.uint8)))
        for each in sides
    ]
    pixels = torch.cat([item.patches for item in items]).unflatten(1, (3, 14, 14))
    found = model._process_image_pixels(pixels, torch.tensor([item.grid[1:] for item in items]))
    for rows, wanted in zip(found, split.run(items), strict=True):
        torch.testing.assert_close(rows, wanted.embeds, atol=1e-5, rtol=0)
    # 256 patches, or what an image of that many takes once it is filled up; a prompt has room for less.
    most = models._longest_segment(split, checkpoint)
    assert 64 <= most < 256
    settings.model_config.max_model_len = 10
    assert model.largest_items(settings.model_config, split, checkpoint) == [(1, 2, 20)]
    model.vision_tower.session.engine.close()
