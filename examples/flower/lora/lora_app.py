"""Clients train low-rank adapters of a language model; each update is looked at before it leaves.

Started with ``flwr run``, see README.md.
"""

import os
from functools import partial
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

from lightning_fedleak import Games, federation
from lightning_fedleak.attacks import PublicText
from lightning_fedleak.cli.finetuning import module
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.federation.flower import FedLeakMod, Observed

OPTIMIZER = partial(torch.optim.AdamW, lr=3e-4)
ROWS = 4
PUBLIC, OUTSIDE = slice(0, 100), slice(100, 200)
PRIVATE = 200
"""Of the messages: some calibrate the attacks, some are in no batch, the others are clients'."""


def make_model(context: Context) -> torch.nn.Module:
    """The same on the server and on every client."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        return get_peft_model(module.load_model(context.run_config["model"] or None), lora)


def rows_of(texts: list[str], context: Context) -> list[torch.Tensor]:
    """Token ids of texts, at most 32 a row."""
    tokenizer = module.load_tokenizer(context.run_config["model"] or None)
    return module.tokenize_rows(texts, tokenizer, 32)


def client_rows(context: Context, client: int, clients: int) -> list[torch.Tensor]:
    """What a client trains on."""
    return rows_of(read_texts(EMBEDDED_MESSAGES)[PRIVATE + client :: clients], context)


def collate(rows: list[torch.Tensor]) -> dict:
    """A batch of rows, padded on the right."""
    return module.PadRight(0)(rows)


def make_observer(context: Context, side: str) -> federation.RoundObserver:
    """Attacks updates; every process has one of its own."""
    texts = read_texts(EMBEDDED_MESSAGES)
    return federation.RoundObserver(
        make_model(context),
        OPTIMIZER,
        local_steps=int(context.run_config["local-steps"]),
        folder=Path(context.run_config["out"]).resolve() / f"{side}_{os.getpid()}",
        side=side,
        games=Games(targets=16, held_out=PublicText(rows_of(texts[OUTSIDE], context))),
        settings=federation.RoundSettings(public_text=PublicText(rows_of(texts[PUBLIC], context))),
    )


def gates(context: Context) -> list[federation.RoundGate]:
    """None where everything may leave."""
    most = float(context.run_config["at-most"])
    if most >= 1:
        return []
    return [federation.RoundGate("leakage/worst/membership", at_most=most)]


client = ClientApp(mods=[FedLeakMod(partial(make_observer, side="client"), gates)])


@client.train()
def train(message: Message, context: Context) -> Message:
    """A round of one client, in a loop of its own."""
    model = make_model(context).train()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
    number = int(context.node_config["partition-id"])
    clients = int(context.node_config["num-partitions"])
    data = client_rows(context, number, clients)
    round_ = int(message.content["config"]["server-round"])
    order = torch.Generator().manual_seed(1000 * round_ + number)
    stepping = OPTIMIZER([p for p in model.parameters() if p.requires_grad])
    for _ in range(int(context.run_config["local-steps"])):
        chosen = torch.randperm(len(data), generator=order)[:ROWS].tolist()
        batch = collate([data[i] for i in chosen])
        federation.trained_on(batch)  # the mod asks what was trained on
        stepping.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        stepping.step()
    metrics = MetricRecord({"num-examples": len(data), "train-loss": float(loss.detach())})
    arrays = ArrayRecord(federation.trained_state(model))
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Federated averaging; the server looks at what arrives, and does not hold the texts."""
    nodes = len(list(grid.get_node_ids()))
    observer = make_observer(context, side="server")
    average = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy = Observed(average, observer)
    result = strategy.start(
        grid,
        ArrayRecord(federation.trained_state(make_model(context))),
        num_rounds=int(context.run_config["rounds"]),
        timeout=600,
    )
    observer.end()
    out = Path(context.run_config["out"])
    # Observed keeps the last model where every client withholds; a bare strategy's would be empty.
    save_file(result.arrays.to_torch_state_dict(), out / "adapter.safetensors")
    (out / "done.txt").write_text("finished\n")
