"""Rows a second of one machine with 1, 2 and 4 processes that encode: Ray's, and encoders of vLLM.

`python -m benchmarks.processes FOLDER --kind ray|vllm [--page docs/serving.md]`, in the environment of `make
test-ray` or of `make test-vllm`. Processes share the threads, and all begin when the last is open. Those of
Ray call `write_shard` on parts of a collection; those of vLLM have the role `ec_producer`, and leave rows for
decoders elsewhere. The tower has eight blocks of width 1280; a picture is 448x448, of 256 rows. What was
measured stays in FOLDER, and the page has both kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import memory
from benchmarks.options import parser_of
from benchmarks.serving import SIZES
from benchmarks.tables import markdown, marks, publish, write_whole
from benchmarks.towers import default_recipe, write_tower
from vlexport.target import processor_here

COUNTS, PICTURES, SIDE = (1, 2, 4), 16, 448
ROWS = (SIDE // 28) ** 2
LATE_S = 900
COLUMNS = (
    "processes", "threads each", "rows a second", "of one process's", "GiB of all", "bytes in, a row",
    "bytes out, a row",
)  # fmt: skip
Record = dict[str, Any]


def meet(place: Path, name: str, count: int) -> float:
    """Wait until so many processes are here; return the time."""
    (place / name).touch()
    began = time.monotonic()
    while len(list(place.iterdir())) < count:
        if time.monotonic() - began > LATE_S:
            raise SystemExit(f"{count} processes expected in {place}, not all came in {LATE_S} s.")
        time.sleep(0.01)
    return time.time()


def by_ray(job: Record) -> Record:
    """Run the program of docs/serving.md with actors that wait for each other."""
    import ray

    import vlexport
    from vlexport.backends import Options
    from vlexport.bundle import Bundle
    from vlexport.media.listing import files_of
    from vlexport.runtime.collection import Collection, CollectionSettings, Item, write_shard

    count, out = job["count"], Path(job["out"])
    settings = CollectionSettings(shard_items=PICTURES // max(COUNTS))

    class Encoder:
        def __init__(self) -> None:
            self.pipeline = vlexport.load(job["bundle"], options=Options(threads=job["threads"]))
            self.pipeline.encode(np.zeros((SIDE, SIDE, 3), dtype=np.uint8))
            meet(Path(job["place"]), str(os.getpid()), count)

        def __call__(self, row: Record) -> Record:
            began = time.time()
            items = len(write_shard(self.pipeline, row["part"], out, settings))
            return {"items": items, "began": began, "ended": time.time(), "bytes": memory.own()}

    ray.init(num_cpus=count, log_to_driver=False)
    items = (Item(source=str(path), kind="image") for path in files_of(Path(job["pictures"])))
    with Collection.open(out, items, Bundle.open(Path(job["bundle"])), settings) as collection:
        parts = ray.data.from_items([{"part": part} for part in collection.missing_parts()])
        pool = ray.data.ActorPoolStrategy(size=count)
        done = parts.map(Encoder, compute=pool, num_cpus=1).take_all()
        collection.finish()
    assert sum(each["items"] for each in done) == PICTURES
    held = sorted((each["bytes"] for each in done), reverse=True)
    return {
        "seconds": max(each["ended"] for each in done) - min(each["began"] for each in done),
        "bytes": statistics.median(held) * count,
        "out": sum(path.stat().st_size for path in out.glob("shard-*")),
    }


def by_vllm(job: Record) -> Record:
    """Start encoders, each with its share of the pictures, and wait for the last."""
    words = [sys.executable, "-m", "benchmarks.processes", job["folder"], "--encoder"]
    encoders = [
        subprocess.Popen([*words, json.dumps(job | {"number": number})], stdout=subprocess.PIPE, text=True)
        for number in range(job["count"])
    ]
    ended = [encoder.communicate(timeout=LATE_S)[0] for encoder in encoders]
    if any(encoder.returncode for encoder in encoders):
        raise SystemExit(f"vLLM's encoders ended with {[encoder.returncode for encoder in encoders]}")
    found = [json.loads(text.strip().splitlines()[-1]) for text in ended]
    return {
        "seconds": max(each["ended"] for each in found) - min(each["began"] for each in found),
        "bytes": sum(each["bytes"] for each in found),
        "out": sum(path.stat().st_size for path in Path(job["out"]).rglob("*") if path.is_file()),
    }


def encoder(job: Record) -> None:
    """Be one of vLLM's encoders: open, wait for the others, encode a share of the pictures."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    # It would bind the threads of every process to the same processors.
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM logs to the standard output
    from vllm import LLM, SamplingParams  # noqa: TID251  no part of the package
    from vllm.config import ECTransferConfig  # noqa: TID251

    transfer = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_producer",
        "ec_buffer_device": "cpu",
        "ec_connector_extra_config": {"shared_storage_path": job["out"]},
    }
    model = LLM(
        job["checkpoint"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=1,
        enable_prefix_caching=False,
        limit_mm_per_prompt={"image": 1, "video": 0},
        ec_transfer_config=ECTransferConfig(**transfer),
        additional_config={"vlexport": {"bundle": job["bundle"], "threads": job["threads"]}},
    )
    prompt = "<|vision_start|><|image_pad|><|vision_end|>"
    files = sorted(Path(job["pictures"]).iterdir())[job["number"] :: job["count"]]
    requests = [{"prompt": prompt, "multi_modal_data": {"image": Image.open(path)}} for path in files]
    began = meet(Path(job["place"]), str(os.getpid()), job["count"])
    model.generate(requests, SamplingParams(max_tokens=1), use_tqdm=False)
    print(json.dumps({"began": began, "ended": time.time(), "bytes": memory.own()}), file=out, flush=True)


def measure(folder: Path, kind: str, rounds: int, threads: int) -> None:
    """Measure counts of processes in turn, and keep what was found."""
    checkpoint = write_tower(folder / "tower", default_recipe(), *SIZES["wide"])
    pictures = folder / "pictures"
    pictures.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    for number in range(PICTURES):
        pixels = draw.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(pictures / f"{number:02}.png")
    words = [sys.executable, "-m", "vlexport", "build", checkpoint, "--output-dir", folder / "engines" / kind]
    built = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=True)
    found: list[Record] = []
    for number in range(rounds):
        for count in COUNTS[:: -1 if number % 2 else 1]:
            place, out = folder / "meeting", folder / "out"
            for each in (place, out):
                shutil.rmtree(each, ignore_errors=True)
            place.mkdir()
            job: Record = {
                "folder": str(folder), "checkpoint": str(checkpoint), "bundle": built.stdout.split()[-1],
                "count": count, "threads": max(1, threads // count), "pictures": str(pictures),
                "place": str(place), "out": str(out),
            }  # fmt: skip
            # In a process of its own: Ray keeps what it has started.
            ran = [sys.executable, "-m", "benchmarks.processes", str(folder), "--kind", kind, "--job"]
            done = subprocess.run([*ran, json.dumps(job)], stdout=subprocess.PIPE, text=True, check=True)
            record = json.loads(done.stdout.strip().splitlines()[-1])
            about = {"count": count, "threads": job["threads"], "load": os.getloadavg()[0]}
            found.append(record | about)
            sys.stdout.write(f"{kind}, {count}: {PICTURES * ROWS / found[-1]['seconds']:.1f} rows a second\n")
    write_whole(folder / f"{kind}.json", json.dumps({"rounds": rounds, "found": found}, indent=1) + "\n")


def table_of(kind: str, stored: Mapping[str, Any]) -> str:
    """Return the table of a kind: medians, and ratios to one process with the interval over rounds."""
    from vlexport.evaluate.intervals import paired

    title = {"ray": "The program for Ray", "vllm": "Encoders of vLLM"}[kind]
    found = stored["found"]
    # In the order of rounds.
    by_count = {count: [each for each in found if each["count"] == count] for count in COUNTS}
    base = [each["seconds"] for each in by_count[1]]
    rows = []
    for count, runs in by_count.items():
        seconds = [each["seconds"] for each in runs]
        speed, held = PICTURES * ROWS / statistics.median(seconds), [each["bytes"] / 2**30 for each in runs]
        moved = (3 * 28 * 28, runs[0]["out"] / (PICTURES * ROWS))
        numbers = (f"{speed:.0f}", str(paired(base, seconds)), f"{statistics.median(held):.1f}")
        rows.append((str(count), str(runs[0]["threads"]), *numbers, *(f"{each:.0f}" for each in moved)))
    loads = [each["load"] for each in found]
    about = f"{stored['rounds']} rounds in turn, load {min(loads):.1f} to {max(loads):.1f}"
    return "\n".join([f"{title}, {about}:", "", *markdown(COLUMNS, rows)])


def main(arguments: Sequence[str]) -> None:
    taken = {"folder": None, "--rounds": 3, "--threads": os.cpu_count() or 1, "--page": None}
    parser = parser_of("processes", __doc__, taken)
    parser.add_argument("--kind", choices=("ray", "vllm"))
    parser.add_argument("--job", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--encoder", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.encoder:
        encoder(given.encoder)
        return
    if given.job:
        sys.stdout.write(json.dumps({"ray": by_ray, "vllm": by_vllm}[given.kind](given.job)) + "\n")
        return
    folder = given.folder
    if given.kind:
        measure(folder, given.kind, given.rounds, given.threads)
    kinds = [kind for kind in ("ray", "vllm") if (folder / f"{kind}.json").exists()]
    tables = [table_of(kind, json.loads((folder / f"{kind}.json").read_text())) for kind in kinds]
    text = "\n\n".join([*tables, f"{os.cpu_count()} processors, {processor_here()}."])
    publish(text, given.page, *marks("processes", "python -m benchmarks.processes"))


if __name__ == "__main__":
    main(sys.argv[1:])
