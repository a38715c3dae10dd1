"""What a bundle says about itself: `manifest.json`, schema 2, read strictly and written in one way only."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Literal, get_args

from vlexport.bundle import strict_json
from vlexport.bundle.names import check_names
from vlexport.bundle.strict_json import Fields, Json, JsonObject, freeze_object
from vlexport.errors import BundleError, InputError
from vlexport.specs import DTYPES, Dim, Multiple, Range, ShapeProfile, Symbol, TensorSpec
from vlexport.target import Target

# 2: attention layouts and their tables have other names.
SCHEMA = 2

Status = Literal["passed", "failed", "observed", "blocked", "not_run"]
STATUSES: tuple[Status, ...] = get_args(Status)

# Of one axis; with the largest factor of a symbol still a number of 63 bits.
MAX_SIZE = 2**32

_SHA256 = re.compile(r"[0-9a-f]{64}")
_CREATED = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", re.ASCII)
_DIM = re.compile(r"(?:(?P<factor>[1-9][0-9]{0,8})\*)?(?P<symbol>[A-Za-z_][A-Za-z0-9_]{0,63})")


def check_digest(digest: str, where: str) -> str:
    """64 lower-case hexadecimal digits; returned unchanged, else an `InputError`."""
    if not _SHA256.fullmatch(digest):
        raise InputError(
            f"{where}: {digest[:80]!r} given; expected the 64 lower-case hex digits of a SHA-256."
        )
    return digest


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeIdentity:
    """Which recipe made the graph; `digest` is over its source."""

    name: str
    digest: str

    def __post_init__(self) -> None:
        check_digest(self.digest, "recipe.digest")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointIdentity:
    """Where the weights came from; `weights` is the SHA-256 over the tensors that the tower reads."""

    source: str
    revision: str | None
    weights: str

    def __post_init__(self) -> None:
        check_digest(self.weights, "checkpoint.weights")


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """The dtype of the graph, what is typed otherwise (`{"norm": "float32"}`), and how weights are stored."""

    dtype: str
    islands: Mapping[str, str] = field(default_factory=dict)
    quantisation: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "islands", MappingProxyType(dict(self.islands)))


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size in bytes and SHA-256 of one payload."""

    size: int
    sha256: str

    def __post_init__(self) -> None:
        check_digest(self.sha256, "files.sha256")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the accuracy check said; `table` is stored as the check wrote it."""

    status: Status
    table: JsonObject = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", freeze_object(self.table, "parity.table"))


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
    profile: ShapeProfile
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    target: Target
    versions: Mapping[str, str]
    options: JsonObject
    files: Mapping[str, FileRecord]
    parity: Verdict
    created: str

    def __post_init__(self) -> None:
        check_digest(self.key, "key")
        check_names(self.files)
        _check_specs(self)
        if not _CREATED.fullmatch(self.created):
            raise InputError(
                f"created: {self.created[:40]!r} given; expected a UTC time like 2026-01-31T12:00:00Z."
            )
        object.__setattr__(self, "preprocessing", freeze_object(self.preprocessing, "preprocessing"))
        object.__setattr__(self, "options", freeze_object(self.options, "options"))
        object.__setattr__(self, "versions", MappingProxyType(dict(self.versions)))
        object.__setattr__(self, "files", MappingProxyType(dict(self.files)))

    @classmethod
    def parse(cls, raw: bytes) -> Manifest:
        """Read what `encoded` wrote, byte for byte; everything else is a `BundleError`."""
        try:
            value = strict_json.parse(raw)
            _check_schema(value)
            manifest = _from_json(value)
            written = manifest.encoded()
        except InputError as error:
            raise BundleError(f"manifest: {error} Build the bundle again or fetch an intact copy.") from error
        if written != raw:
            raise BundleError(
                "manifest: intact JSON, but not spelled as vlexport writes it. It was edited by hand or by "
                "another program; build the bundle again or fetch an intact copy."
            )
        return manifest

    def encoded(self) -> bytes:
        """The bytes of `manifest.json`."""
        raw = strict_json.canonical(_to_json(self))
        if len(raw) > strict_json.MAX_BYTES:
            raise InputError(
                f"manifest: {len(raw)} bytes; expected at most {strict_json.MAX_BYTES}. Store a shorter "
                "parity table."
            )
        return raw

    def digest(self) -> str:
        """The SHA-256 of `encoded`; what trust is given to."""
        return hashlib.sha256(self.encoded()).hexdigest()


def _check_specs(manifest: Manifest) -> None:
    """Inputs and outputs have names and dtypes of their own, and every size a range."""
    specs = (*manifest.inputs, *manifest.outputs)
    names = [spec.name for spec in specs]
    if not manifest.inputs or not manifest.outputs or "" in names or len(set(names)) != len(names):
        raise InputError(f"inputs, outputs: {names[:20]} found; expected names, each once, of both kinds.")
    dtypes = {f"{spec.name}.dtype": spec.dtype for spec in specs} | {
        "precision.dtype": manifest.precision.dtype,
        **{f"precision.islands.{part}": dtype for part, dtype in manifest.precision.islands.items()},
    }
    for where, dtype in dtypes.items():
        if dtype not in DTYPES:
            raise InputError(f"{where}: {dtype[:80]!r} found; expected one of {', '.join(DTYPES)}.")
    unknown = {symbol for spec in specs for symbol in spec.symbols()} - set(manifest.profile.ranges)
    if unknown:
        raise InputError(f"profile.ranges: nothing for {', '.join(map(str, sorted(unknown)))}; expected all.")
    if any(known.max > MAX_SIZE for known in manifest.profile.ranges.values()):
        raise InputError(f"profile.ranges: a size above {MAX_SIZE} found; expected none.")


def _check_schema(value: JsonObject) -> None:
    schema = value.get("schema")
    if isinstance(schema, bool) or not isinstance(schema, int):
        raise InputError('no schema number found; expected an object with "schema": 2.')
    if schema > SCHEMA:
        raise InputError(
            f"schema {schema} found, and this vlexport reads up to {SCHEMA}: the bundle was written by a "
            "newer version. Update vlexport, or:"
        )
    if schema != SCHEMA:
        raise InputError(f"schema {schema} found, {SCHEMA} expected: the bundle is of an older version.")


def _to_json(manifest: Manifest) -> JsonObject:
    profile = manifest.profile
    ranges: JsonObject = {str(symbol): [r.min, r.opt, r.max] for symbol, r in profile.ranges.items()}
    files: JsonObject = {name: {"size": f.size, "sha256": f.sha256} for name, f in manifest.files.items()}
    return {
        "schema": SCHEMA,
        "key": manifest.key,
        "recipe": _texts(manifest.recipe),
        "checkpoint": _texts(manifest.checkpoint),
        "preprocessing": manifest.preprocessing,
        "position_rule": manifest.position_rule,
        "precision": _texts(manifest.precision),
        "attention_form": manifest.attention_form,
        "profile": {"name": profile.name, "ranges": ranges},
        "inputs": [_spec_to_json(spec) for spec in manifest.inputs],
        "outputs": [_spec_to_json(spec) for spec in manifest.outputs],
        "target": manifest.target.tag,
        "versions": dict(manifest.versions),
        "options": manifest.options,
        "files": files,
        "parity": verdict_to_json(manifest.parity),
        "created": manifest.created,
    }


def _texts(part: RecipeIdentity | CheckpointIdentity | Precision) -> JsonObject:
    return {entry.name: getattr(part, entry.name) for entry in fields(part)}


def _spec_to_json(spec: TensorSpec) -> JsonObject:
    shape = [dim if isinstance(dim, int) else str(dim) for dim in spec.shape]
    return {"name": spec.name, "dtype": spec.dtype, "shape": shape}


def _from_json(value: JsonObject) -> Manifest:
    top = Fields(value, "top level", ["schema", *(entry.name for entry in fields(Manifest))])
    recipe = Fields(top.object("recipe"), "recipe", ["name", "digest"])
    source = Fields(top.object("checkpoint"), "checkpoint", ["source", "revision", "weights"])
    precision = Fields(top.object("precision"), "precision", ["dtype", "islands", "quantisation"])
    profile = Fields(top.object("profile"), "profile", ["name", "ranges"])
    ranges = {_symbol(name): _range(entry, name) for name, entry in profile.object("ranges").items()}
    return Manifest(
        key=top.text("key"),
        recipe=RecipeIdentity(name=recipe.text("name"), digest=recipe.text("digest")),
        checkpoint=CheckpointIdentity(
            source=source.text("source"),
            revision=source.optional_text("revision"),
            weights=source.text("weights"),
        ),
        preprocessing=top.object("preprocessing"),
        position_rule=top.text("position_rule"),
        precision=Precision(
            dtype=precision.text("dtype"),
            islands=precision.texts("islands"),
            quantisation=precision.optional_text("quantisation"),
        ),
        attention_form=top.text("attention_form"),
        profile=ShapeProfile(profile.text("name"), ranges),
        inputs=tuple(_spec(entry, "inputs") for entry in top.items("inputs")),
        outputs=tuple(_spec(entry, "outputs") for entry in top.items("outputs")),
        target=Target.parse(top.text("target")),
        versions=top.texts("versions"),
        options=top.object("options"),
        files={name: _file(entry, name) for name, entry in top.object("files").items()},
        parity=parse_verdict(top.object("parity")),
        created=top.text("created"),
    )


def parse_verdict(value: JsonObject) -> Verdict:
    """Read back what `verdict_to_json` wrote."""
    parity = Fields(value, "parity", ["status", "table"])
    return Verdict(status=_status(parity.text("status")), table=parity.object("table"))


def verdict_to_json(verdict: Verdict) -> JsonObject:
    """The verdict as it stands in files."""
    return {"status": verdict.status, "table": verdict.table}


def _status(text: str) -> Status:
    for status in STATUSES:
        if status == text:
            return status
    raise InputError(f"parity.status: {text[:80]!r} found; expected one of {', '.join(STATUSES)}.")


def _file(value: Json, name: str) -> FileRecord:
    record = Fields(value, f"files.{name[:80]}", ["size", "sha256"])
    return FileRecord(size=record.count("size"), sha256=record.text("sha256"))


def _spec(value: Json, where: str) -> TensorSpec:
    spec = Fields(value, where, ["name", "dtype", "shape"])
    return TensorSpec(spec.text("name"), spec.text("dtype"), tuple(map(_dim, spec.items("shape"))))


def _dim(value: Json) -> Dim:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    found = _DIM.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise InputError(
            f"shape entry {str(value)[:80]!r} found; expected a size, a symbol or a multiple like 4*TOKENS."
        )
    symbol, factor = Symbol(found["symbol"]), found["factor"]
    return symbol if factor is None else Multiple(int(factor), symbol)


def _symbol(name: str) -> Symbol:
    symbol = _dim(name)
    if not isinstance(symbol, Symbol):
        raise InputError(f"profile.ranges: {name[:80]!r} found; expected the name of a symbol.")
    return symbol


def _range(value: Json, name: str) -> Range:
    sizes = [size for size in value if isinstance(size, int)] if isinstance(value, tuple) else []
    if (
        len(sizes) != 3
        or not isinstance(value, tuple)
        or len(value) != 3
        or any(isinstance(s, bool) for s in sizes)
    ):
        raise InputError(f"profile.ranges.{name[:80]}: expected three sizes, smallest, usual and largest.")
    return Range(sizes[0], sizes[1], sizes[2])
