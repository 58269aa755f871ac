"""Word types from the output head's gradient, projected along the hidden states of public text.

A type is a distinct token of the vocabulary; it is used if it is a label in the batch. Each type
has a row in the head's gradient. A direction is aligned with the hidden states, so that they are
positive along it; the rows of used types then mostly point against it.

:class:`AlignedFlatChat` calibrates on public text in ``prepare``: it computes the parts of its
gradients (:mod:`~lightning_fedleak.attacks.words.head_gradients`), and fits a classifier of rows,
the *readout* (:mod:`~lightning_fedleak.attacks.words.aligned_readout`). ``run`` computes the
features of the rows that were shared and classifies them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks import base
from lightning_fedleak.attacks.base import Capability, ThreatModel
from lightning_fedleak.attacks.local_steps import LocalSteps, check_compressed
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.attacks.words import aligned_rows, aligned_updates
from lightning_fedleak.attacks.words.aligned_readout import (
    HeadCalibration,
    best_count,
    refit_direction,
    rehearse,
)
from lightning_fedleak.attacks.words.head_gradients import GradientParts, head_parameters
from lightning_fedleak.model import snapshots
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy, head_surface
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.whole_models import whole_model
from lightning_fedleak.progress import Stopwatch
from lightning_fedleak.validate import check_integer, explain_arguments

LENGTHS = (8, 12, 16, 25, 50, 100)  # tokens of a calibration text; not tuned
_MIN_LOG_ODDS = -30.0  # log odds of a type without evidence; e^-30 is below float32's rounding
_LORA_UPDATE = (
    "a LoRA head's updates by {} are not supported: measure the gradients of single steps (omit "
    "local_steps)"
)
# Numbers of tokens and texts if the model generates its public text. On stories15M F1 was .975; it
# was .971 with 4,000 tokens of 128 texts and .967 with 2,000 tokens of 64 (means of two seeds,
# 12 IMDB batches of 8 x 64 and of 4 x 16 each, November 2026).
_SAMPLED_TOKENS, _MAX_TEXTS = 3_000, 96
_SAMPLED_TEXTS = 32  # of the full length; attacks on membership use as many, which are shared
_SHORT = 25  # tokens up to which shorter texts are sampled instead; not tuned
# Maximal number of tokens in one public batch of a simulated update; bounds time, not tuned.
_MAX_BATCH_TOKENS = 1600


class AlignedFlatChat(base.Attack):
    """The types whose rows in the head's gradient differ from those of unused types.

    Row t of the head's gradient is ``sum_i (p_i(t) - [y_i = t]) h_i``. The attack projects it on a
    direction u on which the hidden states are positive, so that a row is negative only if its type
    was used. The rows of common words, which the model predicts more often than they occur, are not
    negative. So each row is compared with the row that public text predicts for an unused type. A
    small classifier, fitted on gradients of public text, gives the probability that the type was
    used. The number of types that are named maximises the expected F1.

    Nothing depends on the gradient's scale. For a matrix that is tied to the embedding, the sum of
    both parts is read. For a LoRA on the head, the gradient of its factor B is read. In a round, a
    client shares the weight change of several steps. For SGD it is a sum of gradients; for Adam and
    similar optimizers the classifier is fitted on public updates of the same class
    (:mod:`~lightning_fedleak.attacks.words.aligned_updates`), and a round that does not begin with
    a fresh optimizer is *unknown*. For gradients compressed by
    :class:`~lightning_fedleak.GradientCompression` (except signs), it is fitted on public gradients
    compressed the same way. Measurements and limits, such as label smoothing, are in
    docs/setups.md.

    Args:
        public_text: A text like the clients' (strings need ``tokenizer``), token ids, or
            ``"sampled"``: text that a causal model generates itself, or random frequent tokens for
            other models.
        tokenizer: The tokenizer of strings; a masked language model needs its ``mask_token_id``.
        calibration_tokens: The largest number of public tokens for the calibration (on SmolLM2-135M
            2,000 reached an F1 of .97, 6,000 .978, 12,000 .982). It takes about twice the time of a
            forward and backward over them.
        lengths: The lengths of the calibration texts in tokens, in equal numbers.
        seed: The seed of the calibration.
        name: The name in the logs.

    Attributes:
        calibration_seconds: The seconds that the last ``prepare`` took.

    Raises:
        ValueError: An argument is out of range, or there is no public text.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import AlignedFlatChat
        >>> from lightning_fedleak.model.anatomy import find_anatomy
        >>> from lightning_fedleak.attacks import gradient_of
        >>> from lightning_fedleak.model.batches import TokenBatch
        >>> from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
        >>> size = dict(vocab_size=64, n_positions=16, n_embd=48, n_layer=1, n_head=2)
        >>> anatomy = find_anatomy(GPT2LMHeadModel(GPT2Config(**size)).eval())
        >>> public_text = torch.randint(64, (32, 12))  # token ids; usually texts and a tokenizer
        >>> attack = AlignedFlatChat(public_text)
        >>> attack.prepare(anatomy)
        >>> ids = torch.tensor([[7, 8, 9, 10]])  # the client's text
        >>> gradient = gradient_of(anatomy, TokenBatch(ids, ids, None, "causal"), ["head.weight"])
        >>> guess = attack.run(Observation((GradientSnapshot(0, Stage.SHARED, gradient),)))
        >>> {8, 9, 10} <= set(guess.types.tolist())
        True
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update of the output head and has public text",
        Capability.SEES_HEAD_GRADIENT,
        Capability.KNOWS_MODEL,
        Capability.KNOWS_PUBLIC_TEXT,
    )
    default_name = "aligned_flatchat"
    config_names = ("calibration_tokens", "refresh_every", "seed")
    for_even_losses = True  # the readout is fitted on gradients in which all labels weigh the same
    needs_float64 = True  # logit maps, clusters' weights and best_count are computed in float64
    gathers = True  # prepare and refresh gather a sharded model themselves, with `whole_model`
    reads_adaptive_updates = True  # of Adam and the like, by a readout fitted on such updates
    reads_compressed = frozenset(("topk", "int8", "int4", "low_rank"))
    refresh_every = 500  # steps after which refresh aligns with the changed model; not tuned

    @explain_arguments("AlignedFlatChat('sampled')")
    def __init__(
        self,
        public_text: TextSource,
        *,
        tokenizer: Any = None,
        calibration_tokens: int = 12_000,
        lengths: Sequence[int] = LENGTHS,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.calibration_tokens = check_integer("calibration_tokens", calibration_tokens)
        if not lengths or min(lengths) < 2:
            raise ValueError(f"lengths must be at least 2 tokens each, got {tuple(lengths)}")
        attack = type(self).__name__
        self.public_text = PublicText.parse_required(public_text, tokenizer, attack)
        self.tokenizer = tokenizer
        self.lengths = tuple(lengths)
        self.steps: LocalSteps | None = None  # the round; None if single gradients are shared
        self._role = HEAD_WEIGHT  # the parameter whose gradient is read
        self._compression: snapshots.Compression | None = None
        self._why_unreadable: str | None = None  # the error of all updates of this run
        self._before: Tensor | None = None  # the weights that the current round began with
        self.seed = seed
        self.calibration_seconds = 0.0
        self._calibration: HeadCalibration | None = None
        self._aligned_at = 0  # the step at which refresh last fitted the directions

    def meet(self, facts: base.RunFacts) -> None:
        """Store the compression and the local steps of an update."""
        self._why_unreadable = None
        self._compression = facts.compression
        try:
            self.steps = LocalSteps.from_facts(facts)
        except base.UnusableObservation as error:
            self.steps, self._why_unreadable = None, str(error)

    @property
    def _adaptive_steps(self) -> LocalSteps | None:
        """Return the round of an adaptive optimizer that the readout is fitted on, or None.

        None means that the readout is fitted on gradients, also for rounds of SGD.
        """
        return None if self.steps is None or self.steps.linear else self.steps

    @property
    def _fitted_compression(self) -> snapshots.Compression | None:
        """Return the compression that the readout is fitted on; None for none."""
        plain = self.steps is None or self.steps.plain
        reads = self._compression is not None and self._compression.method in self.reads_compressed
        return self._compression if reads and plain else None

    def check_updates(self, facts: base.RunFacts) -> None:
        """Refuse compressed updates on which no readout can be fitted.

        Raises:
            Inapplicable: Updates are compressed and the optimizer is not plain SGD.
        """
        check_compressed(facts)

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return the output head's weight, or the factor B of a LoRA on the head."""
        self._role = head_surface(anatomy).role
        return base.Surfaces(gradients=(self._role,))

    def prepare(self, anatomy: Anatomy) -> None:
        """Calibrate on public text, without a change to the model.

        Raises:
            ValueError: the model has no output head, is no language model, or the text is too
                short.
        """
        watch = Stopwatch()
        self._role = head_surface(anatomy).role
        if self._role != HEAD_WEIGHT and self._adaptive_steps is not None:
            self._why_unreadable = _LORA_UPDATE.format(self._adaptive_steps.optimizer.__name__)
        else:
            generator = torch.Generator().manual_seed(self.seed)
            self._calibration = self._calibrate(anatomy, generator)
            self._keep_weights(anatomy)
        self.calibration_seconds = watch.seconds

    def _calibrate(self, anatomy: Anatomy, generator: torch.Generator) -> HeadCalibration:
        """Return a calibration fitted on public gradients or on the optimizer's public updates."""
        parts = self._parts(anatomy)
        steps = self._adaptive_steps
        check_integer("public texts to learn from", parts.n_sentences, at_least=4)
        if steps is None:
            weight, bias = head_parameters(anatomy)
            return rehearse(parts, weight, bias, generator, self._fitted_compression)
        with whole_model(anatomy.root):
            batches = self._public_batches(anatomy, generator)
            return aligned_updates.rehearse_updates(anatomy, parts, steps, batches, generator)

    def _text(self, anatomy: Anatomy) -> PublicText:
        """Return the text that was given, or sampled text: twice as many for adaptive updates."""
        n = _MAX_TEXTS if self._adaptive_steps is None else 2 * _MAX_TEXTS
        return PublicText.resolve(self.public_text, anatomy, self.seed, n=n, or_tokens=True)

    def _public_batches(
        self, anatomy: Anatomy, generator: torch.Generator
    ) -> Callable[[int], TokenBatch]:
        """Return a function that draws public batches of one length and few enough tokens."""
        text = self._text(anatomy)
        lengths = self._lengths(anatomy)
        mask = getattr(self.tokenizer, "mask_token_id", None)

        def batch(texts: int) -> TokenBatch:
            allowed = [n for n in lengths if n * texts <= _MAX_BATCH_TOKENS] or lengths[:1]
            length = allowed[int(torch.randint(len(allowed), (), generator=generator))]
            return text.batch(texts, length, generator, kind=anatomy.kind, mask_token_id=mask)

        return batch

    def _keep_weights(self, anatomy: Anatomy) -> None:
        """Store the weights that a client begins a round with, if its update depends on them."""
        if self.steps is None or self.steps.plain:
            return
        weight = anatomy.parameter(self._role)
        self._before = None if weight is None else snapshots.whole_tensor(weight).clone()

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Compute directions and expectations for the current model, every ``refresh_every`` steps.

        The readout is not fitted again. Steps are counted from the last refresh, because
        :meth:`prepare` does not know its step. A smaller step than that one means another fit, in
        which the attack is refreshed at once.
        """
        self._keep_weights(anatomy)
        if self._why_unreadable is not None or 0 <= step - self._aligned_at < self.refresh_every:
            return
        self._aligned_at = step
        if self._calibration is None:
            self.prepare(anatomy)
            return
        calibration = self._calibration_on(anatomy.device)
        before = calibration.expected
        parts = self._parts(anatomy, inputs=False)
        directions = calibration.directions.follow(parts.states)
        expected, _ = aligned_rows.ExpectedRows.compute(
            parts, *head_parameters(anatomy), directions, calibration.clusters, before.reference
        )
        expected = replace(expected, opening=before.opening)
        self._calibration = replace(calibration, directions=directions, expected=expected)

    @torch.no_grad()
    def run(self, view: snapshots.Observation, query: base.Query | None = None) -> base.WordGuess:
        """Return the types used in one update.

        Returns:
            ``scores`` are log odds, at least -30; ``n_types`` is the expected number of used types.

        Raises:
            Inapplicable: the gradient is compressed in a way that the readout is not fitted on.
            UnusableObservation: the gradient is non-finite or all zero; no row could be assigned to
                a used type although no noise was added; the update is of an unknown optimizer, of
                one that kept its state from earlier rounds, or of a LoRA head by another optimizer
                than SGD; or the readout is fitted on updates and this is a gradient.
            RuntimeError: neither ``prepare`` nor ``load_state_dict`` was called.
        """
        gradient = snapshots.whole_tensor(view.gradient(self._role))
        snapshot = view.gradients[-1]
        steps = self._adaptive_steps
        # A readout fitted on an optimizer's updates reads only updates. One that is fitted on
        # gradients also reads updates of SGD, which are sums of gradients.
        if snapshot.compression not in ("", getattr(self._fitted_compression, "method", "")):
            raise snapshots.Inapplicable(snapshots.explain_compression(snapshot.compression))
        if isinstance(snapshot, snapshots.UpdateSnapshot):
            gradient = self._convert_update(gradient, snapshot)
            if steps is not None:
                return self._read_update(gradient)
        if steps is not None:
            raise base.UnusableObservation(
                "the readout is fitted on updates: omit local_steps to attack gradients"
            )
        guess = self._read_gradient(gradient)
        if not len(guess.types) and not snapshot.noise_std > 0:
            raise base.UnusableObservation(
                "no row of the head's gradient could be assigned to a used type"
            )
        return guess

    def _convert_update(self, update: Tensor, snapshot: snapshots.UpdateSnapshot) -> Tensor:
        """Return an update in the readout's form: a sum of gradients for SGD, else normalized."""
        if self._why_unreadable is not None:
            raise base.UnusableObservation(self._why_unreadable)
        steps = self.steps
        if steps is None or steps.plain:
            return update
        steps.check_fresh(snapshot.fresh)
        base.check_readable(update.abs().max(), "the head's update")
        rate = snapshot.learning_rate
        assert self._before is not None
        before = self._before = self._before.to(update.device)
        if self._adaptive_steps is None:
            return steps.without_decay(update.float(), before.float(), rate)
        return aligned_updates.normalize_update(update, before, rate, steps)

    def _read_update(self, update: Tensor) -> base.WordGuess:
        """Return the guess for a normalized update of an adaptive optimizer."""
        assert self._before is not None
        fitted = self._calibration_on(update.device)
        features = aligned_updates.update_features(
            update, self._before.float(), fitted.directions, fitted.expected
        )
        odds = fitted.readout.logits(features)
        used = odds.sigmoid()
        types = odds.argsort(descending=True)[: int(best_count(used))]
        return base.WordGuess(types, odds.clamp(min=_MIN_LOG_ODDS), float(used.sum()))

    def _calibration_on(self, device: torch.device) -> HeadCalibration:
        self._calibration = self.require_calibration(self._calibration).on_device(device)
        return self._calibration

    def _read_gradient(self, gradient: Tensor) -> base.WordGuess:
        """Return the guess for a gradient, or a sum of gradients."""
        calibration = self._calibration_on(gradient.device)
        directions, expected = calibration.directions, calibration.expected
        summary = aligned_rows.RowSummary.read(gradient, directions.u)
        summary, _ = refit_direction(gradient, summary, directions.u, expected.reference)
        units = aligned_rows.estimate_units(summary, expected, expected.reference)
        scores = torch.full_like(summary.projection, _MIN_LOG_ODDS)
        if units is None:
            return base.WordGuess(types=scores.argsort()[:0], scores=scores, n_types=0.0)
        rows = aligned_rows.plausible(summary, units).nonzero()[:, 0]
        features = aligned_rows.row_features(
            gradient[rows], summary.select(rows), units, directions, expected.rows(rows)
        )
        odds = calibration.readout.logits(features)
        used = odds.sigmoid()
        scores[rows] = odds.clamp(min=_MIN_LOG_ODDS)
        types = rows[odds.argsort(descending=True)[: int(best_count(used))]]
        return base.WordGuess(types, scores, float(used.sum()))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the calibration."""
        state = {"aligned_at": torch.tensor(self._aligned_at)}
        if self._calibration is not None:
            state |= self._calibration.tensors()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a calibration."""
        if "clusters" in state:  # absent if the attack was never calibrated
            self._aligned_at = int(state["aligned_at"])
            self._calibration = HeadCalibration.from_tensors(state)

    def arguments(self) -> dict[str, object]:
        """Return the settings, local steps and compression that the readout is fitted on."""
        steps, compression = self._adaptive_steps, self._fitted_compression
        compressed = {} if compression is None else {"compression": str(compression)}
        return self.config() | compressed | ({} if steps is None else steps.describe())

    def _parts(self, anatomy: Anatomy, inputs: bool = True) -> GradientParts:
        """Return the hidden states of public text and, if ``inputs``, a tied embedding's part."""
        with whole_model(anatomy.root):
            batches = self._batches(anatomy)
            return GradientParts.compute(anatomy, batches, inputs=inputs)

    def _lengths(self, anatomy: Anatomy) -> list[int]:
        """Return the lengths of public texts, at most the model's longest input."""
        longest = getattr(getattr(anatomy.model, "config", None), "max_position_embeddings", None)
        return sorted({min(n, longest or n) for n in self.lengths})

    def _batches(self, anatomy: Anatomy) -> list[TokenBatch]:
        """Return batches of public texts, one batch per length, with no text in two of them."""
        generator = torch.Generator().manual_seed(self.seed)
        lengths, tokens = self._lengths(anatomy), self.calibration_tokens
        is_sampled = self._adaptive_steps is None and not isinstance(self.public_text, PublicText)
        n_texts = max(2, (min(tokens, _SAMPLED_TOKENS) if is_sampled else tokens) // sum(lengths))
        if is_sampled and anatomy.kind == "causal":
            n_texts = min(n_texts, max(2, _MAX_TEXTS // len(lengths)))
            text, groups = self._sample(anatomy, lengths, n_texts)
        else:
            text = self._text(anatomy)
            groups = [(range(len(text)), lengths)]
        if anatomy.kind == "causal":
            text = text.with_and_without_start()
        mask = getattr(self.tokenizer, "mask_token_id", None)
        batches = []
        for rows, group in groups:
            order = torch.tensor(rows)[torch.randperm(len(rows), generator=generator)].tolist()
            n = min(n_texts, max(1, len(order) // len(group)))
            for i, length in enumerate(group):
                if indices := order[i * n : (i + 1) * n]:
                    batches.append(
                        text.rows(indices, length, generator, kind=anatomy.kind, mask_token_id=mask)
                    )
        return batches

    def _sample(
        self, anatomy: Anatomy, lengths: Sequence[int], n_texts: int
    ) -> tuple[PublicText, list[tuple[range, Sequence[int]]]]:
        """Return texts that the model writes, and the rows of long and short ones, with lengths.

        There are at least ``n_texts`` for each length. Texts of short lengths are written no
        longer, since writing takes most of the time.
        """
        short, long = ([n for n in lengths if (n <= _SHORT) == is_short] for is_short in (1, 0))
        n_long = max(_SAMPLED_TEXTS, n_texts * len(long))
        # One token more, since every second text loses its start token.
        shorter = [n + 1 for n in reversed(short) for _ in range(n_texts)]
        text = PublicText.resolve("sampled", anatomy, self.seed, n=n_long, shorter=shorter)
        groups: list[tuple[range, Sequence[int]]] = [(range(n_long), long)] if long else []
        starts = range(n_long, len(text), n_texts)
        for start, length in zip(starts, reversed(short), strict=True):
            groups.append((range(start, start + n_texts), [length]))
        return text, groups
