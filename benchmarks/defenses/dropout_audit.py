"""Audits of DPSGD with dropout: is an example alone, although a batch's masks come from one stream?

    OMP_NUM_THREADS=1 python -m benchmarks.defenses.dropout_audit
    OMP_NUM_THREADS=1 python -m benchmarks.defenses.dropout_audit --public

A game is one release of all N rows, or of all but the last. The adversary knows the other rows, and
projects the release on what the last row adds to the sum of clipped gradients, by one of three
templates, with a threshold that is fixed beforehand:

- ``seed``: both sums without noise, from the user's public seed (42, as transformers' Trainer sets
  it), which shifts the masks of all other rows;
- ``masks``: both sums, as means over 64 draws of the masks;
- ``own``: the gradient of the row itself, without dropout.

Printed are how far the sum moves by the first template, in units of the clip norm, and for each
template a 95% lower bound on epsilon beside the claim. ``--public`` puts the public seed in place
of the secret states: the first bound then exceeds the claim, if the sum moves by 7 C or more.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.shared import llama, parser_of, quieten, with_lora
from lightning_fedleak.defenses import DPSGD
from lightning_fedleak.defenses.dpsgd import step
from lightning_fedleak.defenses.noise import gaussian_epsilon
from lightning_fedleak.evaluation.auditing import audit_scores
from lightning_fedleak.trainers import DefendedLoop

SMOKE = ("--games 3 --rows 6 --masks 2", "--games 3 --rows 6 --masks 2 --public --only LoRA")

CLIP, DELTA, SEED = 0.02, 1e-5, 42
VOCABULARY, LENGTH = 320, 10


def lora() -> nn.Module:
    sizes = {"intermediate_size": 24, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = llama(VOCABULARY, 16, 2, heads=2, **sizes)
    settings = {"lora_dropout": 0.05, "init_lora_weights": False}
    return with_lora(model, 4, ["q_proj", "v_proj"], **settings)


def gpt2() -> nn.Module:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    return GPT2LMHeadModel(config)  # dropout 0.1 is its default


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LoRA, dropout 0.05": lora,
    "GPT-2, dropout 0.1": gpt2,
}


class Rows(Dataset[Any]):
    """The first rows of ``public_length`` random ones."""

    def __init__(self, public_length: int, kept: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, VOCABULARY, (public_length, LENGTH), generator=generator)
        self.public_length, self.kept = public_length, kept

    def __len__(self) -> int:
        return self.kept

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def sums(
    make: Callable[[], nn.Module], rows: Rows, sigma: float, steps: int, seed: int | None = None
) -> Tensor:
    """Return the released sums (steps, D) in units of the clip norm, at unchanged weights."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make().train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.0)
    loader = DataLoader(rows, batch_size=rows.public_length)  # all rows are in each batch
    defense = DPSGD(CLIP, sigma, target_delta=DELTA, seed=seed)
    released = []
    with DefendedLoop(model, optimizer, loader, [defense], steps=steps) as private:
        for _ in range(steps):  # an epoch has one batch
            for batch in private:
                private.loss(lambda given: model(**given).loss, batch).backward()
                optimizer.step()
                flat = torch.cat([p.grad.flatten() for p in trained])  # type: ignore[union-attr]
                released.append(flat.double() * rows.public_length / CLIP)
                optimizer.zero_grad()
    return torch.stack(released)


def own_gradient(make: Callable[[], nn.Module], rows: Rows) -> Tensor:
    """Return the gradient (D,) of the last row without dropout."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make().eval()
    loss = model(**{name: ids[None] for name, ids in rows[rows.public_length - 1].items()}).loss
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, trained)]).double()


@contextlib.contextmanager
def public_states(_: object = None) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        yield


def audit(name: str, count: int, sigma: float, games: int, masks: int, public: bool) -> None:
    make, worlds = MODELS[name], [Rows(count, count), Rows(count, count - 1)]
    with mock.patch.object(step, "secret_states", public_states):
        pairs = {"seed": [sums(make, rows, 0.0, 1, seed=1)[0] for rows in worlds]}
    pairs["masks"] = [sums(make, rows, 0.0, masks, seed=1).mean(0) for rows in worlds]
    directions = {key: first - second for key, (first, second) in pairs.items()}
    directions["own"], pairs["own"] = own_gradient(make, worlds[0]), pairs["masks"]
    states = mock.patch.object(step, "secret_states", public_states)
    with states if public else contextlib.nullcontext():
        released = torch.cat([sums(make, rows, sigma, games) for rows in worlds])
    members = torch.arange(2 * games) < games
    bounds = []
    for key, direction in directions.items():
        scores, cut = released @ direction, float(sum(pairs[key]) @ direction) / 2
        bound = audit_scores(scores, members, delta=DELTA, claim="dp", threshold=cut).epsilon
        bounds.append(f"{key} {bound:.3f}")
    claim, moved = gaussian_epsilon(sigma=sigma, delta=DELTA), float(directions["seed"].norm())
    print(
        f"{name:20} N {count} sigma {sigma:g}: the sum moves by {moved:.2f} C from a public seed; "
        f"claimed {claim:.3f}; at least {', '.join(bounds)}",
        flush=True,
    )


def main() -> None:
    games, public = (300, "of each world"), (False, "a public seed, which must show")
    only = ("", "the beginning of a model's name")
    parser = parser_of(
        __doc__, games=games, rows=200, sigma=2.0, masks=64, public=public, only=only
    )
    options = parser.parse_args()
    quieten()
    for name in MODELS:
        if name.startswith(options.only):
            audit(name, options.rows, options.sigma, options.games, options.masks, options.public)


if __name__ == "__main__":
    main()
