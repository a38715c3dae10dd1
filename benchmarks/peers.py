"""Other ways to run a vision tower beside ours, on one machine: each peer in a process of its own, in turn.

`python -m benchmarks.peers FOLDER [--python PYTHON]` writes a random checkpoint with the vision tower of
Qwen2.5-VL 3B and a small decoder, pictures, and rows of transformers' class in float64. Each peer exports
once; then, round by round, a fresh process opens it for each size, and one for the first token of an answer.
PYTHON, which `make peers` sets up, has optimum-intel, OpenVINO GenAI and llama.cpp. What was measured stays
in FOLDER, and the next run goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.first_hour import GIB, Step, step
from benchmarks.options import ROOT, parser_of
from benchmarks.tables import markdown, marks, publish, write_whole
from vlexport.target import processor_here

# Frames, rows and columns of pixels; the family makes 1092 x 1932 of 1080 x 1920.
SIZES = {
    "448x448": (1, 448, 448),
    "1036x700": (1, 700, 1036),
    "1080p": (1, 1092, 1932),
    "16 frames": (16, 448, 448),
}
ANSWER = "first token about "
RELEASED, WRONG = 32, 0.1  # blocks of the released model; an error that rounding does not explain
LATE = 124  # the exit code of `timeout` from GNU's coreutils
SPEEDS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
LIBRARIES = (
    "torch", "transformers", "onnxruntime-gpu", "openvino", "optimum-intel", "nncf", "openvino-genai",
    "llama-cpp-python",
)  # fmt: skip
COLUMNS = (
    "peer", "export, s / MB of tower", "opening, s", "first call, s", "later calls, s",
    "times as fast as transformers float32", "GiB open / peak", "relative L2 / worst token",
)  # fmt: skip
Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    """A row of the tables. `files` is the folder of its export, `parts` are the tower's in it."""

    name: str
    kind: str
    options: Mapping[str, Any]
    files: str = ""
    parts: str = "**/*"


def ours(backend: str, precision: str, rule: str = "") -> Peer:
    limits = {"min_pixels": 56 * 56, "max_pixels": 1092 * 1932, "max_images": 1, "max_frames": 16}
    # One bundle encodes whole pictures and pruned ones.
    eight = {"quantize": "int8", "selector": "evs,predicted"}
    chosen = eight if precision == "int8" else {"dtype": precision}
    options = {"build": {"backend": backend, **chosen, **limits}, "prune_before": rule}
    name = f"vlexport {backend} {precision} {rule}".rstrip()
    return Peer(name, "vlexport", options, f"{backend}-{precision}")


WIDE, TOWER = {"INFERENCE_PRECISION_HINT": "f32"}, "*vision_embeddings*"
# The others are compared with the first.
PEERS = (
    Peer("transformers float32", "transformers", {"dtype": "float32"}),
    Peer("transformers bfloat16", "transformers", {"dtype": "bfloat16"}),
    Peer("optimum-intel float32", "optimum", WIDE, "optimum-fp32", TOWER),
    Peer("optimum-intel by default", "optimum", {}, "optimum-fp32", TOWER),
    Peer("optimum-intel int8", "optimum", {}, "optimum-int8", TOWER),
    Peer("OpenVINO GenAI float32", "genai", WIDE, "optimum-fp32", TOWER),
    Peer("OpenVINO GenAI int8", "genai", {}, "optimum-int8", TOWER),
    Peer("llama.cpp f16", "llama", {"type": "f16"}, "llama-f16", "mmproj*"),
    Peer("llama.cpp q8_0", "llama", {"type": "q8_0"}, "llama-q8_0", "mmproj*"),
    ours("onnxruntime", "float32"),
    ours("onnxruntime", "int8"),
    ours("openvino", "float32"),
    ours("openvino", "int8"),
    ours("openvino", "bfloat16"),
    ours("inductor", "bfloat16"),
    ours("inductor", "int8"),
    ours("openvino", "int8", "predicted"),
    ours("onnxruntime", "int8", "predicted"),
)


class Run:
    """A folder with what was measured in it so far: exports and calls, each with a `reason` if it failed."""

    def __init__(self, folder: Path, settings: argparse.Namespace) -> None:
        self.settings, self.folder, self.file = settings, folder, folder / "results.json"
        folder.mkdir(parents=True, exist_ok=True)
        stored = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
        self.exports: dict[str, Record] = stored.get("exports", {})
        self.calls: dict[str, Record] = stored.get("calls", {})
        shapes, files = settings.shapes, settings.pictures
        asked = [size for size, shape in shapes.items() if shape[0] == 1 and size not in files]
        self.tables = [*shapes, *(ANSWER + size for size in asked[:1])]

    def save(self) -> None:
        write_whole(self.file, json.dumps({"exports": self.exports, "calls": self.calls}, indent=1) + "\n")

    def job(self, verb: str, peer: Peer, size: str) -> Step:
        """Run a job of `benchmarks.peer`, or optimum's own command, in a process of its own."""
        settings, checkpoint = self.settings, str(self.folder / "checkpoint")
        python = sys.executable if peer.kind in ("transformers", "vlexport") else settings.python
        built = str(self.folder / peer.files)
        described = {
            "verb": verb, "kind": peer.kind, "checkpoint": checkpoint, "built": built,
            "inputs": str(self.folder / f"inputs {size}.npz"), "result": str(self.folder / "result.json"),
            "rows": str(self.folder / ("rows.npy" if verb == "rows" else f"exact {size}.npy")),
            "depth": settings.depth, "shape": settings.shapes[size], "threads": settings.threads,
            "picture": settings.pictures.get(size, ""),
            "options": peer.options, "began": time.monotonic(),
        }  # fmt: skip
        words = [python, "-m", "benchmarks.peer", json.dumps(described)]
        if verb == "build" and peer.files.startswith("optimum"):
            weights = peer.files.removeprefix("optimum-")
            how = f"export openvino --task image-text-to-text --weight-format {weights} --model".split()
            words = [str(Path(python).with_name("optimum-cli")), *how, checkpoint, built]
        own = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings.threads))
        variables = {**os.environ, **own, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        words = ["timeout", "--foreground", str(settings.seconds), *words]
        return step(verb, words, variables, round(settings.memory * GIB), self.folder / "log")

    def export(self, peer: Peer) -> None:
        if peer.files and peer.files not in self.exports:
            done = self.job("build", peer, next(iter(self.settings.shapes)))
            parts = [part for part in (self.folder / peer.files).glob(peer.parts) if part.is_file()]
            size = sum(part.stat().st_size for part in parts)
            record = {"seconds": done.seconds, "peak": done.peak, "bytes": size}
            self.exports[peer.files] = record | self.failure(done)
            self.save()

    def call(self, peer: Peer, size: str, number: int) -> None:
        """Run one round of a size unless it is there; a peer that failed at a size is not run there again."""
        key, first = (f"{peer.name}, {size}, {each}" for each in (number, 0))
        earlier = (self.exports.get(peer.files, {}), self.calls.get(first, {}))
        if key in self.calls or any("reason" in each for each in earlier):
            return
        shown, rows = size.removeprefix(ANSWER), self.folder / "rows.npy"
        rows.unlink(missing_ok=True)
        done = self.job("rows" if shown == size else "answer", peer, shown)
        record = self.failure(done) or json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        if rows.exists() and shown not in self.settings.pictures:
            record |= compared(np.load(rows), np.load(self.folder / f"exact {shown}.npy"))
        elif rows.exists():
            record["rows"] = len(np.load(rows, mmap_mode="r"))
        self.calls[key] = record | {"peak": done.peak, "load": os.getloadavg()[0]}
        self.save()

    def failure(self, done: Step) -> Record:
        """Return why a process failed, if it did: its last line, without the folder, or what ended it."""
        if done.code <= 0 or done.code > 128:
            return {"reason": f"died, exit code {done.code}"} if done.code else {}
        lines = done.out.strip().splitlines() or [""]
        last = f"stopped after {self.settings.seconds} s" if done.code == LATE else lines[-1]
        return {"reason": last.replace(str(self.folder), "FOLDER").replace("|", "/")[:300]}


def compared(rows: Any, exact: Any) -> Record:
    """Return relative L2 and that of the worst row, or why the rows are wrong."""
    if rows.shape != exact.shape:
        return {"reason": f"rows of shape {rows.shape}, {exact.shape} expected"}
    apart, size = (np.linalg.norm(each, axis=1) for each in (rows.astype(np.float64) - exact, exact))
    error = float(np.linalg.norm(apart) / np.linalg.norm(size))
    if error < WRONG:
        return {"error": error, "worst": float((apart / size).max())}
    return {"reason": f"wrong rows, no error raised: relative L2 {error:.1e}"}


def ratio(over: Sequence[float], under: Sequence[float]) -> str:
    """Return the median over rounds with its interval, which one round does not have."""
    from vlexport.evaluate.intervals import paired

    if len(over) > 1:
        return str(paired(over, under))
    return f"{over[0] / under[0]:.2f} (one round)" if over else "-"


def row_of(peer: Peer, export: Record, base: Sequence[Record], rounds: Sequence[Record]) -> tuple[str, ...]:
    """Return a peer's row; a ratio is of the rounds that both have, and a peer without rounds says why."""
    calls = [each for each in rounds if each]
    reason = next(
        (each["reason"] for each in (export, *calls) if "reason" in each), "" if calls else "not run"
    )
    disk = f"{export['seconds']:.0f} / {export['bytes'] / 1e6:.0f}" if export.get("bytes") else "-"
    if reason:
        return (peer.name, disk, reason, *"-----")
    later = [statistics.median(each["later"]) for each in calls]
    pairs = [(one["later"], other["later"]) for one, other in zip(base, rounds, strict=True) if one and other]
    over, under = ([statistics.median(pair[side]) for pair in pairs] for side in (0, 1))
    names = ("opening", "first", "opened", "peak")
    opening, first, opened, peak = (statistics.median(each[name] for each in calls) for name in names)
    return (
        peer.name, disk, f"{opening:.2f}", f"{first:.2f}", ratio(later, [1.0] * len(later)),
        ratio(over, under), f"{opened / GIB:.1f} / {peak / GIB:.1f}",
        f"{calls[0]['error']:.1e} / {calls[0]['worst']:.1e}" if "error" in calls[0] else
        f"{calls[0]['rows']:,} rows" if "rows" in calls[0] else "-",
    )  # fmt: skip


def text_of(run: Run, peers: Sequence[Peer]) -> str:
    """Return a table for each size, then the machine, and whether this is a trial."""
    settings, parts = run.settings, []
    for size in run.tables:
        names = (PEERS[0].name, *(peer.name for peer in peers))
        base, *rounds = (
            [run.calls.get(f"{name}, {size}, {at}", {}) for at in range(settings.rounds)] for name in names
        )
        base = [each if "later" in each else {} for each in base]
        exports = (run.exports.get(peer.files, {}) for peer in peers)
        rows = [
            row_of(peer, export, base, own) for peer, export, own in zip(peers, exports, rounds, strict=True)
        ]
        parts += [f"### {size.capitalize()}", "", *markdown(COLUMNS, rows), ""]
    listing, loads = Path("/proc/cpuinfo"), [each["load"] for each in run.calls.values()]
    flags = listing.read_text(encoding="utf-8").split() if listing.is_file() else []
    versions: dict[str, set[str]] = {name: set() for name in LIBRARIES}
    for call in run.calls.values():
        for name in versions.keys() & call.get("versions", {}).keys():
            versions[name].add(call["versions"][name])
    trial = "" if settings.depth == RELEASED else f"**A trial of {settings.depth} blocks, not a result.** "
    words = (
        f"{trial}{settings.depth} blocks, {settings.rounds} rounds, {settings.threads} threads; "
        f"{processor_here()} ({', '.join(name for name in SPEEDS if name in flags)}), "
        f"{os.cpu_count()} processors, load {min(loads):.1f} to {max(loads):.1f}. "
    )
    libraries = ", ".join(f"{name} {' and '.join(sorted(each))}" for name, each in versions.items() if each)
    return "\n".join([*parts, f"{words}{libraries}."])


def named(words: Sequence[str]) -> list[Peer]:
    """Return peers by names, or by beginnings of names; the name of one begins another's."""
    names = {peer.name for peer in PEERS}
    beginnings = tuple(word for word in words if word not in names)
    return [peer for peer in PEERS if peer.name in words or peer.name.startswith(beginnings)]


def shape_of(size: str) -> tuple[int, int, int]:
    """Return the frames, rows and columns of a size by name, of WIDTHxHEIGHT, or of a file."""
    if Path(size).suffix:
        with Image.open(size) as picture:
            return (1, picture.height, picture.width)
    width, _, height = size.partition("x")
    return SIZES[size] if size in SIZES else (1, int(height), int(width))


def main(arguments: Sequence[str]) -> None:
    taken = {"folder": None, "--depth": RELEASED, "--rounds": 3, "--threads": 2, "--page": None}
    parser = parser_of("peers", __doc__, {**taken, "--memory": 20})
    parser.add_argument("--python", default=".venv-peers/bin/python", help="has the other libraries")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help="names, WIDTHxHEIGHT, or files")
    parser.add_argument("--peers", nargs="+", default=[""], help="names, or beginnings of several")
    parser.add_argument("--seconds", type=int, default=3600, help="that a process may take")
    settings = parser.parse_args(arguments)
    settings.shapes = {Path(size).stem: shape_of(size) for size in settings.sizes}
    files = [Path(size) for size in settings.sizes if Path(size).suffix]
    settings.pictures = {path.stem: str(path.absolute()) for path in files}
    settings.python = str(Path(settings.python).absolute())
    peers = named(settings.peers)
    if not peers:
        parser.error(
            f"--peers {' '.join(settings.peers)}: none; there are {', '.join(peer.name for peer in PEERS)}"
        )
    run = Run(settings.folder / f"depth-{settings.depth}", settings)
    for size in settings.shapes:
        last = f"inputs {size}.npz" if size in settings.pictures else f"exact {size}.npy"
        if not (run.folder / last).exists() and (done := run.job("prepare", PEERS[0], size)).code:
            sys.exit(f"{size}: {done.out[-3000:]}")
    for peer in peers:
        run.export(peer)
    for number in range(settings.rounds):
        for size in run.tables:
            for peer in peers[:: -1 if number % 2 else 1]:
                run.call(peer, size, number)
    text = text_of(run, peers)
    publish(text, settings.page, *marks("measured", "python -m benchmarks.peers"))


if __name__ == "__main__":
    main(sys.argv[1:])
