"""How often a certificate of SubspaceTexts is given, and how often it is wrong.

    python -m benchmarks.attacks.text_certificates --runs 1000
    python -m benchmarks.attacks.text_certificates dpsgd --runs 1000 --budget 0.5

Every run is a small model of random weights (Llama, GPT-2, BERT as masked model or classifier;
V 300, d 64, 2 or 4 blocks), whole or with a LoRA of rank 2 to 16, and a batch of 1 to 6 texts of 3
to 14 tokens: of few types or many, with common beginnings, copies or shifts, padded left or right,
with labels masked at prompts, at ends or anywhere. In three of ten, two tokens of the batch differ
by 1e-6 to 1e-4 of their embedding's norm.

``attack`` runs the whole attack on the gradients of the batch. In most runs they are disturbed: by
noise that the adversary is told of or not (1e-7 to 1e-1 of the entries' root mean square), by
dropout, or by bfloat16: of the gradients, of these but handed on as float32, of the weights, or of
the client's autocast, told or not; or they are what one step of SGD (rate 0.01) left in the
weights. Then the certificate alone is asked about the right texts, and about others: with a token
exchanged for another of the batch, removed, or doubled. (A token that is doubled at a text's end
explains nothing: it is cut off, and the texts are the right ones again.)
``dpsgd`` has gradients clipped to 1 for each text, with noise of sigma 0.5, which the adversary is
told of, and once more is not.

A certificate is *wrong* if the texts are not the right ones. What cannot be told of them is taken
off both first: of copies all but one; of causal models what no label hangs on (a text's last token,
and all behind its last label), texts that another one begins with, and all but one of the tokens of
a text that repeats a single one, where positions are relative. Nothing else is excused. *Exact* are
runs in which the texts are right by the same rule. *Unknown* are those of which the attack says
nothing, and models that it refuses (with weights in bfloat16 those that add positions). A run that
is wrong is printed with its seed; ``--seed SEED --runs 1`` repeats it.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import SubspaceTexts, UnusableObservation
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.subspace_candidates import Branch, PartialText
from lightning_fedleak.attacks.texts.subspace_encoders import EncoderSearch
from lightning_fedleak.attacks.texts.subspace_rows import RecoveredText, Remainder, shared_rows
from lightning_fedleak.attacks.texts.subspace_search import Certificate, SubspaceSearch
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot

SMOKE = ("--runs 6", "dpsgd --runs 2")  # six, so that an encoder is among them
VOCABULARY, POSITIONS, MASK = 300, 32, 4
FAMILIES = ("llama", "llama", "gpt2", "gpt2", "masked", "classifier")
DISTURBANCES = (
    *["none"] * 4,
    "noise, told",
    "noise, not told",
    "dropout",
    "bf16 gradients",
    "bf16 gradients as fp32",
    "bf16 weights",
    "bf16 autocast, told",
    "bf16 autocast, not told",
    "round of SGD",
)
TAMPERED = ("right", "exchanged", "removed", "doubled")
TOLD = ("told of the noise", "not told of it")
CLIP, SIGMA = 1.0, 0.5
RATE = 0.01

Texts = list[tuple[int, ...]]


@dataclass(frozen=True)
class Client:
    """A model and a batch.

    Attributes:
        model: in evaluation mode.
        inputs: of its forward, labels too.
        texts: what the gradients hold of each text.
        causal: whether a text is read from left to right.
        relative: whether its positions are.
        words: what was drawn.
    """

    model: nn.Module
    inputs: dict[str, Tensor]
    texts: Texts
    causal: bool
    relative: bool
    words: str

    def told(self, texts: Iterable[Sequence[int]]) -> Texts:
        """Texts as far as a certificate can tell them apart, in order: see the module."""
        distinct = {tuple(text) for text in texts if text}
        if self.relative:
            distinct = {text[:1] if len(set(text)) == 1 else text for text in distinct}
        if self.causal:
            distinct = {
                text
                for text in distinct
                if not any(other != text and other[: len(text)] == text for other in distinct)
            }
        return sorted(distinct)

    def right(self, texts: Iterable[Sequence[int]]) -> bool:
        """Whether these are the texts of the batch."""
        return self.told(texts) == self.told(self.texts)


# ---- what a client has ----------------------------------------------------------------------


def model_of(family: str, blocks: int, rank: int, rng: random.Random) -> nn.Module:
    """With norms of its own, its adapters away from B = 0; dropout of a tenth when it trains."""
    sizes = {"num_hidden_layers": blocks, "num_attention_heads": 4, "hidden_size": 64}
    if family == "llama":
        model: nn.Module = LlamaForCausalLM(
            LlamaConfig(vocab_size=VOCABULARY, intermediate_size=96, attention_dropout=0.1, **sizes)
        )
        targets = rng.choice((["q_proj", "k_proj", "v_proj"], ["q_proj", "v_proj"]))
    elif family == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY,
                n_embd=64,
                n_layer=blocks,
                n_head=4,
                n_positions=POSITIONS,
                bos_token_id=0,
                eos_token_id=0,
            )
        )
        targets = ["c_attn"]
    else:
        kind = BertForMaskedLM if family == "masked" else BertForSequenceClassification
        model = kind(
            BertConfig(
                vocab_size=VOCABULARY,
                intermediate_size=96,
                max_position_embeddings=POSITIONS,
                **sizes,
            )
        )
        targets = rng.choice((["query", "key", "value"], ["query", "value"]))
    with torch.no_grad():
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters(recurse=False):
                    parameter += 0.2 * torch.randn_like(parameter)
    if rank:
        model = get_peft_model(model, LoraConfig(r=rank, target_modules=targets))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter += 0.05 * torch.randn_like(parameter)
    return model.eval()


def ids_of(rng: random.Random) -> tuple[Tensor, str]:
    """(B, L) token ids, and in words how they were drawn."""
    rows, length = rng.randint(1, 6), rng.randint(3, 14)
    kinds = rng.choice((2, 3, 5, 10, 40, VOCABULARY - 5))
    ids = torch.randint(5, 5 + kinds, (rows, length))
    form = rng.choice(("plain", "common beginnings", "common beginnings", "copy", "shift"))
    if form == "common beginnings":
        for row in range(1, rows):
            shared = rng.randint(0, length)
            ids[row, :shared] = ids[rng.randrange(row), :shared]
    elif form == "copy":
        ids[-1] = ids[0]
    elif form == "shift" and rows > 1:
        ids[1, 1:] = ids[0, :-1]
    return ids, f"{rows}x{length} {kinds} types {form}"


def mask_of(ids: Tensor, side: str, rng: random.Random) -> Tensor:
    """(B, L) 1 where a text is; each keeps two tokens at least."""
    mask = torch.ones_like(ids)
    for row in range(len(ids)):
        padded = rng.randint(0, ids.shape[1] - 2) if side != "no" else 0
        if padded:
            mask[row, slice(0, padded) if side == "left" else slice(-padded, None)] = 0
    return mask


def next_tokens(ids: Tensor, mask: Tensor, form: str, rng: random.Random) -> Tensor:
    """(B, L) labels of a causal model."""
    labels = ids.masked_fill(mask == 0, -100)
    for row in range(len(ids)):
        real = mask[row].nonzero()[:, 0].tolist()
        looked_away = {
            "all": [],
            "prompt": real[: rng.randint(0, len(real) - 1)],
            "ends": real[len(real) - rng.randint(0, len(real) // 2) :],
            "anywhere": [place for place in real if rng.random() < 0.4],
        }[form]
        labels[row, looked_away] = -100
    return labels


def masked_tokens(ids: Tensor, mask: Tensor, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Ids (B, L) with some masked, and labels (B, L) at these alone."""
    hidden = (torch.rand(ids.shape) < rng.choice((0.15, 0.4))) & (mask == 1)
    labels = ids.masked_fill(~hidden, -100)
    return ids.masked_fill(hidden, MASK), labels


def client_of(rng: random.Random) -> Client:
    """A model and a batch, of which at least one text has a part in the gradients."""
    family, rank = rng.choice(FAMILIES), rng.choice((0, 0, 2, 4, 8, 16))
    causal = family in ("llama", "gpt2")
    model = model_of(family, rng.choice((2, 4)), rank, rng)
    while True:
        ids, drawn = ids_of(rng)
        side = rng.choice(("no", "no", "left", "right"))
        mask = mask_of(ids, side, rng)
        inputs: dict[str, Tensor] = {}
        form = rng.choice(("all", "all", "prompt", "ends", "anywhere")) if causal else "all"
        if causal:
            inputs["labels"] = next_tokens(ids, mask, form, rng)
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        elif family == "classifier":
            inputs["labels"] = torch.randint(2, (len(ids),))
        elif rng.random() < 0.7:
            ids, inputs["labels"] = masked_tokens(ids, mask, rng)
            form = "masked"
        else:
            inputs["labels"] = ids.masked_fill(mask == 0, -100)
        inputs |= {"input_ids": ids, "attention_mask": mask}
        texts = [text for row in range(len(ids)) if (text := seen(inputs, row, causal=causal))]
        if texts:
            words = f"{family} r {rank} {drawn} padded {side} labels {form}"
            types = ids[mask == 1].unique().tolist()
            if rng.random() < 0.3 and len(types) > 1:
                apart = 10 ** rng.uniform(-6, -4)
                make_alike(model, *rng.sample(types, 2), apart)
                words += f" alike {apart:.0e}"
            return Client(model, inputs, texts, causal, family == "llama", words)


def make_alike(model: nn.Module, token: int, other: int, apart: float) -> None:
    """Gives a token the embedding of another, but for a step of a share of its norm."""
    rows = model.get_input_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        step = torch.randn_like(rows[token])
        rows[other] = rows[token] + apart * rows[token].norm() * step / step.norm()


def seen(inputs: dict[str, Tensor], row: int, *, causal: bool) -> tuple[int, ...]:
    """What the gradients hold of a text: up to its last label, or if it has one all of it.

    An encoder's positions are those in the padded row, so that a text that is padded on the left
    begins with tokens that are none.
    """
    ids, labels = inputs["input_ids"][row], inputs["labels"][row]
    real = inputs["attention_mask"][row] == 1
    if not causal:
        ends = int(real.nonzero().max()) + 1
        text = tuple(ids.masked_fill(~real, -1)[:ends].tolist())
        return text if bool((labels != -100).any()) else ()
    labelled = (labels[real][1:] != -100).nonzero()
    return tuple(ids[real][: int(labelled.max()) + 1].tolist()) if len(labelled) else ()


def backward(client: Client, autocast: bool = False) -> None:
    client.model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = client.model(**client.inputs).loss
    loss.backward()


def shared(anatomy: Anatomy, attack: SubspaceTexts) -> GradientSnapshot:
    roles = attack.needs(anatomy).gradients
    tensors = {r: g.clone() for r in roles if (g := anatomy.parameter(r).grad) is not None}
    return GradientSnapshot(0, Stage.SHARED, tensors)


def noised(snapshot: GradientSnapshot, std: float, *, told: bool) -> GradientSnapshot:
    tensors = {n: g + std * torch.randn_like(g) for n, g in snapshot.tensors.items()}
    return replace(snapshot, tensors=tensors, noise_std=std if told else 0.0)


# ---- the attack -----------------------------------------------------------------------------


def disturbed(client: Client, disturbance: str, budget: float, rng: random.Random) -> Outcome:
    """What the attack says of gradients that something was done to."""
    model = client.model
    if disturbance == "bf16 weights":
        model.bfloat16()
    anatomy = find_anatomy(model)
    attack = SubspaceTexts(budget_seconds=budget)
    if disturbance == "bf16 autocast, told":
        attack.meet(RunFacts(autocast=torch.bfloat16))
    elif disturbance == "round of SGD":
        settings = {"lr": RATE}
        attack.meet(RunFacts(optimizer="SGD", optimizer_settings=settings, local_steps=1))
    try:
        attack.prepare(anatomy)
    except ValueError:
        if disturbance != "bf16 weights":
            raise
        return Outcome(None)
    model.train(disturbance == "dropout")
    backward(client, autocast="autocast" in disturbance)
    model.eval()
    snapshot = shared(anatomy, attack)
    if disturbance.startswith("noise"):
        entries = torch.cat([g.flatten() for g in snapshot.tensors.values()])
        std = float(entries.square().mean().sqrt()) * 10 ** rng.uniform(-7, -1)
        snapshot = noised(snapshot, std, told=disturbance == "noise, told")
    elif disturbance.startswith("bf16 gradients"):
        tensors = {n: g.bfloat16() for n, g in snapshot.tensors.items()}
        if disturbance.endswith("fp32"):
            tensors = {n: g.float() for n, g in tensors.items()}
        snapshot = replace(snapshot, tensors=tensors)
    elif disturbance == "round of SGD":
        attack.refresh(anatomy, 0)
        moved = {n: stepped(anatomy.parameter(n), g) for n, g in snapshot.tensors.items()}
        snapshot = UpdateSnapshot(0, Stage.SHARED, moved, learning_rate=RATE)
    return outcome(client, attack, snapshot)


def stepped(weight: Tensor | None, gradient: Tensor) -> Tensor:
    """What the weights tell of a gradient behind one step, rounded as they are."""
    assert weight is not None
    before = weight.detach()
    return (before - (before - RATE * gradient)) / RATE


@dataclass(frozen=True)
class Outcome:
    """What an attack said, and whether it is right; no texts where it is unknown."""

    texts: Texts | None
    certified: bool = False
    exact: bool = False


def outcome(client: Client, attack: SubspaceTexts, snapshot: GradientSnapshot) -> Outcome:
    try:
        guess = attack.run(Observation((snapshot,)))
    except UnusableObservation:
        return Outcome(None)
    if client.causal:
        texts = [tuple(row[row >= 0].tolist()) for row in guess.tokens]
    else:
        texts = [tuple(row[: int((row >= 0).nonzero().max()) + 1].tolist()) for row in guess.tokens]
    return Outcome(texts, bool(guess.certified), client.right(texts))


# ---- the certificate alone ------------------------------------------------------------------


class ClientCertificate:
    """The attack's own check, of any texts, on the gradients of a batch."""

    def __init__(self, client: Client) -> None:
        self.client = client
        anatomy = find_anatomy(client.model)
        attack = SubspaceTexts()
        attack.prepare(anatomy)
        backward(client)
        view = Observation((shared(anatomy, attack),))
        assert attack._copy is not None
        self.bottom, first = attack._copy, attack._readable.get(anatomy).first
        rows = [shared_rows(known, anatomy, view, None) for known in self.bottom.inputs]
        types = {token for text in client.texts for token in text if token >= 0}
        self.bag = torch.tensor(sorted(types))
        self.causal: SubspaceSearch | None = None
        self.encoder: EncoderSearch | None = None
        if first is None:
            self.causal = SubspaceSearch(self.bottom, attack._whitenings, rows, self.bag, 3, 0)
        else:
            self.encoder = EncoderSearch(self.bottom, first, attack._whitenings, rows, self.bag, 0)

    @torch.no_grad()
    def of(self, texts: Texts) -> tuple[Texts, bool]:
        """What is left of texts without ends that explain nothing, and whether it is certified."""
        with self.bottom.session():
            if self.encoder is not None:
                pairs = self.encoder._pairs(Deadline())
                found = [RecoveredText(text, (1.0,) * len(text)) for text in texts]
                return texts, self.encoder._certain(found, pairs)
            assert self.causal is not None
            search = self.causal
            check = Certificate(search.candidates, search.shared, search.measure).check
            kept, certain = check(list(self._found(texts)))
        return [text.tokens for text in kept], certain

    def _found(self, texts: Texts) -> Iterator[PartialText]:
        """As the search would have found them: each is what it goes on with behind the others.

        What else could stand at a place are all tokens of the bag.
        """
        assert self.causal is not None
        measure = self.causal.measure

        def whitened(ids: Tensor) -> list[Tensor]:
            return measure.whiten(self.bottom.parts(self.bottom.hidden(ids)))

        known: set[tuple[int, ...]] = set()
        nothing = tuple(
            Remainder.from_rows(rows.principal[:0], white)
            for rows, white in zip(self.causal.shared, measure.whitening, strict=True)
        )
        for text in texts:
            parts = whitened(torch.tensor([text]))
            own = [n for n in range(len(text)) if text[: n + 1] not in known]
            known |= {text[: n + 1] for n in own}
            states = tuple(tuple(x[0, n] for x in parts) for n in own)
            aside = []
            for n in own:
                begun = torch.tensor(text[:n], dtype=torch.int64).expand(len(self.bag), n)
                ids = torch.cat([begun, self.bag[:, None]], 1)
                ends = [x[:, -1] for x in whitened(ids)]
                aside += [
                    Branch(text[:n], token, tuple(x[i] for x in ends))
                    for i, token in enumerate(self.bag.tolist())
                    if token != text[n]
                ]
            yield PartialText(text, (1.0,) * len(text), 0.0, nothing, (), tuple(aside), states)


def tampered(texts: Texts, bag: Sequence[int], form: str, rng: random.Random) -> Texts | None:
    """Texts of which one token is not as it was; None where there is no other token."""
    rows = [list(text) for text in texts]
    row = rng.choice(rows)
    place = rng.randrange(len(row))
    if form == "exchanged":
        others = [token for token in bag if token != row[place]]
        if not others:
            return None
        row[place] = rng.choice(others)
    elif form == "removed":
        del row[place]
    elif form == "doubled":
        row.insert(place, row[place])
    return [tuple(row) for row in rows if row]


# ---- the runs -------------------------------------------------------------------------------


def private_gradients(client: Client) -> None:
    """Sum of the texts' gradients, each clipped, with noise, over the number of texts."""
    parameters = [p for p in client.model.parameters() if p.requires_grad]
    total = [torch.zeros_like(p) for p in parameters]
    rows = len(client.inputs["input_ids"])
    for row in range(rows):
        if not seen(client.inputs, row, causal=client.causal):
            continue
        one = {name: value[row : row + 1] for name, value in client.inputs.items()}
        backward(replace(client, inputs=one))
        gradients = [g if (g := p.grad) is not None else torch.zeros_like(p) for p in parameters]
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
        for held, gradient in zip(total, gradients, strict=True):
            held += gradient * min(1.0, CLIP / norm)
    for parameter, held in zip(parameters, total, strict=True):
        parameter.grad = (held + SIGMA * CLIP * torch.randn_like(held)) / rows


class Counts:
    """Of the runs of each kind."""

    def __init__(self) -> None:
        self.of: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, what: Outcome) -> None:
        self.of[kind, "runs"] += 1
        self.of[kind, "unknown"] += what.texts is None
        self.of[kind, "exact"] += what.exact
        self.of[kind, "certified"] += what.certified
        self.of[kind, "wrong"] += what.certified and not what.exact
        self.of[kind, "exact, not certified"] += what.exact and not what.certified

    def show(self, kinds: Sequence[str], columns: Sequence[str]) -> None:
        kinds = [kind for kind in dict.fromkeys(kinds) if self.of[kind, "runs"]]
        width = max(map(len, kinds))
        print(" " * width, *(f"{column:>{max(7, len(column))}}" for column in columns))
        for kind in kinds:
            numbers = (f"{self.of[kind, c]:>{max(7, len(c))}}" for c in columns)
            print(f"{kind:<{width}}", *numbers)


def attacked(options: argparse.Namespace) -> None:
    counts, checks = Counts(), Counts()
    for seed in range(options.seed, options.seed + options.runs):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        client = client_of(rng)
        disturbance = rng.choice(DISTURBANCES)
        certificate = ClientCertificate(client)
        right = client.told(client.texts)
        for form in TAMPERED:
            texts = tampered(right, certificate.bag.tolist(), form, rng)
            if texts is None or min(map(min, texts), default=-1) < 0:
                continue
            if form != "right" and client.right(texts):
                continue
            kept, certain = certificate.of(texts)
            what = Outcome(kept, certain, client.right(kept))
            checks.add(form, what)
            tell(seed, client, form, what)
        what = disturbed(client, disturbance, options.budget, rng)
        counts.add(disturbance, what)
        tell(seed, client, disturbance, what)
    print("\nthe attack")
    columns = ("runs", "unknown", "exact", "certified", "wrong", "exact, not certified")
    counts.show(DISTURBANCES, columns)
    print("\nthe certificate, of texts that were given to it")
    checks.show(TAMPERED, ("runs", "certified", "wrong"))


def private(options: argparse.Namespace) -> None:
    counts = Counts()
    for seed in range(options.seed, options.seed + options.runs):
        torch.manual_seed(seed)
        rng = random.Random(seed)
        client = client_of(rng)
        anatomy = find_anatomy(client.model)
        attack = SubspaceTexts(budget_seconds=options.budget)
        attack.prepare(anatomy)
        private_gradients(client)
        snapshot = shared(anatomy, attack)
        std = SIGMA * CLIP / len(client.inputs["input_ids"])
        for kind, noise in zip(TOLD, (std, 0.0), strict=True):
            what = outcome(client, attack, replace(snapshot, noise_std=noise))
            counts.add(kind, what)
            tell(seed, client, kind, what)
    print()
    counts.show(TOLD, ("runs", "unknown", "exact", "certified", "wrong"))


def tell(seed: int, client: Client, kind: str, what: Outcome) -> None:
    if what.certified and not what.exact:
        was = f"{client.words}; {client.texts}"
        print(f"WRONG seed {seed}, {kind}: {was}; said {what.texts}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", nargs="?", choices=("attack", "dpsgd"), default="attack")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--budget", type=float, default=1.5, help="seconds of a look")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    began = time.perf_counter()
    (private if options.mode == "dpsgd" else attacked)(options)
    print(f"\n# {platform.machine()}, one thread, {date.today()}, {options.runs} runs")
    print(f"# {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
