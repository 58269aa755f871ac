"""Whole texts from the words of a batch and the model's own fluency (FILM, Gupta et al. 2022).

The gradient of the word embeddings names the words. A beam search over the model's own next-token
probabilities, restricted to these words, orders them. Moves of pieces and of single tokens then
lower the model's perplexity and the norm of its gradient, which are both low on texts that a model
has learned. Nothing else in the gradient is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import (
    Attack,
    Capability,
    Observation,
    Query,
    RunFacts,
    Surfaces,
    ThreatModel,
    ThreatModelError,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.texts.base import Deadline, TextGuess
from lightning_fedleak.attacks.texts.model_copy import GradientTextAttack, ModelCopy, trained_names
from lightning_fedleak.attacks.words.direct import BagOfWords
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, Anatomy
from lightning_fedleak.validate import check_integer, check_number

_STARTS = 256  # first words of the beam search, the surest; more cost one run each. Not tuned


class BeamFromWords(GradientTextAttack):
    """Texts that the model finds likely, composed of the words that the gradient names.

    An honest but curious server knows the weights, how many texts to look for and how long they
    are. It composes one text after another, and each n-gram that repeats one of an earlier text or
    of the same text costs a penalty, as in the paper.

    The search begins with every word of the bag (the 256 surest), because a model gives no
    probability to a first token. A causal text's last token is a label alone, which is not among
    the words read: it is the likeliest token of all, and does not count. Then the text is
    rearranged: pieces are reordered, then tokens are exchanged, moved, or replaced by another word
    of the bag, wherever that lowers perplexity + ``beta`` * gradient norm. (The paper deletes and
    inserts tokens; here the length is fixed.)

    Args:
        length: tokens of a text, at least 3.
        texts: number of texts to look for.
        words: what names the words; by default
            :class:`~lightning_fedleak.attacks.words.direct.BagOfWords` where the embedding is
            trained and has a gradient of its own, as in the paper, else
            :class:`~lightning_fedleak.attacks.words.subspace.SubspaceWords`.
        beam: beginnings that are continued side by side.
        ngram: tokens of an n-gram that counts as repeated.
        penalty: in nats, for each repeat.
        moves: tries with pieces, and as many with tokens; 0 leaves the beam's order.
        beta: weight of the gradient's norm, over all trained parameters, beside the perplexity.
        budget_seconds: wall time for one observation; None for no bound. After it the best so far
            is returned, and the guess says that it is not finished.
        seed: of the moves.
        name: in the logs.

    Raises:
        ValueError: a number out of range.
        TypeError: ``words`` is no attack.

    Examples:
        >>> from lightning_fedleak import BeamFromWords, LeakageMonitor
        >>> attack = BeamFromWords(length=16, texts=4, budget_seconds=60.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads the words of one gradient and is told how long "
        "the texts are",
        Capability.KNOWS_MODEL,
    )
    prefers_likely_texts = True
    default_name = "beam_from_words"
    config_names = (
        *("length", "texts", "beam", "ngram", "penalty", "moves", "beta", "budget_seconds"),
        "seed",
    )
    _copy: ModelCopy | None = None

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
        super().__init__(name, budget_seconds)
        self.length = check_integer("length", length, at_least=3)
        self.texts = check_integer("texts", texts)
        self.beam = check_integer("beam", beam)
        self.ngram = check_integer("ngram", ngram)
        self.moves = check_integer("moves", moves, at_least=0)
        self.penalty = check_number("penalty", penalty, at_least=0)
        self.beta = check_number("beta", beta, at_least=0)
        if words is not None and not isinstance(words, Attack):
            raise TypeError(f"words must be an attack that names words, got {words!r}")
        self.seed = seed
        self._words = words
        self._default_words: tuple[Anatomy, Attack] | None = None

    def meet(self, facts: RunFacts) -> None:
        """Take the precision, and what made an update, from the run."""
        super().meet(facts)
        if self._words is not None:
            self._words.meet(facts)
        if self._default_words is not None:
            self._default_words[1].meet(facts)

    def words(self, anatomy: Anatomy) -> Attack:
        """Return the attack that names the words of this model's batches."""
        if self._words is not None:
            return self._words
        rows = anatomy.trainable(EMBEDDING_WEIGHT) and not anatomy.tied
        latest, attack = self._default_words or (None, None)
        if attack is None or latest is not anatomy or isinstance(attack, BagOfWords) != rows:
            attack = BagOfWords() if rows else SubspaceWords(capacity_seconds=0)
            attack.meet(self._facts)
            self._default_words = (anatomy, attack)
        return attack

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return what the attack on words reads.

        Raises:
            ThreatModelError: the model predicts no next token.
            ValueError: texts longer than the model's context.
        """
        if anatomy.kind != "causal":
            raise ThreatModelError(
                f"attack '{self.name}' needs probabilities of the next token, which a "
                f"{anatomy.kind} model does not give: remove the attack"
            )
        self._check_length(anatomy, self.length)
        return self.words(anatomy).needs(anatomy)

    def check_device(self, anatomy: Anatomy) -> None:
        """Raise an error if the attack on words cannot compute on the model's device.

        Raises:
            ValueError: names the device, and what to do.
        """
        self.words(anatomy).check_device(anatomy)

    def prepare(self, anatomy: Anatomy) -> None:
        """Prepare the attack on words, and copy the model."""
        self.words(anatomy).prepare(anatomy)
        self._copy = ModelCopy(anatomy, trained_names(anatomy), autocast=self._facts.autocast)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again, and prepare again where something else is trained."""
        self.words(anatomy).refresh(anatomy, step)
        if self._copy is None or self._copy.names != trained_names(anatomy):
            self.prepare(anatomy)
        assert self._copy is not None
        self._copy.refresh(anatomy, step)

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> TextGuess:
        """Find likely texts of the words of a batch.

        Returns:
            ``texts`` rows of ``length`` tokens, fewer where time ran out. ``confidence`` is the
            model's own probability of each token; 1 for a first one.

        Raises:
            UnusableObservation: the words cannot be read, or are none, or an update is not read.
            TypeError: the attack on words guesses something else.
            RuntimeError: ``prepare`` was not called.
        """
        if self._copy is None:
            raise RuntimeError(f"attack '{self.name}' has no copy of the model: call prepare")
        deadline = Deadline(self.budget_seconds)
        words = self.words(self._copy.anatomy)
        if not words.reads_adaptive_updates:
            self._check_update(
                view,
                lambda steps, _: steps.linear,
                f"this update is no sum of gradients, which '{words.name}' reads: give "
                "words=SubspaceWords(), or measure single gradients (leave local_steps out)",
            )
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
                text = search.beam(texts, deadline)
                texts.append(search.reorder(text, deadline))
            tokens = search.complete(torch.stack(texts))
            probabilities = search.log_probabilities(tokens).exp()
        finished = len(texts) == self.texts and not deadline.passed
        return TextGuess(tokens.cpu(), probabilities.cpu(), finished, search.tried)

    def config(self) -> dict[str, object]:
        """Return the settings that name this attack in reports."""
        return super().config() | {"words": None if self._words is None else self._words.name}


class FluentTexts:
    """The search for texts of a bag of words, within a session of the copy.

    Args:
        attack: the settings.
        copy: the adversary's copy of the model.
        bag: (n,) distinct token ids, best first.
    """

    def __init__(self, attack: BeamFromWords, copy: ModelCopy, bag: Tensor) -> None:
        self.attack, self.copy, self.bag = attack, copy, bag
        self.generator = torch.Generator().manual_seed(attack.seed)
        self.tried = 0

    def beam(self, earlier: Sequence[Tensor], deadline: Deadline) -> Tensor:
        """Return the likeliest text (L - 1,) of the bag, less the penalty for repeated n-grams.

        It pays for its own n-grams and for those of earlier texts. After the deadline each next
        token is the likeliest of the bag.
        """
        grams = {gram for text in earlier for gram in _grams(text.tolist(), self.attack.ngram)}
        beams = self.bag[:_STARTS, None]
        scores = torch.zeros(len(beams), device=beams.device)
        for _ in range(self.attack.length - 2):
            step = self._next(beams).index_select(1, self.bag)
            step = step - self.attack.penalty * self._repeats(beams, grams)
            every = (scores[:, None] + step).flatten()
            width = 1 if deadline.passed else self.attack.beam
            scores, places = every.topk(min(width, len(every)))
            rows, columns = places // len(self.bag), places % len(self.bag)
            beams = torch.cat([beams[rows], self.bag[columns, None]], 1)
        return beams[0]

    def _next(self, beams: Tensor) -> Tensor:
        """Return log probabilities (n, V) of what follows each beginning (n, l)."""
        self.tried += len(beams)
        parts = [self.copy.logits(part)[:, -1].clone() for part in self.copy.split(beams)]
        return torch.cat(parts).log_softmax(-1)

    def _repeats(self, beams: Tensor, grams: set[tuple[int, ...]]) -> Tensor:
        """Return (n, k), 1 where a word of the bag would repeat an n-gram."""
        n = self.attack.ngram
        places = {token: i for i, token in enumerate(self.bag.tolist())}
        repeats = torch.zeros(len(beams), len(self.bag))
        for row, text in enumerate(beams.tolist()):
            for gram in grams | _grams(text, n):
                if list(gram[:-1]) == text[len(text) - n + 1 :] and gram[-1] in places:
                    repeats[row, places[gram[-1]]] = 1
        return repeats.to(self.bag.device)

    def complete(self, texts: Tensor) -> Tensor:
        """Return texts (B, L - 1) with the likeliest last token, of the bag or not."""
        return torch.cat([texts, self._next(texts).argmax(-1, keepdim=True)], 1)

    def log_probabilities(self, texts: Tensor) -> Tensor:
        """Return the log probability (B, L) of each token after those before it, 0 for a first."""
        parts = []
        for part in self.copy.split(texts):
            predicted = self.copy.logits(part)[:, :-1].log_softmax(-1)
            parts.append(predicted.gather(2, part[:, 1:, None])[..., 0])
        return torch.nn.functional.pad(torch.cat(parts), (1, 0))

    def score(self, text: Tensor) -> float:
        """Return the perplexity + beta * norm of the loss's gradient of a text (L,)."""
        self.tried += 1
        if not self.attack.beta:
            return float(self.copy.loss(text[None], text[None]).exp())
        with torch.enable_grad():
            loss = self.copy.loss(text[None], text[None])
            gradients = self.copy.gradients(loss)
        norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()
        return float(loss.detach().exp() + self.attack.beta * norm)

    def reorder(self, text: Tensor, deadline: Deadline) -> Tensor:
        """Return a text (L,) after moves of pieces, then of tokens, that lower its score."""
        if not self.attack.moves:
            return text
        best = self.score(text)
        moves: tuple[Callable[[Tensor], Tensor], ...] = (self._move_pieces, self._move_tokens)
        for move in (move for move in moves for _ in range(self.attack.moves)):
            if deadline.passed:
                break
            other = move(text)
            if not torch.equal(other, text) and (value := self.score(other)) < best:
                text, best = other, value
        return text

    def _move_pieces(self, text: Tensor) -> Tensor:
        """Return a text, cut at two places, in another order."""
        cuts = sorted(self._draw(len(text) + 1) for _ in range(2))
        pieces = torch.tensor_split(text, cuts)
        order = torch.randperm(len(pieces), generator=self.generator).tolist()
        return torch.cat([pieces[i] for i in order])

    def _move_tokens(self, text: Tensor) -> Tensor:
        """Return a text with two tokens exchanged, one moved, or one replaced from the bag."""
        kind, one, two = self._draw(3), self._draw(len(text)), self._draw(len(text))
        changed = text.clone()
        if kind == 0:
            changed[[one, two]] = text[[two, one]]
        elif kind == 1:
            rest = torch.cat([text[:one], text[one + 1 :]])
            changed = torch.cat([rest[:two], text[one : one + 1], rest[two:]])
        else:
            changed[one] = self.bag[self._draw(len(self.bag))]
        return changed

    def _draw(self, below: int) -> int:
        return int(torch.randint(below, (), generator=self.generator))


def _grams(text: Sequence[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(text[i : i + n]) for i in range(len(text) - n + 1)}
