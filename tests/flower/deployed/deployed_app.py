"""Two clients under a trusted server; what they return, round by round, is in FAULTS."""

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
from tests.flower.apps import faulty, observer, train

FAULTS = {
    "first": {(1, 1): "nan", (0, 2): "last", (1, 2): "killed"},
    "second": {(0, 1): "shapes", (1, 1): "other", (0, 2): "nothing"},
}
"""By run, then by client and round."""
FULL = [("second", 0)]
"""Run and client whose disk is full."""


def out(context: Context) -> Path:
    return Path(context.run_config["out"])


def watching(context: Context):
    number = context.node_config["partition-id"]
    folder = out(context) / f"client_{number}_{os.getpid()}"
    if (context.run_config["run"], number) in FULL and not folder.exists():
        folder.mkdir()
        for name in ("leakage.jsonl", "run.jsonl"):
            (folder / name).symlink_to("/dev/full")
    return observer(folder)


def fault_of(message: Message, context: Context) -> str:
    round_ = int(message.content["config"]["server-round"])
    number = int(context.node_config["partition-id"])
    return FAULTS[context.run_config["run"]].get((number, round_), "")


def malicious(message: Message, context: Context, call_next) -> Message:
    """What no mod of the client's own holds back."""
    reply, fault = call_next(message, context), fault_of(message, context)
    path = out(context) / f"returned_{context.node_config['partition-id']}.pt"
    if fault == "last":
        reply.content["arrays"] = ArrayRecord(torch.load(path))
    elif fault == "nothing":
        del reply.content["arrays"]
    elif not reply.has_error():
        state = reply.content["arrays"].to_torch_state_dict()
        torch.save(state, path)
        reply.content["arrays"] = ArrayRecord(faulty(fault, state))
    return reply


client = ClientApp(mods=[malicious, FedLeakMod(watching)])


@client.train()
def trains(message: Message, context: Context) -> Message:
    fault = fault_of(message, context)
    if fault == "killed":
        (out(context) / "kill_me").write_text("now\n")
        time.sleep(600)
    reply = train(message, context)
    if fault == "nan":
        state = reply.content["arrays"].to_torch_state_dict()
        reply.content["arrays"] = ArrayRecord(faulty(fault, state))
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
            outcome = list(self.grid.pull_messages(list(waiting)))
            if outcome and not replies:
                end = min(end, time.monotonic() + self.seconds)
            replies += outcome
            waiting -= {reply.metadata.reply_to_message_id for reply in outcome}
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
    result = strategy.start(Patient(grid, 6.0), start, num_rounds=2, timeout=300)
    torch.save(result.arrays.to_torch_state_dict(), folder / "model.pt")
    strategy.observer.end()
    (folder / "done.txt").write_text("finished\n")
