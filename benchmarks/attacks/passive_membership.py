"""Is this text in the batch, asked by a server that adds nothing.

    python -m benchmarks.attacks.passive_membership --model DIR --rank 8 --targets q_proj,v_proj \
        --shapes 8x64 --batches 10 --attacks gradient subspace
    python -m benchmarks.attacks.passive_membership --model DIR --rank 8 --shapes 4x32 \
        --warm 5,100 --update AdamW --steps 10 --batches 5 --asked 8 --attacks gradient

Settings as in subspace_words.py, whose functions this uses. ``--update`` shares in place of
gradients the weight change of a round: ``--steps`` of that optimizer, each on a batch of its own,
from a fresh state. Against each batch's texts (or ``--asked`` of a round's) stand as many other
texts of the same set, the same texts with their tokens in another order, with one word replaced (by
a word of another text, and by a word that the batch holds elsewhere), and with the last word
replaced. A replaced word is another token than the text's own. Prints the AUC of each with its 95%
interval (games of a round are one cluster), milliseconds that a candidate costs, beside those of a
forward pass, and how many rounds are unknown, which count in no AUC.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.attacks import subspace_words
from benchmarks.attacks.subspace_words import SOURCE, TRAINING, Source, Training
from benchmarks.shared import parser_of, print_place, with_ends
from lightning_fedleak.attacks import GradientMembership, Query, SubspaceMembership
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.evaluation.metrics import membership_rates
from lightning_fedleak.model.anatomy import find_anatomy

SMOKE = (
    "--model {model} --private {text} --public {text} --rank 4 --targets q_proj,v_proj "
    "--shapes 2x8 --batches 1",
    "--model {model} --private {text} --public {text} --rank 4 --shapes 2x8 --batches 2 "
    "--warm 1,2 --update AdamW --steps 2 --asked 2 --attacks gradient",
)
TOKENS = 64
"""Of a text that are read at most."""
ATTACKS = {"gradient": GradientMembership, "subspace": SubspaceMembership}
KINDS = ("other text", "another order", "a word of another text", "a word of the batch",
         "another last word")  # fmt: skip


def variants(
    ids: Tensor, others: Tensor, words: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """Texts that are not in the batch, by kind: each (B, L)."""
    rows, length = ids.shape
    order = torch.stack([row[torch.randperm(length, generator=generator)] for row in ids])
    places = torch.randint(length - 1, (rows,), generator=generator)
    foreign_word, batch_word, last_word = ids.clone(), ids.clone(), ids.clone()
    for row, place in enumerate(places.tolist()):
        foreign_word[row, place] = _another(ids[row, place], others[row], generator)
        batch_word[row, place] = _another(ids[row, place], words, generator)
        last_word[row, -1] = _another(ids[row, -1], others[row], generator)
    return dict(zip(KINDS, (others, order, foreign_word, batch_word, last_word), strict=True))


def _another(word: Tensor, words: Tensor, generator: torch.Generator) -> Tensor:
    """One of the words, drawn at random, that is not this one."""
    rest = words[words != word]
    return rest[int(torch.randint(len(rest), (1,), generator=generator))]


def main() -> None:
    parser = parser_of(
        __doc__, "model", **SOURCE, **TRAINING, attacks=([*ATTACKS], ATTACKS),
        steps=(1, "of a round, with --update"), asked=(int, "texts of a round that are asked for"),
    )  # fmt: skip
    options = parser.parse_args()
    options.config, options.chat = None, False
    if options.steps > 1 and not options.update:
        parser.error("--steps are those of a round: give --update too")
    print_place(options.device)
    for shape in options.shapes.split(","):
        texts, length = map(int, shape.split("x"))
        model = subspace_words.built(options)
        anatomy = find_anatomy(model)
        private = Source(options.private, options, anatomy.vocab_size)
        public = Source(options.public, options, anatomy.vocab_size)
        training = Training(model, public, (texts, length), options.device)
        public_texts = public.batch(24, length).input_ids.tolist()
        for warm in map(int, options.warm.split(",")):
            training.until(warm if options.rank else 0)
            attacks = {name: ATTACKS[name](public_texts, tokens=TOKENS) for name in options.attacks}
            roles: set[str] = set()
            for attack in attacks.values():
                if options.update:
                    attack.meet(subspace_words.facts_of(options.update, options.steps))
                roles |= {*attack.needs(anatomy).gradients}
            training.read_only(sorted(roles))
            for attack in attacks.values():
                attack.prepare(anatomy)
            generator = torch.Generator().manual_seed(options.seed)
            measure(attacks, tuple(sorted(roles)), training, private, generator, options)


def measure(
    attacks: dict[str, GradientMembership | SubspaceMembership], roles: tuple[str, ...],
    training: Training, private: Source, generator: torch.Generator, options: argparse.Namespace,
) -> None:  # fmt: skip
    """Play on rounds (or single gradients) at the weights as they are, and print what was read."""
    model, (texts, length) = training.model, training.shape
    anatomy = find_anatomy(model)
    scores: dict[str, dict[str, list[Tensor]]]
    scores = {name: {kind: [] for kind in ("member", *KINDS)} for name in attacks}
    forward: list[float] = []
    candidate_seconds: dict[str, list[float]] = {name: [] for name in attacks}
    for number in range(options.batches):
        batches = [private.batch(texts, length) for _ in range(options.steps)]
        view = subspace_words.shared(model, roles, batches, 0.0, number, options)
        trained = torch.cat([batch.input_ids for batch in batches])
        members = trained[torch.randperm(len(trained), generator=generator)[: options.asked]]
        others = private.batch(len(members), length).input_ids
        kinds = variants(members, others, trained[:, :-1].unique(), generator)
        query = torch.cat([members, *kinds.values()])
        with torch.no_grad():
            start = time.perf_counter()
            model(input_ids=query.to(options.device))
            forward.append((time.perf_counter() - start) / len(query))
        for name, attack in attacks.items():
            attack.refresh(anatomy, number)
            try:
                start = time.perf_counter()
                attack.run(view, Query(query[:1]))
                seconds_of_one = time.perf_counter() - start
                guess = attack.run(view, Query(query))
                seconds_of_all = time.perf_counter() - start - seconds_of_one
            except UnusableObservation:
                continue
            candidate_seconds[name].append((seconds_of_all - seconds_of_one) / (len(query) - 1))
            for kind, values in zip(scores[name], guess.scores.split(len(members)), strict=True):
                scores[name][kind].append(values)
    for name, by_kind in scores.items():
        rounds = len(by_kind["member"])
        kind = f"{options.update} {options.steps} steps" if options.update else "gradient"
        setting = f"{Path(options.model).name} {options.private} {subspace_words.adapted(options)}"
        setting += f" {texts}x{length} {kind} | after {training.steps} steps | {name}"
        print(f"{setting} | {options.batches - rounds} of {options.batches} unknown", flush=True)
        if not rounds:
            continue
        sizes = torch.tensor([len(values) for values in by_kind["member"]])
        cluster = torch.arange(rounds).repeat_interleave(sizes).repeat(2)
        member = torch.cat(by_kind["member"])
        for kind in KINDS:
            both = torch.cat([member, *by_kind[kind]])
            bits = torch.arange(len(both)) < len(member)
            auc = membership_rates(both, bits, cluster)["auc"]
            line = f"{setting} | {kind} | {len(member)} members | AUC {with_ends(auc)}"
            print(line, flush=True)
        cost, plain = (1000 * torch.tensor(s).median() for s in (candidate_seconds[name], forward))
        line = f"{name}: {cost:.0f} ms a candidate; a forward pass {plain:.0f} ms (medians)"
        print(line, flush=True)


if __name__ == "__main__":
    main()
