"""Lower bounds on epsilon from membership games, and what an epsilon allows in them.

A mechanism that is (epsilon, delta)-DP allows no test with ``TPR > e^epsilon FPR + delta``, nor
one with ``TNR > e^epsilon FNR + delta``. Games that show such a test refute the claim, and every
smaller epsilon with it. A bound says nothing about leaks that this attack does not find: 0 is not
"safe".

There are two kinds of games, and each needs its own bound:

- *many runs* (:func:`audit_scores`): n games, each with its own run of the mechanism, its own noise
  and its own coin. The bound is for what was run: one step, if each game is one step.
  :func:`audit_games` takes the games of :func:`~lightning_fedleak.games.play`.
- *one run* (:func:`audit_one_run`): m canaries, each included by its own fair coin, all scored
  after a single run. :func:`audit_canaries` takes the texts that
  :func:`~lightning_fedleak.canaries.with_canaries` put into the data.

Where the scores themselves are Gaussian, as those of planted gradients are, their sums give a
larger bound than guesses: :func:`audit_gaussian_scores`.

The game's relation must be the accountant's, see :mod:`lightning_fedleak.auditing.lower_bounds`.
"""

from lightning_fedleak.auditing.gaussian_scores import audit_gaussian_scores
from lightning_fedleak.auditing.lower_bounds import (
    EpsilonBound,
    Relation,
    audit_games,
    audit_scores,
    epsilon_from_counts,
)
from lightning_fedleak.auditing.mechanisms import (
    curve_auc,
    curve_tpr,
    dp_advantage,
    dp_auc,
    dp_tpr,
    gaussian_advantage,
    gaussian_auc,
    gaussian_delta,
    gaussian_tpr,
    randomised_response_auc,
    randomised_response_delta,
)
from lightning_fedleak.auditing.one_run import (
    audit_canaries,
    audit_one_run,
    one_run_epsilon,
    one_run_p_value,
    refutes,
)
from lightning_fedleak.defenses.noise import gaussian_epsilon

__all__ = [
    "EpsilonBound",
    "Relation",
    "audit_canaries",
    "audit_games",
    "audit_gaussian_scores",
    "audit_one_run",
    "audit_scores",
    "curve_auc",
    "curve_tpr",
    "dp_advantage",
    "dp_auc",
    "dp_tpr",
    "epsilon_from_counts",
    "gaussian_advantage",
    "gaussian_auc",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_tpr",
    "one_run_epsilon",
    "one_run_p_value",
    "randomised_response_auc",
    "randomised_response_delta",
    "refutes",
]
