"""Generate: the steps from a request to an answer, and the decoder's loop, prefill in chunks and sampling.

N prompt tokens, D width, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial, wraps
from threading import Lock
from typing import Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor

from vlexport.codec import check_fields
from vlexport.errors import InputError, UnsupportedError, VlexportError
from vlexport.positions.rules import FrameMarkers, PositionOptions, PositionRule, decode_positions
from vlexport.recipe import LanguageRule
from vlexport.runtime.decoder import Decoder, DecoderOptions, Language, Turn, no_language
from vlexport.runtime.embed import Embedder
from vlexport.runtime.encoder import Encoder, EncoderOptions, EncoderOutput
from vlexport.runtime.outputs import Answer, MediaReport, Piece, attempt_all, outcome_of, value_of
from vlexport.runtime.preprocess import MediaReader, Preprocessor
from vlexport.runtime.prompt import Prompter, question_ids
from vlexport.runtime.proof import Prove
from vlexport.runtime.prune import Pruner, PruningOptions
from vlexport.runtime.request import Generation, MediaLevels, Request, RequestLimits, RequestState
from vlexport.runtime.tokenizer import CheckpointTokenizer, Detokenizer

OnPiece = Callable[[int, Piece], None]
P = ParamSpec("P")
T = TypeVar("T")

# Masks grow with chunk times prompt; a chunk this long keeps every matrix product large.
CHUNK = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class RuntimeOptions:
    """Options of a pipeline; `prompt_layout` is one of the family's, None for the current release's.

    prove  `new`: the bundle runs its own proof on machines and versions of libraries where it has not passed
    """

    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    decoder: DecoderOptions = field(default_factory=DecoderOptions)
    positions: PositionOptions = field(default_factory=PositionOptions)
    pruning: PruningOptions = field(default_factory=PruningOptions)
    prompt_layout: str | None = None
    prove: Prove | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)

    def __post_init__(self) -> None:
        check_fields(self)


class AnswerGenerator:
    """A tower, a pruner and a decoder that answer together, step by step."""

    def __init__(self, encoder: Encoder, pruner: Pruner, language: Language, options: RuntimeOptions) -> None:
        session = encoder.session
        rule = session.recipe.language
        if rule is None or (len(session.packing.outputs) > 1 and not rule.levels):
            raise UnsupportedError(no_language(session.recipe))
        width = session.bundle.manifest.outputs[0].shape[-1]
        if language.decoder.width != width:
            raise InputError(
                f"the decoder is {language.decoder.width} wide, the engine's embeddings are {width}. "
                "Pass the checkpoint that the bundle was built from."
            )
        self.encoder = encoder
        self.pruner = pruner
        self.language = language
        prompt = rule.prompt_of(options.prompt_layout)
        prompter = Prompter(language.tokenizer, prompt, lambda item: prompt.expand(session.config, item))
        media = MediaReader(session, encoder.cache, pruner.graphs)
        self.preprocessor = Preprocessor(
            media=media, pruner=pruner, prompter=prompter, decoder=language.decoder, limits=options.limits
        )
        positions = PositionRule(
            kind=session.recipe.position_rule,  # type: ignore[arg-type]
            merge=pruner.merge,
            tokens_per_second=rule.tokens_per_second(session.config),
            options=options.positions,
            markers=_frame_markers(rule, language.tokenizer),
        )
        self.embedder = Embedder(
            decoder=language.decoder,
            rule=positions,
            counts_frames=rule.counts_frames,
            levels=session.packing.outputs[1:],
            graphs=pruner.graphs,
        )

    def preprocess(self, request: Request) -> RequestState:
        return self.preprocessor.preprocess(request)

    def encode(self, states: Sequence[RequestState | VlexportError]) -> list[RequestState | VlexportError]:
        """Run the tower over the media of all requests at once (step 2)."""
        good = [state for state in states if isinstance(state, RequestState)]
        outcomes = iter(self.encoder.encode([source for state in good for source in state.media]))
        return attempt_all(lambda state: _encoded(state, [next(outcomes) for _ in state.media]), states)

    def prompted(self, state: RequestState) -> RequestState:
        """Return one request with its prompt embedded (steps 2 to 4)."""
        return self.embed(self.prune(value_of(self.encode([state])[0])))

    def completed(self, state: RequestState) -> Answer:
        """Return the answer to one request (steps 2 to 6)."""
        return self.answer(0, None)(self.prefill(self.prompted(state)))

    def prune(self, state: RequestState) -> RequestState:
        """Drop tokens of videos, then write the prompt with what is left of each frame (step 3)."""
        with state.timing("prune"):
            before = state.encoded
            state.encoded = tuple(
                self.pruner.finish(item, source, state.pruning, partial(self._question, state.request))
                for item, source in zip(before, state.media, strict=True)
            )
            ran = {str(new.form) for new, old in zip(state.encoded, before, strict=True) if new is not old}
            if ran:
                state.forms["prune"] = "; ".join(sorted(ran))
            if state.is_pruned:
                self.preprocessor.expand_prompt(state, [item.kept for item in state.encoded])
        return state

    def _question(self, request: Request) -> Tensor:
        """Return the mean embedding [D] of the words of a question."""
        ids = question_ids(self.language.tokenizer, request)
        return self.word_embeds(torch.tensor(ids, dtype=torch.int64)).double().mean(0).float()

    def word_embeds(self, ids_N: Tensor) -> Tensor:
        return self.language.decoder.embed(ids_N)

    def embed(self, state: RequestState) -> RequestState:
        return self.embedder.embed(state)

    def prefill(self, state: RequestState) -> RequestState:
        return prefill(self.language.decoder, state)

    def decode(self, state: RequestState) -> Generator[Piece, None, Answer]:
        """Yield the pieces of one answer as they come (step 6); the answer is the generator's value.

        Every answer has its own cache, random numbers and text. The cache's memory is given back at the end.
        """
        generation, table_RN = state.request.generation, state.positions.table_RN
        sampler, text = Sampler(generation), Detokenizer(self.language.tokenizer, generation.stop)
        ends = frozenset(generation.stop_token_ids)
        ends = ends if generation.ignore_end else ends | self.language.ends
        turn, logits_V = state.turn, state.logits
        del state.turn, state.logits
        with state.timing("prefill"):
            token_id = sampler.choose(logits_V)
        first_token = sum(state.seconds.values())
        while True:
            yield Piece(token_id=token_id, text=text.push(token_id))
            if token_id in ends or text.stopped or len(text.ids) >= generation.max_new_tokens:
                break
            with state.timing("decode"):
                at = table_RN.shape[1] + len(text.ids) - 1
                positions_R1 = decode_positions(state.positions.delta, at, rows=len(table_RN))
                token_id = sampler.choose(
                    turn.step(self.language.decoder.embed(torch.tensor([token_id])), positions_R1)
                )
        if rest := text.finish():
            yield Piece(token_id=None, text=rest)
        # A stop text may also come to light in the rest.
        finish = "stop" if text.stopped else "end" if token_id in ends else "length"
        after = state.seconds["decode"] / (len(text.ids) - 1) if len(text.ids) > 1 else 0.0
        return Answer(
            token_ids=tuple(text.ids),
            text=text.text,
            finish=finish,
            prompt_token_ids=state.prompt.ids,
            positions=table_RN.cpu(),
            delta=int(state.positions.delta),
            media=tuple(
                MediaReport(
                    kind=item.kind,
                    grid=item.grid,
                    num_tokens=len(item.embeds) if item.mask is None else len(item.mask),
                    num_kept=len(item.embeds),
                    seconds_per_grid=item.seconds_per_grid,
                    mask=None if item.mask is None else item.mask.cpu(),
                )
                for item in state.encoded
            ),
            stages={**state.seconds, "first_token": first_token, "per_token": after},
            forms=dict(state.forms),
        )

    def answer(self, number: int, on_piece: OnPiece | None) -> Callable[[RequestState], Answer]:
        def run(state: RequestState) -> Answer:
            stream = Stream(self.decode(state))
            for piece in stream:
                if on_piece is not None:
                    _call(on_piece, number, piece)
            return stream.require_answer()

        return run


def _frame_markers(rule: LanguageRule[Any], tokenizer: CheckpointTokenizer) -> FrameMarkers | None:
    if rule.frame_markers is None:
        return None
    start, end = rule.frame_markers
    return FrameMarkers(
        vision_start=tokenizer.id_of(start),
        vision_end=tokenizer.id_of(end),
        video=tokenizer.id_of(rule.prompt.slots["video"]),
    )


def _call(on_piece: OnPiece, number: int, piece: Piece) -> None:
    try:
        on_piece(number, piece)
    except Exception as error:
        raise InputError(f"on_piece raised {type(error).__name__}: {error}. Mend the callback.") from error


def _encoded(state: RequestState, outcomes: Sequence[EncoderOutput | VlexportError]) -> RequestState:
    outputs = [value_of(outcome) for outcome in outcomes]
    state.seconds["tower"] += sum(output.seconds for output in outputs)
    state.encoded = tuple(output.encoded for output in outputs)
    return state


def prefill(decoder: Decoder, state: RequestState, turn: Turn | None = None) -> RequestState:
    """Feed a prompt to the decoder, chunk by chunk; a chunk's size changes no token.

    turn  what has the prompt's beginning already; the state then has embeddings of the rest
    """
    generation, embeds_ND = state.request.generation, state.embeds
    table_RN = state.positions.table_RN[:, state.positions.table_RN.shape[1] - len(embeds_ND) :]
    with state.timing("prefill"):
        turn = turn or decoder.begin(len(embeds_ND) + generation.max_new_tokens)
        logits_V = feed(turn, embeds_ND, table_RN, state.levels, generation.prefill_chunk or CHUNK)
    state.turn, state.logits, state.levels = turn, logits_V, None
    return state


def feed(
    turn: Turn, embeds_ND: Tensor, table_RN: Tensor, levels: MediaLevels | None, step: int = CHUNK
) -> Tensor:
    """Give a turn columns of a prompt, and return the logits [V] after the last."""
    for start in range(0, len(embeds_ND), step):
        chunk = slice(start, start + step)
        rows_ND, positions_RN = embeds_ND[chunk], table_RN[:, chunk]
        terms = levels.between(start, start + len(rows_ND)) if levels else ()
        logits_V = turn.step(rows_ND, positions_RN, *terms)
    return logits_V


class Stream:
    """Pieces of an answer as they come; `answer` is there when they are exhausted.

    Take them all, close it, or use it in a `with` statement.

    release  called once, when the last piece was taken, the answer failed, or the stream is closed
    """

    def __init__(
        self, pieces: Generator[Piece, None, Answer], release: Callable[[], None] = lambda: None
    ) -> None:
        self._pieces = pieces
        self._end = ExitStack()
        self._end.callback(release)
        self.answer: Answer | None = None

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self.answer = end.value or self.answer
            self._end.close()
            raise StopIteration from None
        except BaseException as error:
            self._end.close()
            if not isinstance(error, Exception):
                raise
            outcome = outcome_of(error)
            raise outcome from outcome.__cause__

    def require_answer(self) -> Answer:
        """Return the whole answer; only after the last piece."""
        return _whole(self.answer)

    def close(self) -> None:
        """Stop here and give the cache's memory back."""
        self._pieces.close()
        self._end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_thread(call: Callable[P, T], threads: Executor | None = None) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the async form of a call; a cancelled one ends when its thread has ended."""

    @wraps(call)
    async def run(*args: P.args, **named: P.kwargs) -> T:
        # No task: those are cancelled when the loop ends, while the thread is still at work.
        ready = partial(copy_context().run, call, *args, **named)
        work = asyncio.get_running_loop().run_in_executor(threads, ready)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The engine may be closed next; a call that is cancelled twice waits, too.
            while not work.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            # Nobody asks for its error any more, and asyncio would log that.
            work.exception()
            raise

    # As it is shown by `help`.
    run.__name__ = run.__qualname__ = f"a{getattr(call, '__name__', 'call')}"
    return run


class AsyncStream:
    """Pieces of an answer, each made when it is awaited. Take them all, or use it in `async with`.

    A cancelled one is closed.

    threads  in which pieces are made, where those of the event loop may all wait for this stream
    """

    def __init__(self, begin: Callable[[], Stream], threads: Executor | None = None) -> None:
        self._begin, self._threads = begin, threads
        self._stream: Stream | None = None
        # Another task may close the stream while a piece is made.
        self._turn = Lock()

    @property
    def answer(self) -> Answer | None:
        return self._stream.answer if self._stream else None

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        try:
            piece = await in_thread(self._next, self._threads)()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def _next(self) -> Piece | None:
        with self._turn:
            if self._stream is None:
                self._stream = self._begin()
            return next(self._stream, None)

    def _close(self) -> None:
        with self._turn:
            if self._stream is not None:
                self._stream.close()

    def require_answer(self) -> Answer:
        return _whole(self.answer)

    async def aclose(self) -> None:
        await in_thread(self._close, self._threads)()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _whole(answer: Answer | None) -> Answer:
    if answer is None:
        raise InputError("the stream has more pieces: take them all before the answer.")
    return answer


class Sampler:
    """Draws by one request's own settings and random numbers, whatever runs at the same time."""

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.random = torch.Generator().manual_seed(generation.seed)

    def choose(self, logits_V: Tensor) -> int:
        """Return the next token; of equally likely ones the lowest id where nothing is drawn."""
        # Two numbers are copied from a device, not the row: there, too, the first of equals is the lowest id.
        is_finite, likeliest = torch.stack([torch.isfinite(logits_V).all(), logits_V.argmax()]).tolist()
        if not is_finite:
            raise InputError(
                "the decoder gave NaN or infinite logits. Check the embeddings and the decoder's dtype; "
                "float16 overflows where bfloat16 does not."
            )
        if self.generation.temperature == 0:
            return int(likeliest)
        # Drawn on the host, so that a seed draws the same on every device.
        shares_V = allowed_shares(logits_V.cpu(), self.generation)
        return int(torch.multinomial(shares_V, 1, generator=self.random))


def allowed_shares(logits_V: Tensor, generation: Generation) -> Tensor:
    """Return probabilities after temperature, then the top_k likeliest, then the fewest that reach top_p."""
    # Below the largest, in double: however low a temperature is, the likeliest stays 0 and none becomes NaN.
    scaled_V = (logits_V.double() - logits_V.max()) / generation.temperature
    ranked_V, order_V = scaled_V.sort(descending=True, stable=True)
    if generation.top_k:
        ranked_V[generation.top_k :] = -torch.inf
    shares_V = ranked_V.softmax(0)
    if generation.top_p < 1:
        before_V = shares_V.cumsum(0) - shares_V
        shares_V[before_V >= generation.top_p] = 0.0
    return torch.zeros_like(shares_V).scatter(0, order_V, shares_V / shares_V.sum())
