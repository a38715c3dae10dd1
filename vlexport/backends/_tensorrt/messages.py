"""What a build is asked for and what came of it: the JSON that goes to the child process and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from vlexport.codec import decode, encode

Bounds = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What the parsed network has to be, by dtype: every count is of the traced program.

    inputs, outputs  dtype by name
    unread           inputs that the program itself has no use for
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One build; `profiles` holds smallest, usual and largest shape of every input.

    timings  the file of kernel timings, for libraries that measure; empty for others
    """

    library: str
    model: str
    engine: str
    targets: tuple[str, ...]
    profiles: Mapping[str, Mapping[str, Bounds]]
    plan: Plan
    memory_bytes: int = 0
    timings: str = ""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(encode(self))

    @staticmethod
    def from_json(text: str) -> Job:
        """Read back what `to_json` wrote."""
        return decode(Job, json.loads(text), "job")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One comparison of the parsed network with the plan; empty `wrong` means that they agree."""

    check: str
    found: str
    wrong: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """What is stored beside an engine: the network that it was built from, and how it compares.

    layers         number of layers by kind, then by the dtype of what they give
    attention      `fused` or `decomposed` by shape of mask and target, as the library answered
    weights_bytes  weights in the memory of the GPU, as the library says; 0 where it does not
    context_bytes  what running takes beside them, by profile; empty where the library does not say
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
    weights_bytes: int = 0
    context_bytes: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """For people too; the order of profiles is that of the engine."""
        return json.dumps(encode(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Record:
        """Read back what `to_json` wrote."""
        return decode(Record, json.loads(text), "record")
