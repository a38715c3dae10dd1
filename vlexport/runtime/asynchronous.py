"""Async forms of a pipeline's calls: each runs in a thread, and none is left running behind its caller."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from vlexport.errors import InputError

if TYPE_CHECKING:
    from vlexport.runtime.generate import Stream
    from vlexport.runtime.outputs import Answer, Piece

P = ParamSpec("P")
T = TypeVar("T")


def in_thread(call: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the async form of a call; a cancelled one ends when its thread has ended."""

    @wraps(call)
    async def run(*args: P.args, **named: P.kwargs) -> T:
        work = asyncio.get_running_loop().run_in_executor(None, partial(call, *args, **named))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The engine may be closed next.
            await asyncio.wait([work])
            raise

    return run


def whole(begin: Callable[P, Stream]) -> Callable[P, Coroutine[Any, Any, Answer]]:
    """Return the async form of a whole answer; a cancelled one stops after the token that is being made."""

    @wraps(begin)
    async def run(*args: P.args, **named: P.kwargs) -> Answer:
        async with AsyncStream(partial(begin, *args, **named)) as pieces:
            async for _ in pieces:
                pass
        return pieces.require_answer()

    return run


def streamed(begin: Callable[P, Stream]) -> Callable[P, AsyncStream]:
    """Return the async form of a stream."""

    @wraps(begin)
    def run(*args: P.args, **named: P.kwargs) -> AsyncStream:
        return AsyncStream(partial(begin, *args, **named))

    return run


class AsyncStream:
    """Pieces of an answer as they come. Take them all, or use it in `async with`, which stops the rest."""

    def __init__(self, begin: Callable[[], Stream]) -> None:
        self.answer: Answer | None = None
        self._begin = begin
        self._pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        self._stopped = threading.Event()
        self._work: asyncio.Future[None] | None = None

    def _run(self, put: Callable[[Piece | None], object]) -> None:
        try:
            stream = self._begin()
            for piece in stream:
                if self._stopped.is_set():
                    stream.close()
                    return
                put(piece)
            self.answer = stream.require_answer()
        finally:
            put(None)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self

    async def __anext__(self) -> Piece:
        if self._work is None:
            loop = asyncio.get_running_loop()

            def put(piece: Piece | None) -> None:
                loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

            self._work = loop.run_in_executor(None, self._run, put)
        piece = None if self._work.done() and self._pieces.empty() else await self._pieces.get()
        if piece is None:
            await self._work
            raise StopAsyncIteration
        return piece

    def require_answer(self) -> Answer:
        """Return the whole answer; only after the last piece."""
        if self.answer is None:
            raise InputError("the stream has more pieces: take them all before the answer.")
        return self.answer

    async def aclose(self) -> None:
        """Stop after the token that is being made, and wait for it."""
        self._stopped.set()
        if self._work is not None:
            await asyncio.wait([self._work])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
