"""Lower bounds on epsilon from membership games, and what an epsilon allows in them.

A mechanism that is (epsilon, delta)-DP allows no test with ``TPR > e^epsilon FPR + delta``, nor
one with ``TNR > e^epsilon FNR + delta``. Games that show such a test refute the claim, and every
smaller epsilon with it. A bound says nothing about leaks that this attack does not find: 0 is not
"safe".

There are two kinds of games, and each needs its own bound:

- *many runs* (:func:`audit_scores`): n games, each with its own run of the mechanism, its own noise
  and its inclusion bit. The bound is for what was run: one step, if each game is one step.
  :func:`audit_games` takes the games of :func:`~lightning_fedleak.evaluation.games.play`.
- *one run* (:func:`audit_one_run`): m canaries, each with a fair inclusion bit, all scored
  after a single run. :func:`audit_canaries` takes the texts that
  :func:`~lightning_fedleak.evaluation.canaries.with_canaries` put into the data.

Where the scores themselves are Gaussian, as those of planted gradients are, their sums give a
larger bound than guesses: :func:`audit_gaussian_scores`.

The game's relation must be the accountant's, see
:mod:`lightning_fedleak.evaluation.auditing.lower_bounds`.
"""

from lightning_fedleak.defenses.noise import gaussian_epsilon as gaussian_epsilon
from lightning_fedleak.evaluation.auditing.lower_bounds import EpsilonBound as EpsilonBound
from lightning_fedleak.evaluation.auditing.lower_bounds import audit_games as audit_games
from lightning_fedleak.evaluation.auditing.lower_bounds import audit_scores as audit_scores
from lightning_fedleak.evaluation.auditing.lower_bounds import curve_auc as curve_auc
from lightning_fedleak.evaluation.auditing.lower_bounds import curve_tpr as curve_tpr
from lightning_fedleak.evaluation.auditing.lower_bounds import dp_auc as dp_auc
from lightning_fedleak.evaluation.auditing.lower_bounds import dp_tpr as dp_tpr
from lightning_fedleak.evaluation.auditing.lower_bounds import gaussian_auc as gaussian_auc
from lightning_fedleak.evaluation.auditing.lower_bounds import gaussian_tpr as gaussian_tpr
from lightning_fedleak.evaluation.auditing.one_run import audit_canaries as audit_canaries
from lightning_fedleak.evaluation.auditing.one_run import (
    audit_gaussian_scores as audit_gaussian_scores,
)
from lightning_fedleak.evaluation.auditing.one_run import audit_one_run as audit_one_run
from lightning_fedleak.evaluation.auditing.one_run import one_run_p_value as one_run_p_value
from lightning_fedleak.evaluation.auditing.one_run import refutes as refutes
from lightning_fedleak.evaluation.auditing.own_training import PlantedGradients as PlantedGradients
from lightning_fedleak.evaluation.auditing.private_training import (
    PrivateTrainingCheck as PrivateTrainingCheck,
)
from lightning_fedleak.evaluation.auditing.training_checks import PrivacyClaim as PrivacyClaim
from lightning_fedleak.evaluation.auditing.training_checks import PrivacyVerdict as PrivacyVerdict
