"""Time bundles on this machine, interleaved with their reference: the model's own class on the same weights.

A round samples every contender once, in random order; the next goes back the same way. Ratios pair samples
of one round. The first bundle has a twin: where its interval does not hold 1, noise is larger than ratios.
"""

from __future__ import annotations

import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from vlexport.backends import Options, Progress, log_progress
from vlexport.backends._torch import torch_threads
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.codec import Json, checked
from vlexport.errors import RequestError
from vlexport.evaluate.intervals import Interval, paired
from vlexport.media import MediaLimits, kind_of
from vlexport.parity.metrics import measured
from vlexport.parity.noise import in_dtype
from vlexport.parity.samples import Sample
from vlexport.recipe import BytesConfig, Recipe, Reference
from vlexport.runtime.opening import checkpoint_of
from vlexport.runtime.pipeline import Pipeline, load
from vlexport.runtime.preprocess import naming, read_pixels
from vlexport.specs import PIXELS, MediaItem, Pixels
from vlexport.target import processor_here

T = TypeVar("T")
Call = Callable[[], Tensor]
# A model's own class, and the name of its output that is compared.
_Reference = tuple[Reference, str]

# Threads of a library keep a core busy for some milliseconds after its call.
SETTLE_S = 0.05
# Short calls are repeated within a sample until the clock and the first, colder call do not matter.
LEAST_SAMPLE_S, MOST_REPEATS = 0.2, 20


def order_of(names: Sequence[T], index: int, seed: int = 0) -> list[T]:
    """Return a random order for every even round, and the reverse of the last one for every odd round."""
    order = list(names)
    random.Random(f"{seed}/{index // 2}").shuffle(order)
    return order if index % 2 == 0 else order[::-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions:
    """The call, without (kind, file) of media one random image, and its rounds: 3 where seconds run out.

    lora  where the adapter of the builds is, if it has moved; with another checkpoint, one for that
    """

    media: Sequence[tuple[str, str | Path | bytes | Pixels]] = ()
    fps: float | None = None
    size: tuple[int, int] = (448, 448)  # height, width
    rounds: int = 11
    seconds: float = float("inf")
    lora: Path | None = None

    def __post_init__(self) -> None:
        checked("size", self.size, tuple[int, int])
        if checked("rounds", self.rounds, int) < 1 or min(self.size) < 1:
            raise RequestError(f"{self.rounds} rounds of size {self.size} given; 1 or more expected.")


@dataclass(kw_only=True)
class Contender:
    """A call to time, and what was measured. `rounds` holds the seconds of every call.

    base         the contender that ratios are against: the reference, or the original of a twin
    ratio        time of the base over this one's; above 1 is faster
    relative_l2  of the tokens against the base's
    peak_bytes   most that torch held on the GPU
    graphs       of a bundle: `compiled` or `eager`, the form of pruning and positions
    identity     of a bundle: what it was made of
    reason       why a reference cannot run in this dtype or on this device
    """

    name: str
    device: str
    dtype: str
    base: str
    call: Call
    rounds: list[list[float]] = field(default_factory=list)
    ratio: Interval | None = None
    relative_l2: float | None = None
    peak_bytes: int | None = None
    graphs: str = ""
    identity: Mapping[str, Json] = field(default_factory=dict)
    reason: str = ""

    def milliseconds(self, share: float) -> float | None:
        calls = torch.tensor([sample for taken in self.rounds for sample in taken], dtype=torch.float64)
        return float(calls.quantile(share)) * 1e3 if self.rounds else None

    def seconds(self) -> float:
        wait: Callable[[], object] = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        wait()
        started = time.perf_counter()
        self.call()
        wait()
        return time.perf_counter() - started

    def to_json(self) -> dict[str, object]:
        content = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "call"}
        content["ratio"] = asdict(self.ratio) if self.ratio else None
        return {**content, "ms_p50": self.milliseconds(0.5), "ms_p90": self.milliseconds(0.9)}


@dataclass(frozen=True, kw_only=True)
class Timings:
    """Every contender on the same call, references first; `items` is a digest of what was sent.

    file  the one that was sent alone
    """

    patches: int
    tokens: int
    items: str
    weights: str
    machine: Mapping[str, Json]
    contenders: list[Contender]
    file: str | None = None

    def to_json(self) -> dict[str, object]:
        return {
            **({} if self.file is None else {"file": self.file}),
            "patches": self.patches,
            "tokens": self.tokens,
            "unit": "s",
            "machine": dict(self.machine),
            "workload": {name: getattr(self, name) for name in ("patches", "tokens", "items", "weights")},
            "contenders": [contender.to_json() for contender in self.contenders],
        }


def machine_here() -> dict[str, Json]:
    """Return the devices that times depend on, and the libraries that are not in a bundle's own identity."""
    return {
        "processor": processor_here(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def bench(  # noqa: PLR0913  the options of the command line, in one place
    bundles: Sequence[str | Path | Bundle],
    files: Sequence[str | Path | bytes] = (),
    *,
    checkpoint: str | None = None,
    lora: str | Path | None = None,
    images: Sequence[str | Path] = (),
    videos: Sequence[str | Path] = (),
    fps: float | None = None,
    size: tuple[int, int] = (448, 448),
    rounds: int = 11,
    minutes: float | None = None,
    allow_failed: bool = False,
    recipe: str | None = None,
    threads: int = 0,
    progress: Progress = log_progress,
) -> list[Timings]:
    """Time bundles of one model next to the model's own class, in turns; return the times of each call.

    files           images and videos, each a call of its own
    checkpoint      the reference (default: the one that the first bundle was built from)
    lora            where the adapter of the builds is, if it has moved
    images, videos  files that are sent in one call, with `fps` as for `Pipeline.encode`; without any, one
                    random image of `size`, height and width
    rounds          each samples every contender once; 3 at least within `minutes`
    threads         of engines and reference (0: as torch has them); `allow_failed`, `recipe`: those of `load`

        vlexport.bench(["engines/BUNDLE"], ["photo.jpg"], rounds=5)[0].contenders[1].ratio
    """
    if isinstance(bundles, str | Path | Bundle) or not bundles:
        raise RequestError(f"bundles: {bundles!r} given, a list of one bundle or more expected.")
    if files and (images or videos):
        raise RequestError(
            "files given with images or videos, which are timed in one call. Name all of them in one way."
        )
    named = [*(("image", Path(path)) for path in images), *(("video", Path(path)) for path in videos)]
    options = BenchOptions(
        media=[(kind_of(file), file) for file in files] or named,
        fps=fps,
        size=size,
        lora=None if lora is None else Path(lora),
        rounds=rounds,
        seconds=math.inf if minutes is None else 60.0 * checked("minutes", minutes, float),
    )
    opening: dict[str, Any] = {"allow_failed": allow_failed, "recipe": recipe}
    chosen = Options(threads=threads)
    with torch_threads(threads), ExitStack() as stack:
        progress("open", 0.0)
        pipelines = {
            str(bundle.path if isinstance(bundle, Bundle) else bundle): stack.enter_context(
                load(bundle, options=chosen, **opening)
            )
            for bundle in bundles
        }
        return timed(pipelines, progress, against=checkpoint, options=options, is_each_alone=bool(files))


def timed(
    pipelines: Mapping[str, Pipeline],
    progress: Progress,
    *,
    against: str | None,
    options: BenchOptions,
    is_each_alone: bool = False,
) -> list[Timings]:
    """Time open bundles of one checkpoint against its reference, on their device and in their dtype.

    All media are read first, and are one call or each a call of its own; a reference is loaded once.
    """
    calls: list[tuple[str | None, list[Pixels]]] = []
    for number, (kind, source) in enumerate(options.media or [("image", _noise(options.size))]):
        name = str(source) if isinstance(source, str | Path) else f"item {number}"
        pixels = read_pixels(kind, source, options.fps, MediaLimits())
        if is_each_alone or not calls:
            calls.append((name if is_each_alone else None, []))
        calls[-1][1].append(pixels)
    manifests = [pipeline.bundle.manifest for pipeline in pipelines.values()]
    if len({(manifest.checkpoint.weights, manifest.recipe) for manifest in manifests}) > 1:
        raise RequestError(
            f"{', '.join(pipelines)}: bundles of several weights or recipes given, of one checkpoint "
            "expected. Build them from one, or time them one by one."
        )
    first = next(iter(pipelines.values()))
    checkpoint, loaded = checkpoint_of(first.bundle, against, options.lora), dict[str, _Reference]()
    contenders: list[list[Contender]] = []
    for place, media in calls:
        with naming(place):
            contenders.append(_contenders(pipelines, checkpoint, media, loaded))
    options, timings = replace(options, seconds=options.seconds / len(calls)), list[Timings]()
    for (place, media), taking in zip(calls, contenders, strict=True):
        name = f"{Path(place).name}: " if place else ""

        def advance(phase: str, share: float, name: str = name) -> None:
            progress(name + phase, share)

        _warm_up(taking, advance)
        take_rounds([contender for contender in taking if not contender.reason], options, advance)
        items = _items(first, media)
        timings.append(
            Timings(
                items=Sample(name="", items=tuple(_items(first, media, normalised=True))).digest(),
                weights=manifests[0].checkpoint.weights,
                machine=machine_here(),
                patches=sum(len(item.patches) for item in items),
                tokens=sum(first.session.num_tokens(item) for item in items),
                contenders=taking,
                file=place,
            )
        )
    return timings


def _noise(size: tuple[int, int]) -> Pixels:
    source = torch.Generator().manual_seed(0)
    return Pixels(
        kind="image", frames=torch.randint(0, 256, (1, *size, 3), dtype=torch.uint8, generator=source)
    )


def _items(pipeline: Pipeline, media: Sequence[Pixels], *, normalised: bool = False) -> list[MediaItem]:
    config = pipeline.config
    if not normalised:
        return list(map(pipeline.preprocess, media))
    if isinstance(config, BytesConfig):
        config = config.with_input(PIXELS)
    return [pipeline.recipe.preprocess(config, pixels) for pixels in media]


def _contenders(
    pipelines: Mapping[str, Pipeline],
    source: Checkpoint,
    media: Sequence[Pixels],
    loaded: dict[str, _Reference],
) -> list[Contender]:
    """Return the contenders of one call; references are loaded where they are not."""
    references: dict[str, Contender] = {}
    ours: list[Contender] = []
    for name, pipeline in pipelines.items():
        manifest = pipeline.bundle.manifest
        device, dtype = "cpu" if manifest.target.device == "cpu" else "cuda", manifest.precision.dtype
        base = f"reference {dtype} {device}"
        if base not in references:
            items = _items(pipeline, media, normalised=True)
            if base not in loaded:
                loaded[base] = _reference(pipeline.recipe, source, device)
            call = _reference_call(loaded[base], items, device=device, dtype=dtype)
            references[base] = Contender(name=base, device=device, dtype=dtype, base=base, call=call)
        ours.append(
            Contender(
                name=name,
                device=device,
                dtype=dtype,
                base=base,
                call=_bundle_call(pipeline, _items(pipeline, media)),
                graphs=pipeline.graphs.form,
                identity=manifest.identity(),
            )
        )
    twin = replace(ours[0], name=f"{ours[0].name} (twin)", base=ours[0].name, rounds=[])
    return [*references.values(), *ours, twin]


def _bundle_call(pipeline: Pipeline, items: Sequence[MediaItem]) -> Call:
    """Return one engine call of all items; several where an item, as a long video, needs them."""
    parts = [piece for item in items for piece in pipeline.session.cut(item, pipeline.encoder.budgets[-1])]
    calls = [items] if len(parts) == len(items) else [[part] for part in parts]
    return lambda: torch.cat([encoded.embeds for call in calls for encoded in pipeline.encode_items(call)])


def _reference(recipe: Recipe[Any], source: Checkpoint, device: str) -> _Reference:
    reference, (name, *_) = recipe.reference(source), recipe.packing(recipe.read_config(source)).outputs
    reference.module.to(device)
    return reference, name


def _reference_call(loaded: _Reference, items: Sequence[MediaItem], *, device: str, dtype: str) -> Call:
    reference, name = loaded

    def call() -> Tensor:
        # Tables that the reference makes from the grids have to be where its weights are.
        place: Any = torch.device(device) if device != "cpu" else nullcontext()
        with place:
            moved = [replace(item, patches=item.patches.to(device)) for item in items]
            return in_dtype(reference, moved, dtype)[name]

    return call


def _warm_up(contenders: Sequence[Contender], progress: Progress) -> None:
    outputs: dict[str, Tensor] = {}
    for number, contender in enumerate(contenders):
        progress(f"warm up {contender.name}", number / len(contenders))
        try:
            outputs[contender.name] = contender.call().float().cpu()
        except RuntimeError as error:
            if contender.base != contender.name:
                raise
            contender.reason = " ".join(str(error).split())[:200] or type(error).__name__
        if contender.base in outputs and contender.base != contender.name:
            metrics = measured(outputs[contender.name], outputs[contender.base])
            contender.relative_l2 = metrics.relative_l2 if metrics else None


def take_rounds(contenders: Sequence[Contender], options: BenchOptions, progress: Progress) -> None:
    """Time every contender once in each round, in an order that goes back every second time."""
    repeats = {
        contender.name: min(MOST_REPEATS, 1 + int(LEAST_SAMPLE_S / contender.seconds()))
        for contender in contenders
    }
    started = time.monotonic()
    for index in range(options.rounds):
        if index >= 3 and time.monotonic() - started > options.seconds:
            break
        progress(f"round {index + 1} of {options.rounds}", index / options.rounds)
        for contender in order_of(contenders, index):
            time.sleep(SETTLE_S)
            if contender.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            contender.rounds.append([contender.seconds() for _ in range(repeats[contender.name])])
            if contender.device == "cuda":
                contender.peak_bytes = max(contender.peak_bytes or 0, torch.cuda.max_memory_allocated())
    means = {contender.name: list(map(statistics.fmean, contender.rounds)) for contender in contenders}
    for contender in contenders:
        if contender.base in means:
            contender.ratio = paired(means[contender.base], means[contender.name])
