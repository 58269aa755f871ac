"""Two clients under a trusted server; the second returns NaN, and is killed in a later round."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from lightning_fedleak.federation import ClientDP, trained_state
from lightning_fedleak.federation.flower import FedLeakMod, Observed, PrivateMean
from tests.federation.rounds import model
from tests.flower.apps import observer, train

NAN, KILLED = 1, 2
"""Rounds in which the second client does so."""


def out(context: Context) -> Path:
    return Path(context.run_config["out"])


def watching(context: Context):
    return observer(out(context) / f"client_{context.node_config['partition-id']}_{os.getpid()}")


client = ClientApp(mods=[FedLeakMod(watching)])


@client.train()
def trains(message: Message, context: Context) -> Message:
    round_ = int(message.content["config"]["server-round"])
    second = int(context.node_config["partition-id"]) == 1
    if second and round_ == KILLED:
        (out(context) / "kill_me").write_text("now\n")
        time.sleep(600)
    reply = train(message, context)
    if second and round_ == NAN:
        state = reply.content["arrays"].to_torch_state_dict()
        reply.content["arrays"] = ArrayRecord(
            {n: torch.full_like(t, float("nan")) for n, t in state.items()}
        )
    return reply


class Patient:
    """A grid that waits for the first reply, and so many seconds more for the others."""

    def __init__(self, grid: Grid, seconds: float) -> None:
        self.grid = grid
        self.seconds = seconds

    def __getattr__(self, name: str):
        return getattr(self.grid, name)

    def send_and_receive(self, messages, *, timeout=None):
        waiting = set(self.grid.push_messages(messages))
        replies, end = [], time.monotonic() + timeout
        while waiting and time.monotonic() < end:
            found = list(self.grid.pull_messages(list(waiting)))
            if found and not replies:
                end = min(end, time.monotonic() + self.seconds)
            replies += found
            waiting -= {reply.metadata.reply_to_message_id for reply in found}
            time.sleep(0.2)
        return replies


server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    folder = out(context)
    dp = ClientDP(
        0.5, 1.0, clients=2, target_delta=1e-5, accountant="rdp", ledger=folder / "ledger"
    )
    strategy = Observed(
        PrivateMean(FedAvg(fraction_evaluate=0.0), dp, minutes=2.0),
        observer(folder / "server", side="server"),
    )
    start = ArrayRecord(trained_state(model()))
    if (folder / "model.pt").exists():
        start = ArrayRecord(torch.load(folder / "model.pt"))
    rounds = int(context.run_config["rounds"])
    result = strategy.start(Patient(grid, 6.0), start, num_rounds=rounds, timeout=300)
    torch.save(result.arrays.to_torch_state_dict(), folder / "model.pt")
    strategy.observer.end()
    (folder / "done.txt").write_text("finished\n")
