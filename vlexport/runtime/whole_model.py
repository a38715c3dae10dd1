"""Answers of a whole model of transformers whose vision half is the engine.

Pictures and prompts are made by the model's own processor, positions and masks by the model itself. No code
of the checkpoint is run.

N prompt tokens.
"""

from __future__ import annotations

import importlib
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from operator import itemgetter
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor, nn

from vlexport.checkpoint import Checkpoint
from vlexport.checkpoint.error_context import checkpoint_errors
from vlexport.errors import UNEXPECTED, CheckpointError, InputError, LimitError, UnsupportedError
from vlexport.positions.rules import PromptPositions, delta_of
from vlexport.recipe import PromptRule
from vlexport.runtime.attached import ONE_MODEL, attach_session
from vlexport.runtime.decoder import DecoderOptions, Language, end_ids
from vlexport.runtime.encoder import Encoder, EngineSession, Grid
from vlexport.runtime.generate import AnswerGenerator, RuntimeOptions
from vlexport.runtime.preprocess import MediaReader, check_fits, read_pixels, started
from vlexport.runtime.prompt import TextBound, chat_of
from vlexport.runtime.prune import Pruner
from vlexport.runtime.request import KINDS, Request, RequestLimits, RequestState, TokenizedPrompt
from vlexport.runtime.tokenizer import CheckpointTokenizer, Shield
from vlexport.specs import Pixels
from vlexport.vision.features.pixels import Processor
from vlexport.vision.features.tower import GRIDS, IMAGES

# What a model keeps of the last prompt's positions in itself.
KEPT = "rope_deltas"
# Inputs with a column for each token of a prompt.
COLUMNS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class WholeModel:
    """A decoder of token ids: the checkpoint's model and processor."""

    def __init__(self, checkpoint: Checkpoint, pictures: Processor, options: DecoderOptions) -> None:
        if options.compile or options.device != "cpu":
            raise UnsupportedError(
                f"decoder on {options.device}, compile {options.compile} given; the whole model of a generic "
                "bundle runs on the cpu and is not compiled. Leave these options out."
            )
        self.tokenizer = CheckpointTokenizer(checkpoint)
        self.processor = _processor(checkpoint, self.tokenizer, pictures)
        self.model = _model(checkpoint, options.dtype)
        text = self.model.config.get_text_config()
        self.width, self.max_tokens = int(text.hidden_size), int(text.max_position_embeddings)
        self.lock = threading.Lock()
        self._parts = [part for part in self.model.modules() if hasattr(part, KEPT)]

    def embed(self, ids_N: Tensor) -> Tensor:
        """Return ids as they are: the model embeds them."""
        return ids_N

    def begin(self, num_tokens: int) -> ModelTurn:
        return ModelTurn(self)

    @torch.inference_mode()
    def run(self, kept: Sequence[object], **inputs: Any) -> tuple[Any, list[object]]:
        """Return outputs of one step and what the model keeps after it, given what it kept before."""
        for part, value in zip(self._parts, kept or [None] * len(self._parts), strict=True):
            setattr(part, KEPT, value)
        outputs = self.model(**inputs, use_cache=True, logits_to_keep=1)
        return outputs, self.kept()

    def kept(self) -> list[object]:
        return [getattr(part, KEPT) for part in self._parts]


class _Placed(Exception):  # noqa: N818  not an error: a prompt has its positions
    pass


class ModelTurn:
    """One sequence of a whole model."""

    def __init__(self, decoder: WholeModel) -> None:
        self.decoder = decoder
        self._memory: Any = None
        self._kept: list[object] = []

    def prompt(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the logits after a prompt, and its positions [R, N] as the model makes them."""
        with self._positions() as seen:
            logits_V = self._run(**inputs)
        return logits_V, seen[0].flatten(0, -2) if seen else torch.arange(inputs["input_ids"].shape[1])[None]

    def shortened(self, inputs: Mapping[str, Any], stays_N: Tensor) -> dict[str, Any]:
        """Return inputs of what stays of a prompt.

        Positions of one line close up. Others are those that the model gives the whole prompt, after which
        the answer goes on.
        """
        with self._positions(alone=True) as seen:
            self.decoder.run([], **inputs)
        short = {name: value[:, stays_N] if name in COLUMNS else value for name, value in inputs.items()}
        if not seen or bool((seen[0].diff() == 1).all()):
            return short
        offsets = self.decoder.kept()
        if not offsets or not all(isinstance(offset, Tensor) for offset in offsets):
            raise UnsupportedError(
                f"{type(self.decoder.model).__name__}: positions are not one line, and the model keeps no "
                f"'{KEPT}' by which they go on after a pruned prompt. Leave out prune."
            )
        self._kept = [cast("Tensor", offset) + (~stays_N).sum() for offset in offsets]
        return {**short, "position_ids": seen[0][..., stays_N]}

    @contextmanager
    def _positions(self, *, alone: bool = False) -> Iterator[list[Tensor]]:
        """Collect positions as the model gives them to its decoder, which is not run if they are `alone`."""
        seen: list[Tensor] = []

        def note(_: nn.Module, __: object, named: Mapping[str, Any]) -> None:
            if isinstance(positions := named.get("position_ids"), Tensor):
                seen.append(positions)
            if alone:
                raise _Placed

        hook = self.decoder.model.get_decoder().register_forward_pre_hook(note, with_kwargs=True)
        try:
            with suppress(_Placed):
                yield seen
        finally:
            hook.remove()

    def step(self, ids_N: Tensor, *_: object) -> Tensor:
        with self.decoder.lock:
            return self._run(input_ids=ids_N[None], past_key_values=self._memory)

    def _run(self, **inputs: Any) -> Tensor:
        outputs, self._kept = self.decoder.run(self._kept, **inputs)
        self._memory = outputs.past_key_values
        logits_V: Tensor = outputs.logits[0, -1].float()
        return logits_V


def load_model(checkpoint: Checkpoint, pictures: Processor, options: DecoderOptions) -> Language:
    """Load a checkpoint's model and processor as a decoder."""
    decoder = WholeModel(checkpoint, pictures, options)
    return Language(
        decoder=decoder, tokenizer=decoder.tokenizer, ends=end_ids(checkpoint), steps=ModelAnswers
    )


def _model(checkpoint: Checkpoint, dtype: object) -> Any:
    from transformers import AutoConfig, AutoModelForImageTextToText

    report: Any
    model: Any
    auto: Any = AutoModelForImageTextToText
    try:
        with checkpoint_errors(checkpoint.path / "config.json"):
            config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
            if type(config) not in auto._model_mapping:  # noqa: SLF001  no other list
                raise UnsupportedError(
                    f"transformers has no model that answers for model type '{checkpoint.model_type}'. Use "
                    "`encode` and your own decoder."
                )
            if config.is_encoder_decoder:
                raise UnsupportedError(
                    f"models of type '{checkpoint.model_type}' have an encoder and a decoder of text, which "
                    "this runtime does not do. Use `vlexport.attach` and the model's own `generate`."
                )
            with ONE_MODEL, _without_bars():
                model, report = auto.from_pretrained(
                    checkpoint.path,
                    config=config,
                    dtype=dtype or "auto",
                    local_files_only=True,
                    use_safetensors=True,
                    output_loading_info=True,
                )
    except OSError as error:
        raise CheckpointError(
            f"{checkpoint.source}: transformers cannot load it ({' '.join(str(error).split())[:300]}). Pass "
            "a checkpoint with its language model, as safetensors."
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(
            f"{checkpoint.source} lacks {len(missing)} tensors of {type(model).__name__}, such as "
            f"{missing[0]}. Pass a checkpoint with its language model."
        )
    return model.eval()


@contextmanager
def _without_bars() -> Iterator[None]:
    from transformers.utils import logging

    are_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if are_shown:
            logging.enable_progress_bar()


def _processor(checkpoint: Checkpoint, tokenizer: CheckpointTokenizer, pictures: Processor) -> Any:
    """Return transformers' processor of text and images, with the bundle's own processor of pictures.

    Its class asks for a processor of videos, which cannot be had without torchvision: a subclass does not.
    """
    from transformers import ProcessorMixin

    auto: Any = importlib.import_module("transformers.models.auto.processing_auto")
    name = auto.PROCESSOR_MAPPING_NAMES.get(checkpoint.model_type)
    try:
        kind: Any = auto.processor_class_from_name(name) if name else None
        if kind is None or not issubclass(kind, ProcessorMixin):
            raise UnsupportedError(
                f"transformers has no processor of text and images for model type '{checkpoint.model_type}'. "
                "Use `encode` and your own decoder."
            )
        unchecked = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
        settings: dict[str, Any] = {}
        if any(map(checkpoint.has_file, ("processor_config.json", "chat_template.json"))):
            settings, _ = kind.get_processor_dict(checkpoint.path, local_files_only=True)
        processor: Any = unchecked.from_args_and_dict(  # type: ignore[attr-defined]
            [pictures.made(), tokenizer.fast], {"processor_class": name, **settings}
        )
    except UNEXPECTED as error:
        raise UnsupportedError(
            f"{checkpoint.source}: its processor '{name}' cannot be made here "
            f"({' '.join(str(error).split())[:300]}). Check processor_config.json."
        ) from error
    if settings.get("chat_template"):
        tokenizer.fast.chat_template = settings["chat_template"]
    return processor


class _Videos:
    """Videos of which the engine has the rows, in the place of a processor that needs torchvision.

    Their shapes and times are what the processor of text writes places and times by.
    """

    model_input_names = ("pixel_values_videos", "video_grid_thw")

    def __init__(self, session: EngineSession, clips: Sequence[Pixels], grids: Sequence[Grid]) -> None:
        packing: Any = session.packing
        rule, form = packing.rule, session.config.form
        self.merge_size, self.temporal_patch_size = packing.merge, getattr(rule, "temporal", 1)
        if form == GRIDS and all(clip.frames_per_second for clip in clips):
            pixels = torch.zeros(sum(map(math.prod, grids)), 0)
        elif form == IMAGES and len({frames for frames, *_ in grids}) == 1:
            pixels = torch.zeros(1).expand(len(grids), grids[0][0], 3, rule.side, rule.side)
        else:
            raise UnsupportedError(
                f"videos given to a model that takes {form}; where that is grids, a frame rate is expected, "
                "where it is images, as many frames in each. Pass fps, or frames as images."
            )
        self.fields = {"pixel_values_videos": pixels, "video_metadata": list(map(_times, clips))}
        if form == GRIDS:
            self.fields["video_grid_thw"] = torch.tensor(grids)

    def __call__(self, *_: object, **__: object) -> dict[str, Any]:
        return dict(self.fields)


def _times(clip: Pixels) -> Any:
    """Return times of frames, as numbers of frames of one second."""
    from transformers.video_utils import VideoMetadata

    rate = clip.frames_per_second or 1.0
    numbers = range(clip.first, clip.first + len(clip.frames))
    seconds: Any = list(clip.seconds) or [number / rate for number in numbers]
    count: Any = len(clip.frames) / rate
    return VideoMetadata(total_num_frames=count, fps=1.0, frames_indices=seconds)


class ModelAnswers(AnswerGenerator):
    """A tower and a whole model that answer together, step by step."""

    def __init__(self, encoder: Encoder, pruner: Pruner, language: Language, options: RuntimeOptions) -> None:
        self.encoder, self.pruner, self.language = encoder, pruner, language
        self.decoder = cast("WholeModel", language.decoder)
        self.limits = options.limits
        self.media = MediaReader(encoder.session, encoder.cache, pruner.graphs)
        self.attached = attach_session(self.decoder.model, encoder.session)

    def preprocess(self, request: Request) -> RequestState:
        state = started(request, self.limits, self.pruner)
        with state.timing("preprocess"):
            if request.generation.prefill_chunk is not None:
                raise UnsupportedError(
                    "prefill_chunk given; a whole model takes its prompt at once. Leave it out."
                )
            text, sources = self._text(request, state.limits)
            pixels = [
                read_pixels(kind, source, request.fps, state.limits.media)
                for kind, source in self._in_order(text, sources)
            ]
            state.media = tuple(
                self.media.read(clip.kind, clip, None, state.limits.media, state.pruning) for clip in pixels
            )
            state.inputs = self._inputs(text, pixels, [entry.item.grid for entry in state.media])
            state.turn = self.decoder.begin(0)
            self._set_prompt(state, is_last=not state.pruning.rate)
        return state

    def _set_prompt(self, state: RequestState, *, is_last: bool) -> None:
        ids = tuple(state.inputs["input_ids"][0].tolist())
        state.prompt = TokenizedPrompt(ids=ids, placeholders=())
        if is_last:
            check_fits(state, self.decoder)

    def _text(self, request: Request, limits: RequestLimits) -> tuple[str, dict[str, list[Any]]]:
        bound = TextBound(self.language.tokenizer, limits)
        if request.raw_prompt is not None:
            text, sources = bound(request.raw_prompt), {kind: [*request.sources(kind)] for kind in KINDS}
        else:
            tokenizer = self.language.tokenizer
            shield = Shield(tokenizer, ())
            rule = PromptRule[Any](markers=dict.fromkeys(KINDS, ""), slots={}, expand=lambda *_: "")
            messages, sources = chat_of(request, rule, lambda part: shield(bound(part)))
            text = tokenizer.render(messages)
            if shield.hidden:
                template = tokenizer.specials(text)
                messages, sources = chat_of(request, rule)
                text = tokenizer.render(messages)
                if len(tokenizer.specials(text)) > len(template) and not request.allow_special_tokens:
                    raise InputError(
                        "the text holds special tokens of this model, which its processor takes as such. "
                        "Leave them out, or allow_special_tokens."
                    )
            TextBound(tokenizer, limits)(text)
        if (count := sum(map(len, sources.values()))) > limits.max_items:
            raise LimitError(
                f"{count} images and videos given, at most {limits.max_items} expected. Send fewer or raise "
                "RequestLimits.max_items."
            )
        return text, sources

    def _in_order(self, text: str, sources: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any]]:
        """Return media with their kinds as a prompt has them."""
        placed: list[tuple[int, str, Any]] = []
        for kind, of_kind in sources.items():
            token = getattr(self.decoder.processor, f"{kind}_token", None) or "\0"
            at = [match.start() for match in re.finditer(re.escape(token), text)]
            # Where the numbers differ, the processor refuses them or has other places.
            places = at if len(at) == len(of_kind) else range(len(of_kind))
            placed += ((place, kind, source) for place, source in zip(places, of_kind, strict=True))
        return [(kind, source) for _, kind, source in sorted(placed, key=itemgetter(0))]

    def _inputs(self, text: str, pixels: Sequence[Pixels], grids: Sequence[Grid]) -> Mapping[str, Any]:
        # As transformers tells whether a rendered chat has its first token already.
        first = self.language.tokenizer.fast.bos_token
        adds = not (first and text.startswith(first))
        pictures = [Image.fromarray(clip.frames[0].numpy()) for clip in pixels if clip.kind == "image"]
        videos = [pair for pair in zip(pixels, grids, strict=True) if pair[0].kind == "video"]
        processor = self.decoder.processor
        if videos:
            processor = copy(processor)
            if not (hasattr(processor, "video_processor") and getattr(processor, "video_token", None)):
                raise UnsupportedError(
                    f"videos given; transformers' {type(processor).__name__} has none. Give frames as images."
                )
            processor.video_processor = _Videos(self.encoder.session, *zip(*videos, strict=True))
        try:
            return dict(
                processor(
                    text=[text],
                    images=pictures or None,
                    videos=[clip.frames for clip, _ in videos] or None,
                    return_tensors="pt",
                    add_special_tokens=adds,
                )
            )
        except UNEXPECTED as error:
            raise InputError(
                f"prompt with {len(pictures)} images and {len(videos)} videos: the model's processor does "
                f"not take it ({' '.join(str(error).split())[:300]}). Check their number and their places."
            ) from error

    def word_embeds(self, ids_N: Tensor) -> Tensor:
        embeds_ND: Tensor = self.decoder.model.get_input_embeddings()(ids_N).detach()
        return embeds_ND

    def prune(self, state: RequestState) -> RequestState:
        """Drop rows, and their places in the prompt."""
        whole = state.encoded
        state = super().prune(state)
        if any(item.mask is not None for item in state.encoded):
            stays_N, turn = self._stays(state), cast("ModelTurn", state.turn)
            with state.timing("positions"), self.decoder.lock, self.attached.taking(whole):
                state.inputs = turn.shortened(state.inputs, stays_N)
        if state.pruning.rate:
            self._set_prompt(state, is_last=True)
        return state

    def _stays(self, state: RequestState) -> Tensor:
        """Return which tokens of the prompt stay: all but the places of dropped rows."""
        owner, ids_N = self.attached.owner, state.inputs["input_ids"][0]
        ids = [getattr(owner.config, f"{kind}_token_id", None) for kind in KINDS]
        is_place_N = torch.isin(ids_N, torch.tensor([place for place in ids if place is not None]))
        wholes = (torch.ones(len(item.embeds), dtype=torch.bool) for item in state.encoded)
        masks = zip(state.encoded, wholes, strict=True)
        stays_R = torch.cat([whole if item.mask is None else item.mask.cpu() for item, whole in masks])
        # Classes that pack tiles also cut rows away: equal numbers say nothing there.
        if self.attached.packs or int(is_place_N.sum()) != len(stays_R):
            raise UnsupportedError(
                f"prune given; {type(owner).__name__} has {int(is_place_N.sum())} places in the prompt for "
                f"{len(stays_R)} rows of the engine, which it puts together with rows of its own. Leave out "
                "prune."
            )
        return torch.ones_like(is_place_N).masked_scatter(is_place_N, stays_R)

    def embed(self, state: RequestState) -> RequestState:
        """Leave it to the model, which embeds and places a prompt as it is prefilled."""
        return state

    def prefill(self, state: RequestState) -> RequestState:
        with state.timing("prefill"), self.decoder.lock, self.attached.taking(state.encoded):
            state.logits, table_RN = cast("ModelTurn", state.turn).prompt(state.inputs)
        state.positions = PromptPositions(table_RN=table_RN, delta=delta_of(table_RN))
        del state.inputs
        return state
