"""The channels of planted texts (canaries) and planted values (entities) in the training data.

A channel plays the attacks of one family in a run, and turns their answers into rates. These two
query the trained weights about texts that the user planted before the run: whole texts (*canaries*)
or values in texts, such as phone numbers (*entities*). For each a coin decides whether it is in the
data or held out. Those in the data occur a set number of times: the more often, the more the
weights leak of it. What was held out shows what an attack answers without leakage.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_fedleak.attacks import Attack, UnusableObservation
from lightning_fedleak.attacks.memorization import Canaries, Entities
from lightning_fedleak.engine.channels.exchange import over_processes
from lightning_fedleak.engine.channels.released.account import too_few_non_members
from lightning_fedleak.engine.channels.released.audit import Audit, Comparison
from lightning_fedleak.engine.channels.released.memorization import MemorizationChannel
from lightning_fedleak.engine.channels.released.pool import Pool, affordable, forwards_of
from lightning_fedleak.engine.channels.released.training_rows import UnplayableGame, check_loader
from lightning_fedleak.engine.channels.released.weights import Answer, WeightChannel
from lightning_fedleak.engine.outcomes import AUDIT, Series
from lightning_fedleak.engine.run import reason
from lightning_fedleak.evaluation.entities import entity_values
from lightning_fedleak.evaluation.metrics.released import FPR, canary_tiers
from lightning_fedleak.model import model_runs
from lightning_fedleak.model.snapshots import CandidateSnapshot, Observation, Stage
from lightning_fedleak.model.taps import Text, candidate_log_probs
from lightning_fedleak.report.records import CANARIES, ENTITIES

# The advice at the end of messages about tests without enough planted texts.
_MEND = "Plant more; and a batch must hold a canary's tokens as they were given"


class CanaryPool(Pool):
    """Hold the canaries that the model is queried with, in the data or held out."""

    @classmethod
    def of_canaries(cls, canaries: Any, loader: Any, settings: Any = None) -> CanaryPool:
        """Return a pool of all canaries.

        Raises:
            UnplayableGame: To query all of them costs more than the budget of the settings, if
                there are any.
        """
        check_loader(loader)
        length = len(loader.dataset)
        if settings is not None:
            affordable(length, settings, len(canaries), forwards_of(settings, last_step=True))
        # The loss is computed on all tokens of a canary, so that its ids are also its labels.
        texts, included = [Text(row, row) for row in canaries.token_ids], canaries.included
        times, none = torch.ones(len(included), dtype=torch.long), torch.zeros_like(included)
        no_game = "canaries are compared with it by audit_canaries"
        # No canary counts as short, and the prompt of none is compared.
        return cls("left out", texts, included, length, times, none, none, no_game)

    def _key(self, text: Text) -> bytes:
        return text.ids.numpy().tobytes()

    @property
    def seen_in_checkpoints(self) -> Tensor:
        """Return (N,) False: a checkpoint must not reveal which canaries are in the data."""
        return torch.zeros_like(self.seen)

    def compared(
        self, epoch: int, passed: int, *, everyone: bool = False, part: Any = "long"
    ) -> tuple[Tensor, Tensor]:
        """Return all canaries, (n,) indices, and whether each was trained on so far, (n,) bool.

        The arguments are not used: the number of canaries was chosen by the user.
        """
        return torch.arange(len(self.texts)), self.trains & self.seen


class CanaryChannel(MemorizationChannel):
    """Query the trained weights with the user's own canaries, in the data or held out at random.

    Each number of repetitions is a *tier* with a series, ``audit/<attack>_x<times>``. The canaries
    of a tier that were trained on so far are compared with all that were held out.

    Raises:
        ValueError: When a run begins: there are no canaries, or an attack scores as many tokens as
            one of them has, or more.
    """

    # The constants are explained in Channel, WeightChannel and MemorizationChannel.
    reads = Canaries
    leak = CANARIES
    # The metrics and extras are those of `canary_values` and `canary_tiers`.
    metrics = ("auc", "shown", "exposure", "extracted", "greedy")
    # The smallest, the largest and the uninformed value, in bits.
    ranges: ClassVar[Any] = {"exposure": (0.0, math.inf, 0.0)}
    extras = (
        *("p_value", "shown_p_value", "auc_provable", "extracted_provable", "greedy_provable"),
        *("exposure_cap", "exposure_capped", "extracted_others", "extracted_base"),
        *("members", "others", "alpha"),
    )
    prefix = AUDIT
    planted = "canaries"
    file = "canaries_base.safetensors"
    finds_entities = False
    kinds = ("causal",)

    def _check_settings(self) -> None:
        """Refuse attacks on tokens that one of the canaries lacks.

        Raises:
            ValueError: The message says which setting to give.
        """
        super()._check_settings()
        shortest = min(map(len, self._planted.token_ids))
        for attack in self.attacks:
            if shortest <= (attack.n_scored or 1):
                raise ValueError(
                    f"Canaries(tokens={attack.n_scored}) reads the last tokens of each canary but "
                    f"not its first, and one has {shortest} tokens: ask for at most {shortest - 1}"
                )

    def _series_names(self, attack: Attack) -> list[str]:
        return [_tier_name(attack, times) for times in self._planted.record.times]

    def _never_known(self, metric: str) -> str | None:
        """Return why a rate cannot become known; None if it can.

        Only "shown", the share of canaries that score above those held out, needs a minimum of
        canaries that were held out. The tiers share the probability of error ``alpha``.
        """
        if self._pool is None or metric != "shown":  # no pool: before the run begins
            return None
        alpha = self.settings.memorization.alpha / len(self._planted.record.times)
        non_members = int((~self._planted.included).sum())
        counts = [non_members] * self._planned_looks
        return too_few_non_members(counts, alpha, metric, FPR, "plant more canaries")

    def _draw_pool(self) -> Pool:
        """Return all canaries.

        Raises:
            UnplayableGame: To query all of them costs more than the budget; none is queried.
        """
        return CanaryPool.of_canaries(
            self._planted, self.run.training_loader, self.settings.memorization
        )

    def describe(self) -> str:
        """Return in words what is compared, for the message at the start of a run."""
        n, n_non_members = int(self.pool.trains.sum()), int((~self.pool.trains).sum())
        return f"{n} canaries in the data and {n_non_members} that were held out"

    def state_dict(self) -> dict[str, Any]:
        """Return also the commitment to the canaries, against which a resumed run is checked."""
        commitment = {"canary_set": self._planted.state_dict()} if self.listed_attacks else {}
        return {**super().state_dict(), **commitment}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the canaries are the same, and store the path of the base's answers.

        The *base* is the model before the fine-tuning.

        Raises:
            ValueError: The state is of other canaries.
        """
        super().load_state_dict(state)
        if self.listed_attacks and (committed := state.get("canary_set")) is not None:
            self._planted.load_state_dict(committed)

    @property
    def _audit(self) -> Audit:
        """Return the base's answers; no score of a canary reads its text."""
        assert self._base is not None
        return Audit(self.pool, self._base)

    def _score_texts(
        self, compared: Comparison, attacks: Sequence[Any]
    ) -> dict[str, dict[str, float] | str]:
        """Return the values of each attack and tier by the name of its series."""
        observation = Observation(released=compared.released)
        values: dict[str, dict[str, float] | str] = {}
        record = self._planted.record
        for attack in attacks:
            try:
                tiers = canary_tiers(
                    attack.run(observation),
                    attack,
                    record.times,
                    torch.tensor(record.repeats),
                    compared.members,
                    ~self._planted.included,
                    look=compared.look,
                    alpha=compared.alpha,
                )
                tiers |= {n: f"{why}. {_MEND}" for n, why in tiers.items() if isinstance(why, str)}
            except Exception as error:
                tiers = dict.fromkeys(record.times, reason(error))
            values |= {_tier_name(attack, times): answer for times, answer in tiers.items()}
        return values


def _tier_name(attack: Attack, times: int) -> str:
    return f"{attack.name}_x{times}"


class EntityChannel(WeightChannel):
    """Rank each planted value among others of the set that it was drawn from, after each epoch.

    Each kind of value and place in the text has a series, ``leakage/<attack>/<kind>/<place>``. If
    values are repeated a different number of times, each number also has one, ``..._x<times>``. The
    base is not compared: the rank of a value that was held out is uniform under any model.

    Raises:
        ValueError: No values are planted.
    """

    # The constants are explained in Channel and WeightChannel.
    reads = Entities
    leak = ENTITIES
    # The metrics and extras are those of `entity_values`: ranked first, written by greedy decoding.
    metrics = ("first", "greedy")
    # Both are shares of planted values minus shares of held-out ones.
    ranges: ClassVar[Any] = dict.fromkeys(("first", "greedy"), (-1.0, 1.0, 0.0))
    extras = (
        *("p_value", "median_rank", "candidates", "first_others", "greedy_others"),
        *("first_provable", "greedy_provable", "members", "others", "alpha"),
    )
    planted = "entities"

    def _tiers(self, attack: Attack) -> dict[str, tuple[Tensor, tuple[int, ...]]]:
        """Return, by name of a series, which values it counts and in which tiers.

        Returns:
            (N,) bool, the planted values of its kind and place; and the numbers of repetitions.
        """
        entities, times = self._planted, self._planted.record.times
        tiers = {"": times} | ({f"_x{n}": (n,) for n in times} if len(times) > 1 else {})
        groups = [(entity.kind, entity.place) for entity in entities.entities]
        return {
            f"{attack.name}/{kind}/{place}{end}": (
                torch.tensor([group == (kind, place) for group in groups]),
                counted,
            )
            for kind, place in entities.groups
            for end, counted in tiers.items()
        }

    def _series_names(self, attack: Attack) -> list[str]:
        return [*self._tiers(attack)]

    def _draw_pool(self) -> Pool:
        """Return the texts with a planted value.

        Raises:
            UnplayableGame: The model is not causal.
        """
        if self.run.anatomy.kind != "causal":
            raise UnplayableGame(f"a {self.run.anatomy.kind} model does not write values")
        return CanaryPool.of_canaries(self._planted, self.run.training_loader)

    def query_base(self) -> None:
        """Try a query, with one value, before the first step; its seconds are said at the start."""
        start = time.perf_counter()
        for attack in self.attacks:
            self._answers(attack, [0])
        self._query_seconds = time.perf_counter() - start

    def describe(self) -> str:
        """Return in words what is ranked, and how long it takes, for the message at the start."""
        n, processes = len(self._planted), 1 if self.run.is_sharded else self.run.processes
        return (
            f"{n} planted values, each among {self.attacks[0].candidates} others of its set, after "
            f"each epoch, which takes about {self._query_seconds * n / processes:.2g} s each time"
        )

    def query_weights(self, epoch: int, *, lists: bool) -> Mapping[Series, Answer]:
        """Query the model with all values, and return every attack's rates by series."""
        n_read, _ = self._count_seen()
        self._looks += 1
        rows, members = self.pool.compared(epoch, n_read)
        repeats, held_out = torch.tensor(self._planted.record.repeats), ~self._planted.included
        answers: dict[Series, Answer] = {}
        for attack in self.attacks:
            series = {s.name: s for s in self.series(attack, (Stage.RELEASED,))}
            try:
                if not bool(members.any()):
                    raise UnusableObservation(f"no planted row was in a batch. {_MEND}")
                guess = attack.run(Observation(candidates=self._answers(attack, rows.tolist())))
                for name, (inside, times) in self._tiers(attack).items():
                    answers[series[name]] = entity_values(
                        guess,
                        inside & members,
                        inside & held_out,
                        repeats,
                        times,
                        look=self._looks,
                        alpha=self.settings.memorization.alpha,
                    )
            except Exception as error:
                answers |= dict.fromkeys(series.values(), reason(error))
        return answers

    def _answers(self, attack: Any, rows: Sequence[int]) -> CandidateSnapshot:
        """Return the model's answers to some values; each process queries it with a part of them.

        Args:
            attack: The attack, which says how many candidates a value is ranked among.
            rows: The indices of the planted values.

        Raises:
            UnusableObservation: The model cannot be queried, on this process or on another one.
        """
        anatomy, entities = self.run.anatomy, self._planted

        def ask(indices: list[int]) -> list[Tensor]:
            log_probs = torch.zeros(len(indices), attack.candidates + 1)
            sizes, greedy = torch.zeros(len(indices)), torch.zeros(len(indices), dtype=torch.bool)
            with model_runs.undisturbed(anatomy):
                for n, row in enumerate(rows[index] for index in indices):
                    values = entities.candidates(row, attack.candidates)
                    context = entities.token_ids[row][: entities.entities[row].start]
                    answers, greedy[n] = candidate_log_probs(anatomy, context, values)
                    log_probs[n, : len(values)], sizes[n] = answers, len(values) - 1
            return [log_probs, sizes, greedy]

        log_probs, sizes, greedy = over_processes(self.run, len(rows), ask)
        return CandidateSnapshot(log_probs, sizes.long(), greedy)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of looks, and the commitment to the values."""
        if not self.listed_attacks:
            return {}
        return {self.family: {"looks": self._looks, **self._planted.state_dict()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check that the values are the same, and restore the number of looks.

        Raises:
            ValueError: The state is of other values.
        """
        saved = state.get(self.family, {})
        self._looks = int(saved.get("looks", 0))
        if saved and self.listed_attacks:
            self._planted.load_state_dict(saved)
