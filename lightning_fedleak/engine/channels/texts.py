"""The channel of text attacks: whole texts, from the activations at a split or from gradients.

A *channel* plays the attacks of one family in a run, and turns their answers into rates; a *look*
is one measurement at a step. In split learning a client runs the first layers, the *bottom model*,
and sends the hidden states at the split. A *stage* is a point on this way: ``local`` before the
client's defences, ``shared`` after them.

For an attack on hidden states (:class:`~lightning_fedleak.attacks.InversionAttack`), a look is:

1. :meth:`~TextsChannel.arm` lets a :class:`SplitTap` record the activations that *cross* the split,
   in the client's own forward pass with its dropout, mask and positions.
2. :meth:`~TextsChannel.batch_ends` stores the activations of each micro-batch.
3. :meth:`~TextsChannel.at_stages` draws some of the batch's texts, and the attack reconstructs them
   once, with the server's copy of the bottom model. The *age* of this copy is the number of steps
   since the attack renewed it.
4. :meth:`~TextsChannel.trials` compares the texts with their reconstructions.

An attack on gradients guesses at each stage, and its texts are matched with those of the batch.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_fedleak.attacks import (
    Attack,
    Capability,
    InversionAttack,
    TextAttack,
    TextGuess,
    UnusableObservation,
)
from lightning_fedleak.engine.channels.base import kind_of
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.channels.steps import StepChannel, check_guess
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Series, Unknown
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.metrics import Rate, reconstruction_rates
from lightning_fedleak.evaluation.metrics.texts import (
    SentenceScores,
    in_true_order,
    sentence_scores,
)
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import ActivationSnapshot, Observation, Stage
from lightning_fedleak.model.taps import Crossed, SplitTap, Step, control_crossing
from lightning_fedleak.model.whole_models import whole_model
from lightning_fedleak.private_files import RevealFiles
from lightning_fedleak.report.records import TEXTS
from lightning_fedleak.validate import check_integer

CROSSING = (Stage.LOCAL, Stage.SHARED)
"""The stages of activations: there is no aggregate, since no server sums them over clients."""
RESAMPLES = 200
"""Bootstrap resamples of an interval; not tuned."""


class _Text(NamedTuple):
    """A text of a client's micro-batches.

    Attributes:
        source: Its micro-batch, or what of this has crossed a split.
        row: The index of its document in there.
        ids: The token ids, (L,).
        real: True at tokens and False at padding, (L,) bool.
    """

    source: Any
    row: int
    ids: Tensor
    real: Tensor


@dataclass(frozen=True)
class Reconstruction:
    """An attack's guess of n texts, and the true texts.

    Attributes:
        guess: The guess, with tokens (n, L).
        input_ids: (n, L) The true tokens.
        real: (n, L) bool, False at padding.
        matched: Whether the attack named texts in no order, so that :func:`in_true_order` matched
            them; a true text without a match was missed, and counts.
    """

    guess: TextGuess
    input_ids: Tensor
    real: Tensor
    matched: bool = False

    @property
    def started(self) -> Tensor:
        """Return (n,) bool, False for texts that the attack had no time to begin."""
        has_guess = ((self.guess.tokens >= 0).to(self.real.device) & self.real).any(1)
        return torch.ones_like(has_guess) if self.guess.finished or self.matched else has_guess


class TextsChannel(StepChannel):
    """The channel of attacks that reconstruct whole texts.

    An attack on hidden states assumes a model that is split at its layer; each process shows it
    some texts of its own batch. Gradients do not reveal the order of texts: texts guessed from them
    are matched with those of the batch so that as many tokens as possible are right. Texts at a
    split that an attack did not start within its time budget do not count. Intervals take texts as
    independent, but not the tokens of one text
    (:func:`~lightning_fedleak.evaluation.metrics.texts.reconstruction_rates`).
    """

    # The constants are explained in Channel and StepChannel.
    guesses = TextGuess
    reads = TextAttack
    leak = TEXTS
    metrics = ("token_accuracy", "exact_sentences", "texts_found", "rouge_1", "rouge_2", "rouge_l")
    # The age of the bottom model's copy (NaN if the attack does not say), and the shares of clients
    # on which the attack finished within its time, and proved that its texts are right.
    extras = ("age", "finished", "certified")
    columns = (*extras, *SentenceScores._fields)  # a trial is a text
    ranges = dict.fromkeys((*metrics, "certified"), (0.0, 1.0, 0.0))
    parted = True  # each process reconstructs texts of its own batch
    reads_updates = True  # but attacks on hidden states do not, see _reads_updates
    reads_states = True
    controlled: ClassVar[bool] = True
    finds_entities: ClassVar[bool] = True
    sees = frozenset({Capability.SEES_ACTIVATIONS})

    def __init__(self, attacks: Sequence[TextAttack], settings: Options) -> None:
        super().__init__(attacks, settings)
        check_integer("texts", settings.texts)
        self.inverters = [a for a in attacks if isinstance(a, InversionAttack)]
        if self.inverters and settings.stages == (Stage.AGGREGATE,):
            raise ValueError(
                f"'{self.inverters[0].name}' reads the activations that a client sends, which are "
                "never reduced over clients: at stage 'aggregate' there are none. Add 'shared' to "
                "stages"
            )
        self.width = len(self.columns) * settings.texts
        self._stages = tuple(s for s in CROSSING if s in settings.stages)
        self._crossings: list[Crossed] = []

    def _reads_updates(self, attack: Attack) -> bool:
        return not isinstance(attack, InversionAttack)

    def series(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """Return the series at these stages; no activations are reduced over clients."""
        if isinstance(attack, InversionAttack):
            stages = [stage for stage in stages if stage in CROSSING]
        return super().series(attack, stages)

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Begin a fit: add hooks to the model, after those of the defences.

        Raises:
            ValueError: A stage does not exist at an attack's layer.
        """
        super().open(run)
        self._tap: SplitTap | None = None
        self._defended_layers = {layer for d in run.defenses for layer in d.activation_layers}
        self._check_local()
        if self.inverters:
            layers = [a.layer for a in self.inverters]
            self._tap = SplitTap(run.anatomy, layers, self._defended_layers)
            self.removers = [self._crossings.clear, self._tap.close]

    def _check_local(self) -> None:
        """Refuse stage local if a defence acts on a layer below an attack's.

        Raises:
            ValueError: The undefended hidden states are then never computed.
        """
        for defense in self.run.defenses if Stage.LOCAL in self._stages else ():
            for attack in self.inverters:
                if any(layer < attack.layer for layer in defense.activation_layers):
                    raise ValueError(
                        f"'{attack.name}' reads layer {attack.layer}, whose undefended states are "
                        f"never computed, as '{defense.name}' acts below it: leave 'local' out of "
                        "stages=, and compare with a run without the defence"
                    )

    # ---- a look -----------------------------------------------------------------------------

    def arm(self) -> None:
        """Start a look: let the tap record the activations of the next forward passes."""
        self._has_run = False  # whether attacks on hidden states have run in this look
        if self._tap is not None:
            self._tap.arm()

    def disarm(self, look: Look) -> None:
        """End a look, and free its activations."""
        self._crossings.clear()
        if self._tap is not None:
            self._tap.disarm()

    def batch_ends(self, batch: TokenBatch | None) -> None:
        """Take the activations of a micro-batch that has ended; None if it trained nothing."""
        if self._tap is None or self._has_run:
            return
        if batch is None:
            self._tap.arm()
        else:
            self._crossings.append(self._tap.take(batch))

    def at_stages(self, look: Look) -> None:
        """Let attacks on hidden states reconstruct once in a look, others from each gradient."""
        super().at_stages(look)
        # Entered on every process alike, as FSDP2's gathering of the model needs.
        if self._tap is not None and not self._has_run:
            self._has_run = True
            with whole_model(self.run.anatomy.root), torch.no_grad():
                self._reconstruct(look, self._tap)

    def _reconstruct(self, look: Look, tap: SplitTap) -> None:
        """Store the answers of all attacks on hidden states, at each stage, in the look.

        Both stages have one answer, unless a defence acts on the layer that the attack reads.
        """
        step = look.training_step
        if step.error is not None:
            return
        if step.batch is not None:
            self._crossings.append(tap.take(step.batch))
        failure, texts = None, list[_Text]()
        try:
            texts = self._draw_texts(self._crossings, look.step)
        except Exception as error:
            failure = Unknown(reason(error))
        if failure is None and not texts:
            return
        for attack in self.inverters:
            if Series.at(self._stages[0], attack.name) in look.answers:
                continue
            answer: Reconstruction | Unknown = Unknown("")
            for i, stage in enumerate(self._stages):
                if i == 0 or attack.layer in self._defended_layers:
                    answer = failure or self._run_attack(attack, stage, texts, look.step)
                look.answers |= dict.fromkeys(self.series(attack, (stage,)), answer)

    def _draw(self, n: int, step: int) -> list[int]:
        """Draw some of n texts by the step and the process only, so that a resumed run agrees."""
        # Each step and process has another seed.
        generator = torch.Generator().manual_seed(1_000_003 * step + self.run.rank)
        return sorted(torch.randperm(n, generator=generator)[: self.settings.texts].tolist())

    def _draw_texts(self, crossed: Sequence[Crossed], step: int) -> list[_Text]:
        """Draw as many texts that crossed the split as the settings name."""
        texts = _find_texts(crossed)
        return [texts[i] for i in self._draw(len(texts), step)]

    def _run_attack(
        self, attack: InversionAttack, stage: Stage, texts: Sequence[_Text], step: int
    ) -> Reconstruction | Unknown:
        """Return an attack's reconstruction of texts at a stage, with the truth."""
        input_ids, real = _stack_tokens(texts)
        try:
            snapshot = self._snapshot(attack.layer, stage, texts, step)
            with self.run.timed(attack.name):
                guess = attack.run(Observation(activations=(snapshot,)))
            check_guess(attack, guess, self.guesses)
            if guess.tokens.shape != input_ids.shape:
                raise UnusableObservation("the guessed texts have another shape than the sent ones")
            texts_found = Reconstruction(guess, input_ids, real)
            if not bool(texts_found.started.any()):
                raise UnusableObservation(
                    f"budget_seconds={attack.budget_seconds} is over before the first token"
                )
        except Exception as error:
            return Unknown(reason(error))
        return texts_found

    def _snapshot(
        self, layer: int, stage: Stage, texts: Sequence[_Text], step: int
    ) -> ActivationSnapshot:
        """Return the activations of texts at a layer, padded on the right, as the server got them.

        Raises:
            UnusableObservation: Only some of the micro-batches have position ids.
        """
        origins = [(text.source, text.row) for text in texts]
        states = [crossed.states(stage, layer)[row] for crossed, row in origins]
        length = max(len(s) for s in states)
        masks = [crossed.attention_mask for crossed, _ in origins]
        positions = [crossed.position_ids for crossed, _ in origins]
        if len({p is None for p in positions}) > 1:
            raise UnusableObservation("only some micro-batches were given position_ids")
        mask = None
        if any(m is not None or len(s) < length for m, s in zip(masks, states, strict=True)):
            mask = _pad_rows(
                [
                    torch.ones(len(s), dtype=torch.int64, device=s.device)
                    if m is None
                    else m[row].to(s.device).long()
                    for m, s, (_, row) in zip(masks, states, origins, strict=True)
                ]
            )
        ids = [p[row] for p, (_, row) in zip(positions, origins, strict=True) if p is not None]
        return ActivationSnapshot(
            step,
            stage,
            {f"layer {layer}": _pad_rows(states).detach()},
            client=self.run.rank,
            attention_mask=mask,
            position_ids=_pad_rows(ids) if ids else None,
        )

    def control_answer(self, plan: Plan, control: Step) -> Any:
        """Return the guess of an attack on the texts of a control."""
        if isinstance(plan.attack, InversionAttack):
            return self._control_inversion(plan.attack, control)
        return super().control_answer(plan, control)

    def _control_inversion(
        self, attack: InversionAttack, control: Step
    ) -> Reconstruction | Unknown:
        """Return the reconstruction of a control's texts from its hidden states."""
        answer: Reconstruction | Unknown = Unknown("the step's batches hold no text")
        crossed: Sequence[Crossed] = ()
        try:
            fails = self.run.on_any_process if self.run.is_sharded else bool
            crossed = control_crossing(self.run.anatomy, control, attack.layer, fails=fails)
        except Exception as error:
            answer = Unknown(reason(error))
        # Entered on every process, which FSDP2's gathering of the model needs.
        with whole_model(self.run.anatomy.root), torch.no_grad():
            if texts := self._draw_texts(crossed, control.number):
                answer = self._run_attack(attack, Stage.LOCAL, texts, control.number)
        return answer

    # ---- trials and their rates -------------------------------------------------------------

    def _match(self, answer: Any, attack: Any, step: Step) -> Reconstruction:
        """Match texts guessed from gradients with the texts of the batch.

        Those guessed from hidden states are matched. Tokens of a causal text that no label depends
        on (its last token, or all from the last counted label on) do not count if the attack leaves
        them open.
        """
        if isinstance(answer, Reconstruction):
            return answer
        if not answer.finished and not bool((answer.tokens >= 0).any()):
            raise UnusableObservation("no time: the budget is over before any token is found")
        texts = _find_texts(step.batches, in_gradients=attack.last_token_open)
        if not texts:
            raise UnusableObservation("no text of this batch has a label after its first token")
        ids, real = _stack_tokens(texts)
        order = (~real).int().argsort(dim=1, stable=True)  # moves padding to the right
        ids, real = ids.gather(1, order), real.gather(1, order)
        tokens = in_true_order(answer.tokens, ids, real)
        drawn = self._draw(len(texts), step.number)
        guess = replace(answer, tokens=tokens[drawn])
        return Reconstruction(guess, ids[drawn], real[drawn], matched=True)

    def trials(self, plan: Plan, answer: Any, truth: Any, kind: str | None = None) -> Tensor:
        """Return the scores of each text that the attack began, with what it states of itself."""
        attack: Any = plan.attack
        texts = self._match(answer, attack, truth)
        guess, started = texts.guess, texts.started
        counted = texts.real if kind is None else self._find_values(texts, kind)
        columns = (guess.tokens, texts.input_ids, counted)
        scores = sentence_scores(*(column[started] for column in columns)).table()
        certified = math.nan if guess.certified is None else guess.certified
        stated = scores.new_tensor([attack.age(truth.number), guess.finished, certified])
        return torch.cat([stated.expand(len(scores), -1), scores], 1)

    def _find_values(self, texts: Reconstruction, kind: str) -> Tensor:
        """Return which tokens of texts are part of a value of a kind, (n, L) bool."""
        assert self.finder is not None
        marks = torch.zeros(texts.real.shape, dtype=torch.bool)
        for row, ids, real in zip(marks, texts.input_ids.cpu(), texts.real.cpu(), strict=True):
            row[real] = self.finder.marks(ids[real])[kind]
        return marks

    def accept(self, look: Look, plan: Plan, series: Series, answer: Any, truth: Any) -> None:
        """Note the texts of a guess."""
        if kind_of(series) is None:
            look.notes[series] = partial(self._reveal, plan, answer, truth)

    def _reveal(self, plan: Plan, answer: Any, step: Step, files: RevealFiles, title: str) -> None:
        """Write each text of one look, the original above the reconstruction."""
        lines, texts = [title], self._match(answer, plan.attack, step)
        tokens = texts.guess.tokens.to(texts.input_ids.device)
        for sent, guessed, real in zip(texts.input_ids, tokens, texts.real, strict=True):
            true, named = sent[real].tolist(), guessed[real].tolist()
            right = sum(a == b for a, b in zip(true, named, strict=True))
            lines.append(f"-- {right} of {len(true)} tokens right")
            lines.append(f"original:      {files.text(true)}")
            lines.append(f"reconstructed: {files.text(named)}")
        files.append("texts", lines)

    def rates(self, trials: Tensor) -> dict[str, Rate]:
        """Return the rates of texts, and as ``recall`` the share of all their tokens."""
        scores = SentenceScores(*trials[:, len(self.extras) :].unbind(1))
        rates = reconstruction_rates(scores, resamples=RESAMPLES)
        return rates | {"recall": rates["token_accuracy_pooled"]}

    def means(self, tables: Sequence[Tensor]) -> dict[str, float]:
        """Return the highest age, and the shares of clients; not of texts, which may differ."""
        clients = torch.stack([table[0] for table in tables])
        age, finished, certified = clients[:, : len(self.extras)].unbind(1)
        means = {"age": float(age.max()), "finished": float(finished.mean())}
        has_certificate = not bool(certified.isnan().any())
        return means | ({"certified": float(certified.mean())} if has_certificate else {})


def _find_texts(
    sources: Sequence[TokenBatch | Crossed], *, in_gradients: bool = False
) -> list[_Text]:
    """Return all texts that have a token.

    Args:
        sources: The micro-batches of this process, or what of them has crossed a split.
        in_gradients: Whether to exclude tokens that no label depends on.

    Raises:
        BatchError: Documents in a row are not read as they would be alone.
    """
    texts = list[_Text]()
    for source in sources:
        batch = source.batch if isinstance(source, Crossed) else source
        documents = batch.by_document()
        ids, mask = documents.input_ids.cpu(), documents.attention_mask
        if in_gradients:
            real = batch.per_document(batch.context_mask()).cpu()
        else:
            real = torch.ones_like(ids).bool() if mask is None else mask.cpu() != 0
        rows = real.any(1).nonzero().flatten().tolist()
        texts += [_Text(source, row, ids[row], real[row]) for row in rows]
    return texts


def _stack_tokens(texts: Sequence[_Text]) -> tuple[Tensor, Tensor]:
    """Return the tokens of texts, (n, L), padded, and where they are no padding, (n, L) bool."""
    return _pad_rows([text.ids for text in texts]), _pad_rows([text.real for text in texts])


def _pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Return rows (L_i, ...) as one tensor (n, L, ...), padded with zeros."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
