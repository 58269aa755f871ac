"""Differential privacy of a whole client: its update is clipped, noised, and accounted for.

Per round the sum of clipped updates gets Gaussian noise, and is divided by the number of clients
that is *expected*, which depends on nobody's data. A client that fails, withholds or returns what
cannot be read counts as zero. All clients weigh alike.
"""

from __future__ import annotations

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
from lightning_fedleak.defenses.checks import check_choice, check_integer, check_number
from lightning_fedleak.defenses.noise import base_of, noise_key, standard_normal
from lightning_fedleak.federation.updates import Release, Update, UpdateError, UpdateSum, clipped
from lightning_fedleak.messages import rank_zero_warn

C = TypeVar("C")

MAX_HARDENINGS = 10  # so that the noise grows at most 1024 times before an update is withheld


ClientSampling = Literal["all", "poisson", "fixed"]
Trusted = Literal["central", "local", "secure_aggregation"]


@dataclass(frozen=True)
class ClientReleaseSettings:
    """Rarely changed settings of a client's releases.

    Attributes:
        dropouts: with ``trust="secure_aggregation"``, number of clients in a round whose share of
            noise may be missing.
        seed: for tests only. Whoever knows the seed can remove the noise, so epsilon is infinite.
    """

    dropouts: int = 0
    seed: int | None = None


class ClientDP(Defense):
    """Clips each client's whole update, adds Gaussian noise, and keeps the account of all rounds.

    The unit of privacy is a client: all of its data, whatever they are. Who adds the noise, and so
    against whom it holds, is ``trust``:

    - ``"central"``: a server that sees every update as it is, is trusted with it, and adds noise to
      the sum (:meth:`mean`). It holds against whoever sees the models of all rounds.
    - ``"local"``: each client adds the whole noise itself (:meth:`privatized`). It holds against
      the server too.
    - ``"secure_aggregation"``: each client adds its share (:meth:`privatized`), and the server sees
      nothing but the sum, which carries the whole noise. It holds against a server that does not
      break the aggregation, while at most ``dropouts`` clients fail or tell the server their share.
      The rounding of a secure aggregation to whole numbers is not accounted.

    How clients are drawn (:meth:`drawn`) says what neighbours are:

    ================  ===========================  ======================  =====================
    ``sampling``      neighbours                   sensitivity of the sum  accountants
    ================  ===========================  ======================  =====================
    ``"all"``         a client added or removed    ``clip``                prv, rdp, filter
    ``"poisson"``     a client added or removed    ``clip``                prv, rdp, filter
    ``"fixed"``       a client's data replaced     ``2 * clip``            prv, rdp, filter
    ================  ===========================  ======================  =====================

    Sampling helps under central trust alone, and while nobody but the server knows who took part.
    Otherwise the server knows, each round counts in full, and neighbours differ by one client's
    data replaced by any other (``2 * clip``).

    Not covered: numbers that clients send besides their update (how many examples, metrics), what
    is logged of leakage, and why noise was turned up in sight of data.

    Args:
        clip: largest 2-norm of a client's update, all shared tensors together.
        noise_multiplier: standard deviation of the noise on the sum, over ``clip``; None: found
            from ``target_epsilon`` and ``rounds``.
        clients: of the whole federation.
        per_round: how many take part in a round: on average (``"poisson"``) or always
            (``"fixed"``). Left out with ``"all"``.
        sampling: how they are drawn.
        trust: see above.
        target_delta: of the guarantee; below one over ``clients``.
        target_epsilon: what all rounds together may cost; a round beyond is refused.
        rounds: that are planned; needed where the noise is to be found.
        accountant: ``"prv"`` (tight, as PLD), ``"rdp"``, or ``"filter"``: noise may be turned up
            (:meth:`harden`, which doubles it, ten times at most) within (``target_epsilon``,
            ``target_delta``).
        ledger: file that remembers every release through a crash; beside it ``<ledger>.terms``
            says what the releases are accounted by. With ``trust="central"`` the server keeps it,
            otherwise each client its own.
        release: shares of noise that may be missing, and a seed for tests:
            :class:`ClientReleaseSettings`.

    Raises:
        DefenseError: a value out of range, or a ledger of other terms.
        BudgetSpent: the ledger's releases have cost more than ``target_epsilon`` already.
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
        is_found, is_budget = noise_multiplier is None, accountant == "filter"
        if (is_found and rounds is None) or (target_epsilon is None and (is_found or is_budget)):
            raise DefenseError(
                "ClientDP: give noise_multiplier, or target_epsilon and rounds; accountant='filter'"
                " keeps a budget, and needs target_epsilon"
            )
        self.clients = clients
        self.sampling: ClientSampling = sampling
        self.per_round = _expect_per_round(sampling, per_round, clients)
        self.trust: Trusted = trust
        self.dropouts = release.dropouts
        _check_trust(trust, sampling, release, self.per_round)
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

    # ---- what is promised -------------------------------------------------------------------

    @property
    def _sensitivity(self) -> float:
        """How far two neighbours' sums may be apart, over the clip norm."""
        return 2.0 if self.replaces else 1.0

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise on the sum over the clip norm, as it is turned up now."""
        return self._budget.noise_now * self._sensitivity

    @property
    def own_noise_std(self) -> float:
        """Standard deviation of what a client adds to each number of its update; 0 if it does not.

        A share is so large that the shares of all but ``dropouts`` clients make the whole.
        """
        if self.trust == "central":
            return 0.0
        std = self.noise_multiplier * self.clip
        if self.trust == "local":
            return std
        return std / math.sqrt(int(self.per_round) - self.dropouts)

    @property
    def mean_noise_std(self) -> float:
        """Standard deviation of the noise on each number of the mean over clients."""
        if self.trust == "central":
            return self.noise_multiplier * self.clip / self.per_round
        return self.own_noise_std / math.sqrt(self.per_round)

    def relative_noise(self, numbers: int) -> float:
        """Return the norm of the mean's noise over the largest norm of the mean without it.

        It depends on no data. Above 1 the noise drowns what clients learned in a round.

        Args:
            numbers: that are trained.
        """
        return self.mean_noise_std * math.sqrt(numbers) / self.clip

    @property
    def accountant(self) -> Accountant | RenyiFilter:
        """Counts the releases. Its noise multipliers are over the sensitivity, not the clip."""
        return self._budget.accountant

    @property
    def privacy(self) -> Privacy:
        """What the releases so far have cost; noise as accounted."""
        return self._budget.privacy

    @property
    def acts_on_gradients(self) -> bool:
        """What leaves a client is not what it computed."""
        return True

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return what it was built with, for the record of a run."""
        return {
            **super().settings(),
            "accountant": self._budget.kind,
            "noise_multiplier": self.noise_multiplier,
        }

    def before_setup(self, context: DefenseContext) -> None:
        """Refuse to be a defence of a Trainer's steps.

        Raises:
            DefenseError: always.
        """
        raise DefenseError(
            "ClientDP acts on the update of a federation's round. In a Trainer use DPSGD (for "
            "examples) or GradientNoise"
        )

    @property
    def can_harden(self) -> bool:
        """Whether the noise can be turned up: it takes ``accountant="filter"``.

        It cannot under a secure aggregation: a client turns up its own share alone, and the sum
        would carry less noise than this client's account says.
        """
        return self.trust != "secure_aggregation" and self._budget.can_harden

    def harden(self) -> str | None:
        """Double the noise, from the next release on."""
        return self._budget.harden() if self.can_harden else None

    # ---- a round ----------------------------------------------------------------------------

    def drawn(self, clients: Sequence[C]) -> list[C]:
        """Draw who takes part in a round, by randomness of the operating system.

        Args:
            clients: all of the federation's.

        Raises:
            DefenseError: their number is not ``clients``.
        """
        if len(clients) != self.clients:
            raise DefenseError(
                f"ClientDP(clients={self.clients}) draws from all clients of the federation, and "
                f"{len(clients)} are there: draw also those that cannot be reached"
            )
        source = random.SystemRandom()
        if self.sampling == "fixed":
            return source.sample(list(clients), int(self.per_round))
        if self.sampling == "poisson":
            chance = self.per_round / self.clients
            return [client for client in clients if source.random() < chance]
        return list(clients)

    def mean(self, updates: Mapping[C, Update | None], like: Update) -> Release:
        """Return the mean of a round's updates with noise, by a trusted server: one release.

        All clients weigh alike. It reads one update after the other; where they arrive one by one
        use :meth:`begin`.

        Args:
            updates: of every client that was drawn; None where it failed or withheld. What cannot
                be read (other names or shapes, NaN) counts as zero like that.
            like: names, shapes and dtypes of what is shared.

        Raises:
            DefenseError: what :meth:`begin` refuses.
            BudgetSpent: one more release would cost more than ``target_epsilon``.
        """
        sums = self.begin(updates, like)
        for client, update in updates.items():
            if update is not None:
                sums.add(client, update)
        return sums.end()

    def begin(self, clients: Collection[C], like: Update) -> UpdateSum[C]:
        """Begin a release by a trusted server, to which updates are added as they arrive.

        Args:
            clients: that were drawn.
            like: names, shapes and dtypes of what is shared.

        Raises:
            DefenseError: noise is not the server's to add, or more clients than could be drawn.
        """
        if self.trust != "central":
            raise DefenseError(
                f"ClientDP(trust={self.trust!r}): the clients add the noise themselves (privatized)"
            )
        most = int(self.per_round) if self.sampling == "fixed" else self.clients
        name, hint = "ClientDP: number of clients in a round", "use drawn()"
        check_integer(name, len(clients), at_least=0, at_most=most, hint=hint)
        return UpdateSum(clients, like, self.clip, self._release_sum)

    def _release_sum(self, sums: UpdateSum[Any]) -> dict[str, Tensor]:
        """Return the noised mean of a sum of clipped updates: one release."""
        std = self._record_release() * sums.clip
        return self._add_noise(sums.total, std, sums.like, 1 / self.per_round)

    def privatized(self, update: Update | None, like: Update) -> dict[str, Tensor]:
        """Return a client's update, clipped and with its own noise: one release of this client.

        Args:
            update: None to withhold: zero leaves, with the same noise. So does an update that
                cannot be read (NaN): a failure would tell of the data.
            like: names, shapes and dtypes of what is shared.

        Raises:
            DefenseError: noise is the server's to add.
            BudgetSpent: one more release would cost more than ``target_epsilon``.
        """
        part = self._clip_or_zero(update, like)
        self._record_release()
        return self._add_noise(part, self.own_noise_std, like)

    def rehearsed(self, update: Update | None, like: Update) -> dict[str, Tensor]:
        """Return a rehearsal of :meth:`privatized`: it has other noise, and nothing is accounted.

        It is not for release. It is looked at in place of what leaves: a decision that is made from
        it depends on noise that nobody else sees, so that the account of the release still holds.
        """
        part = self._clip_or_zero(update, like)
        return self._add_noise(part, self.own_noise_std, like, stream="rehearsal")

    def check_affords_another(self) -> None:
        """Refuse a round whose release the budget does not cover, before anybody trains.

        Raises:
            BudgetSpent: one more release would cost more than ``target_epsilon``.
        """
        self._budget.check_affords_another()

    def check_client(self, *, masked: bool, mend: str) -> None:
        """Raise an error where a client's own noise would not hold in a process that may end.

        Args:
            masked: whether something hides each client's update from the server.
            mend: how to let something do so, for the message.

        Raises:
            DefenseError: there is no ledger, or a share of noise would leave unmasked.
        """
        problem = None
        if self.ledger is None:
            problem = (
                "a client's process may end: give ClientDP(ledger=...), a path for each client"
            )
        elif self.trust == "secure_aggregation" and not masked:
            problem = (
                "ClientDP(trust='secure_aggregation'): nothing here masks this client's update, "
                f"whose share of noise is less than the whole: {mend}"
            )
        if problem:
            raise DefenseError(problem)

    def check_rounding(self, like: Update) -> None:
        """Refuse a model whose dtype rounds a client's share of noise away.

        Shares add up to the whole noise only before rounding. Rounding to steps of one standard
        deviation changes the distribution of the sum by ``exp(-2 pi^2)``, 3e-9. With far larger
        steps a share has no effect.

        Args:
            like: what was sent of what is trained.

        Raises:
            DefenseError: names the tensor.
        """
        std = self.own_noise_std
        for name, tensor in like.items() if self.trust == "secure_aggregation" else ():
            eps = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 1.0
            step = eps * float(tensor.detach().abs().max()) if tensor.numel() else 0.0
            if not step <= std:
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise DefenseError(
                    f"ClientDP: '{name}' was sent in {dtype} in steps of {step:.2g}, which round a "
                    f"share of noise of {std:.2g} away: send float32, or clip higher"
                )

    def check_server(self, owner: str) -> None:
        """Raise an error where the server's noise, or its account after a restart, does not hold.

        Raises:
            DefenseError: the server does not add the noise, or there is no ledger.
        """
        if self.trust != "central" or self.ledger is None:
            raise DefenseError(
                f"{owner} adds the noise on the server: give ClientDP(trust='central', ledger=...)"
            )

    def _clip_or_zero(self, update: Update | None, like: Update) -> dict[str, Tensor]:
        if self.trust == "central":
            raise DefenseError(
                "ClientDP(trust='central'): the server adds the noise. For noise of the client's "
                "own say trust='local'"
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
        noise, count = self._budget.settle_next()
        count()
        return noise * self._sensitivity

    def _add_noise(
        self, total: Update, std: float, like: Update, scale: float = 1.0, stream: str = "client"
    ) -> dict[str, Tensor]:
        """Add noise that is used once, and round to the dtype of ``like`` at the end."""
        release, self._releases = self._releases, self._releases + 1
        noised = {}
        for index, (name, tensor) in enumerate(total.items()):
            key = self._key(release, index, stream)
            draw = standard_normal(key, tensor.shape, tensor.device, tensor.dtype)
            noised[name] = tensor.add(draw, alpha=std).mul_(scale).to(like[name].dtype)
        return noised

    def _key(self, release: int, index: int, stream: str) -> bytes:
        base = base_of(self._entropy, self.seed)
        return noise_key(base, release, index, client=0, name=self.name, stream=stream)

    # ---- what survives ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the account of the releases, and how far the noise is turned up."""
        return self._budget.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the count of releases; the account never runs backwards."""
        self._budget.load_state_dict(state, self._budget.accountant.steps)
        self._budget.check_not_overdrawn()

    def _terms(self) -> dict[str, object]:
        return {
            "unit": "client",
            "clients": self.clients,
            "sampling": self.sampling,
            "per_round": self.per_round,
            "trust": self.trust,
        }

    def _describe_guarantee(self) -> str:
        if self.seed is not None:
            return "none: whoever knows or guesses `seed` can subtract the noise (for tests only)"
        adversary = {
            "central": "whoever sees the models of all rounds, but for the trusted server",
            "local": "whoever sees each client's updates, the server among them",
            "secure_aggregation": (
                "a server that sees only the sum of updates, while the aggregation hides the parts "
                f"and at most {self.dropouts} clients of a round drop out or collude; its rounding "
                "to whole numbers is not accounted"
            ),
        }[self.trust]
        neighbours = "replaced by any other data" if self.replaces else "added or removed"
        secret = " Who takes part in a round must stay secret." if self._rate < 1 else ""
        return (
            f"against {adversary}: (epsilon, delta)-differential privacy of one client, all of its "
            f"data, {neighbours}, for all rounds together, with the epsilon that `privacy` gives."
            f"{secret} Not covered: what clients send besides their updates, leakage logs, and "
            "why noise was turned up in sight of data."
        )


def _expect_per_round(sampling: str, per_round: float | None, clients: int) -> float:
    """Return the expected number of clients in a round."""
    check_choice("ClientDP: sampling", sampling, get_args(ClientSampling))
    if sampling == "all":
        hint = "with sampling='all' each client takes part"
        check_choice("ClientDP: per_round", per_round, (None, clients), hint=hint)
        return float(clients)
    hint = f"sampling={sampling!r} needs per_round=, clients of a round"
    number: Any = per_round
    drawn = check_number("ClientDP: per_round", number, above=0, at_most=clients, hint=hint)
    if sampling == "fixed" and drawn % 1:
        raise DefenseError(f"ClientDP: with sampling='fixed' per_round={drawn!r} must be whole")
    return float(drawn)


def _check_trust(
    trust: str, sampling: str, release: ClientReleaseSettings, per_round: float
) -> None:
    """Refuse settings under which the noise, or its account, is not that of the whole sum."""
    check_choice("ClientDP: trust", trust, get_args(Trusted))
    shared = trust == "secure_aggregation"
    if shared:
        hint = "shares of noise add up only where it is known how many clients take part"
        name = "ClientDP: with trust='secure_aggregation' sampling"
        check_choice(name, sampling, ("fixed", "all"), hint=hint)
    most = math.ceil(per_round) - 1 if shared else 0
    hint = f"fewer than the {per_round:g} clients of a round" if shared else "for shares of noise"
    check_integer("ClientDP: dropouts", release.dropouts, at_least=0, at_most=most, hint=hint)
