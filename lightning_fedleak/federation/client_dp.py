"""Client-level differential privacy of a federation's rounds: clipping, noise, and the account.

Each client's update is clipped. The sum of the clipped updates gets Gaussian noise, and is divided
by the *expected* number of clients in a round, which does not depend on the data. If a client
fails, withholds its update, or returns one that cannot be read, the update counts as zero. All
clients have the same weight. The account keeps the epsilon that all releases (noised means, or
noised updates) together have spent. To *harden* is to double the noise, when a *gate* (a threshold
on the leakage that attacks measure) is exceeded. Only a *filter*, an accountant that keeps a fixed
budget, allows that.
"""

import math
import os
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor

from lightning_fedleak.defenses import Defense, DefenseContext, DefenseError, Privacy, RenyiFilter
from lightning_fedleak.defenses.accounting import Accountant, AccountantKind, Budget, SamplingScheme
from lightning_fedleak.defenses.accounting.ledger import check_terms
from lightning_fedleak.defenses.base import check_choice, check_integer, check_number
from lightning_fedleak.defenses.noise import base_of, noise_key, standard_normal
from lightning_fedleak.federation.updates import Release, Update, UpdateError, UpdateSum, clipped
from lightning_fedleak.messages import rank_zero_warn

C = TypeVar("C")  # the type of a client's name

# How often the noise may be doubled: up to 2**10 = 1024 times the first noise. If an update still
# exceeds a gate then, it is withheld.
MAX_HARDENINGS = 10

ClientSampling = Literal["all", "poisson", "fixed"]
Trusted = Literal["central", "local", "secure_aggregation"]


@dataclass(frozen=True)
class ClientReleaseSettings:
    """The rarely changed settings of a client's releases.

    Attributes:
        dropouts: the number of clients in a round whose share of the noise may be missing, with
            ``trust="secure_aggregation"``.
        seed: the seed of the noise, for tests only. Anyone who knows it can subtract the noise, so
            epsilon is infinite.
    """

    dropouts: int = 0
    seed: int | None = None


class ClientDP(Defense):
    """Clips each client's whole update, adds Gaussian noise, and keeps the account of all rounds.

    The unit of privacy is a client with all of its data. ``trust`` says who adds the noise, and so
    against whom the guarantee holds:

    - ``"central"``: a trusted server sees every update, and adds noise to the sum (:meth:`mean`).
      The guarantee holds against whoever sees the models of all rounds.
    - ``"local"``: each client adds all of the noise itself (:meth:`privatized`). The guarantee also
      holds against the server.
    - ``"secure_aggregation"``: each client adds a share of the noise (:meth:`privatized`), and the
      server sees only the sum, which has all of the noise. The guarantee holds against a server
      that does not break the aggregation, if at most ``dropouts`` clients fail or reveal their
      share to the server. A secure aggregation rounds to integers, which is not accounted for.

    The sampling of clients (:meth:`drawn`) defines the neighbours:

    ================  ===========================  ======================  =====================
    ``sampling``      neighbours                   sensitivity of the sum  accountants
    ================  ===========================  ======================  =====================
    ``"all"``         a client added or removed    ``clip``                prv, rdp, filter
    ``"poisson"``     a client added or removed    ``clip``                prv, rdp, filter
    ``"fixed"``       a client's data replaced     ``2 * clip``            prv, rdp, filter
    ================  ===========================  ======================  =====================

    Sampling amplifies privacy only under central trust, and only if nobody but the server knows
    which clients took part. With the other two kinds of trust the server knows them, so that each
    round counts without amplification, and neighbours differ in one client's data, which are
    replaced by any other data (``2 * clip``).

    Epsilon does not cover numbers that clients send besides their update (the number of examples,
    metrics), logs of leakage, and decisions to increase the noise that depend on data.

    Examples:
        >>> from lightning_fedleak import ClientDP
        >>> dp = ClientDP(clip=0.5, noise_multiplier=2.0, clients=100, target_delta=1e-3)
        >>> dp.trust
        'central'

    Args:
        clip: the largest 2-norm of a client's update, over all shared tensors together.
        noise_multiplier: the standard deviation of the noise on the sum, divided by ``clip``. With
            None it is computed from ``target_epsilon`` and ``rounds``.
        clients: the number of clients in the federation.
        per_round: the number of clients in a round: the mean number (``"poisson"``) or the exact
            number (``"fixed"``). Leave it out with ``"all"``.
        sampling: how the clients of a round are sampled, see above.
        trust: who adds the noise, see above.
        target_delta: the delta of the guarantee, which must be below ``1 / clients``.
        target_epsilon: the budget of all rounds together. A round that would exceed it is refused.
        rounds: the planned number of rounds, from which the noise multiplier is computed.
        accountant: ``"prv"`` (a tight accountant, like PLD), ``"rdp"`` (Renyi accounting), or
            ``"filter"`` (a Renyi filter). With a filter the noise can be increased during the run
            (:meth:`harden` doubles it, at most ten times) within (``target_epsilon``,
            ``target_delta``).
        ledger: a file that keeps the count of releases if the process crashes. The file
            ``<ledger>.terms`` next to it holds the terms of the account. With ``trust="central"``
            the server keeps the ledger, otherwise each client keeps its own.
        release: the number of shares of noise that may be missing, and a seed for tests:
            :class:`ClientReleaseSettings`.

    Raises:
        DefenseError: a value is out of range, or the ledger has other terms.
        BudgetSpent: the releases in the ledger have cost more than ``target_epsilon``.
    """

    name = "client_dp"

    def __init__(
        self,
        clip: float,
        noise_multiplier: float | None = None,
        *,
        clients: int,
        target_delta: float,
        per_round: float | None = None,
        sampling: ClientSampling = "all",
        trust: Trusted = "central",
        target_epsilon: float | None = None,
        rounds: int | None = None,
        accountant: AccountantKind | Literal["filter"] = "prv",
        ledger: str | os.PathLike[str] | None = None,
        release: ClientReleaseSettings | None = None,
    ) -> None:
        release = release or ClientReleaseSettings()
        self.clip = float(check_number("ClientDP: clip", clip, above=0))
        check_number("ClientDP: target_epsilon", target_epsilon, above=0, optional=True)
        check_number("ClientDP: noise_multiplier", noise_multiplier, above=0, optional=True)
        check_integer("ClientDP: rounds", rounds, optional=True)
        check_integer("ClientDP: clients", clients)
        hint = "publishing one client's data at random must not count as private"
        check_number("ClientDP: target_delta", target_delta, above=0, below=1 / clients, hint=hint)
        check_choice("ClientDP: accountant", accountant, ("prv", "rdp", "filter"))
        computes_noise = noise_multiplier is None
        needs_epsilon = computes_noise or accountant == "filter"
        if (computes_noise and rounds is None) or (needs_epsilon and target_epsilon is None):
            raise DefenseError(
                "ClientDP: pass noise_multiplier, or target_epsilon and rounds. accountant='filter'"
                " keeps a budget, and needs target_epsilon"
            )
        self.clients = clients
        self.sampling: ClientSampling = sampling
        self.per_round = _expect_per_round(sampling, per_round, clients)
        self.trust: Trusted = trust
        self.dropouts = release.dropouts
        _check_trust(trust, sampling, release, self.per_round)
        # Sampling amplifies privacy only if a trusted server hides who takes part. Only then does
        # the account use the sample rate, and the scheme of the sampling.
        amplified = trust == "central" and sampling != "all"
        self.replaces = trust != "central" or sampling == "fixed"
        accounted_as: SamplingScheme = (
            "without_replacement" if amplified and sampling == "fixed" else "poisson"
        )
        self.rounds = rounds
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.seed = release.seed
        self._rate = self.per_round / self.clients if amplified else 1.0
        self._budget = Budget(
            accountant,
            None if noise_multiplier is None else noise_multiplier / self._sensitivity,
            target_epsilon,
            target_delta,
            seeded=release.seed is not None,
            max_hardenings=MAX_HARDENINGS,
            sampling=accounted_as,
            owner="ClientDP",
        )
        self.ledger = None if ledger is None else str(ledger)
        if ledger is not None:
            check_terms(Path(ledger), self._terms())
            self._budget.open_ledger(ledger)
        self._budget.settle(self._rate, target_delta, lambda: rounds or 0)
        self.guarantee = self._describe_guarantee()
        self._entropy = os.urandom(32)
        self._releases = 0

    # ---- the guarantee ----------------------------------------------------------------------

    @property
    def _sensitivity(self) -> float:
        """The largest distance between the sums of two neighbours, divided by the clip norm."""
        return 2.0 if self.replaces else 1.0

    @property
    def noise_multiplier(self) -> float:
        """The current standard deviation of the noise on the sum, divided by the clip norm."""
        return self._budget.noise_now * self._sensitivity

    @property
    def own_noise_std(self) -> float:
        """The standard deviation of a client's noise on each entry of its update; 0 without noise.

        Under a secure aggregation it is that of a share: the shares of all clients of a round, even
        without ``dropouts`` of them, add up to all of the noise.
        """
        if self.trust == "central":
            return 0.0
        std = self.noise_multiplier * self.clip
        if self.trust == "local":
            return std
        return std / math.sqrt(int(self.per_round) - self.dropouts)

    @property
    def mean_noise_std(self) -> float:
        """The standard deviation of the noise on each entry of the mean over clients."""
        if self.trust == "central":
            return self.noise_multiplier * self.clip / self.per_round
        return self.own_noise_std / math.sqrt(self.per_round)

    def relative_noise(self, numbers: int) -> float:
        """Return the norm of the noise on the mean, divided by the largest norm of a mean update.

        It does not depend on data. Above 1 the noise is larger than what clients learned in a
        round.

        Args:
            numbers: the number of trained entries.
        """
        return self.mean_noise_std * math.sqrt(numbers) / self.clip

    @property
    def accountant(self) -> Accountant | RenyiFilter:
        """The accountant. Its noise multipliers are relative to the sensitivity, not to clip."""
        return self._budget.accountant

    @property
    def privacy(self) -> Privacy:
        """The privacy spent by the releases so far, with the accounted noise."""
        return self._budget.privacy

    @property
    def acts_on_gradients(self) -> bool:
        """Whether updates are changed before they leave a client or the server: always true."""
        return True

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the settings, for the record of a run."""
        return {
            **super().settings(),
            "accountant": self._budget.kind,
            "noise_multiplier": self.noise_multiplier,
        }

    def before_setup(self, context: DefenseContext) -> None:
        """Raise an error, because this is not a defence of a Trainer's steps.

        Raises:
            DefenseError: always.
        """
        raise DefenseError(
            "ClientDP acts on the update of a federation's round. In a Trainer use DPSGD (for "
            "examples) or GradientNoise"
        )

    @property
    def can_harden(self) -> bool:
        """Whether the noise can be increased, which needs ``accountant="filter"``.

        Under a secure aggregation it cannot. A client would increase only its own share, and the
        sum would have less noise than the client's account assumes.
        """
        return self.trust != "secure_aggregation" and self._budget.can_harden

    def harden(self) -> str | None:
        """Double the noise from the next release on; return the change in words, or None."""
        return self._budget.harden() if self.can_harden else None

    # ---- a round ----------------------------------------------------------------------------

    def drawn(self, clients: Sequence[C]) -> list[C]:
        """Return the sampled clients of a round, with randomness of the operating system.

        Args:
            clients: all clients of the federation.

        Raises:
            DefenseError: the number of clients is not ``clients`` of this object.
        """
        if len(clients) != self.clients:
            raise DefenseError(
                f"ClientDP(clients={self.clients}) samples from all clients of the federation, but "
                f"{len(clients)} are there: pass also clients that cannot be reached"
            )
        source = random.SystemRandom()
        if self.sampling == "fixed":
            return source.sample(list(clients), int(self.per_round))
        if self.sampling == "poisson":
            rate = self.per_round / self.clients
            return [client for client in clients if source.random() < rate]
        return list(clients)

    def mean(self, updates: Mapping[C, Update | None], like: Update) -> Release:
        """Return the noised mean of a round's updates, on a trusted server. It is one release.

        All clients have the same weight. If updates arrive one after the other, use :meth:`begin`.

        Args:
            updates: the update of every sampled client; None if the client failed or withheld it,
                which counts as zero. An update that cannot be read (other names or shapes, NaN)
                counts as zero too.
            like: tensors with the names, shapes and dtypes of the shared parameters.

        Raises:
            DefenseError: the same as in :meth:`begin`.
            BudgetSpent: one more release would cost more than ``target_epsilon``.
        """
        update_sum = self.begin(updates, like)
        for client, update in updates.items():
            if update is not None:
                update_sum.add(client, update)
        return update_sum.end()

    def begin(self, clients: Collection[C], like: Update) -> UpdateSum[C]:
        """Begin a release on a trusted server. Updates are added as they arrive.

        Args:
            clients: the sampled clients.
            like: tensors with the names, shapes and dtypes of the shared parameters.

        Raises:
            DefenseError: the server does not add the noise, or there are more clients than could be
                sampled.
        """
        if self.trust != "central":
            raise DefenseError(
                f"ClientDP(trust={self.trust!r}): the clients add the noise themselves (privatized)"
            )
        max_clients = int(self.per_round) if self.sampling == "fixed" else self.clients
        name, hint = "ClientDP: number of clients in a round", "use drawn()"
        check_integer(name, len(clients), at_least=0, at_most=max_clients, hint=hint)
        return UpdateSum(clients, like, self.clip, self._release_sum)

    def _release_sum(self, update_sum: UpdateSum[Any]) -> dict[str, Tensor]:
        """Return the noised mean of a sum of clipped updates, and count it as one release."""
        std = self._record_release() * update_sum.clip
        return self._add_noise(update_sum.total, std, update_sum.like, 1 / self.per_round)

    def privatized(self, update: Update | None, like: Update) -> dict[str, Tensor]:
        """Return a client's clipped update with the client's noise. It is one release.

        Args:
            update: the update; None to withhold it. A withheld update, or one that cannot be read
                (NaN), is replaced by zero with the same noise: a failure would reveal the data.
            like: tensors with the names, shapes and dtypes of the shared parameters.

        Raises:
            DefenseError: the server adds the noise.
            BudgetSpent: one more release would cost more than ``target_epsilon``.
        """
        clipped_update = self._clip_or_zero(update, like)
        self._record_release()
        return self._add_noise(clipped_update, self.own_noise_std, like)

    def rehearsed(self, update: Update | None, like: Update) -> dict[str, Tensor]:
        """Return the same as :meth:`privatized`, but with independent noise, and not accounted for.

        The result must not be released. Attacks read it in place of the update that is released.
        So the decision to withhold depends on noise that nobody sees, and the account of the
        release still holds.
        """
        clipped_update = self._clip_or_zero(update, like)
        return self._add_noise(clipped_update, self.own_noise_std, like, stream="rehearsal")

    def check_affords_another(self) -> None:
        """Raise an error before training if the budget does not cover this round's release.

        Raises:
            BudgetSpent: one more release would cost more than ``target_epsilon``.
        """
        self._budget.check_affords_another()

    def check_client(self, *, masked: bool, mend: str) -> None:
        """Refuse a setup in which a client's noise is too small, or its account could be lost.

        Args:
            masked: whether a secure aggregation hides each client's update from the server.
            mend: what to do to set up a secure aggregation, for the message.

        Raises:
            DefenseError: there is no ledger, or an update with a share of noise is not masked.
        """
        problem = None
        if self.ledger is None:
            problem = (
                "a restart of a client's process would lose its account: pass "
                "ClientDP(ledger=...), a path for each client"
            )
        elif self.trust == "secure_aggregation" and not masked:
            problem = (
                "ClientDP(trust='secure_aggregation'): nothing here masks this client's update, "
                f"which has only a share of the noise: {mend}"
            )
        if problem:
            raise DefenseError(problem)

    def check_rounding(self, like: Update) -> None:
        """Refuse a model whose dtype is so coarse that it rounds a client's share of noise away.

        Shares add up to all of the noise only before they are rounded. Rounding to steps of one
        standard deviation of a share changes the distribution of the sum by ``exp(-2 pi^2)``, 3e-9.
        With far larger steps a share has no effect.

        Args:
            like: the trained tensors that were sent.

        Raises:
            DefenseError: a tensor's dtype is too coarse. The message names the tensor.
        """
        std = self.own_noise_std
        for name, tensor in like.items() if self.trust == "secure_aggregation" else ():
            eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 1.0
            step = eps * float(tensor.detach().abs().max()) if tensor.numel() else 0.0
            if not step <= std:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise DefenseError(
                    f"ClientDP: '{name}' was sent in {dtype} in steps of {step:.2g}, which round a "
                    f"share of noise of {std:.2g} away: send float32, or increase clip"
                )

    def check_server(self, owner: str) -> None:
        """Refuse a server that would not add the noise, or whose account could be lost.

        Args:
            owner: the name of the class that runs on the server, for the message.

        Raises:
            DefenseError: the server does not add the noise, or there is no ledger.
        """
        if self.trust != "central" or self.ledger is None:
            raise DefenseError(
                f"{owner} adds the noise on the server: pass ClientDP(trust='central', ledger=...)"
            )

    def _clip_or_zero(self, update: Update | None, like: Update) -> dict[str, Tensor]:
        """Return a client's clipped update; zero if it is withheld or cannot be read."""
        if self.trust == "central":
            raise DefenseError(
                "ClientDP(trust='central'): the server adds the noise. If the client is to add it, "
                "pass trust='local'"
            )
        if update is not None:
            try:
                return clipped(update, self.clip, like)
            except UpdateError as error:
                rank_zero_warn(f"ClientDP: {error}. Zero leaves in its place, with the same noise")
        return {n: torch.zeros_like(t, dtype=torch.float64) for n, t in like.items()}

    def _record_release(self) -> float:
        """Count a release before it is made, and return its noise multiplier."""
        self.check_affords_another()
        self._budget.count_release()
        return self._budget.noise_now * self._sensitivity

    def _add_noise(
        self, total: Update, std: float, like: Update, scale: float = 1.0, stream: str = "client"
    ) -> dict[str, Tensor]:
        """Return ``scale`` times a sum with new noise, in the dtypes of ``like``.

        Args:
            total: the sum, or one update, by name.
            std: the standard deviation of the noise on each entry of ``total``.
            like: tensors with the dtypes of the result.
            scale: the factor by which the sum and its noise are multiplied.
            stream: the name of the noise's random stream: one for releases, one for rehearsals.
        """
        release, self._releases = self._releases, self._releases + 1
        base, noised = base_of(self._entropy, self.seed), {}
        for index, (name, tensor) in enumerate(total.items()):
            key = noise_key(base, release, index, client=0, name=self.name, stream=stream)
            draw = standard_normal(key, tensor.shape, tensor.device, tensor.dtype)
            noised[name] = tensor.add(draw, alpha=std).mul_(scale).to(like[name].dtype)
        return noised

    # ---- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the account of the releases, and the current noise."""
        return self._budget.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the count of releases of a checkpoint. No count ever decreases."""
        self._budget.load_state_dict(state, self._budget.accountant.steps)
        self._budget.check_not_overdrawn()

    def _terms(self) -> dict[str, object]:
        """Return the terms of the account. The terms of an existing ledger must be the same."""
        return {
            "unit": "client",
            "clients": self.clients,
            "sampling": self.sampling,
            "per_round": self.per_round,
            "trust": self.trust,
        }

    def _describe_guarantee(self) -> str:
        """Return the guarantee in words: against whom it holds, and what it covers."""
        if self.seed is not None:
            return "none: whoever knows or guesses `seed` can subtract the noise (for tests only)"
        adversary = {
            "central": "whoever sees the models of all rounds, except the trusted server",
            "local": "whoever sees each client's updates, including the server",
            "secure_aggregation": (
                "a server that sees only the sum of updates, if the aggregation hides single "
                f"updates and at most {self.dropouts} clients of a round drop out or collude; its "
                "rounding to integers is not accounted for"
            ),
        }[self.trust]
        neighbours = "replaced by any other data" if self.replaces else "added or removed"
        secret = " Who takes part in a round must stay secret." if self._rate < 1 else ""
        return (
            f"against {adversary}: (epsilon, delta)-differential privacy of one client, all of its "
            f"data, {neighbours}, for all rounds together, with the epsilon that `privacy` gives."
            f"{secret} Not covered: what clients send besides their updates, leakage logs, and "
            "decisions to increase the noise that depend on data."
        )


def _expect_per_round(sampling: str, per_round: float | None, clients: int) -> float:
    """Check ``sampling`` and ``per_round``; return the expected number of clients in a round."""
    check_choice("ClientDP: sampling", sampling, get_args(ClientSampling))
    if sampling == "all":
        hint = "with sampling='all' each client takes part"
        check_choice("ClientDP: per_round", per_round, (None, clients), hint=hint)
        return float(clients)
    hint = f"sampling={sampling!r} needs per_round=, the number of clients in a round"
    value: Any = per_round
    value = check_number("ClientDP: per_round", value, above=0, at_most=clients, hint=hint)
    if sampling == "fixed" and value % 1:
        raise DefenseError(f"ClientDP: with sampling='fixed' per_round={value!r} must be whole")
    return float(value)


def _check_trust(
    trust: str, sampling: str, release: ClientReleaseSettings, per_round: float
) -> None:
    """Refuse settings under which shares of noise do not add up to the accounted noise."""
    check_choice("ClientDP: trust", trust, get_args(Trusted))
    adds_shares = trust == "secure_aggregation"
    if adds_shares:
        hint = "shares of noise add up only if the number of clients in a round is known"
        name = "ClientDP: with trust='secure_aggregation' sampling"
        check_choice(name, sampling, ("fixed", "all"), hint=hint)
    name, limit = "ClientDP: dropouts", math.ceil(per_round) - 1 if adds_shares else 0
    clients = f"fewer than the {per_round:g} clients of a round"
    hint = clients if adds_shares else "for shares of noise"
    check_integer(name, release.dropouts, at_least=0, at_most=limit, hint=hint)
