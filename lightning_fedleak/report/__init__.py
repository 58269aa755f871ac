"""What runs showed, for people who decide: one page, one JSON, one entry for a registry."""

from lightning_fedleak.report.card import model_card
from lightning_fedleak.report.files import print_card, write, write_at_end
from lightning_fedleak.report.findings import Findings, findings
from lightning_fedleak.report.logs import Logs, NothingToReport, ReportError, read
from lightning_fedleak.report.page import page
from lightning_fedleak.report.registry import entry

__all__ = [
    "Findings",
    "Logs",
    "NothingToReport",
    "ReportError",
    "entry",
    "findings",
    "model_card",
    "page",
    "print_card",
    "read",
    "write",
    "write_at_end",
]
