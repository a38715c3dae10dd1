"""A transformers model whose vision half is the engine of a bundle, on that one instance. N rows, D width."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vlexport.backends import Options
from vlexport.bundle import Bundle
from vlexport.checkpoint import Checkpoint
from vlexport.errors import UNEXPECTED, CheckpointError, InputError, MisfitError, UnsupportedError
from vlexport.runtime.encoder import EngineSession, Grid
from vlexport.runtime.outputs import Encoded
from vlexport.specs import MediaItem
from vlexport.system import give_back
from vlexport.vision.features.classes import METHOD, ReadWeights, feature_class, outputs_of
from vlexport.vision.features.packing import ImagePacking
from vlexport.vision.features.pixels import OF_GRIDS, PictureRule, cell_by_cell
from vlexport.vision.features.tower import GRIDS, MERGES, NESTED, PATCHES, PICTURE, RASTER, STRIP
from vlexport.vision.preprocess import cut
from vlexport.vision.slices import rows_of_image

VIDEOS = "get_video_features"
MEDIA = {METHOD: "image", VIDEOS: "video"}
PIXELS = ("pixel_values", "pixel_values_images")
SIZES = ("image_grid_thw", "image_sizes", "pixel_attention_mask", "spatial_shapes")
# How many frames each video of a call has.
FRAMES = "num_frames_per_video"
# Fields of outputs that follow from pixels; others may be constants of the class.
FIELDS = ("last_hidden_state", "pooler_output", "hidden_states", "attentions", "deepstack_features")
# Where a class has rows; maps of several sizes, [rows, B, D], with encodings of positions.
ROWS, MAPS, POSITIONS = ("pooler_output", "last_hidden_state"), "fpn_hidden_states", "fpn_position_encoding"
# Classes round to as much as 1.6e-5 against themselves (docs/generic.md); other weights are 0.1 away.
SLACK = 5.0
# transformers changes defaults of the process while it reads a model, and two at once would leave them so.
ONE_MODEL = threading.Lock()
# Whether a model is free, and how it answers, is found out by replacing its methods.
_ATTACHING = threading.Lock()
# More tiles than any picture is cut into; they are views of one.
MOST_TILES = 4096


def attach(  # noqa: PLR0913  what `load` offers, in one place
    model: Any,
    bundle: str | Path | Bundle,
    *,
    trust: str | None = None,
    recipe: str | None = None,
    options: Options | None = None,
    keep_weights: bool = False,
) -> Attached:
    """Let the engine of a bundle encode the images and videos of a transformers model.

    model         a model in eval mode on the CPU, of any class around the one with image features
    bundle        its folder, or what `build` returned; `trust`, `recipe` and `options` as for `load`
    keep_weights  keep the weights that only features need. Otherwise their memory is freed, `save_pretrained`
                  writes none of them, and `detach` reads them again from the checkpoint `model.name_or_path`.
                  Videos that take another way than images are the class's own with them, refused without

    `model.generate(...)`, `model(...)` and pipelines work as before; gradients end at the engine's rows. Two
    random images go through both first, and what differs by more than the recipe's limit is refused.

        with vlexport.attach(model, bundle):
            model.generate(**processor(images=picture, text=prompt, return_tensors="pt"))
    """
    # `torch.compile(model)` and `model.compile()`.
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise UnsupportedError(
            "model: compiled as a whole by torch.compile. Attach to the model before it, and compile its "
            "language model alone."
        )
    session = EngineSession.open(bundle, trust=trust, recipe=recipe, options=options)
    try:
        with _ATTACHING:
            return Attached(model, _Features(session, _owner(model, session)), keep_weights=keep_weights)
    except BaseException:
        session.engine.close()
        raise


def attach_session(model: Any, session: EngineSession) -> Attached:
    """Attach an engine that others use too and close."""
    with _ATTACHING:
        return Attached(model, _Features(session, _owner(model, session)), keep_weights=False)


class Attached:
    """A model with an engine until `detach` or the end of a `with`; `freed_bytes` of weights are gone."""

    def __init__(self, model: Any, features: _Features, *, keep_weights: bool) -> None:
        self.model, self.session, self.freed_bytes = model, features.session, 0
        self.owner, self.packs = features.owner, features.packs
        self._features, self._freed = features, dict[str, nn.Parameter]()
        _check_source(model, self.session)
        ids = features.examine(model)
        features.keeps_weights = keep_weights
        features.install()
        for name, weight in list(model.named_parameters(remove_duplicate=False)):
            if id(weight) in ids and not keep_weights:
                # An empty one of the same dtype and device, which classes and `generate` look for.
                self._freed[name] = nn.Parameter(weight.new_empty(0), requires_grad=weight.requires_grad)
                self._set(name, self._freed[name])
                self.freed_bytes += weight.nbytes
        give_back(self.freed_bytes)

    def __repr__(self) -> str:
        freed = f"{self.freed_bytes:,} bytes of its own weights freed"
        return f"Attached({type(self.model).__name__}, {self.session.bundle.path}, {freed})"

    def _set(self, name: str, weight: nn.Parameter) -> None:
        parent, _, own = name.rpartition(".")
        setattr(self.model.get_submodule(parent), own, weight)

    @contextmanager
    def taking(self, items: Sequence[Encoded]) -> Iterator[None]:
        """Take the rows of these items, all of a call's, in this thread instead of running the engine."""
        self._features.local.encoded = items
        try:
            yield
        finally:
            del self._features.local.encoded

    def detach(self) -> None:
        """Close the engine and give the model its methods and weights back; refuse if none can be read."""
        place, like = self.model.name_or_path, {}
        if self._freed:
            try:
                with ONE_MODEL:
                    stored = type(self.model).from_pretrained(place, dtype="auto", local_files_only=True)
                like = dict(stored.named_parameters(remove_duplicate=False))
            except (OSError, *UNEXPECTED) as error:
                raise CheckpointError(
                    f"detach: the freed weights cannot be read again from '{place}' "
                    f"({' '.join(str(error).split())[:200]}). The model is still attached. Load it anew, or "
                    "attach with keep_weights=True."
                ) from error
        for name, empty in self._freed.items():
            values = like[name].detach().to(empty.dtype)
            self._set(name, nn.Parameter(values, requires_grad=empty.requires_grad))
        self._features.remove()
        self._freed, self.freed_bytes = {}, 0
        self.session.engine.close()

    def __enter__(self) -> Self:
        if not self._features.replaced:
            raise UnsupportedError("attach: detached before; its engine is closed. Attach the bundle again.")
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _owner(model: Any, session: EngineSession) -> Any:
    """Return the part of a model whose features the engine has."""
    recipe, path = session.recipe, session.bundle.path
    served = recipe.model_types or (session.config.model_type,)
    kinds = {kind[0] for name in served if (kind := feature_class(name)) is not None}
    owner = next((part for part in model.modules() if type(part) in kinds), None)
    if owner is None:
        names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no class of transformers"
        raise MisfitError(
            f"{path}: built by recipe '{recipe.name}' for {', '.join(served)} ({names}), and "
            f"{type(model).__name__} has no such part. Build a bundle of this model's checkpoint."
        )
    takes_grids = "image_grid_thw" in inspect.signature(owner.get_image_features).parameters
    if (recipe.model_types and not takes_grids) or session.packing.levels is not None:
        raise UnsupportedError(
            f"{path}: recipe '{recipe.name}' with input {session.bundle.manifest.input_dtype} takes "
            f"other rows than {type(owner).__name__} of transformers. Build with --input-dtype float32, or "
            "with --recipe generic."
        )
    if METHOD in vars(owner):
        raise UnsupportedError(
            f"{type(owner).__name__}: {METHOD} of this instance was replaced before, by `attach` or another "
            "program. Detach that first."
        )
    return owner


def _check_source(model: Any, session: EngineSession) -> None:
    """Hold the checkpoint that a model was read from to the bundle's, where its folder is at hand."""
    if not model.name_or_path or not Path(model.name_or_path, "config.json").is_file():
        return
    checkpoint, origin = Checkpoint.open(model.name_or_path), session.bundle.manifest.checkpoint
    names = session.recipe.weight_names(checkpoint, session.recipe.read_config(checkpoint))
    if origin.adapter is None and (digest := checkpoint.digest(names)) != origin.weights:
        raise MisfitError(
            f"{session.bundle.path}: weights {origin.weights[:12]} of {origin.source} are in it, "
            f"{model.name_or_path} has {digest[:12]}. Build a bundle of the model's checkpoint."
        )


class _Reached(Exception):  # noqa: N818  not an error: a class called what it should
    pass


class _Features:
    """The methods of a class that give features, computed by an engine in the class's own structure."""

    packing: Any
    template: Any
    tower: nn.Module
    projector: nn.Module
    hidden: Any

    def __init__(self, session: EngineSession, owner: Any) -> None:
        self.session, self.owner, self.packing = session, owner, session.packing
        self.form, self.name = getattr(session.config, "form", GRIDS), type(owner).__name__
        # What puts tiles together is the class's own; its tower and projector alone are replaced.
        self.packs = hasattr(owner, "pack_image_features")
        self.constants: dict[str, Tensor] = {}
        self.replaced: list[tuple[Any, str]] = []
        self.local, self.takes_videos, self.is_used = threading.local(), self.form == GRIDS, True
        self.hands_on, self.keeps_weights, rule = False, False, self.packing.rule
        self.media = {*(rule.sizes if isinstance(rule, PictureRule) else (*PIXELS, *SIZES, MERGES)), FRAMES}

    @torch.inference_mode()
    def examine(self, model: Any) -> set[int]:
        """Compare two random images and learn the structure of outputs; return ids of weights read."""
        order, weights = list[tuple[Any, Any]](), {id(weight): weight for weight in self.owner.parameters()}
        if wrong := {str(weight.device) for weight in weights.values()} - {"cpu"}:
            raise UnsupportedError(
                f"{self.name}: weights are on {', '.join(sorted(wrong))}, cpu expected. Load the "
                "model with device_map='cpu'."
            )
        inputs = self._inputs(seed=0)
        self.is_used = self._require_use(inputs, writes=model is not self.owner or hasattr(model, "generate"))
        if self.form in (RASTER, PICTURE) and hasattr(self.owner, VIDEOS):
            # A method of videos that hands them on as images stays.
            self.hands_on, _ = self._reached(lambda: getattr(self.owner, VIDEOS)(**self._as_video(inputs)))
        hooks = [
            part.register_forward_hook(lambda part, _, output: order.append((part, output)))
            for part in self.owner.children()
        ]
        try:
            with ReadWeights() as touched:
                self.template = self.owner.get_image_features(**inputs, return_dict=True)
        finally:
            for hook in hooks:
                hook.remove()
        ids: set[int] = touched.ids & weights.keys()
        fields = self.template.items()
        if extra := {key: value for key, value in fields if key not in FIELDS and isinstance(value, Tensor)}:
            other = self.owner.get_image_features(**self._inputs(seed=1), return_dict=True)
            same = (key for key, value in extra.items() if torch.equal(value, other[key]))
            self.constants = {key: extra[key] for key in same}
        if self.packs:
            (self.tower, self.hidden), *_, (self.projector, _) = order
            ids &= {id(weight) for part in (self.tower, self.projector) for weight in part.parameters()}
        self._hold(METHOD, self.template, inputs)
        if (self.packs or self.form == PICTURE) and hasattr(self.owner, VIDEOS) and not self.hands_on:
            # Frames may be pooled or merged on their way through the class's own code.
            self.takes_videos = True
            try:
                frames = self._frames(inputs)
                self._hold(VIDEOS, getattr(self.owner, VIDEOS)(**frames), frames)
            except (InputError, MisfitError, *UNEXPECTED):
                self.takes_videos = False
        return ids

    def _require_use(self, inputs: Mapping[str, Any], *, writes: bool) -> bool:
        """Return if forward of the class takes its features from the method; refuse if not and it writes."""
        ids, taken = torch.zeros(1, 2, dtype=torch.int64), inspect.signature(self.owner.forward).parameters
        pixels = dict.fromkeys(PIXELS, inputs.get("pixel_values"))
        arguments = {"input_ids": ids, "attention_mask": ids + 1, **inputs, **pixels}
        is_used, problem = self._reached(
            lambda: self.owner(**{name: value for name, value in arguments.items() if name in taken})
        )
        # What wants more than pixels, such as a session of frames, is read instead of called.
        is_used = is_used or (problem is not None and METHOD in _names(type(self.owner), "forward"))
        if is_used or not writes:
            return is_used
        raise UnsupportedError(
            f"{self.name}: its forward does not call {METHOD}, so an engine would not be used. Encode with "
            "`vlexport.load`, and pass the rows."
        ) from problem

    def _reached(self, call: Callable[[], object]) -> tuple[bool, Exception | None]:
        """Return if a call comes to the method for images, or what it failed at before."""
        own, here = self.owner.get_image_features, threading.get_ident()

        def reached(*words: object, **named: object) -> object:
            # Other threads may use the model meanwhile.
            if threading.get_ident() != here:
                return own(*words, **named)
            raise _Reached

        self._replace(self.owner, METHOD, functools.wraps(own)(reached))
        try:
            call()
        except _Reached:
            return True, None
        except UNEXPECTED as error:
            return False, error
        finally:
            self.remove()
        return False, None

    def _refuse(self, *_: object, **__: object) -> None:
        raise UnsupportedError(
            f"{self.name}: its forward does not call {METHOD}, which alone is the engine's. Call that, or "
            "detach."
        )

    def _inputs(self, seed: int) -> dict[str, Any]:
        """Return pixels of two random images, as a processor gives them."""
        generator, rule = torch.Generator().manual_seed(seed), self.packing.rule
        if isinstance(rule, PictureRule):
            return dict(rule.arguments(torch.randn(rule.row_width, generator=generator)))
        if isinstance(self.packing, ImagePacking):
            images = torch.randn(2, 1, 3, rule.side, rule.side, generator=generator)
            if self.packs:
                sizes = torch.tensor([[rule.side, rule.side]] * 2)
                return {"pixel_values": images.expand(-1, MOST_TILES, -1, -1, -1), "image_sizes": sizes}
            return {"pixel_values": images if self.form == NESTED else images[:, 0]}
        mixes = [mix for mix in self.packing.mixes().values() if len(mix) > 1]
        # torch 2.13 resizes positions wrongly to a single column.
        wide = [grid for mix in mixes for kind, grid in mix if kind == "image" and grid[2] > 1]
        grids = torch.tensor(wide[:2])
        if self.form == STRIP:
            sizes = grids[:, 1:] * rule.patch
            pixels = torch.randn(2, 3, *sizes.amax(0).tolist(), generator=generator)
            return {"pixel_values": pixels, "image_sizes": sizes}
        if self.form == PATCHES:
            rows = torch.randn(2, int(grids.prod(1).max()), self.packing.row_width, generator=generator)
            mask = torch.arange(rows.shape[1]) < grids.prod(1, keepdim=True)
            return {"pixel_values": rows, "pixel_attention_mask": mask, "spatial_shapes": grids[:, 1:]}
        count = int(grids.prod(1).sum())
        rows = torch.randn(count, self.packing.row_width, generator=generator)
        if self.form == RASTER:
            taken = inspect.signature(self.owner.get_image_features).parameters
            merges = {MERGES: torch.full((2,), rule.merge)} if MERGES in taken else {}
            return {"pixel_values": rows.unflatten(1, (3, rule.patch, -1)), "image_grid_thw": grids, **merges}
        return {"pixel_values": rows, "image_grid_thw": grids}

    def _as_video(self, values: Mapping[str, Any]) -> dict[str, Any]:
        names = inspect.signature(getattr(self.owner, VIDEOS)).parameters
        return {name: values[of_images] for name in names if (of_images := _of_images(name)) in values}

    def _frames(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return a video of two frames."""
        if self.packs:
            return {"pixel_values_videos": inputs["pixel_values"][:, :1].transpose(0, 1).contiguous()}
        pictures = {name: torch.cat([value, inputs[name]]) for name, value in self._inputs(seed=1).items()}
        return self._as_video({**pictures, FRAMES: torch.tensor([2])})

    def _hold(self, name: str, own_output: Any, call: Mapping[str, Any]) -> None:
        self.install()
        try:
            self._compare(own_output, getattr(self.owner, name)(**call))
        finally:
            self.remove()

    def _compare(self, own_output: Any, engine_output: Any) -> None:
        limits, dtype = self.session.recipe.limits, str(self.owner.dtype).removeprefix("torch.")
        is_whole = {self.session.bundle.manifest.precision.name, dtype} == {"float32"}
        is_rounded = not is_whole and "bfloat16" in limits
        most = limits["bfloat16"].relative_l2 if is_rounded else SLACK * limits["float32"].relative_l2
        expected = outputs_of(own_output)
        for name, rows_ND in outputs_of(engine_output).items():
            own = expected[name].double()
            same = rows_ND.shape == own.shape
            error = float((rows_ND.double() - own).norm() / own.norm()) if same else math.inf
            if not error <= most:
                raise MisfitError(
                    f"{self.session.bundle.path}: {name} of random images is {error:.1e} from that of this "
                    f"{self.name}, at most {most:.1e} expected. Build a bundle of the model's checkpoint."
                )

    def install(self) -> None:
        """Replace the methods on this instance."""
        if not self.is_used:
            self._replace(self.owner, "forward", self._refuse)
        if self.packs:
            methods = {self.tower: self._tiles, self.projector: lambda *_, **__: self.local.rows}
            for part, method in methods.items():
                self._replace(part, "forward", functools.partial(self._part, part.forward, method))
        for name in (METHOD, VIDEOS):
            if (own := getattr(self.owner, name, None)) and not (name == VIDEOS and self.hands_on):
                called = functools.partial(self._call, name, own, inspect.signature(own))
                # `generate` reads the signature.
                self._replace(self.owner, name, functools.wraps(own)(called))

    def _replace(self, part: Any, name: str, method: Callable[..., Any]) -> None:
        setattr(part, name, method)
        self.replaced.append((part, name))

    def remove(self) -> None:
        """Give the instance the methods of its class back."""
        while self.replaced:
            delattr(*self.replaced.pop())

    def _part(self, own: Callable[..., Any], method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return (own if getattr(self.local, "is_own", False) else method)(*args, **kwargs)

    def _call(
        self, name: str, own: Callable[..., Any], signature: inspect.Signature, *args: Any, **kwargs: Any
    ) -> Any:
        bound, self.local.kind = signature.bind(*args, **kwargs).arguments, MEDIA[name]
        self.local.is_own = name == VIDEOS and not self.takes_videos
        if self.local.is_own and self.keeps_weights:
            return own(*args, **kwargs)
        if self.local.is_own:
            raise UnsupportedError(
                f"{self.name}: videos take another way than images, which the engine does not have. Attach "
                "with keep_weights=True, or pass frames as images."
            )
        bound = {_of_images(key): value for key, value in bound.items()}
        further = bound.pop("kwargs", {})
        for key, value in {**bound, **further}.items():
            chosen = (key in bound and not self.packs) or key.startswith(
                ("vision_feature_", "interpolate_pos")
            )
            usual = getattr(self.owner.config, key, None)
            # 0 is a layer, and equals False.
            is_usual = value is None or value is False or value == usual
            if key.endswith("mask") and isinstance(value, Tensor):
                is_usual = bool(value.all())
            if chosen and key not in self.media and not is_usual:
                raise InputError(
                    f"{name}: {key}={value!r:.100} given, {usual!r} expected. Leave it out, or detach."
                )
        if self.packs:
            return own(*args, **kwargs)
        output = self._output(*self._media(bound))
        return output if further.get("return_dict", self.owner.config.return_dict) else output.to_tuple()

    def _media(self, bound: Mapping[str, Any]) -> tuple[Tensor, list[Grid], list[int]]:
        """Return rows, grids of images, and how many of them are in each entry of the class's output."""
        pixels = next(bound[name] for name in PIXELS if bound.get(name) is not None).float()
        if isinstance(rule := self.packing.rule, PictureRule):
            rows_ND = rule.rows("image", bound)
            entries = max(len(bound[name]) // shape[0] for name, shape in rule.sizes.items())
            frames, even = bound.get(FRAMES), [len(rows_ND) // entries] * entries
            return rows_ND, [(1, 1, 1)] * len(rows_ND), even if frames is None else frames.tolist()
        if self.form in OF_GRIDS:
            grids = bound["image_grid_thw"].tolist()
            if self.form == RASTER:
                merge, merges = self.packing.merge, bound.get(MERGES)
                if merges is not None and bool((merges != merge).any()):
                    raise InputError(
                        f"{MERGES}: {merges.tolist()} given, {merge} of each expected by the engine. Use the "
                        "checkpoint's own processor."
                    )
                parts = pixels.split([math.prod(grid) for grid in grids])
                pairs = zip(parts, grids, strict=True)
                pixels = torch.cat([cell_by_cell(part, merge, *grid[1:]) for part, grid in pairs])
            return pixels, grids, [1] * len(grids)
        if self.form == PATCHES:
            grids = [(1, *shape) for shape in bound["spatial_shapes"].tolist()]
            rows = [rows_ND[: math.prod(grid)] for rows_ND, grid in zip(pixels, grids, strict=True)]
            # Values of a pixel lie side by side there.
            patches = torch.cat(rows).unflatten(1, (-1, 3)).transpose(1, 2).flatten(1)
            return patches, grids, [1] * len(grids)
        if self.form == STRIP:
            sizes, rule = torch.as_tensor(bound["image_sizes"]).tolist(), self.packing.rule
            images = zip(pixels, sizes, strict=True)
            rows = [cut(image[None, :, :height, :width], rule) for image, (height, width) in images]
            grids = [(1, height // rule.patch, width // rule.patch) for height, width in sizes]
            return torch.cat(rows), grids, [1] * len(grids)
        if self.form != NESTED:
            return *self._images(pixels), [1] * len(pixels)
        # Prompts with fewer images than others are filled up with images of zeros.
        is_real, mask = pixels.flatten(2).any(-1), bound.get("pixel_attention_mask")
        if mask is not None and not mask[is_real].all():
            raise UnsupportedError(
                f"{self.name}: padded images given, whole ones expected. Resize to squares, or detach."
            )
        return *self._images(pixels[is_real]), is_real.sum(1).tolist()

    def _images(self, images: Tensor) -> tuple[Tensor, list[Grid]]:
        side, across = self.packing.rule.side, self.packing.merge
        if images.shape[1:] != (3, side, side):
            raise InputError(
                f"pixels {list(images.shape)} given, images [3, {side}, {side}] expected by the engine. Use "
                "the checkpoint's own processor."
            )
        return rows_of_image(images.float(), self.packing.rule.patch), [(1, across, across)] * len(images)

    def _taken(self) -> Sequence[Encoded] | None:
        """Return the items of this call if their rows are at hand; a class's only method takes all."""
        encoded: Sequence[Encoded] | None = getattr(self.local, "encoded", None)
        if encoded is None or not hasattr(self.owner, VIDEOS):
            return encoded
        return [item for item in encoded if item.kind == self.local.kind]

    def _rows(self, patches: Tensor, grids: Sequence[Grid]) -> Iterator[Tensor]:
        """Yield the engine's outputs in the model's dtype."""
        taken = self._taken()
        if taken is not None:
            for name in self.packing.outputs:
                rows = [item.layers.get(name, item.embeds) for item in taken]
                yield torch.cat(rows).to(self.owner.dtype)
            return
        rows_ND = self.session.run_packed(patches, grids).to(self.owner.dtype)
        widths = {spec.name: spec.shape[1] for spec in self.session.engine.outputs}
        # Autograd takes no tensors of inference mode.
        yield from rows_ND.clone().split([widths[name] for name in self.packing.outputs], 1)

    def _output(self, patches: Tensor, grids: Sequence[Grid], groups: Sequence[int]) -> Any:
        items = (MediaItem(kind="image", patches=patches, grid=grid) for grid in grids)
        counts = map(self.packing.num_tokens, items)
        sizes = [sum(next(counts) for _ in range(group)) for group in groups]
        embeds, *levels = self._rows(patches, grids)
        if (maps := getattr(self.template, MAPS, None)) is not None:
            pairs, count = zip([*levels, embeds], maps, strict=True), len(grids)
            own = (rows.reshape(count, len(like), -1).transpose(0, 1) for rows, like in pairs)
            positions = [rows[:, :1].expand(-1, count, -1) for rows in self.template[POSITIONS]]
            return type(self.template)(**{MAPS: type(maps)(own), POSITIONS: positions})
        if sum(sizes) != len(embeds):
            # Pruned.
            sizes = [len(item.embeds) for item in self._taken() or ()]
        name = next(name for name in ROWS if self.template.get(name) is not None)
        fields = {name: _like(self.template[name], embeds, sizes)}
        if levels:
            likes = self.template.deepstack_features
            pairs = zip(likes, levels, strict=True)
            fields["deepstack_features"] = type(likes)(_like(like, rows, sizes) for like, rows in pairs)
        return type(self.template)(**fields, **self.constants)

    def _tiles(self, images: Tensor, *_: object, **__: object) -> Any:
        """Encode tiles in the place of the tower; the projector gives the rows."""
        (rows_ND,) = self._rows(*self._images(images))
        self.local.rows = rows_ND.unflatten(0, (len(images), -1))
        hidden, states = rows_ND.new_zeros(len(images), 2, 1), self.hidden.hidden_states or ()
        return type(self.hidden)(last_hidden_state=hidden, hidden_states=[hidden] * len(states))


def _of_images(name: str) -> str:
    """Return what an argument for videos is called where it is for images."""
    return name.removesuffix("_videos").replace("video_", "image_")


def _names(kind: Any, method: str) -> set[str]:
    """Return the names in a method of a class, and in those of its methods that they name."""
    names, left = set[str](), {method}
    while left:
        function = inspect.unwrap(getattr(kind, left.pop()))
        new = set(function.__code__.co_names) - names
        names |= new
        left |= {name for name in new if inspect.isfunction(getattr(kind, name, None))}
    return names


def _like(own: Any, rows_ND: Tensor, sizes: Sequence[int]) -> Any:
    """Return rows in the container of a class: one tensor, or one for each image or prompt."""
    if not isinstance(own, Tensor):
        shape = own[0].shape[1:]
        return type(own)(part.reshape(-1, *shape) for part in rows_ND.split(list(sizes)))
    if own.ndim == 2 and max(sizes) > 1:
        return rows_ND
    is_whole = rows_ND.numel() == len(sizes) * own[0].numel()
    return rows_ND.reshape(len(sizes), *own.shape[1:]) if is_whole else rows_ND[None]
