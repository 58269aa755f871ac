"""What clients of a federation leak, round by round, in one process: `python examples/federate.py`.

Each client trains a LoRA on messages of its own. Its update is attacked before it leaves, and so is
the mean of all updates: what a server sees behind secure aggregation. First a gate withholds an
update whose membership is recognised, then each client adds noise of differential privacy instead.
"Unknown" is not safe.
"""

import copy
import math
from functools import partial

import torch
from peft import LoraConfig, get_peft_model

from lightning_fedleak import Games, GradientMembership, PublicText, federation
from lightning_fedleak.cli import finetuning

CLIENTS, ROWS = 4, 4
OPTIMIZER = partial(torch.optim.AdamW, lr=3e-4)
METRIC = "leakage/worst/membership"


def local_round(model, sent, rows, steps: int, seed: int):
    """Returns what a client has trained from the state that was sent, and its batches."""
    model.load_state_dict(sent, strict=False)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    chosen = [[rows[i] for i in part] for part in order[: steps * ROWS].split(ROWS)]
    batches = [finetuning.PadRight(model.config.pad_token_id)(part) for part in chosen]
    optimizer = OPTIMIZER([p for p in model.parameters() if p.requires_grad])
    for batch in batches:
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    state = federation.trained_state(model)
    return {name: tensor.clone() for name, tensor in state.items()}, batches


@torch.no_grad()
def loss_of(model, state, rows) -> float:
    """Returns the loss on texts that no client has."""
    model.load_state_dict(state, strict=False)
    loss = float(model.eval()(**finetuning.PadRight(model.config.pad_token_id)(rows)).loss)
    model.train()
    return loss


def federate(name: str, rounds: int, steps: int, gates=(), epsilon: float | None = None) -> None:
    """Trains all rounds, and prints the loss and what each update and their mean leak."""
    torch.manual_seed(0)
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(finetuning.load_model(None), lora).train()
    rows = finetuning.tokenize_rows(
        finetuning.read_texts(finetuning.EMBEDDED_MESSAGES), finetuning.load_tokenizer(None), 32
    )
    public, outside, own = rows[:100], rows[100:200], rows[200:]
    observer = federation.RoundObserver(
        copy.deepcopy(model),
        OPTIMIZER,
        steps,
        attacks=GradientMembership(PublicText(public)),
        folder=f"fedleak_runs/federate/{name}",
        games=Games(targets=16, held_out=PublicText(outside)),
    )
    private = {"clients": CLIENTS, "rounds": rounds, "target_delta": 1e-5, "trust": "local"}
    noises = [
        epsilon and federation.ClientDP(clip=1, target_epsilon=epsilon, **private)
        for _ in range(CLIENTS)
    ]
    clients = [
        federation.OutgoingUpdates(observer, gates, dp, client=c) for c, dp in enumerate(noises)
    ]
    sent = federation.trained_state(model)
    print(f"{name}: loss {loss_of(model, sent, outside):.3f} before the first round")
    if noises[0]:
        numbers = sum(tensor.numel() for tensor in sent.values())
        times = noises[0].relative_noise(numbers)
        print(f"  the noise is {times:.0f} times the largest mean update")
    for round_ in range(rounds):
        observer.begin(round_, sent)
        updates, seen, cells = [], [], []
        for number, client in enumerate(clients):
            returned, batches = local_round(model, sent, own[number::CLIENTS], steps, round_)
            leaving = client.leaves(round_, sent, returned, batches)
            seen += batches
            if not leaving.withheld:
                updates.append(federation.difference(sent, leaving.state))
            value = leaving.look.values.get(METRIC, math.nan)
            cells.append(f"{value:.2f}{' withheld' * leaving.withheld}")
        mean = {n: sum((u[n] for u in updates), 0 * sent[n]) / CLIENTS for n in sent}
        after = federation.moved(sent, mean)
        values = observer.look(after, federation.SUM, batches=seen).values if updates else {}
        cells.append(f"mean {values.get('leakage_aggregate/worst/membership', math.nan):.2f}")
        sent = after
        shown, loss = ", ".join(cells).replace("nan", "unknown"), loss_of(model, sent, outside)
        print(f"  round {round_}, AUC: {shown}; loss {loss:.3f}")
    observer.end()


def main(rounds: int = 3, local_steps: int = 10) -> None:
    """Trains one federation with a gate, and one in which each client adds noise."""
    federate("gate", rounds, local_steps, [federation.RoundGate(METRIC, at_most=0.9)])
    federate("noise", rounds, local_steps, epsilon=8)


if __name__ == "__main__":
    main()
