"""The steps of a run. Each yields rows as it goes: a measurement, or something skipped and the reason."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vlexport.recipes.demo.qwen2_5_vl import contents
from vlexport.recipes.demo.writing import write_checkpoint

from benchmarks.gpu.clock import Host, Sample, repeat, summary
from benchmarks.gpu.roofline import Ceilings, evs_seconds
from benchmarks.gpu.sizes import Grid, Sizes
from benchmarks.gpu.towers import Inputs, Towers, checkpoint_of, errors
from benchmarks.packages import packaged
from benchmarks.sources import source_digest
from vlexport._build.build import build_checkpoint
from vlexport._build.request import request
from vlexport._build.token_graphs import TokenGraphs, eager_graphs
from vlexport.backends import find_backend
from vlexport.checkpoint import Checkpoint
from vlexport.codec import encode
from vlexport.positions.mrope import pruned_positions
from vlexport.positions.plan import write_kept_positions
from vlexport.positions.rules import PlacedMedia, PositionRule
from vlexport.pruning import evs
from vlexport.recipe import recipe_for
from vlexport.runtime.decoder import DecoderOptions, TextModel, TransformersDecoder
from vlexport.tools.doctor import examine

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
RATE = 0.75
MANY, FEW = 20, 5  # repetitions of what takes microseconds, and of calls at each of many sizes
PACKAGES = ("torch", "triton", "transformers", "onnx", "onnxruntime", "numpy", "safetensors")


@dataclass(frozen=True, kw_only=True)
class Run:
    """The surroundings of a step; `earlier` are the rows of earlier steps."""

    device: Host
    sizes: Sizes
    out: Path
    work: Path
    earlier: Mapping[str, Sequence[Row]]

    @property
    def ceilings(self) -> Ceilings | None:
        """Return the rates that the first step measured, None where it did not."""
        rows = {row["name"]: row for row in self.earlier.get("machine", ())}
        names = ("matmul", "attention", "copy")
        return Ceilings(**{name: rows[name]["rate"] for name in names}) if {*names} <= {*rows} else None


def skipped(name: str, reason: str) -> Row:
    return {"name": name, "skipped": reason}


def machine(run: Run) -> Iterator[Row]:
    """Report versions, device, `doctor`, and the ceilings of a matrix product, of attention and of a copy."""
    known = {each.metadata["Name"].lower(): each.version for each in distributions()}
    versions = {name: known.get(name, "not installed") for name in PACKAGES}
    tree = source_digest(*(ROOT / name for name in ("vlexport", "recipes", "benchmarks")))
    yield {"name": "versions", "python": sys.version.split()[0], **versions, "tree": tree}
    yield {"name": "doctor", "findings": encode(examine())}
    yield _driver(run.device)
    size, length, device = run.sizes.matmul, run.sizes.attention_rows, run.device.torch
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    q = torch.randn(1, 16, length, 80, dtype=torch.bfloat16, device=device)
    source = torch.randint(0, 255, (run.sizes.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    attend = torch.nn.functional.scaled_dot_product_attention
    for name, call, amount in (
        ("matmul", lambda: a @ b, 2 * size**3),
        ("attention", lambda: attend(q, q, q), 4 * 16 * 80 * length**2),
        ("copy", lambda: target.copy_(source), 2 * run.sizes.copy_bytes),
    ):
        timing = repeat(run.device, call, rounds=MANY)
        yield {"name": name, **timing, "rate": amount / (timing["p50_ms"] / 1e3)}


def _driver(device: Host) -> Row:
    if device.name != "cuda":
        return skipped("nvidia-smi", device.no_graphs)
    query = "name,driver_version,memory.total,clocks.sm,clocks.mem,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return skipped("nvidia-smi", str(error))
    values = lines.splitlines()[0].split(", ")
    return {"name": "nvidia-smi", **dict(zip(query.split(","), values, strict=True))}


def tests(run: Run) -> Iterator[Row]:
    """Run the GPU tests: one row for each that failed or was skipped, and the counts."""
    report = run.out / "junit.xml"
    words = ["-m", "gpu", "tests/gpu", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    # Warnings of other versions of the libraries are not what is tested here.
    command = [sys.executable, "-m", "pytest", *words, "-o", "filterwarnings="]
    done = subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
    if not report.exists():
        raise RuntimeError(
            f"pytest ended with {done.returncode} and wrote no report; its output is in the log"
        )
    cases = [(case, next(iter(case), None)) for case in ET.parse(report).getroot().iter("testcase")]
    for case, result in cases:
        if result is not None and result.tag in ("skipped", "failure", "error"):
            reason = (result.get("message") or "").splitlines()[0]
            yield {"name": f"{case.get('classname')}::{case.get('name')}", result.tag: reason}
    tags = [result.tag if result is not None else "passed" for _, result in cases]
    yield {"name": "counts", **{tag: tags.count(tag) for tag in sorted(set(tags))}}
    if done.returncode:
        raise RuntimeError(f"pytest ended with {done.returncode}")


def bundles(run: Run) -> Iterator[Row]:
    """Build and check bundles: the accuracy gate of each backend that computes in torch."""
    tiny = Checkpoint.open(str(ROOT / "tests/golden/e2e/checkpoint"))
    full = checkpoint_of(run.sizes, run.work)
    for size, checkpoint, backend, dtype in (
        ("tiny", tiny, "eager", "float32"),
        ("tiny", tiny, "inductor", "float32"),
        ("tiny", tiny, "cudagraphs", "bfloat16"),
        (f"width {run.sizes.model.hidden}", full, "cudagraphs", "bfloat16"),
    ):
        name = f"{size}, {backend} {dtype}"
        missing = find_backend(backend).missing()
        if missing is not None:
            yield skipped(name, missing)
            continue
        started = time.perf_counter()
        spec = request(checkpoint, backend=backend, dtype=dtype, output_dir=run.work / "engines")
        status = build_checkpoint(spec).bundle.manifest.parity.status
        yield {"name": name, "parity": status, "seconds": time.perf_counter() - started}
        if status != "passed":
            raise RuntimeError(f"{name}: the accuracy check is '{status}'")


def compare(run: Run, names: Sequence[str]) -> Iterator[Row]:
    """Check the tower in several forms against transformers on every call, and time them in turns."""
    every, ceilings = Towers(run.sizes, run.device, run.work), run.ceilings
    contenders = {name: every.contender(name) for name in names}
    wrong = []
    for call, grids in run.sizes.calls.items():
        given = every.inputs(grids)
        expected = every.expected(given)
        floor_ms = 1e3 * every.roofline().seconds(grids, ceilings) if ceilings else None
        for name, row in _interleaved(run, contenders, given, expected).items():
            if floor_ms:
                row |= {"roofline_ms": floor_ms, "over_roofline": row["p50_ms"] / floor_ms}
            if not row["relative_l2"] < every.recipe.limits["bfloat16"].relative_l2:
                wrong.append(f"{call}, {name}: {row['relative_l2']:.3g}")
            yield {"name": f"{call}, {name}", "tokens": expected.shape[0], **row}
    if wrong:
        raise RuntimeError(f"over the limit of bfloat16: {'; '.join(wrong)}")


def _interleaved(
    run: Run, contenders: Mapping[str, Callable[[Inputs], Tensor]], given: Inputs, expected: Tensor
) -> dict[str, Row]:
    """Return parity, memory and time of each; rounds in random order share out a slow minute."""
    rows: dict[str, Row] = {}
    for name, contender in contenders.items():
        started = time.perf_counter()
        found = contender(given)
        run.device.wait()
        rows[name] = {"first_s": time.perf_counter() - started, **errors(found, expected)}
        del found
        rows[name]["peak_bytes"] = run.device.peak(partial(contender, given))
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    chance = random.Random(0)
    for _ in range(run.sizes.rounds):
        for name in chance.sample(list(contenders), len(contenders)):
            samples[name].append(run.device.sample(partial(contenders[name], given)))
    return {name: {**row, **summary(samples[name])} for name, row in rows.items()}


def captures(run: Run) -> Iterator[Row]:
    """Measure each captured size's cost and gain, then one long frame against many short ones."""
    every = Towers(run.sizes, run.device, run.work)
    calls = every.captured()
    for place in reversed(range(len(calls.sizes))):
        before, started = run.device.reserved(), time.perf_counter()
        with torch.inference_mode():
            captured = calls._ready(place)  # noqa: SLF001  one size at a time, to see what each takes
        run.device.wait()
        seconds, after = time.perf_counter() - started, run.device.reserved()
        sizes = {str(symbol): size for symbol, size in calls.sizes[place].items()}
        name = f"{sizes['tokens']} tokens, {sizes['frame_bounds'] - 1} frames"
        if captured is None:
            yield skipped(name, calls.failures[place])
            continue
        taken = {} if before is None or after is None else {"bytes": after - before}
        replay, plain = (
            repeat(run.device, torch.inference_mode()(call), min(run.sizes.rounds, FEW))["p50_ms"]
            for call in (captured.replay, partial(calls.function, captured.buffers))
        )
        times = {"replay_ms": replay, "uncaptured_ms": plain, "gain": plain / replay}
        yield {"name": name, "capture_s": seconds, **taken, **times}
    run_it, ceilings = every.contender("cudagraphs"), run.ceilings
    for name, grids in run.sizes.frames.items():
        row = {"name": name, **repeat(run.device, partial(run_it, every.inputs(grids)), run.sizes.rounds)}
        if ceilings:
            row["over_roofline"] = row["p50_ms"] / (1e3 * every.roofline().seconds(grids, ceilings))
        yield row


def pruning(run: Run) -> Iterator[Row]:
    """Time EVS and the positions of what is kept, called one by one and inside a graph."""
    width, device = run.sizes.model.out, run.device
    packages = packaged("evs", "bfloat16", device.name)
    for frames in run.sizes.pruning:
        work = _Pruning((frames, 32, 32), width, device.torch, eager_graphs("evs"))
        name = f"{frames} frames x 256 x {width}"
        row: Row = {"name": name, "kept": work.num_kept}
        for part, call in (("evs", work.prune), ("positions", work.place), ("both", work.both)):
            row[f"{part}_us"] = 1e3 * repeat(device, call, MANY)["p50_ms"]
        if run.ceilings:
            row["evs_floor_us"] = 1e6 * evs_seconds(frames * 256, work.num_kept, width, run.ceilings)
        yield row
        yield _packaged_row(f"{name}, compiled", packages, work, device)
        if device.no_graphs:
            yield skipped(f"{name}, captured", device.no_graphs)
            continue
        replay = device.capture(work.captured)
        work.refill(seed=1)
        replay()
        if not torch.equal(work.result[0], work.prune().kept):
            raise RuntimeError(f"{name}: a replay keeps other tokens than the call itself")
        yield {"name": f"{name}, captured", "both_us": 1e3 * repeat(device, replay, MANY)["p50_ms"]}


def _packaged_row(name: str, packages: TokenGraphs, eagerly: _Pruning, device: Host) -> Row:
    """Time the graphs of a bundle on the same video; what they keep is compared with the eager choice."""
    if packages.form != "compiled":
        return skipped(name, packages.reason)
    work = _Pruning(eagerly.grid, eagerly.rows.shape[1], device.torch, packages)
    others = len(set(work.kept.tolist()) ^ set(eagerly.kept.tolist())) // 2
    row: Row = {"name": name, "kept": work.num_kept, "other_tokens": others}
    for part, call in (("evs", work.prune), ("positions", work.place), ("both", work.both)):
        row[f"{part}_us"] = 1e3 * repeat(device, call, MANY)["p50_ms"]
    return row


class _Pruning:
    """One video of random embeddings; its prompt has 20 tokens of text."""

    def __init__(self, grid: Grid, width: int, device: torch.device, graphs: TokenGraphs) -> None:
        self.grid, self.graphs = grid, graphs
        self.rows = torch.empty(grid[0] * 256, width, dtype=torch.bfloat16, device=device)
        self.refill(seed=0)
        self.num_kept = num_kept = evs.EvsSelector().retained_count(256, grid[0], RATE)
        self.media = [
            PlacedMedia(modality="video", offset=7, length=num_kept, grid=grid, seconds_per_grid=1.0)
        ]
        self.rule = PositionRule(kind="time_scaled", merge=2, tokens_per_second=2)
        self.result: tuple[Tensor, ...] = ()
        self.kept = self.prune().kept
        # What the positions are written from, on the device already, as a captured region finds it.
        self._given: tuple[Any, ...] = ()
        self.place(self._keep)

    def refill(self, seed: int) -> None:
        self.rows.normal_(generator=torch.Generator(self.rows.device).manual_seed(seed))

    def prune(self) -> Any:
        return evs.prune(self.rows, self.grid, 2, RATE, self.graphs.selection)

    def place(self, write: Any = None) -> Any:
        write = write or self.graphs.write_kept
        return pruned_positions(self.num_kept + 20, self.media, [self.kept], self.rule, write=write)

    def both(self) -> Any:
        self.kept = self.prune().kept
        return self.place()

    def captured(self) -> None:
        plan, cells, by_width = self._given
        kept = self.prune().kept
        kept_S = torch.cat([cells.kept_S[:1], kept])
        self.result = (kept, *write_kept_positions(plan, cells._replace(kept_S=kept_S), by_width))

    def _keep(self, *given: Any) -> tuple[Tensor, Tensor]:
        self._given = given
        return write_kept_positions(*given)


def decoder(run: Run) -> Iterator[Row]:
    """Time prefill and decoding with random weights, eager and compiled."""
    model, sizes = _text_model(run), run.sizes
    table, head = model.body.get_parameter("embed_tokens.weight"), model.head.weight
    held = [*model.body.parameters(), *([] if head is table else [head])]
    weights = sum(each.numel() for each in held)
    for is_compiled in (False, True):
        name = "compiled" if is_compiled else "eager"
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
        if is_compiled and run.device.name == "cuda" and not compiler:
            yield skipped(name, "no C compiler (gcc or clang, or CC), which Triton needs")
            continue
        options = DecoderOptions(
            device=run.device.name,
            compile=is_compiled,
            length=max(sizes.prompts) + 2 * sizes.new_tokens + 8,
            backend=sizes.compiler,
        )
        made = TransformersDecoder(model, options)
        for prompt in sizes.prompts:
            row = _decode(run, made, prompt)
            if run.ceilings:
                # The table of embeddings is looked up, not multiplied, unless it is the output layer too.
                row["prefill_floor_ms"] = 1e3 * 2 * (weights - head.numel()) * prompt / run.ceilings.matmul
                row["token_floor_ms"] = 1e3 * 2 * weights / run.ceilings.copy
            yield {"name": f"{name}, {prompt} tokens", **row}


def _decode(run: Run, made: Any, prompt: int) -> Row:
    place = torch.arange(prompt + 2 * run.sizes.new_tokens + 1, device=run.device.torch).expand(3, -1)
    ids = torch.randint(0, made.table.shape[0], (prompt,))
    turn: Any = None
    at = prompt

    def prefill() -> None:
        nonlocal turn
        turn = made.begin(prompt + 2 * run.sizes.new_tokens + 1)
        turn.step(made.embed(ids), place[:, :prompt])

    def decode() -> None:
        nonlocal at
        logits = turn.step(made.embed(torch.tensor([1])), place[:, at : at + 1])
        int(logits.argmax())
        at += 1

    filled = repeat(run.device, prefill, 3, warm=1)
    for _ in range(run.sizes.new_tokens):
        decode()
    per_token = statistics.median(run.device.sample(decode).wall for _ in range(run.sizes.new_tokens))
    return {
        "prefill_ms": filled["p50_ms"],
        "prefill_tokens_per_s": prompt / (filled["p50_ms"] / 1e3),
        "token_ms": 1e3 * per_token,
        "tokens_per_s": 1 / per_token,
    }


def _text_model(run: Run) -> Any:
    """Return the language model with random weights, made on the device."""
    every = contents(run.sizes.text)
    small = dict(list(every.tensors.items())[:1])
    checkpoint = Checkpoint.open(str(write_checkpoint(run.work / "text", replace(every, tensors=small))))
    language = recipe_for(checkpoint).language
    assert language is not None
    empty = language.build(checkpoint)
    config: Any = empty.config
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with run.device.torch:
            torch.manual_seed(0)
            body = type(empty)(config)
            head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    finally:
        torch.set_default_dtype(before)
    head.weight = body.get_parameter("embed_tokens.weight")
    return TextModel(body, head).eval().requires_grad_(False)


def soak(run: Run) -> Iterator[Row]:
    """Run recorded requests through the pipeline: the same tokens kept, memory of the device flat."""
    from tests.runtime.recorded import CHECKPOINT, recorded
    from vlexport.runtime.encoder import EncoderOptions
    from vlexport.runtime.generate import RuntimeOptions
    from vlexport.runtime.pipeline import load

    backend, dtype = ("cudagraphs", "bfloat16") if run.device.name == "cuda" else ("eager", "float32")
    spec = request(Checkpoint.open(CHECKPOINT), backend=backend, dtype=dtype, output_dir=run.work / "engines")
    bundle = build_checkpoint(spec).require_passed()
    options = RuntimeOptions(
        decoder=DecoderOptions(device=run.device.name),
        encoder=EncoderOptions(warm_up=True, cache_bytes=2**20),
    )
    names = ("evs_q50_tall_fps1", "two_images", "evs_image_then_video", "video_fps4")
    seconds, held = [], []
    with load(bundle.path, checkpoint=CHECKPOINT, runtime=options) as pipeline:
        for number in range(run.sizes.answers):
            one = recorded(names[number % len(names)])
            started = time.perf_counter()
            answer = pipeline.generate(one.request)
            seconds.append(time.perf_counter() - started)
            held.append(run.device.allocated())
            if list(answer.prompt_token_ids) != one.case["prompt_token_ids"]:
                raise RuntimeError(
                    f"{one.case['name']}: another prompt than recorded, so another choice of tokens"
                )
    row: Row = {"name": f"{run.sizes.answers} requests, {backend}", "p50_s": statistics.median(seconds)}
    row |= {"stages_s": answer.stages}
    # Once every kind of request has been answered, nothing may be left behind.
    first, last = held[2 * len(names) - 1 if len(held) >= 2 * len(names) else len(names) - 1], held[-1]
    if first is None or last is None:
        yield {**row, "memory": "not measured on a processor"}
        return
    yield {**row, "bytes_after_8": first, "bytes_at_the_end": last, "growth": last - first}
    if last - first > 2**20:
        raise RuntimeError(f"memory of the device grew by {last - first} bytes")


STEPS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "machine": machine,
    "tests": tests,
    "towers": partial(compare, names=("hf eager", "eager", "cudagraphs")),
    "captures": captures,
    "pruning": pruning,
    "decoder": decoder,
    "soak": soak,
    "inductor": partial(compare, names=("inductor", "inductor captured", "cudagraphs", "eager")),
    "hf_compiled": partial(compare, names=("hf compiled", "cudagraphs")),
    "bundles": bundles,
}
