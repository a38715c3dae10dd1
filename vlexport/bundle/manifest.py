"""The manifest of a bundle, `manifest.json`, schema 7, read strictly and written in one way; and its key."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from vlexport._build.sources import recipe_digest, ships_backend
from vlexport.bundle.files import FileRecord, check_digest, check_names
from vlexport.codec import (
    MAX_BYTES,
    Json,
    JsonObject,
    canonical,
    decode,
    encode,
    freeze_object,
    parse,
)
from vlexport.errors import BundleError, InputError
from vlexport.specs import BYTES, DTYPES, PIXELS, MediaBounds, ShapeProfile, TensorSpec
from vlexport.target import Target

# 3: graphs of pruning and positions. 4: adapters and quantised checkpoints. 5: digests of parts of files.
# 6: rules before the tower. 7: the bundle's own proof.
SCHEMA = 7

Status = Literal["passed", "failed", "observed", "blocked", "not_run"]

# Why a pruned video is laid out among its timestamps operation by operation.
LAYOUT = "on the host, where the text between kept frames is written"

# Of one axis; with the largest factor of a symbol still a number of 63 bits.
MAX_SIZE = 2**32
# Of the key, in the name of an entry.
DIGITS = 8

_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)


def _freeze(record: object, *names: str) -> None:
    for name in names:
        object.__setattr__(record, name, freeze_object(getattr(record, name), name))


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeIdentity:
    """The recipe that made the graph; `digest` is over its source."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        check_digest(self.digest, "recipe.digest")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterIdentity:
    """The LoRA that was folded into the weights; `digest` is over its files."""

    source: str
    digest: str

    def __post_init__(self) -> None:
        check_digest(self.digest, "checkpoint.adapter.digest")

    @property
    def name(self) -> str:
        return Path(self.source).name


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIdentity:
    """The origin of the weights; `weights` is the SHA-256 over the tensors that the tower reads.

    source     an absolute path, or a hub id with its `revision`
    quantised  how the checkpoint stores weights of the tower, where that is no floating dtype
    """

    source: str
    revision: str | None
    weights: str
    adapter: AdapterIdentity | None = None
    quantised: str | None = None

    def __post_init__(self) -> None:
        check_digest(self.weights, "checkpoint.weights")

    @property
    def name(self) -> str:
        return Path(self.source).name

    @property
    def place(self) -> str | Path:
        """Return what opens the checkpoint: a hub id with its commit, or a folder, never looked up there."""
        return _place(self.source, self.revision)


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtype of the graph, of parts that have another (`{"norm": "float32"}`), and of stored weights."""

    dtype: str
    fp32_layers: Mapping[str, str] = field(default_factory=dict)
    quantisation: str | None = None

    def __post_init__(self) -> None:
        _freeze(self, "fp32_layers")

    @property
    def name(self) -> str:
        return self.quantisation or self.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphsIdentity:
    """Graphs of pruning and positions; eager without a target, and none without a selector.

    `cells` names the rules that choose what the tower gets (pruning/cells.py) and have a package.
    """

    selector: str | None = None
    target: Target | None = None
    reason: str = ""
    cells: tuple[str, ...] = ()

    def forms(self, rule: str, form: str = "") -> dict[str, str]:
        if self.selector is None:
            return {}
        form = form or (f"compiled for {self.target}" if self.target else f"eager: {self.reason}")
        layout = {"layout": f"eager: {LAYOUT}"} if rule == "time_as_text" else {}
        before = {f"prune_before {name}": form for name in self.cells}
        return {"prune": form, **before, **layout, **({} if rule == "linear" else {"positions": form})}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of the accuracy check; `table` is stored as the check wrote it."""

    status: Status
    table: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", freeze_object(self.table, "parity.table"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The largest errors of rows that pass."""

    relative_l2: float
    worst_token: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProofCall:
    """A call of the check that is stored: bounds by output, and the digest of the engine's rows."""

    name: str
    bounds: Mapping[str, Bounds]
    rows_sha256: str

    def __post_init__(self) -> None:
        check_digest(self.rows_sha256, "proof.rows_sha256")
        object.__setattr__(self, "bounds", MappingProxyType(dict(self.bounds)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Calls with the reference's rows beside the engine, and where the engine passed them first; or none.

    deterministic  `item`: there, rows of an item had the same bits alone, in other order and in company;
                   `call`: only equal calls are known to give equal bits
    """

    calls: tuple[ProofCall, ...] = ()
    machine: str = ""
    deterministic: Literal["item", "call"] = "call"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything about a bundle but its payloads. `key` is `key_of` its build; `created` is in UTC."""

    key: str
    recipe: RecipeIdentity
    checkpoint: CheckpointIdentity
    preprocessing: JsonObject
    position_rule: str
    precision: Precision
    attention_form: str
    graphs: GraphsIdentity
    profile: ShapeProfile
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    target: Target
    versions: Mapping[str, str]
    options: JsonObject
    files: Mapping[str, FileRecord]
    parity: Verdict
    proof: Proof
    created: str

    def __post_init__(self) -> None:
        check_digest(self.key, "key")
        check_names(self.files)
        _check_specs(self)
        if not _CREATED.fullmatch(self.created):
            raise InputError(
                f"created: {self.created[:40]!r} given; expected a UTC time like 2026-01-31T12:00:00Z."
            )
        _freeze(self, "preprocessing", "options", "versions")
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))

    @property
    def input_dtype(self) -> str:
        """Dtype of preprocessed patches: the engine takes bytes as they are, and pixels in its own dtype."""
        in_bytes = any(spec.name == "patches" and spec.dtype == BYTES for spec in self.inputs)
        return BYTES if in_bytes else PIXELS

    @classmethod
    def parse(cls, raw: bytes) -> Manifest:
        """Read what `encoded` wrote, byte for byte; everything else is a `BundleError`."""
        try:
            value = dict(parse(raw))
            _check_schema(value)
            del value["schema"]
            manifest = decode(cls, value)
            written = manifest.encoded()
        except InputError as error:
            raise BundleError(f"manifest: {error} Build the bundle again or fetch an intact copy.") from error
        if written != raw:
            raise BundleError(
                "manifest: intact JSON, but not formatted as vlexport writes it. It was edited by hand or by "
                "another program; build the bundle again or fetch an intact copy."
            )
        return manifest

    def identity(self) -> dict[str, Json]:
        encoded = encode(replace(self, files={}, parity=Verdict(status="not_run"), proof=Proof()))
        return dict(_flat({**encoded, "target": self.target.fields()}))

    def encoded(self) -> bytes:
        raw = canonical({"schema": SCHEMA, **encode(self)})
        if len(raw) > MAX_BYTES:
            raise InputError(
                f"manifest: {len(raw)} bytes; expected at most {MAX_BYTES}. Store a shorter parity table."
            )
        return raw

    def digest(self) -> str:
        return hashlib.sha256(self.encoded()).hexdigest()


def _flat(value: JsonObject, before: str = "") -> Iterator[tuple[str, Json]]:
    for key, item in value.items():
        parts = item if isinstance(item, list) else []
        named = {part["name"]: part for part in parts if isinstance(part, Mapping) and "name" in part}
        inner = named or (item if isinstance(item, Mapping) else None)
        if inner:
            yield from _flat(inner, f"{before}{key}.")
        else:
            yield f"{before}{key}", item


def _check_specs(manifest: Manifest) -> None:
    specs = (*manifest.inputs, *manifest.outputs)
    names = [spec.name for spec in specs]
    if not manifest.inputs or not manifest.outputs or "" in names or len(set(names)) != len(names):
        raise InputError(f"inputs, outputs: {names[:20]} found; expected names, each once, of both kinds.")
    if any(isinstance(dim, int) and dim < 0 for spec in specs for dim in spec.shape):
        raise InputError("inputs, outputs: a negative size found; expected none.")
    dtypes = {f"{spec.name}.dtype": spec.dtype for spec in specs} | {
        "precision.dtype": manifest.precision.dtype,
        **{f"precision.fp32_layers.{part}": dtype for part, dtype in manifest.precision.fp32_layers.items()},
    }
    for where, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise InputError(f"{where}: {dtype[:80]!r} found; expected one of {', '.join(DTYPES)}.")
    unknown = {symbol for spec in specs for symbol in spec.symbols()} - set(manifest.profile.ranges)
    if unknown:
        raise InputError(f"profile.ranges: nothing for {', '.join(map(str, sorted(unknown)))}; expected all.")
    if any(bounds.max > MAX_SIZE for bounds in manifest.profile.ranges.values()):
        raise InputError(f"profile.ranges: a size above {MAX_SIZE} found; expected none.")


def _check_schema(value: JsonObject) -> None:
    schema = value.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int):
        raise InputError(f'no schema number found; expected an object with "schema": {SCHEMA}.')
    if schema > SCHEMA:
        raise InputError(
            f"schema {schema} found, and this vlexport reads up to {SCHEMA}: the bundle was written by a "
            "newer version. Update vlexport, or:"
        )
    if schema != SCHEMA:
        raise InputError(
            f"schema {schema} found, {SCHEMA} expected: the bundle is of an older version."
            f"{_rebuilt_by(value)}"
        )


def _place(source: str, revision: str | None) -> str | Path:
    if revision is None or Path(source).is_absolute():
        return Path(source)
    return f"{source.partition('@')[0]}@{revision}"


def profile_options(name: str) -> list[str]:
    """Return the options of `build` for a profile: its bounds, or its name."""
    if (bounds := MediaBounds.of(name)) is None:
        # Several profiles side by side are named together.
        return ["--profile", name.replace("+", ",")]
    pairs = ((bound.name.replace("_", "-"), getattr(bounds, bound.name)) for bound in fields(bounds))
    return [word for option, value in pairs for word in (f"--{option}", str(value))]


def shipped_or_file(name: str) -> str:
    """Return the name of a shipped recipe; FILE for a private one, which is named by its file."""
    return name if not name or recipe_digest(name) is not None else "FILE"


def backend_or_file(name: str) -> str:
    """Return the name of a shipped backend; FILE.py for a private one, as for recipes."""
    return name if not name or ships_backend(name) else "FILE.py"


def _rebuilt_by(value: JsonObject) -> str:
    def text(*keys: str) -> str:
        node: object = value
        for key in keys:
            node = node.get(key) if isinstance(node, Mapping) else None
        return node if isinstance(node, str) else ""

    if not (source := text("checkpoint", "source")):
        return ""
    place = str(_place(source, text("checkpoint", "revision") or None))
    words = {
        "--recipe": shipped_or_file(text("recipe", "name")),
        "--lora": text("checkpoint", "adapter", "source"),
        "--backend": backend_or_file(text("target").partition("@")[0]),
        "--dtype": text("precision", "dtype"),
        "--quantize": text("precision", "quantisation"),
    }
    options = [word for name, value in words.items() if value for word in (name, value)]
    options += profile_options(name) if (name := text("profile", "name")) else []
    return f" This command makes one of this version: `{shlex.join(['vlexport', 'build', place, *options])}`."


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildKey:
    """Every input of a build. Time, working directory, environment and the place of the output are none."""

    recipe: str
    recipe_digest: str
    package_digest: str
    weights_digest: str
    config_digest: str
    preprocessing: JsonObject
    backend: str
    backend_version: str
    torch_version: str
    exporter_versions: Mapping[str, str]
    dtype: str
    fp32_layers: Mapping[str, str]
    quantisation: str | None
    attention_form: str
    graphs: GraphsIdentity
    profile: ShapeProfile
    options: JsonObject
    target: Target

    def __post_init__(self) -> None:
        for name in ("recipe_digest", "package_digest", "weights_digest", "config_digest"):
            check_digest(getattr(self, name), name)
        _freeze(self, "preprocessing", "exporter_versions", "fp32_layers", "options")


def key_of(build: BuildKey) -> str:
    """Return the SHA-256 of the canonical JSON of every field."""
    content = encode(build)
    return hashlib.sha256(canonical({"vlexport build key": 4, "build": content})).hexdigest()


def entry_path(into: Path, build: BuildKey, model: str) -> Path:
    """Return the path of a build under `into`: a part for people, and a part that no other build has."""
    words = (model, build.backend, build.quantisation or build.dtype, build.profile.name)
    readable = "-".join(re.sub(r"[^A-Za-z0-9_.-]+", "_", word)[:32].strip("_.-") or "x" for word in words)
    return into / f"{readable}-{key_of(build)[:DIGITS]}"
