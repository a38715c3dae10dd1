"""Pipeline: images and videos to embeddings, and requests to answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from torch.profiler import record_function

from vlexport._build.token_graphs import open_graphs
from vlexport.backends import Engine, Options, Progress, log_progress
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.codec import checked
from vlexport.errors import InputError, UnsupportedError, VlexportError
from vlexport.media import MediaLimits, kind_of
from vlexport.pruning.cells import Pruning
from vlexport.recipe import Recipe
from vlexport.runtime.decoder import Language, language_of, no_language
from vlexport.runtime.encoder import Encoder, EngineSession, SharedCalls
from vlexport.runtime.generate import (
    AnswerGenerator,
    AsyncStream,
    OnPiece,
    RuntimeOptions,
    Stream,
    in_thread,
)
from vlexport.runtime.onednn_linear import bound_caches
from vlexport.runtime.outputs import Answer, Encoded, attempt, attempt_all, counted, value_of
from vlexport.runtime.preprocess import MediaReader, check_item
from vlexport.runtime.prune import Pruner
from vlexport.runtime.request import NOTHING, EncoderInput, Message, Request, is_iterator, many
from vlexport.runtime.video_stream import StreamOptions, VideoStream
from vlexport.specs import MediaItem, Pixels, check_frame_rate

if TYPE_CHECKING:
    from vlexport.runtime.request import (
        ImageSource,
        MediaOptions,
        PruningKeywords,
        RequestOptions,
        Source,
    )
    from vlexport.runtime.video_stream import StreamKeywords

    Sources = list[Source] | tuple[Source, ...]
    ReadOne = Callable[[tuple[str | None, Source]], EncoderInput]


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
        self.session = EngineSession(bundle, engine, recipe)
        self.config = self.session.config
        self.encoder = Encoder(self.session, self.options.encoder)
        self.options.pruning.require(bundle)
        self.graphs = open_graphs(bundle.manifest.graphs, bundle, bundle.manifest.outputs[0].dtype)
        self.media = MediaReader(self.session, self.encoder.cache, self.graphs)
        packing = self.session.packing
        self.pruner = Pruner(recipe, packing.merge, self.graphs, takes_cells=packing.takes_cells)
        self.language = language
        self._calls = SharedCalls(self.encoder)
        steps = AnswerGenerator if language is None or language.steps is None else language.steps
        self._generator = steps(self.encoder, self.pruner, language, self.options) if language else None

    def __repr__(self) -> str:
        return f"Pipeline({self.bundle}, {'answers' if self.language else 'encodes only'})"

    @property
    def forms(self) -> dict[str, str]:
        """How the stages between tower and decoder run here: `compiled`, or `eager: ` and the reason."""
        manifest = self.bundle.manifest
        return manifest.graphs.forms(manifest.position_rule, self.graphs.stated)

    def generate(
        self, question: str | Sequence[Message] | Request, **options: Unpack[RequestOptions]
    ) -> Answer:
        """Return the answer to one question: a text, chat messages, or a whole `Request`.

        images, videos  one source or several, as for `encode`; also embeddings that it returned
        fps, prune      as for `encode`
        max_new_tokens  the longest answer (default: 256)
        temperature     and all other fields of `Generation`, or `generation` with them

            pipeline.generate("What is this?", images="photo.jpg", temperature=0.2, seed=1).text
        """
        return value_of(self.generate_all([Request.of(question, **options)])[0])

    def generate_all(
        self, requests: Sequence[Request], on_piece: OnPiece | None = None
    ) -> list[Answer | VlexportError]:
        """Return one outcome for each request, in order: an answer, or the error of this request alone.

        `on_piece` is given each token as it comes, with the number of its request.
        """
        steps = self.require_generator()
        states = steps.encode(attempt_all(steps.preprocess, requests))
        states = attempt_all(steps.embed, attempt_all(steps.prune, states))
        # One at a time from here on: a prompt that was prefilled holds a cache.
        prefilled = (attempt(steps.prefill, state) for state in states)
        return [attempt(steps.answer(number, on_piece), state) for number, state in enumerate(prefilled)]

    def stream(
        self, question: str | Sequence[Message] | Request, **options: Unpack[RequestOptions]
    ) -> Stream:
        """Return the tokens of one answer as they come; the prompt is prefilled before this returns.

        The arguments are those of `generate`; `.answer` has the whole after the last piece.

            for piece in pipeline.stream("What is this?", images="photo.jpg"):
                print(piece.text, end="", flush=True)
        """
        request = Request.of(question, **options)
        steps = self.require_generator()
        (state,) = steps.encode([attempt(steps.preprocess, request)])
        for step in (steps.prune, steps.embed, steps.prefill):
            state = attempt(step, state)
        try:
            return Stream(steps.decode(value_of(state)))
        finally:
            del state

    @overload
    def encode(  # type: ignore[overload-overlap]  # a list is several items, frames are a list in it
        self, media: Sources | None = None, /, **options: Unpack[MediaOptions]
    ) -> list[Encoded]: ...

    @overload
    def encode(self, media: Source, /, **options: Unpack[MediaOptions]) -> Encoded: ...

    def encode(self, media: object = None, /, **options: Unpack[MediaOptions]) -> Encoded | list[Encoded]:
        """Encode images and videos; the first bad item is raised.

        Items go through `encode_all`: packed into engine calls, long videos cut between frames, and what was
        seen before comes from the cache.

        media           one source, which gives one result, or a list or an iterator, which gives a list. The
                        kind of a file is that of its content; arrays of three axes are images, of four videos
        images, videos  instead of it, by kind: one or several; results are images, then videos
        fps             frame rate of arrays and lists of frames; the rate to sample files at
        prune           share of tokens to drop after the tower; `method` says by what (default: the bundle's)
        prune_before    by what cells are dropped before it: `static:0.7`, `predicted`, ... (docs/pruning.md)
        limits          ceilings for one item

        A source is a path, bytes, an open binary file, a `data:` URL, a PIL image, an array or a tensor
        (channels last, or first), or for a video a list of frames.

            pipeline.encode("photo.jpg").embeds
            photo, clip = pipeline.encode(["photo.jpg", "clip.mp4"])
        """
        sources, read, plan = self._encoding(media, **options)
        # All are read before any is encoded, so that a bad one costs no engine call.
        items: list[EncoderInput | VlexportError] = [read(source) for source in sources]
        encoded = [value_of(one) for one in self._encode_items(items, plan)]
        are_several = media is None or isinstance(media, list | tuple) or is_iterator(media)
        return encoded if are_several else encoded[0]

    def encode_all(
        self,
        media: Sources | None = None,
        /,
        *,
        progress: Progress | None = None,
        **options: Unpack[MediaOptions],
    ) -> list[Encoded | VlexportError]:
        """Encode with one outcome for each item: its embeddings, or its own error.

        Items are packed into as many engine calls as they need. The arguments are those of `encode`, and
        `progress`, which is given texts such as "encode 3 of 12, 512 of 2048 tokens, 300 a second" with the
        share of the tokens that is done.
        """
        sources, read, plan = self._encoding(media, **options)
        report = progress or log_progress
        items = attempt_all(read, counted("read", sources, report))
        return self._encode_items(items, plan, report)

    aencode = in_thread(encode)

    def astream(
        self, question: str | Sequence[Message] | Request, **options: Unpack[RequestOptions]
    ) -> AsyncStream:
        """Return the tokens that `stream` returns, each made when it is awaited."""
        return AsyncStream(partial(self.stream, question, **options))

    async def agenerate(
        self, question: str | Sequence[Message] | Request, **options: Unpack[RequestOptions]
    ) -> Answer:
        """Return what `generate` returns; a cancelled one stops after the token that is being made."""
        async with self.astream(question, **options) as pieces:
            async for _ in pieces:
                pass
        return pieces.require_answer()

    def watch(
        self,
        *,
        messages: Sequence[Message] = (),
        images: ImageSource | Iterable[ImageSource] = (),
        **options: Unpack[StreamKeywords],
    ) -> VideoStream:
        """Return a stream that takes a clip frame by frame and answers questions about what has come so far.

        messages, images  of the conversation before the clip
        options           fields of `StreamOptions`

            with pipeline.watch(fps=2) as stream:
                stream.push(frame)
                stream.ask("What is there?").text
        """
        steps = self.require_generator()
        if self.recipe.language is None:
            raise UnsupportedError(no_language(self.recipe))
        images = tuple(images) if is_iterator(images) else images
        encoded = self.encode(images=images) if many(images) else []
        return VideoStream(steps, self._calls, StreamOptions(**options), messages, encoded)

    def encode_each(
        self,
        sources: Iterable[tuple[str | None, Source] | VlexportError],
        *,
        fps: float | None = None,
        limits: MediaLimits | None = None,
        **pruning: Unpack[PruningKeywords],
    ) -> Iterator[Encoded | VlexportError]:
        """Encode any number of items, each given with its kind or None; yield one outcome for each, in order.

        Items are read when their engine call is filled, and no more are held than it takes. An error among
        the sources is the outcome of its item.
        """
        read, plan = self._steps(fps, limits, **pruning)
        held, num_tokens = list[EncoderInput | VlexportError](), 0
        for source in sources:
            item = attempt(read, source)
            added = self.session.num_tokens(item.item) if isinstance(item, EncoderInput) else 0
            is_full = len(held) == self.encoder.max_items
            if held and (is_full or num_tokens + added > self.encoder.room):
                yield from self._encode_items(held, plan)
                held, num_tokens = [], 0
            held.append(item)
            num_tokens += added
        yield from self._encode_items(held, plan)

    def _encode_items(
        self,
        items: Sequence[EncoderInput | VlexportError],
        pruning: Pruning,
        progress: Progress = log_progress,
    ) -> list[Encoded | VlexportError]:
        good = [item for item in items if isinstance(item, EncoderInput)]
        outcomes = iter(self.encoder.encode(good, progress))

        def pruned(item: EncoderInput) -> Encoded:
            encoded = value_of(next(outcomes)).encoded
            with record_function("prune"):
                encoded = self.pruner.finish(encoded, item, pruning)
            return replace(encoded, form=encoded.form or item.form)

        return attempt_all(pruned, items)

    def _encoding(
        self, media: Any, images: Any = (), videos: Any = (), **options: Any
    ) -> tuple[list[tuple[str | None, Source]], ReadOne, Pruning]:
        """Return sources with kinds, a reader and how to prune; wrong arguments are refused first."""
        sources = [(None, source) for source in (() if media is None else many(media))]
        named = [*(("image", one) for one in many(images)), *(("video", one) for one in many(videos))]
        if sources and named:
            raise InputError("media given by position and by kind; put all into images and videos.")
        if not (sources or named):
            raise InputError(NOTHING)
        return [*sources, *named], *self._steps(**options)

    def _steps(
        self,
        fps: float | None = None,
        limits: MediaLimits | None = None,
        **options: Unpack[PruningKeywords],
    ) -> tuple[ReadOne, Pruning]:
        self.engine.require_own_process()
        if fps is not None:
            check_frame_rate(fps)
        pruning = self.pruner.plan(**options)
        bounds = checked("limits", limits, MediaLimits | None) or MediaLimits()

        def read(source: tuple[str | None, Source]) -> EncoderInput:
            kind, what = source
            with record_function("preprocess"):
                item = self.media.read(kind or kind_of(what, bounds), what, fps, bounds, pruning)
            if pruning.rate or item.item.cells is not None:
                self.pruner.check_timed(item.item)
            return item

        return read, pruning

    def preprocess(self, pixels: Pixels) -> MediaItem:
        return self.session.preprocess(pixels)

    def encode_items(self, items: Sequence[MediaItem]) -> list[Encoded]:
        """Encode preprocessed items in one engine call; only finite pixels, or bytes, are taken."""
        for item in items:
            check_item(self.session, checked("items", item, MediaItem))
        return self.session.run(items)

    def require_generator(self) -> AnswerGenerator:
        self.engine.require_own_process()
        if self._generator is None:
            raise UnsupportedError(
                "this pipeline has no decoder, so it encodes but does not answer. "
                "Load the bundle with a checkpoint."
            )
        return self._generator

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load(  # noqa: PLR0913  what the command line offers, in one place
    bundle: str | Path | Bundle,
    *,
    checkpoint: str | Path | Checkpoint | Language | None = None,
    trust: str | None = None,
    allow_failed: bool = False,
    recipe: str | None = None,
    options: Options | None = None,
    runtime: RuntimeOptions | None = None,
) -> Pipeline:
    """Open a bundle for use.

    bundle        its folder, or what `build` returned
    checkpoint    has the language model that answers questions (default: the pipeline encodes only); or a
                  `Language` of your own
    trust         the digest of a bundle from elsewhere, which approves it
    allow_failed  open a bundle that did not pass its accuracy check
    recipe        the file of the private recipe that built it
    options       threads of the engine; `runtime`: cache, calls, limits of requests, decoder

        with vlexport.load("engines/BUNDLE") as pipeline:
            tokens = pipeline.encode("photo.jpg").embeds
    """
    checked("options", options, Options | None)
    chosen = checked("runtime", runtime, RuntimeOptions | None) or RuntimeOptions()
    bound_caches()
    session = EngineSession.open(
        bundle,
        trust=trust,
        allow_failed=allow_failed,
        recipe=recipe,
        options=options,
        prove=chosen.prove,
    )
    try:
        language = None
        if checkpoint is not None:
            language = language_of(session.recipe, checkpoint, chosen.decoder, session.config)
        return Pipeline(session.bundle, session.engine, session.recipe, language, chosen)
    except BaseException:
        session.engine.close()
        raise
