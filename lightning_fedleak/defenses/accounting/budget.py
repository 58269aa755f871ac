"""The budget of DP-SGD: the noise of its releases, their account, and whether one more fits.

A *release* is one noised update. A *filter* is an accountant that allows the noise to change during
the run (:class:`~lightning_fedleak.defenses.RenyiFilter`). To *harden* is to increase the noise.
"""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fedleak.defenses.accounting import accounting
from lightning_fedleak.defenses.accounting.account import Accountant, RenyiFilter
from lightning_fedleak.defenses.accounting.accounting import SamplingScheme
from lightning_fedleak.defenses.accounting.ledger import LedgerPath
from lightning_fedleak.defenses.base import Curve, DefenseError, Privacy, State
from lightning_fedleak.defenses.noise import HARDEN_FACTOR

# The reported epsilon may include this share of further releases, so that PRV is called rarely.
EPSILON_SLACK = 0.02
_ACCOUNT = "accountant/"  # prefix of the accountant's keys in a state

Account = accounting.AccountantKind | Literal["filter"]
AnyAccountant = Accountant | RenyiFilter


class BudgetSpent(DefenseError):
    """One more release would cost more than ``target_epsilon``; it was not made."""


@dataclass(eq=False)
class Budget:
    """The noise of the next release, the account of all before it, and whether one more fits.

    Attributes:
        kind: The kind of accountant.
        noise_multiplier: The initial sigma; None until it is computed from ``target_epsilon``.
        target_epsilon: The epsilon that the whole run may spend; None for no limit.
        target_delta: The delta of the guarantee; None if the defence computes it from the data.
        seeded: Whether the noise can be guessed, so that epsilon is infinite.
        max_hardenings: The number of hardenings that are allowed; None for no limit.
        sampling: The sampling scheme of the batches.
        owner: The class name of the defence, for messages.
        accountant: The accountant, which counts releases.
        notches: The number of hardenings so far.
        rate: The probability of each example to be in a batch; None until the data are known.
        delta: The delta of the guarantee; None until the data are known, unless it was passed.
        is_counted: Whether :meth:`count_release` counts; False while an audit runs a release again.
    """

    kind: Account
    noise_multiplier: float | None
    target_epsilon: float | None
    target_delta: float | None
    _: KW_ONLY
    seeded: bool
    max_hardenings: int | None
    sampling: SamplingScheme = "poisson"
    owner: str = "DPSGD"

    def __post_init__(self) -> None:
        self.is_counted = True
        self.notches = 0
        self.rate: float | None = None
        self.delta = self.target_delta
        self.accountant = self._new_accountant(None)
        self._calibrates = self.noise_multiplier is None  # whether sigma follows from the target
        # The number of releases for which sigma was computed: so many are within the target.
        self._covered = 0

    @property
    def privacy(self) -> Privacy:
        """Return epsilon and delta of the releases so far, and the noise of the next.

        Raises:
            DefenseError: The training data are not known yet.
        """
        if self.rate is None or self.delta is None or self.noise_multiplier is None:
            raise DefenseError(f"{self.owner}.privacy is known once a fit has begun")
        account, epsilon = self.accountant, math.inf
        if isinstance(account, RenyiFilter):
            epsilon = account.epsilon
        elif not self.seeded:
            epsilon = account.epsilon(self.delta, slack=EPSILON_SLACK)
            if self.target_epsilon is not None and epsilon > self.target_epsilon:
                epsilon = account.epsilon(self.delta)
        return Privacy(epsilon, self.delta, self.noise_now, self.rate, account.steps)

    def curve(self) -> Curve:
        """Return the pairs (epsilon, delta) that hold for the releases so far.

        Raises:
            DefenseError: The training data are not known yet.
        """
        delta = self.privacy.delta
        if isinstance(self.accountant, RenyiFilter):
            return ((self.accountant.epsilon, delta),)
        if self.seeded:
            return ()
        return accounting.curve_of(self.accountant.history, self.accountant.kind, self.sampling)

    @property
    def noise_now(self) -> float:
        """Return sigma of the next release, with all hardenings.

        Raises:
            DefenseError: Sigma depends on the training data, which are not known yet.
        """
        if self.noise_multiplier is None:
            raise DefenseError(f"{self.owner}: no training data yet, so the noise is not known")
        return self.noise_multiplier * HARDEN_FACTOR**self.notches

    @property
    def can_harden(self) -> bool:
        """Return whether noise may be increased during the run, which needs a filter."""
        return self.kind == "filter" and self.max_hardenings != 0

    def harden(self) -> str | None:
        """Multiply the noise by :data:`HARDEN_FACTOR`, from the next release on.

        Returns:
            A message about the change; None if the noise may not be increased further.
        """
        if not self.can_harden or self.notches == self.max_hardenings:
            return None
        previous = self.noise_now
        if previous * HARDEN_FACTOR > accounting.MAX_NOISE:
            return None
        self.notches += 1
        return f"{self.owner.lower()}: noise multiplier {previous:g} -> {self.noise_now:g}"

    def open_ledger(self, path: LedgerPath) -> None:
        """Record every release in a file from now on, and continue with its releases.

        Raises:
            DefenseError: The file is not a ledger, or cannot be read or written.
        """
        accountant = self._new_accountant(path)
        accountant.load_state_dict(self.accountant.state_dict())
        self.accountant = accountant

    def settle(self, rate: float, delta: float, planned_steps: Callable[[], int]) -> None:
        """Compute the noise, once the training data are known.

        If nothing was released yet, noise of an earlier call is computed again, because the data or
        the number of steps may have changed.

        Args:
            rate: The probability of each example to be in a batch.
            delta: The delta of the guarantee.
            planned_steps: Returns the planned number of releases of the run; called only if needed.

        Raises:
            DefenseError: No noise fits the target, not even one release fits the filter's budget,
                or noise or rate differ from those of earlier releases, which only a filter allows.
            BudgetSpent: A resumed run has cost more than ``target_epsilon`` already.
        """
        self.rate, self.delta = rate, delta
        if self.noise_multiplier is None or (self._calibrates and self.accountant.steps == 0):
            assert self.target_epsilon is not None
            steps = planned_steps()
            kind: accounting.AccountantKind = "prv" if self.kind == "prv" else "rdp"
            self.noise_multiplier = accounting.noise_multiplier_for(
                self.target_epsilon, delta, rate, steps, kind, self.sampling
            )
            self._covered = steps if self.accountant.steps == 0 else 0
        if isinstance(self.accountant, RenyiFilter):
            self.accountant.begin(self.noise_multiplier, rate)
        self.check_not_overdrawn()

    def check_not_overdrawn(self) -> None:
        """Raise an error if the releases so far cost more than ``target_epsilon``.

        A filter checks that in every release, and allows that noise and rate change.

        Raises:
            DefenseError: The earlier releases were made with another noise or rate.
            BudgetSpent: They cost more. The message has their epsilon.
        """
        account = self.accountant
        if isinstance(account, RenyiFilter) or not account.history:
            return
        assert self.rate is not None
        noise = 0.0 if self.seeded else self.noise_now
        if not any(
            math.isclose(noise, sigma, rel_tol=1e-9) and self.rate == rate
            for sigma, rate, _ in account.history
        ):
            sigma, rate, _ = account.history[-1]
            raise DefenseError(
                f"{self.owner}: noise_multiplier={noise:g} and a sample rate of {self.rate:g} are "
                f"not those of the {account.steps} releases before, {sigma:g} and {rate:g}: "
                "continue with those, or begin a new run (accountant='filter' lets them change)"
            )
        if self.target_epsilon is None or self.delta is None or account.steps <= self._covered:
            return
        epsilon = account.epsilon(self.delta)
        if epsilon > self.target_epsilon:
            raise BudgetSpent(
                f"{self.owner}: the {account.steps} releases of the checkpoint or ledger cost "
                f"epsilon={epsilon:.4g} already: raise target_epsilon={self.target_epsilon}, or "
                "begin a new run from a model that this data did not train"
            )

    def check_affords_another(self) -> None:
        """Raise an error for a release that the budget does not cover.

        Raises:
            BudgetSpent: The budget is spent. The message has the number of releases.
        """
        if not self.affords_another():
            raise BudgetSpent(
                f"{self.owner}: after {self.accountant.steps} releases one more would cost more "
                f"than target_epsilon={self.target_epsilon}; it was not made"
            )

    def affords_another(self) -> bool:
        """Return whether one more release fits, with the present noise."""
        if self.target_epsilon is None:
            return True
        assert self.rate is not None
        assert self.delta is not None
        if isinstance(self.accountant, RenyiFilter):
            return self.accountant.allows(self.noise_now, self.rate)
        if self.accountant.steps < self._covered:
            return True
        return self.accountant.allows(self.target_epsilon, self.delta, self.noise_now, self.rate)

    def count_release(self) -> None:
        """Count a release that is about to happen; noise that can be guessed counts as 0.

        Raises:
            DefenseError: Earlier releases had another noise or rate, the ledger cannot be written,
                or a filter's budget is spent.
        """
        assert self.rate is not None
        if self.is_counted:
            self.accountant.step(0.0 if self.seeded else self.noise_now, self.rate)

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the accountant's state, the rate, delta, sampling, noise and hardenings."""
        state: dict[str, Tensor | int | float | str] = {}
        if self.rate is not None and self.delta is not None:
            state["rate"], state["delta"] = self.rate, self.delta
            state["sampling"] = self.sampling
        if self.notches:
            state["notches"] = self.notches
        if self.noise_multiplier is not None:
            state["noise_multiplier"] = self.noise_multiplier
        for key, value in self.accountant.state_dict().items():
            state[_ACCOUNT + key] = value
        return state

    def load_state_dict(self, state: State, releases: int) -> None:
        """Continue the account, in which no count ever decreases.

        Noise that was computed from ``target_epsilon`` is kept.

        Args:
            state: The result of :meth:`state_dict`.
            releases: The number of releases at that time.

        Raises:
            DefenseError: They were made under another kind of accountant or sampling, or, with a
                filter, under another budget.
        """
        account = {k.removeprefix(_ACCOUNT): v for k, v in state.items() if k.startswith(_ACCOUNT)}
        rows = torch.as_tensor(account.get("releases", torch.zeros(0, 3)))
        n_recorded = int(rows[:, 2].sum())
        was_filter = "orders" in account
        sampling = state.get("sampling", self.sampling)
        # Keys in states of earlier versions, of rules that no longer exist.
        removed_keys = {"truncated_at", "factors", "mechanism"}
        is_other = was_filter != (self.kind == "filter") or sampling != self.sampling
        if (releases or n_recorded) and (is_other or removed_keys & state.keys()):
            raise DefenseError(
                f"{self.owner}: the checkpoint's {releases or n_recorded} releases were made with "
                "another accountant, sampling or noise: continue with them, or begin a new run"
            )
        self.notches = max(self.notches, int(state.get("notches", 0)))
        if self.rate is None and "rate" in state:
            # `privacy` needs both before the data are known.
            self.rate = float(state["rate"])
            self.delta = float(state["delta"]) if self.delta is None else self.delta
        if self._calibrates and "noise_multiplier" in state:
            self.noise_multiplier = float(state["noise_multiplier"])
        self._covered = 0
        self.accountant.load_state_dict(account)

    def _new_accountant(self, ledger: LedgerPath | None) -> AnyAccountant:
        """Return an accountant of this kind without releases, or with those of the ledger."""
        if self.kind == "filter":
            assert self.target_epsilon is not None
            assert self.target_delta is not None
            return RenyiFilter(
                self.target_epsilon, self.target_delta, ledger, sampling=self.sampling
            )
        return Accountant(self.kind, ledger, sampling=self.sampling)
