"""The accuracy check: a ladder from exact integers to behaviour, and the report it writes."""

from vlexport.parity.check import check, run_checks
from vlexport.parity.report import ParityReport, Row

__all__ = ["ParityReport", "Row", "check", "run_checks"]
