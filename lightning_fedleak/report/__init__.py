"""What runs showed, for people who decide: one page, one JSON, one entry for a registry."""

from lightning_fedleak.report.files import write
from lightning_fedleak.report.findings import findings
from lightning_fedleak.report.page import page
from lightning_fedleak.report.reading import NothingToReport, Reading, ReportError, read
from lightning_fedleak.report.registry import entry

__all__ = [
    "NothingToReport",
    "Reading",
    "ReportError",
    "entry",
    "findings",
    "page",
    "read",
    "write",
]
