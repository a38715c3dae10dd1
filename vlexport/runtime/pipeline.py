"""The runtime's front: images and videos to embeddings, and questions to answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from vlexport import media
from vlexport.backends import Engine, Options
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import InputError, UnsupportedError, VlexportError
from vlexport.recipe import Recipe
from vlexport.runtime.answering import Stream
from vlexport.runtime.attempts import attempt, each
from vlexport.runtime.encoder import NOTHING, Encoder, Tower
from vlexport.runtime.encoding import Encoded
from vlexport.runtime.languages import Language, language_of
from vlexport.runtime.opening import open_engine, recipe_of
from vlexport.runtime.placing import Pruner
from vlexport.runtime.reading import read_pixels
from vlexport.runtime.requests import Message, Request
from vlexport.runtime.speaking import OnPiece, RuntimeOptions, Speaker
from vlexport.runtime.stages import Answer
from vlexport.specs import MediaItem, Pixels

if TYPE_CHECKING:
    from vlexport.runtime.requests import ImageSource, Source, VideoSource


class Pipeline:
    """An engine and what goes around it. Close it, or use it in a `with` statement.

    One call at a time: neither engine nor decoder is made for several threads at once.
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
        self.pruner = Pruner(recipe, recipe.merge(self.config))
        self.language = language
        self._speaker = (
            Speaker(self.encoder, self.pruner, language, self.options) if language is not None else None
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
        """The answer to one question: a text, chat messages, or a `Request`, which says everything itself."""
        request = _request(question, images, videos, fps, prune)
        (outcome,) = self.generate_all([request])
        if isinstance(outcome, VlexportError):
            raise outcome
        return outcome

    def generate_all(
        self, requests: Sequence[Request], on_piece: OnPiece | None = None
    ) -> list[Answer | VlexportError]:
        """One outcome for each request, in order; what is wrong with one of them is its own outcome.

        `on_piece` is given each token as it comes, with the number of its request.
        """
        speaker = self._speaking()
        asked = each(speaker.ask, requests)
        encoded = speaker.encode(asked)
        pruned = each(speaker.prune, encoded)
        placed = each(speaker.place, pruned)
        # One at a time from here on: a prompt that has been read holds a cache.
        filled = (attempt(speaker.prefill, one) for one in placed)
        return [attempt(speaker.decoding(number, on_piece), one) for number, one in enumerate(filled)]

    def stream(self, request: Request) -> Stream:
        """The tokens of one answer as they come; the prompt is read before this returns."""
        speaker = self._speaking()
        (seen,) = speaker.encode([speaker.ask(request)])
        if isinstance(seen, VlexportError):
            raise seen
        return Stream(speaker.answer(speaker.prefill(speaker.place(speaker.prune(seen)))))

    def encode(
        self,
        *,
        images: Sequence[ImageSource] = (),
        videos: Sequence[VideoSource] = (),
        fps: float | None = None,
        prune: float | None = None,
        limits: media.MediaLimits | None = None,
    ) -> list[Encoded]:
        """All images, then all videos, in one engine call; results in the same order.

        `prune` is the share of each video's tokens to drop; images stay whole.
        """
        if not images and not videos:
            raise InputError(NOTHING)
        rate = self.pruner.check(prune)
        bounds = limits or media.MediaLimits()
        sources = [*(("image", each) for each in images), *(("video", each) for each in videos)]
        items = [self.preprocess(read_pixels(kind, source, fps, bounds)) for kind, source in sources]
        for item in items if rate else ():
            self.pruner.check_timed(item)
        return [self.pruner.prune(each, rate) for each in self.encode_items(items)]

    def preprocess(self, pixels: Pixels) -> MediaItem:
        """Pixels as the family's own preprocessing makes them."""
        return self.recipe.preprocess(self.config, pixels)

    def encode_items(self, items: Sequence[MediaItem]) -> list[Encoded]:
        """Preprocessed items in one engine call."""
        return self.tower.run(items)

    def _speaking(self) -> Speaker:
        if self._speaker is None:
            raise UnsupportedError(
                "this pipeline has no decoder, so it encodes but does not answer. "
                "Load the bundle with decoder=CHECKPOINT (--decoder)."
            )
        return self._speaker

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


def _request(
    question: str | Sequence[Message] | Request,
    images: Sequence[Source],
    videos: Sequence[Source],
    fps: float | None,
    prune: float | None,
) -> Request:
    if isinstance(question, Request):
        if images or videos or fps is not None or prune is not None:
            raise InputError("a Request and media beside it given; put everything into the Request.")
        return question
    if isinstance(question, str):
        return Request(prompt=question, images=images, videos=videos, fps=fps, prune=prune)
    return Request(messages=question, images=images, videos=videos, fps=fps, prune=prune)
