"""How often ``fedleak inspect`` finds something in honest adapters, and how often in crafted ones.

    python -m benchmarks.federation.inspection --model stories15M=DIR tiny= --traps

Honest states are those of set-ups that are drawn at random: ranks, rates, clients, steps, texts,
runs that diverge, starts of PiSSA and OLoRA, servers that do more than take a mean, rounds that a
client missed. No limit was chosen on them. Traps are values that a server crafts, some hidden from
one rule or another, and the layers of membership attacks.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks.federation.crafted_rows import CraftedValues, RowSettings, craft
from benchmarks.shared import with_lora
from lightning_fedleak.attacks import (
    AttentionMembership,
    AttentionSettings,
    FCMembership,
    PublicText,
    Query,
)
from lightning_fedleak.attacks.row_space import SharedInput, find_linear_maps, input_states
from lightning_fedleak.cli.finetuning.assets import model_source
from lightning_fedleak.cli.finetuning.data import load_tokenizer
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.federation.inspection import (
    Agreed,
    Inspection,
    LastRound,
    agree,
    find_adapters,
    inspect_received,
    sum_inputs,
    usual_types,
)
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.model_runs import hidden_states

FILES = {
    "imdb": "imdb/train.jsonl.gz",
    "wikitext": "wikitext2/train.raw.txt.gz",
    "multi30k": "multi30k/train.en.gz",
}
SMOKE = ("--smallest",)
LENGTH = 24  # tokens of a text
USUAL_TEXTS, USUAL_LENGTH = 64, 64  # public texts that bottlenecks are run on, and their tokens
AT_ONCE = 8  # texts of one run, which bounds the memory


class Bottleneck(nn.Module):
    """``h + U relu(W h + b) + c`` with the usual start: W and U small and normal, b and c zero."""

    def __init__(self, d: int, r: int, std: float) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(d, r), nn.Linear(r, d)
        for layer in (self.down, self.up):
            nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
            nn.init.zeros_(layer.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.up(torch.relu(self.down(hidden)))


class Adapted(nn.Module):
    """A module of a model with an adapter behind it."""

    def __init__(self, inner: nn.Module, adapter: nn.Module) -> None:
        super().__init__()
        self.inner, self.adapter = inner, adapter

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        return (
            (self.adapter(output[0]), *output[1:])
            if isinstance(output, tuple)
            else self.adapter(output)
        )


@dataclass(frozen=True)
class Setup:
    """One honest federation.

    Attributes:
        model: name of the model.
        kind: ``"bottleneck"``, ``"lora"``, or a start of PEFT's: ``"pissa"``, ``"olora"``.
        rank: of the adapters.
        rate: learning rate.
        optimizer: of the clients.
        data: of the even clients, and of the odd ones.
        clients: in a round.
        steps: local steps of even clients, and of odd ones.
        rows: texts of a local step.
        rounds: of the federation.
        server: what the server does with the mean: ``"mean"``, ``"momentum"``, ``"adam"``,
            ``"noise"``; ``"missed"``: the mean, and the client takes part every other round.
        std: of a bottleneck's start.
        seed: of everything.
    """

    model: str
    kind: str
    rank: int = 8
    rate: float = 3e-4
    optimizer: str = "adamw"
    data: tuple[str, str] = ("imdb", "imdb")
    clients: int = 2
    steps: tuple[int, int] = (5, 5)
    rows: int = 2
    rounds: int = 3
    server: str = "mean"
    std: float = 0.01
    targets: str = "all-linear"
    seed: int = 0


@dataclass(frozen=True)
class Sent:
    """What the first client gets in a round, and what it remembers of the round before."""

    round_: int
    received: dict[str, Tensor]
    previous: dict[str, Tensor] | None
    own: dict[str, Tensor] | None
    loss: float


def adapted(base: nn.Module, setup: Setup) -> nn.Module:
    """Return a copy of the base with the adapters of a set-up, all else frozen."""
    torch.manual_seed(setup.seed)
    model = copy.deepcopy(base).requires_grad_(False)
    if setup.kind == "bottleneck":
        places = [(model.model, "embed_tokens")]
        places += [(model.model.layers, str(i)) for i in range(len(model.model.layers))]
        for parent, name in places:
            adapter = Bottleneck(model.config.hidden_size, setup.rank, setup.std)
            setattr(parent, name, Adapted(getattr(parent, name), adapter))
        return model
    start = True if setup.kind == "lora" else setup.kind
    targets: Any = setup.targets if setup.targets == "all-linear" else setup.targets.split("+")
    return with_lora(model, setup.rank, targets, init_lora_weights=start)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if p.requires_grad}


def rounds(base: Base, setup: Setup) -> Iterator[tuple[nn.Module, Sent]]:
    """Yield the model and what the first client gets in each round."""
    model = adapted(base.model, setup)
    parameters = trained(model)
    draw = random.Random(setup.seed)
    previous = own = None
    momentum = {n: torch.zeros_like(p) for n, p in parameters.items()}
    square = {n: torch.zeros_like(p) for n, p in parameters.items()}
    loss = float("nan")
    generator = torch.Generator().manual_seed(setup.seed)
    for round_ in range(setup.rounds):
        received = {n: p.detach().clone() for n, p in parameters.items()}
        yield model, Sent(round_, received, previous, own, loss)
        returned = []
        for client in range(setup.clients):
            put(parameters, received)
            rate = setup.rate
            kind = torch.optim.AdamW if setup.optimizer == "adamw" else torch.optim.SGD
            optimizer = kind(parameters.values(), lr=rate)
            rows = base.texts[setup.data[client % 2]]
            for _ in range(setup.steps[client % 2]):
                ids = rows[[draw.randrange(len(rows)) for _ in range(setup.rows)]]
                optimizer.zero_grad()
                output = model(input_ids=ids, labels=ids).loss
                output.backward()
                optimizer.step()
                loss = float(output.detach())
            returned.append({n: p.detach().clone() for n, p in parameters.items()})
        if setup.server != "missed" or round_ % 2 == 0:
            own = {n: returned[0][n] - t for n, t in received.items()}
            previous = received
        with torch.no_grad():
            for n, p in parameters.items():
                change = sum(r[n] for r in returned) / setup.clients - received[n]
                if setup.server == "momentum":
                    change = momentum[n].mul_(0.9).add_(change)
                elif setup.server == "adam":
                    momentum[n].mul_(0.9).add_(change, alpha=0.1)
                    square[n].mul_(0.99).add_(change.square(), alpha=0.01)
                    change = 3e-3 * momentum[n] / (square[n].sqrt() + 1e-3)
                elif setup.server == "noise":
                    change = change + change.std() * torch.randn(change.shape, generator=generator)
                p.copy_(received[n] + change)


@torch.no_grad()
def put(parameters: dict[str, nn.Parameter], state: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(state[name])


@dataclass(frozen=True)
class Base:
    """A model, rows of ids by kind of text, and public text."""

    model: Any
    texts: dict[str, Tensor]
    public: PublicText


def load(name: str, source: str | None, assets: Path) -> Base:
    """Return a model and its texts from a folder of assets."""
    place, options = model_source(source)
    model = AutoModelForCausalLM.from_pretrained(place, **options | {"dtype": torch.float32})
    tokenizer = load_tokenizer(source)
    texts = {}
    for kind, file in FILES.items():
        lines = read_texts(assets / "data" / file)
        ids = tokenizer([t for t in lines[:3000] if t.strip()], add_special_tokens=False)
        rows = [[tokenizer.bos_token_id, *row[: LENGTH - 1]] for row in ids["input_ids"]]
        texts[kind] = torch.tensor([row for row in rows if len(row) == LENGTH])[:1000]
    return Base(model.eval(), texts, PublicText(texts["imdb"][-200:]))


CASES = ("plain", "sgd", "plain", "pissa", "momentum", "plain", "diverging", "missed", "plain")
CASES += ("olora", "adam", "noise")
TARGETS = ("all-linear", "q_proj+v_proj", "q_proj+k_proj+v_proj+o_proj")
TARGETS += ("gate_proj+up_proj+down_proj", "up_proj", "o_proj+down_proj")


def drawn(model: str, count: int, seed: int) -> Iterator[Setup]:
    """Yield honest set-ups that are drawn at random: no limit was chosen on them."""
    draw = random.Random(f"{model} {seed}")
    for i in range(count):
        case = CASES[i % len(CASES)]
        kind = case if case in ("pissa", "olora") else draw.choice(("bottleneck", "lora"))
        low, high = {"sgd": (1e-2, 2e-1), "diverging": (1e-2, 5e-2)}.get(case, (1e-4, 5e-3))
        steps = draw.randint(1, 10)
        yield Setup(
            model,
            kind,
            rank=round(2 * 50 ** draw.random()),
            rate=low * (high / low) ** draw.random(),
            optimizer="sgd" if case == "sgd" else "adamw",
            data=(draw.choice(list(FILES)), draw.choice(list(FILES))),
            clients=draw.randint(1, 6),
            steps=(steps, draw.choice((steps, draw.randint(1, 10)))),
            rows=draw.choice((1, 2, 4)),
            rounds=draw.randint(3, 8),
            server=case if case in ("momentum", "adam", "missed", "noise") else "mean",
            std=draw.choice((0.005, 0.01, 0.02, 0.05)),
            targets=draw.choice(TARGETS),
            seed=100 * seed + i,
        )


def crafted(base: Base, setup: Setup, sent: Sent, model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield names of traps, and the state that a server sends in place of an honest one."""
    anatomy = find_anatomy(model, blocks="model.layers")
    tokens = setup.steps[0] * setup.rows * LENGTH
    places = {"embedding": "model.embed_tokens.adapter", "block 0": "model.layers.0.adapter"}
    for place, path in places.items():
        for kappa, norm in ((3.0, None), (10.0, None), (3.0, 0.05), (3.0, 3.0)):
            settings = RowSettings(kappa=kappa, row_norm=norm, frequent=100)
            values = craft(anatomy, path, base.public, tokens, settings=settings)
            name = f"bottleneck, {place}, kappa {kappa:g}, norm {norm or 'own'}"
            yield name, sent.received | dict(values.tensors)
            if kappa == 3 and norm is None:
                for share in (0.25, 0.05):
                    part = some_rows(sent.received, values.tensors, share)
                    yield f"bottleneck, {place}, {share:.0%} of rows", part
                for ballast in (1.0, 3.0):
                    heavy = with_ballast(values, ballast)
                    yield f"bottleneck, {place}, ballast {ballast:g}", sent.received | heavy
                    part = some_rows(sent.received, heavy, 0.25)
                    yield f"bottleneck, {place}, ballast {ballast:g} in 25% of rows", part


def some_rows(honest: dict[str, Tensor], values: Any, share: float) -> dict[str, Tensor]:
    """Return an honest state of whose first map a share of rows is crafted."""
    state = dict(honest)
    for name, value in values.items():
        count = max(1, round(share * min(value.shape)))
        state[name] = honest[name].clone()
        if name.endswith("down.weight") or name.endswith("down.bias"):
            state[name][:count] = value[:count]
        elif name.endswith("up.weight"):
            state[name][:, :count] = value[:, :count]
    return state


def with_ballast(values: CraftedValues, ballast: float) -> dict[str, Tensor]:
    """Return crafted values whose rows push the usual types at random below the threshold."""
    rows = values.rows
    top = rows.presence.topk(100).indices
    generator = torch.Generator().manual_seed(0)
    depth = -ballast * torch.rand(len(rows.directions), len(top), generator=generator)
    target = (depth * rows.thresholds[:, None]).T
    push = torch.linalg.lstsq(rows.inputs[top], target, driver="gelsd").solution.T
    changed = rows.directions + push
    tensors = dict(values.tensors)
    norm = tensors[rows.parameter].norm(dim=1, keepdim=True) / changed.norm(dim=1, keepdim=True)
    tensors[rows.parameter] = norm * changed
    tensors[rows.parameter.removesuffix("weight") + "bias"] = -norm[:, 0] * rows.thresholds
    return tensors


def membership_layers(base: Base) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield the layers of membership attacks as they would be sent, at three strengths."""
    anatomy = find_anatomy(base.model)
    ids = base.texts["imdb"][:40]
    hidden = hidden_states(anatomy, 1, ids)
    for tau in (1e-3, 1e-2, 1e-1):
        fc = FCMembership(layer=1, tau=tau, dead_zone=2.5e-4, ladder=(1.0, 2.0, 4.0))
        layers = fc.craft(hidden[0, 5])
        rows = layers.second.repeat(len(layers.bias), 1)
        state = {"fc.0.weight": layers.first.weight, "fc.0.bias": layers.first.bias}
        yield f"FCMembership, tau {tau:g}", state | {"fc.1.weight": rows, "fc.1.bias": layers.bias}
    for beta in (1.0, 8.0, 64.0):
        attack = AttentionMembership(1, base.public, attention=AttentionSettings(beta=beta))
        attack.prepare(anatomy)
        query = Query(ids[:1], positions=torch.tensor([5]))
        layers = attack.craft(attack.embed(hidden[:1], query)[0])
        state = {f"attention.{n}": t.detach() for n, t in layers.state_dict().items()}
        yield f"AttentionMembership, beta {beta:g}", state


@dataclass
class Tally:
    """How many states of a row of the table were found, and by which rules."""

    states: int = 0
    crafted: int = 0
    diverged: int = 0
    rules: Counter[str] = field(default_factory=Counter)

    def add(self, result: Inspection) -> None:
        self.states += 1
        self.crafted += result.verdict == "crafted"
        self.diverged += result.verdict == "diverged"
        self.rules.update(answer.rule for answer in result.found)


@torch.no_grad()
def usual_inputs(
    anatomy: Anatomy, state: Mapping[str, Tensor], public: PublicText
) -> dict[str, Tensor]:
    """Return what the bottlenecks of a model read at the most usual token types, (k, d), by name.

    Args:
        anatomy: of the model, which holds the values that were received.
        state: these values, by parameter name.
        public: text that is run; none of it is private.
    """
    names = {a.name for a in find_adapters(state) if a.bias is not None}
    maps = [m for m in find_linear_maps(anatomy) if m.name in names]
    if not maps:
        return {}
    shared = [SharedInput((m,), state[m.name].shape[m.axis]) for m in maps]
    batch = public.batch(
        min(len(public), USUAL_TEXTS), USUAL_LENGTH, torch.Generator().manual_seed(0)
    )
    assert batch.attention_mask is not None
    usual = usual_types(batch.input_ids[batch.attention_mask.bool()])
    sums = [torch.zeros(len(usual), one.width, dtype=torch.float64) for one in shared]
    for ids, mask in zip(
        torch.split(batch.input_ids, AT_ONCE),
        torch.split(batch.attention_mask, AT_ONCE),
        strict=True,
    ):
        real = mask.bool()
        for total, states in zip(sums, input_states(anatomy, shared, ids, mask), strict=True):
            total += sum_inputs(states.cpu()[real], ids[real], usual)
    return {m.name: total for m, total in zip(maps, sums, strict=True)}


def inspected(model: nn.Module, sent: Sent, agreed: Agreed, base: Base, why: str = "") -> Any:
    """Return what the rules say of what is sent; the model holds it."""
    put(trained(model), sent.received)
    blocks = {} if hasattr(model, "peft_config") else {"blocks": "model.layers"}
    usual = usual_inputs(find_anatomy(model, **blocks), sent.received, base.public)
    last = None
    if sent.previous is not None and sent.own is not None:
        last = LastRound(sent.previous, sent.own)
    return inspect_received(
        sent.received, replace(agreed, usual=usual), None if why else last, first=sent.round_ == 0
    )


def measure_honest(base: Base, setups: Iterable[Setup], tallies: dict[str, Tally]) -> None:
    """Count what is found in honest states."""
    for setup in setups:
        agreed = agree(adapted(base.model, replace(setup, seed=setup.seed + 50)))
        for model, sent in rounds(base, setup):
            comparable = setup.server == "mean" and setup.optimizer == "adamw"
            why = "" if comparable else "another server or optimizer, or a round was missed"
            result = inspected(model, sent, agreed, base, why)
            tallies.setdefault(f"honest {setup.kind}", Tally()).add(result)
            values = {a.rule: round(a.value, 3) for a in result.answers if not a.why}
            names = ("model", "kind", "rank", "rate", "optimizer", "server", "seed")
            subject = [getattr(setup, name) for name in names]
            print(*subject, sent.round_, result.verdict, values, flush=True)
            if why and sent.own is not None:
                queried = inspected(model, sent, agreed, base)
                results = [a for a in queried.found if a.rule == "jump"]
                name = setup.server if setup.optimizer == "adamw" else setup.optimizer
                name = f"honest, jump asked all the same: {name}"
                tallies.setdefault(name, Tally()).add(replace(result, answers=tuple(results)))


def measure_traps(base: Base, setups: list[Setup], tallies: dict[str, Tally]) -> None:
    """Count what is found in crafted states, in the first round and in the third."""
    for setup in setups:
        agreed = None
        for model, sent in rounds(base, setup):
            agreed = agreed or agree(model)
            if sent.round_ == 1:
                continue
            for name, state in crafted(base, setup, sent, model):
                result = inspected(model, replace(sent, received=state), agreed, base)
                tallies.setdefault(f"round {sent.round_ + 1}: {name}", Tally()).add(result)
                values = {a.rule: round(a.value, 3) for a in result.answers if not a.why}
                subject = (setup.model, setup.rank, setup.rate, sent.round_, name)
                print(*subject, result.verdict, values, flush=True)
            put(trained(model), sent.received)
    for name, state in membership_layers(base):
        reference = Agreed(shapes={})
        tallies.setdefault(f"{name}, never agreed", Tally()).add(inspect_received(state, reference))
        reference = Agreed(shapes={n: t.shape for n, t in state.items()})
        tallies.setdefault(f"{name}, agreed", Tally()).add(inspect_received(state, reference))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["tiny="], metavar="NAME=DIR")
    parser.add_argument("--honest", type=int, default=24, metavar="N", help="set-ups of each model")
    parser.add_argument("--traps", action="store_true", help="measure crafted states too")
    parser.add_argument("--seed", type=int, default=1, help="of the honest set-ups")
    parser.add_argument("--smallest", action="store_true")
    arguments = parser.parse_args()
    assets = Path(os.environ["FEDLEAK_ASSETS"])
    torch.set_num_threads(1)
    tallies: dict[str, Tally] = {}
    for one in arguments.model:
        name, _, source = one.partition("=")
        base = load(name, source or None, assets)
        rank = base.model.config.hidden_size // 2
        traps = [
            Setup(name, "bottleneck", rank, seed=50),
            Setup(name, "bottleneck", 64, 1e-3, seed=51),
        ]
        if arguments.smallest:
            measure_honest(base, [Setup(name, "lora", rounds=1)], tallies)
            measure_traps(base, traps[1:], tallies)
            continue
        measure_honest(base, drawn(name, arguments.honest, arguments.seed), tallies)
        if arguments.traps:
            measure_traps(base, traps, tallies)
    print()
    print("| states | n | crafted | diverged | rules |\n|---|---|---|---|---|")
    for name, tally in tallies.items():
        rules = ", ".join(f"{rule} {count}" for rule, count in tally.rules.most_common())
        print(f"| {name} | {tally.states} | {tally.crafted} | {tally.diverged} | {rules} |")


if __name__ == "__main__":
    main()
