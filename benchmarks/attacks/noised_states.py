"""Texts behind noised states at a split, beside a plain beam search.

    python -m benchmarks.attacks.noised_states --model DIR --text imdb --noise 1 3
    python -m benchmarks.attacks.noised_states --model DIR --text imdb --noise 100 --no-plain

The share of tokens in place, without the first, which ``plain`` is given. It also knows the noise's
deviation: it runs ``--pool`` common tokens of the text after each of four prefixes, and adds the
logarithm of the Gaussian to that of the model's own probability of the token. The interval is that
of the seeds. With ``--noise 100`` nothing is left of the text but what is likely anyway.
"""

import time

import torch
from torch import Tensor

from benchmarks.papers.membership import start_of
from benchmarks.shared import loaded, mean_and_half, parser_of, print_place, read_texts
from lightning_fedleak import PrefixInversion
from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.attacks.texts.prefix.inversion import states_after
from lightning_fedleak.cli.commands.invert import rows_of_length
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states

SMOKE = (
    "--model {model} --text {text} --texts 2 --seeds 2 --length 6 --noise 1 --pool 40 --layer 1",
)


@torch.no_grad()
def plain_beam(bottom: BottomModel, sent: Tensor, std: Tensor, pool: Tensor, first: int) -> Tensor:
    """The text (L,) of states ``sent`` (L, d): the best of four beams over the tokens ``pool``."""
    beams = [(0.0, torch.tensor([first]))]
    for state in sent[1:]:
        longer = []
        for total, beam in beams:
            likely = bottom.anatomy.model(input_ids=beam[None]).logits[0, -1].log_softmax(0)[pool]
            far = ((states_after(bottom, beam, pool) - state) / std).square().sum(1)
            best = (total + likely - far / 2).topk(min(4, len(pool)))
            pairs = zip(best.values.tolist(), pool[best.indices], strict=True)
            longer += [(value, torch.cat([beam, token[None]])) for value, token in pairs]
        beams = sorted(longer, key=lambda pair: -pair[0])[:4]
    return beams[0][1]


def main() -> None:
    args = parser_of(
        __doc__, "model", "text", noise=[1.0, 3.0], layer=2, texts=6, length=16, seeds=5, pool=1950,
        no_plain=False,
    ).parse_args()  # fmt: skip
    print_place()
    tokenizer, model = loaded(args.model)
    anatomy = find_anatomy(model)
    lines, start = read_texts(args.text), start_of(tokenizer, anatomy)
    counts = torch.tensor(tokenizer(" ".join(lines[-2000:]))["input_ids"]).bincount()
    pool = counts.topk(min(args.pool, int((counts > 0).sum()))).indices
    attack = PrefixInversion(args.layer, noised=True)
    attack.prepare(anatomy)
    for noise in args.noise:
        found: dict[str, list[float]] = {"PrefixInversion": [], "plain": []}
        seconds = dict.fromkeys(found, 0.0)
        for seed in range(args.seeds):
            rows = rows_of_length(
                lines, tokenizer, args.length, args.texts, min_rows=args.texts, seed=seed,
                start_token_id=start,
            )  # fmt: skip
            sent = torch.stack(list(rows[: args.texts]))
            states = hidden_states(anatomy, args.layer, sent)
            std = noise * states.flatten(0, 1).std(0)
            generator = torch.Generator().manual_seed(seed)
            states = states + std * torch.randn(states.shape, generator=generator)
            for name in found:
                begin = time.process_time()
                if name == "plain" and args.no_plain:
                    continue
                if name == "plain":
                    pairs = zip(states, sent[:, 0].tolist(), strict=True)
                    texts = [plain_beam(attack.bottom, s, std, pool, first) for s, first in pairs]
                    read = torch.stack(texts)
                else:
                    read = attack.reconstruct(states, None, None).tokens
                seconds[name] += (time.process_time() - begin) / args.seeds
                found[name].append(float((read == sent)[:, 1:].float().mean()))
        for name, shares in found.items():
            if not shares:  # --no-plain
                continue
            mean, half = mean_and_half(shares)
            print(f"noise {noise:g}, {name}: {mean:.3f} +- {half:.3f}, {seconds[name]:.1f} s")


if __name__ == "__main__":
    main()
