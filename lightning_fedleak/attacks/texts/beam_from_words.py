"""Whole texts from the words of a batch and the model's own fluency (FILM, Gupta et al. 2022).

The gradient of the word embeddings names the words. A beam search over the model's own next-token
probabilities, restricted to these words, puts them in an order, and moves of pieces and of single
tokens then lower the model's perplexity and the norm of its gradient, both of which are low on
texts that a model has learned. What the gradient holds beside the words is not used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, Anatomy
from lightning_fedleak.attacks.base import (
    Attack,
    Query,
    RunFacts,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.texts.base import Deadline, TextAttack, TextGuess
from lightning_fedleak.attacks.texts.model_copy import ModelCopy, trained_names
from lightning_fedleak.attacks.words.direct import BagOfWords
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model_runs import LOGITS_AT_ONCE, context_length
from lightning_fedleak.snapshots import Observation, UpdateSnapshot
from lightning_fedleak.threats import Capability, ThreatModel, ThreatModelError

_STARTS = 256


class BeamFromWords(TextAttack):
    """Texts that the model finds likely, made of the words that the gradient names.

    An honest but curious server knows the weights. It is told how many texts to look for and how
    long they are. Texts are found one at a time: the next one pays for every n-gram that a found
    one has, as for its own (the paper's penalty on repeats).

    The search begins with every word of the bag (the 256 surest), since a model gives no
    probability to a first token. A causal text's last token is a label alone, which is not among
    the words read: it is the model's likeliest of all, and does not count. How often a word occurs
    is taken as unknown. Moves of the reordering, each kept if it lowers perplexity + ``beta`` *
    gradient norm: pieces in another order first, then tokens exchanged, moved, or replaced by
    another word of the bag. (The paper deletes and inserts; here the length is told.)

    Args:
        length: tokens of a text, at least 3.
        texts: how many to look for.
        words: what names the words; by default
            :class:`~lightning_fedleak.attacks.words.direct.BagOfWords` where the embedding is
            trained and has a gradient of its own, as in the paper, else
            :class:`~lightning_fedleak.attacks.words.subspace.SubspaceWords`.
        beam: beginnings that are kept side by side.
        ngram: tokens of an n-gram that counts as repeated.
        penalty: in nats, for each repeat.
        moves: tried of pieces, and as many of tokens; 0 leaves the beam's order.
        beta: weight of the gradient's norm, over all trained parameters, beside the perplexity.
        budget_seconds: wall time that one observation may take; None for no bound. What is found
            by then is returned, and the guess says that it is not finished.
        seed: of the moves.
        name: as in the logs.

    Raises:
        ValueError: a number out of range.
        TypeError: ``words`` is no attack.
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads the words of one gradient and is told how long "
        "the texts are",
        Capability.KNOWS_MODEL,
    )
    default_name = "beam_from_words"
    reads_adaptive_updates = True
    restores_fully = False
    last_token_open = True

    def __init__(
        self,
        length: int,
        texts: int = 1,
        *,
        words: Attack | None = None,
        beam: int = 16,
        ngram: int = 2,
        penalty: float = 5.0,
        moves: int = 200,
        beta: float = 1.0,
        budget_seconds: float | None = 120.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        for which, number, least in (
            ("length", length, 3),
            ("texts", texts, 1),
            ("beam", beam, 1),
            ("ngram", ngram, 1),
            ("moves", moves, 0),
        ):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(
                    f"{which} must be a whole number, at least {least}, got {number!r}"
                )
        for which, weight in (("penalty", penalty), ("beta", beta)):
            if not 0 <= weight < math.inf:
                raise ValueError(f"{which} must be a number of at least 0, got {weight!r}")
        if budget_seconds is not None and not budget_seconds > 0:
            raise ValueError(f"budget_seconds must be positive or None, got {budget_seconds!r}")
        if words is not None and not isinstance(words, Attack):
            raise TypeError(f"words must be an attack that names words, got {words!r}")
        self.length = length
        self.texts = texts
        self.beam = beam
        self.ngram = ngram
        self.penalty = penalty
        self.moves = moves
        self.beta = beta
        self.budget_seconds = budget_seconds
        self.seed = seed
        self._given = words
        self._chosen: tuple[Anatomy, Attack] | None = None
        self._facts = RunFacts()
        self._copy: ModelCopy | None = None

    def meet(self, facts: RunFacts) -> None:
        """Learns the precision, and what made an update."""
        self._facts = facts
        for attack in (self._given, None if self._chosen is None else self._chosen[1]):
            if attack is not None:
                attack.meet(facts)

    def words(self, anatomy: Anatomy) -> Attack:
        """What names the words of this model's batches."""
        if self._given is not None:
            return self._given
        if self._chosen is None or self._chosen[0] is not anatomy:
            rows = anatomy.trainable(EMBEDDING_WEIGHT) and not anatomy.tied
            attack: Attack = BagOfWords() if rows else SubspaceWords(capacity_seconds=0)
            attack.meet(self._facts)
            self._chosen = (anatomy, attack)
        return self._chosen[1]

    def age(self, step: int) -> float:
        """Optimizer steps that the copy of the model is behind; NaN before there is one."""
        return math.nan if self._copy is None else float(self._copy.age(step))

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """What names the words.

        Raises:
            ThreatModelError: the model predicts no next token.
            ValueError: texts longer than the model's context.
        """
        if anatomy.kind != "causal":
            raise ThreatModelError(
                f"attack '{self.name}' needs probabilities of the next token, which a "
                f"{anatomy.kind} model does not give: remove the attack"
            )
        context = context_length(anatomy)
        if context is not None and self.length > context:
            raise ValueError(
                f"attack '{self.name}': length={self.length}, but the model's context holds "
                f"{context} tokens"
            )
        return self.words(anatomy).needs(anatomy)

    def check_device(self, anatomy: Anatomy) -> None:
        """Refuses a device that what names the words cannot compute on.

        Raises:
            ValueError: says which device, and what to do.
        """
        self.words(anatomy).check_device(anatomy)

    def prepare(self, anatomy: Anatomy) -> None:
        """Prepares what names the words, and copies the model."""
        self.words(anatomy).prepare(anatomy)
        self._copy = ModelCopy(anatomy, trained_names(anatomy), autocast=self._facts.autocast)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Renews the copy; anew where something else is trained."""
        self.words(anatomy).refresh(anatomy, step)
        if self._copy is None or self._copy.names != trained_names(anatomy):
            self.prepare(anatomy)
        assert self._copy is not None
        self._copy.refresh(anatomy, step)

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> TextGuess:
        """Finds likely texts of the words of a batch.

        Returns:
            ``texts`` rows of ``length`` tokens, fewer where time is up. ``confidence`` is the
            model's own probability of each token; 1 for a first one.

        Raises:
            UnusableObservation: the words cannot be read, or are none, or an update is not read.
            TypeError: what names the words guesses something else.
            RuntimeError: ``prepare`` was not called.
        """
        if self._copy is None:
            raise RuntimeError(f"attack '{self.name}' has no copy of the model: call prepare")
        deadline = Deadline(self.budget_seconds)
        words = self.words(self._copy.anatomy)
        _check_update(view, words, self._facts)
        guess = words.run(view)
        if not isinstance(guess, WordGuess):
            raise TypeError(f"attack '{self.name}': words guesses no words")
        if not len(guess.types):
            raise UnusableObservation("no word stands out, so that there is nothing to order")
        with self._copy.session():
            search = FluentTexts(self, self._copy, guess.types.to(self._copy.device))
            texts: list[Tensor] = []
            for _ in range(self.texts):
                if texts and deadline.passed:
                    break
                found = search.beam(texts, deadline)
                texts.append(search.reordered(found, deadline))
            tokens = search.ended(torch.stack(texts))
            sure = search.log_probabilities(tokens).exp()
        finished = len(texts) == self.texts and not deadline.passed
        return TextGuess(tokens.cpu(), sure.cpu(), finished, search.tried)

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports."""
        names = ("length", "texts", "beam", "ngram", "penalty", "moves", "beta", "budget_seconds")
        given = None if self._given is None else self._given.name
        return {name: getattr(self, name) for name in names} | {"seed": self.seed, "words": given}


def _check_update(view: Observation, words: Attack, facts: RunFacts) -> None:
    """Refuses an adaptive optimizer's update where what names the words reads sums of gradients."""
    if not isinstance(view.gradients[-1], UpdateSnapshot) or words.reads_adaptive_updates:
        return
    steps = LocalSteps.from_facts(facts)
    if steps is None or not steps.linear:
        raise UnusableObservation(
            f"this update is no sum of gradients, which '{words.name}' reads: give "
            "words=SubspaceWords(), or measure single gradients (leave local_steps out)"
        )


class FluentTexts:
    """The search for texts of a bag of words, within a session of the copy.

    Args:
        attack: its settings.
        copy: of the model.
        bag: (n,) distinct token ids, best first.
    """

    def __init__(self, attack: BeamFromWords, copy: ModelCopy, bag: Tensor) -> None:
        self.attack, self.copy, self.bag = attack, copy, bag
        self.generator = torch.Generator().manual_seed(attack.seed)
        self.tried = 0

    def beam(self, found: Sequence[Tensor], deadline: Deadline) -> Tensor:
        """(L - 1,) the likeliest text of the bag, less the penalty for repeated n-grams.

        Repeated are those of its own and of found texts. Out of time, each next token is the
        bag's likeliest alone.
        """
        known = {gram for text in found for gram in _grams(text.tolist(), self.attack.ngram)}
        beams = self.bag[:_STARTS, None]
        scores = torch.zeros(len(beams), device=beams.device)
        for _ in range(self.attack.length - 2):
            step = self._next(beams).index_select(1, self.bag)
            step = step - self.attack.penalty * self._repeats(beams, known)
            every = (scores[:, None] + step).flatten()
            width = 1 if deadline.passed else self.attack.beam
            scores, places = every.topk(min(width, len(every)))
            rows, columns = places // len(self.bag), places % len(self.bag)
            beams = torch.cat([beams[rows], self.bag[columns, None]], 1)
        return beams[0]

    def _next(self, beams: Tensor) -> Tensor:
        """(n, V) log probabilities of what follows each beginning (n, l)."""
        self.tried += len(beams)
        parts = [self.copy.logits(part)[:, -1].clone() for part in self._split(beams)]
        return torch.cat(parts).log_softmax(-1)

    def _split(self, texts: Tensor) -> Sequence[Tensor]:
        """Texts in parts whose logits fit side by side."""
        rows = max(1, LOGITS_AT_ONCE // (texts.shape[1] * self.copy.anatomy.vocab_size))
        return torch.split(texts, rows)

    def _repeats(self, beams: Tensor, known: set[tuple[int, ...]]) -> Tensor:
        """(n, k) 1 where a word of the bag would repeat an n-gram."""
        n = self.attack.ngram
        places = {token: i for i, token in enumerate(self.bag.tolist())}
        repeats = torch.zeros(len(beams), len(self.bag))
        for row, text in enumerate(beams.tolist()):
            for gram in known | _grams(text, n):
                if list(gram[:-1]) == text[len(text) - n + 1 :] and gram[-1] in places:
                    repeats[row, places[gram[-1]]] = 1
        return repeats.to(self.bag.device)

    def ended(self, texts: Tensor) -> Tensor:
        """Texts (B, L - 1) with the likeliest token behind them, of the bag or not."""
        return torch.cat([texts, self._next(texts).argmax(-1, keepdim=True)], 1)

    def log_probabilities(self, texts: Tensor) -> Tensor:
        """(B, L) of each token behind those before it; 0 for the first."""
        followed = []
        for part in self._split(texts):
            told = self.copy.logits(part)[:, :-1].log_softmax(-1)
            followed.append(told.gather(2, part[:, 1:, None])[..., 0])
        return torch.nn.functional.pad(torch.cat(followed), (1, 0))

    def score(self, text: Tensor) -> float:
        """Perplexity + beta * norm of the loss's gradient, of a text (L,)."""
        self.tried += 1
        if not self.attack.beta:
            return float(self.copy.loss(text[None], text[None]).exp())
        with torch.enable_grad():
            loss = self.copy.loss(text[None], text[None])
            gradients = self.copy.gradients(loss)
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        return float(loss.detach().exp() + self.attack.beta * norm)

    def reordered(self, text: Tensor, deadline: Deadline) -> Tensor:
        """A text (L,) after moves of pieces, then of tokens, that lower the score."""
        if not self.attack.moves:
            return text
        best = self.score(text)
        kinds: tuple[Callable[[Tensor], Tensor], ...] = (self._pieces, self._tokens)
        for moved in (kind for kind in kinds for _ in range(self.attack.moves)):
            if deadline.passed:
                break
            other = moved(text)
            if not torch.equal(other, text) and (value := self.score(other)) < best:
                text, best = other, value
        return text

    def _pieces(self, text: Tensor) -> Tensor:
        """Cut at two places, in another order."""
        cuts = sorted(self._draw(len(text) + 1) for _ in range(2))
        pieces = torch.tensor_split(text, cuts)
        order = torch.randperm(len(pieces), generator=self.generator).tolist()
        return torch.cat([pieces[i] for i in order])

    def _tokens(self, text: Tensor) -> Tensor:
        """Two tokens exchanged, one moved, or one replaced by another of the bag."""
        kind, one, two = self._draw(3), self._draw(len(text)), self._draw(len(text))
        out = text.clone()
        if kind == 0:
            out[[one, two]] = text[[two, one]]
        elif kind == 1:
            rest = torch.cat([text[:one], text[one + 1 :]])
            out = torch.cat([rest[:two], text[one : one + 1], rest[two:]])
        else:
            out[one] = self.bag[self._draw(len(self.bag))]
        return out

    def _draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))


def _grams(text: Sequence[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}


__all__ = ["BeamFromWords"]
