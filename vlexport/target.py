"""Target of a bundle: library and machine. Standard library only."""

from __future__ import annotations

import ctypes
import platform as machine
import re
import sys
from dataclasses import dataclass, fields
from pathlib import Path

from vlexport.codec import checked
from vlexport.errors import InputError

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_MACHINES = {"amd64": "x86_64", "aarch64": "arm64"}
_SYSTEMS = {"win32": "windows", "darwin": "macos"}
NO_GPU = "none"
# CUdevice_attribute of the driver's interface.
_MAJOR, _MINOR = 75, 76


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The machine and library that an engine was built for, or the ones at hand.

    `device` is `cpu`, `cuda`, or a compute capability such as `sm89`, or several joined by `+` where one file
    serves them all. `instruction_set` names what the engine needs of the processor, several joined by `+`
    (`avx2+fma`). Both optional fields mean "any" when absent.
    """

    backend: str
    version: str
    platform: str
    device: str
    instruction_set: str | None = None
    torch: str | None = None

    def __post_init__(self) -> None:
        for field, value in self.fields().items():
            if value is not None and not _WORD.fullmatch(value):
                raise InputError(
                    f"target: {field} {value[:80]!r} given; expected up to 128 letters, digits and . _ + - "
                    f"beginning with a letter or digit. Correct the name that the backend reports."
                )

    def fields(self) -> dict[str, str | None]:
        return {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}

    @property
    def tag(self) -> str:
        """Return a line that `parse` accepts: `onnxruntime@1.31.1,linux-x86_64,cpu,isa=avx2,torch=2.13.0`."""
        words = [f"{self.backend}@{self.version}", self.platform, self.device]
        if self.instruction_set is not None:
            words.append(f"isa={self.instruction_set}")
        if self.torch is not None:
            words.append(f"torch={self.torch}")
        return ",".join(words)

    def __str__(self) -> str:
        return self.tag

    json_value = __str__

    @classmethod
    def from_json_value(cls, value: object, where: str) -> Target:
        return cls.parse(checked(where, value, str))

    @classmethod
    def parse(cls, tag: str) -> Target:
        """Parse a tag; anything that is not the output of `tag` is an `InputError`."""
        library, *rest = tag.split(",")
        backend, _, version = library.partition("@")
        named = dict(word.partition("=")[::2] for word in rest[2:])
        if len(rest) >= 2:
            target = cls(
                backend=backend,
                version=version,
                platform=rest[0],
                device=rest[1],
                instruction_set=named.get("isa"),
                torch=named.get("torch"),
            )
            if target.tag == tag:
                return target
        raise InputError(
            f"target {tag[:160]!r} given; expected 'backend@version,platform,device' and, where they matter, "
            f"',isa=...' and ',torch=...' in this order. Copy the tag from `vlexport inspect`."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Misfit:
    """A machine that cannot run it; `fields` are those that differ, `reason` is ready to print."""

    target: Target
    fields: tuple[str, ...]
    reason: str


def fit(target: Target, here: Target, *, rebuild: str | None = None) -> Misfit | None:
    """Return how this machine differs from the target of a build; None if it runs it."""
    differing = tuple(field for field in target.fields() if not _serves(field, target, here))
    if not differing:
        return None
    built, present = target.fields(), here.fields()
    details = "; ".join(
        f"{field} is {built[field]} in the bundle and {present[field] or 'unknown'} here"
        for field in differing
    )
    command = rebuild or f"vlexport build SOURCE --backend {target.backend}"
    remedy = f"Build it on this machine: {command}"
    if "device" in differing and (here.device == NO_GPU or "--device" in command.split()):
        # No build changes that: it was made elsewhere on purpose, or for the device that was chosen.
        remedy = (
            f"It needs a machine with {' or '.join(target.device.split('+'))}; `vlexport doctor` names the "
            "backends that run here."
        )
    reason = f"built for another machine or version: {details}. {remedy}"
    return Misfit(target=target, fields=differing, reason=reason)


def _serves(field: str, target: Target, here: Target) -> bool:
    built, present = target.fields()[field], here.fields()[field]
    if field == "instruction set" and built is not None:
        return present is not None and set(built.split("+")) <= set(present.split("+"))
    if field == "device" and built is not None:
        return present in built.split("+")
    return built is None or built == present


def platform_here() -> str:
    """Return system and processor of this machine, such as `linux-x86_64` or `windows-x86_64`."""
    processor = machine.machine().lower()
    return f"{_SYSTEMS.get(sys.platform, sys.platform)}-{_MACHINES.get(processor, processor)}"


def processor_here() -> str:
    """Return the model of the processor, as the system names it."""
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or machine.processor()


def device_here() -> str:
    """Return the compute capability of the first GPU by its driver, such as `sm89`; `none` without one."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return NO_GPU
    device, digits = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return NO_GPU
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return NO_GPU
        digits.append(str(value.value))
    return "sm" + "".join(digits)
