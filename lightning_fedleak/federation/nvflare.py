"""Integration with NVFlare: a filter for client results, and private federated averaging.

NVFlare sends a task with a model to each client (a *site*), runs the client's training script, and
passes the result through filters before it leaves. :class:`FedLeakFilter` is such a filter.
:class:`PrivateFedAvg` is a workflow of the server, which samples clients and averages updates.

No other module imports NVFlare. It needs ``pip install lightning-fedleak[nvflare]``.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_fedleak import federation
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.engine import reason
from lightning_fedleak.extras import require_package
from lightning_fedleak.federation.updates import State, array_in, convert_like, read_state
from lightning_fedleak.private_files import read_secret, write_secret
from lightning_fedleak.validate import check_choice

with require_package("nvflare", "lightning_fedleak.federation.nvflare needs NVFlare"):
    from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
    from nvflare.apis.event_type import EventType
    from nvflare.apis.filter import Filter
    from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable, make_reply
    from nvflare.apis.utils.task_utils import get_filters
    from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
    from nvflare.app_common.app_constant import AppConstants
    from nvflare.app_common.workflows.fedavg import FedAvg
    from nvflare.job_config.defs import FilterType
    from nvflare.private.privacy_manager import Scope

Withheld = Literal["zero", "error"]

TASKS = ("train", "validate", "submit_model")
"""The tasks of NVFlare's workflows whose results depend on the client's data."""
# The kinds of data that are a model: full weights, or the difference of two models.
_MODEL_KINDS = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
# The file in a run's folder with the client's state, for its next process.
_MEMORY_FILE = "fedleak.json"
_PACKAGE = __name__.partition(".")[0]


class LoadedModels(Filter):  # type: ignore[misc, unused-ignore]
    """A filter that returns task data unchanged. :class:`FedLeakFilter` requires it.

    If the training script runs in its own process, NVFlare gives the client only references to the
    model that was sent, unless the client filters the task data. If this filter is installed,
    NVFlare loads the model before it calls the filters.
    """

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the task data unchanged."""
        return shareable


class FedLeakFilter(Filter):  # type: ignore[misc, unused-ignore]
    """A filter of task results that attacks, gates and defends an update before it leaves.

    ::

        job.to("watch.py", "site-1")  # has a function make_observer(site)
        job.to(FedLeakFilter("watch.make_observer", [{"metric": "leakage/worst/words",
                                                      "at_most": 0.3}]), "site-1")

    It accepts full models, adapters, and differences of either, in numpy or torch. Make it the last
    of a client's filters, so that no later filter changes the update after it was attacked. It
    stores the received model when the task begins, after the filters of task data.

    The training script reports its batches: with ``TrainedOn()`` among the callbacks of a Lightning
    Trainer, ``report_batches(trainer)`` for a Trainer of transformers or TRL, or
    :func:`~lightning_fedleak.federation.trained_on` in a loop. NVFlare may run the script in a
    thread or in another process. If it reports no batches, every result of an attack is *unknown*,
    and an unknown result passes no gate.

    By default a **withheld update** is replaced by zero, that is, by the model that was sent or by
    a zero difference, because a workflow may abort on a client error or on a round without results.
    The zero enters the mean with this client's weight, which the log states (but not under secure
    aggregation). ``withheld="error"`` is for workflows with ``ignore_result_error=True``, or if
    ``min_clients`` is reached without this client: the mean is then taken over the remaining
    clients. Metrics and other values that accompany a withheld model are not sent.

    Under a ``dp`` whose noise the client adds, every result has the same form: the model with
    noise, and a weight of 1. A result that cannot be parsed, or an error of the training script
    that NVFlare passes to its filters, is replaced by zero plus that noise. Results of other tasks
    are refused. The job is aborted if its results do not pass through this filter.

    Args:
        observer: The ``"module.function"`` in the job's own code that gets a client's name and
            returns the client's :class:`~lightning_fedleak.federation.RoundObserver`.
        gates: The arguments of :class:`~lightning_fedleak.federation.RoundGate`, one mapping for
            each gate.
        dp: The ``"module.function"`` that gets a client's name and returns the client's own
            :class:`~lightning_fedleak.federation.ClientDP`, with a ledger.
        withheld: The answer in place of a withheld update, ``"zero"`` or ``"error"``, see above.
        secure_aggregation: Whether a later filter encrypts the result, so that the server sees only
            the sum of all clients.
    """

    def __init__(
        self,
        observer: str,
        gates: Sequence[Mapping[str, object]] = (),
        dp: str = "",
        withheld: Withheld = "zero",
        secure_aggregation: bool = False,
    ) -> None:
        super().__init__()
        check_choice("withheld", withheld, get_args(Withheld))
        _make_gates(gates)
        # NVFlare writes attributes named like the arguments into the job; plain values only.
        self.observer = observer
        self.gates = [dict(settings) for settings in gates]
        self.dp = dp
        self.withheld: Withheld = withheld
        self.secure_aggregation = secure_aggregation
        self._outgoing: federation.OutgoingUpdates | None = None
        self._hand_over: federation.HandOver | None = None
        self._memory_file: Path | None = None
        # Of the current task: its id, the round, the model that was sent, and the start time.
        self._sent: tuple[str, int | None, State, float] | None = None
        self._data_kind = DataKind.WEIGHTS  # of the newest result: a model, or a difference
        self._sent_arrays: Mapping[str, object] = {}
        self._lock = threading.Lock()

    def add_to_fed_job(
        self,
        job: Any,
        ctx: Any,
        *,
        tasks: Sequence[str] = TASKS,
        filter_type: str = FilterType.TASK_RESULT,
    ) -> None:
        """Add the filter and :class:`LoadedModels` to a client of a job. NVFlare calls this method.

        ``filter_type`` is ignored: this is a filter of task results.
        """
        _exclude_package(job)
        job.add_filter(LoadedModels(), FilterType.TASK_DATA, list(tasks), ctx)
        job.add_filter(self, FilterType.TASK_RESULT, list(tasks), ctx)

    # ---- events -----------------------------------------------------------------------------

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Set up at the start of the run, store each task's model, and close at the end."""
        if event_type == EventType.ABOUT_TO_START_RUN:
            try:
                self._set_up(fl_ctx)
            except Exception as error:
                self.system_panic(f"FedLeakFilter: {error}", fl_ctx)
                raise
        elif event_type == EventType.BEFORE_TASK_EXECUTION:
            self._store_sent(fl_ctx)
        elif event_type == EventType.END_RUN and self._outgoing is not None:
            if self._hand_over is not None:
                self._hand_over.close()
            self._outgoing.observer.end()

    def _set_up(self, fl_ctx: FLContext) -> None:
        """Make the observer, the gates and the ClientDP of this site, and receive its reports."""
        site, job = fl_ctx.get_identity_name(), fl_ctx.get_job_id()
        observer: federation.RoundObserver = _call_job_code(self.observer, site)
        observer.federation = observer.federation or f"nvflare-{job}"
        dp: federation.ClientDP | None = _call_job_code(self.dp, site) if self.dp else None
        if dp is not None and dp.trust != "central":
            dp.check_client(
                masked=self.secure_aggregation,
                mend="put NVFlare's encryption filter after this one and set "
                "FedLeakFilter(secure_aggregation=True)",
            )
            self.log_warning(
                fl_ctx,
                f"FedLeakFilter: {site} has a ClientDP and sends a weight of 1 and no metrics: "
                "give all sites a ClientDP, else no metrics are averaged, and others weigh more",
            )
        self._outgoing = federation.OutgoingUpdates(
            observer,
            _make_gates(self.gates),
            dp,
            client=site,
            secure_aggregation=self.secure_aggregation,
            zero=self.withheld == "zero",
        )
        folder = Path(fl_ctx.get_engine().get_workspace().get_run_dir(job))
        memory = self._memory_file = folder / _MEMORY_FILE
        self._outgoing.recall(read_secret(memory, "the memory") if memory.exists() else None)
        self._hand_over = federation.HandOver(folder / "fedleak_local_steps")
        self._hand_over.open()

    def _store_sent(self, fl_ctx: FLContext) -> None:
        """Store the model that a task sends. Abort the job if its result would miss the noise."""
        self._sent = None
        task, runner = fl_ctx.get_prop(FLContextKey.TASK_NAME), fl_ctx.get_prop(FLContextKey.RUNNER)
        table, chain = runner.task_result_filters, Scope.TASK_RESULT_FILTERS_NAME
        if self not in get_filters(chain, fl_ctx, table, task, FilterKey.OUT):
            problem = f"results of task '{task}' do not pass FedLeakFilter: pass the task in tasks="
            if self._adds_noise:
                self.system_panic(f"{problem}, so that the ClientDP covers them", fl_ctx)
            self.log_warning(fl_ctx, f"{problem}. They are sent unchanged and unobserved")
            return
        shareable = fl_ctx.get_prop(FLContextKey.TASK_DATA)
        sent = _model_of(shareable)
        if sent is None or self._outgoing is None:
            return
        assert self._hand_over is not None
        self._hand_over.take()  # discards the batches of a task that failed
        model_state = self._outgoing.observer.model.state_dict()
        # The mean over clients may have another dtype than the model that the client trains.
        state = {
            n: t.to(model_state[n].dtype if n in model_state else t.dtype, copy=True)
            for n, t in read_state(sent.data).items()
        }
        self._sent_arrays = sent.data
        round_ = shareable.get_header(AppConstants.CURRENT_ROUND)
        self._sent = fl_ctx.get_prop(FLContextKey.TASK_ID), round_, state, time.perf_counter()

    @property
    def _adds_noise(self) -> bool:
        """Whether this client adds the noise of a ClientDP."""
        return self._outgoing is not None and self._outgoing.dp is not None

    # ---- results ----------------------------------------------------------------------------

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result that may leave. If this raises, NVFlare sends an error instead.

        Raises:
            UpdateError: The model that was sent does not fit the observer's model.
            BudgetSpent: One more release would cost more than the client's budget.
        """
        with self._lock:
            assert self._outgoing is not None, "the job was not set up; see its log"
            task = fl_ctx.get_prop(FLContextKey.TASK_NAME)
            sent, self._sent = self._sent, None
            if task != AppConstants.TASK_TRAIN:
                return self._answer_non_training(task, shareable, fl_ctx)
            if sent is None or sent[0] != fl_ctx.get_prop(FLContextKey.TASK_ID) or sent[1] is None:
                return self._refuse(
                    fl_ctx,
                    "the server's model or the round number of this task is unknown: send a "
                    f"model and the header '{AppConstants.CURRENT_ROUND}', and pass LoadedModels",
                )
            reply = self._answer_training(shareable, fl_ctx, int(sent[1]), sent[2], sent[3])
            assert self._memory_file is not None
            write_secret(self._memory_file, self._outgoing.memory(), replace=True)
            return reply

    def _answer_non_training(self, task: str, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Return the result of a task that trains nothing, or an error instead."""
        result = _dxo_of(shareable)
        is_metrics = result is not None and result.data_kind == DataKind.METRICS
        if (code := shareable.get_return_code()) != ReturnCode.OK:
            return make_reply(code)  # without what else it holds, which may be a model
        if is_metrics and not self._adds_noise:
            return shareable
        return self._refuse(
            fl_ctx,
            f"the result of task '{task}' is refused: it is not a training update, or it would "
            "leave without noise",
        )

    def _refuse(self, fl_ctx: FLContext, cause: str) -> Shareable:
        """Log the cause, and return an error as the reply, which does not state the cause."""
        self.log_warning(fl_ctx, f"FedLeakFilter: {cause}")
        return make_reply(ReturnCode.EXECUTION_RESULT_ERROR)

    def _answer_training(
        self, shareable: Shareable, fl_ctx: FLContext, round_: int, sent: State, start: float
    ) -> Shareable:
        """Return the reply to a training task."""
        assert self._outgoing is not None
        assert self._hand_over is not None
        outgoing, hand_over = self._outgoing, self._hand_over
        code = shareable.get_return_code()
        result = _model_of(shareable)
        meta = {} if result is None else dict(result.meta)
        if result is not None:
            self._data_kind = result.data_kind

        def train() -> tuple[State, Sequence[Any]]:
            if result is None or code != ReturnCode.OK:
                raise federation.UpdateError(f"the training script returned no model ({code})")
            if (outgoing.gates or outgoing.dp) and (name := array_in(meta)):
                raise federation.UpdateError(
                    f"'{name}' is an array that no attack covers: remove it from the meta data"
                )
            before = sent if result.data_kind == DataKind.WEIGHT_DIFF else None
            return read_state(result.data, before), hand_over.take()

        leaving = outgoing.answer(round_, sent, train, start)
        if code != ReturnCode.OK and outgoing.dp is None:
            return make_reply(code)  # without what else it holds, which may be a model
        if leaving.state is None:
            return self._refuse(fl_ctx, f"round {round_}: {leaving.answer}")
        if leaving.withheld or outgoing.dp or outgoing.compression:
            shareable = self._reply(shareable, leaving, sent, meta, fl_ctx)
        return shareable

    def _reply(
        self,
        shareable: Shareable,
        leaving: federation.Leaving,
        sent: State,
        meta: dict[str, object],
        fl_ctx: FLContext,
    ) -> Shareable:
        """Return a result with the state that leaves, in the form of the training's result."""
        assert leaving.state is not None
        data: Mapping[str, Tensor] = leaving.state
        if self._data_kind == DataKind.WEIGHT_DIFF:
            data = {n: t - sent[n].to(t.dtype) for n, t in leaving.state.items()}
        reply = shareable
        if leaving.withheld or self._adds_noise:
            weight = 1 if self._adds_noise else meta.get(MetaKey.NUM_STEPS_CURRENT_ROUND, 1)
            meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: weight}
            reply = Shareable()  # a new message, so that nothing else of the result leaves
            for header in (AppConstants.CURRENT_ROUND, AppConstants.NUM_ROUNDS):
                if (value := shareable.get_header(header)) is not None:
                    reply.set_header(header, value)
            if leaving.withheld and not self._adds_noise and not self.secure_aggregation:
                self.log_warning(
                    fl_ctx, f"zero is sent with weight {weight} ({MetaKey.NUM_STEPS_CURRENT_ROUND})"
                )
        result = DXO(self._data_kind, convert_like(data, self._sent_arrays), meta)
        result.add_filter_history(type(self).__name__)
        return result.update_shareable(reply)


class PrivateFedAvg(FedAvg):  # type: ignore[misc, unused-ignore]
    """NVFlare's ``FedAvg`` on a trusted server, with a :class:`ClientDP` of ``trust="central"``.

    It samples clients according to the :class:`ClientDP` and publishes the noisy mean of their
    updates. A client's update counts as zero if the client fails, withholds it, has disconnected,
    or returns an unreadable result. All clients have the same weight. Metrics of training are not
    published, because no epsilon covers them. The clients are the sites that are connected in the
    first round. Their number must equal ``clients`` of the :class:`ClientDP`.

    Args:
        dp: The ``"module.function"`` in the job's own code that returns the
            :class:`~lightning_fedleak.federation.ClientDP` with ``trust="central"`` and a ledger.
        args: The positional arguments of ``FedAvg``.
        kwargs: The keyword arguments of ``FedAvg``: rounds, the persistor, the task.

    Raises:
        DefenseError: An argument would weight clients, select by their metrics, or replace the
            aggregation.
    """

    def __init__(self, dp: str, *args: Any, **kwargs: Any) -> None:
        unsupported = ("aggregator", "aggregation_weights", "exclude_vars", "stop_cond")
        passed = [name for name in unsupported if kwargs.get(name)]
        if passed or kwargs.get("ignore_result_error") is False:
            raise DefenseError(
                f"PrivateFedAvg({(passed or ['ignore_result_error'])[0]}=...) has no guarantee: "
                "it needs equal weights, noise on all that is trained, and zero for failed clients"
            )
        super().__init__(*args, **{**kwargs, "ignore_result_error": True})
        self.dp = dp
        self._client_dp: federation.ClientDP | None = None
        self._sites: list[str] = []
        self._sampled_clients: list[str] = []
        self._sent_arrays: Mapping[str, object] = {}
        self._sent_state: State = {}
        self._update_sum: federation.UpdateSum[str] | None = None  # of the current round

    def add_to_fed_job(self, job: Any, ctx: Any) -> None:
        """Add the workflow to a job. NVFlare calls this method."""
        _exclude_package(job)
        job.add_controller(self, ctx)

    def sample_clients(self, num_clients: int | None = None) -> list[str]:
        """Sample the clients of a round, and return those of them that are connected.

        Raises:
            DefenseError: The ClientDP is not for this server, or for another number of clients.
            BudgetSpent: The ClientDP allows no more releases.
        """
        if self._client_dp is None:
            self._client_dp = _call_job_code(self.dp, "server")
            self._client_dp.check_server("PrivateFedAvg")
        self._client_dp.check_affords_another()
        connected = sorted(client.name for client in self.engine.get_clients())
        self._sites = self._sites or connected
        self._sampled_clients = self._client_dp.drawn(self._sites)
        return [name for name in self._sampled_clients if name in connected]

    def send_model(self, *args: Any, **kwargs: Any) -> None:
        """Send the model to the clients that were sampled, if there are any."""
        self._sent_arrays = dict(kwargs["data"].params)
        self._sent_state = read_state(self._sent_arrays)
        assert self._client_dp is not None
        trained = {n: t for n, t in self._sent_state.items() if t.is_floating_point()}
        self._update_sum = self._client_dp.begin(self._sampled_clients, trained)
        if kwargs["targets"]:
            super().send_model(*args, **kwargs)

    def _aggregate_one_result(self, result: FLModel) -> bool:
        """Add one client's update to the sum of the round."""
        name, update_sum = result.meta["client_name"], self._update_sum
        if update_sum is None or name not in self._sampled_clients:
            return False
        try:
            before = self._sent_state if result.params_type == ParamsType.DIFF else None
            state = read_state(result.params or {}, before)
            update_sum.add_returned(name, self._sent_state, state)
        except Exception as error:  # a malformed message may raise any error
            self.info(f"a result of client {name} is ignored: {reason(error)}")
        self._received_count += 1
        return True

    def _get_aggregated_result(self) -> FLModel:
        """Return the next model, which counts as one release, without metrics."""
        assert self._update_sum is not None
        release, self._update_sum = self._update_sum.end(), None
        self.info(
            f"{len(release.zeros)} of {len(self._sampled_clients)} sampled clients count as zero"
        )
        params = convert_like(federation.moved(self._sent_state, release.update), self._sent_arrays)
        return FLModel(params=params, params_type=ParamsType.FULL, current_round=self.current_round)


def _exclude_package(job: Any) -> None:
    """Make NVFlare import the installed package instead of copying it into a job."""
    packages = list(job.job.app_packages)
    job.set_app_packages([*packages, *({_PACKAGE} - set(packages))])


def _call_job_code(path: str, site: str) -> Any:
    """Return what a function of the job's own code returns for a site."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)(site)


def _make_gates(settings: Sequence[Mapping[str, Any]]) -> list[federation.RoundGate]:
    """Return the gates with the given arguments of :class:`RoundGate`."""
    return [federation.RoundGate(**gate) for gate in settings]


def _dxo_of(shareable: Shareable | None) -> DXO | None:
    """Return the content of a message; None if it has no readable content."""
    try:
        return None if shareable is None else from_shareable(shareable)
    except ValueError:
        return None


def _model_of(shareable: Shareable | None) -> DXO | None:
    """Return the model in a message, or the difference of two models; None if it has neither."""
    content = _dxo_of(shareable)
    return content if content is not None and content.data_kind in _MODEL_KINDS else None
