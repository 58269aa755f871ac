"""A limit on a logged value: which limits make sense, what a gate did, and how it says so."""

from __future__ import annotations

import difflib
import logging
import math
import sys
from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_fedleak.looks.channels.base import Channel
from lightning_fedleak.looks.evidence import range_of
from lightning_fedleak.looks.results import WORST

log = logging.getLogger(__name__)


@rank_zero_only
def announce(text: str) -> None:
    """Says what a gate did, by logging and once on stderr, whatever filters of warnings are set.

    It is not on stderr where the level of this module's own logger is above ``WARNING``.
    """
    log.warning(text)
    if log.level <= logging.WARNING and not _log_is_on_stderr():
        print(text, file=sys.stderr, flush=True)


def _log_is_on_stderr() -> bool:
    """Whether a warning in the log is on stderr, by a handler of the user's or by Python's own."""
    if not log.isEnabledFor(logging.WARNING):
        return False
    handlers: list[logging.Handler | None] = []
    logger: logging.Logger | None = log
    while logger is not None:
        handlers += logger.handlers
        logger = logger.parent if logger.propagate else None
    return any(
        isinstance(handler, logging.StreamHandler)
        and handler.stream is sys.stderr
        and handler.level <= logging.WARNING
        for handler in handlers or [logging.lastResort]
    )


class LeakageLimitExceeded(RuntimeError):
    """A gate with ``action="raise"`` found more leakage than it allows.

    Example:
        >>> import lightning as L
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import BagOfWords, LeakageLimitExceeded, LeakageMonitor, RiskGate
        >>> from lightning_fedleak.finetuning import CausalLMFineTuning
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> module = CausalLMFineTuning(GPT2LMHeadModel(config))  # stands for your own
        >>> monitor = LeakageMonitor([BagOfWords()], every_n_steps=1)
        >>> gate = RiskGate("leakage/bag_of_words/f1", at_most=0.5, action="raise")
        >>> trainer = L.Trainer(max_steps=9, callbacks=[monitor, gate])
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> try:
        ...     trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        ... except LeakageLimitExceeded as error:
        ...     print("The update gives away too much:", str(error).splitlines()[0])
        The update gives away too much: RiskGate 'bag_of_words/f1' raised at step 0
    """


def check_threshold(gate: str, metric: str, at_most: float, *, reachable: bool = True) -> None:
    """Refuses a threshold that cannot be meant.

    Args:
        gate: who asks.
        metric: a name in the logs.
        at_most: the threshold.
        reachable: values above it must be possible.

    Raises:
        ValueError: no number, below chance, or beyond the metric's range.
    """
    if isinstance(at_most, bool | str) or not math.isfinite(at_most):
        raise ValueError(f"at_most must be a finite number, got {at_most!r}")
    rate = rate_of(metric)
    span = range_of(rate.removesuffix("_low").removesuffix("_high"))
    plain = range_of(rate)
    if plain is not None and plain[0] <= at_most < plain[2]:
        watched = f", the highest {rate} of several attacks" if is_worst(metric) else ""
        raise ValueError(
            f"{gate} watches '{metric}'{watched}. {plain[2]:g} is chance, so that "
            f"at_most={at_most:g} would be exceeded by an attack that knows nothing: "
            f"give {plain[2]:g} or more"
        )
    if reachable and span is not None and at_most > span[1]:
        raise ValueError(
            f"{gate} watches '{metric}', which lies between {span[0]:g} and {span[1]:g}, so "
            f"that at_most={at_most:g} could never be exceeded: rates are shares, not percent"
        )


def names_there_are(metric: str, names: Sequence[str]) -> str:
    """Return the names that exist, and the one that may be meant."""
    close = difflib.get_close_matches(metric, names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return f"{hint} These exist:\n{_by_attack(names)}"


_ENDS = ("_low", "_high", "_worst_client")


def _by_attack(names: Sequence[str]) -> str:
    """Return a line of metrics for each attack; variants of a rate are listed once."""
    metrics_by_root: dict[str, list[str]] = {}
    for root, _, metric in (name.rpartition("/") for name in names):
        if not metric.endswith(_ENDS):
            metrics_by_root.setdefault(root, []).append(metric)
    lines = [f"  {root}/: {', '.join(metrics)}" for root, metrics in metrics_by_root.items()]
    varied = [name for name in names if name.endswith(_ENDS)]
    more = f"  (of rates also {', '.join(_ENDS[:-1])} and {_ENDS[-1]}, as in {varied[0]})"
    return "\n".join([*lines, more] if varied else lines)


def is_worst(metric: str) -> bool:
    """Return whether a logged name is the highest headline of a family."""
    return metric.startswith(f"{WORST}/")


def rate_of(metric: str) -> str:
    """Return the rate of a logged name; for the worst of a family its headline."""
    last = metric.rpartition("/")[-1]
    if not is_worst(metric):
        return last
    return next((c.headline for c in Channel.known.values() if c.family == last), last)
