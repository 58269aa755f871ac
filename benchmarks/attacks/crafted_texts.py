"""Whole texts off a round of AdamW, for a server that has chosen the values of bottleneck adapters.

    python -m benchmarks.attacks.crafted_texts --model DIR --steps 1 --out FILE
    python -m benchmarks.attacks.crafted_texts --model DIR --steps 10 --out FILE

A bottleneck stands behind the embedding and behind every block. The server makes each of its rows
for a public state, with a threshold that about ``--kappa`` tokens of a round pass. A state behind a
block depends on all tokens before it, and the signs of a row's change are those of the state that
it fired for. Texts are then searched from left to right: the model itself writes, and rows say
whether a state may have been there. A row that did not move excludes what it would have fired for.
The likelihoods of both are fitted on a public round. Texts that were found give up their rows, and
the search begins again.

``--alone`` searches without the rows: what the model would guess itself. Rates are over the private
texts of a round: *exact*, and ROUGE-L with the most similar one found.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.attacks.crafted_adapter import AdaptedEmbedding, Bottleneck, rows_of
from benchmarks.federation.inspection import Adapted
from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks import RunFacts
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.words.public_gradients import train_copies
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.metrics.texts import sentence_scores

SMOKE = (
    "--model {model} --text {text} --rank 8 --length 8 --texts 2 --steps 2 --rounds 1 --beam 4 "
    "--public 40 --out {out}/texts.jsonl",
)
STILL = 0.05  # change over the rate below which a row did not fire: Adam's last step alone is .4
BINS = 18  # of the logarithm of signs that disagree, in the likelihoods
MOST = 6.0  # nats that one row says at most; single rows may be wrong
MOST_OF_TOKEN = 10.0  # nats that all rows say of a token at most: they are not independent
SHRINK = 1e-2  # share of the mean variance that is added to each; not tuned
MISREAD = 200  # texts of a public round with wrong tokens, for the likelihoods
OTHERS = 100  # public texts that were in no round, for the likelihoods
NEXT = 32  # tokens that the model proposes behind each beginning


def adapted(options: argparse.Namespace) -> tuple[Any, list[nn.Module]]:
    """Return the model, and its bottlenecks by depth."""
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model.requires_grad_(False)
    decoder, width = model.get_decoder(), model.config.hidden_size
    adapters = []
    for place in range(len(decoder.layers) + 1):
        if options.places and place not in options.places:
            continue
        if place == 0:
            decoder.embed_tokens = AdaptedEmbedding(decoder.embed_tokens, options.rank)
            adapters.append(decoder.embed_tokens.adapter)
        else:
            adapter = Bottleneck(width, options.rank)
            decoder.layers[place - 1] = Adapted(decoder.layers[place - 1], adapter)
            adapters.append(adapter)
        adapters[-1].requires_grad_(True)
    return model, adapters


@contextmanager
def reading(adapters: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect what each bottleneck reads, (n, L, d)."""
    states: list[Tensor] = []
    hooks = [
        adapter.down.register_forward_pre_hook(lambda _, args: states.append(args[0]))
        for adapter in adapters
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def states_of(model: Any, adapters: list[nn.Module], ids: Tensor) -> Tensor:
    """Return what the bottlenecks read, (a, n, L, d)."""
    parts = []
    for some in ids.split(64):
        with reading(adapters) as states:
            model.get_decoder()(some)
        parts.append(torch.stack(states))
    return torch.cat(parts, dim=1)


@torch.no_grad()
def craft_rows(
    model: Any, adapters: list[nn.Module], public: Tensor, options: argparse.Namespace
) -> Tensor:
    """Set each row to fire for what is most like a public state, few tokens of a round.

    Returns:
        (a, d) how much the sign of a number says of a state; all of an adapter add up to 1.
    """
    generator = torch.Generator().manual_seed(options.seed)
    tokens, weights = options.steps * options.texts * options.length, []
    for adapter, states in zip(adapters, states_of(model, adapters, public), strict=True):
        behind, states = states[:, 1:].flatten(0, 1), states.flatten(0, 1)
        centred = states - states.mean(0)
        spread = centred.T @ centred / len(states)
        spread += SHRINK * spread.diagonal().mean() * torch.eye(len(spread))
        drawn = torch.randperm(len(behind), generator=generator)[: len(adapter.down.weight)]
        rows = torch.linalg.solve(spread, (behind[drawn] - states.mean(0)).T).T
        rows = F.normalize(rows, dim=1)
        products = (states @ rows.T).sort(dim=0, descending=True).values
        place = max(1, round(options.kappa / tokens * len(states)))
        cuts = products[place - 1 : place + 1].mean(0)
        norm = options.row_norm or float(adapter.down.weight.norm(dim=1).median())
        adapter.down.weight.copy_(norm * rows)
        adapter.down.bias.copy_(-norm * cuts)
        weight = 1 - states.sign().mean(0).abs()
        weights.append(weight / weight.sum())
    return torch.stack(weights)


@dataclasses.dataclass(eq=False)
class Round:
    """What the server sees of a round.

    Attributes:
        signs: (a, r, d) of the rows' changes.
        moved: (a, r) bool.
        free: (a, r) bool, moved rows that no found text explains.
        outputs: (a, d, r) signs of the second map's change.
        weights: (a, d) of the signs, which differ least between all states where it is 0.
    """

    signs: Tensor
    moved: Tensor
    free: Tensor
    weights: Tensor
    outputs: Tensor


def play(
    model: Any,
    adapters: list[nn.Module],
    ids: Tensor,
    weights: Tensor,
    options: argparse.Namespace,
) -> Round:
    """Return what a round on texts (n, L) shows. It is played on copies."""
    facts = RunFacts(
        optimizer=options.optimizer,
        optimizer_settings={"lr": options.rate, "weight_decay": 0.01},
        local_steps=options.steps,
    )
    steps = LocalSteps.from_facts(facts)
    assert steps is not None
    batches = [TokenBatch(part, part, None, "causal") for part in ids.split(options.texts)]
    after = train_copies(find_anatomy(model, blocks="model.layers"), batches, steps)
    names = {id(p): n for n, p in model.named_parameters()}
    changes = []
    for adapter in adapters:
        before = adapter.down.weight.detach()
        update = (before - after[names[id(adapter.down.weight)]]) / options.rate
        changes.append(steps.without_decay(update, before, options.rate))
    change = torch.stack(changes)
    moved = change.abs().amax(-1) > STILL
    outputs = torch.stack(
        [(a.up.weight.detach() - after[names[id(a.up.weight)]]).sign() for a in adapters]
    )
    return Round(change.sign(), moved, moved.clone(), weights, outputs)


@dataclasses.dataclass(eq=False)
class Witness:
    """What rows say of a state that they would fire for, in nats, fitted on a public round.

    Attributes:
        still: of a row that did not move, by adapter (a,).
        agreement: of one that moved, by adapter and by how many signs agree (a, BINS).
    """

    still: Tensor
    agreement: Tensor

    @classmethod
    def fit(cls, adapters: list[nn.Module], seen: Round, true: Tensor, other: Tensor) -> Witness:
        """Return the likelihoods from states (a, n, d) of a round's texts, and of other texts."""
        counts = []
        for states in (true, other):
            fires, bins = votes(adapters, seen, states)
            moved = fires & seen.moved[:, None]
            still = (fires & ~seen.moved[:, None]).sum((1, 2)) + 0.5
            pairs = zip(bins, moved, strict=True)
            rows = torch.stack([torch.bincount(b[m], minlength=BINS) for b, m in pairs])
            table = torch.cat([still[:, None], rows + 0.5], dim=1)
            counts.append(table / table.sum(1, keepdim=True))
        ratio = (counts[0] / counts[1]).log().clamp(-MOST, MOST)
        return cls(ratio[:, 0], ratio[:, 1:])

    def weigh(self, adapters: list[nn.Module], seen: Round, states: Tensor) -> Tensor:
        """Return what each row says of each of states (a, n, d), (n, a, r) in nats."""
        fires, bins = votes(adapters, seen, states)
        said = self.agreement.gather(1, bins.flatten(1)).view(bins.shape)
        said = said * seen.free[:, None]
        said = torch.where(seen.moved[:, None], said, self.still[:, None, None])
        said = (said * fires).transpose(0, 1)
        total = said.sum((1, 2), keepdim=True)
        return said * (MOST_OF_TOKEN / total.abs().clamp(min=MOST_OF_TOKEN))


def votes(adapters: list[nn.Module], seen: Round, states: Tensor) -> tuple[Tensor, Tensor]:
    """Return (a, n, r) which rows fire for states (a, n, d), and the bin of signs that agree."""
    weights = torch.stack([adapter.down.weight.detach() for adapter in adapters])
    biases = torch.stack([adapter.down.bias.detach() for adapter in adapters])
    fires = states @ weights.mT + biases[:, None] > 0
    agreement = ((states.sign() * seen.weights[:, None]) @ seen.signs.mT).abs()
    bins = -2 * (1 - agreement).clamp(min=0.002).log2()
    return fires, bins.long().clamp(max=BINS - 1)


@dataclasses.dataclass(eq=False)
class Found:
    """A text, what the model says of it, and what rows do (a, r)."""

    ids: Tensor
    prior: float
    said: Tensor

    def score(self, free: Tensor) -> float:
        """Return its score where some moved rows are taken."""
        said = torch.where(self.said > 0, self.said * free, self.said)
        return self.prior + float(said.sum())


@torch.no_grad()
def misread(
    model: Any, adapters: list[nn.Module], ids: Tensor, generator: torch.Generator
) -> Tensor:
    """Return states (a, n, d) behind one to three tokens that the model may have written too."""
    parts = []
    for _ in range(-(-MISREAD // len(ids))):
        wrong, length = ids.clone(), ids.shape[1]
        shares = model(ids).logits.div(1.5).softmax(-1)
        first = torch.full((len(ids),), length)
        for _ in range(int(torch.randint(1, 4, (), generator=generator))):
            place = torch.randint(1, length, (len(ids),), generator=generator)
            row = torch.arange(len(ids))
            drawn = torch.multinomial(shares[row, place - 1], 1, generator=generator)[:, 0]
            first = torch.where(drawn != ids[row, place], first.minimum(place), first)
            wrong[row, place] = drawn
        behind = torch.arange(length - 1) >= first[:, None]
        parts.append(states_of(model, adapters, wrong)[:, :, :-1][:, behind])
    return torch.cat(parts, dim=1)


@torch.no_grad()
def search(
    model: Any,
    adapters: list[nn.Module],
    seen: Round,
    witness: Witness | None,
    start: Tensor,
    options: argparse.Namespace,
) -> list[Found]:
    """Return texts from left to right, the likeliest first, by model and rows."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    ids, prior = start[None], torch.zeros(1)
    said = torch.zeros(1, *seen.moved.shape)
    cache = DynamicCache(config=model.config)
    hidden = decoder(ids, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
    while ids.shape[1] < options.length:
        logs, tokens = head(hidden).log_softmax(-1).topk(NEXT, dim=1)
        total = (prior + said.sum((1, 2)))[:, None] + logs
        order = total.flatten().topk(min(options.tries, total.numel())).indices
        parent, child = order // NEXT, tokens.flatten()[order]
        cache.batch_select_indices(parent)
        with reading(adapters) as states:
            out = decoder(child[:, None], past_key_values=cache, use_cache=True)
        ids = torch.cat([ids[parent], child[:, None]], dim=1)
        prior, said = prior[parent] + logs.flatten()[order], said[parent]
        if witness is not None and ids.shape[1] < options.length:  # the last one is a label
            now = witness.weigh(adapters, seen, torch.stack(states)[:, :, 0])
            said = torch.where(now.abs() > said.abs(), now, said)  # a row speaks once
        best = (prior + said.sum((1, 2))).topk(min(options.beam, len(ids))).indices
        ids, prior, said = ids[best], prior[best], said[best]
        hidden = out.last_hidden_state[best, -1]
        cache.batch_select_indices(best)
    return [Found(*one) for one in zip(ids, prior.tolist(), said, strict=True)]


def find_all(
    model: Any,
    adapters: list[nn.Module],
    seen: Round,
    witness: Witness,
    start: Tensor,
    options: argparse.Namespace,
) -> list[Found]:
    """Return the texts that are likelier there than not, given the rows that others have taken."""
    found: list[Found] = []
    texts = options.steps * options.texts
    for _ in range(options.searches or texts):
        best = search(model, adapters, seen, witness, start, options)
        new = 0
        while best and len(found) < texts:
            one = max(best, key=lambda f: f.score(seen.free))
            best.remove(one)
            if one.score(seen.free) + torch.tensor(texts).log() < options.least:
                break
            found.append(one)
            new += 1
            seen.free &= ~(one.said > 0)
        print(f"{len(found)} texts", flush=True)
        if not new or len(found) == texts:
            break
    return found


def label_last(
    model: Any, adapters: list[nn.Module], seen: Round, one: Found, tries: int = 8
) -> Tensor:
    """Return a text with the last token, a label alone, whose gradient has most of the signs."""
    with torch.no_grad():
        choices = model(one.ids[None, :-1]).logits[0, -1].topk(tries).indices.tolist()
    used, maps = one.said > 0, [adapter.up.weight for adapter in adapters]
    best = (-1.0, one.ids)
    for token in choices:
        ids = torch.cat([one.ids[:-1], torch.tensor([token])])
        loss = model(input_ids=ids[None], labels=ids[None]).loss
        signs = torch.stack(torch.autograd.grad(loss, maps)).sign()
        agreement = float((signs * seen.outputs).mean(1)[used].mean())
        best = max(best, (agreement, ids), key=lambda pair: pair[0])
    return best[1]


def scores(private: Tensor, found: Tensor) -> dict[str, float]:
    """Return rates of private texts (n, L) that found ones (m, L) hold: exact, and ROUGE-L."""
    if not len(found):
        return {"exact": 0.0, "rouge_l": 0.0, "false": float("nan")}
    same = (private[:, None] == found).all(-1)
    pairs = sentence_scores(found.repeat(len(private), 1), private.repeat_interleave(len(found), 0))
    return {
        "exact": float(same.any(1).float().mean()),
        "rouge_l": float(pairs.rouge_l.view(len(private), -1).amax(1).mean()),
        "false": float((~same.any(0)).float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, help="folder of a causal model")
    add("--text", default="tinystories", help="file, or the name of a set in FEDLEAK_ASSETS")
    add("--places", type=int, nargs="*", help="0: behind the embedding, 1: the first block, ...")
    add("--rank", type=int, default=144, help="rows of an adapter")
    add("--texts", type=int, default=4, help="in a step")
    add("--length", type=int, default=32, help="tokens of a text")
    add("--steps", type=int, default=1, help="of the optimizer in a round")
    add("--optimizer", default="AdamW")
    add("--rate", type=float, default=3e-4, help="learning rate")
    add("--kappa", type=float, default=1.0, help="tokens of a round that a row fires for")
    add("--row-norm", type=float, help="of crafted rows; default: the adapter's own")
    add("--beam", type=int, default=64, help="beginnings that are kept")
    add("--tries", type=int, default=384, help="of which so many are tried, one token longer")
    add("--searches", type=int, default=0, help="at most; 0: as many as texts")
    add("--least", type=float, default=3.0, help="log odds from which a text counts as found")
    add("--rounds", type=int, default=3)
    add("--public", type=int, default=600, help="public texts")
    add("--seed", type=int, default=0)
    add("--debug", action="store_true")
    add("--out", type=Path, required=True, help="JSON lines that each round is added to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = rows_of(options)
    in_round = options.steps * options.texts
    for number in range(options.seed, options.seed + options.rounds):
        began, options.seed = time.monotonic(), number
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(number))]
        private, played = order[: 2 * in_round].split(in_round)
        public, other = order[2 * in_round :][: options.public + OTHERS].split(
            [options.public, OTHERS]
        )
        model, adapters = adapted(options)
        weights = craft_rows(model, adapters, public, options)
        known = play(model, adapters, played, weights, options)
        true, absent = (
            states_of(model, adapters, ids)[:, :, :-1].flatten(1, 2) for ids in (played, other)
        )
        wrong = misread(model, adapters, played, torch.Generator().manual_seed(number))
        witness = Witness.fit(adapters, known, true, torch.cat([wrong, absent], dim=1))
        seen = play(model, adapters, private, weights, options)
        if options.debug:
            print(witness)
        said = witness.weigh(
            adapters, seen, states_of(model, adapters, private)[:, :, :-1].flatten(1, 2)
        )
        print(
            f"rows moved {float(seen.moved.float().mean()):.2f}, nats for a true token "
            f"{float(said.sum((1, 2)).mean()):.2f}",
            flush=True,
        )
        found = find_all(model, adapters, seen, witness, private[0, :1], options)
        for one in found:
            one.ids = label_last(model, adapters, seen, one)
        if options.debug:
            tokenizer = AutoTokenizer.from_pretrained(options.model)
            print(*("true " + tokenizer.decode(ids) for ids in private), sep="\n")
            print(*("found " + tokenizer.decode(one.ids) for one in found), sep="\n", flush=True)
        alone = search(model, adapters, seen, None, private[0, :1], options)[:in_round]
        ids = [torch.stack([f.ids for f in fs]) if fs else private[:0] for fs in (found, alone)]
        cell = {
            "settings": {n: v for n, v in vars(options).items() if n not in ("out", "model")},
            "found": len(found),
            **scores(private, ids[0]),
            "alone": scores(private, ids[1]),
            "seconds": time.monotonic() - began,
            "date": date.today().isoformat(),
            "machine": platform.machine(),
        }
        print({n: v for n, v in cell.items() if n != "settings"}, flush=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")


if __name__ == "__main__":
    main()
