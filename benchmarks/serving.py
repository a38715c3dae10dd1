"""Seconds that a model inside vLLM takes to embed media: with its own tower, and with bundles in its place.

For the environment of `make test-vllm`. One engine of vLLM in this process holds the model; a call is the
model's `embed_multimodal` on bytes as vLLM's processor hands them over, and the tower is what it calls.
Contenders run in random order within each round and ratios are paired by round; the twin of vLLM's own tower
shows how far the run can be trusted. With `--choices`, requests of one token about a video instead, with a
bundle: the contenders are rules that choose which cells the tower gets.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import parser_of
from benchmarks.run import describe_machine
from benchmarks.tables import markdown, marks, publish
from benchmarks.towers import DecoderSize, Grid, TowerSize, default_recipe, write_tower
from vlexport._build.build import build
from vlexport.checkpoint import Checkpoint
from vlexport.evaluate.bench import order_of
from vlexport.evaluate.intervals import paired
from vlexport.integrations.vllm.bundle_tower import BundleSettings, BundleTower, open_tower
from vlexport.integrations.vllm.models import READ

SIZES = {
    "wide": (
        TowerSize(depth=8, width=1280, heads=16, inner=3420, out=2048, full_blocks=(7,)),
        DecoderSize(heads=16, kv_heads=2, layers=1, inner=2048, vocabulary=512),
    ),
    "tiny": (
        TowerSize(depth=2, width=64, heads=2, inner=96, out=64, full_blocks=(1,)),
        DecoderSize(heads=2, kv_heads=1, layers=1, inner=96, vocabulary=512),
    ),
}
WORKLOADS: Mapping[str, tuple[Grid, ...]] = {
    "one image of 448 x 448": ((1, 32, 32),),
    "eight images of mixed sizes": (
        (1, 10, 14), (1, 16, 22), (1, 20, 20), (1, 8, 30), (1, 24, 18), (1, 12, 12), (1, 26, 14), (1, 18, 18),
    ),
    "video of 16 frames, 308 x 308": ((8, 22, 22),),
}  # fmt: skip
BACKENDS = ("onnxruntime", "openvino")
OWN, TWIN = "vLLM's own", "vLLM's own (twin)"
CHOICES = ("all", "all (twin)", "static:0.5", "static:0.7", "predicted")
Samples = dict[str, dict[str, list[float]]]


def media(grids: Sequence[Grid]) -> dict[str, Any]:
    """Return random bytes of items as vLLM hands them to the model."""
    source = torch.Generator().manual_seed(0)
    shape = (sum(map(math.prod, grids)), 1176)
    patches = torch.randint(0, 256, shape, generator=source, dtype=torch.uint8)
    if grids[0][0] == 1:
        return {"pixel_values": patches, "image_grid_thw": torch.tensor(grids)}
    seconds = {"second_per_grid_ts": torch.ones(len(grids))}
    return {"pixel_values_videos": patches, "video_grid_thw": torch.tensor(grids), **seconds}


def measure(source: Path, rounds: int) -> tuple[Samples, Mapping[str, float]]:
    """Return seconds by workload and contender, and the worst distance of each bundle's rows."""
    from vllm import LLM  # noqa: TID251  no part of the package

    checkpoint, engines = Checkpoint.open(source), source.with_name("engines")
    bundles = {backend: build(checkpoint, backend, output_dir=engines).path for backend in BACKENDS}
    limits = {"image": 8, "video": 1}
    model = LLM(
        str(source), dtype="float32", enforce_eager=True, max_model_len=4096, limit_mm_per_prompt=limits
    )
    runner: Any = model.llm_engine.model_executor.driver_worker.worker.model_runner
    vision = runner.model
    own = vision.visual
    attributes = {name: getattr(own, name) for name in READ}
    towers: dict[str, Any] = {OWN: own, TWIN: own}
    for backend, path in bundles.items():
        opened = open_tower(BundleSettings(bundle=str(path)), checkpoint, given_bytes=True)
        towers[backend] = BundleTower(opened, attributes)

    def call(tower: Any, given: Mapping[str, Any]) -> tuple[float, torch.Tensor]:
        vision.visual = tower
        start = time.perf_counter()
        rows = vision.embed_multimodal(**given)
        return time.perf_counter() - start, torch.cat(tuple(rows))

    samples: Samples = {}
    distances = dict.fromkeys(BACKENDS, 0.0)
    with torch.inference_mode():
        for name, grids in WORKLOADS.items():
            given = media(grids)
            samples[name] = {each: [] for each in towers}
            wanted = call(own, given)[1]
            for each in BACKENDS:
                found = float((call(towers[each], given)[1] - wanted).abs().max() / wanted.abs().max())
                distances[each] = max(distances[each], found)
            for index in range(rounds):
                for each in order_of(list(towers), index):
                    samples[name][each].append(call(towers[each], given)[0])
    return samples, distances


def measure_choices(source: Path, rounds: int) -> Mapping[str, tuple[int, list[float]]]:
    """Return tokens of the prompt and seconds of a request, by what chooses the cells of its video."""
    from vllm import LLM, SamplingParams  # noqa: TID251  no part of the package

    bundle = build(source, BACKENDS[0], output_dir=source.with_name("engines"))
    model = LLM(
        str(source),
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        limit_mm_per_prompt={"image": 0, "video": 1},
        enable_prefix_caching=False,
        mm_processor_cache_gb=0,
        mm_processor_kwargs={"prune_before": None},
        additional_config={"vlexport": {"bundle": str(bundle.path)}},
    )
    # A square that moves over a ground that does not.
    random = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (1, 308, 308, 3), dtype=torch.uint8, generator=random).repeat(16, 1, 1, 1)
    for at, frame in enumerate(frames):
        frame[28 * (at // 2) :][:84, 112:196] = 255
    about = {"fps": 2.0, "duration": 8.0, "total_num_frames": 16, "frames_indices": list(range(16))}
    about |= {"video_backend": "opencv", "do_sample_frames": False}
    video = {"video": (frames.numpy(), about)}
    found: dict[str, tuple[int, list[float]]] = {}
    for index in range(rounds + 1):
        for choice in order_of(CHOICES, index):
            prompt: dict[str, Any] = {"prompt": "<|vision_start|><|video_pad|><|vision_end|>"}
            # A request is known by what it has.
            prompt |= {"multi_modal_data": video, "multi_modal_uuids": {"video": [f"{index} {choice}"]}}
            rule = None if choice.startswith("all") else choice
            prompt |= {"mm_processor_kwargs": {"prune_before": rule}}
            start = time.perf_counter()
            (answer,) = model.generate([prompt], SamplingParams(max_tokens=1), use_tqdm=False)
            seconds = time.perf_counter() - start
            _, kept = found.setdefault(choice, (len(answer.prompt_token_ids), []))
            # The first round reserves memory.
            kept += [seconds] if index else []
    return found


def choices_table(found: Mapping[str, tuple[int, list[float]]]) -> str:
    whole = found["all"][1]
    rows = [
        (choice, str(tokens), f"{statistics.median(seconds) * 1e3:.0f}", str(paired(whole, seconds)))
        for choice, (tokens, seconds) in found.items()
    ]
    head = ("cells by", "tokens of the prompt", "milliseconds", "times faster than all")
    return "\n".join(markdown(head, rows))


def page(samples: Samples, distances: Mapping[str, float], size: str, threads: int, version: str) -> str:
    tower = SIZES[size][0]
    rows = []
    for workload, by_name in samples.items():
        for name, seconds in by_name.items():
            faster = "" if name == OWN else str(paired(by_name[OWN], seconds))
            rows.append((workload, name, f"{statistics.median(seconds) * 1e3:.0f}", faster))
    rounds = len(next(iter(next(iter(samples.values())).values())))
    strayed = ", ".join(f"{name} {value:.0e}" for name, value in distances.items())
    words = (
        f"Tower of width {tower.width}, depth {tower.depth}, float32, {threads} threads, vLLM {version} "
        f"on a processor, {rounds} interleaved rounds, load {os.getloadavg()[0]:.1f}. Times faster: medians "
        "of ratios paired by round, with 95 % intervals. Largest difference of rows from those of vLLM's own "
        f"tower, of the largest value: {strayed}."
    )
    return "\n".join(
        [words, "", *markdown(("media", "tower", "milliseconds", "times faster than vLLM's own"), rows)]
    )


def main(arguments: list[str]) -> int:
    parser = parser_of("serving", __doc__, {"--rounds": 12, "--out": None, "--page": None})
    parser.add_argument("--size", choices=SIZES, default="wide")
    parser.add_argument("--choices", action="store_true", help="measure pruning before the tower instead")
    given = parser.parse_args(arguments)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as place:
        os.environ["VLLM_CACHE_ROOT"] = f"{place}/vllm"
        source = write_tower(Path(place) / "tower", default_recipe(), *SIZES[given.size])
        if given.choices:
            sys.stdout.write(choices_table(measure_choices(source, given.rounds)) + "\n")
            return 0
        samples, distances = measure(source, given.rounds)
    from vllm import __version__  # noqa: TID251  no part of the package

    threads = torch.get_num_threads()
    text = page(samples, distances, given.size, threads, __version__)
    publish(text, given.page, *marks("towers inside vLLM", "python -m benchmarks.serving --page"))
    if given.out:
        stored = {"schema": 1, "machine": describe_machine(threads), "size": given.size}
        stored |= {"samples": samples, "distances": distances}
        given.out.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
