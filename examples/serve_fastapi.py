"""A small service: chat in OpenAI's form, and embeddings. For many users see docs/vllm.md. To start it:

BUNDLE=engines/... CHECKPOINT=path uvicorn --app-dir examples serve_fastapi:app
"""

import os
from contextlib import asynccontextmanager

from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse

import vlexport


@asynccontextmanager
async def opened(app):
    with vlexport.load(os.environ["BUNDLE"], decoder=os.environ["CHECKPOINT"]) as app.state.pipeline:
        yield


app = FastAPI(lifespan=opened)


@app.exception_handler(vlexport.VlexportError)
async def refused(_, error):
    return JSONResponse({"error": {"type": type(error).__name__, "message": str(error)}}, 400)


@app.post("/v1/chat/completions")
async def chat(messages: list[dict] = Body(), max_tokens: int = Body(64)):
    parts = [part for each in messages for part in each["content"] if isinstance(part, dict)]
    # Clients send media as data: URLs; a path would be read from this server's disk.
    if not all(part["type"] == "text" or part["image_url"]["url"].startswith("data:") for part in parts):
        raise vlexport.VlexportError("image_url with a data: URL expected.")
    answer = await app.state.pipeline.agenerate(messages, max_new_tokens=max_tokens)
    reply = {"role": "assistant", "content": answer.text}
    return {"choices": [{"message": reply, "finish_reason": answer.finish}]}


@app.post("/embeddings")
async def embeddings(request: Request):
    encoded = await app.state.pipeline.aencode(await request.body())
    return {"kind": encoded.kind, "grid": encoded.grid, "embeddings": encoded.embeds.tolist()}
