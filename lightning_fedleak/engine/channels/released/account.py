"""What an account of DP allows attacks on the trained weights."""

from __future__ import annotations

from torch import Tensor

from lightning_fedleak.defenses import Defense, DefenseError
from lightning_fedleak.defenses.base import Curve
from lightning_fedleak.engine.run import Run
from lightning_fedleak.evaluation.auditing import curve_auc, curve_tpr, refutes
from lightning_fedleak.evaluation.metrics.released import min_non_members
from lightning_fedleak.messages import rank_zero_warn

BOUND = "bound/"
"""Begins the names of what is allowed: it is of all attacks, logged as ``leakage/bound/auc``."""


class AccountGame:
    """Compare the account of a run with what the trained weights show.

    The game is the account's own. A fair draw decided of every text, before the run, whether it is
    trained on; all that are in count, whether a batch has held them or not. Looks and attacks share
    the probability of error, so that an account that holds is refuted in at most that share of
    runs.

    Args:
        run: the run.
        no_game: why its texts are no game of examples that are added or removed; None: they are.

    Attributes:
        why_not: why nothing is compared; None where something is, empty where nothing accounts.
    """

    def __init__(self, run: Run, no_game: str | None) -> None:
        defenses = [d for d in run.defenses if type(d).privacy is not Defense.privacy]
        self._defense = defenses[0] if defenses else None
        self._curve: Curve = ()
        self._run = run
        self._refuting: set[str] = set()
        self.why_not: str | None = no_game if defenses else ""
        if len(defenses) > 1:
            self.why_not = "several defences account, and what they allow together is not known"
        elif run.processes > 1 and run.client == "rank" and defenses:
            self.why_not = "a row that is held out moves further ones from one client to the next"
        elif self._defense is not None:
            try:
                self._defense.curve()
            except DefenseError as error:
                self.why_not = str(error)

    def describe(self) -> str:
        """Return in words what is compared, for the end of the line-up's sentence."""
        if self.why_not is None:
            return (
                f". What the account allows is logged as leakage/{BOUND}auc beside them, and "
                "'refuted' is 1 where they refute it; 0 confirms nothing"
            )
        return f". No line of what the account allows: {self.why_not}" if self.why_not else ""

    def limits(self) -> dict[str, float]:
        """Return the largest rates that the releases so far allow any test of one text."""
        assert self._defense is not None
        self._curve = self._defense.curve()
        return {
            f"{BOUND}auc": curve_auc(self._curve),
            f"{BOUND}tpr_at_fpr_0.01": curve_tpr(0.01, self._curve),
        }

    def refuted(
        self, attack: str, scores: Tensor, members: Tensor, error: float, alpha: float
    ) -> float:
        """Return 1 from the first look on that refutes :meth:`limits`, which warns; else 0.

        A larger account at a later look confirms nothing.

        Args:
            attack: its name.
            scores: (N,) of all texts, by one rule.
            members: (N,) bool, the inclusion bits.
            error: probability with which an account that holds is refuted here.
            alpha: the same of all looks and attacks together.
        """
        assert self._defense is not None
        privacy = self._defense.privacy
        assert privacy is not None
        if attack in self._refuting:
            return 1.0
        if not refutes(scores, members, self._curve, confidence=1 - error):
            return 0.0
        self._refuting.add(attack)
        rank_zero_warn(
            f"{self._run.watcher}: THE ACCOUNT IS REFUTED by '{attack}' at step "
            f"{self._run.step}: {self._defense.name} accounts for epsilon "
            f"{privacy.epsilon:.3g} at delta {privacy.delta:g}, and what it accounts for lets "
            f"{len(scores)} texts be distinguished so well with a probability below "
            f"{error:.2g}. Its noise, clipping or sampling is not what it accounts for, or "
            "something else lets texts into the weights. (An account that holds is refuted in "
            f"at most {alpha:.0%} of runs.)"
        )
        return 1.0


def too_few_non_members(
    counts: list[int], alpha: float, metric: str, fpr: float, mend: str = ""
) -> str | None:
    """Return at which look a TPR has too few non-members, the farthest one; None: at none.

    Args:
        counts: The numbers of non-members at look 1, 2, and so on.
        alpha: probability of error over all looks together.
        metric: its name.
        fpr: the FPR of it.
        mend: what to do; by default to leave out and ask about more rows.
    """
    lacks = [min_non_members(look, alpha, fpr) - n for look, n in enumerate(counts, 1)]
    if max(lacks, default=0) <= 0:
        return None
    look = 1 + lacks.index(max(lacks))
    needed, count = min_non_members(look, alpha, fpr), counts[look - 1]
    mend = mend or (
        f"leave out more rows, and ask about all: Memorization(most_texts={2 * needed}) or more, "
        "and a higher max_overhead="
    )
    return f"'{metric}' needs {needed} non-members at look {look}, and has {count}: {mend}"
