"""Codes of errors and of the accuracy check: what each means, its causes, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vlexport import errors
from vlexport.errors import RequestError, VlexportError, code_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """About one code; `exit_code` of errors alone."""

    code: str
    exit_code: int | None = None
    summary: str
    causes: str
    remedy: str


def pages() -> dict[str, Page]:
    """Return the page of every code, errors first."""
    return {page.code: page for page in (*_of_errors(), *_of_rows())}


def find_page(code: str) -> Page:
    """Return the page of a code; verdicts are codes too, with their underscores."""
    listed, code = pages(), code.replace("_", "-")
    if code not in listed:
        raise RequestError(f"no code '{code}'. `vlexport explain` lists them.")
    return listed[code]


def _of_errors() -> Iterator[Page]:
    waiting = VlexportError.__subclasses__()
    while waiting:
        kind = waiting.pop(0)
        waiting += kind.__subclasses__()
        if kind.__module__ == errors.__name__:
            causes, remedy = ERRORS[code_of(kind)]
            summary = str(kind.__doc__).partition("\n")[0]
            yield Page(
                code=code_of(kind), exit_code=kind.exit_code, summary=summary, causes=causes, remedy=remedy
            )


def _of_rows() -> Iterator[Page]:
    for code, (summary, causes, remedy) in ROWS.items():
        yield Page(code=code, summary=summary, causes=causes, remedy=remedy)


# Causes and what to do; the summary is the docstring of the class.
ERRORS: dict[str, tuple[str, ...]] = {
    "internal": (
        "A fault of vlexport, or a library that raised what it does not document.",
        "Repeat with --debug and report it; `vlexport repro BUNDLE -o bug.zip` packs what is needed.",
    ),
    "request": (
        "An option, a value or a place that cannot be served.",
        "The message names what was expected. `vlexport COMMAND --help` lists options.",
    ),
    "checkpoint": (
        (
            "Files are missing, damaged or of another layout; shapes contradict config.json. The adapter "
            "or the checkpoint of a build has moved or changed."
        ),
        "`vlexport inspect SOURCE` shows what was found. Download it again, or name its place.",
    ),
    "unknown-model": (
        "No recipe serves the model type, and transformers has no class of it with image features.",
        "`vlexport list --all` shows which are served; docs/recipes.md says how one is written.",
    ),
    "unsupported": (
        "The backend does not serve the dtype, the device or the option on this machine.",
        "`vlexport doctor` lists precisions of each backend and what it lacks.",
    ),
    "media": (
        ("The file is damaged, of another format, larger than the limits, or no frame can be read from it."),
        "Open it in another program; save images as PNG or JPEG, videos as MP4.",
    ),
    "input": (
        "Tensors, grids or options contradict each other, or a required one is missing.",
        "Pass what a processor or vlexport itself has made, unchanged.",
    ),
    "parity": (
        (
            "The engine's rows are farther from the reference's than the reference's own rounding allows. "
            "The checkpoint of the comparison has other weights than the bundle."
        ),
        (
            "`vlexport check BUNDLE --accuracy --layers` names the first block that is wrong. Build with "
            "`--backend eager` to compare; report it with `vlexport repro BUNDLE -o bug.zip`."
        ),
    ),
    "misfit": (
        (
            "The bundle was built for another processor, GPU, platform or version of a library. A library "
            "is missing, or the recipe that built the bundle is another one now."
        ),
        (
            "`vlexport doctor` shows what is here. `vlexport check BUNDLE --run` lets a bundle of a "
            "portable format prove itself with a newer library; else build it here."
        ),
    ),
    "bundle": (
        "A file is missing, damaged or not in the manifest; a copy was cut off.",
        "`vlexport check BUNDLE` names the file. Fetch an intact copy or build again.",
    ),
    "no-bundle": (
        "A checkpoint, another folder or nothing was given as a bundle.",
        "`vlexport bundles ls` lists bundles; `vlexport build` prints the path of what it made.",
    ),
    "untrusted": (
        "The bundle was not built by this user, or one of its bytes changed since it was approved.",
        "Get the digest from whoever built it, then `vlexport trust BUNDLE DIGEST`.",
    ),
    "limit": (
        "The media are larger, longer or more than the profile that the engine was built for.",
        (
            "The message names the nearest size that fits. Build with `--max-pixels`, `--max-images` or "
            "`--max-frames`; `vlexport plan SOURCE` shows what that costs."
        ),
    ),
    "resource": (
        "Memory or disk were not enough, or the limit of open files.",
        (
            "`vlexport plan SOURCE` says what a build needs; `vlexport bundles rm` and `vlexport cache "
            "prune` make room."
        ),
    ),
    "locked": (
        "Another process builds the same bundle.",
        "Wait for it: the bundle is then there for both.",
    ),
}

# Levels and verdicts of the accuracy check: what they mean, causes, what to do.
ROWS: dict[str, tuple[str, ...]] = {
    "L0": (
        "What is exact: weights, index tables, token counts, patches, refusals of the profile.",
        (
            "Weights were read or stored wrongly; tables of another size or order; a constant of the "
            "tower differs."
        ),
        "-v prints the row with its place. Report it: no rounding explains it.",
    ),
    "L1": (
        "Rows in float32, end to end, against transformers with the same weights.",
        (
            "An operator, an epsilon or a mask is another one; attention reaches the wrong tokens. Of a "
            "build in half precision: of a float32 twin of the same tower."
        ),
        ("`vlexport check BUNDLE --accuracy --layers` names the first wrong block and the kind of fault."),
    ),
    "L2": (
        "What the engine loses in its precision, as a ratio to what the reference loses in it.",
        "A part that should stay in float32 (statistics of norms, angles, softmax) was rounded.",
        "Build in float32 to compare, or with another backend.",
    ),
    "L3": (
        "Caps of the precision, and rows that are lost: not finite, zero or equal.",
        "Values overflow float16; weights are too sharp for the precision.",
        "Build in bfloat16 or float32.",
    ),
    "L4": (
        "Answers to questions of a task, with the engine and with the reference.",
        "Rows are within their limits, and the language model answers otherwise all the same.",
        "Ask more questions: under a hundred the interval is wide. Compare with another precision.",
    ),
    "blocked": (
        "No fair comparison was possible, so nothing is said about the engine.",
        (
            "Inputs differ on both sides, the reference is not finite or zero throughout, or no sample "
            "fits the profile."
        ),
        (
            "The row names the cause. Weights that are all zero, or a profile below one item, are the "
            "usual ones."
        ),
    ),
    "not-run": (
        "The engine cannot run on the machine that built it.",
        "TensorRT for RTX builds without a GPU.",
        "`vlexport check BUNDLE --accuracy` on the device of the engine.",
    ),
    "observed": (
        "A row that is printed and decides nothing.",
        "Another row sees the same by its effect, or too few questions were asked.",
        "Nothing has to be done.",
    ),
}
