"""When does federation alone protect? Every optimizer, number of local steps, rank, and sum.

A cell is a federation of clients that train a causal model for a round of local steps. Attacked are
the update of one client and the mean of all: by the attacks that are chosen for updates of a causal
model with a tied head, and by :class:`~lightning_fedleak.attacks.SubspaceTexts` within
``--budget`` seconds of wall time. A round of ``--before`` steps comes before and is excluded: a
LoRA's B is zero in its first step, and how much an update says depends on how far it is trained::

    OMP_NUM_THREADS=1 python -m benchmarks.federation.federation_table --model DIR --text FILE \
        --log FILE
    python -m benchmarks.federation.federation_table --log FILE --show
    python -m benchmarks.federation.federation_table --model DIR --text FILE --log FILE \
        --clients 1 --optimizers adamw --steps 1 --ranks 8 32 --before 5 30 100 300

Words: F1. Texts: share of tokens in their places, and of texts that are exact, of up to four texts
a look. Membership: AUC. Each is the median over rounds, with the lowest and highest. Of several
attacks the highest counts. A value is *unknown* where it is in every round. Attacks on texts of the
mean, and all attacks under DP, run in the first round that counts alone. A star: the loss is not
finite, or has doubled.

``--epsilon`` attacks the same updates under client-level DP too, as
:class:`~lightning_fedleak.federation.ClientDP` makes and accounts it for ``--of`` clients and
``--planned`` rounds:

- the update of one client with noise of its own (trust ``local``: against the server too). Under
  secure aggregation with shares of noise the sum has as much noise as this update;
- the mean of ``--clients`` with the noise of a trusted server (``central``, clients drawn by
  Poisson sampling: against whoever sees the models and does not know who took part).

The clip norm is the median of the clients' norms in the first round that counts. The model goes on
without noise.

The optimal AUC is of an adversary who knows a client's clipped update, and asks whether it is in a
round: that of a Gaussian mechanism whose noise multiplier is sigma, Phi(1 / (sigma sqrt 2)).
*Blind* is the F1 of naming the types that are most frequent in public text, as many as there are.

Cells that the log holds are not run again; ``--optimizers``, ``--steps``, ``--ranks`` and
``--clients`` choose. A rank of 0 is the whole model.
"""

import argparse
import copy
import datetime
import itertools
import math
import platform
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared import add_line, parser_of, read_lines, table, trained, with_lora
from lightning_fedleak import attacks as known
from lightning_fedleak import federation
from lightning_fedleak.attacks import Attack, PublicText
from lightning_fedleak.callbacks import Games
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES, model_source
from lightning_fedleak.cli.finetuning.module import load_tokenizer
from lightning_fedleak.cli.finetuning.texts import read_texts

SGD, MOMENTUM = torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9)
OPTIMIZERS = {"sgd": SGD, "momentum": MOMENTUM, "adamw": torch.optim.AdamW}
LORA_RATES = {"sgd": 0.03, "momentum": 0.003, "adamw": 3e-4}
WHOLE_RATES = {"sgd": 1e-3, "momentum": 1e-4, "adamw": 3e-5}


def batches(
    rows: list[list[int]], size: int, length: int, pad: int, generator: torch.Generator
) -> Iterator[dict[str, Tensor]]:
    """Batches of texts in a random order, again and again."""
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(order) - size + 1, size):
            chosen = [rows[i][:length] for i in order[start : start + size]]
            wide = max(map(len, chosen))
            ids = torch.tensor([r + [pad] * (wide - len(r)) for r in chosen])
            mask = torch.tensor([[1] * len(r) + [0] * (wide - len(r)) for r in chosen])
            labels = ids.masked_fill(mask == 0, -100)
            yield {"input_ids": ids, "attention_mask": mask, "labels": labels}


def model_of(name: str | None, rank: int) -> nn.Module:
    """A causal model with a LoRA of that rank on all linear layers; of rank 0 the whole one."""
    from transformers import AutoModelForCausalLM

    source, options = model_source(name)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(source, **options).float()
    if rank:
        torch.manual_seed(0)
        model = with_lora(model, rank)
    return model.train()


def rate_of(optimizer: str, rank: int) -> float:
    """The learning rate, at which stories15M does not diverge."""
    rate = (LORA_RATES if rank else WHOLE_RATES)[optimizer]
    return rate / 3 if optimizer == "sgd" and rank > 8 else rate


def optimizer_of(name: str, rank: int) -> Any:
    """The optimizer of a LoRA of that rank; of rank 0 of the whole model."""
    return partial(OPTIMIZERS[name], lr=rate_of(name, rank))


def train(model: nn.Module, data: list[dict[str, Tensor]], optimizer: Any) -> float:
    """A round, by an optimizer that begins afresh; the loss of its last step."""
    stepping = optimizer(trained(model))
    loss = torch.tensor(math.nan)
    for batch in data:
        stepping.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        stepping.step()
    return float(loss.detach())


SMOKE = (
    "--log {out}/table.jsonl --optimizers sgd --steps 1 --ranks 4 --clients 2 --rounds 1 --rows 2 "
    "--length 12 --texts 24 --targets 2 --budget 1 --epsilon 8 --of 20 --planned 4",
)
ONE, MEAN = "one client", "sum"
OWN, SERVER = "one client, local DP", "sum, central DP"
ROWS = (ONE, MEAN, OWN, SERVER)
FAMILIES = {"f1": "words", "token_accuracy": "texts", "exact_sentences": "exact texts"}

Update = Mapping[str, Tensor]


class Private:
    """Client-level DP of a round's updates, by who adds the noise."""

    def __init__(self, args: argparse.Namespace, clip: float) -> None:
        common = {"clients": args.of, "target_epsilon": args.epsilon, "rounds": args.planned}
        common["target_delta"] = 0.1 / args.of
        self.by_row = {OWN: federation.ClientDP(clip, trust="local", **common)}
        if args.clients > 1:
            central = {"sampling": "poisson", "per_round": args.clients}
            self.by_row[SERVER] = federation.ClientDP(clip, **central, **common)

    def released(self, updates: Sequence[Update]) -> dict[str, tuple[Update, float]]:
        """The released update of each row, and the standard deviation of its noise."""
        like, own = updates[0], self.by_row[OWN]
        releases = {OWN: (own.privatized(like, like), own.own_noise_std)}
        if (server := self.by_row.get(SERVER)) is not None:
            update = server.mean(dict(enumerate(updates)), like).update
            releases[SERVER] = update, server.mean_noise_std
        return releases

    def facts(self) -> dict[str, Any]:
        """For the log."""
        one = self.by_row[OWN]
        noise = {row: round(dp.noise_multiplier, 3) for row, dp in self.by_row.items()}
        return {"clip": one.clip, "noise_multiplier": noise, "delta": one.target_delta}


def side_by_side(drawn: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """The batches of all clients, who take their steps at the same time."""
    with federation.recording() as together:
        for client, batches in enumerate(drawn):
            for batch in batches:
                federation.trained_on(batch, step=client == 0)
    return together


def mean_of(updates: Sequence[Update]) -> dict[str, Tensor]:
    return {n: torch.stack([u[n] for u in updates]).mean(0) for n in updates[0]}


def cell(
    args: argparse.Namespace, optimizer: str, steps: int, rank: int, before: int
) -> dict[str, Any]:
    """What was found by row, the losses of one client's rounds, and the settings of DP."""
    tokenizer = load_tokenizer(args.model)
    bos = [] if args.bos is None else [args.bos]
    texts = read_texts(args.text or str(EMBEDDED_MESSAGES))[: args.texts]
    rows = [bos + r for t in texts if len(r := tokenizer(t)["input_ids"]) >= 4]
    half, pad = len(rows) // 2, tokenizer.pad_token_id or 0
    seeds = [torch.Generator().manual_seed(args.seed + i) for i in range(args.clients)]
    streams = [
        batches(rows[client : half : args.clients], args.rows, args.length, pad, generator)
        for client, generator in enumerate(seeds)
    ]
    held_out = [torch.tensor(r[: args.length]) for r in rows[half:]]
    outside, public = held_out[: len(held_out) // 2], held_out[len(held_out) // 2 :]
    make = optimizer_of(optimizer, rank)
    model = model_of(args.model, rank)
    results: dict[str, Found] = {row: Found() for row in ROWS}
    losses: list[float] = []
    blind: dict[str, list[float]] = {}
    spent: list[float] = []
    private: Private | None = None
    with tempfile.TemporaryDirectory() as folder:
        shared = {"settings": federation.RoundSettings(tensorboard=False, tokenizer=tokenizer)}
        games = Games(targets=args.targets, held_out=PublicText(outside))
        played: dict[str, dict[str, Any]] = {
            "chosen": {"attacks": chosen(PublicText(public), rank), "games": games},
            "texts": {"attacks": known.SubspaceTexts(budget_seconds=args.budget)},
        }
        observers = [
            federation.RoundObserver(
                copy.deepcopy(model), make, steps, folder=f"{folder}/{name}", **shared, **own
            )
            for name, own in played.items()
        ]
        for round_ in range(args.rounds + 1):
            sent = federation.trained_state(model)
            drawn, updates = [], []
            for client, stream in enumerate(streams):
                model.load_state_dict(sent, strict=False)
                drawn.append(list(itertools.islice(stream, steps if round_ else before)))
                loss = train(model, drawn[-1], make)
                losses += [loss] if client == 0 and round_ else []
                updates.append(federation.difference(sent, federation.trained_state(model)))
            mean = mean_of(updates)
            if round_ == 1 and args.epsilon:
                private = Private(args, statistics.median(map(federation.joint_norm, updates)))
            if round_:
                observed: dict[str, tuple[Update, float]] = {ONE: (updates[0], 0.0)}
                if args.clients > 1:
                    observed[MEAN] = mean, 0.0
                if private is not None and round_ == 1:
                    observed |= private.released(updates)
                for observer in observers:
                    observer.begin(round_, sent)
                    for row, (update, noise) in observed.items():
                        of_texts = observer is observers[1]
                        if of_texts and row == MEAN and round_ > 1:
                            continue
                        of_one_client = row in (ONE, OWN)
                        trained = drawn[0] if of_one_client else side_by_side(drawn)
                        start, name = time.process_time(), federation.SUM if row == MEAN else row
                        seen = {"batches": trained, "noise_std": noise}
                        results[row].note(
                            observer.look(federation.moved(sent, update), name, **seen)
                        )
                        if of_texts:
                            spent.append(time.process_time() - start)
                        elif not noise:
                            blind.setdefault(row, []).append(blindly(trained, public))
            model.load_state_dict(federation.moved(sent, mean), strict=False)
        for observer in observers:
            observer.end()
    return {
        "found": {row: f.facts() for row, f in results.items() if f.rounds},
        "blind": {row: [round(v, 3) for v in values] for row, values in blind.items()},
        "texts_processor": [round(x, 1) for x in spent],
        "losses": [round(x, 3) if math.isfinite(x) else None for x in losses],
        "dp": None if private is None else private.facts(),
    }


def chosen(public: PublicText, rank: int) -> list[Attack]:
    """On words and membership. Only a whole model shares its head."""
    head: list[Attack] = [] if rank else [known.AlignedFlatChat(public)]
    words = known.SubspaceWords(public, capacity_seconds=0)
    return [*head, words, known.GradientMembership(public)]


def blindly(data: Sequence[Mapping[str, Tensor]], public: Sequence[Tensor]) -> float:
    """F1 of naming the most frequent types of public text, as many as the batches have."""
    present = {int(i) for batch in data for i in batch["input_ids"][batch["attention_mask"] > 0]}
    common = Counter(torch.cat(list(public)).tolist()).most_common(len(present))
    return sum(token in present for token, _ in common) / len(present)


class Found:
    """What is read off one row's updates in each round."""

    def __init__(self) -> None:
        self.rounds: dict[str, list[float | None]] = {}
        self.unknown: dict[str, str] = {}

    def note(self, look: federation.RoundLook) -> None:
        """Keeps the highest of each family in a round, and why attacks said nothing."""
        highest: dict[str, float] = {}
        for name, value in look.now.items():
            root, _, metric = name.rpartition("/")
            is_game = f"{root}/auc" in look.now
            family = ("membership" if metric == "auc" else "") if is_game else FAMILIES.get(metric)
            if not family or "/worst" in name:
                continue
            highest.setdefault(family, math.nan)
            if not math.isnan(value):
                highest[family] = max(value, -math.inf, highest[family])
        for family, value in highest.items():
            self.rounds.setdefault(family, []).append(None if math.isnan(value) else value)
        self.unknown |= {name.rpartition("/")[-1]: why for name, why in look.unknown.items()}

    def facts(self) -> dict[str, Any]:
        """For the log: NaN is None."""
        return self.rounds | {"unknown": self.unknown}


# ---- what is shown ------------------------------------------------------------------------------


def tables_of(lines: Sequence[dict]) -> str:
    """Of each model and family a table: a line for optimizers and steps, columns for the rest."""
    output = []
    models = dict.fromkeys((line["model"], line["epsilon"]) for line in lines)
    for model, epsilon in models:
        selected = [line for line in lines if (line["model"], line["epsilon"]) == (model, epsilon)]
        groups = [(ROWS[:2], "")]
        if epsilon:
            groups.append((ROWS[2:], f", client-level DP at epsilon {epsilon:g}"))
        for rows, suffix in groups:
            for family in (*FAMILIES.values(), "membership"):
                output += [f"\n{model}: {family}{suffix}", "", _table(selected, family, rows)]
        output += ["", *_facts(selected)]
    return "\n".join(output)


def _table(lines: Sequence[dict], family: str, rows: Sequence[str]) -> str:
    ranks = sorted({line["rank"] for line in lines}, key=lambda r: (r == 0, r))
    there = {(line["rank"], row) for line in lines for row in line["found"]}
    columns = [column for column in itertools.product(ranks, rows) if column in there]
    names = [f"{'whole' if rank == 0 else f'LoRA {rank}'}, {row}" for rank, row in columns]
    output = []
    for optimizer in OPTIMIZERS:
        of_optimizer = [x for x in lines if x["optimizer"] == optimizer]
        for steps, before in sorted({(x["steps"], x["before"]) for x in of_optimizer}):
            cells = []
            for rank, row in columns:
                key = {"optimizer": optimizer, "steps": steps, "rank": rank, "before": before}
                matches = [x for x in lines if key.items() <= x.items() and row in x["found"]]
                # One client is in a federation of one, and in those with a sum: the latter counts.
                matches.sort(key=lambda x: x["clients"])
                cells.append(_cell(matches[-1], family, row) if matches else "not run")
            later = f", after {before}" if before > 1 else ""
            output.append([f"{optimizer}, {steps}{later}", *cells])
    return table(["optimizer, local steps", *names], output)


def _cell(line: dict, family: str, row: str) -> str:
    results, star = line["found"][row], "" if _trained(line["losses"]) else " *"
    if family == "words" and line.get("without_words"):
        return "not run"
    values = [v for v in results.get(family, []) if v is not None]
    if not values:
        return "unknown" + star
    count = len(results[family])
    few = "" if len(values) == count else f", {len(values)} of {count}"
    spread = f" ({min(values):.2f} to {max(values):.2f}{few})" if count > 1 else ""
    return f"{statistics.median(values):.2f}{spread}{star}"


def _trained(losses: Sequence[float | None]) -> bool:
    finite = [x for x in losses if x is not None]
    return len(finite) == len(losses) and finite[-1] < 2 * finite[0]


def _facts(lines: Sequence[dict]) -> list[str]:
    """Settings that a table's caption tells, each once."""
    names = ("clients", "rounds", "shape", "targets", "budget", "seed", "date", "machine")
    values = {name: dict.fromkeys(str(line[name]) for line in lines) for name in names}
    output = [f"{name}: {', '.join(values[name])}" for name in names]
    rates: dict[str, set[float]] = {}
    for x in lines:
        setting = "LoRA" if x["rank"] else "whole"
        rates.setdefault(f"{x['optimizer']}, {setting}", set()).add(x["rate"])
    for setting, of_setting in sorted(rates.items()):
        text = ", ".join(f"{rate:g}" for rate in sorted(of_setting))
        output.append(f"learning rate, {setting}: {text}")
    for row in ROWS[2:]:
        values_by_cell = [x["found"][row].get("membership", []) for x in lines if row in x["found"]]
        medians = [statistics.median(v) for v in values_by_cell if v and None not in v]
        if medians:
            mean, deviation = statistics.mean(medians), statistics.pstdev(medians)
            text = f"mean of {len(medians)} cells {mean:.2f}, standard deviation {deviation:.2f}"
            output.append(f"membership, {row}: {text}")
    for row in ROWS[:2]:
        blind = [v for x in lines for v in x["blind"].get(row, [])]
        if blind:
            output.append(f"blind, {row}: {min(blind):.2f} to {max(blind):.2f}")
    spent = [v for x in lines for v in x["texts_processor"]]
    output.append(f"processor of a look for texts: {min(spent):.1f} to {max(spent):.1f} s")
    noise = {row: v for x in lines if x["dp"] for row, v in x["dp"]["noise_multiplier"].items()}
    for row, sigma in noise.items():
        best = statistics.NormalDist().cdf(1 / (sigma * 2**0.5))
        text = f"noise multiplier {sigma}; the best test of a client, one round: {best:.2f}"
        output.append(f"{row}: {text}")
    output.append(f"processor: {sum(line['seconds'] for line in lines) / 60:.0f} min")
    return output


def main() -> None:
    """Runs what the log lacks, and prints the tables."""
    args = parser_of(
        __doc__, "log", model=(str, "folder of a causal model; default the embedded one"),
        text=(str, "default the embedded messages"), bos=(int, "token id before every text"),
        show=(False, "run nothing"), optimizers=([*OPTIMIZERS], OPTIMIZERS), steps=[1, 10, 100],
        ranks=[8, 32, 0], clients=(10, "of the sum; 1: no sum"), rows=(4, "texts in a batch"),
        length=(32, "tokens of a text, at most"), rounds=(3, "besides the first"),
        before=([1], "steps of the round that is excluded"), texts=2000, targets=16, seed=0,
        budget=(20.0, "seconds of a look for texts"), epsilon=(0.0, "of client-level DP; 0: none"),
        of=(1000, "clients of the federation under DP"), planned=(100, "rounds of epsilon"),
    ).parse_args()  # fmt: skip
    args.log = Path(args.log)
    warnings.filterwarnings("ignore")
    # Lines of before --before was there are of one step.
    lines = [{"before": 1} | line for line in read_lines(args.log)]
    named = {"model": Path(args.model or "embedded").name, "clients": args.clients}
    named["epsilon"] = args.epsilon
    grid = itertools.product(args.optimizers, sorted(args.steps), args.ranks, args.before)
    for optimizer, steps, rank, before in () if args.show else grid:
        key = {"optimizer": optimizer, "steps": steps, "rank": rank, "before": before} | named
        if any(key.items() <= line.items() for line in lines):
            continue
        start = time.process_time()
        line = key | cell(args, optimizer, steps, rank, before)
        line |= {"seconds": round(time.process_time() - start, 1), "rate": rate_of(optimizer, rank)}
        told = ("rounds", "targets", "of", "planned", "budget", "seed")
        line |= {name: vars(args)[name] for name in told}
        line |= {"shape": f"{args.rows} x {args.length}", "machine": platform.machine()}
        lines.append(line | {"date": str(datetime.date.today())})
        add_line(args.log, lines[-1])
    print(tables_of(lines))


if __name__ == "__main__":
    main()
