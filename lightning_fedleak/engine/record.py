"""Write ``run.jsonl``: the settings of a fit, the cost of its looks, and the spent privacy budget.

The results of attacks are in ``leakage.jsonl`` instead. A *look* is one measurement at a step. The
file also commits to the order of the training rows and to the weights, by hashes, so that others
can check a run later. The fields of its lines are in :mod:`lightning_fedleak.report.records`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import platform
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lightning_fedleak.defenses import Defense, DefenseError, Privacy
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.channels.plans import Plan, plain_settings
from lightning_fedleak.engine.channels.steps import StepChannel
from lightning_fedleak.engine.lineup import Lineup, reads_of
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Series
from lightning_fedleak.engine.run import Run
from lightning_fedleak.private_files import digest_weights, hash_weights, read_secret, write_secret
from lightning_fedleak.report import records

# Packages whose installed versions are recorded, because results may depend on them.
PACKAGES = (
    *("lightning-fedleak", "torch", "lightning", "pytorch-lightning", "transformers", "peft"),
    *("opacus", "torchmetrics", "numpy"),
)
_PER_FIT_FIELDS = (
    *("schema", "run", "kind", "time", "fit", "resumed", "machine", "versions", "settings_hash"),
    *("next_look", "weights"),
)
"""Fields of the first line that differ between fits with the same settings."""
MAX_HASHED_BYTES = 2**30
"""Largest size of the trained, or frozen, weights that are hashed before the first step and at
checkpoints, in bytes: hashing takes 1 to 3 seconds. At the end of a fit there is no limit."""
ROW_KEY = "row_order.key"
"""File next to the logs, of mode 0600, with the key of the commitment to the order of rows."""
_row_order_keys: dict[Path, str] = {}
"""The key of each :data:`ROW_KEY` file of this process, which is written when a fit ends."""
PLANNED = records.BeginLine, records.LookLine, records.PlanLine
"""Kinds of lines that state the step of the next look."""

# Torch's method that returns the next row numbers of a loader, and the commitments that note them.
_original_next_index = getattr(_BaseDataLoaderIter, "_next_index", None)
_active_orders: list[_RowOrder] = []


def _note_next_index(loader: Any) -> Any:
    """Add the rows that a loader takes next to all commitments, and return these rows."""
    rows = _original_next_index(loader)  # type: ignore[misc]
    for order in _active_orders:
        order.add(loader._dataset, rows)
    return rows


def _refer_to(dataset: object) -> Callable[[], object]:
    """Return a function that returns the data set, which is kept alive only if it is a list.

    Plain lists have no weak references.
    """
    try:
        return weakref.ref(dataset)
    except TypeError:
        return lambda: dataset


class _RowOrder:
    """Commit to the numbers of the rows that every ``DataLoader`` of torch takes, batch by batch.

    For each data set it keeps one HMAC with SHA-256 (RFC 2104) of all row numbers. Without the key
    nobody can test a guess of the order against it. Loaders are not disturbed: batches that can be
    iterated over only once are not read, and their data set gets no HMAC.

    Args:
        key: The 32 secret bytes of the HMAC.

    Attributes:
        key: The argument.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._codes: dict[int, tuple[Callable[[], object], hmac.HMAC | None]] = {}
        if _original_next_index is not None:
            _active_orders.append(self)
            _BaseDataLoaderIter._next_index = _note_next_index  # type: ignore[method-assign]

    def add(self, dataset: object, rows: Any) -> None:
        """Add the number of a row, or those of a batch."""
        refer, code = self._codes.get(id(dataset), (None, None))
        if refer is None or refer() is not dataset:  # a new data set may reuse an earlier id
            refer, code = _refer_to(dataset), hmac.new(self.key, digestmod="sha256")
        try:
            if not isinstance(rows, list | tuple | Tensor | np.ndarray | Integral):
                raise TypeError("a stream, or a batch that can be read once")
            numbers = [int(row) for row in ([rows] if isinstance(rows, Integral) else rows)]
            if code is not None:
                code.update(f"{numbers}\n".encode())
        except Exception:  # whatever rows are, the loader goes on with them
            code = None
        self._codes[id(dataset)] = refer, code

    def code_of(self, dataset: object) -> str | None:
        """Return the commitment to the rows of a data set; None if their numbers are not known."""
        refer, code = self._codes.get(id(dataset), (None, None))
        is_same = refer is not None and refer() is dataset
        return code.hexdigest() if is_same and code is not None else None

    def close(self) -> None:
        """Stop adding rows, and restore torch's loaders; may be called twice."""
        if self in _active_orders:
            _active_orders.remove(self)
        if not _active_orders:
            _BaseDataLoaderIter._next_index = _original_next_index  # type: ignore[assignment, method-assign]


class RunRecord:
    """Append the facts of a fit to ``run.jsonl``, the file next to its results.

    The file gets a line when the fit begins (model, training, attacks, defences, gates) and when it
    ends. In between it gets a line for each look (utility, spent budget), each change of these
    values between looks, each decision of a gate, each defence that the first line does not
    describe, each look at another step than planned, and each checkpoint. Only the first of several
    processes writes.

    Args:
        path: The file. Its folder is made when the first line is written.
        run: The id of the fit in the lines of ``leakage.jsonl``.
        warn: Called with the reason if a line cannot be written; the fit goes on.
        facts: The run, whose present defences the first line describes.

    Attributes:
        path, run: The first arguments.
        ended: Whether the last line of the fit is written.
        planned: The step of the next look according to the lines so far; None if they state none.
    """

    def __init__(self, path: Path, run: str, warn: Callable[[str], None], facts: Run) -> None:
        self.path = path
        self.run = run
        self._warn = warn
        self._described_defenses = [*facts.defenses]
        self.ended = False
        self.planned: int | None = None
        self._order: _RowOrder | None = None
        self._note_rows(facts)

    def write_begin(self, run: Run, line: records.BeginLine) -> None:
        """Write the first line of a fit, with a hash of its settings (not of time or machine)."""
        hashes = {kind: self._hashes_of(run, kind) for kind in ("trained", "frozen")}
        digests = {kind: digest_weights(part) for kind, part in hashes.items() if part is not None}
        line = replace(line, weights=digests or None)
        content = records.as_json(line).items()
        settings = {name: value for name, value in content if name not in _PER_FIT_FIELDS}
        text = json.dumps(settings, sort_keys=True)
        self.append(replace(line, settings_hash=hashlib.sha256(text.encode()).hexdigest()))

    def _note_rows(self, run: Run) -> None:
        """Commit to the order of rows, except under DP, where the sampling must stay secret."""
        if run.unit != "step" or accounting(run.defenses):
            return
        path = self.path.parent / ROW_KEY
        key = _row_order_keys.setdefault(path.resolve(), secrets.token_hex(32))
        try:
            key = read_secret(path, "the key")["key"] if path.exists() else key
            self._order = _RowOrder(bytes.fromhex(key))
        except (OSError, ValueError, LookupError, TypeError) as error:
            self._warn(f"the order of rows is not committed to: {path} cannot be read ({error})")

    def _row_order(self, run: Run) -> str | None:
        """Return the commitment to the training rows so far, and write its key."""
        if self._order is None:
            return None
        code = self._order.code_of(getattr(run.training_loader, "dataset", None))
        path = self.path.parent / ROW_KEY
        try:
            if code is not None and not path.exists():
                write_secret(path, {"key": self._order.key.hex()})
        except OSError as error:
            self._warn(f"{path} cannot be written: {error.strerror}")
            return None
        return code

    def close(self) -> None:
        """Stop to record the order of rows; may be called twice."""
        if self._order is not None:
            self._order.close()

    def write_end(self, run: Run, outcome: str) -> None:
        """Write the last line of a fit, with the end of ``leakage.jsonl`` and hashes of weights.

        Args:
            run: The fit.
            outcome: ``"finished"``, or the class of the error that ended the fit.
        """
        self.ended = True
        if self.planned is not None and self.planned < run.step:
            self.append(records.PlanLine(run="", step=run.step))
        is_finished, results = outcome == "finished", self.path.parent / records.RESULTS
        number, head = None, None  # of the lines in the file of results, and the last hash
        try:
            number, head = records.closing_of(results)
        except OSError as error:
            self._warn(f"{results} cannot be read: {error.strerror}")
        self.append(
            records.EndLine(
                run="",
                step=run.step,
                outcome=outcome,
                privacy=spendings(accounting(run.defenses), ended=True),
                results=number,
                results_head=head,
                weights=self._hashes_of(run, "trained", any_size=True) if is_finished else None,
                row_order=self._row_order(run) if is_finished else None,
            )
        )

    def write_new_plan(self, step: int, next_look: int) -> None:
        """Write a line if a look is at another step than earlier lines have stated.

        Args:
            step: The step of this look.
            next_look: The planned step of the next look: ``step`` itself, unless attacks are
                retried.
        """
        if self.planned is None or self.planned == next_look:
            return
        if self.planned <= step or step == next_look:
            self.append(records.PlanLine(run="", step=step, next_look=next_look))

    def add_checkpoint(self, run: Run) -> None:
        """Write a hash of the trained weights of a checkpoint of a fit that goes on."""
        if not self.ended and run.unit == "step":
            hashes = self._hashes_of(run, "trained")
            line = records.CheckpointLine(run="", step=run.step)
            if hashes is not None:
                line = replace(line, weights=digest_weights(hashes), trained=tuple(hashes))
            self.append(line)

    def _hashes_of(self, run: Run, kind: str, *, any_size: bool = False) -> dict[str, str] | None:
        """Return the hashes of the parameters of a kind, by name.

        They are None in a federation, if the parameters are sharded, and of more than
        :data:`MAX_HASHED_BYTES` bytes.

        Args:
            run: The fit.
            kind: ``"trained"`` or ``"frozen"``.
            any_size: Whether to ignore :data:`MAX_HASHED_BYTES`.
        """
        if run.unit != "step" or run.is_sharded:
            return None
        parameters = run.anatomy.root.named_parameters()
        tensors = {n: p for n, p in parameters if p.requires_grad == (kind == "trained")}
        try:
            if any_size or sum(t.nbytes for t in tensors.values()) <= MAX_HASHED_BYTES:
                return hash_weights(tensors)
        except Exception as error:  # such as out of memory, or weights on the meta device
            self._warn(f"weights were not hashed ({type(error).__name__})")
        return None

    def write_new_defenses(self, defenses: Sequence[Defense]) -> None:
        """Write a line for each defence that neither the first line nor a later one describes."""
        for defense in defenses:
            if all(defense is not described for described in self._described_defenses):
                self._described_defenses.append(defense)
                self.append(records.DefenseLine(run="", **vars(defense_facts(defense))))

    def append(self, line: records.RunLine) -> None:
        """Write a line, with the fit's id and the time; a failure is a warning."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            records.append_line(self.path, replace(line, run=self.run, time=now))
            if isinstance(line, PLANNED) and (line.next_look is not None or line.kind == "plan"):
                self.planned = line.next_look
        except OSError as error:
            self._warn(f"{self.path} cannot be written: {error.strerror}")


def facts_of(
    run: Run,
    lineup: Lineup,
    series: Mapping[Series, Channel],
    *,
    training: records.JsonObject,
    gates: Sequence[records.GateFacts],
    options: Options,
    watch: records.JsonObject,
    resumed: records.JsonObject,
) -> records.BeginLine:
    """Return the first line of a fit: all facts that are known before its first step.

    Args:
        run: The fit.
        lineup: The attacks of the fit, calibrated.
        series: The channel of each series, in the order of the logs.
        training: The settings of the training.
        gates: The settings of the gates.
        options: The settings by which the fit is watched.
        watch: Further settings of the integration that watches it.
        resumed: The run id of the fit whose checkpoint it continues, and the releases of that fit's
            defences; empty if it continues none.
    """
    casts = {"mixed_precision": run.policy_text} if run.policy_text else {}
    leaks = {s.attack: channel.leak for s, channel in series.items()}
    plans = list(lineup.plans)
    for channel in dict.fromkeys(series.values()):
        if not isinstance(channel, StepChannel):  # what it reads is always exposed
            plans += [Plan(attack, (), True, None) for attack in channel.attacks]
    by_name = {plan.attack.name: plan for plan in plans}
    shares = {"shares": records.STATED.format(options.shares)} if options.shares else {}
    return records.BeginLine(
        run="",
        resumed=resumed or None,
        versions=versions(),
        machine=_machine(run.device),
        model=_model(run, lineup.trained),
        training={**training, **casts},
        monitor=records.MonitorFacts(
            client=run.client,
            clients=run.processes if run.client == "rank" else 1,
            adversary=tuple(sorted(capability.value for capability in run.assumed)),
            local_steps=options.local_steps,
            stages=tuple(str(stage) for stage in options.stages),
            more={"looks": options.cadence.argument, **shares, **watch},
        ),
        families=tuple({leak.name: leak for leak in leaks.values()}.values()),
        attacks=tuple(
            records.AttackFacts(
                name=name,
                class_name=type(plan.attack).__name__,
                family=leaks[name].name,
                adversary=plan.attack.threat_model.summary,
                needs=tuple(sorted(c.value for c in plan.attack.threat_model.needs)),
                reads=tuple(reads_of(plan, run.anatomy)),
                exposed=plan.exposed,
                config=plan.attack.config(),
            )
            for name, plan in by_name.items()
        ),
        not_played=tuple(
            records.NotPlayed(name=row.attack, family=leaks[row.attack].name, reason=row.why_not)
            for row in lineup.rows
            if row.why_not is not None and row.attack not in by_name
        ),
        unread=lineup.unread,
        defenses=tuple(defense_facts(defense) for defense in run.defenses),
        gates=tuple(gates),
    )


def _machine(device: torch.device) -> records.JsonObject:
    """Return the facts of the machine on which the last bits of a number depend."""
    processor = platform.processor() or platform.machine()
    with suppress(OSError):  # on Linux only this file names the processor's model
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = (line.partition(": ")[2] for line in lines if "model name" in line)
        processor = next(models, processor)
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "processor": processor,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "device": device.type,
        **gpu,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def defense_facts(defense: Defense) -> records.DefenseFacts:
    """Return the description of a defence in the record."""
    return records.DefenseFacts(
        name=defense.name,
        class_name=type(defense).__name__,
        guarantee=defense.guarantee,
        settings=defense.settings(),
    )


def versions() -> dict[str, str]:
    """Return the installed versions of Python and of :data:`PACKAGES`."""
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


def _model(run: Run, trained: Sequence[str]) -> records.ModelFacts:
    """Return the description of the model in the record; ``trained``: names of parameters."""
    anatomy = run.anatomy
    model = anatomy.model
    parameters = dict(anatomy.root.named_parameters())
    configs = (getattr(model, "peft_config", None) or {}).values()
    kinds = (getattr(config, "peft_type", None) or type(config).__name__ for config in configs)
    return records.ModelFacts(
        class_name=type(model).__name__,
        kind=anatomy.kind,
        vocabulary=anatomy.vocab_size,
        parameters=sum(p.numel() for p in parameters.values()),
        trained_parameters=sum(p.numel() for p in parameters.values() if p.requires_grad),
        trained=tuple(trained),
        peft=tuple(sorted(str(getattr(kind, "value", kind)) for kind in kinds)),
        dtype=str(next(iter(parameters.values())).dtype).removeprefix("torch."),
    )


def optimizers_of(optimizers: Sequence[Optimizer]) -> list[dict[str, object]]:
    """Return each optimizer's class, and the settings of plain types of each parameter group."""
    return [
        {"class": type(o).__name__, "groups": [*map(plain_settings, o.param_groups)]}
        for o in optimizers
    ]


# ---- the privacy budget that defences have spent --------------------------------------------


def accounting(defenses: Sequence[Defense]) -> tuple[Defense, ...]:
    """Return the defences that keep a privacy account of their releases."""
    return tuple(d for d in defenses if type(d).privacy is not Defense.privacy)


def privacy_values(defenses: Sequence[Defense]) -> dict[str, float]:
    """Return the privacy budget that defences have spent so far, by log name.

    The names are ``privacy/epsilon``, ``privacy/delta`` and, for noise with a multiplier,
    ``privacy/noise_multiplier``; ``privacy/<defence>/...`` if several defences keep an account. The
    budget covers neither the logged leakage itself nor the decisions of a gate on it.
    """
    values = {
        f"{_root(defense, defenses)}/{name}": getattr(cost, name)
        for defense, cost in _costs(defenses)
        for name in ("epsilon", "delta", "noise_multiplier")
    }
    return {name: float(value) for name, value in values.items() if value is not None}


def privacy_tags(defenses: Sequence[Defense]) -> list[str]:
    """Return the log names of the epsilons of these defences."""
    return [f"{_root(defense, defenses)}/epsilon" for defense in defenses]


def _root(defense: Defense, defenses: Sequence[Defense]) -> str:
    """Return the first part of a defence's log names, with its name if it is one of several."""
    return "privacy" if len(defenses) == 1 else f"privacy/{defense.name}"


def spendings(defenses: Sequence[Defense], *, ended: bool = False) -> tuple[records.Spending, ...]:
    """Return the privacy budget that each defence has spent, and its releases.

    Args:
        defenses: Defences that keep an account.
        ended: Whether the fit has ended, so that the checks that some of them make have results.
    """
    return tuple(
        records.Spending(
            defense=defense.name,
            history=_history(defense),
            sampling=getattr(getattr(defense, "accountant", None), "sampling", None),
            check=getattr(defense, "finding", None) if ended else None,
            **asdict(cost),
        )
        for defense, cost in _costs(defenses)
    )


def _costs(defenses: Sequence[Defense]) -> list[tuple[Defense, Privacy]]:
    """Return the spent budget of each defence that has released something."""
    costs = []
    for defense in defenses:
        with suppress(DefenseError):  # nothing was released yet
            if (cost := defense.privacy) is not None:
                costs.append((defense, cost))
    return costs


def releases_by(defenses: Sequence[Defense]) -> list[dict[str, object]]:
    """Return the releases of each defence with an account, for a checkpoint.

    Their budget is not composed, because that may take a second.
    """
    return [
        {"defense": defense.name, "history": [list(row) for row in history]}
        for defense in defenses
        if (history := _history(defense))
    ]


def _history(defense: Defense) -> tuple[records.Releases, ...]:
    """Return the releases of a defence's accountant; empty if it has none."""
    history = getattr(getattr(defense, "accountant", None), "history", ())
    return tuple(records.Releases(*row) for row in history)
