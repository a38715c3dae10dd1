"""Checks of a stored bundle: files, trust and machine; its own proof; accuracy against a reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlexport.backends import Progress, log_progress
from vlexport.bundle import Bundle
from vlexport.codec import encode
from vlexport.errors import ParityError, RequestError, ResourceError

if TYPE_CHECKING:
    from vlexport.checkpoint import Checkpoint
    from vlexport.parity.report import ParityReport
    from vlexport.runtime.proof import ProofResult
    from vlexport.runtime.request import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A bundle that is trusted, and what its checks gave.

    intact  every file was hashed and the machine fits; with accuracy alone neither is looked at
    proof   of the calls that the engine ran, with `run`
    report  of the accuracy check; `unstored` is why its verdict is not the bundle's from now on
    """

    bundle: Bundle
    intact: bool
    proof: ProofResult | None = None
    report: ParityReport | None = None
    unstored: str = ""

    @property
    def summary(self) -> str:
        """The accuracy check that the bundle came with, in a line."""
        from vlexport.reports.facts import BundleFacts

        return BundleFacts.of(self.bundle).summary

    def require_passed(self) -> None:
        """Raise a `ParityError` if an accuracy check was made and did not pass."""
        if self.report is not None and not self.report.passed:
            bad = self.report.first_bad()
            raise ParityError(
                f"{self.bundle.path}: accuracy check '{self.report.status}', 'passed' expected: "
                f"{bad.told() if bad else 'it could not run'}. -v prints every row."
            )

    def to_json(self) -> dict[str, object]:
        from vlexport.reports.facts import BundleFacts

        manifest, facts = self.bundle.manifest, dict[str, object](bundle=str(self.bundle.path))
        if self.intact:
            stored = BundleFacts.of(self.bundle)
            facts |= {
                "digest": self.bundle.digest,
                "target": manifest.target.tag,
                "parity": stored.status,
                "summary": stored.summary,
                "files": {name: record.sha256 for name, record in manifest.files.items()},
                "proof": encode(self.proof),
            }
        if (report := self.report) is not None:
            checked = BundleFacts.checked(manifest, report, is_own_reference=not self.unstored)
            facts |= {**checked.to_json(), "reason": self.unstored}
        return facts


def check(  # noqa: PLR0913  the options of the command line, in one place
    bundle: Bundle | str | Path,
    files: Sequence[Source] = (),
    *,
    fps: float | None = None,
    run: bool = False,
    accuracy: bool = False,
    checkpoint: str | Path | Checkpoint | None = None,
    lora: str | Path | None = None,
    layers: bool = False,
    task: str | Path | None = None,
    recipe: str | None = None,
    progress: Progress = log_progress,
) -> Checked:
    """Check hashes, trust and machine; with `run` or `accuracy` the engine too.

    run         run the engine on calls that are stored with the reference's rows
    accuracy    repeat the accuracy check; its verdict is stored if the reference has the build's weights
    checkpoint  the reference (default: the one that the bundle was built from)
    files, fps  images and videos of your own for it, a row for each; `task`: questions with answers (L4)
    layers      compare block by block too
    lora        where the adapter of the build is, if it has moved
    recipe      the file of the private recipe that built the bundle

        vlexport.check("engines/BUNDLE", accuracy=True).report.table()
    """
    settings = {"checkpoint": checkpoint, "lora": lora, "layers": layers or None, "task": task, "fps": fps}
    extra = [name for name, value in {**settings, "files": files or None}.items() if value is not None]
    if extra and not accuracy:
        raise RequestError(f"{', '.join(extra)} given without accuracy, which compares with them. Add it.")
    whole = run or not accuracy
    opened = Bundle.open(bundle, verify="full" if whole and not run else "lazy")
    if run:
        # Hashed once: the engine takes what it opens with from here.
        opened.begin(opened.manifest.files)
    proof = _fit(opened, recipe, run=run) if whole else None
    if not accuracy:
        return Checked(bundle=opened, intact=True, proof=proof)
    report, unstored = _compared(opened, files, settings, recipe, progress)
    return Checked(bundle=opened, intact=whole, proof=proof, report=report, unstored=unstored)


def _fit(bundle: Bundle, recipe: str | None, *, run: bool) -> ProofResult | None:
    from vlexport.runtime.opening import open_engine, require_fit

    require_fit(bundle, recipe, unproven=run)
    if not run:
        return None
    from vlexport.runtime.proof import require_proven

    with open_engine(bundle, unproven=True) as engine:
        for name in tuple(bundle.begun):
            bundle.map(name)
        return require_proven(bundle, engine)


def _compared(
    bundle: Bundle,
    files: Sequence[Source],
    settings: Mapping[str, Any],
    recipe: str | None,
    progress: Progress,
) -> tuple[ParityReport, str]:
    """Return the report, and why its verdict is not stored, if it is not."""
    from vlexport.checkpoint import Checkpoint
    from vlexport.runtime.opening import checkpoint_of

    against, lora = settings["checkpoint"], settings["lora"]
    source = against if isinstance(against, Checkpoint) else checkpoint_of(bundle, against, lora)
    from vlexport._build.build import store_verdict
    from vlexport.evaluate.answers import check as compared

    report = compared(
        bundle,
        None if against is None else source,
        layers=bool(settings["layers"]),
        task=settings["task"],
        media=tuple(files),
        fps=settings["fps"],
        lora=lora,
        recipe=recipe,
        progress=progress,
    )
    progress("store", 0.0)
    parts = [name for name, value in (("task", settings["task"]), ("files", files)) if value]
    if parts:
        return report, f"{' and '.join(parts)} of your own are a part of it"
    try:
        stored = store_verdict(bundle, report, source, recipe)
    except (RequestError, ResourceError) as error:
        return report, str(error)
    return report, "" if stored else "the reference has other weights"
