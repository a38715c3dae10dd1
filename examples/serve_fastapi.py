"""A small service for a few users: chat as OpenAI's clients expect it, streamed too, and embeddings.

For many users serve the bundle with vLLM (docs/serving.md): this one answers one after another. To start it:

BUNDLE=engines/... CHECKPOINT=path uvicorn --app-dir examples serve_fastapi:app
"""

import json
import os
import time
import uuid
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

import vlexport

FINISHED = {"end": "stop", "stop": "stop", "length": "length"}


@asynccontextmanager
async def opened(app):
    app.state.model = Path(os.environ["BUNDLE"]).name
    with vlexport.load(os.environ["BUNDLE"], checkpoint=os.environ["CHECKPOINT"]) as app.state.pipeline:
        yield


app = FastAPI(lifespan=opened)


def failure(error):
    return {"error": {"type": type(error).__name__, "message": str(error)}}


@app.exception_handler(vlexport.VlexportError)
async def refused(_, error):
    return JSONResponse(failure(error), 400)


@app.get("/v1/models")
async def models():
    return {"object": "list", "data": [{"id": app.state.model, "object": "model", "owned_by": "vlexport"}]}


@app.post("/v1/chat/completions")
async def chat(
    messages: list[dict] = Body(),
    max_tokens: int = Body(64),
    temperature: float = Body(0.0),
    stream: bool = Body(False),
):
    parts = [part for message in messages for part in message["content"] if isinstance(part, dict)]
    # Clients send media as data: URLs; a path would be read from this server's disk.
    if not all(part["type"] == "text" or part["image_url"]["url"].startswith("data:") for part in parts):
        raise vlexport.VlexportError("image_url with a data: URL expected.")
    generation = vlexport.Generation(max_new_tokens=max_tokens, temperature=temperature)
    pieces = app.state.pipeline.astream(messages, generation=generation)
    kind = "chat.completion.chunk" if stream else "chat.completion"
    head = {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": app.state.model,
    }
    if stream:
        # The first piece is awaited here, so that a refused request is a 400 and not a broken stream.
        first = await anext(pieces, None)
        return StreamingResponse(events(head, first, pieces), media_type="text/event-stream")
    async with pieces:
        async for _ in pieces:
            pass
    answer = pieces.require_answer()
    reply = {"role": "assistant", "content": answer.text}
    prompt, new = len(answer.prompt_token_ids), len(answer.token_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
    choice = {"index": 0, "message": reply, "finish_reason": FINISHED[answer.finish]}
    return {**head, "choices": [choice], "usage": usage}


async def events(head, first, pieces):
    def event(delta, finish=None):
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return f"data: {json.dumps({**head, 'choices': [choice]})}\n\n"

    yield event({"role": "assistant", "content": first.text if first else ""})
    try:
        # A client that leaves ends the generator, and with it the answer.
        async with pieces:
            async for piece in pieces:
                yield event({"content": piece.text})
        yield event({}, FINISHED[pieces.require_answer().finish])
    except vlexport.VlexportError as error:
        yield f"data: {json.dumps(failure(error))}\n\n"
    yield "data: [DONE]\n\n"


@app.post("/embeddings")
async def embeddings(request: Request):
    encoded = await app.state.pipeline.aencode(await request.body())
    return {"kind": encoded.kind, "grid": encoded.grid, "embeddings": encoded.embeds.tolist()}
