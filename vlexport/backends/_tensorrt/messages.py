"""The JSON that goes to the build process and back: a job, and the record of what was built."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from vlexport.codec import decode, encode

Bounds = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Inputs, outputs and counts by dtype, of the traced program or of the network parsed from it.

    inputs, outputs  dtype by name
    unread           inputs that no output depends on
    products         matrix products
    attention        fused attention calls
    statistics       means of norms
    angles           sines and cosines
    activations      SiLU, GELU and the like
    cast_pairs       numbers that are rounded and widened again at once, where parts of two dtypes meet
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    unread: tuple[str, ...]
    products: Mapping[str, int]
    attention: Mapping[str, int]
    statistics: Mapping[str, int]
    angles: Mapping[str, int]
    activations: Mapping[str, int]
    cast_pairs: int = 0


class Message:
    """A dataclass that goes through pipes and files as JSON."""

    __slots__ = ()

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(encode(self), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        return decode(cls, json.loads(text), cls.__name__.lower())


@dataclass(frozen=True, kw_only=True, slots=True)
class Job(Message):
    """One build; `profiles` holds smallest, usual and largest shape of every input.

    plan     what the parsed network has to be
    timings  the file of kernel timings, for libraries that measure; empty for others
    """

    library: str
    model: str
    engine: str
    targets: tuple[str, ...]
    profiles: Mapping[str, Mapping[str, Bounds]]
    plan: Network
    timings: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One comparison of the parsed network with the program; empty `wrong` means that they agree."""

    check: str
    found: str
    wrong: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record(Message):
    """The network that an engine was built from and how it compares, stored next to the engine.

    profiles       in the order of the engine
    layers         number of layers by kind, then by the dtype of their results
    attention      `fused` or `decomposed` by shape of mask and target, as the library answered
    weights_bytes  weights in the memory of the GPU, from the library's log; 0 where it has none
    context_bytes  memory of a call in addition to them, by profile; empty where the log has none
    """

    library: str
    version: str
    targets: tuple[str, ...]
    profiles: Mapping[str, Mapping[str, Bounds]]
    layers: Mapping[str, Mapping[str, int]]
    attention: Mapping[str, str]
    findings: tuple[Finding, ...]
    engine_bytes: int
    seconds: float
    peak_bytes: int
    weights_bytes: int
    context_bytes: Mapping[str, int]
