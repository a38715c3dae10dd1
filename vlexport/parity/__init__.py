"""The accuracy check: a ladder from exact integers to behaviour, and the report it writes."""

from vlexport.parity.check import check, ladder
from vlexport.parity.report import ParityReport, Row

__all__ = ["ParityReport", "Row", "check", "ladder"]
