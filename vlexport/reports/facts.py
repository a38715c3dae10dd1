"""What a bundle is and how exact it is, as tables, cards, pages, `inspect` and `compare` show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from vlexport.bundle import Bundle, Manifest
from vlexport.bundle.manifest import Verdict
from vlexport.codec import JsonObject, encode, freeze_object
from vlexport.errors import InputError
from vlexport.parity.report import ParityReport, report_in

WEIGHTS = ("checkpoint.weights", "checkpoint.adapter.digest")


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleFacts:
    """Facts of one bundle, from itself or from the file of an accuracy check.

    identity          fields of its manifest by name, without files and verdict
    report            rows of its accuracy check, which gave the `status`; None where none has run
    is_own_reference  whether it was checked against its own weights
    sizes             bytes of its files by name
    """

    identity: JsonObject
    status: str
    report: ParityReport | None
    is_own_reference: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        """Return the facts with the verdict that counts for this user."""
        return cls.built(bundle.manifest, bundle.verdict)

    @classmethod
    def built(cls, manifest: Manifest, verdict: Verdict) -> Self:
        return replace(cls.checked(manifest, report_in(verdict)), status=verdict.status)

    @classmethod
    def checked(
        cls, manifest: Manifest, report: ParityReport | None, *, is_own_reference: bool = True
    ) -> Self:
        return cls(
            identity=freeze_object(manifest.identity(), "identity"),
            status=report.status if report else "not_run",
            report=report,
            is_own_reference=is_own_reference,
            sizes={name: record.size for name, record in manifest.files.items()},
        )

    @classmethod
    def from_json(cls, content: JsonObject) -> Self:
        """Read what `to_json` wrote; a verdict is stored if the reference has the bundle's weights."""
        identity, table = content.get("identity"), content.get("table")
        if not isinstance(identity, Mapping) or not isinstance(table, Mapping):
            raise InputError("'identity' and 'table': objects expected.")
        report, stored = ParityReport.from_json(table), content.get("stored") is True
        return cls(identity=identity, status=report.status, report=report, is_own_reference=stored)

    def to_json(self) -> dict[str, object]:
        return {
            "status": self.status,
            "stored": self.is_own_reference,
            "identity": encode(self.identity),
            "table": self.report.to_json() if self.report else None,
        }

    @property
    def summary(self) -> str:
        """One line about the accuracy check; its status where none has run."""
        return self.report.summary() if self.report else self.status

    @property
    def weights(self) -> str:
        return " ".join(str(self.identity[name]) for name in WEIGHTS if self.identity.get(name) is not None)
