"""What the trained weights give away during a fine-tuning: every attack, at shares of an epoch.

    python -m benchmarks.attacks.memorization --model DIR --text FILE --seeds 0,1
    python -m benchmarks.attacks.memorization --model DIR --text FILE --lora 16 --lr 1e-3
    python -m benchmarks.attacks.memorization --model DIR --text FILE --whole --length 128 \\
        --texts 1280 --share 0.2 --batch 16 --lr 1e-4 --looks 1,3     # EZ-MIA's protocol, smaller
    python -m benchmarks.attacks.memorization --model DIR --text FILE --lora 16 --lr 1e-3 \\
        --texts 1200 --share 0.167 --epochs 2 --looks 1,2 --reference 200,50 --seeds 0,1,2,3,4

Texts without a common run of 13 tokens are split by a coin into members, which are trained on, and
others. Prints AUC (97.5%, the share of a first look) and, from 1,000 others on, the TPR at .1% and
1% FPR, for each look. ``error_zone_published`` is EZ-MIA's ratio as it was published, for
comparison. With ``--reference 200,50`` the same recipe trains a model on so many further texts, and
another on fewer of them, beside each of which ``combined_reference`` scores. With
``--auto 1,0.25`` a Trainer of transformers trains references of so many of the members instead, by
``Memorization(reference="auto")``. For each it also trains alone, and with looks at as many texts
but no reference. A reference's price is the processor time of the run with it less that of the one
without, over the training alone and over the watched run without:

    python -m benchmarks.attacks.memorization --model DIR --text FILE --lora 16 --lr 1e-3 --whole \\
        --length 32 --texts 480 --epochs 2 --auto 1,0.25,0.0625

With ``--targets 5`` so many models are trained, each on another random share of the texts. Each is
a target with the next 2, 4 and so on as its references, beside LiRA (arXiv 2112.03570) and RMIA
(arXiv 2312.03262) with the same ones, WBC (arXiv 2601.02751) and EZ-MIA. Prints means over targets:

    python -m benchmarks.attacks.memorization --model DIR --text agnews --whole --length 48 \\
        --texts 1200 --share 0.333 --lr 1e-3 --epochs 2 --looks 2 --targets 5
"""

import argparse
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from scipy.stats import mannwhitneyu
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import AutoTokenizer, DataCollatorForSeq2Seq, PreTrainedTokenizerBase, Trainer

from benchmarks import shared
from lightning_fedleak import LeakageCallback, Memorization, WatchSettings, leave_out
from lightning_fedleak.attacks.memorization import Combined, CombinedReference, MemorizationAttack
from lightning_fedleak.engine.channels.released.audit import Audit, all_attacks
from lightning_fedleak.engine.channels.released.memorization import MemorizationChannel
from lightning_fedleak.engine.channels.released.pool import MIN_POOL, Pool
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import References, ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps.tokens import Text, token_log_probs
from lightning_fedleak.report.records import STRENGTH, WEAK

SMOKE = (
    "--model {model} --text {text} --texts 60 --length 16 --epochs 1 --looks 1 --lora 4",
    "--model {model} --text {text} --texts 40 --length 16 --epochs 1 --looks 1 --reference 12",
    "--model {model} --text {text} --texts 60 --length 16 --epochs 1 --auto 0.25",
    "--model {model} --text {text} --texts 60 --length 16 --epochs 1 --looks 1 --targets 3",
)

ENDS = "", "_low", "_high"
FPRS = 0.001, 0.01  # of the TPRs that are printed
OTHERS = 1000  # below which they are unknown: none is above the bar, or fewer than ten


class PublishedErrorZone(MemorizationAttack):
    """Score a text by EZ-MIA's ratio P / N, by the published rule (arXiv 2601.12104).

    It is 0 where N is 0, or fewer than two tokens are predicted wrongly.
    """

    default_name = "error_zone_published"

    def score(self, released: ReleasedModel) -> torch.Tensor:
        """Return ``P / N``."""
        wrong = released.now.labels & ~released.now.greedy
        gains = (released.now.log_probs.double() - released.base.log_probs.double()) * wrong
        up, down = gains.clamp_min(0).sum(1), (-gains).clamp_min(0).sum(1)
        return torch.where((down > 0) & (wrong.sum(1) > 1), up / down, 0.0)


def trained_pool(
    options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, seed: int
) -> tuple[Pool, list[Text]]:
    """Return a pool of texts, split by a coin, and the texts of the reference."""
    chosen = shared.shuffled_texts(options.text)[: 3 * options.texts]
    encoded = tokenizer(chosen, truncation=True, max_length=options.length, verbose=False)
    ids = [torch.tensor(row, dtype=torch.long) for row in encoded["input_ids"] if row]
    rows = [Text(row, row) for row in ids]
    whole = [row for row in rows if len(row.ids) == options.length] if options.whole else rows
    coins = np.random.default_rng([seed, 7]).random(len(whole)) < options.share
    sides: dict[bool, list[Text]] = {True: [], False: []}
    for text, coin in zip(whole[: options.texts], coins.tolist(), strict=False):
        sides[coin].append(text)
    return Pool.of_sides(sides[True], sides[False]), whole[
        options.texts : options.texts + max(options.reference, default=0)
    ]


def describe(
    audit: Audit, now: TokenSnapshot, references: Mapping[int, TokenSnapshot]
) -> dict[str, str]:
    """Return one cell for each attack, and for ``combined_reference`` beside each reference."""
    compared, cells = audit.part("long", now), {}
    compared_by = dict.fromkeys((*all_attacks(), PublishedErrorZone()), compared)
    for count, answer in references.items():
        beside = replace(audit, references=References.unseen(answer), reference_rows=count)
        compared_by[CombinedReference(f"combined_reference_{count}")] = beside.part("long", now)
    for attack, compared in compared_by.items():
        name = attack.name
        values, scores = compared.measure(attack)
        if scores is not None:
            ends = (values[f"auc{end}"] for end in ENDS)
            cells[name] = shared.with_range(*ends) + true_positives(scores, compared.sides)
            if (strength := compared.strength) is not None:
                cells[name] += f" (weight {strength.weight:.2f}, gain {strength.share:.2f})"
        else:
            cells[name] = f"{values['extracted']:+.3f} (greedy {values['greedy']:+.3f})"
    return cells


def true_positives(scores: torch.Tensor, members: torch.Tensor) -> str:
    """Return the TPRs, to append to the AUC; nothing if they are unknown."""
    known = int((~members).sum()) >= OTHERS
    return "".join(f" / {rate:.3f}" for rate in point_rates(scores, members)[1:] if known)


def train(options: argparse.Namespace, seed: int) -> None:
    """Fine-tune once with looks, and print a table."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    pool, further = trained_pool(options, tokenizer, seed)
    members = [t for t, inside in zip(pool.texts, pool.trains.tolist(), strict=True) if inside]
    seconds = {"training": 0.0, "looks": 0.0}

    def ask(anatomy: Anatomy) -> TokenSnapshot:
        start = time.process_time()
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            answers = token_log_probs(anatomy, pool.texts)
        seconds["looks"] += time.process_time() - start
        return answers

    references = {}
    for count in options.reference:
        *_, (_, anatomy) = fine_tune(options, further[:count], seed + 1000, seconds)
        references[count] = ask(anatomy)
    base: TokenSnapshot | None = None
    results, losses = {}, []
    for share, anatomy in fine_tune(options, members, seed, seconds):
        answers = ask(anatomy)
        base = answers if base is None else base
        audit = Audit(pool, base, lambda ids: str(tokenizer.decode(ids)))
        results[share] = describe(audit, answers, references)
        loss = -answers.mean_log_probs()
        sides = (float(loss[side].mean()) for side in (pool.trains, ~pool.trains))
        losses.append(" / ".join(f"{side:.3f}" for side in sides))
    n, others = int(pool.trains[pool.alone].sum()), int((~pool.trains).sum())
    facts = f"seed {seed}: {n} members, {others} others; training {seconds['training']:.0f} s, "
    shared.print_head(options, f"lr {options.lr:g}", f"{facts}looks {seconds['looks']:.0f} s CPU")
    rows = [[name, *(column[name] for column in results.values())] for name in results[0.0]]
    rows.append(["mean loss, members / others", *losses])
    head = "AUC (97.5%) / TPR at .1% / at 1% FPR", *(f"{share:g}" for share in results)
    print(shared.table(head, rows), flush=True)


def published_windows(now: TokenSnapshot, base: TokenSnapshot) -> torch.Tensor:
    """Return WBC: the share of windows that gained, as a mean over ten sizes."""
    gains = (now.log_probs - base.log_probs).double()
    sums = torch.nn.functional.pad(gains.cumsum(1), (1, 0))
    sizes = [min(size, gains.shape[1]) for size in (2, 3, 4, 6, 9, 13, 18, 25, 32, 40)]
    shares = [(sums[:, s:] > sums[:, :-s]).double().mean(1) for s in sizes]
    return torch.stack(shares).mean(0)


def lira(own: torch.Tensor, others: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Return LiRA online with global variances, of losses; without a side its global mean."""
    logs = []
    for side in (inside, ~inside):
        has = side.any(0)
        mean = (others * side).sum(0) / side.sum(0).clamp_min(1)
        error = ((others - mean)[side] ** 2).sum() / max(1, int(side.sum() - has.sum()))
        mean = torch.where(has, mean, others[side].mean())
        logs.append(-((own - mean) ** 2) / error / 2 - error.log() / 2)
    return logs[0] - logs[1]


def rmia(own: torch.Tensor, others: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
    """Return RMIA's ratio, by which the texts rank as against a population with gamma 1.

    The likelihood without a model is the mean of models with and without the text; with those of
    one side alone, it is theirs.
    """
    sides = [(others.exp() * s).sum(0) / s.sum(0) for s in (inside, ~inside)]
    return own.exp() / torch.stack(sides).nanmean(0)


def compare_targets(options: argparse.Namespace, seed: int) -> None:
    """Train models on random shares of the texts, and print every score of each beside others."""
    tokenizer, share = AutoTokenizer.from_pretrained(options.model), options.share
    options.reference, options.share = [], 1.0  # all texts are candidates
    texts = trained_pool(options, tokenizer, seed)[0].texts
    options.share = share
    draws = np.random.default_rng([seed, 7]).random((options.targets, len(texts))) < share
    inside, answers, seconds = torch.from_numpy(draws), [], {"training": 0.0, "looks": 0.0}
    for number, drawn in enumerate(draws):
        members = [text for text, is_member in zip(texts, drawn, strict=True) if is_member]
        looks = [token_log_probs(a, texts) for _, a in fine_tune(options, members, number, seconds)]
        base, now = looks[0], looks[-1]
        answers.append(now)
    cells: dict[str, list[tuple[float, ...]]] = {}
    counts = [n for n in (1, 2, 4, 7) if n < len(answers)]
    for target, now in enumerate(answers):
        released = ReleasedModel(now, base, torch.ones(len(texts)))
        scores = {"`combined`": Combined().score(released), "WBC": published_windows(now, base)}
        scores["EZ-MIA"] = PublishedErrorZone().score(released)
        for count in counts:
            chosen = [(target + 1 + n) % len(answers) for n in range(count)]
            references = References([answers[n] for n in chosen], inside[chosen])
            losses = torch.stack([answers[n].mean_log_probs() for n in chosen])
            formulas = now.mean_log_probs(), losses, inside[chosen]
            score = CombinedReference().score(replace(released, references=references))
            scores |= {f"{count}: `combined_reference`": score, f"{count}: RMIA": rmia(*formulas)}
            scores |= {f"{count}: LiRA": lira(*formulas)} if count > 1 else {}
        for name, score in scores.items():
            cells.setdefault(name, []).append(point_rates(score, inside[target]))
    facts = f"{len(answers)} targets, {len(texts)} texts, {seconds['training']:.0f} s CPU"
    shared.print_head(options, f"lr {options.lr:g}", f"seed {seed}: {facts}")
    means = {name: np.mean(rates, 0) for name, rates in cells.items()}
    rows = [[name, *(f"{rate:.3f}" for rate in mean)] for name, mean in means.items()]
    print(shared.table(("score", "AUC", "TPR at .1%", "at 1%"), rows), flush=True)


def point_rates(scores: torch.Tensor, members: torch.Tensor) -> tuple[float, ...]:
    """Return the AUC and the TPRs at two FPRs, as points."""
    inside, outside = scores[members], scores[~members].sort(descending=True).values
    auc = mannwhitneyu(inside, outside).statistic / len(inside) / len(outside)
    thresholds = [outside[int(fpr * len(outside))] for fpr in FPRS]
    return auc, *(float((inside > threshold).double().mean()) for threshold in thresholds)


def fine_tune(
    options: argparse.Namespace, members: Sequence[Text], seed: int, seconds: dict[str, float]
) -> Iterator[tuple[float, Anatomy]]:
    """Train on texts, and yield the share of an epoch and the model before, and at each look."""
    model = shared.tuned_model(options, seed)
    anatomy = find_anatomy(model)
    steps_of_epoch = math.ceil(len(members) / options.batch)
    looks = {round(share * steps_of_epoch): share for share in options.looks}
    yield 0.0, anatomy
    optimizer = torch.optim.AdamW(shared.trained(model), options.lr)
    order_rng, order, step = np.random.default_rng([seed, 11]), [], 0
    model.train()
    while step < max(looks):
        start = time.process_time()
        if not order:
            order = [*order_rng.permutation(len(members))]
        rows, order = order[: options.batch], order[options.batch :]
        chosen = [members[i].ids for i in rows]
        ids = pad_sequence(chosen, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in chosen], batch_first=True)
        labels = ids.masked_fill(mask == 0, -100)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        seconds["training"] += time.process_time() - start
        if step in looks:
            yield looks[step], anatomy


def train_auto(options: argparse.Namespace, seed: int) -> None:
    """Fine-tune for each share of the members, by a Trainer that trains its own reference."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    pool, _ = trained_pool(options, tokenizer, seed)
    rows = [{"input_ids": text.ids, "labels": text.ids} for text in pool.texts]
    data = leave_out(rows, round(len(rows) * (1 - options.share)), seed=seed)[0]
    watched = Memorization(max_overhead=1e3, looks=())
    _, alone, _ = run_trainer(options, tokenizer, data, seed, None)
    names = "members / others", "`combined`", "beside it", "weak", "strength", "of training"
    print(shared.table(["rows", *names, "of the watched run", "seconds"], []))
    for share in options.auto:
        count = max(1, round(share * len(data)))
        settings = replace(watched, reference="auto", reference_rows=count)
        latest, seconds, channel = run_trainer(options, tokenizer, data, seed, settings)
        members, asked = int(channel.pool.trains.sum()), len(channel.pool.texts)
        settings = replace(watched, most_texts=max(asked, MIN_POOL))
        _, without, _ = run_trainer(options, tokenizer, data, seed, settings)
        cells = [str(count), f"{members} / {asked - members}"]
        for name in ("combined", "combined_reference"):
            ends = (latest.get(f"leakage/{name}/auc{end}", math.nan) for end in ENDS)
            cells.append(shared.with_range(*ends))
        facts = [latest[f"leakage/combined_reference/{name}"] for name in (WEAK, STRENGTH)]
        price = seconds - without
        cells += [f"{fact:.2f}" for fact in (*facts, price / alone, price / without)]
        cells.append(f"{seconds:.0f}, {without:.0f}, {alone:.0f}")
        shared.print_row(*cells)


def run_trainer(
    options: argparse.Namespace,
    tokenizer: PreTrainedTokenizerBase,
    data: Dataset[Any],
    seed: int,
    memorization: Memorization | None,
) -> tuple[Mapping[str, float], float, Any]:
    """Return what a watched run logged last, the processor's seconds, and its channel.

    Args:
        options: of the script.
        tokenizer: of the model.
        data: rows to train on, of ``leave_out``.
        seed: of the adapters and of the order.
        memorization: how the weights are asked; None: the run is not watched.
    """
    model = shared.tuned_model(options, seed)
    with TemporaryDirectory() as folder:
        arguments = shared.trainer_arguments(
            folder, per_device_train_batch_size=options.batch, lr_scheduler_type="constant",
            num_train_epochs=options.epochs, learning_rate=options.lr,
        )  # fmt: skip
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        collate = DataCollatorForSeq2Seq(tokenizer)
        trainer = Trainer(model, arguments, collate, train_dataset=data)
        latest, channel = dict[str, float](), None
        if memorization is not None:
            attacks = [Combined()] + [CombinedReference()] * memorization.trains_reference
            watched = WatchSettings(memorization=memorization, tokenizer=tokenizer)
            callback = LeakageCallback(
                trainer, attacks, folder=folder, settings=watched, max_overhead=0.5
            )
            trainer.add_callback(callback)
            [channel] = [c for c in callback.engine.channels if type(c) is MemorizationChannel]
        start = time.process_time()
        trainer.train()
        seconds = time.process_time() - start
        if memorization is not None:
            latest = dict(callback.latest)
    return latest, seconds, channel


def main() -> None:
    """Read the options, train once for each seed, and print."""
    parser = shared.parser_of(
        __doc__, "model", "text", texts=(420, "members and others together"),
        share=(0.5, "of them that are trained on"), length=(64, "tokens of a text"),
        whole=(False, "texts of exactly that many tokens"),
        lora=(0, "rank, on all linear maps; 0: whole"), lr=2e-4, batch=8,
        epochs=(3.0, "the last look"), looks=("0.25,0.5,1,2,3", "epochs, separated by commas"),
        reference=("", "texts of references, separated by commas"),
        targets=(0, "models on random shares of the texts"),
        auto=("", "rows of references that the run trains, as shares of the members"),
        seeds="0", autocast=(False, "bf16"),
    )  # fmt: skip
    options = parser.parse_args()
    options.looks, options.auto, options.reference = (
        [kind(part) for part in text.split(",") if part]
        for kind, text in ((float, options.looks), (float, options.auto), (int, options.reference))
    )
    options.looks = [share for share in options.looks if share <= options.epochs]
    shared.print_place()
    for seed in map(int, options.seeds.split(",")):
        measure = train_auto if options.auto else train
        (compare_targets if options.targets else measure)(options, seed)


if __name__ == "__main__":
    main()
