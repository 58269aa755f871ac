"""Vu, Nguyen, Jeter, Thai 2024: Tables 2 and 3, Fig. 5.

Both protocols: the game of their Fig. 2, and that of their published code (``authors``: a planted
sentence, no bit). Without a defence, accuracy and F1 use the adversary's decision. Under local DP
they use a threshold fitted on separate games, since our decision rules expect exact copies; in the
authors' protocol, the authors' rule (the mean of all scores).
"""

import functools
import math
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.attacks import membership_games
from benchmarks.attacks.membership_games import (
    RANDOMISED_LADDER,
    halves,
    joined,
    played_on_replaced,
    prepared,
)
from benchmarks.papers import tables
from benchmarks.papers.baselines import PublishedAttention, TrainedMembership
from benchmarks.papers.cells import Cell, Row, chosen
from benchmarks.papers.reference import ReferenceLDP
from benchmarks.papers.synthetic import LAWS, LENGTHS, beta_of, simulate_bound
from benchmarks.papers.tables import Grid, Results, Shown, Table, finding, mean_of, number, rate_of
from lightning_fedleak.attacks.membership.attention import AttentionMembership
from lightning_fedleak.attacks.membership.base import MembershipAttack
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.cli.studies.models import find_model
from lightning_fedleak.defenses import BatchForm, TokenLDP
from lightning_fedleak.evaluation.games import GameConfig, GameResult, SentencePool, play
from lightning_fedleak.evaluation.games.pool import Challenge, pad
from lightning_fedleak.model.anatomy import Anatomy

PROTOCOLS = {"game": "Fig. 2", "authors": "authors' code", "reference": "reference implementation"}
METRICS = ("accuracy", "f1", "auc")
AUTHORS_POSITION = 10  # index of the target token in the authors' code


@dataclass(frozen=True)
class Size:
    """How much is run; the paper's numbers are in its Table 1.

    Attributes:
        texts: data sets.
        layers: early, mid, late.
        batch, tokens: the paper's 40 and 32.
        pool, public_texts: private sentences of each text, and the server's.
        games: without a defence, of each text; of the attack as published and of the trained
            baseline there are fewer, since they cost more.
        mechanisms, epsilons: of Table 3.
        blocks, targets: batches of each text under a mechanism, and games on each.
        dims, runs: of Fig. 5.
    """

    texts: tuple[str, ...] = ("banking77", "emotion", "imdb", "yelp")
    layers: tuple[int, ...] = (1, 3, 6)
    batch: int = 40
    tokens: int = 32
    pool: int = 400
    public_texts: int = 400
    games: int = 40
    published_games: int = 10
    trained_games: int = 2
    authors_games: int = 10
    mechanisms: tuple[str, ...] = ("grr", "rappor", "the", "dbitflip")
    epsilons: tuple[float, ...] = (10.0, 7.5, 5.0)
    blocks: int = 6
    targets: int = 4
    ldp_authors_games: int = 10
    trained_blocks: int = 3
    dims: tuple[int, ...] = (1_000, 11_000, 41_000, 141_000)
    runs: int = 200
    seed: int = 0


SIZES = tables.sizes_of(Size, "membership")


# What is measured.


@dataclass(frozen=True)
class Played:
    """A model with its text, as games need them.

    Attributes:
        tokenizer: of the model.
        anatomy: of the model.
        pool: the client's sentences.
        public: the server's.
        planted: ids of the authors' sentence.
    """

    tokenizer: Any
    anatomy: Anatomy
    pool: SentencePool
    public: PublicText
    planted: torch.Tensor


@functools.lru_cache(maxsize=1)
def anatomy_of(folder: str) -> Anatomy:
    return find_model(folder)


def start_of(tokenizer: Any, anatomy: Anatomy) -> int | None:
    """``<s>`` where a causal model's tokenizer knows it and does not put it itself."""
    is_own = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    is_known = anatomy.kind == "causal" and tokenizer.bos_token == "<s>"
    return int(tokenizer.bos_token_id) if is_known and not is_own else None


@functools.lru_cache(maxsize=1)
def played(folder: str, text: str, pool: int, public_texts: int, tokens: int) -> Played:
    anatomy, tokenizer = anatomy_of(folder), AutoTokenizer.from_pretrained(folder)
    start = start_of(tokenizer, anatomy)
    front = [] if start is None else [start]
    private, public = halves(text, None, pool, public_texts)

    def ids(texts: list[str]) -> list[list[int]]:
        rows = tokenizer(texts, truncation=True, max_length=tokens - len(front))["input_ids"]
        return [front + row for row in rows]

    least = 3 if anatomy.kind == "causal" else 2
    planted = torch.tensor(ids([membership_games.PLANTED])[0])
    pool = SentencePool.from_texts(private, tokenizer, tokens, at_least=least, start_token_id=start)
    return Played(tokenizer, anatomy, pool, PublicText(ids(public)), planted)


def result_row(result: GameResult, **notes: Any) -> Row:
    """Return rates of the adversary's decisions, and of a threshold fitted on separate games."""
    own, fitted = result.summary(), result.summary(fitted=True)
    row: Row = {"attack": result.attack, "layer": result.layer, "games": len(result), **notes}
    row["collisions"] = int(result.collides.sum())
    for name in METRICS:
        row[name] = vars(own[name])
    for name in METRICS[:2]:
        row[f"fitted_{name}"] = vars(fitted[name])
    return row


def adversaries(
    group: str, layers: Sequence[int], public: PublicText, tokens: int, batch: int, **fc: Any
) -> list[MembershipAttack]:
    """Those of a group for each layer; ``fc`` are settings of A_FC."""
    attacks: list[MembershipAttack] = []
    sizes: dict[str, Any] = {"tokens": tokens, "batch": batch}
    for k in layers:
        if group == "crafted":
            attacks.append(FCMembership(k, "full", tokens=tokens, name="FC-Full", **fc))
            attacks.append(FCMembership(k, tokens=tokens, name="FC-Token", **fc))
            attacks.append(AttentionMembership(k, public, name="Attn", **sizes))
        elif group == "published":
            for gamma, name in (({}, "as published"), ({"gamma": "lemma"}, "the lemma's gamma")):
                name = f"Attn, {name}"
                attacks.append(PublishedAttention(k, public, **gamma, **sizes, name=name))
        else:
            for granularity, name in (("full", "AMI FC Full"), ("token", "AMI FC Token")):
                attacks.append(TrainedMembership(k, public, granularity, tokens=tokens, name=name))
    return attacks


def authors_challenges(
    pool: SentencePool, planted: torch.Tensor, batch: int, games: int
) -> Iterator[Challenge]:
    """The two worlds of the authors' published code, which has no random bit.

    World 1 is the first ``batch`` sentences of the text with ``planted`` in place of the first,
    world 0 the same sentences as they are. The target is always ``planted``. Their code repeats
    this on the same sentences; run r takes the r-th ``batch`` sentences here, so run 0 is theirs.
    Their model reads the padding, so that all rows are as long as ``planted``.
    """
    if len(pool) < batch * games // 2 or len(planted) < pool.tokens:
        raise ValueError(f"{games} games need {batch * games // 2} sentences, and a long target")
    (planted, *rows), _ = pad([planted[: pool.tokens], *pool.rows], pool.pad_id)
    if any(torch.equal(row, planted) for row in rows):
        raise ValueError("the planted sentence occurs in the text: plant another one")
    for run in range(games // 2):
        world = rows[run * batch : (run + 1) * batch]
        for data, bit in (((planted, *world[1:]), True), (tuple(world), False)):
            places = torch.tensor([0 if bit else -1]), torch.tensor([AUTHORS_POSITION])
            yield Challenge(data, (planted,), torch.tensor([bit]), places[1], places[0])


def by_the_mean(results: Sequence[GameResult]) -> list[GameResult]:
    """The guesses of the authors' code: above the mean score of both worlds."""
    return [replace(r, guesses=r.scores > r.scores.mean()) for r in results]


def measure_games(
    *, model: str, text: str, protocol: str, group: str, layers: Sequence[int], games: int,
    batch: int, tokens: int, pool: int, public_texts: int, seed: int, models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """Games without a defence. ``group``: which adversaries."""
    at = played(models[model], text, pool, public_texts, tokens)
    attacks = adversaries(group, layers, at.public, tokens, batch)
    config = GameConfig(games=games, batch=batch, seed=seed + _seed(text))
    if protocol == "authors":
        challenges = authors_challenges(at.pool, at.planted, batch, games)
        played_games = play(at.anatomy, attacks, at.pool, config, challenges=challenges)
        return [result_row(result) for result in by_the_mean(played_games)]
    results = play(at.anatomy, attacks, at.pool, config)
    return [result_row(result) for result in results]


def _seed(text: str) -> int:
    """No two texts share their bits."""
    return 10_000 * (sum(text.encode()) % 1000)


@functools.lru_cache(maxsize=2)
def ldp_side(
    folder: str, text: str, group: str, protocol: str, layers: tuple[int, ...], batch: int,
    tokens: int, pool: int, public_texts: int,
) -> tuple[Played, list[MembershipAttack]]:  # fmt: skip
    """Model and text, and adversaries that are prepared once for each protocol."""
    at = played(folder, text, pool, public_texts, tokens)
    wide: dict[str, Any] = {"ladder": RANDOMISED_LADDER, "tau": "auto"}
    return at, prepared(at.anatomy, adversaries(group, layers, at.public, tokens, batch, **wide))


def measure_ldp(
    *, model: str, text: str, mechanism: str, epsilon: float, protocol: str, group: str,
    layers: Sequence[int], blocks: int, batch: int, tokens: int, pool: int, public_texts: int,
    targets: int, authors_games: int, seed: int, models: Mapping[str, str],
) -> list[Row]:  # fmt: skip
    """Games under token-index LDP as the published code has it (``TokenLDP.as_published``).

    ``protocol`` ``"reference"``: those of Fig. 2, with replacements of multi-freq-ldpy's clients.
    """
    at, attacks = ldp_side(
        models[model], text, group, protocol, tuple(layers), batch, tokens, pool, public_texts
    )
    authors, rounds = protocol == "authors", []
    for block in range(1 if authors else blocks):
        job = (
            f"Job(rule='published', protocol={protocol!r}, mechanism={mechanism!r}, "
            f"epsilon={epsilon}, rounds=1, memoize=True, text={text!r}, block={block})"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            form = BatchForm(kind="causal")
            kind = ReferenceLDP if protocol == "reference" else TokenLDP
            defense = kind.as_published(mechanism, epsilon, special_ids=at.tokenizer, form=form)
        config = GameConfig(
            games=targets, batch=batch, targets_per_batch=targets,
            seed=seed + _seed(text) + 10 * block,
        )  # fmt: skip
        options: dict[str, Any] = {}
        if authors:
            options["challenges"] = authors_challenges(at.pool, at.planted, batch, authors_games)
        results = played_on_replaced(at.anatomy, attacks, at.pool, config, defense, job, **options)
        rounds.append(by_the_mean(results) if authors else results)
    return [result_row(joined(list(parts))) for parts in zip(*rounds, strict=True)]


def measure_lemma(
    *, law: str, tokens: int, dim: int, runs: int, seed: int, models: Mapping[str, str]
) -> list[Row]:
    """Lemma 2's bound on simulated data."""
    point = simulate_bound(law, dim, tokens, beta_of(law, dim), runs=runs, seed=seed)
    row: Row = {"condition_holds": vars(point.condition_holds)}
    for name in ("bound", "random_direction"):
        estimate = getattr(point, name)
        row[name] = {end: getattr(estimate, end) for end in ("value", "low", "high")}
    return [row]


# What is shown.


def games_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    """Table 2's: of each text and protocol."""
    counts = {
        ("game", "crafted"): (size.games, 0.3),
        ("game", "published"): (size.published_games, 6.0),
        ("game", "trained"): (size.trained_games, 25.0),
        ("authors", "crafted"): (size.authors_games, 0.7),
        ("authors", "published"): (size.authors_games, 4.0),
    }
    shared = chosen(size, "layers", "batch", "tokens", "pool", "public_texts", "seed")
    return [
        Cell("games", {"model": model, "text": text, "protocol": protocol, "group": group,
                       "games": games, **shared}, 8 + games * seconds,
             f"{model}, {text}, {group}")
        for model, text in product(models, size.texts)
        for (protocol, group), (games, seconds) in counts.items() if games
    ]  # fmt: skip


def ldp_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    """Table 3's: of each text and group."""
    cells = []
    shared = chosen(size, "batch", "tokens", "pool", "public_texts", "targets", "seed",
                    authors_games=size.ldp_authors_games)  # fmt: skip
    for model, text, group in product(models, size.texts, ("crafted", "trained")):
        crafted = group == "crafted"
        blocks, layers = size.trained_blocks, size.layers[:1]
        if crafted:
            blocks, layers = size.blocks, size.layers
        protocols = list(PROTOCOLS)[: 2 + crafted] if blocks else ()
        played = product(size.mechanisms, size.epsilons, protocols)
        for mechanism, epsilon, protocol in played:
            settings = {"model": model, "text": text, "mechanism": mechanism,
                        "epsilon": float(epsilon), "protocol": protocol, "group": group,
                        "layers": layers, "blocks": blocks, **shared}  # fmt: skip
            seconds = 6.0 if protocol == "authors" else 3.0 + 0.6 * blocks
            if not crafted:
                seconds = 9.0 + 5.0 * (protocol == "game")
            cells.append(Cell("ldp", settings, seconds, f"{model}, {text}, {group} under LDP"))
    return cells


def rates(rows: Sequence[Row], fitted: bool) -> list[tables.Mean]:
    """ACC, F1, AUC over all rows: those of one text share its games."""
    return [mean_rate(rows, f"fitted_{m}" if fitted and m != "auc" else m) for m in METRICS]


def mean_rate(rows: Sequence[Row], name: str) -> tables.Mean:
    texts = list(dict.fromkeys(r["text"] for r in rows))
    return mean_of([[rate_of(r, name) for r in rows if r["text"] == text] for text in texts])


Label = tuple[str, str, Callable[[Row], bool]]
"""What stands in front (cells with bars between), the paper's row, and which rows are meant."""


def grid_of(
    table: str, results: Results, labels: Sequence[Label], expected: int, head: Sequence[str],
    caption: str = "",
) -> Grid:  # fmt: skip
    """A grid with a row for each label: the paper's numbers, then ours by model and protocol.

    Args:
        table: its name.
        results: rows of all models and protocols.
        labels: of its rows.
        expected: cells that a mean of ours should be over.
        head: of the columns in front.
        caption: stands before the number of games.
    """
    paper, lines = tables.published()["membership"][table], []
    games: dict[str, dict[str, None]] = {}
    if runs := paper.get("runs"):
        games["paper"] = {str(math.prod(runs)): None}
    owners = list(product(results.values("model") or ["ours"], PROTOCOLS))
    for label, name, belongs in labels:
        means: dict[str, list[tables.Mean]] = {}
        for model, protocol in owners:
            rows = [r for r in results.where(model=model, protocol=protocol) if belongs(r)]
            if not rows and (name not in paper["rows"] or not played_in(table, label, protocol)):
                continue
            owner = f"{model}, {PROTOCOLS[protocol]}"
            means[owner] = rates(rows, table != "table2" and protocol != "authors")
            if rows:
                part = f", {len(rows)} of {expected} parts" if len(rows) < expected else ""
                games.setdefault(owner, {})[f"{sum(r['games'] for r in rows)}{part}"] = None
        printed = paper["rows"].get(name, [])
        theirs = [tables.span(f"{v[i]:.2f}" for v in printed) for i in range(3)]
        own = [m for owner, m in means.items() if PROTOCOLS["reference"] not in owner]
        ours = [tables.span(m[i].point for m in own) for i in range(2)]
        lines.append((label.split("|"), [theirs[0], ours[0], theirs[1], ours[1], theirs[2]], means))
    columns = list(dict.fromkeys(owner for *_, means in lines for owner in means))
    rows = [
        [*front, *cells, *(str(means[c][2]) if c in means else "" for c in columns)]
        for front, cells, means in lines
    ]
    heads = [*head, "ACC, paper", "ours", "F1, paper", "ours", "AUC, paper", *columns]
    counts = "; ".join(
        f"{owner}: {tables.dots(sorted(n, key=lambda n: (len(n), n)))}"
        for owner, n in games.items()
    )
    return Grid(heads, rows, f"{caption} Games: {counts}.".strip() if counts else caption)


def played_in(table: str, label: str, protocol: str) -> bool:
    """Whether a table has cells for a row.

    Without a defence the baseline is played by Fig. 2, and there is nothing for LDP's clients;
    under LDP these do not play it.
    """
    trained = "AMI" in label
    if table == "table2":
        return protocol == "game" or (protocol == "authors" and not trained)
    return protocol != "reference" or not trained


CRAFTED = ("FC-Full", "Attn", "FC-Token")
TABLE2 = ("FC-Full", "AMI FC Full", "Attn", "Attn, as published",
          "Attn, the lemma's gamma", "FC-Token", "AMI FC Token")  # fmt: skip


def show_table2(results: Results, size: Size) -> Shown:
    labels = [(name, name, lambda r, name=name: r["attack"] == name) for name in TABLE2]
    grid = grid_of("table2", results, labels, len(size.texts) * len(size.layers), ["method"])
    notes = []
    for model in results.values("model"):
        if rows := results.where(model=model, protocol="game", attack="FC-Full"):
            right, auc = (number(mean_rate(rows, m).value) for m in ("accuracy", "auc"))
            notes.append(f"on {model}, Fig. 2, FC-Full has accuracy {right} and AUC {auc}")
    return Shown([grid], finding(notes))


def labels_of(size: Size, names: Sequence[str]) -> list[Label]:
    """Labels of a table under LDP."""
    return [
        (f"{epsilon:g}|{name}", f"{epsilon:g} {name}",
         lambda r, epsilon=epsilon, name=name: r["epsilon"] == epsilon and r["attack"] == name)
        for epsilon, name in product(size.epsilons, names)
    ]  # fmt: skip


def reference_finding(results: Results) -> list[str]:
    """Return how far AUCs are apart where multi-freq-ldpy's clients draw: a mean over texts."""
    settings = ("model", "text", "mechanism", "epsilon", "layer", "attack")
    ours, clients = (
        {tuple(r[k] for k in settings): rate_of(r, "auc").value
         for r in results.where(protocol=protocol)}
        for protocol in ("game", "reference")
    )  # fmt: skip
    gaps: dict[str, list[float]] = {}
    for key in ours.keys() & clients.keys():
        gaps.setdefault(key[1], []).append(clients[key] - ours[key])
    if not gaps:
        return []
    gap = tables.student([statistics.fmean(values) for values in gaps.values()])
    return [
        "AUC with replacements of multi-freq-ldpy's clients minus AUC with ours: "
        f"{number(gap.value)} ({number(gap.low)} to {number(gap.high)} over {len(gaps)} texts)"
    ]


def show_table3(results: Results, size: Size) -> Shown:
    grids, notes = [], []
    for names, layers, caption in (
        (CRAFTED, len(size.layers), ""),
        (("AMI FC Full", "AMI FC Token"), 1, "Trained baselines, at layer 1 only."),
    ):
        labels = labels_of(size, names)
        expected = len(size.texts) * layers * len(size.mechanisms)
        head = ["epsilon", "method"]
        grids.append(grid_of("table3", results, labels, expected, head, caption))
    printed = tables.published()["membership"]["table3"]["rows"]
    for model in results.values("model"):
        cells = []
        for epsilon in size.epsilons:
            rows = results.where(model=model, protocol="game", epsilon=epsilon, attack="FC-Full")
            if rows:
                paper = statistics.fmean(v[2] for v in printed[f"{epsilon:g} FC-Full"])
                auc = number(mean_rate(rows, "auc").value)
                cells.append(f"{auc} at {epsilon:g} (paper's mean {number(paper, 2)})")
        if cells:
            notes.append(f"on {model}, Fig. 2, FC-Full has AUC {tables.dots(cells)}")
    return Shown(grids, finding(notes + reference_finding(results)))


def fig5_cells(size: Size, models: Sequence[str]) -> list[Cell]:
    return [
        Cell("lemma", {"law": law, "tokens": tokens, "dim": d, "runs": size.runs,
                       "seed": size.seed}, 0.5, "Fig. 5")
        for law in LAWS for tokens in LENGTHS for d in size.dims
    ]  # fmt: skip


def show_fig5(results: Results, size: Size) -> Shown:
    lines = []
    condition_rates = [r["condition_holds"]["value"] for r in results.rows]
    for law, tokens, selector in product(LAWS, LENGTHS, ("bound", "random_direction")):
        if selector == "random_direction" and law != "one_hot":
            continue
        cells = []
        for d in size.dims:
            rows = results.where(law=law, tokens=tokens, dim=d)
            cells.append(number(rows[0][selector]["value"]) if rows else "not run")
        name = law.replace("_", "-") + (", u random" if selector != "bound" else "")
        lines.append([name, str(tokens), *cells])
    head = ["distribution", "l_X", *(f"d = {d:,}" for d in size.dims)]
    above = [r for r in results.rows if r["law"] != "one_hot" and r["bound"]["value"] > 0]
    dense_rows = [r for r in results.rows if r["law"] != "one_hot"]
    message = "Not run."
    if dense_rows:
        least = {t: min((r["dim"] for r in above if r["tokens"] == t), default=None)
                 for t in LENGTHS}  # fmt: skip
        notes = ", ".join(
            f"from d = {d:,} on with {t} tokens" if d else f"at no d here with {t} tokens"
            for t, d in least.items()
        )
        message = (
            f"Of the dimensions simulated, the bound for spherical or Gaussian data is above 0 "
            f"{notes}. Condition (4) holds in {number(statistics.fmean(condition_rates))} of all "
            "data sets."
        )
    return Shown([Grid(head, lines)], message)


PAPER = tables.Paper(
    "membership",
    "Analysis of Privacy Leakage in Federated Large Language Models (Vu et al. 2024)",
    (
        Table("table2", "attacks without a defence", games_cells, show_table2),
        Table("table3", "attacks under LDP, mean over four mechanisms", ldp_cells, show_table3),
        Table("fig5", "Lemma 2's lower bound on simulated data", fig5_cells, show_fig5),
    ),
    SIZES,
    {"games": measure_games, "ldp": measure_ldp, "lemma": measure_lemma},
)  # fmt: skip
