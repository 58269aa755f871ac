"""Membership inference on updates: the passive base class, and the base of crafted layers.

:class:`PassiveMembership` is the base of attacks by an honest but curious server.
:class:`MembershipAttack` is the base of the active attacks.

A dishonest server adds crafted layers to the model that a client trains (Vu et al. 2024, Fig. 3).
It sets their weights so that the gradient of a few trainable numbers, called *rungs* in this
package, shows whether a target is in the batch (Fig. 2). A *target* is the hidden state, or states,
of a candidate text. An adversary has three parts: A_init (:meth:`MembershipAttack.prepare`),
A_attack (the crafted layers themselves) and A_guess (:meth:`MembershipAttack.guess`).
:meth:`MembershipAttack.gradient` is the gradient that a client would compute through the crafted
layers, in closed form and for many targets at once.

The crafted layers are placed after a block (Fig. 3 b). Their output, z (B, R, K), is added to the
residual stream along one fixed unit direction w: ``h <- h + scale * sum_k z_k w``. So for every
rung the gradient of the loss with respect to z_k is ``scale * <dL/dh, w>`` (:func:`upstream_of`).
w is random, because a constant vector lies in the null space of LayerNorm.

The server must be able to *choose the architecture*. A real LoRA adapter has neither a ReLU nor a
bias, and a Houlsby adapter has one ReLU between two trained matrices. Neither can be set to be
active on one text only, so these attacks fail if the client chooses the trained modules itself.

Only the rungs' biases are trained. The first layer W_1, which holds the target, and the second
layer's weights W_2 are frozen. The paper trains them too, but the attack reads only the gradient of
b_2. With the others frozen the shared update is smaller than that of any adapter, the target does
not drift during training, and under per-sample clipping no other part of the crafted layers takes a
share of the norm. A client can notice an adapter whose matrices are not trained. If they were
trained, the gradient of W_2 would show the same as that of b_2.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import base
from lightning_fedleak.attacks.membership.attention_layers import PublicStates
from lightning_fedleak.attacks.public_text import PublicText, TextSource, frequent_tokens
from lightning_fedleak.model.anatomy import Anatomy, place_of
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import COMPRESSIONS, check_finite
from lightning_fedleak.validate import check_choice, check_integer

Granularity = Literal["full", "token"]

FALSE_POSITIVE_RATE = 0.01
"""The rate at which a batch without the target is guessed to contain it, under noise."""

CRAFTED = "crafted.rungs"
"""The role of the rungs' gradient in a snapshot: (G, K) for G targets and K rungs."""


@dataclass(frozen=True)
class MembershipGuess(base.Guess):
    """Scores and decisions: whether each target was in the client's batch.

    Attributes:
        scores: (G,) higher is more likely a member.
        members: (G,) bool, the adversary's own decision b'.
    """

    scores: Tensor
    members: Tensor


class PassiveMembership(base.Attack):
    """An honest but curious server that infers whether a text is in the batch.

    It adds nothing to the model and uses the gradients or updates of the model's parameters.

    Args:
        public_text: Text like the clients', or ``"sampled"`` for text that the model writes.
        tokenizer: The tokenizer of ``public_text``, if that holds strings.
        public_rows: The number of public texts.
        tokens: The largest number of tokens of a text that are used.
        seed: The seed of sampled text.
        name: The name in the logs.

    Raises:
        ValueError: a number out of range, or no public text.
    """

    threat_model = base.ThreatModel.create(
        "an honest but curious server that reads one update and holds the candidate texts",
        base.Capability.KNOWS_MODEL,
        base.Capability.KNOWS_PUBLIC_TEXT,
        base.Capability.KNOWS_TARGET_TEXT,
    )
    reads_compressed = COMPRESSIONS  # gradients under any compression are scored
    restores_fully = False  # only public text is saved; prepare computes the rest again
    config_names: ClassVar[tuple[str, ...]] = (
        *("public_text", "public_rows", "tokens", "refresh_every", "seed"),
    )
    _prepared_at = 0  # the optimizer step at which public text was last run
    refresh_every = 50  # steps after which refresh runs the model on public text again; not tuned
    controls = 8  # public texts after the first ``public_rows`` that are scored as controls

    def __init__(
        self,
        public_text: TextSource = "sampled",
        *,
        tokenizer: Any = None,
        public_rows: int = 24,
        tokens: int = 64,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.public_rows = check_integer("public_rows", public_rows, at_least=2)
        self.tokens = check_integer("tokens", tokens, at_least=2)
        attack = type(self).__name__
        self.public_text = PublicText.parse_required(public_text, tokenizer, attack)
        self.seed = seed
        self._public: PublicText | None = None
        self._start: dict[nn.Parameter, Tensor] = {}

    def _round_starts(self, anatomy: Anatomy) -> None:
        """Store the trained weights at the start of a round, which the server sent.

        Sharded weights are not stored: texts are then scored with the weights at the round's end.
        """
        rounds = self._facts.local_steps is not None
        trained = (p for p in anatomy.root.parameters() if rounds and p.requires_grad)
        self._start = {p: p.detach().clone() for p in trained if not hasattr(p, "full_tensor")}

    @contextmanager
    def _at_start(self) -> Iterator[None]:
        """Run the block with the weights of the round's start in the model."""
        current_values = {parameter: parameter.data for parameter in self._start}
        try:
            for parameter, value in self._start.items():
                parameter.data = value
            yield
        finally:
            for parameter, value in current_values.items():
                parameter.data = value

    def _texts(
        self, anatomy: Anatomy, n: int, *, skip: int = 0, tokens: int | None = None
    ) -> TokenBatch:
        """Return a fixed batch of n public texts with labels, after the first ``skip`` ones.

        Args:
            anatomy: The model, which may write the texts.
            n: The number of texts.
            skip: The number of texts to skip.
            tokens: The length to which texts are cut; None for ``tokens`` of the attack.
        """
        if self._public is None:
            self._public = PublicText.resolve(
                self.public_text, anatomy, self.seed, n=self.public_rows + self.controls
            )
        generator = torch.Generator().manual_seed(self.seed)
        rows = self._public.draw(skip + n, generator)[skip:].tolist()
        return self._public.rows(rows, min(tokens or self.tokens, self.tokens), generator)

    def _trial_texts(self, anatomy: Anatomy, n: int) -> TokenBatch:
        """Return n public texts, or random tokens as long as the model has not written any."""
        if self._public is not None or self.public_text != "sampled":
            return self._texts(anatomy, n)
        ids = frequent_tokens(anatomy, n, self.tokens, torch.Generator().manual_seed(self.seed))
        return TokenBatch(ids, ids, torch.ones_like(ids), "causal")

    def state_dict(self) -> dict[str, Tensor]:
        """Return the text that the model wrote. Everything else is computed from it again."""
        if self._public is None or self.public_text != "sampled":
            return {}
        rows = nn.utils.rnn.pad_sequence(self._public.sentences, True, padding_value=-1)
        return {"public": rows}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if "public" in state:
            self._public = PublicText([row[row >= 0] for row in state["public"]])

    @abstractmethod
    def run(self, view: base.Observation, query: base.Query | None = None) -> MembershipGuess:
        """Return for each text of the query whether it was in the batch.

        Raises:
            UnusableObservation: The snapshot holds nothing that the attack can use.
        """


class MembershipAttack(base.Attack):
    """A server that crafts layers to infer whether a text is in the batch.

    The crafted layers read the hidden states at ``layer`` and return one number per rung for each
    of their inputs. That number is added to the residual stream along one fixed direction, so the
    loss depends on it. Only the rungs' biases are trained; all other weights are frozen.

    Args:
        layer: The layer whose hidden states are read, as in Hugging Face's ``hidden_states``: 0 is
            the output of the embeddings, k that of block k (counted from 1).
        granularity: ``"token"`` reads the hidden state of one token (Remark 1), ``"full"`` all
            hidden states of a sentence, concatenated.
        tokens: With ``"full"``, the number of positions of a sentence that are read. Shorter
            sentences are padded with zeros, longer ones cut ("use a part", Sect. 4.1).
        name: The name in the logs.

    Raises:
        ValueError: a negative layer, an unknown granularity, or fewer than 1 token.
    """

    threat_model = base.ThreatModel.create(
        "a dishonest server that adds layers of its own, asking for a text it holds",
        base.Capability.CHOOSES_ARCHITECTURE,
        base.Capability.CHOOSES_WEIGHTS,
        base.Capability.KNOWS_MODEL,
        base.Capability.KNOWS_TARGET_TEXT,
    )

    def __init__(
        self,
        layer: int,
        granularity: Granularity = "token",
        tokens: int = 32,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.layer = check_integer("layer", layer, at_least=0)
        check_choice("granularity", granularity, ("full", "token"))
        self.tokens = check_integer("tokens", tokens)
        self.granularity: Granularity = granularity

    @property
    def _defended(self) -> bool:
        """Return whether a defence of the run acts on gradients."""
        return "gradients" in self._facts.defended

    @property
    def read_together(self) -> int | None:
        """Return the number of positions that form one input; None if each token is one."""
        return self.tokens if self.granularity == "full" else None

    def reads(self, position: int) -> slice | None:
        """Return the tokens of the target's sentence whose hidden states the guess depends on.

        Args:
            position: The position of the target token.

        Returns:
            A slice of the sentence's tokens, in their order; None: that one token alone.
        """
        return slice(0, self.tokens) if self.granularity == "full" else None

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return the hidden states that the crafted layers read.

        Raises:
            ValueError: the model has no such layer.
        """
        return base.Surfaces(layers=(place_of(anatomy, self.layer).name,))

    def prepare(self, anatomy: Anatomy) -> None:
        """Run A_init: check the layer. Subclasses may also calibrate on public text."""
        place_of(anatomy, self.layer)

    @property
    @abstractmethod
    def rungs(self) -> int:
        """Return K, the number of trainable numbers of the crafted layers."""

    @abstractmethod
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """Return the gradient of the crafted layers' rungs, per sample, in closed form.

        Args:
            targets: (G, D) the targets, from :meth:`embed`.
            hidden: (B, L, d) the hidden states of the client's batch at ``layer``.
            mask: (B, L), 0 at padding, or None.
            upstream: (B, L) the gradient of the loss with respect to the crafted output at each
                token, the same for all rungs; with ``"full"`` (B, 1).

        Returns:
            (B, G, K); its sum over B is the gradient of the batch.
        """

    @property
    def guess_rung(self) -> int:
        """Return the index of the rung that decides."""
        raise NotImplementedError(f"{type(self).__name__} must define guess_rung, or its own guess")

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> MembershipGuess:
        """Run A_guess: return scores and decisions for a gradient, see :func:`read_rungs`.

        Args:
            gradient: (G, K) the gradient that the client shared.
            noise_std: The standard deviation of the noise that a defence added to each number, as
                far as the adversary knows it; 0 for none.

        Raises:
            UnusableObservation: The gradient is not finite.
            ValueError: The gradient does not have K rungs.
        """
        check_choice("rungs of the gradient", gradient.shape[1], (self.rungs,))
        return read_rungs(gradient, noise_std, self.guess_rung)

    def embed(self, hidden: Tensor, query: base.Query) -> Tensor:
        """Return the targets in the form in which the crafted layers hold them.

        Args:
            hidden: (G, L, d) the hidden states of the target sentences at ``layer``, computed by
                the server's copy of the model.
            query: The target sentences, and with ``"token"`` the position of the target token in
                each; by default the last real token.

        Returns:
            (G, D): D = d for ``"token"``, ``tokens * d`` for ``"full"``.
        """
        if self.granularity == "full":
            return sentence_rows(hidden, query.attention_mask, self.tokens)
        rows = torch.arange(len(hidden), device=hidden.device)
        return hidden[rows, target_positions(query, hidden)]

    def run(self, view: base.Observation, query: base.Query | None = None) -> MembershipGuess:
        """Return A_guess on the newest gradient of the crafted layers in ``view``.

        Raises:
            UnusableObservation: the gradient is not finite, or ``view`` holds none of crafted
                layers.
        """
        snapshot = next((s for s in reversed(view.gradients) if CRAFTED in s.tensors), None)
        noise_std = 0.0 if snapshot is None else snapshot.noise_std
        return self.guess(view.gradient(CRAFTED), noise_std)


class CalibratedMembership(MembershipAttack):
    """Crafted layers whose numbers depend on the hidden states of public text."""

    threat_model = base.ThreatModel.create(
        "a dishonest server that adds layers of its own, asking for a text it holds",
        *MembershipAttack.threat_model.needs,
        base.Capability.KNOWS_PUBLIC_TEXT,
    )
    needs_float64 = True  # for the whitening
    # The share of batches without the target that are guessed to have it, in the calibration and,
    # with noise, in the decision.
    false_positive_rate = FALSE_POSITIVE_RATE
    refresh_every = 500  # steps after which refresh calibrates again; not tuned
    seed = 0  # of public text and calibration
    public_targets = 100  # public texts beside those of a batch, targets of the calibration
    batch: int
    public_text: PublicText | Literal["sampled"]
    _prepared_at = 0  # the optimizer step of the last calibration

    def prepare(self, anatomy: Anatomy) -> None:
        """Run A_init: calibrate on the hidden states of public text.

        Raises:
            ValueError: the model has no such layer, or the public text is too short.
        """
        super().prepare(anatomy)
        text = PublicText.resolve(self.public_text, anatomy, self.seed)
        n_texts = max(2 * (self.batch + 1), self.batch + self.public_targets)
        n = max(8192, 4 * anatomy.hidden_size, n_texts * self.tokens)
        states = PublicStates.sample(anatomy, self.layer, text, self.tokens, n, self.seed)
        self.calibrate(states)

    @abstractmethod
    def calibrate(self, states: PublicStates) -> None:
        """Fit what depends on public text, such as a whitening, to its hidden states."""

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Calibrate again after ``refresh_every`` steps, and at the start of a fit."""
        if not 0 <= step - self._prepared_at < self.refresh_every:
            self._prepared_at = step
            self.prepare(anatomy)


def reach(counts: Tensor, tokens: int) -> int:
    """Return the number of columns that hold ``tokens`` tokens of every text.

    Args:
        counts: (G, L) bool, the positions that count; a text's tokens start at the first of them.
        tokens: The number of tokens of each text; a shorter text ends earlier.
    """
    return int(counts.int().argmax(1).max()) + tokens


def target_positions(query: base.Query, hidden: Tensor) -> Tensor:
    """Return (G,) the position of each text's target token: the query's, or the last real one."""
    if query.positions is not None:
        return query.positions.to(hidden.device)
    places = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[:2])
    if query.attention_mask is not None:
        places = places.masked_fill(query.attention_mask.to(hidden.device) == 0, -1)
    return places.amax(1)


def sentence_rows(hidden: Tensor, mask: Tensor | None, tokens: int) -> Tensor:
    """Return each sentence as one row, (B, tokens * d): its real tokens in order, then zeros.

    Real tokens are moved to the front, so the side of the padding does not matter.
    """
    b, length, d = hidden.shape
    if mask is not None:
        real = mask.to(hidden.device) != 0
        order = torch.argsort((~real).to(torch.int8), dim=1, stable=True)
        hidden = hidden.gather(1, order[..., None].expand(b, length, d))
        hidden = hidden * real.gather(1, order)[..., None].to(hidden.dtype)
    if length < tokens:
        hidden = nn.functional.pad(hidden, (0, 0, 0, tokens - length))
    return hidden[:, :tokens].reshape(b, tokens * d)


def check_gradient(gradient: Tensor) -> None:
    """Raise ``UnusableObservation`` if a number of the layers' gradient is NaN or infinite."""
    check_finite(gradient, "the gradient of the crafted layers")


def check_targets(targets: Tensor) -> None:
    """Raise ``ValueError`` if a number of a target is NaN or infinite."""
    check_finite(targets, "a target, where the server's copy of the model overflowed", ValueError)


def read_rungs(
    gradient: Tensor, noise_std: float, rung: int, false_positive_rate: float = FALSE_POSITIVE_RATE
) -> MembershipGuess:
    """Run A_guess on the rungs of a gradient, with or without noise on it.

    Without noise, a guess depends on which rungs are not zero. With Gaussian noise, the statistic
    is the absolute value of one rung in units of the noise. Its threshold is the quantile of the
    statistic for a rung that holds only noise.

    Args:
        gradient: (G, K) the gradient of the rungs, the hardest to reach first.
        noise_std: The standard deviation of the noise on each number; 0 for none.
        rung: The index of the rung that decides.
        false_positive_rate: The false positive rate of the decision under noise.

    Returns:
        The scores and the decisions. Without noise, a score is the number of rungs from the first
        that is not zero to the last, and 0 if all are zero. With noise, it is the statistic.

    Raises:
        UnusableObservation: the gradient is not finite.
    """
    check_finite(gradient, "the gradient of the crafted layers")
    if noise_std == 0.0:
        fires = gradient != 0
        places = torch.arange(gradient.shape[1], 0, -1, device=gradient.device)
        return MembershipGuess((fires * places).amax(1).to(torch.float32), fires[:, rung])
    scores = gradient[:, rung].abs() / noise_std
    tail = torch.tensor(1 - false_positive_rate / 2, dtype=torch.float64)
    return MembershipGuess(scores, scores > float(torch.special.ndtri(tail)))


def upstream_of(
    delta: Tensor,
    direction: Tensor,
    scale: float,
    *,
    whole_sentence: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the loss at the crafted layers' output, the same for all rungs.

    Args:
        delta: (B, L, d) the gradient of the loss with respect to the hidden states at ``layer``. If
            it is from a run with the crafted layers, the result is exact. If it is from a run
            without them, the result is exact to first order in ``scale``.
        direction: (d,) the unit vector w, from :func:`direction_of`.
        scale: The factor of the crafted layers' output.
        whole_sentence: True for granularity ``"full"``, whose output is added at every real token.
        mask: (B, L), 0 at padding; used for ``whole_sentence`` only.

    Returns:
        The gradient (B, L), or (B, 1) with ``whole_sentence``, at least in float32.
    """
    dtype = torch.promote_types(delta.dtype, torch.float32)
    upstream = scale * (delta.to(dtype) * direction.to(delta.device, dtype)).sum(-1)
    if not whole_sentence:
        return upstream
    if mask is not None:
        upstream = upstream * (mask.to(upstream.device) != 0)
    return upstream.sum(1, keepdim=True)


def direction_of(width: int, seed: int = 0) -> Tensor:
    """Return the unit vector w, (width,), float64, drawn from its own generator."""
    normal = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit: Tensor = normal / normal.norm()
    return unit
