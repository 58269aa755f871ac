"""The same federation on Flower's simulation: the clients of a round train in workers of Ray."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")  # read when Flower and Ray are imported
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from lightning_fedleak.cli.studies.federation.federation import Federation
from lightning_fedleak.cli.studies.federation.rounds import (
    Closed,
    Server,
    end_recorded,
    release_unwatched,
)
from lightning_fedleak.federation import ClientDP, RoundObserver
from lightning_fedleak.federation.flower import ROUND, WEIGHT, FedLeakMod

_AT_ONCE = 2  # workers of Ray; more need more memory
_RAY = {
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    "init_args": {
        "num_cpus": _AT_ONCE,
        "include_dashboard": False,
        "logging_level": 40,
        "log_to_driver": False,
    },
}
_WAIT_SECONDS = 3600.0  # for the clients of a round; later replies do not count


def simulate(federation: Federation, folder: Path, closed: Closed) -> Server:
    """Train all rounds as :func:`~.rounds.train_in_process` does.

    Raises:
        RuntimeError: the engine ended before the server returned.
    """
    ended: list[Server | Exception] = []
    app = ServerApp()

    @app.main()  # type: ignore[untyped-decorator, unused-ignore]
    def main(grid: Grid, context: Context) -> None:
        try:
            ended.append(_serve(federation, folder, closed, grid))
        except Exception as error:  # the engine's own call would return as if all were well
            ended.append(error)

    with _silence_flower():
        run_simulation(
            app,
            _client_app(replace(federation), folder.resolve()),  # a copy: nothing is cached in it
            num_supernodes=federation.clients,
            backend_config=_RAY,
        )
    if not ended:
        raise RuntimeError("Flower's simulation ended before the server did: see its log above")
    if isinstance(ended[0], Exception):
        raise ended[0]
    return ended[0]


@contextmanager
def _silence_flower() -> Iterator[None]:
    """Silence Flower's notices between the lines of the table; errors are still shown."""
    log = logging.getLogger("flwr")
    level, propagates = log.level, log.propagate
    log.setLevel(logging.ERROR)
    log.propagate = False  # another library may have given the root a handler
    try:
        yield
    finally:
        log.setLevel(level)
        log.propagate = propagates


def _serve(federation: Federation, folder: Path, closed: Closed, grid: Grid) -> Server:
    server = Server(federation, folder)
    closed(0, server, {})
    observer = None
    if federation.attack != "none":
        observer = federation.observer(folder / "server", folder.name)
    with end_recorded(observer):
        nodes = _nodes(grid, federation.clients)
        for round_ in range(1, federation.rounds + 1):
            clients = server.draw_clients()
            config = ConfigRecord({ROUND: round_, "threads": torch.get_num_threads()})
            content = RecordDict({"arrays": ArrayRecord(server.state), "config": config})
            messages = [
                Message(content, dst_node_id=nodes[c], message_type="train") for c in clients
            ]
            replies = {
                reply.metadata.src_node_id: reply
                for reply in grid.send_and_receive(messages, timeout=_WAIT_SECONDS)
            }
            returned: dict[int, dict[str, Tensor] | None] = dict.fromkeys(clients)
            failed: dict[int, str] = {}
            for client in clients:
                reply = replies.get(nodes[client])
                if reply is not None and reply.has_error():
                    failed[client] = reply.error.reason
                elif reply is not None:
                    returned[client] = reply.content["arrays"].to_torch_state_dict()
            silent = server.close(round_, returned, observer)
            closed(round_, server, silent | failed)
    return server


def _nodes(grid: Grid, clients: int) -> dict[int, int]:
    """Return the engine's node of each client's number, which the clients report."""
    while len(nodes := list(grid.get_node_ids())) < clients:
        time.sleep(0.1)
    messages = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in nodes]
    return {
        int(reply.content["client"]["number"]): reply.metadata.src_node_id
        for reply in grid.send_and_receive(messages, timeout=_WAIT_SECONDS)
    }


def _client_app(federation: Federation, folder: Path) -> ClientApp:
    def make_observer(context: Context) -> RoundObserver:
        return federation.observer(folder / f"clients_{os.getpid()}", folder.name)

    def make_account(context: Context) -> ClientDP | None:
        return federation.client_account(folder, _number_of(context))

    mods = []
    if federation.attack != "none":
        mods = [
            FedLeakMod(
                make_observer,
                federation.gates(),
                make_account,
                secure_aggregation=federation.trust == "secure_aggregation",  # which is played here
                uncovered=("query",),  # which is answered with the client's number alone
            )
        ]
    app = ClientApp(mods=mods)
    app.query()(_answer)
    app.train()(partial(_train, federation, folder))
    return app


def _number_of(context: Context) -> int:
    return int(context.node_config["partition-id"])


def _answer(message: Message, context: Context) -> Message:
    number = MetricRecord({"number": _number_of(context)})
    return Message(RecordDict({"client": number}), reply_to=message)


def _train(federation: Federation, folder: Path, message: Message, context: Context) -> Message:
    config = message.content["config"]
    torch.set_num_threads(int(config["threads"]))  # sums of other parts round otherwise
    client = _number_of(context)
    sent = message.content["arrays"].to_torch_state_dict()
    state, _ = federation.train(_model(federation), sent, client, int(config[ROUND]))
    if federation.attack == "none":
        state = release_unwatched(federation.client_account(folder, client), sent, state)
    content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({WEIGHT: 1.0})}
    return Message(RecordDict(content), reply_to=message)


@cache
def _model(federation: Federation) -> nn.Module:
    """Return the worker's model, which gets the weights of every round."""
    return federation.make_model()
