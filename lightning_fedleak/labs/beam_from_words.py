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

from lightning_fedleak.attacks import BagOfWords, base
from lightning_fedleak.attacks.texts.base import Deadline, TextGuess
from lightning_fedleak.labs.model_copy import ModelCopy, ModelCopyAttack
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import LOGITS_AT_ONCE
from lightning_fedleak.validate import check_integer, check_number

# None of the values was tuned.
STARTS = 256  # first words of the beam search, the surest; more cost one run each
NGRAM, PENALTY = 2, 5.0  # tokens of an n-gram that counts as repeated; in nats, for each repeat


class BeamFromWords(ModelCopyAttack):
    """Texts that the model finds likely, composed of the words that the gradient names.

    An honest but curious server knows the weights, how many texts to look for and how long they
    are. It composes one text after another, and each n-gram that repeats one of an earlier text or
    of the same text costs a penalty, as in the paper.

    :class:`~lightning_fedleak.attacks.words.direct.BagOfWords` names the words, so the embedding
    must be trained and untied, as in the paper.

    The search begins with every word of the bag (the 256 surest), because a model gives no
    probability to a first token. A causal text's last token is a label alone, which is not among
    the words read: it is the likeliest token of all, and does not count. Then the text is
    rearranged: pieces are reordered, then tokens are exchanged, moved, or replaced by another word
    of the bag, wherever that lowers perplexity + ``beta`` * gradient norm. (The paper deletes and
    inserts tokens; here the length is fixed.)

    Args:
        length: tokens of a text, at least 3.
        texts: number of texts to look for.
        beam: prefixes that are continued side by side.
        moves: tries with pieces, and as many with tokens; 0 leaves the beam's order.
        beta: weight of the gradient's norm, over all trained parameters, beside the perplexity.
        budget_seconds: wall time for one observation; None for no bound. After it the best so far
            is returned, and the guess says that it is not finished.
        seed: of the moves.
        name: in the logs.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor
        >>> from lightning_fedleak.labs.beam_from_words import BeamFromWords
        >>> attack = BeamFromWords(length=16, texts=4, budget_seconds=60.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    prefers_likely_texts = True
    default_name = "beam_from_words"
    config_names = ("length", "texts", "beam", "moves", "beta", "budget_seconds", "seed")

    def __init__(
        self,
        length: int,
        texts: int = 1,
        *,
        beam: int = 16,
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
        self.moves = check_integer("moves", moves, at_least=0)
        self.beta = check_number("beta", beta, at_least=0)
        self.seed = seed
        self._words = BagOfWords()

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return what the attack on words reads.

        Raises:
            ThreatModelError: the model predicts no next token, or no gradient shows its words.
        """
        super().needs(anatomy)
        return self._words.needs(anatomy)

    def meet(self, facts: base.RunFacts) -> None:
        """Note the run, and let the attack on words know it."""
        super().meet(facts)
        self._words.meet(facts)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Follow the model as it is now."""
        super().refresh(anatomy, step)
        self._words.refresh(anatomy, step)

    @torch.no_grad()
    def run(self, view: base.Observation, query: base.Query | None = None) -> TextGuess:
        """Find likely texts of the words of a batch.

        Returns:
            ``texts`` rows of ``length`` tokens, fewer where time ran out.

        Raises:
            UnusableObservation: the words cannot be read, or are none.
        """
        deadline = Deadline(self.budget_seconds)
        bag = self._words.run(view).types
        if not len(bag):
            raise base.UnusableObservation("no word stands out, so that there is nothing to order")
        with self.model.session():
            search = FluentTexts(self, self.model, bag.to(self.model.device))
            texts: list[Tensor] = []
            while len(texts) < self.texts and not (texts and deadline.passed):
                text = search.beam(texts, deadline)
                texts.append(search.reorder(text, deadline))
            tokens = torch.stack(texts)
            last = search.log_probabilities(tokens).argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, last], 1).cpu()
        finished = len(texts) == self.texts and not deadline.passed
        return TextGuess(tokens, finished=finished, candidates=search.tried)


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
        grams = {gram for text in earlier for gram in _grams(text.tolist())}
        beams = self.bag[:STARTS, None]
        scores = torch.zeros(len(beams), device=beams.device)
        for _ in range(self.attack.length - 2):
            step = self.log_probabilities(beams).index_select(1, self.bag)
            step = step - PENALTY * self._repeats(beams, grams)
            every = (scores[:, None] + step).flatten()
            width = 1 if deadline.passed else self.attack.beam
            scores, places = every.topk(min(width, len(every)))
            rows, columns = places // len(self.bag), places % len(self.bag)
            beams = torch.cat([beams[rows], self.bag[columns, None]], 1)
        return beams[0]

    def log_probabilities(self, beams: Tensor) -> Tensor:
        """Return log probabilities (n, V) of what follows each prefix (n, l)."""
        self.tried += len(beams)
        rows = max(1, LOGITS_AT_ONCE // (beams.shape[1] * self.copy.anatomy.vocab_size))
        parts = [self.copy.logits(part)[:, -1].clone() for part in torch.split(beams, rows)]
        return torch.cat(parts).log_softmax(-1)

    def _repeats(self, beams: Tensor, grams: set[tuple[int, ...]]) -> Tensor:
        """Return (n, k), 1 where a word of the bag would repeat an n-gram."""
        places = {token: i for i, token in enumerate(self.bag.tolist())}
        repeats = torch.zeros(len(beams), len(self.bag))
        for row, text in enumerate(beams.tolist()):
            for gram in grams | _grams(text):
                if list(gram[:-1]) == text[len(text) - NGRAM + 1 :] and gram[-1] in places:
                    repeats[row, places[gram[-1]]] = 1
        return repeats.to(self.bag.device)

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
        cuts = sorted(self._draw(len(text) + 1, 2))
        pieces = torch.tensor_split(text, cuts)
        order = torch.randperm(len(pieces), generator=self.generator).tolist()
        return torch.cat([pieces[i] for i in order])

    def _move_tokens(self, text: Tensor) -> Tensor:
        """Return a text with two tokens exchanged, one moved, or one replaced from the bag."""
        [kind], (one, two) = self._draw(3, 1), self._draw(len(text), 2)
        changed = text.clone()
        if kind == 0:
            changed[[one, two]] = text[[two, one]]
        elif kind == 1:
            rest = torch.cat([text[:one], text[one + 1 :]])
            changed = torch.cat([rest[:two], text[one : one + 1], rest[two:]])
        else:
            changed[one] = self.bag[self._draw(len(self.bag), 1)[0]]
        return changed

    def _draw(self, below: int, count: int) -> list[int]:
        return torch.randint(below, (count,), generator=self.generator).tolist()


def _grams(text: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(text[i : i + NGRAM]) for i in range(len(text) - NGRAM + 1)}
