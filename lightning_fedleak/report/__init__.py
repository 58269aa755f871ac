"""What runs showed, for people who decide: one page, one JSON, one entry for a registry."""

from lightning_fedleak.report.files import print_card as print_card
from lightning_fedleak.report.files import write as write
from lightning_fedleak.report.files import write_at_end as write_at_end
from lightning_fedleak.report.findings import Findings as Findings
from lightning_fedleak.report.findings import findings as findings
from lightning_fedleak.report.logs import Logs as Logs
from lightning_fedleak.report.logs import NothingToReport as NothingToReport
from lightning_fedleak.report.logs import ReportError as ReportError
from lightning_fedleak.report.logs import read as read
from lightning_fedleak.report.page import model_card as model_card
from lightning_fedleak.report.page import page as page
from lightning_fedleak.report.registry import entry as entry
