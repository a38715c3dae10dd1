"""The checkpoint as recipes, runtime and parity see it."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from vlexport.checkpoint.adapter import AdaptedWeights, Adapter
from vlexport.checkpoint.config import PROCESSOR_FIELDS, TEXT_FIELDS, ConfigView, read_config
from vlexport.checkpoint.files import FLOATS, JoinedWeights, StoredTensor, WeightFiles, digest_of
from vlexport.checkpoint.quantized import FORMATS, QuantizedWeights, settings_of
from vlexport.checkpoint.source import Location, listed, locate
from vlexport.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
# Below DEBUG: a line for each tensor, hundreds of them, is what --debug prints and -v does not.
TRACE = 5


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """A folder with config.json and safetensors; opening it reads config.json and the index, no weights.

    `source` is the requested name, `path` the folder on this machine, `revision` the commit of a hub
    checkpoint or none. With an `adapter`, tensors that it changes are read with it folded in.
    """

    source: str
    path: Path
    revision: str | None
    config: Mapping[str, object]
    location: Location = field(repr=False)
    weights: JoinedWeights = field(repr=False)
    adapter: Adapter | None = None

    @classmethod
    def open(
        cls, source: str | Path, *, revision: str | None = None, lora: str | Path | None = None
    ) -> Checkpoint:
        """Open a local folder or `org/name@commit`, fetching small files; `lora` is a folder of PEFT's."""
        location = locate(source, revision)
        if not location.has("config.json") and location.has("manifest.json"):
            raise CheckpointError(
                f"{location.folder} looks like a bundle; a checkpoint is expected. Pass the one that it was "
                f"built from: `vlexport inspect {shlex.quote(str(location.folder))}` names it."
            )
        if not location.has("config.json"):
            raise CheckpointError(
                f"{location.folder} holds no config.json; expected the folder of a Hugging Face "
                f"checkpoint. Check the path, or download the checkpoint completely."
            )
        config = read_config(location.folder, "config.json")
        settings, files = settings_of(config), WeightFiles(location)
        opened = cls(
            source=location.source,
            path=location.folder,
            revision=location.revision,
            config=config.values,
            location=location,
            weights=JoinedWeights(files if settings is None else QuantizedWeights(files, settings)),
        )
        return opened if lora is None else opened.adapted(Adapter.open(lora))

    def adapted(self, adapter: Adapter) -> Checkpoint:
        if self.adapter is not None:
            raise UnsupportedError(
                f"adapter {adapter.source} given, and {self.source} is read with {self.adapter.source} "
                "already; expected one. Merge one of them into the checkpoint with PEFT first."
            )
        adapted = AdaptedWeights(self.weights.base, adapter, self.source)
        return replace(self, weights=JoinedWeights(adapted), adapter=adapter)

    @property
    def quantisation(self) -> QuantizedWeights | None:
        weights = self.weights.base
        weights = weights.base if isinstance(weights, AdaptedWeights) else weights
        return weights if isinstance(weights, QuantizedWeights) else None

    def quantised(self, names: Iterable[str]) -> str | None:
        return self.quantisation.summary(names) if self.quantisation else None

    def check_adapter(self, names: Collection[str]) -> None:
        if isinstance(self.weights.base, AdaptedWeights):
            self.weights.base.check_within({part for name in names for part in self.weights.parts(name)})

    @property
    def view(self) -> ConfigView:
        return ConfigView(values=self.config, file=str(self.path / "config.json"))

    @property
    def text_config(self) -> ConfigView:
        self.view.checked({"num_labels": TEXT_FIELDS["num_labels"]})
        return self.view.text().checked(TEXT_FIELDS)

    @property
    def model_type(self) -> str:
        return self.view.require_str("model_type")

    @property
    def remote_code(self) -> tuple[str, ...]:
        """Return the Python files that config.json wants to be run, sorted; vlexport never runs them."""
        auto_map = self.config.get("auto_map")
        entries = auto_map.values() if isinstance(auto_map, Mapping) else ()
        # A tokenizer has two classes in a list, the slow one and the fast one.
        classes = [name for entry in entries for name in (entry if isinstance(entry, list) else [entry])]
        modules = [name.rpartition(".")[0] or name for name in classes if isinstance(name, str)]
        return tuple(sorted({f"{module}.py" for module in modules}))

    def has_file(self, name: str) -> bool:
        return self.location.has(name)

    def read_json(self, name: str) -> ConfigView:
        if not self.has_file(name):
            raise CheckpointError(
                f"{self.path} holds no {name}; expected it next to config.json. Download the checkpoint "
                f"completely."
            )
        return read_config(self.path, name)

    def image_processor(self) -> ConfigView:
        return self._processor("image_processor", ("preprocessor_config.json",))

    def video_processor(self) -> ConfigView:
        """Return settings of the video processor; without one, those of the image processor."""
        return self._processor(
            "video_processor", ("video_preprocessor_config.json", "preprocessor_config.json")
        )

    def _processor(self, section: str, files: Sequence[str]) -> ConfigView:
        # The order that transformers 5 looks in: the combined file first, then one file per processor.
        if self.has_file("processor_config.json"):
            combined = self.read_json("processor_config.json")
            if combined.has(section):
                return combined.section(section).checked(PROCESSOR_FIELDS)
        return self.read_json(next(filter(self.has_file, files), files[0])).checked(PROCESSOR_FIELDS)

    def tensor_names(self) -> tuple[str, ...]:
        return self.weights.names()

    def stored(self, name: str) -> StoredTensor:
        return self.weights.stored(name)

    def shapes(self, prefixes: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        return {name: self.stored(name).shape for name in self.tensor_names() if name.startswith(prefixes)}

    def resolve_prefix(self, candidates: Sequence[str]) -> str:
        stored = self.tensor_names()
        used = [prefix for prefix in candidates if any(name.startswith(prefix) for name in stored)]
        if len(used) == 1:
            return used[0]
        offered = ", ".join(f"'{prefix}'" for prefix in candidates)
        if not used:
            tops = sorted({f"{name.partition('.')[0]}." for name in stored})
            raise CheckpointError(
                f"{self.source} holds no tensor below {offered}; its names begin with {listed(tops)}. "
                f"Expected a checkpoint with its vision tower. Check that it is not the language model alone."
            )
        raise CheckpointError(
            f"{self.source} holds tensors below {' and '.join(repr(prefix) for prefix in used)}; expected "
            f"one of {offered}. Save the checkpoint again, with one set of names."
        )

    def check_names(
        self, expected: Mapping[str, tuple[int, ...]], prefix: str, *, ignore: Sequence[str] = ()
    ) -> dict[str, str]:
        """Compare the tensors below a prefix with expected names and shapes, given without the prefix.

        `ignore` are beginnings of names below the prefix that may be there and are not read. Returns each
        expected name with its stored one, ready for `tensors`, `read` and `digest`.
        """
        below = (name.removeprefix(prefix) for name in self.tensor_names() if name.startswith(prefix))
        present = {name for name in below if not name.startswith(tuple(ignore))}
        for name in expected.keys() - present:
            parts = self.weights.parts(prefix + name)
            if len(parts) > 1:
                present = (present | {name}) - {part.removeprefix(prefix) for part in parts}
        missing = [prefix + name for name in expected if name not in present]
        unexpected = [prefix + name for name in present if name not in expected]
        if missing:
            others = f" It has {len(unexpected)} others there: {listed(unexpected, 3)}." if unexpected else ""
            raise CheckpointError(
                f"{self.source} lacks {len(missing)} of {len(expected)} expected tensors below '{prefix}': "
                f"{listed(missing)}.{others}{self._foreign()} Check that the checkpoint is complete and that "
                f"config.json belongs to it."
            )
        if unexpected:
            raise CheckpointError(
                f"{self.source} has {len(unexpected)} unexpected tensors below '{prefix}': "
                f"{listed(unexpected)}; expected {len(expected)} and no others.{self._foreign()} Check that "
                f"config.json belongs to it and that it is not quantised."
            )
        shapes = {name: self.stored(prefix + name).shape for name in expected}
        wrong = [
            f"{prefix}{name} {list(shapes[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if shapes[name] != tuple(shape)
        ]
        if wrong:
            raise CheckpointError(
                f"{self.source} has {len(wrong)} tensors of another shape than config.json gives: "
                f"{listed(wrong)}. Check that config.json belongs to these weights."
            )
        return {name: prefix + name for name in expected}

    def check_parts(
        self,
        names: Mapping[str, str],
        shapes: Mapping[str, tuple[int, ...]],
        parts: Mapping[str, Sequence[str]],
    ) -> Mapping[str, str]:
        """Compare a tower whose tensors lie below several prefixes with names and shapes.

        `names` are those in the tower with those expected in the checkpoint, which come back; `parts` the
        prefixes, each with the beginnings that `check_names` ignores below it.
        """
        for prefix, ignore in parts.items():
            below = {stored: shapes[name] for name, stored in names.items() if stored.startswith(prefix)}
            expected = {stored.removeprefix(prefix): shape for stored, shape in below.items()}
            self.check_names(expected, prefix, ignore=ignore)
        return names

    def _foreign(self) -> str:
        if self.quantisation is None or self.quantisation.format is not None:
            return ""
        method = f"config.json: 'quant_method' is {self.quantisation.method!r}"
        methods = sorted({name.partition(" ")[0] for name in FORMATS})
        return f" {method}; expected one of {', '.join(methods)}, or the checkpoint before it was quantised."

    def tensors(
        self, names: Mapping[str, str] | Sequence[str], *, dtype: str | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Read the named tensors one by one, nothing else; a mapping goes from wanted to stored name.

        `dtype` converts floating tensors; without it they stay as stored. Every tensor owns its memory.
        """
        if dtype is not None and dtype not in FLOATS:
            raise UnsupportedError(
                f"dtype '{dtype}' given; expected one of {', '.join(sorted(FLOATS))}, or none to keep what "
                f"is stored."
            )
        stored_names = _as_mapping(names)
        for name, tensor in self.weights.read(stored_names, dtype):
            logger.log(TRACE, "read %s", stored_names[name])
            yield name, tensor

    def read(
        self, names: Mapping[str, str] | Sequence[str], *, dtype: str | None = None
    ) -> dict[str, torch.Tensor]:
        tensors = dict(self.tensors(names, dtype=dtype))
        return {name: tensors[name] for name in names}

    def load_into(
        self,
        module: torch.nn.Module,
        *,
        prefixes: Sequence[str],
        dtype: str | None = None,
        ignore: Sequence[str] = (),
    ) -> None:
        """Give a module its weights; its state names are the stored ones without the prefix.

        The module takes the tensors over as they are read, so it may be on the meta device and nothing is
        held twice. Buffers outside the module's state stay as they are.
        """
        expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
        names = self.check_names(expected, self.resolve_prefix(prefixes), ignore=ignore)
        module.load_state_dict(dict(self.tensors(names, dtype=dtype)), strict=True, assign=True)

    def digest(self, names: Mapping[str, str] | Sequence[str]) -> str:
        """Return the SHA-256 over names, dtypes, shapes and bytes as stored, however they are sharded.

        An adapter counts for the tensors that it changes. With a mapping the wanted names count, so both
        generations of names give one digest.
        """
        return digest_of(self.weights.describe(_as_mapping(names)))

    def complete(self) -> Path:
        self.location.fetch(self.weights.files())
        return self.path


def _as_mapping(names: Mapping[str, str] | Sequence[str]) -> Mapping[str, str]:
    return names if isinstance(names, Mapping) else {name: name for name in names}
