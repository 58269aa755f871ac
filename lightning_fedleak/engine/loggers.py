"""What loggers get beside numbers: a run's settings, its highest leakage, and the report.

Loggers are known by the names of their classes, so that none has to be installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

KEY = "fedleak"
"""Name of the settings among those that a logger has."""


def log_settings(loggers: Sequence[Any], settings: Mapping[str, Any], worst: Sequence[str]) -> None:
    """Give each logger the settings of a run; W&B also keeps the highest value of some numbers.

    Args:
        loggers: of Lightning, or any that has ``log_hyperparams``.
        settings: numbers, strings and lists of them, by name.
        worst: names of the numbers that are high where much leaks.
    """
    for logger in loggers:
        if (log := getattr(logger, "log_hyperparams", None)) is not None:
            log({KEY: dict(settings)})
        if type(logger).__name__ == "WandbLogger":
            keep_highest(logger.experiment, worst, step="trainer/global_step")


def keep_highest(run: Any, names: Sequence[str], *, step: str) -> None:
    """Have the summary of a run of W&B hold the highest and the last value of some numbers.

    Args:
        run: of W&B.
        names: of the numbers.
        step: name of the number that counts steps.
    """
    for name in names:
        run.define_metric(name, step_metric=step, summary="max,last")


def upload_report(loggers: Sequence[Any], page: Path) -> None:
    """Attach a report's page to the runs of W&B and MLflow among some loggers.

    Args:
        loggers: of Lightning, or any that has ``upload_report``.
        page: ``report.html``.
    """
    for logger in loggers:
        kind = type(logger).__name__
        if kind == "WandbLogger":
            upload_to_wandb(logger.experiment, page)
        elif kind == "MLFlowLogger":
            logger.experiment.log_artifact(logger.run_id, str(page))
        elif (upload := getattr(logger, "upload_report", None)) is not None:
            upload(page)


def upload_to_wandb(run: Any, page: Path) -> None:
    """Show a report's page as a panel of a run of W&B."""
    import wandb

    html = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
    run.log({"leakage/report": html})
