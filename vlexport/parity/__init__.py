"""The accuracy check: levels from exact integers to health, and the report that they write."""

from vlexport.parity.check import check, run_checks
from vlexport.parity.report import ParityReport, Row

__all__ = ["ParityReport", "Row", "check", "run_checks"]
