"""The log files of a run (``records``), and the reports that are made from them.

:func:`read` reads the logs, :func:`findings` makes the content of a report from them, and
:func:`write` writes it as HTML and JSON. These names are imported at their first use, since a run
that only writes logs does not need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fedleak.extras import lazy

if TYPE_CHECKING:
    from lightning_fedleak.report.logs import FitLog as FitLog
    from lightning_fedleak.report.logs import ReportError as ReportError
    from lightning_fedleak.report.logs import read as read
    from lightning_fedleak.report.pages import Findings as Findings
    from lightning_fedleak.report.pages import findings as findings
    from lightning_fedleak.report.pages import model_card as model_card
    from lightning_fedleak.report.pages import page as page
    from lightning_fedleak.report.pages import print_card as print_card
    from lightning_fedleak.report.pages import write as write
    from lightning_fedleak.report.pages import write_at_end as write_at_end
    from lightning_fedleak.report.pages import write_live as write_live

__getattr__ = lazy(__name__)
