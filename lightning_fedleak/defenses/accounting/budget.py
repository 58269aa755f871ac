"""The budget of DP-SGD: its noise, the account of its releases, and whether one more fits."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedleak.defenses.accounting import accounting
from lightning_fedleak.defenses.accounting.account import Accountant, RenyiFilter
from lightning_fedleak.defenses.accounting.ledger import LedgerPath, client_path
from lightning_fedleak.defenses.accounting.renyi import SamplingScheme
from lightning_fedleak.defenses.base import Curve, DefenseError, Privacy, State, refuse
from lightning_fedleak.defenses.noise import HARDEN_FACTOR

EPSILON_SLACK = 0.02  # share of more releases in the epsilon that is reported; saves calls of PRV
_ACCOUNT = "accountant/"

Account = accounting.AccountantKind | Literal["filter"]
AnyAccountant = Accountant | RenyiFilter


class BudgetSpent(DefenseError):
    """One more release would cost more than ``target_epsilon``; it was not made."""


@dataclass(eq=False)
class Budget:
    """The noise of the next release, the account of all before it, and whether one more fits.

    Attributes:
        kind: how to account.
        noise_multiplier: sigma at the beginning; None until it is found from ``target_epsilon``.
        target_epsilon: what the whole run may cost; None for no limit.
        target_delta: delta of the guarantee; None for a tenth of one over the examples.
        seeded: whether the noise can be guessed, so that epsilon is infinite.
        max_hardenings: hardenings that are allowed; None for no limit.
        sampling: how batches are drawn.
        owner: class of the defence, for messages.
        accountant: counts releases.
        notches: how often the noise was turned up.
        rate: chance of each example to be in a batch; None until the training data are known.
        delta: The delta of the guarantee; None until then, unless it was passed.
        next_release: what :meth:`settle_next` returned; None once anything else has changed.
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
    next_release: tuple[float, Callable[[], None]] | None = field(
        default=None, init=False, repr=False
    )

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and forget the next release, which may follow from it."""
        vars(self)["next_release"] = None
        vars(self)[name] = value

    def __post_init__(self) -> None:
        self.notches = 0
        self.rate: float | None = None
        self.delta = self.target_delta
        self.accountant = self._new_accountant(None)
        self._calibrates = self.noise_multiplier is None
        self._covered = 0  # releases for which the noise was found, all of its kind

    @property
    def privacy(self) -> Privacy:
        """Return epsilon and delta of the releases so far, and the noise of the next.

        Raises:
            DefenseError: before the training data are known.
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
            DefenseError: before the training data are known.
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
            DefenseError: before the training data are known, where sigma is found from them.
        """
        if self.noise_multiplier is None:
            raise DefenseError(f"{self.owner}: no training data yet, so the noise is not known")
        return self.noise_multiplier * HARDEN_FACTOR**self.notches

    @property
    def can_harden(self) -> bool:
        """Return whether noise may be turned up: all but a filter need it fixed before the run."""
        return self.kind == "filter" and self.max_hardenings != 0

    def harden(self) -> str | None:
        """Multiply the noise by :data:`HARDEN_FACTOR`, from the next release on.

        Returns:
            What changed, in words; None where the noise may not be larger.
        """
        if not self.can_harden or self.notches == self.max_hardenings:
            return None
        previous = self.noise_now
        if previous * HARDEN_FACTOR > accounting.MAX_NOISE:
            return None
        self.notches += 1
        return f"{self.owner.lower()}: noise multiplier {previous:g} -> {self.noise_now:g}"

    def open_ledger(
        self, path: LedgerPath, client: int = 0, clients: int = 1, unit: str | None = None
    ) -> None:
        """Record every release in a file from now on, and continue with its releases.

        Args:
            path: The path of the file, or with a ``unit`` of the files of all clients.
            client: whose file it is.
            clients: how many there are.
            unit: The unit of privacy, by which files are distinguished; None for the path as it is.

        Raises:
            DefenseError: the file holds something else, or cannot be written.
        """
        if unit is not None:
            path = client_path(path, client, clients, unit)
        accountant = self._new_accountant(path)
        accountant.load_state_dict(self.accountant.state_dict())
        self.accountant = accountant

    def settle(self, rate: float, delta: float, planned_steps: Callable[[], int]) -> None:
        """Find the noise, now that the training data are known.

        Noise of an earlier call is found again as long as nothing was released with it, because the
        data or the number of steps may have changed.

        Args:
            rate: chance of each example to be in a batch.
            delta: The delta of the guarantee.
            planned_steps: returns how many releases the run is going to make; called if needed.

        Raises:
            DefenseError: no noise fits the target, not one release fits the filter's budget, or
                noise or rate are not those of earlier releases, which only a filter allows.
            BudgetSpent: a resumed run has cost more than ``target_epsilon`` already.
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
        """Raise an error where the releases so far cost more than ``target_epsilon``.

        A filter checks that in every release.

        Raises:
            DefenseError: the earlier releases were made with another noise or rate.
            BudgetSpent: says by how much.
        """
        account = self.accountant
        self._check_unchanged()
        if self.target_epsilon is None or self.delta is None or isinstance(account, RenyiFilter):
            return
        if account.steps <= self._covered:
            return
        epsilon = account.epsilon(self.delta)
        if epsilon > self.target_epsilon:
            raise BudgetSpent(
                f"{self.owner}: the {account.steps} releases of the checkpoint or ledger cost "
                f"epsilon={epsilon:.4g} at delta={self.delta} already, more than "
                f"target_epsilon={self.target_epsilon}. Raise it, or begin a new run from a model "
                "that this data did not train."
            )

    def _check_unchanged(self) -> None:
        rows = self.accountant.history
        if isinstance(self.accountant, RenyiFilter) or not rows:
            return
        assert self.rate is not None
        noise = 0.0 if self.seeded else self.noise_now
        if not any(
            math.isclose(noise, sigma, rel_tol=1e-9) and self.rate == rate
            for sigma, rate, _ in rows
        ):
            raise DefenseError(
                f"{self.owner}: noise_multiplier={noise:g} and a sample rate of {self.rate:g} are "
                f"not those of the {self.accountant.steps} releases before, {rows[-1][0]:g} and "
                f"{rows[-1][1]:g} (noise of a seed counts as 0), and accountant={self.kind!r} "
                "holds for what is fixed before the run: go on with that noise, batch_size and "
                "data, or begin a new run (accountant='filter' lets them change)."
            )

    def check_affords_another(self) -> None:
        """Raise an error for a release that the budget does not cover.

        Raises:
            BudgetSpent: says how many were made.
        """
        if not self.affords_another():
            raise BudgetSpent(
                f"{self.owner}: after {self.accountant.steps} releases one more would cost more "
                f"than target_epsilon={self.target_epsilon} at delta={self.delta}. It was not "
                "made; the weights are those of the last."
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

    def settle_next(self) -> tuple[float, Callable[[], None]]:
        """Return sigma of the next releases, and a function that counts one before it happens.

        Noise that can be guessed counts as 0. Both hold until an attribute of this budget changes.

        Raises:
            DefenseError: releases before had another noise or rate. The function: the account
                cannot be written, or a filter's budget is spent.
        """
        assert self.rate is not None
        sigma = self.noise_now
        self.next_release = sigma, self.accountant.counter(0.0 if self.seeded else sigma, self.rate)
        return self.next_release

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return what releases were accounted as, the noise, and its hardenings."""
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

        Noise that was found from ``target_epsilon`` stays.

        Args:
            state: a result of :meth:`state_dict`.
            releases: how many had been made by then.

        Raises:
            DefenseError: they were made under another kind of accountant or of sampling, or, with
                a filter, under another budget.
        """
        account = {k.removeprefix(_ACCOUNT): v for k, v in state.items() if k.startswith(_ACCOUNT)}
        rows = torch.as_tensor(account.get("releases", torch.zeros(0, 3)))
        counted = int(rows[:, 2].sum())
        filtered = "orders" in account
        sampling = state.get("sampling", self.sampling)
        gone = {"truncated_at", "factors", "mechanism"}
        refusals = {
            f"{'' if filtered else 'not '}made under accountant='filter', and this run has "
            f"accountant={self.kind!r}. A budget holds from the first release on: go on with the "
            "accountant of the checkpoint, or begin a new run.": (
                filtered != (self.kind == "filter")
            ),
            f"accounted as sampling={sampling!r}, and this run's are as {self.sampling!r}. Draw as "
            "before, or begin a new run.": sampling != self.sampling,
            "drawn or noised by a rule that is gone (truncated batches, a noise schedule, "
            "correlated noise). Begin a new run.": gone & state.keys(),
        }
        owner = f"{self.owner}: the checkpoint's {releases or counted} releases were "
        refuse(owner, refusals if releases or counted else {})
        self.notches = max(self.notches, int(state.get("notches", 0)))
        if self.rate is None and "rate" in state:
            # Until the data are known, `privacy` needs them.
            self.rate = float(state["rate"])
            self.delta = float(state["delta"]) if self.delta is None else self.delta
        if self._calibrates and "noise_multiplier" in state:
            self.noise_multiplier = float(state["noise_multiplier"])
        self._covered = 0
        self.accountant.load_state_dict(account)

    def _new_accountant(self, ledger: LedgerPath | None) -> AnyAccountant:
        if self.kind == "filter":
            assert self.target_epsilon is not None
            assert self.target_delta is not None
            return RenyiFilter(
                self.target_epsilon, self.target_delta, ledger, sampling=self.sampling
            )
        return Accountant(self.kind, ledger, sampling=self.sampling)
