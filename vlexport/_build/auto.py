"""Backend and precision of a build, chosen by measurement: engines of a few blocks on one call.

The first blocks of the tower, with its own weights, become an engine of every backend and precision, and the
engines take turns. Times of the whole tower are expected to grow with its products, errors with their root:
rounding errors of one block do not depend on those of another.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vlexport._build.export import example_inputs, specs_of, trace
from vlexport._build.request import request
from vlexport._build.spec import BuildSpec
from vlexport.backends import (
    Capability,
    Engine,
    EngineSpec,
    Folder,
    Progress,
    backend_names,
    find_backend,
    log_progress,
    require,
    runs_here,
)
from vlexport.checkpoint import Checkpoint
from vlexport.codec import is_number
from vlexport.errors import UNEXPECTED, InputError, RequestError, UnsupportedError
from vlexport.evaluate.bench import BenchOptions, Contender, take_rounds
from vlexport.media import MediaLimits, kind_of
from vlexport.parity.metrics import Metrics, compare
from vlexport.parity.noise import in_float64, steady_arithmetic
from vlexport.parity.pixels import reference_of
from vlexport.parity.reference import MAX_WIDE_PATCHES
from vlexport.parity.samples import MAX_PATCHES, Sample, SampleRules, prepared, samples, token_symbol
from vlexport.runtime.preprocess import read_pixels
from vlexport.specs import (
    BLOCKS,
    PIXELS,
    DeviceName,
    DtypeName,
    InputDtype,
    MediaItem,
    ProfileName,
    Scheme,
    ShapeProfile,
    TensorSpec,
    bind,
    check_within,
    dtype_name,
)
from vlexport.system import ONE_BUILD, compile_caches, give_back
from vlexport.vision.tower import Tower

MOST_ERROR = 0.01
# Fewer blocks take little less time to build, and their errors say less about the others'.
LEAST_BLOCKS = 4
ROUNDS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A backend in one precision, and what a call took and lost; `reason` where it has no numbers.

    seconds, error                of the blocks: median, and relative L2 against the reference
    whole_seconds, whole_error    of the whole tower, as expected
    """

    backend: str
    dtype: str | None = None
    quantize: str | None = None
    device: str | None = None
    reason: str = ""
    seconds: float | None = None
    error: float | None = None
    whole_seconds: float | None = None
    whole_error: float | None = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.backend, self.quantize or self.dtype, self.device)))

    def arguments(self) -> dict[str, Any]:
        """Return the arguments by which a build makes it."""
        words = {name: getattr(self, name) for name in ("backend", "dtype", "quantize", "device")}
        return {name: word for name, word in words.items() if word is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Machines like this one for `rate` images a second, by the rule of docs/serving.md.

    per_machine  images a second of one, whose processors do nothing else
    rows         a second, of all machines
    """

    rate: float
    per_machine: float
    rows: float

    @property
    def machines(self) -> int:
        return math.ceil(self.rate / self.per_machine)

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "machines": self.machines}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The candidates, fastest first, on a call of so many patches: `blocks` of the tower's `depth`.

    media, rows  of the call: images and videos in, rows out
    """

    blocks: int
    depth: int
    patches: int
    media: int
    rows: int
    most_error: float
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """Return the fastest whose expected error is within the bound."""
        errors = {one: one.whole_error for one in self.candidates if one.whole_error is not None}
        if not errors:
            reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in self.candidates)
            raise RequestError(f"nothing could be measured here. {reasons} `vlexport doctor` shows more.")
        within = (candidate for candidate, error in errors.items() if error <= self.most_error)
        if (best := next(within, None)) is not None:
            return best
        closest = min(errors, key=errors.__getitem__)
        raise RequestError(
            f"most_error {self.most_error:g} given, and none of {len(errors)} measured is expected to be "
            f"within it: {closest.name} is closest, with {errors[closest]:.2g}. Allow more "
            f"(--most-error {1.1 * errors[closest]:.2g}), or name a backend."
        )

    def fleet(self, candidate: Candidate, rate: float) -> Fleet:
        """Return how many machines a rate takes with a candidate."""
        if candidate.whole_seconds is None:
            raise RequestError(
                f"{candidate.name} could not be measured here: {candidate.reason}. `vlexport doctor` shows "
                "more."
            )
        images = self.media / candidate.whole_seconds
        return Fleet(rate=rate, per_machine=images, rows=rate * self.rows / self.media)

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def choose(  # noqa: PLR0913  what a build takes and its speed and errors depend on
    source: Checkpoint | str | Path,
    *,
    backend: str | None = None,
    most_error: float = MOST_ERROR,
    media: Sequence[Any] = (),
    dtype: DtypeName | torch.dtype | None = None,
    quantize: Scheme | None = None,
    input_dtype: InputDtype = PIXELS,
    profile: ProfileName | ShapeProfile | None = None,
    min_pixels: int | None = None,
    max_pixels: int | None = None,
    max_images: int | None = None,
    max_frames: int | None = None,
    lora: str | Path | None = None,
    recipe: str | None = None,
    device: DeviceName | None = None,
    progress: Progress = log_progress,
) -> Choice:
    """Measure the backends and precisions of this machine on the first blocks of a checkpoint's tower.

    backend     measure this one alone
    most_error  the bound of the relative L2 that is expected of the whole tower; `best` is within it
    media       images and videos of the call; by default a random one of at most 1,024 patches
    dtype       measure this precision alone, with `quantize`; by default every one
    """
    if not (is_number(most_error) and most_error > 0):
        raise InputError(f"most_error: {most_error!r} given, a finite number above 0 expected.")
    same: dict[str, Any] = {
        "recipe": recipe, "profile": profile, "min_pixels": min_pixels, "max_pixels": max_pixels,
        "max_images": max_images, "max_frames": max_frames, "input_dtype": input_dtype,
    }  # fmt: skip
    # What is wrong with the checkpoint or the media is wrong for every backend.
    shallow = _Shallow.of(request(source, lora=lora, backend="eager", **same), media)
    named = (backend,) if backend else backend_names()
    offered = list(_offered(named, None if dtype is None else dtype_name(dtype), quantize, device))
    with ONE_BUILD, ExitStack() as stack:
        stack.enter_context(compile_caches())
        measured = list(_opened(shallow, offered, same, stack, progress))
        contenders = [contender for _, contender in measured if contender is not None]
        take_rounds(contenders, BenchOptions(rounds=ROUNDS), progress)
    rows = [shallow.row(*pair) for pair in measured]
    rows.sort(key=lambda row: math.inf if row.seconds is None else row.seconds)
    return Choice(
        blocks=shallow.blocks,
        depth=shallow.depth,
        patches=shallow.patches,
        media=len(shallow.items),
        rows=shallow.rows,
        most_error=most_error,
        candidates=tuple(rows),
    )


def _opened(
    shallow: _Shallow,
    offered: Sequence[Candidate],
    same: Mapping[str, Any],
    stack: ExitStack,
    progress: Progress,
) -> Iterator[tuple[Candidate, Contender | None]]:
    """Yield the candidates with their open engines, or with the reason that there is none."""
    progress("reference", 0.0)
    truth = shallow.truth()
    for number, candidate in enumerate(offered):
        contender, reason = None, candidate.reason
        if not reason:
            progress(f"measure {candidate.name}", number / len(offered))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="vlexport-"))
            try:
                spec = request(shallow.subject.checkpoint, **same, **candidate.arguments())
                contender = shallow.contender(candidate.name, spec, Path(folder), stack, truth)
            except Exception as error:  # noqa: BLE001  libraries raise anything, and a row has it
                reason = " ".join(str(error).split())[:300] or type(error).__name__
        yield replace(candidate, reason=reason), contender
        # Graphs have cycles, and every tower was read whole.
        give_back(shallow.subject.size)


def _offered(
    names: Sequence[str], dtype: str | None, quantize: str | None, device: str | None
) -> Iterator[Candidate]:
    """Yield what may serve, and one row for each backend that does not run here."""
    every = [each for name in names for each in find_backend(name).capabilities]
    if not any(_is_meant(each, dtype, quantize) for each in every):
        require(find_backend(names[0] if len(names) == 1 else "eager"), dtype or "float32", quantize)
    for backend in map(find_backend, names):
        if not runs_here(backend):
            yield Candidate(backend=backend.name, reason=backend.missing() or backend.cannot_run() or "")
            continue
        devices = backend.devices if torch.cuda.is_available() else ()
        for place in (device,) if device else devices or (None,):
            for capability in backend.capabilities:
                scheme = capability.quantisation.name if capability.quantisation else None
                if _is_meant(capability, dtype, quantize):
                    yield Candidate(
                        backend=backend.name, dtype=capability.dtype, quantize=scheme, device=place
                    )


def _is_meant(capability: Capability, dtype: str | None, quantize: str | None) -> bool:
    """Return whether a precision is among those asked for; a scheme alone means every dtype that has it."""
    scheme = capability.quantisation.name if capability.quantisation else None
    if dtype is None:
        return quantize in (None, scheme)
    return (capability.dtype, scheme) == (dtype, quantize)


@dataclass(frozen=True, kw_only=True)
class _Shallow:
    """The first blocks of a tower and the call that they are measured on.

    rows    that the call gives
    most    blocks of a list of them, of which a class may have several; `blocks` of `depth` in all
    scale   work of the whole tower, in that of the blocks
    """

    subject: BuildSpec
    items: Sequence[MediaItem]
    patches: int
    rows: int
    most: int
    blocks: int
    depth: int
    scale: float

    @classmethod
    def of(cls, subject: BuildSpec, media: Sequence[Any]) -> _Shallow:
        items, outline = _items(subject, media), subject.recipe.outline(subject.config)
        kinds = [getattr(block, "segmentation", None) for block in getattr(outline, "blocks", ())]
        patches = sum(len(item.patches) for item in items)
        rows = sum(subject.recipe.num_tokens(subject.config, item) for item in items)
        depth, work = _depth(outline), _work(outline, rows / patches)
        # As many as there are before every kind of block has been.
        most = max([LEAST_BLOCKS, *(kinds.index(kind) + 1 for kind in kinds)])
        _cut(outline, most)
        counts = {"patches": patches, "rows": rows, "most": most, "blocks": _depth(outline), "depth": depth}
        return cls(subject=subject, items=items, **counts, scale=work / _work(outline, rows / patches))

    def truth(self) -> Tensor:
        """Return rows of the model's own class with so many blocks, of small calls in float64."""
        recipe, (name, *_) = self.subject.recipe, self.subject.packing.outputs
        try:
            with steady_arithmetic():
                reference = reference_of(self.subject)
                _cut(reference.module, self.most)
                is_small = self.patches <= MAX_WIDE_PATCHES
                return (in_float64(reference, self.items) if is_small else reference.run(self.items))[name]
        except UNEXPECTED as error:
            raise UnsupportedError(
                f"recipe '{recipe.name}': the model's class does not run with {self.blocks} of its "
                f"{self.depth} blocks ({type(error).__name__}: {error}), so nothing can be measured. Name a "
                "backend; `vlexport doctor` lists them."
            ) from error

    def contender(
        self, name: str, spec: BuildSpec, folder: Path, stack: ExitStack, truth: Tensor
    ) -> Contender:
        """Build and open an engine of the blocks, and call it once."""
        backend, (output, *_) = spec.backend, spec.packing.outputs
        assert backend is not None
        target = backend.build_target(spec.options, spec.precision)
        if reason := backend.cannot_run(target):
            raise UnsupportedError(reason)
        _cut(tower := spec.tower(), self.most)
        graph = trace(spec, tower)
        backend.build(graph, spec.options, folder)
        interface = EngineSpec(inputs=graph.inputs, outputs=graph.outputs, profile=graph.profile)
        runner = backend.open(Folder(folder), interface, spec.options)
        engine, inputs = stack.enter_context(Engine(runner, interface)), prepared(spec, self.items)

        def call() -> Tensor:
            return engine.run(inputs)[output].cpu()

        metrics = compare(call(), truth)
        if not isinstance(metrics, Metrics) or metrics.nonfinite:
            raise UnsupportedError(getattr(metrics, "reason", "some of its rows are not finite"))
        device = "cpu" if target.device == "cpu" else "cuda"
        return Contender(
            name=name, device=device, dtype=spec.dtype, base="", call=call, relative_l2=metrics.relative_l2
        )

    def row(self, candidate: Candidate, contender: Contender | None) -> Candidate:
        if contender is None:
            return candidate
        seconds, error = (contender.milliseconds(0.5) or 0.0) / 1e3, contender.relative_l2 or 0.0
        return replace(
            candidate,
            seconds=seconds,
            error=error,
            whole_seconds=seconds * self.scale,
            whole_error=error * math.sqrt(self.scale),
        )


def _items(subject: BuildSpec, media: Sequence[Any]) -> Sequence[MediaItem]:
    """Return the items of media, or one random item, the largest of those that a check would draw."""
    recipe, config, form = subject.recipe, subject.config, subject.form
    axes = recipe.axes(config, form)
    inputs = specs_of(example_inputs(recipe, config, subject.dtype, form), axes)
    if media:
        pixels = (read_pixels(kind_of(source), source, None, MediaLimits()) for source in media)
        items = [recipe.preprocess(config, frames) for frames in pixels]
        tensors = prepared(subject, items)
        check_within(
            subject.profile, bind(inputs, {name: tuple(rows.shape) for name, rows in tensors.items()})
        )
        return items
    tokens = token_symbol([TensorSpec(name="", dtype="", shape=(axes[subject.packing.outputs[0]][0],))])
    for most in (MAX_WIDE_PATCHES, MAX_PATCHES):
        rules = SampleRules(
            profile=subject.profile, inputs=inputs, tokens=tokens, form=form, max_patches=most
        )
        drawn = [sample for sample in samples(recipe, config, rules) if isinstance(sample, Sample)]
        if drawn:
            return max(drawn, key=lambda sample: (-len(sample.items), sample.num_patches)).items
    raise RequestError(
        f"profile '{subject.profile.name}': no random call of at most {MAX_PATCHES} patches fits. Give an "
        "image or a video as media (--media FILE)."
    )


def _lists(module: nn.Module) -> list[nn.ModuleList]:
    parts = module.named_modules()
    return [part for name, part in parts if isinstance(part, nn.ModuleList) and name.split(".")[-1] in BLOCKS]


def _cut(module: nn.Module, most: int) -> None:
    """Keep so many blocks of every list; classes of transformers count from the end by this setting."""
    for blocks in _lists(module):
        del blocks[most:]
    for part in module.modules():
        settings: Any = getattr(part, "config", None)
        if isinstance(layers := getattr(settings, "num_hidden_layers", None), int):
            settings.num_hidden_layers = min(layers, most)


def _depth(module: nn.Module) -> int:
    return sum(map(len, _lists(module)))


def _work(tower: Tower, share: float) -> float:
    """Return products for each patch; of `connectors`, whose rows are tokens, this share."""
    of_tokens = tuple(f"{name}." for name in tower.connectors)
    return sum(
        weight.numel() * (share if name.startswith(of_tokens) else 1.0)
        for name, weight in tower.named_parameters()
        if weight.ndim > 1
    )
