"""Compare the privacy account of a DP run with the attacks on its trained weights.

The *account* of a defence is the differential privacy that it states: a curve of epsilon and delta.
The curve bounds how well any attack can tell whether one text was trained on, so also the AUC and
the true-positive rate (TPR) of the attacks here. The bounds are logged next to the rates. If an
attack exceeds them significantly, the account is *refuted*: the implementation has a fault.
"""

from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.base import Curve
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import Run
from lightning_fedleak.evaluation.auditing import curve_auc, curve_tpr, refutes
from lightning_fedleak.evaluation.metrics.released import min_non_members
from lightning_fedleak.messages import rank_zero_warn

BOUND = "bound/"
"""The prefix of the bounds, which hold for all attacks; logged as ``leakage/bound/auc``."""


class AccountGame:
    """Compare the account of a run with what the trained weights show.

    An account bounds what one example changes that is added or removed. So a fair random bit, drawn
    before the run, must have decided for each text whether it is trained on. All included texts
    count as members, even before a batch holds them. The measurements (*looks*) and the attacks
    share the probability of error, so that an account that holds is refuted in at most that share
    of runs.

    Args:
        run: The run.
        no_game: Why the texts cannot be compared with an account; None if they can.

    Attributes:
        why_not: None if the account is compared. Otherwise the reason why it is not, or an empty
            string if no defence has an account.
    """

    def __init__(self, run: Run, no_game: str | None) -> None:
        defenses = accounting(run.defenses)
        self._defense = defenses[0] if defenses else None
        self._curve: Curve = ()  # of the releases until the newest look
        self._run = run
        self._refuting: set[str] = set()  # names of the attacks that have refuted the account
        self.why_not: str | None = no_game if defenses else ""
        if len(defenses) > 1:
            self.why_not = "several defences have an account, and none covers them together"
        elif run.processes > 1 and run.client == "rank" and defenses:
            self.why_not = "to hold out one row moves other rows to another client"
        elif self._defense is not None:
            try:  # some accounts have no curve
                self._defense.curve()
            except DefenseError as error:
                self.why_not = str(error)

    def describe(self) -> str:
        """Return in words what is compared, for the end of the message at the start of a run."""
        if self.why_not is None:
            return (
                f". The highest AUC that the account allows is logged as leakage/{BOUND}auc, and "
                "'refuted' is 1 if an attack refutes the account; 0 does not confirm it"
            )
        return f". Not compared with the account: {self.why_not}" if self.why_not else ""

    def limits(self) -> dict[str, float]:
        """Return the highest rates that the account of the releases so far allows any attack."""
        assert self._defense is not None
        self._curve = self._defense.curve()
        return {
            f"{BOUND}auc": curve_auc(self._curve),
            f"{BOUND}tpr_at_fpr_0.01": curve_tpr(0.01, self._curve),
        }

    def refuted(
        self, attack: str, scores: Tensor, members: Tensor, error: float, alpha: float
    ) -> float:
        """Return 1 from the first look on at which the attack refutes the account, else 0.

        The first time a warning is shown. It stays 1, even if the account allows more later.

        Args:
            attack: The name of the attack.
            scores: (N,) its scores of all texts.
            members: (N,) bool, the inclusion bits.
            error: The largest probability that this attack refutes at this look an account that
                holds.
            alpha: The same over all looks and attacks together.
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
    """Return why a TPR can have no lower bound above 0: too few non-members; None if it can.

    The message names the look that lacks the most of them.

    Args:
        counts: The numbers of non-members at look 1, 2, and so on.
        alpha: The probability of error over all looks together.
        metric: The name of the TPR.
        fpr: The FPR at which it is measured.
        mend: The advice to the user; by default to hold out and query more rows.
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
