"""Whole texts of a round whose adapters a dishonest server has crafted, played on copies.

The server gives each row of the agreed bottleneck adapters a threshold that about one token of a
round passes. Behind a block a state depends on all tokens before it, and the signs of a row's
change under Adam are those of the state that the row fired for. Texts are searched from left to
right: the model itself proposes tokens, and rows say whether a state may have been there.
NeuroImprint (arXiv 2606.20553) catches a text by a neuron; here a text is caught by many.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache

from lightning_fedleak.attacks import PublicText, RunFacts
from lightning_fedleak.attacks.words.public_gradients import train_copies
from lightning_fedleak.evaluation.games import GameError
from lightning_fedleak.labs.crafted_rows import Bottleneck, find_adapter
from lightning_fedleak.labs.crafted_words import STEP_ERROR, CraftedAdapterWords, change_sizes
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import TokenBatch

STILL = 0.05  # change over the rate below which a row did not fire: Adam's last step alone is .4
BINS = 18  # of the logarithm of signs that disagree, in the likelihoods; not tuned
MOST = 6.0  # nats that a row says at most; single rows may be wrong, not tuned
MOST_OF_TOKEN = 10.0  # nats that all rows say of a token at most: they depend on each other
SHRINK = 1e-2  # share of the mean variance that is added to each; not tuned
MISREAD = 200  # public texts with wrong tokens, for the likelihoods; not tuned
ABSENT = 100  # public texts that were in no round, for the same; not tuned
NEXT = 32  # tokens that the model proposes after each prefix; more cost time
LABELS = 8  # tokens that are tried as the last one, which is a label alone; more cost time
AT_ONCE = 64  # texts of one run, which bounds the memory


@dataclass(frozen=True)
class TextSearch:
    """How rows are crafted, and texts searched.

    Attributes:
        kappa: tokens of a round that a row fires for, on average.
        row_norm: norm of a row; None keeps the median of the adapter's own rows. Rows that are
            longer move less in a round, by which what they fire for stays the same.
        beam: prefixes that are kept.
        candidates: prefixes, one token longer, of which they are chosen.
        threshold: log odds from which a text counts as recovered.
        seed: of the rows.
    """

    kappa: float = 1.0
    row_norm: float | None = None
    beam: int = 64
    candidates: int = 256
    threshold: float = 3.0
    seed: int = 0


@dataclass(frozen=True)
class CraftedTexts:
    """What one round gave away.

    Attributes:
        texts: (n, L) that the client trained on.
        guesses: (m, L) that the server read.
        alone: (k, L) that the model writes without any round, the likeliest ones.
    """

    texts: Tensor
    guesses: Tensor
    alone: Tensor

    @property
    def exact(self) -> float:
        """Return the share of the texts that were read without an error."""
        return float((self.texts[:, None] == self.guesses).all(-1).any(1).float().mean())


def play_crafted_texts(
    anatomy: Anatomy,
    adapters: Sequence[str],
    rounds: Sequence[Sequence[TokenBatch]],
    facts: RunFacts,
    public: PublicText,
    search: TextSearch | None = None,
) -> list[CraftedTexts]:
    """Craft adapters once, play rounds of one client with them, and read each round's texts.

    All of it happens on a copy of the model, on the CPU.

    Args:
        anatomy: of a causal model of transformers, which is not changed.
        adapters: paths of bottleneck adapters, in the order in which the model runs them.
        rounds: for each local step a batch of texts of one length, which begin with one token. The
            server has never seen them.
        facts: with the optimizer that the server prescribes, and the number of local steps.
        public: text like the clients', of that length or longer.
        search: how rows are crafted, and texts searched.

    Raises:
        GameError: the model or optimizer is of another kind, batches have other shapes, texts begin
            otherwise, or public text is too little.
        ThreatModelError: an adapter is of another kind.
        UnusableObservation: the optimizer, or the number of its steps, is not known.
    """
    local = CraftedAdapterWords._steps(facts)
    steps, decoder = local.steps, getattr(anatomy.model, "get_decoder", None)
    if anatomy.kind != "causal" or decoder is None or "Adam" not in local.optimizer.__name__:
        raise GameError(
            "texts are read off rounds of an Adam of a causal model of transformers, not off "
            f"{local.optimizer.__name__} of {type(anatomy.model).__name__}"
        )
    shapes = {batch.input_ids.shape for batches in rounds for batch in batches}
    if len(shapes) != 1 or {len(batches) for batches in rounds} != {steps}:
        raise GameError(
            f"a round needs for each of its {steps} steps (RunFacts(local_steps=)) a batch of as "
            f"many texts of one length; shapes are {sorted(map(tuple, shapes))}"
        )
    texts, length = shapes.pop()
    ids = [sentence[:length] for sentence in public.sentences if len(sentence) >= length]
    calibrating, held_out = texts * steps, texts * steps + ABSENT
    if len(ids) <= held_out:
        raise GameError(
            f"{len(ids)} public texts have {length} tokens, and more than {held_out} are needed"
        )
    copied = copy.deepcopy(anatomy)
    copied.root.cpu().float()
    server = _Server(copied, adapters, facts, texts, search or TextSearch())
    server.craft(torch.stack(ids[held_out:]))
    server.fit(torch.stack(ids[:calibrating]), torch.stack(ids[calibrating:held_out]))
    results = []
    for batches in rounds:
        private = _texts_of(batches)
        guesses = server.read(server.play(private), private[0, :1], length)
        alone = server.search(None, private[0, :1], length)[: len(private)]
        read = (torch.stack([private[0], *(t.ids for t in some)])[1:] for some in (guesses, alone))
        results.append(CraftedTexts(private, *read))
    return results


def _texts_of(batches: Sequence[TokenBatch]) -> Tensor:
    """Return the texts (n, L) of a round, all of which begin with one token."""
    ids = torch.cat([batch.input_ids for batch in batches]).cpu()
    masks = [batch.attention_mask for batch in batches if batch.attention_mask is not None]
    if len(torch.unique(ids[:, 0])) > 1 or not all(bool(mask.all()) for mask in masks):
        raise GameError(
            "the search knows one first token, and nothing of padding: give texts that begin with "
            "the same token, such as the tokenizer's bos_token, and are not padded"
        )
    return ids


@dataclass(frozen=True)
class _Update:
    """What the server sees of a step.

    Attributes:
        inputs: (a, r, d) signs of the first maps' changes.
        outputs: (a, d, r) those of the second maps.
        active: (a, r) which rows of the first maps may have fired in it.
        second: the second maps' values by name, as far as a round had moved them before it.
    """

    inputs: Tensor
    outputs: Tensor
    active: Tensor
    second: dict[str, Tensor]


@dataclass
class _Text:
    """A text, its log probability by the model, and what each row says of it (a, r) in nats."""

    ids: Tensor
    prior: float
    evidence: Tensor

    def score(self, free: Tensor) -> float:
        """Return its score where other texts have taken the rows that are not free."""
        nats = torch.where(self.evidence > 0, self.evidence * free, self.evidence)
        return self.prior + float(nats.sum())


class _Server:
    """A dishonest server, with a model of its own."""

    def __init__(
        self,
        anatomy: Anatomy,
        adapters: Sequence[str],
        facts: RunFacts,
        texts: int,
        settings: TextSearch,
    ) -> None:
        self.anatomy, self.texts, self.settings = anatomy, texts, settings
        self.steps = CraftedAdapterWords._steps(facts)
        self.model: Any = anatomy.model.eval()
        parts = [find_adapter(anatomy, adapter) for adapter in adapters]
        self.parts = [part for part in parts if isinstance(part, Bottleneck)]
        if len(self.parts) < len(parts) or len({part.width for part in parts}) != 1:
            raise GameError("texts are read off bottlenecks with as many rows each, not off a LoRA")
        self.down, self.bias, self.up = (
            [anatomy.root.get_parameter(name) for name in names]
            for names in zip(*((p.reads.name, p.biases[0], p.up) for p in self.parts), strict=True)
        )
        self.generator = torch.Generator().manual_seed(settings.seed)

    # ---- crafting ---------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Iterator[list[Tensor]]:
        """Collect what each bottleneck reads, (n, L, d)."""
        states: list[Tensor] = []
        hooks = [
            part.reads.reader.register_forward_pre_hook(lambda _, args: states.append(args[0]))
            for part in self.parts
        ]
        try:
            yield states
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """Return what the bottlenecks read at all tokens but the last, (a, n, L - 1, d)."""
        parts = []
        for some in torch.split(ids, AT_ONCE):
            with self._reading() as states:
                self.model.get_decoder()(some[:, :-1])
            parts.append(torch.stack(states))
        return torch.cat(parts, dim=1)

    @torch.no_grad()
    def craft(self, public: Tensor) -> None:
        """Set each row to fire for what is most like a public state, few tokens of a round."""
        tokens = self.steps.steps * self.texts * (public.shape[1] - 1)
        states_of_all, weights = self.states(public), []
        for down, bias, states in zip(self.down, self.bias, states_of_all, strict=True):
            behind, states = states[:, 1:].flatten(0, 1), states.flatten(0, 1)
            centred = states - states.mean(0)
            spread = centred.T @ centred / len(states)
            spread += SHRINK * spread.diagonal().mean() * torch.eye(len(spread))
            sample = torch.randperm(len(behind), generator=self.generator)[: len(down)]
            centred = behind[sample] - states.mean(0)
            rows = F.normalize(torch.linalg.solve(spread, centred.T).T, dim=1)
            products = (states @ rows.T).sort(dim=0, descending=True).values
            place = max(1, round(self.settings.kappa / tokens * len(states)))
            norm = self.settings.row_norm or float(down.norm(dim=1).median())
            down.copy_(norm * rows)
            bias.copy_(-norm * products[place - 1 : place + 1].mean(0))
            weight = 1 - states.sign().mean(0).abs()  # a sign that all states share says nothing
            weights.append(weight / weight.sum())
        self.weights = torch.stack(weights)

    def play(self, ids: Tensor) -> list[_Update]:
        """Return what a round on texts (n, L) shows of each step. It is played on copies.

        A row that fired in one step alone changed by a size that tells the step.
        """
        batches = [TokenBatch(part, part, None, "causal") for part in torch.split(ids, self.texts)]
        after, rate = train_copies(self.anatomy, batches, self.steps), self.steps.rate
        updates = []
        for part, before in zip(self.parts, self.down, strict=True):
            update = (before.detach() - after[part.reads.name]) / rate
            updates.append(self.steps.without_decay(update, before.detach(), rate))
        change = torch.stack(updates)
        outputs = torch.stack([self._value(p.up) - after[p.up] for p in self.parts]).sign()
        names = [n for part in self.parts for n in (part.up, part.biases[1]) if n is not None]
        n_steps, active = self.steps.steps, change.abs().amax(-1) > STILL
        sizes = change_sizes(self.steps) / rate
        near = (change.abs()[..., None] / sizes - 1).abs().quantile(0.75, dim=2).min(-1)
        which = torch.where(near.values <= STEP_ERROR, near.indices, -1)
        return [
            _Update(
                change.sign(),
                outputs,
                active & ((which == step) | (which < 0)),
                {n: self._value(n).lerp(after[n], step / n_steps) for n in names},
            )
            for step in range(n_steps)
        ]

    def _value(self, name: str) -> Tensor:
        return self.anatomy.root.get_parameter(name).detach()

    @contextmanager
    def _before_step(self, update: _Update) -> Iterator[None]:
        """Give the second maps the values that they had before a step."""
        before = {name: self._value(name).clone() for name in update.second}
        try:
            for name, value in update.second.items():
                self._value(name).copy_(value)
            yield
        finally:
            for name, value in before.items():
                self._value(name).copy_(value)

    # ---- what rows say ----------------------------------------------------------------------

    def fit(self, played: Tensor, absent: Tensor) -> None:
        """Fit what rows say of a state, on a round of public texts and on texts (n, L) not in it.

        A row that did not fire in a step says one thing, one that did what share of signs agrees.
        """
        counts = torch.full((2, len(self.parts), 1 + BINS), 0.5)
        for update, ids in zip(self.play(played), torch.split(played, self.texts), strict=True):
            with self._before_step(update):
                others = [self._misread(ids), self.states(absent).flatten(1, 2)]
                true = self.states(ids).flatten(1, 2)
            for count, states in zip(counts, (true, torch.cat(others, dim=1)), strict=True):
                fires, bins = self._votes(update, states)
                active = fires & update.active[:, None]
                count[:, 0] += (fires & ~update.active[:, None]).sum((1, 2))
                pairs = zip(bins, active, strict=True)
                count[:, 1:] += torch.stack([b[m].bincount(minlength=BINS) for b, m in pairs])
        counts /= counts.sum(-1, keepdim=True)
        ratio = (counts[0] / counts[1]).log().clamp(-MOST, MOST)
        self.still, self.agreement = ratio[:, 0], ratio[:, 1:]

    @torch.no_grad()
    def _misread(self, ids: Tensor) -> Tensor:
        """Return states (a, n, d) behind one to three tokens that the model might have written."""
        parts, length = [], ids.shape[1]
        row = torch.arange(len(ids))
        shares = self.model(ids).logits.div(1.5).softmax(-1)
        for _ in range(-(-MISREAD // (len(ids) * self.steps.steps))):
            wrong, first = ids.clone(), torch.full((len(ids),), length)
            for _ in range(int(torch.randint(1, 4, (), generator=self.generator))):
                place = torch.randint(1, length, (len(ids),), generator=self.generator)
                sample = torch.multinomial(shares[row, place - 1], 1, generator=self.generator)
                wrong[row, place] = sample[:, 0]
                differs = sample[:, 0] != ids[row, place]
                first = torch.where(differs, first.minimum(place), first)
            parts.append(self.states(wrong)[:, torch.arange(length - 1) >= first[:, None]])
        return torch.cat(parts, dim=1)

    def _votes(self, update: _Update, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return (a, n, r) which rows fire for states (a, n, d), and the bin of their signs."""
        down, bias = (torch.stack([p.detach() for p in some]) for some in (self.down, self.bias))
        fires = states @ down.mT + bias[:, None] > 0
        agreement = ((states.sign() * self.weights[:, None]) @ update.inputs.mT).abs()
        bins = -2 * (1 - agreement).clamp(min=0.002).log2()
        return fires, bins.long().clamp(max=BINS - 1)

    def _weigh(self, update: _Update, free: Tensor, states: Tensor) -> Tensor:
        """Return what each row says of each of states (a, n, d), (n, a, r) in nats."""
        fires, bins = self._votes(update, states)
        evidence = self.agreement.gather(1, bins.flatten(1)).view(bins.shape) * free[:, None]
        evidence = torch.where(update.active[:, None], evidence, self.still[:, None, None])
        evidence = (evidence * fires).transpose(0, 1)
        total = evidence.sum((1, 2), keepdim=True)
        return evidence * (MOST_OF_TOKEN / total.abs().clamp(min=MOST_OF_TOKEN))

    # ---- reading ----------------------------------------------------------------------------

    @torch.no_grad()
    def search(
        self, view: tuple[_Update, Tensor] | None, start: Tensor, length: int
    ) -> list[_Text]:
        """Return texts by model and rows, from left to right.

        Args:
            view: the update, and which of the rows that moved no found text explains; None
                searches by the model alone.
            start: (1,) the first token.
            length: of the texts.
        """
        decoder, head = self.model.get_decoder(), self.model.get_output_embeddings()
        ids, prior = start[None], torch.zeros(1)
        evidence = torch.zeros(1, len(self.parts), self.parts[0].width)
        cache = DynamicCache(config=self.model.config)
        hidden = decoder(ids, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        while ids.shape[1] < length:
            logs, tokens = head(hidden).log_softmax(-1).topk(min(NEXT, head.out_features), dim=1)
            total = ((prior + evidence.sum((1, 2)))[:, None] + logs).flatten()
            order = total.topk(min(self.settings.candidates, len(total))).indices
            parent, child = order // tokens.shape[1], tokens.flatten()[order]
            cache.batch_select_indices(parent)
            with self._reading() as states:
                output = decoder(child[:, None], past_key_values=cache, use_cache=True)
            ids = torch.cat([ids[parent], child[:, None]], dim=1)
            prior, evidence = prior[parent] + logs.flatten()[order], evidence[parent]
            if view is not None and ids.shape[1] < length:  # the last one is a label alone
                now = self._weigh(*view, torch.stack(states)[:, :, 0])
                stronger = now.abs() > evidence.abs()  # a row speaks once
                evidence = torch.where(stronger, now, evidence)
            best = (prior + evidence.sum((1, 2))).topk(min(self.settings.beam, len(ids))).indices
            ids, prior, evidence = ids[best], prior[best], evidence[best]
            hidden = output.last_hidden_state[best, -1]
            cache.batch_select_indices(best)
        return [_Text(*one) for one in zip(ids, prior.tolist(), evidence, strict=True)]

    def read(self, updates: Sequence[_Update], start: Tensor, length: int) -> list[_Text]:
        """Return the texts of each step that are likelier there than not.

        A row that a text explains counts for no other.
        """
        guesses: list[_Text] = []
        free = torch.ones_like(updates[0].active)
        for update in updates:
            with self._before_step(update):
                guesses += self._read_step(update, free, start, length)
        return guesses

    def _read_step(self, update: _Update, free: Tensor, start: Tensor, length: int) -> list[_Text]:
        guesses, new = list[_Text](), True
        while new and len(guesses) < self.texts:
            best, new = self.search((update, free), start, length), False
            while best and len(guesses) < self.texts:
                best.sort(key=lambda text: text.score(free))
                if best[-1].score(free) + math.log(self.texts) < self.settings.threshold:
                    break
                text, new = best.pop(), True
                free &= ~(text.evidence > 0)
                text.ids = self._label(update, text)
                guesses.append(text)
        return guesses

    def _label(self, update: _Update, text: _Text) -> Tensor:
        """Return a text with the last token whose gradient has most of the second map's signs."""
        with torch.no_grad():
            logits = self.model(text.ids[None, :-1]).logits[0, -1]
        used = text.evidence > 0
        scored = [] if used.any() else [(0.0, text.ids)]
        for token in logits.topk(min(LABELS, len(logits))).indices:
            ids = torch.cat([text.ids[:-1], token[None]])
            loss = self.model(input_ids=ids[None], labels=ids[None]).loss
            signs = torch.stack(torch.autograd.grad(loss, self.up)).sign()
            scored.append((float((signs * update.outputs).mean(1)[used].mean()), ids))
        return max(scored, key=lambda pair: pair[0])[1]
