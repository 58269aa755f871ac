"""Active membership inference: what the crafted-layer adversaries have in common.

A dishonest server adds layers of its own to the model that a client trains (Vu et al. 2024,
Fig. 3) and sets their weights so that the gradient of a few trainable numbers, here called *rungs*,
tells whether a target is in the batch (Fig. 2). An adversary has three parts: A_init
(:meth:`MembershipAttack.prepare`), A_attack (:meth:`MembershipAttack.craft`, real layers) and
A_guess (:meth:`MembershipAttack.guess`). The gradient that a client would compute through the
crafted layers exists in closed form too (:meth:`MembershipAttack.gradient`), for many targets at
once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.text_layers import place_of
from lightning_fedleak.attacks.base import (
    Attack,
    Guess,
    Query,
    RunFacts,
    Surfaces,
    UnusableObservation,
)
from lightning_fedleak.attacks.public_text import Given, PublicText
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.snapshots import Observation
from lightning_fedleak.threats import Capability, ThreatModel

Granularity = Literal["full", "token"]

CRAFTED = "crafted.rungs"
"""Role of the crafted layers' trainable numbers in a snapshot: (G, K) for G targets, K rungs."""


@dataclass(frozen=True)
class MembershipGuess(Guess):
    """Whether each target was in the client's batch.

    Attributes:
        scores: (G,) higher is more likely a member.
        members: (G,) bool, the adversary's own decision b'.
    """

    scores: Tensor
    members: Tensor


class PassiveMembership(Attack):
    """An honest but curious server that asks whether a text is in the batch.

    It adds nothing to the model: what it reads is what the client shares of its own parameters.

    Args:
        public_text: text like the clients', or ``"sampled"``: what any text has in common.
        tokenizer: for strings.
        public_rows: public texts.
        tokens: of a text that are read at most.
        refresh_every: steps after which ``refresh`` runs the model on public text anew.
        seed: of sampled text.
        name: as in the logs.

    Raises:
        ValueError: a number out of range, or no public text.
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update and holds the texts it asks about",
        Capability.KNOWS_MODEL,
        Capability.KNOWS_PUBLIC_TEXT,
        Capability.KNOWS_TARGET_TEXT,
    )
    restores_fully = False
    controls = 8
    """Public texts behind ``public_rows`` that an attack may ask for besides."""

    def __init__(
        self,
        public_text: Given = "sampled",
        *,
        tokenizer: Any = None,
        public_rows: int = 24,
        tokens: int = 64,
        refresh_every: int = 50,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        for argument, value, least in (
            ("public_rows", public_rows, 2),
            ("tokens", tokens, 2),
            ("refresh_every", refresh_every, 1),
        ):
            if isinstance(value, bool) or value < least:
                raise ValueError(f"{argument} must be an integer of at least {least}, got {value}")
        text = PublicText.parse(public_text, tokenizer)
        if text is None:
            raise ValueError(f"{type(self).__name__} needs public_text: texts, or 'sampled'")
        self.public_text = text
        self.public_rows = public_rows
        self.tokens = tokens
        self.refresh_every = refresh_every
        self.seed = seed
        self._public: PublicText | None = None
        self._start: dict[nn.Parameter, Tensor] = {}

    def _round_starts(self, anatomy: Anatomy, facts: RunFacts) -> None:
        """Keeps the trained weights of a round's start, which the server sent.

        Sharded ones are not kept: candidates are asked for with those of the round's end then.
        """
        rounds = facts.local_steps is not None
        trained = (p for p in anatomy.root.parameters() if rounds and p.requires_grad)
        self._start = {p: p.detach().clone() for p in trained if not hasattr(p, "full_tensor")}

    @contextmanager
    def _at_start(self) -> Iterator[None]:
        """Gives the model the weights of the round's start, within."""
        now = {parameter: parameter.data for parameter in self._start}
        try:
            for parameter, value in self._start.items():
                parameter.data = value
            yield
        finally:
            for parameter, value in now.items():
                parameter.data = value

    def _texts(self, anatomy: Anatomy, n: int, *, behind: int = 0) -> TokenBatch:
        """Public texts as ids with labels, the same ones every time, behind so many others."""
        if self._public is None:
            self._public = PublicText.resolve(
                self.public_text, anatomy, self.seed, n=self.public_rows + self.controls
            )
        generator = torch.Generator().manual_seed(self.seed)
        rows = self._public.draw(behind + n, generator)[behind:].tolist()
        return self._public.rows(rows, self.tokens, generator)

    def state_dict(self) -> dict[str, Tensor]:
        """Text that the model wrote, which takes longest; the rest follows from it."""
        if self._public is None or self.public_text != "sampled":
            return {}
        rows = nn.utils.rnn.pad_sequence(self._public.sentences, True, padding_value=-1)
        return {"public": rows}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        if "public" in state:
            self._public = PublicText([row[row >= 0] for row in state["public"]])

    def calibration_inputs(self) -> dict[str, object] | None:
        """What text that the model writes hangs on; given text has to be run anew."""
        if self.public_text != "sampled":
            return None
        return {"seed": self.seed, "texts": self.public_rows + self.controls}

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports."""
        text = self.public_text
        return {
            "public_text": text.digest if isinstance(text, PublicText) else text,
            "public_rows": self.public_rows,
            "tokens": self.tokens,
            "refresh_every": self.refresh_every,
            "seed": self.seed,
        }

    @abstractmethod
    def run(self, view: Observation, query: Query | None = None) -> MembershipGuess:
        """Says of each text of the query whether it was in the batch.

        Raises:
            UnusableObservation: the snapshot tells nothing.
        """


class MembershipAttack(Attack):
    """A server that crafts layers to ask whether a text is in the batch.

    The crafted layers read the hidden states at ``layer`` and return one number per rung for each
    of their inputs; that number is added to the residual stream along one fixed direction, so that
    the loss depends on it. All of a crafted layer's weights are frozen but the rungs' biases.

    Args:
        layer: whose hidden states are read, as in Hugging Face's ``hidden_states``: 0 is the
            output of the embeddings, k that of block k (counted from 1).
        granularity: ``"token"`` asks for the hidden state of one token (Remark 1), ``"full"`` for
            all hidden states of a sentence, one after the other.
        tokens: with ``"full"``, how many positions of a sentence are read: shorter ones are filled
            with zeros, longer ones cut ("use a part", Sect. 4.1).
        name: in the logs.

    Raises:
        ValueError: a negative layer, an unknown granularity, or fewer than 1 token.
    """

    threat_model = ThreatModel.create(
        "a dishonest server that adds layers of its own, asking for a text it holds",
        Capability.CHOOSES_ARCHITECTURE,
        Capability.CHOOSES_WEIGHTS,
        Capability.KNOWS_MODEL,
        Capability.KNOWS_TARGET_TEXT,
    )

    def __init__(
        self,
        layer: int,
        granularity: Granularity = "token",
        tokens: int = 32,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise ValueError(
                f"layer must be 0 (the embeddings' output) or the number of a block, got {layer!r}"
            )
        if granularity not in ("full", "token"):
            raise ValueError(f"granularity must be 'full' or 'token', got {granularity!r}")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"tokens must be a positive integer, got {tokens!r}")
        self.layer = layer
        self.granularity: Granularity = granularity
        self.tokens = tokens

    @property
    def read_together(self) -> int | None:
        """Positions of a sentence that are read as one input; None where each token is one."""
        return self.tokens if self.granularity == "full" else None

    def reads(self, position: int) -> slice | None:
        """On the hidden states of which tokens of the target's sentence the guess rests.

        Args:
            position: of the token asked for.

        Returns:
            A slice of the sentence's tokens, in their order; None: that one token alone.
        """
        return slice(0, self.tokens) if self.granularity == "full" else None

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """The hidden states that the crafted layers read.

        Raises:
            ValueError: the model has no such layer.
        """
        return Surfaces(layers=(place_of(anatomy, self.layer).name,))

    def prepare(self, anatomy: Anatomy) -> None:
        """A_init: checks the layer, and calibrates on public text where the attack does so."""
        place_of(anatomy, self.layer)

    @property
    @abstractmethod
    def rungs(self) -> int:
        """K, the number of trainable numbers of the crafted layers."""

    @abstractmethod
    def craft(self, target: Tensor) -> nn.Module:
        """A_attack: real layers for one target.

        Args:
            target: (D,) as :meth:`embed` gives it.

        Returns:
            A module that maps hidden states (B, L, d) and a mask (B, L), or None where nothing is
            padded, to (B, R, K): one number per rung for each of R inputs (L tokens, or one
            sentence). Its only trainable parameter is ``bias``, (K,). Built without global random
            numbers.
        """

    @abstractmethod
    def gradient(
        self, targets: Tensor, hidden: Tensor, mask: Tensor | None, upstream: Tensor
    ) -> Tensor:
        """What backward gives ``craft(target).bias``, per sample, in closed form.

        Args:
            targets: (G, D).
            hidden: (B, L, d) hidden states of the client's batch at ``layer``.
            mask: (B, L), 0 where padded, or None.
            upstream: (B, L) gradient of the loss with respect to the crafted output at each token,
                the same for all rungs; with ``"full"`` (B, 1).

        Returns:
            (B, G, K); its sum over B is the gradient of the batch.
        """

    @abstractmethod
    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> MembershipGuess:
        """A_guess.

        Args:
            gradient: (G, K) as it left the client.
            noise_std: standard deviation of the noise that a defence is known to have added to
                each number; 0 where none.

        Raises:
            UnusableObservation: the gradient is not finite.
        """

    def embed(self, hidden: Tensor, query: Query) -> Tensor:
        """The targets in the shape that is crafted from.

        Args:
            hidden: (G, L, d) hidden states of the target sentences at ``layer``, computed by the
                server's copy.
            query: the target sentences, and with ``"token"`` the position of the target token in
                each; without positions the last real token.

        Returns:
            (G, D): D = d for ``"token"``, ``tokens * d`` for ``"full"``.
        """
        if self.granularity == "full":
            return sentence_rows(hidden, query.attention_mask, self.tokens)
        positions = query.positions
        if positions is None:
            positions = last_real(query.attention_mask, hidden)
        return hidden[torch.arange(len(hidden), device=hidden.device), positions.to(hidden.device)]

    def run(self, view: Observation, query: Query | None = None) -> MembershipGuess:
        """A_guess on the newest gradient of the crafted layers in ``view``.

        Raises:
            UnusableObservation: the gradient is not finite.
            KeyError: ``view`` holds no gradient of crafted layers.
        """
        snapshot = next((s for s in reversed(view.gradients) if CRAFTED in s.tensors), None)
        noise_std = 0.0 if snapshot is None else snapshot.noise_std
        return self.guess(view.gradient(CRAFTED), noise_std)


def reach(counts: Tensor, tokens: int) -> int:
    """Columns (from the left) in which every text has ``tokens`` from its first that counts.

    Args:
        counts: (G, L), bool.
        tokens: of each text; one of fewer ends earlier.
    """
    return int(counts.int().argmax(1).max()) + tokens


def last_real(mask: Tensor | None, hidden: Tensor) -> Tensor:
    """(G,) index of the last token of each row that is not padded.

    Raises:
        ValueError: a row is all padding.
    """
    g, length = hidden.shape[:2]
    if mask is None:
        return torch.full((g,), length - 1, device=hidden.device)
    real = mask.to(hidden.device) != 0
    if not bool(real.any(1).all()):
        raise ValueError("a target is all padding: it holds no token to ask for")
    places = torch.arange(length, device=hidden.device)
    return places.masked_fill(~real, -1).amax(1)


def sentence_rows(hidden: Tensor, mask: Tensor | None, tokens: int) -> Tensor:
    """Each sentence as one row: its real tokens in order, then zeros, (B, tokens * d).

    Real tokens move to the front, so that the side that was padded does not matter.
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


class RungReader:
    """A_guess on the rungs of a gradient, (G, K), with or without noise on it.

    Without noise: which rungs are not zero. With Gaussian noise: for every n the sum of n rungs
    from the guess rung downwards, in units of its own standard deviation, and of these the largest.
    Its threshold is the quantile of that statistic when all rungs hold noise alone.

    Args:
        false_positive_rate: of the decision under noise.
        upstream_sign: -1, 0 or +1.

    Raises:
        ValueError: a rate outside of (0, 1), or another sign.
    """

    def __init__(self, false_positive_rate: float, upstream_sign: int) -> None:
        if not 0.0 < false_positive_rate < 1.0:
            raise ValueError(f"false_positive_rate must be in (0, 1), got {false_positive_rate}")
        if upstream_sign not in (-1, 0, 1):
            raise ValueError(f"upstream_sign must be -1, 0 or 1, got {upstream_sign!r}")
        self.false_positive_rate = false_positive_rate
        self.upstream_sign = upstream_sign

    def guess(
        self, gradient: Tensor, noise_std: float, rungs: int, guess_rung: int
    ) -> MembershipGuess:
        """Scores (G,) and decisions (G,) for a gradient (G, K); see the class.

        Raises:
            UnusableObservation: the gradient is not finite.
            ValueError: not (G, K), or negative noise.
        """
        if gradient.dim() != 2 or gradient.shape[1] != rungs:
            raise ValueError(
                f"the gradient must be (G, {rungs}), one number per rung, got "
                f"{tuple(gradient.shape)}"
            )
        if not 0.0 <= noise_std < math.inf:
            raise ValueError(f"noise_std must be 0 or positive, got {noise_std}")
        if not bool(gradient.isfinite().all()):
            raise UnusableObservation("the gradient of the crafted layers is not finite")
        if noise_std == 0.0:
            fires = gradient != 0
            places = torch.arange(rungs, 0, -1, device=gradient.device)
            scores = (fires * places).amax(1).to(torch.float32)
            return MembershipGuess(scores, fires[:, guess_rung])
        down = gradient[:, : guess_rung + 1].flip(1) / noise_std
        sums = _standardised(down)
        scores = sums.abs() if self.upstream_sign == 0 else sums * self.upstream_sign
        scores = scores.amax(1)
        two_sided = self.upstream_sign == 0
        threshold = _noise_quantile(guess_rung + 1, self.false_positive_rate, two_sided)
        return MembershipGuess(scores, scores > threshold)


def _standardised(numbers: Tensor) -> Tensor:
    """Sums of the first n columns over sqrt(n), n = 1, 2, ..."""
    n = torch.arange(1, numbers.shape[1] + 1, device=numbers.device)
    return numbers.cumsum(1) / n.to(numbers.dtype).sqrt()


@cache
def _noise_quantile(n: int, rate: float, two_sided: bool) -> float:
    """Value that the largest of :func:`_standardised` over n columns of noise exceeds at ``rate``.

    Exact for one column; by 400,000 draws of a generator of its own for more.
    """
    if n == 1:
        tail = rate / 2 if two_sided else rate
        return float(torch.special.ndtri(torch.tensor(1 - tail, dtype=torch.float64)))
    generator = torch.Generator().manual_seed(0)
    sums = _standardised(torch.randn(400_000, n, generator=generator))
    largest = (sums.abs() if two_sided else sums).amax(1).sort().values
    return float(largest[min(len(largest) - 1, int((1 - rate) * len(largest)))])
