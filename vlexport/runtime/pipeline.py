"""Pipeline: images and videos to embeddings, and requests to answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vlexport import media
from vlexport.backends import Engine, Options
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError, UnsupportedError, VlexportError
from vlexport.fields import checked
from vlexport.recipe import Recipe
from vlexport.runtime.decoder import Language, language_of
from vlexport.runtime.encoder import NOTHING, Encoder, EncoderOutput, Tower
from vlexport.runtime.generate import AnswerGenerator, OnPiece, RuntimeOptions, Stream
from vlexport.runtime.opening import open_engine, recipe_of
from vlexport.runtime.outputs import Answer, Encoded, attempt, each
from vlexport.runtime.preprocess import check_patches, naming, read_pixels
from vlexport.runtime.prune import Pruner
from vlexport.runtime.request import EncoderInput, Message, Request
from vlexport.specs import MediaItem, Pixels, check_frame_rate

if TYPE_CHECKING:
    from vlexport.runtime.request import ImageSource, Source, VideoSource


class Pipeline:
    """An open bundle with its engine, and perhaps a decoder. Close it, or use it in a `with` statement.

    Any thread of the process that opened it may call it. Most engines take one call at a time; others wait.
    """

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        recipe: Recipe[Any],
        language: Language | None = None,
        options: RuntimeOptions | None = None,
    ) -> None:
        self.options = options or RuntimeOptions()
        self.bundle = bundle
        self.engine = engine
        self.recipe = recipe
        self.tower = Tower(bundle, engine, recipe)
        self.config = self.tower.config
        self.encoder = Encoder(self.tower, self.options.encoder)
        selection = self.options.pruning.selection(
            recipe.pruning_rule, dtype=bundle.manifest.outputs[0].dtype, device=bundle.manifest.target.device
        )
        self.pruner = Pruner(recipe, recipe.merge(self.config), selection)
        self.language = language
        self._generator = (
            AnswerGenerator(self.encoder, self.pruner, language, self.options) if language else None
        )

    def generate(
        self,
        question: str | Sequence[Message] | Request,
        *,
        images: Sequence[Source] = (),
        videos: Sequence[Source] = (),
        fps: float | None = None,
        prune: float | None = None,
    ) -> Answer:
        """Return the answer to one question: a text, chat messages, or a whole `Request`."""
        request = _request(question, images, videos, fps, prune)
        (outcome,) = self.generate_all([request])
        if isinstance(outcome, VlexportError):
            raise outcome
        return outcome

    def generate_all(
        self, requests: Sequence[Request], on_piece: OnPiece | None = None
    ) -> list[Answer | VlexportError]:
        """Return one outcome for each request, in order: an answer, or the error of this request alone.

        `on_piece` is given each token as it comes, with the number of its request.
        """
        steps = self._require_generator()
        states = steps.encode(each(steps.preprocess, requests))
        states = each(steps.embed, each(steps.prune, states))
        # One at a time from here on: a prompt that was prefilled holds a cache.
        prefilled = (attempt(steps.prefill, state) for state in states)
        return [attempt(steps.answer(number, on_piece), state) for number, state in enumerate(prefilled)]

    def stream(self, request: Request) -> Stream:
        """Return the tokens of one answer as they come; the prompt is prefilled before this returns."""
        steps = self._require_generator()
        (state,) = steps.encode([attempt(steps.preprocess, request)])
        for step in (steps.prune, steps.embed, steps.prefill):
            state = attempt(step, state)
        if isinstance(state, VlexportError):
            raise state
        return Stream(steps.decode(state))

    def encode(
        self,
        *,
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        fps: float | None = None,
        prune: float | None = None,
        limits: media.MediaLimits | None = None,
    ) -> list[Encoded]:
        """Encode all images, then all videos, in one engine call; results in the same order.

        `prune` is the share of each video's tokens to drop; images stay whole. The first bad item is raised.
        """
        read, prune_one = self._encoding(images, videos, fps=fps, prune=prune, limits=limits)
        items = [read(source) for source in _sources(images, videos)]
        return [prune_one(each) for each in self.tower.run(items)]

    def encode_all(
        self,
        *,
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        fps: float | None = None,
        prune: float | None = None,
        limits: media.MediaLimits | None = None,
    ) -> list[Encoded | VlexportError]:
        """Encode with one outcome for each item: its embeddings, or its own error.

        Items are packed into as many engine calls as they need.
        """
        read, prune_one = self._encoding(images, videos, fps=fps, prune=prune, limits=limits)
        items = each(read, _sources(images, videos))
        good = [item for item in items if isinstance(item, MediaItem)]
        found = iter(self.encoder.encode([EncoderInput(item=item) for item in good]))
        outcomes = [next(found) if isinstance(item, MediaItem) else item for item in items]
        encoded = [one.encoded if isinstance(one, EncoderOutput) else one for one in outcomes]
        return each(prune_one, encoded)

    def _encoding(
        self,
        images: object,
        videos: object,
        *,
        fps: float | None,
        prune: float | None,
        limits: media.MediaLimits | None,
    ) -> tuple[Callable[[tuple[str, Source]], MediaItem], Callable[[Encoded], Encoded]]:
        """Return functions that read one source and prune one item; wrong arguments are refused first."""
        self.engine.require_own_process()
        for name, given in (("images", images), ("videos", videos)):
            checked(name, given, Sequence[object])
        if not images and not videos:
            raise InputError(NOTHING)
        if fps is not None:
            check_frame_rate(fps)
        rate = self.pruner.check(prune)
        bounds = checked("limits", limits, media.MediaLimits | None) or media.MediaLimits()

        def read(source: tuple[str, Source]) -> MediaItem:
            kind, what = source
            pixels = read_pixels(kind, what, fps, bounds)
            with naming(what):
                item = self.preprocess(pixels)
            if rate:
                self.pruner.check_timed(item)
            return item

        return read, lambda encoded: self.pruner.prune(encoded, rate)

    def preprocess(self, pixels: Pixels) -> MediaItem:
        return self.recipe.preprocess(self.config, pixels)

    def encode_items(self, items: Sequence[MediaItem]) -> list[Encoded]:
        """Encode preprocessed items in one engine call; only finite pixels, or bytes, are taken."""
        for item in items:
            check_patches(self.tower, item)
        return self.tower.run(items)

    def _require_generator(self) -> AnswerGenerator:
        self.engine.require_own_process()
        if self._generator is None:
            raise UnsupportedError(
                "this pipeline has no decoder, so it encodes but does not answer. "
                "Load the bundle with decoder=CHECKPOINT (--decoder)."
            )
        return self._generator

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load(  # noqa: PLR0913  what the command line offers, in one place
    bundle: str | Path,
    *,
    decoder: str | Path | Checkpoint | Language | None = None,
    trust: str | None = None,
    allow_failed: bool = False,
    recipe: str | None = None,
    options: Options | None = None,
    runtime: RuntimeOptions | None = None,
) -> Pipeline:
    """Open a bundle for use; `trust` approves a bundle from elsewhere by its digest.

    With the checkpoint of a `decoder` the pipeline answers questions; only its language model is read.
    """
    chosen = runtime or RuntimeOptions()
    opened = Bundle.open(bundle, trust=trust, verify="lazy")
    found = recipe_of(opened, recipe)
    engine = open_engine(opened, allow_failed=allow_failed, options=options)
    try:
        language = None if decoder is None else language_of(found, decoder, chosen.decoder)
        return Pipeline(opened, engine, found, language, chosen)
    except BaseException:
        engine.close()
        raise


def _sources(images: Sequence[Source], videos: Sequence[Source]) -> list[tuple[str, Source]]:
    return [*(("image", one) for one in images), *(("video", one) for one in videos)]


def _request(
    question: str | Sequence[Message] | Request,
    images: Sequence[Source],
    videos: Sequence[Source],
    fps: float | None,
    prune: float | None,
) -> Request:
    if isinstance(question, Request):
        if images or videos or fps is not None or prune is not None:
            raise InputError("a Request and separate media given; put everything into the Request.")
        return question
    if isinstance(question, str):
        return Request(prompt=question, images=images, videos=videos, fps=fps, prune=prune)
    return Request(messages=question, images=images, videos=videos, fps=fps, prune=prune)
