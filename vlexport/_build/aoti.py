"""AOTInductor packages: compile a traced program for this machine, load one without a compiler."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from vlexport.errors import BundleError, InputError, MisfitError, ResourceError, UnsupportedError
from vlexport.system import CACHES, VARIABLES, compile_caches, shortage, unpacked
from vlexport.target import Target, platform_here

if TYPE_CHECKING:
    from torch import Tensor
    from torch._C._aoti import AOTIModelPackageLoader
    from torch.export import ExportedProgram

Settings = dict[str, "str | int | bool | Callable[..., object]"]

_LOADING = threading.Lock()

# Building and checking a tiny tower took 6.3 MB there at most.
COMPILING_BYTES = 2**24

# Instructions of gcc and clang at each level, as torch.cpu.get_capabilities names them.
LEVELS = {
    "x86-64-v4": ("avx2", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_f", "avx512_vl", "bmi2", "f16c"),
    "x86-64-v3": ("avx2", "bmi2", "f16c", "fma3"),
}
LEVELS_SINCE = Version("2.13")

# Of <regex> torch takes this for `cpu` and `cuda:0`; the whole is a third of its compilation.
_REGEX = """
#pragma once
#include <array>
#include <functional>
#include <sstream>
#include <string>
namespace std {
struct regex { explicit regex(const char*) {} };
struct ssub_match { string text; bool matched{false}; string str() const { return text; } };
using smatch = array<ssub_match, 4>;
inline bool regex_match(const string& device, smatch& parts, const regex&) {
  const auto colon = device.find(':');
  parts[1] = {device.substr(0, colon), true};
  if (colon != string::npos) parts[3] = {device.substr(colon + 1), true};
  return true;
}
}
"""
_REGEX_USES = (
    "<regex>",
    'regex re("(cpu|cuda|xpu|mps)(:([0-9]+))?");',
    "regex_match(device_str, sm, re);",
)
# Kernels name their vectors, so other passes find little in them (docs/graphs.md).
_OPTIMISED = ("-O1", "-finline-small-functions", "-finline-functions")
# Where kernels begin in the source that torch writes; what is before calls them.
_KERNELS = "#include <torch/csrc/inductor/cpp_prefix.h>"
# Flags of torch that its own compilation keeps.
_NOT_OURS = ("O3", "Wall", "pedantic")
# What a package has besides its program and the words about it.
_SOURCES = (".cpp", ".o", ".ld", ".txt", "_flags.json")


def compiler() -> str | None:
    """Return the C++ compiler that torch would call, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def level() -> str | None:
    """Return the highest level that this processor has; None where processors have no such levels."""
    import torch

    has = torch.cpu.get_capabilities()
    return next((name for name, needs in LEVELS.items() if all(has.get(need) for need in needs)), None)


def _named_level() -> str | None:
    """Return the level that packages are compiled for; None where it is the processor at hand.

    torch 2.11 takes no other.
    """
    import torch

    return level() if Version(torch.__version__) >= LEVELS_SINCE else None


def instruction_set() -> str:
    """Return what packages made here need: the instructions of a level, or all that this processor has."""
    import torch

    named = _named_level()
    if named is not None:
        return "+".join(LEVELS[named])
    every = sorted(name for name, has in torch.cpu.get_capabilities().items() if has is True)
    return f"native-{hashlib.sha256(' '.join(every).encode()).hexdigest()[:16]}"


def target_here(device: str = "cpu") -> Target:
    """Return the machine that a package made here is for."""
    import torch

    return Target(
        backend="inductor",
        version=torch.__version__,
        platform=platform_here(),
        device=device,
        instruction_set=instruction_set(),
        torch=torch.__version__,
    )


def write_package(program: ExportedProgram, path: Path, settings: Settings) -> None:
    """Compile into one file, for every number of threads.

    Headers are not compiled beforehand: torch keeps those, 0.3 GB for each build, in the shared temporary
    folder for good, whatever cache folder is set.
    """
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import CppCompileError, InductorError
    from torch.fx.experimental import proxy_tensor

    chosen: Settings = {"aot_inductor.precompile_headers": False, "cpp.dynamic_threads": True, **settings}
    named = _named_level()
    if named is not None:
        # torch tries its widest instructions on a program of its own, five seconds; the level says the same.
        chosen |= {
            # WORKAROUND(torch 2.13): it has no setting for other flags.
            "cpp.march": shlex.join([named, *_without_places(path.parent)]),
            "aot_inductor.enable_line_tables": False,
            "cpp.simdlen": 512 if named == "x86-64-v4" else 256,
            "cpp.vec_isa_ok": True,
        }
    try:
        # The compiler writes there too, and the package is loaded from there.
        with temporary_room(COMPILING_BYTES):
            pass
        with warnings.catch_warnings(), _light_header(path.parent):
            # torch's own use of its tree library.
            warnings.simplefilter("ignore", FutureWarning)
            aoti_compile_and_package(program, package_path=str(path), inductor_configs=chosen)
        if "aot_inductor.package_cpp_only" not in settings:
            with _without_sources(path):
                pass
    except (CppCompileError, InductorError) as error:
        cause = getattr(error, "inner_exception", error)
        if not isinstance(cause, Exception):
            # A signal that arrived while torch traced.
            raise cause from error
        raise _uncompiled(path, str(cause)) from error
    finally:
        # WORKAROUND(torch 2.13): nodes of the last trace, whose module has the weights, stay in a table.
        getattr(proxy_tensor, "_FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT", {}).clear()


@contextmanager
def _without_sources(path: Path) -> Iterator[zipfile.ZipFile]:
    """Give a package without its sources, which name folders of this machine, for what else belongs in it."""
    smaller = path.with_suffix(".smaller")
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(smaller, "w") as package:
        for entry in whole.infolist():
            if not entry.filename.endswith(_SOURCES):
                package.writestr(entry, whole.read(entry))
        yield package
    smaller.replace(path)


def _without_places(folder: Path) -> list[str]:
    """Return flags that keep the names of folders on this machine out of what is compiled."""
    import torch

    places = {str(folder), os.environ.get(CACHES, ""), str(Path(torch.__file__).parents[1])} - {""}
    return [f"-ffile-prefix-map={place}=." for place in sorted(places, key=len)]


def _uncompiled(path: Path, output: str) -> ResourceError | UnsupportedError:
    """Return the error of a compiler that left no package."""
    if "No space left on device" in output:
        return ResourceError(
            f"{path}: the disk is full there or in TMPDIR, where the compiler writes. Free some space."
        )
    words = " ".join(output.split())[:300]
    return UnsupportedError(
        f"torch could not compile {path.name}: {words}. CXX names the C++ compiler, g++ without."
    )


@contextmanager
def begun_package(program: ExportedProgram, path: Path, settings: Settings) -> Iterator[Callable[[], None]]:
    """Begin to compile a small program, and give what waits for its file.

    Of a program for the host torch writes one source, which the compiler takes beside the next trace. Of one
    for a GPU torch writes the package.
    """
    assert program.example_inputs is not None
    devices = {tensor.device.type for tensor in program.example_inputs[0]}
    if devices != {"cpu"} or _named_level() is None:
        write_package(program, path, settings)
        yield lambda: None
        return
    write_package(program, path, {**settings, "aot_inductor.package_cpp_only": True})
    place = path.with_suffix(".sources")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(place)
    (source,) = place.rglob("*.wrapper.cpp")
    compiled, folder = source.with_suffix(".so"), source.parent
    # Calls and kernels need headers of torch for most of their time: each has a compiler.
    calls, include, kernels = source.read_text(encoding="utf-8").partition(_KERNELS)
    parts = {"calls": (calls, ("-Og",)), "kernels": (include + kernels, _OPTIMISED)}
    cxx, *flags = _command(folder)

    def begin(output: Path, *words: str) -> subprocess.Popen[bytes]:
        command = [cxx, *words, *flags, "-o", str(output)]
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        process = stack.enter_context(started)
        stack.callback(process.kill)
        return process

    with _light_header(place), (place / "output").open("w") as log, ExitStack() as stack:
        compilers = []
        for name, (text, optimised) in parts.items():
            if text:
                (file := folder / f"{name}.cpp").write_text(text, encoding="utf-8")
                compilers.append(begin(file.with_suffix(".o"), "-c", str(file), *optimised))

        def finish() -> None:
            failed = any(each.wait() for each in compilers)
            if failed or begin(compiled, *map(str, folder.glob("*.o"))).wait():
                raise _uncompiled(path, (place / "output").read_text(errors="replace"))
            with _without_sources(path) as package:
                package.write(compiled, compiled.relative_to(place))

        yield finish


@contextmanager
def _light_header(place: Path) -> Iterator[None]:
    """Give compilers that this process starts the few lines that torch's header takes of <regex>.

    Where g++ links its C++ library statically, programs that hold the whole of it crash (docs/gpu.md).
    """
    import torch

    header = Path(torch.__file__).parent / "include/torch/csrc/inductor/aoti_runtime/model_base.h"
    text = header.read_text(encoding="utf-8")
    if text.count("regex") != len(_REGEX_USES) or not all(use in text for use in _REGEX_USES):
        yield
        return
    before = os.environ.get("CPATH")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        Path(folder, "regex").write_text(_REGEX, encoding="utf-8")
        os.environ["CPATH"] = os.pathsep.join(filter(None, (folder, before)))
        try:
            yield
        finally:
            if before is None:
                del os.environ["CPATH"]
            else:
                os.environ["CPATH"] = before


def _command(folder: Path) -> list[str]:
    """Return the call of the compiler that torch wrote beside a source, less what helps a debugger alone."""
    flags = json.loads(next(folder.glob("*_linker_flags.json")).read_text(encoding="utf-8"))
    return [
        flags["compiler"],
        *(f"-D{name.strip()}" for name in flags["definitions"]),
        *(f"-I{folder}" for folder in flags["include_dirs"]),
        *shlex.split(" ".join(f"-{flag}" for flag in flags["cflags"] if flag not in _NOT_OURS)),
        *(f"-{flag}" for flag in flags["ldflags"]),
        *(f"-L{folder}" for folder in flags["libraries_dirs"]),
        *(f"-l{library}" for library in flags["libraries"]),
        *shlex.split(" ".join(flags["passthrough_args"])),
    ]


def load_package(content: bytes, name: str) -> Any:
    """Load a package that takes and returns what its program did, dictionaries included."""
    # A build that begins meanwhile would take the folder of this import for its own.
    with VARIABLES, compile_caches():
        from torch.export.pt2_archive._package import AOTICompiledModel

    return AOTICompiledModel(_loader(content, name))


def load_function(content: bytes, name: str) -> Callable[..., list[Tensor]]:
    """Load a package of tensors side by side, without torch's class for others (a second to import)."""
    loader = _loader(content, name)

    def call(*tensors: Tensor) -> list[Tensor]:
        try:
            return loader.run(list(tensors))
        except RuntimeError as error:
            words = " ".join(str(error).split())[:300]
            if "alloc" in words.lower():
                raise
            raise BundleError(
                f"{name}: the package does not run here ({words}). It is damaged or of another bundle: build "
                "the bundle again or fetch an intact copy."
            ) from error

    return call


def check_package(content: bytes, name: str) -> None:
    """Refuse a package whose bytes are damaged (torch compares no checksums) or that was another file."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            damaged = archive.testzip()
            inside = {path.partition("/")[0] for path in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, OSError, RuntimeError) as error:
        raise InputError(f"{name}: damaged, no package can be read ({error})") from error
    if damaged is not None:
        raise InputError(f"{name}: damaged in {damaged[:80]}")
    if inside != {Path(name).stem}:
        raise InputError(f"{name}: a package of {', '.join(sorted(inside))[:80]} given, not of this file")


def _loader(content: bytes, name: str) -> AOTIModelPackageLoader:
    """Load a package; it is a program, so only one that was built here or approved.

    `aoti_load_package` compiles test programs first, to compare the processor with that of the build: seconds
    where a compiler is, and no more than the target of a package has already.
    """
    from torch._C._aoti import AOTIModelPackageLoader

    check_package(content, name)
    with _LOADING, temporary_room(3 * len(content)) as place:
        before = unpacked()
        with tempfile.NamedTemporaryFile(suffix=".pt2", dir=place) as file:
            file.write(content)
            file.flush()
            # One runner, on the device of the build.
            loader = AOTIModelPackageLoader(file.name, "model", False, 1, -1)
        # What is mapped stays; code for a GPU is read again.
        if loader.get_metadata().get("AOTI_DEVICE_KEY") == "cpu":
            for folder in unpacked() - before:
                shutil.rmtree(folder, ignore_errors=True)
        return loader


@contextmanager
def temporary_room(need: int) -> Iterator[str]:
    """Give the folder where torch unpacks programs; refuse one that is not there, is full, or runs none."""
    place = next(filter(None, map(os.environ.get, ("TMPDIR", "TMP", "TEMP", "TEMPDIR"))), "/tmp")
    todo = "Set TMPDIR to a folder on a disk with room, from which programs may be run."
    try:
        if os.name == "posix" and os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0):
            raise MisfitError(
                f"TMPDIR={place}: mounted noexec, so no compiled program can be loaded from there. {todo}"
            )
        free = shutil.disk_usage(place).free
        if free < need:
            raise ResourceError(
                f"TMPDIR={place}: {free / 1e6:.1f} MB free, {need / 1e6:.1f} MB needed to load a compiled "
                f"program. {todo}"
            )
        yield place
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(f"TMPDIR={place}: the disk is full. {todo}") from error
        raise shortage(error) or MisfitError(
            f"TMPDIR={place}: cannot be used ({error.strerror}). {todo}"
        ) from error
