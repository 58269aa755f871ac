"""Rows one by one under DPSGD in bf16-mixed, each compared with autograd: does one stop the run?

    OMP_NUM_THREADS=1 python -m benchmarks.defenses.bf16_rows --rows 10000

The model is a GPT-2 of one layer and width 32 from its configuration, a row is 12 random tokens.
Every release is checked, not one in a hundred.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_fedleak.defenses import DPSGD, DefenseContext, DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd import step

SMOKE = ("--rows 20",)
VOCABULARY, LENGTH = 200, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    step.CHECK_EVERY = 1
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    config.update({"bos_token_id": 0, "eos_token_id": 0})
    root = GPT2LMHeadModel(config).train()
    ids = torch.randint(1, VOCABULARY, (args.rows, LENGTH))
    context = DefenseContext(
        root=root,
        client=0,
        clients=1,
        device=torch.device("cpu"),
        precision="bf16-mixed",
        step=0,
        entropy=b"rows in half precision, 32 bytes",
    )
    defense = DPSGD(1.0, noise_multiplier=0.0)
    defense.before_setup(context)
    data = torch.utils.data.TensorDataset(ids)
    defense.on_dataloader(torch.utils.data.DataLoader(data, batch_size=8), context)
    parameters = list(root.parameters())
    start = time.process_time()
    for row in ids[:, None]:
        root.zero_grad()

        def training_step(row: torch.Tensor = row) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return mean_of_sample_means(root(row).logits, row, causal=True)

        defense.on_training_step(training_step, [row], context).backward()
        try:
            with torch.no_grad():
                defense.on_gradients(parameters, context)
        except DefenseError as error:
            raise SystemExit(f"row {defense.releases} stopped the run") from error
    seconds = time.process_time() - start
    print(f"{defense.releases} rows, none stopped the run; {1e3 * seconds / args.rows:.1f} ms each")


if __name__ == "__main__":
    main()
