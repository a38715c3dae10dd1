"""A page that shows a stream: the newest frame, which cells are kept, counts, and answers as they come.

pip install fastapi uvicorn
python examples/watch_page.py BUNDLE CHECKPOINT [FILM]

Open http://127.0.0.1:8000. Frames are those of the film at its own rate, or of the browser's camera.
"""

import asyncio
import base64
import io
import sys
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import asdict

import torch
from fastapi import Body, FastAPI, Request
from fastapi.responses import HTMLResponse, StreamingResponse
from PIL import Image

import vlexport
from vlexport.media import read_video

OPTIONS = {"fps": 2, "prune": 0.5, "method": "delta-frames", "behind": "drop", "keep": "newest"}
# Frames a second of a film that are pushed, and frames that are held until their group is encoded.
SHOWN, RECENT = 8, 64


class Watched:
    """A stream and what the page shows of it."""

    def __init__(self, pipeline, options):
        self.stream, self.merge = pipeline.watch(**options), pipeline.recipe.merge(pipeline.config)
        self.frames, self.first, self.group, self.drawn = [], None, None, None
        self.refused, self.closed = "", False

    def close(self):
        self.closed = True
        self.stream.close()

    def play(self, film):
        """Push a film's frames, each at its time."""
        begun = time.monotonic()
        for number, frame in enumerate(film.frames):
            seconds = number / film.frames_per_second
            time.sleep(max(0, begun + seconds - time.monotonic()))
            if self.closed:
                return
            self.push(frame, seconds)

    def push(self, frame, seconds):
        try:
            self.stream.push(frame, seconds)
        except vlexport.VlexportError as error:
            self.refused = str(error)
            return
        self.first = seconds if self.first is None else self.first
        self.frames = [*self.frames[-RECENT:], (seconds, frame)]

    def view(self):
        """Return what the page shows now."""
        counts, frames = self.stream.counts, self.frames
        if counts.tokens and frames and (counts.tokens, counts.dropped) != self.drawn:
            self.group, self.drawn = self.newest_group(frames), (counts.tokens, counts.dropped)
        now = address(frames[-1][1]) if frames else None
        return {"counts": asdict(counts), "refused": self.refused, "now": now, "group": self.group}

    def newest_group(self, frames):
        """Return which cells of the group are kept, row by row, and the frame that it begins with."""
        encoded = self.stream.newest
        _, rows, columns = encoded.grid
        cells = rows * columns // self.merge**2
        kept = torch.ones(cells, dtype=torch.bool) if encoded.mask is None else encoded.mask
        begins = self.first + encoded.frame_numbers[0] * encoded.seconds_per_grid
        shown = [frame for seconds, frame in frames if seconds <= begins] or [frames[0][1]]
        return {"columns": columns // self.merge, "kept": kept.tolist(), "picture": address(shown[-1])}


def address(frame):
    """Return the data: URL of a film's frame, or of a camera's JPEG."""
    image = Image.open(io.BytesIO(frame)) if isinstance(frame, bytes) else Image.fromarray(frame.numpy())
    image.thumbnail((640, 640))
    file = io.BytesIO()
    image.convert("RGB").save(file, format="JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


def app_of(pipeline, film=None, **options):
    """Return the service of a loaded bundle; the film is what `read_video` returns."""
    options = {**OPTIONS, **options}

    @asynccontextmanager
    async def closed(app):
        yield
        app.state.watched.close()

    app = FastAPI(lifespan=closed)
    app.state.watched = Watched(pipeline, options)

    @app.get("/", response_class=HTMLResponse)
    def page():
        return PAGE.replace("{hidden}", "" if film else "hidden")

    @app.get("/view")
    def view():
        return app.state.watched.view()

    @app.post("/begin")
    def begin(play: bool = False):
        before, app.state.watched = app.state.watched, Watched(pipeline, options)
        before.close()
        if play:
            threading.Thread(target=app.state.watched.play, args=(film,), daemon=True).start()

    @app.post("/frame")
    async def frame(request: Request):
        await asyncio.to_thread(app.state.watched.push, await request.body(), time.monotonic())

    @app.post("/ask")
    async def ask(question: str = Body(embed=True)):
        async def words():
            try:
                async with app.state.watched.stream.astream(question, max_new_tokens=64) as pieces:
                    async for piece in pieces:
                        yield piece.text
            except vlexport.VlexportError as error:
                yield f"({error})"

        return StreamingResponse(words(), media_type="text/plain")

    return app


PAGE = """<!doctype html><meta charset="utf-8"><title>A watched stream</title>
<style>
body { font: 15px/1.5 sans-serif; max-width: 54em; margin: 1em auto; padding: 0 1em; color: #1f2328 }
div { display: grid; grid-template-columns: 1fr 1fr; gap: 1em } figure { margin: 0 }
img, canvas { width: 100%; display: block } input, button { font: inherit; padding: .2em .6em }
#refused { color: #cf222e } form { display: flex; gap: .5em } #question { flex: 1 }
</style>
<h1>A watched stream</h1>
<p><button id="film" {hidden}>Play the film</button> <button id="camera">Camera</button> <span id="counts">
</span></p>
<div><figure><img id="now" alt=""><figcaption>Newest frame</figcaption></figure>
<figure><canvas id="group"></canvas><figcaption>Newest group: bright cells are kept</figcaption></figure>
</div>
<p id="refused" role="alert"></p>
<form><input id="question" placeholder="A question about what has come so far"><button>Ask</button></form>
<ol id="answers" reversed></ol>
<script>
const at = id => document.getElementById(id), make = name => document.createElement(name)
const post = (path, body) => fetch(path, {method: "POST", body})
const sleep = time => new Promise(done => setTimeout(done, time))
let drawn, source = 0
function draw({picture, kept, columns}) {
  const image = new Image(), sheet = at("group"), pen = sheet.getContext("2d")
  image.onload = () => {
    sheet.width = image.width, sheet.height = image.height
    pen.drawImage(image, 0, 0)
    pen.fillStyle = "rgb(22 24 29 / 85%)"
    const wide = sheet.width / columns, high = sheet.height * columns / kept.length
    kept.forEach((stays, cell) => stays ||
      pen.fillRect(cell % columns * wide, Math.floor(cell / columns) * high, wide, high))
  }
  image.src = picture
}
async function show() {
  const {counts, refused, now, group} = await (await fetch("view")).json()
  if (now) at("now").src = now
  if (group && drawn != JSON.stringify(group)) draw(group)
  drawn = JSON.stringify(group)
  const {frames, taken, dropped, kept, tokens} = counts, share = Math.round(100 * kept / (tokens || 1))
  at("counts").textContent = `${frames} frames, ${taken} taken, ${dropped} groups left out; ` +
    `${kept} of ${tokens} tokens kept (${share} %)`
  at("refused").textContent = refused
}
at("film").onclick = () => (source++, post("begin?play=true"))
at("camera").onclick = async () => {
  const mine = ++source, video = make("video"), sheet = make("canvas")
  video.srcObject = await navigator.mediaDevices.getUserMedia({video: {width: 640}})
  await video.play()
  await post("begin")
  sheet.width = video.videoWidth, sheet.height = video.videoHeight
  for (; mine == source; await sleep(200)) {
    sheet.getContext("2d").drawImage(video, 0, 0)
    await post("frame", await new Promise(done => sheet.toBlob(done, "image/jpeg", .9)))
  }
  video.srcObject.getTracks().forEach(track => track.stop())
}
document.forms[0].onsubmit = async event => {
  event.preventDefault()
  const row = make("li"), answer = make("b"), question = at("question").value
  row.append(question + " ", answer)
  at("answers").prepend(row)
  const body = new Blob([JSON.stringify({question})], {type: "application/json"})
  const words = (await post("ask", body)).body.pipeThrough(new TextDecoderStream())
  for await (const piece of words) answer.textContent += piece
}
(async () => { for (;; await sleep(200)) await show().catch(() => {}) })()
</script>
"""


if __name__ == "__main__":
    import uvicorn

    clip = read_video(sys.argv[3], fps=SHOWN) if sys.argv[3:] else None
    with vlexport.load(sys.argv[1], checkpoint=sys.argv[2]) as opened:
        uvicorn.run(app_of(opened, clip), host="127.0.0.1", port=8000)
