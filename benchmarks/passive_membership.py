"""Is this text in the batch, asked by a server that adds nothing.

    python benchmarks/passive_membership.py --model DIR --rank 8 --targets q_proj,v_proj \
        --shapes 8x64 --batches 10 --attacks gradient subspace

Settings as in subspace_words.py, whose functions this uses. Against each batch's texts stand as
many other texts of the same set, the batch's own texts with their tokens in another order, and with
one word replaced: by a word of another text, and by a word that the batch holds elsewhere. Prints
the AUC of each with its 95% interval (games of a batch are one cluster), and milliseconds that a
candidate costs, beside those of a forward pass.
"""

from __future__ import annotations

import argparse
import platform
import time
from datetime import date
from pathlib import Path

import torch
from subspace_words import Source, backward, built, observed
from torch import Tensor

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks import GradientMembership, Query, SubspaceMembership
from lightning_fedleak.metrics import membership_rates

SMOKE = (
    "--model {model} --private {text} --public {text} --rank 4 --targets q_proj,v_proj "
    "--shapes 2x8 --batches 1",
)
ATTACKS = {"gradient": GradientMembership, "subspace": SubspaceMembership}
KINDS = ("other text", "another order", "a word of another text", "a word of the batch")


def variants(ids: Tensor, others: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Texts that are not in the batch, by kind: each (B, L)."""
    rows, length = ids.shape
    order = torch.stack([row[torch.randperm(length, generator=generator)] for row in ids])
    places = torch.randint(length - 1, (rows,), generator=generator)
    foreign, own = ids.clone(), ids.clone()
    words = ids[:, :-1].unique()
    for row, place in enumerate(places.tolist()):
        foreign[row, place] = others[row, place]
        while own[row, place] == ids[row, place]:
            own[row, place] = words[int(torch.randint(len(words), (1,), generator=generator))]
    return dict(zip(KINDS, (others, order, foreign, own), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--private", default="imdb")
    parser.add_argument("--public", default="wikitext2")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", default="q_proj,v_proj")
    parser.add_argument("--shapes", default="8x64")
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--attacks", nargs="+", default=list(ATTACKS), choices=ATTACKS)
    parser.add_argument("--tokens", type=int, default=64, help="of a text that are read at most")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--bos", type=int)
    parser.add_argument("--pool", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.config, options.padded = None, False
    torch.set_num_threads(options.threads)
    print(f"# {platform.machine()}, {options.threads} thread(s), {options.device}, {date.today()}")
    for shape in options.shapes.split(","):
        texts, length = map(int, shape.split("x"))
        model = built(options)
        anatomy = find_anatomy(model)
        private = Source(options.private, options, anatomy.vocab_size)
        public = Source(options.public, options, anatomy.vocab_size)
        if options.rank:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=2e-4)
            backward(model, public.batch(texts, length), options.device)
            optimizer.step()
        given = public.batch(24, length).input_ids.tolist()
        attacks = {name: ATTACKS[name](given, tokens=options.tokens) for name in options.attacks}
        roles: set[str] = set()
        for attack in attacks.values():
            roles |= {*attack.needs(anatomy).gradients}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in roles)
        for attack in attacks.values():
            attack.prepare(anatomy)
        generator = torch.Generator().manual_seed(options.seed)
        scores: dict[str, dict[str, list[Tensor]]] = {
            name: {kind: [] for kind in ("member", *KINDS)} for name in attacks
        }
        forward: list[float] = []
        candidate: dict[str, list[float]] = {name: [] for name in attacks}
        for number in range(options.batches):
            batch = private.batch(texts, length)
            backward(model, batch, options.device)
            others = private.batch(texts, length).input_ids
            asked = {"member": batch.input_ids, **variants(batch.input_ids, others, generator)}
            view = observed(anatomy, tuple(sorted(roles)), options.noise, number)
            query = torch.cat(list(asked.values()))
            with torch.no_grad():
                began = time.perf_counter()
                model(input_ids=query.to(options.device))
                forward.append((time.perf_counter() - began) / len(query))
            for name, attack in attacks.items():
                attack.refresh(anatomy, number)
                began = time.perf_counter()
                attack.run(view, Query(query[:1]))
                one = time.perf_counter() - began
                said = attack.run(view, Query(query))
                every = time.perf_counter() - began - one
                candidate[name].append((every - one) / (len(query) - 1))
                for kind, found in zip(asked, said.scores.split(texts), strict=True):
                    scores[name][kind].append(found)
        cluster = torch.arange(options.batches).repeat_interleave(texts).repeat(2)
        for name, of in scores.items():
            member = torch.cat(of["member"])
            for kind in KINDS:
                both = torch.cat([member, *of[kind]])
                bits = torch.arange(len(both)) < len(member)
                auc = membership_rates(both, bits, cluster)["auc"]
                print(
                    f"{Path(options.model).name} {options.private} r {options.rank} "
                    f"{options.targets if options.rank else 'whole'} {shape} | {name} | {kind} | "
                    f"AUC {auc.value:.3f} ({auc.low:.3f} to {auc.high:.3f})",
                    flush=True,
                )
            cost = 1000 * torch.tensor(candidate[name]).median()
            print(
                f"{name}: {cost:.0f} ms a candidate; a forward pass "
                f"{1000 * torch.tensor(forward).median():.0f} ms (medians)",
                flush=True,
            )


if __name__ == "__main__":
    main()
