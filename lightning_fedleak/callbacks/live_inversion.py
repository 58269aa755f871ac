"""Inversion attacks on a live training step: the texts that the hidden states sent give away.

What is attacked is what the client's own forward gave at the split, dropout and all, with the mask
and the positions that go along. The server's copy of the bottom model is renewed at each look (as
often as the attack says).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import lightning.pytorch as L
import torch
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Attack, UnusableObservation
from lightning_fedleak.attacks.bottom import BottomModel
from lightning_fedleak.attacks.inversion import InversionAttack, TextGuess
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.callbacks.kinds import Inverted
from lightning_fedleak.callbacks.look import Look, reason
from lightning_fedleak.callbacks.split_tap import Crossed, SplitTap
from lightning_fedleak.defenses import Defense
from lightning_fedleak.snapshots import ActivationSnapshot, Observation, Stage

STAGES = (Stage.LOCAL, Stage.SHARED)
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def check_texts(attacks: Sequence[Attack], stages: Sequence[Stage], texts: int) -> None:
    """Refuses what says nothing about activations.

    Raises:
        ValueError: ``texts`` is out of range, or activations are asked for where there are none.
    """
    if isinstance(texts, bool) or not isinstance(texts, int) or texts < 1:
        raise ValueError(f"texts must be a positive integer, got {texts!r}")
    names = [a.name for a in attacks if isinstance(a, InversionAttack)]
    if names and tuple(stages) == (Stage.AGGREGATE,):
        raise ValueError(
            f"'{names[0]}' reads the activations that a client sends, which are never reduced over "
            "clients: at stage 'aggregate' there are none. Add 'shared' to stages"
        )


def check_local(
    attacks: Collection[InversionAttack], defenses: Collection[Defense], stages: Sequence[Stage]
) -> None:
    """Refuses to measure hidden states "before the defences" that are computed behind one.

    Raises:
        ValueError: says what to leave out.
    """
    for defense in defenses if Stage.LOCAL in stages else ():
        for attack in attacks:
            below = [layer for layer in defense.activation_layers if layer < attack.layer]
            if below:
                raise ValueError(
                    f"stages=('local', ...): the defence '{defense.name}' rewrites the hidden "
                    f"states at layer {below[0]}, below layer {attack.layer} that "
                    f"'{attack.name}' reads; what these would be without it is never computed. "
                    "Leave 'local' out, and compare with a run without the defence"
                )


@dataclass(frozen=True)
class _Chosen:
    """The texts of one look.

    Attributes:
        rows: (micro-batch, row) of each.
        input_ids: (n, L) the tokens sent.
        real: (n, L) bool.
    """

    rows: Sequence[tuple[int, int]]
    input_ids: Tensor
    real: Tensor


class LiveInversion:
    """The inversion attacks of one fit.

    Args:
        trainer: of this fit; its strategy is set up, so that the defences' hooks are there.
        anatomy: the model's parts.
        attacks: the monitor's on activations; may be none.
        texts: of this process's batch that are reconstructed at a look, at most.
        stages: that the monitor measures.

    Raises:
        ValueError: a stage does not exist at an attack's layer.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        anatomy: Anatomy,
        attacks: Sequence[InversionAttack],
        *,
        texts: int,
        stages: Sequence[Stage],
    ) -> None:
        self._attacks = tuple(attacks)
        self._texts = texts
        self._stages = tuple(s for s in STAGES if s in stages)
        self._process = trainer.global_rank
        self._crossed: list[Crossed] = []
        self._tap: SplitTap | None = None
        self._cast: list[InversionAttack] = []
        self._done = False
        self._anatomy = anatomy
        self._autocast = AUTOCAST.get(str(trainer.precision))
        defenses: Sequence[Defense] = getattr(trainer.strategy, "defenses", ())
        check_local(attacks, defenses, stages)
        self._defended = {layer for d in defenses for layer in d.activation_layers}

    def install(self) -> None:
        """Puts the hooks in, and tells the attacks the precision that the client computes in."""
        if not self._attacks:
            return
        self._tap = SplitTap(self._anatomy, [a.layer for a in self._attacks], self._defended)
        for attack in self._attacks:
            if self._autocast and getattr(attack, "autocast", self._autocast) is None:
                attack.autocast = self._autocast  # type: ignore[attr-defined]
                self._cast.append(attack)

    def begin(self, step: int) -> None:
        """Training starts at ``step`` (after a resume not at 0), with the weights that are there.

        So far the attacks, prepared before the Trainer knew its step, took it for 0.
        """
        for attack in self._attacks:
            if (bottom := _bottom(attack)) is not None:
                bottom.step = max(bottom.step, step)

    def arm(self) -> None:
        """Starts a look."""
        self._done = False
        if self._tap is not None:
            self._tap.arm()

    def disarm(self) -> None:
        """Ends a look, and lets go of what it held."""
        self._crossed.clear()
        if self._tap is not None:
            self._tap.disarm()

    def close(self) -> None:
        """Removes the hooks, and gives the attacks their own precision back."""
        self._crossed.clear()
        if self._tap is not None:
            self._tap.close()
        self._tap = None
        for attack in self._cast:
            attack.autocast = None  # type: ignore[attr-defined]
        self._cast.clear()

    def batch_ends(self, batch: TokenBatch | None) -> None:
        """A micro-batch of a look is over; None where it trained nothing."""
        if self._tap is None or self._done:
            return
        if batch is None:
            self._tap.arm()
        else:
            self._crossed.append(self._tap.take(batch))

    @property
    def is_due(self) -> bool:
        """Whether this look has not reconstructed yet; the same on every process."""
        return self._tap is not None and not self._done

    @torch.no_grad()
    def attack(self, look: Look) -> None:
        """Lets every attack reconstruct some of the texts that crossed, once in a look."""
        if self._tap is None or self._done:
            return
        self._done = True
        if look.truth_error is not None:
            return
        if look.batch is not None:
            self._crossed.append(self._tap.take(look.batch))
        try:
            chosen: _Chosen | str | None = self._choose(look.step)
        except Exception as error:
            chosen = reason(error)
        if chosen is None:
            return
        for attack in self._attacks:
            if (str(self._stages[0]), attack.name) in look.guesses:
                continue
            said: Inverted | str = ""
            for i, stage in enumerate(self._stages):
                if i == 0 or attack.layer in self._defended:
                    said = (
                        chosen
                        if isinstance(chosen, str)
                        else self._reconstructed(attack, stage, chosen, look.step)
                    )
                look.guesses[(str(stage), attack.name)] = said

    def _choose(self, step: int) -> _Chosen | None:
        """Draws texts by the step and the process alone, so that a resumed run draws the same.

        None where the batch holds no text.
        """
        rows: list[tuple[int, int]] = []
        truths: list[tuple[Tensor, Tensor]] = []
        for i, crossed in enumerate(self._crossed):
            ids, mask = crossed.batch.input_ids.cpu(), crossed.batch.attention_mask
            real = torch.ones_like(ids).bool() if mask is None else mask.cpu() != 0
            truths.append((ids, real))
            rows += [(i, row) for row in real.any(1).nonzero().flatten().tolist()]
        if not rows:
            return None
        generator = torch.Generator().manual_seed(1_000_003 * step + self._process)
        order = torch.randperm(len(rows), generator=generator)[: self._texts].tolist()
        drawn = [rows[i] for i in sorted(order)]
        return _Chosen(
            drawn,
            _stacked([truths[i][0][row] for i, row in drawn]),
            _stacked([truths[i][1][row] for i, row in drawn]),
        )

    def _reconstructed(
        self, attack: InversionAttack, stage: Stage, chosen: _Chosen, step: int
    ) -> Inverted | str:
        try:
            snapshot = self._snapshot(attack.layer, stage, chosen.rows, step)
            guess = attack.run(Observation(activations=(snapshot,)))
            if not isinstance(guess, TextGuess) or guess.tokens.shape != chosen.input_ids.shape:
                raise UnusableObservation("the attack guessed no texts, or others than were sent")
            bottom = _bottom(attack)
            age = math.nan if bottom is None else float(bottom.age(step))
            found = Inverted(guess, chosen.input_ids, chosen.real, age)
            if not bool(found.begun.any()):
                raise UnusableObservation(
                    f"no time: budget_seconds={attack.budget_seconds} is over before the first "
                    "token is found"
                )
        except Exception as error:
            return reason(error)
        return found

    def _snapshot(
        self, layer: int, stage: Stage, rows: Sequence[tuple[int, int]], step: int
    ) -> ActivationSnapshot:
        states = [self._crossed[i].states(stage, layer)[row] for i, row in rows]
        length = max(len(s) for s in states)
        masks = [self._crossed[i].attention_mask for i, _ in rows]
        positions = [self._crossed[i].position_ids for i, _ in rows]
        if len({p is None for p in positions}) > 1:
            raise UnusableObservation("only some micro-batches were given position_ids")
        mask = None
        if any(m is not None or len(s) < length for m, s in zip(masks, states, strict=True)):
            mask = _stacked(
                [
                    torch.ones(len(s), dtype=torch.int64, device=s.device)
                    if m is None
                    else m[row].to(s.device).long()
                    for m, s, (_, row) in zip(masks, states, rows, strict=True)
                ]
            )
        ids = [p[row] for p, (_, row) in zip(positions, rows, strict=True) if p is not None]
        return ActivationSnapshot(
            step,
            stage,
            {f"layer {layer}": _stacked(states).detach()},
            client=self._process,
            attention_mask=mask,
            position_ids=_stacked(ids) if ids else None,
        )


def _stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows (L_i, ...) as one tensor (n, L, ...), zeros behind the shorter ones."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def _bottom(attack: Attack) -> BottomModel | None:
    """The adversary's copy of the bottom model, where the attack keeps one."""
    found = getattr(attack, "bottom", None)
    return found if isinstance(found, BottomModel) else None


__all__ = ["LiveInversion", "check_local", "check_texts"]
