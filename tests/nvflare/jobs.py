"""What a job of the tests holds: makers that a job names by a path, and a job in one process."""

import copy
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.app_constant import AppConstants

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.federation import ClientDP, RoundObserver, trained_on, trained_state
from lightning_fedleak.federation.nvflare import FedLeakFilter
from tests.federation.rounds import SGD, batches, model, round_settings, train

PATH = f"{__name__}."
FOLDER = "FEDLEAK_NVFLARE_TESTS"


def make_observer(site: str, **settings) -> RoundObserver:
    arguments, rare = round_settings({"attacks": [BagOfWords()]} | settings)
    folder = Path(os.environ[FOLDER]) / site
    return RoundObserver(copy.deepcopy(model()), SGD, 2, folder=folder, settings=rare, **arguments)


def local_dp(site: str) -> ClientDP:
    return account(site, trust="local")


def local_dp_without_ledger(site: str) -> ClientDP:
    return ClientDP(0.5, 1.0, clients=2, target_delta=1e-5, trust="local")


def shared_dp(site: str) -> ClientDP:
    return account(site, trust="secure_aggregation")


def central_dp(site: str) -> ClientDP:
    return account(site, trust="central", clients=int(os.environ.get("FEDLEAK_CLIENTS", "2")))


def account(site: str, **settings) -> ClientDP:
    return ClientDP(
        0.5, 1.0, **{"clients": 2, "target_delta": 1e-5, "accountant": "rdp"} | settings,
        ledger=Path(os.environ[FOLDER]) / f"{site}.ledger",
    )  # fmt: skip


def data_of(site: str, round_: int) -> list[dict[str, torch.Tensor]]:
    return batches(100 * round_ + int(site.rpartition("-")[2]), 2)


class Engine:
    """What components of one site ask of NVFlare's engine."""

    def __init__(self, name: str, folder: Path, handlers, clients=()) -> None:
        self.name, self.folder, self.handlers, self.panics = name, folder, list(handlers), []
        self.runner = SimpleNamespace(task_result_filters={})
        self._clients = [Client(client, client) for client in clients]
        self._contexts = FLContextManager(self, name, "job", {}, {})

    def new_context(self):
        context = self._contexts.new_context()
        context.set_prop(FLContextKey.RUNNER, self.runner, private=True, sticky=False)
        return context

    def get_workspace(self):
        return SimpleNamespace(get_run_dir=lambda job: str(self.folder / job))

    def get_clients(self):
        return self._clients

    def persist_components(self, context, completed) -> None:
        pass

    def fire_event(self, event, context) -> None:
        if event == EventType.FATAL_SYSTEM_ERROR:
            self.panics.append(context.get_prop(FLContextKey.EVENT_DATA))
        for handler in self.handlers:
            handler.handle_event(event, context)


class Site:
    """A client with a filter, in this process, as NVFlare's runner drives it."""

    def __init__(self, name: str, folder: Path, filter_: FedLeakFilter, tasks=("train",)) -> None:
        self.name, self.filter, self.trains = name, filter_, train
        self.engine = Engine(name, folder / name, [filter_])
        table = {f"{task}{FilterKey.DELIMITER}{FilterKey.OUT}": [filter_] for task in tasks}
        self.engine.runner.task_result_filters = table
        self.kind, self.weight, self.meta = DataKind.WEIGHTS, 2, {}

    def begin(self) -> None:
        self.fire(EventType.ABOUT_TO_START_RUN)

    def end(self) -> None:
        self.fire(EventType.END_RUN)

    def fire(self, event: str, **props) -> object:
        context = self.engine.new_context()
        for key, value in props.items():
            context.set_prop(key, value, private=True, sticky=False)
        self.engine.fire_event(event, context)
        return context

    def answer(self, task: Shareable, name: str = "train", result: Shareable | None = None):
        """Run a task as the client's runner does, and return the reply."""
        context = self.fire(
            EventType.BEFORE_TASK_EXECUTION,
            **{FLContextKey.TASK_NAME: name, FLContextKey.TASK_ID: "1"},
            **{FLContextKey.TASK_DATA: task},
        )
        reply = self.filter.process(self.train(task) if result is None else result, context)
        reply.set_cookie_jar(task.get_cookie_jar())
        reply.set_peer_props({ReservedKey.IDENTITY_NAME: self.name})
        return reply

    def train(self, task: Shareable) -> Shareable:
        round_ = int(task.get_header(AppConstants.CURRENT_ROUND))
        sent = {n: torch.as_tensor(v) for n, v in from_shareable(task).data.items()}
        net = model()
        net.load_state_dict(sent, strict=False)
        data = data_of(self.name, round_)
        try:
            state = self.trains(net, data)
        except RuntimeError:
            return make_reply(ReturnCode.EXECUTION_EXCEPTION)
        for batch in data:
            trained_on(batch)
        if self.kind == DataKind.WEIGHT_DIFF:
            state = {n: t - sent[n] for n, t in state.items()}
        meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: self.weight, **self.meta}
        reply = DXO(self.kind, arrays(state), meta).to_shareable()
        reply.set_header(AppConstants.CURRENT_ROUND, round_)
        return reply


def arrays(state) -> dict[str, np.ndarray]:
    return {n: t.numpy().copy() for n, t in state.items()}


def task_of(round_: int = 0, state=None, kind=DataKind.WEIGHTS) -> Shareable:
    task = DXO(kind, arrays(trained_state(model()) if state is None else state)).to_shareable()
    task.set_header(AppConstants.CURRENT_ROUND, round_)
    return task


def run(workflow, sites: list[Site], folder: Path, *components) -> Engine:
    """Run NVFlare's own workflow with its sites one after the other, and return its engine."""
    handlers = [x for x in (getattr(workflow, "aggregator", None),) if x is not None]
    engine = Engine("server", folder, [*handlers, *components], [site.name for site in sites])
    context = engine.new_context()
    workflow.fl_ctx, workflow.engine, workflow._engine = context, engine, engine
    by_name = {site.name: site for site in sites}

    def arrives(result: Shareable) -> None:
        context.set_prop(FLContextKey.TASK_RESULT, result, private=True, sticky=False)
        engine.fire_event(EventType.AFTER_TASK_RESULT_FILTER, context)

    def broadcast(task: Task, fl_ctx, targets=None, **_) -> None:
        names = [t.name if isinstance(t, Client) else t for t in targets or by_name]
        for name in names:
            client_task = ClientTask(task=task, client=Client(name, name))
            task.before_task_sent_cb(client_task, context)
            # Each site is a process: its own environment and hand-over.
            site = by_name[name]
            site.begin()
            client_task.result = site.answer(copy.deepcopy(task.data))
            site.end()
            arrives(client_task.result)
            task.result_received_cb(client_task, context)

    workflow.broadcast = broadcast
    workflow.broadcast_and_wait = broadcast
    workflow.get_num_standing_tasks = lambda: 0
    engine.fire_event(EventType.ABOUT_TO_START_RUN, context)
    engine.fire_event(EventType.START_RUN, context)
    workflow.control_flow(Signal(), context)
    engine.fire_event(EventType.END_RUN, context)
    return engine
