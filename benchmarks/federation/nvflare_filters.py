"""What attacks read through the privacy filters of NVFlare, and through a ClientDP.

One client trains the model for a round with SGD and returns the difference of the weights. Words
and membership (its texts against as many others) are read off what each filter lets leave; the
cosine with the true difference says what is left to train on. An attack that cannot read what is
left is unknown, which is no protection. Epsilon is what SVTPrivacy itself counts for one round, or
ClientDP; a percentile has none. It needs NVFlare, but for ``--cases none dp``::

    PYTHONPATH=.venv-nvflare:. OMP_NUM_THREADS=1 python -m benchmarks.federation.nvflare_filters
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.federation.rounds import batches, model_of, train
from lightning_fedleak.attacks import GradientMembership, PublicText, SubspaceWords
from lightning_fedleak.callbacks import Games
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES
from lightning_fedleak.cli.finetuning.data import load_tokenizer
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.federation import (
    ClientDP,
    RoundObserver,
    RoundSettings,
    difference,
    joint_norm,
    moved,
    trained_state,
)

SMOKE = ("--cases none dp --rows 1 --length 8 --steps 1",)
NAMES = ("leakage/subspace_words/f1", "leakage/gradient_membership/auc")
CASES = ("none", "percentile", "percentile90", "svt", "dp")


def filtered(case: str, update: dict[str, torch.Tensor], steps: int) -> tuple[dict[str, Any], str]:
    """Return what leaves of an update, and the epsilon of the round."""
    if case == "none":
        return update, "none"
    if case == "dp":
        dp = ClientDP(joint_norm(update), 1.0, clients=100, target_delta=1e-3, trust="local",
                      accountant="rdp")  # fmt: skip
        return dp.privatized(update, update), f"{dp.privacy.epsilon:.3g}"
    from nvflare.apis.dxo import DXO, DataKind, MetaKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
    from nvflare.app_common.filters.svt_privacy import SVTPrivacy

    np.random.seed(0)  # the noise of SVTPrivacy is numpy's global one
    rule = {"percentile": PercentilePrivacy, "svt": SVTPrivacy,
            "percentile90": partial(PercentilePrivacy, percentile=90)}[case]()  # fmt: skip
    arrays = {n: t.numpy().copy() for n, t in update.items()}
    dxo = DXO(DataKind.WEIGHT_DIFF, arrays, {MetaKey.NUM_STEPS_CURRENT_ROUND: steps})
    data = rule.process_dxo(dxo, Shareable(), FLContext()).data
    spent = f"{rule.get_privacy_spent():,.0f}" if case == "svt" else "none"
    return {n: torch.as_tensor(np.asarray(a, dtype=np.float32)) for n, a in data.items()}, spent


def cosine(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the cosine of two differences, in float64."""
    dot = sum(float((one[n].double() * other[n].double()).sum()) for n in one)
    return dot / max(joint_norm(one) * joint_norm(other), 1e-300)


def main() -> None:
    """Print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rate", type=float, default=0.05)
    arguments = parser.parse_args()
    optimizer = partial(torch.optim.SGD, lr=arguments.rate)
    tokenizer = load_tokenizer(None)
    rows = [tokenizer(text)["input_ids"] for text in read_texts(EMBEDDED_MESSAGES)]
    texts = [torch.tensor(row[: arguments.length]) for row in rows]
    public, outside = PublicText(texts[:60]), PublicText(texts[60:200])
    stream = batches(
        rows[200:], arguments.rows, arguments.length, 0, torch.Generator().manual_seed(0)
    )
    data = [next(stream) for _ in range(arguments.steps)]
    net = model_of(None, 0)
    sent = trained_state(net)
    train(net, data, optimizer)
    true = difference(sent, trained_state(net))
    print("case | words F1 | membership AUC | cosine | epsilon of a round")
    for case in arguments.cases:
        leaves, epsilon = filtered(case, true, arguments.steps)
        with tempfile.TemporaryDirectory() as folder:
            observer = RoundObserver(
                model_of(None, 0), optimizer, arguments.steps, folder=folder,
                attacks=[SubspaceWords(capacity_seconds=0), GradientMembership(public)],
                games=Games(targets=arguments.rows * arguments.steps, held_out=outside),
                settings=RoundSettings(tensorboard=False),
            )  # fmt: skip
            observer.begin(0, sent)
            look = observer.look(moved(sent, leaves), batches=data)
            observer.end()
        scores = " | ".join(f"{look.now.get(name, float('nan')):.2f}" for name in NAMES)
        print(f"{case} | {scores} | {cosine(leaves, true):.3f} | {epsilon}", flush=True)
        for why in look.unknown.values():
            print(f"  unknown: {why}")


if __name__ == "__main__":
    main()
