"""LeakageMonitor: attacks as in-training canaries, logged beside the user's own metrics."""

from __future__ import annotations

import difflib
import math
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks.auto import ASSUMED, candidates
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.batches import BatchAdapter
from lightning_fedleak.callbacks.trainer_run import (
    TrainerRun,
    boards_of,
    check_batch_type,
    processes_of,
    resolve_client,
    settings_of,
    training_of,
)
from lightning_fedleak.extras import install
from lightning_fedleak.lightning_packages import EitherCallback
from lightning_fedleak.looks import choice
from lightning_fedleak.looks.cache import CalibrationCache
from lightning_fedleak.looks.cadence import cadence_of
from lightning_fedleak.looks.channels import Games
from lightning_fedleak.looks.channels.base import Channel, Settings, channels_of
from lightning_fedleak.looks.facts import facts_of
from lightning_fedleak.looks.fit import Fit
from lightning_fedleak.looks.log import (
    COLUMNS,
    JsonLines,
    Report,
    RevealFiles,
    RunRecord,
    accounting,
    privacy_tags,
    privacy_values,
    releases_by,
)
from lightning_fedleak.looks.look import Look, Outcome, Series, reason
from lightning_fedleak.looks.plan import (
    check_attacks,
    check_rounds,
    check_texts,
    known_stages,
    warn_of_other_tokenizers,
)
from lightning_fedleak.looks.results import WORST, Results
from lightning_fedleak.looks.tensorboard import add_pages
from lightning_fedleak.records import GateDecision
from lightning_fedleak.snapshots import Stage
from lightning_fedleak.threats import Capability

if TYPE_CHECKING:
    import lightning.pytorch as L
    import pandas as pd

_MOVED = {
    "targets": "targets",
    "held_out": "held_out",
    "window": "window",
    "canary_scale": "scale",
    "canaries": "canaries",
    "score_canaries": "score_canaries",
}
"""Arguments that are the games' now, and their names there."""


_FITS: WeakKeyDictionary[L.Trainer, str] = WeakKeyDictionary()
"""The id of each Trainer's fit that runs: the same for all its monitors."""


class LeakageMonitor(EitherCallback):
    """Attacks what a client would share, during training, and logs how much it gives away.

    Training is not disturbed: parameters, optimizer state, logged losses and random numbers are
    bit-identical to the run without the monitor. An attack that fails is counted in
    ``monitor/failures`` and its metrics read NaN (*unknown*), never 0.

    Examples:
        >>> import lightning as L
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import BagOfWords, LeakageMonitor
        >>> from lightning_fedleak.finetuning import CausalLMFineTuning
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> module = CausalLMFineTuning(GPT2LMHeadModel(config))
        >>> monitor = LeakageMonitor([BagOfWords()], every_n_steps=1)
        >>> trainer = L.Trainer(max_steps=2, callbacks=monitor)
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        >>> trainer.callback_metrics["leakage/bag_of_words/f1"]
        tensor(1.)

    A step that shares nothing (an AMP step that was skipped, a batch without a single target) is
    not looked at; the look moves to the next step, at most 20 times in a row, after which it
    counts as a failure. So does a fit that ends before a look that was due could end.

    An attack that can read nothing *yet* (LoRA's A has no gradient before B has moved, at rate 0
    say) is tried again in the next steps, by itself and whatever ``every_n_steps`` or
    ``max_overhead``, until it has a result: 1000 steps at most. Then, and where the fit ends
    before, it is *unknown*. A try costs a glance at its gradients.

    The first step of each fit is looked at, also where it resumes another. Layers that are frozen
    or unfrozen on the way are followed at the next look.

    Under FSDP2 (``ModelParallelStrategy``) attacks get whole gradients, and for as long as they
    calibrate, refresh or invert texts the whole model, gathered on every process. Membership games
    are refused there.

    **Membership games.** A :class:`~lightning_fedleak.attacks.membership.base.MembershipAttack`
    assumes a server that puts trainable layers of its own into the model, behind the layer it
    reads, and sets dropout to 0. None is put in: at a look the server is asked about sentences of
    the batch and about others, what its layers' gradient would be follows from the step
    (:class:`~lightning_fedleak.looks.channels.MembershipChannel`) and passes through the
    defences.
    ``exposed`` is always 1: no layer of the client's own has to be trained for that, and freezing
    any does not help. Texts are asked for as the model reads them: of a masked language model with
    its masked tokens, which a real server would have to guess. Tokens that the loss does not reach
    are not asked for. Rates are of the last ``window`` looks; accuracy, F1 and advantage are of the
    attack's own decisions, and the threshold of a TPR is fitted on other games than those scored.
    Those of one look alone are in ``look_values`` and in ``leakage.jsonl``.

    **Texts.** An :class:`~lightning_fedleak.attacks.texts.base.InversionAttack` reads the hidden
    states that the user's own forward gives at its layer, as a split model would send them: at
    stage local before, at stage shared behind the defences that rewrite them, dropout included
    (:class:`~lightning_fedleak.looks.channels.TextsChannel`). Its metrics are of
    ``texts`` texts a look; under the attack's ``budget_seconds`` what is not found in time is
    wrong, texts that were not begun do not count, and ``finished`` is below 1.

    **Attacks that choose themselves.** With ``attacks="auto"``, the default, every attack of an
    adversary as ``assume`` says is played that can read what this model, training and strategy
    share. What is played, what is not and why, and what is shared and not tested is printed
    before the first step. Attacks that are not played are *not tested*: they log nothing. One that
    begins to be shared later (a layer that is unfrozen) is played from then on.

    **The worst.** ``leakage/worst/<family>`` is the highest headline of a family's attacks at a
    look (F1 of words, AUC of membership, token accuracy of texts): unknown where one of them is
    unknown, though it applies, or is not played for want of ``public_text`` (unless another is
    certified, or reads all), and where something is trained of which none of them reads anything.
    What is known then is ``leakage/worst/<family>_at_least``.

    Args:
        attacks: the attacks, each with a name of its own, in all monitors of a run (Lightning
            refuses two with the same attacks); or ``"auto"``.
        every_n_steps: look at optimizer steps 0, n, 2n, ... Default with listed attacks: 50.
        max_overhead: look so seldom that looks cost at most this share of the training time.
            Either this or ``every_n_steps``. Default with ``attacks="auto"``: 0.005.
        stages: where to measure: ``"shared"`` (what leaves the client; the default), ``"local"``
            (before the defences), ``"aggregate"`` (after the reduction over clients).
        batch_adapter: turns a batch of your own into a :class:`TokenBatch`; needed only where
            :func:`read_batch` does not know its form.
        reveal: write recovered words, and original and reconstructed texts side by side, to local
            files of mode 0600, never to a logger.
        utility: names among ``trainer.callback_metrics`` to repeat as ``utility/<name>``.
        client: who is a client: ``"rank"`` (each process) or ``"world"`` (all processes are one
            company's; shared is then the reduced gradient). Default: as the strategy says,
            else ``"rank"``.
        local_steps: attack the weight change of so many optimizer steps in place of one gradient
            (FedAvg). One client only.
        head_own_part: attack the head's own part of a tied matrix as well, logged as
            ``leakage_local/<attack>_head_only``: the worst case, which no adversary sees.
        assume: capabilities of the adversary besides seeing what is shared. Default:
            :data:`~lightning_fedleak.threats.HONEST_BUT_CURIOUS` (it knows the model and has
            public text); where a :class:`MembershipAttack` is listed
            :data:`~lightning_fedleak.threats.DISHONEST_SERVER`, which also puts layers of its own
            into the model and holds the texts it asks for. With ``attacks="auto"`` the former
            one, holding texts.
        tokenizer: decodes what ``reveal`` writes; without one it writes token ids. Reads the texts
            of ``public_text``.
        log_dir: where ``leakage.jsonl`` goes; default the logger's folder.
        anatomy: overrides for :func:`find_anatomy` (``model``, ``embedding``, ``head``, ...).
        games: how membership games are played: how many texts are asked for, which are not in the
            batch, over how many looks rates are pooled, canaries of the user's own; see
            :class:`~lightning_fedleak.callbacks.Games`.
        texts: of each client's batch that inversion attacks reconstruct at a look, at most.
        public_text: for ``attacks="auto"``: text like the clients', which attacks are calibrated
            on. Without it a causal model writes some itself.
        look_seconds: with ``attacks="auto"``, attacks of which one look is estimated to take longer
            are not played.
        cache: keep calibrations in the user's cache folder (``FEDLEAK_CACHE``), by model, text and
            settings, for the next fit.
        report: write ``report.html``, ``report.json``, and of differential privacy
            ``report.yaml``, beside the logs when the fit ends, as ``fedleak report`` does; also
            after an error or Ctrl-C.

    Raises:
        ValueError: contradictory or unknown arguments.
    """

    def __init__(
        self,
        attacks: Sequence[Attack] | Attack | Literal["auto"] = "auto",
        every_n_steps: int | None = None,
        max_overhead: float | None = None,
        stages: Sequence[str] = ("shared",),
        batch_adapter: BatchAdapter | None = None,
        reveal: bool = False,
        utility: Sequence[str] = ("train_loss", "val_loss"),
        client: Literal["rank", "world"] | None = None,
        local_steps: int | None = None,
        head_own_part: bool = False,
        assume: Collection[Capability] | None = None,
        tokenizer: Any | None = None,
        log_dir: str | Path | None = None,
        anatomy: Mapping[str, Any] | None = None,
        games: Games | None = None,
        texts: int = 4,
        public_text: TextSource | None = None,
        look_seconds: float = 30.0,
        cache: bool = True,
        report: bool = False,
        **moved: Any,
    ) -> None:
        if moved:
            raise TypeError(_moved(moved))
        self.auto = attacks == "auto"
        self._text_given = public_text not in (None, "sampled")
        if self.auto:
            assume = ASSUMED if assume is None else frozenset(assume)
            attacks = candidates(assume, public_text, tokenizer, rounds=local_steps is not None)
            if every_n_steps is None and max_overhead is None:
                max_overhead = choice.MAX_OVERHEAD
        elif public_text is not None:
            raise ValueError(
                "public_text= is what attacks='auto' calibrates on; give it to the attacks that "
                "you list, AlignedFlatChat(public_text) say"
            )
        if not look_seconds > 0:
            raise ValueError(f"look_seconds must be positive, got {look_seconds!r}")
        self.look_seconds = look_seconds
        self.cache = cache
        self.report = report
        self.attacks = _listed(attacks)
        check_attacks(self.attacks)
        self.cadence = cadence_of(every_n_steps, max_overhead)
        self.stages = known_stages(stages)
        self.batch_adapter = batch_adapter
        self.reveal = reveal
        self.utility = (utility,) if isinstance(utility, str) else tuple(utility)
        if client not in (None, "rank", "world"):
            raise ValueError(f"client must be 'rank' or 'world', got {client!r}")
        self._client_given = client
        check_rounds(local_steps, self.stages, head_own_part=head_own_part)
        self.local_steps = local_steps
        self.head_own_part = head_own_part
        self.games = games or Games()
        self.texts = texts
        settings = Settings(self.stages, local_steps, head_own_part, self.games, texts)
        self._channels = channels_of(self.attacks, settings)
        self._series = _series_of(self.attacks, self._channels, self.stages)
        assumed = frozenset().union(*(c.adversary for c in self._channels if c.attacks))
        self.assume = assumed if assume is None else frozenset(assume)
        self.tokenizer = tokenizer
        self.log_dir = None if log_dir is None else Path(log_dir)
        self._anatomy_overrides = dict(anatomy or {})
        self._results = Results(self._series)
        self._restored: dict[str, Any] = {}
        self._resumed: dict[str, Any] = {}
        self._last: dict[str, Any] = {}
        self._prepared: set[str] = set()
        self._listeners: list[Callable[[L.Trainer], None]] = []
        self._at_end: list[Callable[[L.Trainer], None]] = []
        self._heard: list[str] = []
        self._gates: list[Mapping[str, Any]] = []
        self._ready: list[Callable[[], None]] = []
        self._not_set_up: dict[str, str] = {}
        self._jsonl: JsonLines | None = None
        self._reset()

    def __repr__(self) -> str:
        attacks = "'auto'" if self.auto else f"[{', '.join(a.name for a in self.attacks)}]"
        stages = "" if self.stages == (Stage.SHARED,) else f", stages={[*map(str, self.stages)]}"
        looks = f", looks={self.looks}" if self.looks else ""
        return f"LeakageMonitor({attacks}, {self.cadence.argument}{stages}{looks})"

    def _reset(self) -> None:
        self._fit: Fit | None = None
        self._report: Report | None = None
        self._record: RunRecord | None = None

    # ---- names ------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Distinguishes several monitors of one run in a checkpoint."""
        stages, attacks = ",".join(self.stages), ",".join(a.name for a in self.attacks)
        return f"LeakageMonitor[{stages}: {attacks}]"

    def metric_names(self) -> list[str]:
        """Names of the values that this monitor logs at each look."""
        return ["monitor/failures", "monitor/seconds", *self._results.names()]

    @property
    def latest(self) -> dict[str, float]:
        """The newest value by log name; NaN is unknown. Empty before the first look."""
        return self._results.latest

    @property
    def look_values(self) -> dict[str, float]:
        """The values of the newest look alone, by log name."""
        return self._results.look_values

    @property
    def pending(self) -> frozenset[str]:
        """Log names that have no value at the newest look, and will have one later."""
        return self._results.pending

    @property
    def looks(self) -> int:
        """Looks finished."""
        return self._results.looks

    @property
    def processor_seconds(self) -> float:
        """Processor time of all looks of this fit so far, all threads; 0 outside of a fit."""
        return 0.0 if self._fit is None else self._fit.processor_seconds

    @property
    def failures(self) -> int:
        """Results that are unknown."""
        return self._results.failures

    @property
    def last_step(self) -> int:
        """Optimizer step of the newest values."""
        return self._results.last_step

    def to_dataframe(self) -> pd.DataFrame:
        """What the newest fit has measured so far, one row for each look, attack and metric.

        It is read from ``leakage.jsonl``, which the first process writes: on others it is empty.

        Returns:
            A table of pandas with the columns ``step``, ``stage``, ``client``, ``attack``, ``n``
            (what was counted), ``exposed``, ``metric``, ``value``, ``low`` and ``high`` (NaN where
            unknown) and ``unknown`` (why). An attack that is not played has one row without a
            metric.

        Raises:
            ImportError: pandas is not installed.
            RuntimeError: no fit has begun.
            OSError: its ``leakage.jsonl`` is gone.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError(
                f"to_dataframe() needs pandas: {install('datasets')} brings it, as does "
                "pip install pandas"
            ) from error
        if self._jsonl is None:
            raise RuntimeError("to_dataframe() tells of a fit: call trainer.fit(...) first")
        return pd.DataFrame(self._jsonl.rows(), columns=list(COLUMNS))

    def canary_scores(self, attack: str | None = None) -> Tensor:
        """(m,) one score for each of ``canaries=``, for a one-run audit.

        ::

            games = Games(canaries=train.canaries, score_canaries="max")
            monitor = LeakageMonitor(attack, games=games)
            trainer.fit(...)
            audit_canaries(train.canaries, monitor.canary_scores(), delta=1e-5)

        Every canary has layers of its own at every look, and its score hangs on the others through
        nothing: under per-sample clipping (DPSGD) that is what layers for all canaries at once
        would give, since a sample is found by its own alone. Where the whole update is clipped
        (GradientNoise) they would share the clip norm, and the bound does not hold. What is audited
        is what left the client at the looks. Canaries are asked for without padding: a model that
        counts positions from the first column hides them in batches padded on the left. Scores show
        which canaries are in the data as far as the releases do: keep a checkpoint that holds them
        as you keep the record.

        Args:
            attack: name of the attack; may be left out where one membership attack is listed.

        Raises:
            ValueError: no ``score_canaries``, no such attack, or no look has scored them.
        """
        for channel in self._channels:
            if (scores := channel.canary_scores(attack)) is not None:
                return scores
        raise ValueError("canaries are scored with games=Games(canaries=..., score_canaries='max')")

    def is_of_own_threshold(self, name: str) -> bool:
        """Whether a logged value judges an attack's own yes or no, and not its scores."""
        root, _, metric = name.rpartition("/")
        channels = (c for series, c in self._series.items() if series.log_name == root)
        return any(metric in channel.own_threshold for channel in channels)

    def looks_until_known(self, name: str, clients: int) -> tuple[int, str] | None:
        """After how many looks a logged value is first known.

        Args:
            name: of the value in the logs.
            clients: that it is of, together.

        Returns:
            The number of looks and why so many; None where it is known at every look.
        """
        root, _, metric = name.rpartition("/")
        of = {series.log_name: channel for series, channel in self._series.items()}
        return of[root].looks_until_known(metric, clients) if root in of else None

    def subscribe(
        self,
        listener: Callable[[L.Trainer], None],
        logs: Sequence[str] = (),
        *,
        about: Mapping[str, Any] | None = None,
        at_start: Callable[[], None] | None = None,
        at_end: Callable[[L.Trainer], None] | None = None,
    ) -> None:
        """Calls ``listener(trainer)`` on every process after each look, until the fit ends.

        Args:
            listener: is called.
            logs: names of what it logs then, for TensorBoard's page.
            about: what the run's record says of it.
            at_start: is called once it is known what is read, before the first step.
            at_end: is called when training ends, after what the monitor had left to say.
        """
        self._listeners.append(listener)
        self._heard += logs
        if about is not None:
            self._gates.append(about)
        if at_start is not None:
            self._ready.append(at_start)
        if at_end is not None:
            self._at_end.append(at_end)

    def headlines_of(self, name: str) -> tuple[str, ...]:
        """The log names of which ``leakage/worst/<family>`` is the highest; none of other names."""
        root, _, family = name.rpartition("/")
        if root != WORST or name not in self._results.names():
            return ()
        return self._results.headlines(family)

    def untested(self, name: str) -> str:
        """Which attack on the family of ``leakage/worst/<family>`` lacks text; empty: none does."""
        return self._results.untested.get(name.removeprefix(f"{WORST}/"), "")

    def unread(self, name: str) -> str | None:
        """Why a logged value says nothing of what is shared now; None where it says something.

        Of an attack that is not played nothing is tested. One whose surface is not shared reads 0,
        and where no attack of its family reads anything, that says nothing of what is shared
        instead.

        Args:
            name: of the value in the logs.
        """
        assert self._fit is not None
        root, _, metric = name.rpartition("/")
        of = {series.log_name: series for series in self._series}
        rows = {row.attack: row for row in self._fit.lineup.rows}
        family = metric if root == WORST else None
        if root in of:
            attack, family = of[root].attack, self._series[of[root]].family
            if attack not in self._fit.lineup.playing:
                return f"'{attack}' is not played in this run: {rows[attack].why_not}"
        if family is None:
            return None
        trained = self._fit.lineup.trained
        mine = {a.name for c in self._channels if c.family == family for a in c.attacks}
        if mine & {plan.attack.name for plan in self._fit.lineup.exposed} or not trained:
            return None
        return (
            f"no attack on {family} of this monitor reads anything that is shared in this run, and "
            f"{len(trained)} trained parameters are"
        )

    def others_on(self, name: str) -> str:
        """Attacks that are not in use, read this run, and are of a logged value's family.

        Args:
            name: of the value in the logs.
        """
        assert self._fit is not None
        root, _, metric = name.rpartition("/")
        families = {one.log_name: channel.family for one, channel in self._series.items()}
        return self._fit.lineup.others_on(families.get(root, metric))

    # ---- set-up -----------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks what can be checked before the model is on its device."""
        if stage != "fit":
            return
        self._results.clear()
        for channel in self._channels:
            channel.attacks = channel.given
            channel.clear()
        self._check_names(trainer)
        self.client = resolve_client(self._client_given, trainer.strategy)
        if self.local_steps is not None and trainer.world_size > 1 and self.client == "rank":
            raise ValueError(
                "local_steps describes one client that trains on its own; DDP averages at every "
                "step. Use client='world', or run one process."
            )
        self._not_set_up = {}
        processes = processes_of(trainer, self.client)
        for channel in self._channels:
            try:
                channel.setup(processes, lambda: self._find_anatomy(pl_module))
            except ValueError as error:
                if not self.auto:
                    raise
                self._not_set_up |= {attack.name: str(error) for attack in channel.attacks}

    def _check_names(self, trainer: L.Trainer) -> None:
        """Refuses two monitors of one run that log under the same names."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._results.reset_families()
        for other in callbacks:
            if isinstance(other, LeakageMonitor) and other is not self:
                # The worst of what several monitors read would be none of theirs.
                for channel in other._series.values():
                    self._results.families.pop(channel.family, None)
                both = {s.log_name for s in self._series} & {s.log_name for s in other._series}
                if both:
                    raise ValueError(
                        f"another LeakageMonitor of this run logs {', '.join(sorted(both))} too; "
                        "give the attacks of one of them other names"
                    )

    def _find_anatomy(self, pl_module: L.LightningModule) -> Anatomy:
        return find_anatomy(pl_module, **self._anatomy_overrides)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the model's parts, checks and calibrates the attacks, installs the taps."""
        run = TrainerRun(self._find_anatomy(pl_module), self.client, self.assume, trainer)
        self._check_texts(run.anatomy)
        if self.batch_adapter is None:
            check_batch_type(pl_module, run.anatomy.kind)
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder = folder if self.log_dir is None else self.log_dir
        self._jsonl = JsonLines(folder / "leakage.jsonl")
        rounds = self.local_steps
        boards = boards_of(trainer) if trainer.is_global_zero else []
        self._report = Report(
            trainer.loggers,
            [board.experiment for board in boards],
            self.attacks,
            self._jsonl if trainer.is_global_zero else None,
            RevealFiles(folder, trainer.global_rank, self.tokenizer) if self.reveal else None,
            client="pooled" if trainer.world_size > 1 and self.client == "rank" else 0,
            round_of=None if rounds is None else lambda step: step // rounds,
        )
        self._fit = Fit(
            run,
            self.attacks,
            self._series,
            [channel for channel in self._channels if channel.attacks],
            stages=self.stages,
            cadence=self.cadence,
            local_steps=self.local_steps,
            batch_adapter=self.batch_adapter,
            choosing=self.auto,
            most_seconds=self.look_seconds,
            refused=self._not_set_up,
            cache=CalibrationCache() if self.cache else None,
        )
        lineup = self._fit.lineup
        self._prepared = lineup.prepared
        restored, self._restored = self._restored, {}
        resumed, self._resumed = self._resumed, {}
        self._fit.calibrate(restored)
        playing = lineup.playing
        self._results.playing = {s for s in self._series if s.attack in playing}
        self._results.untested = lineup.untested
        if self.auto:
            writes = run.anatomy.kind == "causal" and not self._text_given
            choice.show(lineup.rows, lineup.unread, self.assume, writes=writes)
            self._report.write_not_played(lineup.rows, trainer.global_step)
        if trainer.is_global_zero:
            shown = {s: c for s, c in self._series.items() if s.attack in playing}
            families = {channel.family for channel in shown.values()}
            worst = [f"{WORST}/{f}" for f in self._results.families if f in families]
            add_pages(
                self._report.boards,
                self.utility,
                shown,
                privacy=privacy_tags(accounting(run.defenses)),
                decisions=self._heard,
                worst=worst,
                settings=settings_of(trainer, self.attacks),
                further=["hp_metric"] if any(b._default_hp_metric for b in boards) else [],
            )
        for begins in self._ready:
            begins()
        if trainer.is_global_zero:
            self._record = RunRecord(folder / "run.jsonl", self._jsonl.run, self._report.warn_once)
            self._accounting = accounting(run.defenses)
            self._record.begins(
                facts_of(
                    run,
                    lineup,
                    self._series,
                    fit=_FITS.setdefault(trainer, uuid.uuid4().hex),
                    training=training_of(trainer),
                    gates=self._gates,
                    monitor=self._settings(),
                    resumed=resumed,
                )
            )

    def _check_texts(self, anatomy: Anatomy) -> None:
        """Refuses public text of another vocabulary, and warns of another model's tokenizer."""
        held_out = self.games.held_out
        check_texts(self.attacks, {"games=Games(held_out=)": held_out}, anatomy)
        texts = [held_out, *(getattr(attack, "public_text", None) for attack in self.attacks)]
        tokenizers = [t.tokenizer for t in texts if isinstance(t, PublicText)]
        warn_of_other_tokenizers([self.tokenizer, *tokenizers], anatomy)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remembers how many looks came before this fit, and where it starts."""
        assert self._fit is not None
        self._results.begin()
        if not trainer.is_global_zero:  # the first process alone goes on with all clients' games
            for channel in self._channels:
                channel.clear()
        self.cadence.next_step = trainer.global_step
        self._fit.lineup.begin(trainer.global_step)

    # ---- a step -----------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts a look where one is due, and takes the truth before any defence does."""
        assert self._fit is not None
        self._fit.batch_starts(trainer.global_step, batch)

    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: torch.Tensor
    ) -> None:
        """Notes which parameters the loss has a term of, beside the batch's."""
        assert self._fit is not None
        self._fit.before_backward(loss)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Tells a step from a batch that only adds to it."""
        assert self._fit is not None
        self._fit.before_step(optimizer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Logs a look once its optimizer step is over."""
        assert self._fit is not None
        manual = not pl_module.automatic_optimization
        ended = self._fit.step_ends(batch is not None and (manual or bool(outputs)))
        if ended is None:
            return
        look, outcomes = ended
        if trainer.global_step == look.step:
            raise RuntimeError(
                "an optimizer stepped without Lightning, which counts no step then, so that "
                "LeakageMonitor cannot tell when to look again. In training_step use "
                "self.optimizers() without use_pl_optimizer=False."
            )
        settled = self._results.settled(look, outcomes)
        if settled is not None:
            self._publish(trainer, look, settled)
            self._fit.waiting = self._results.waiting
        elif look.asked is None:
            self.cadence.next_step = trainer.global_step

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A fit in which looks were due and none could end is unknown, not safe."""
        missing = self._results.missing(due=self.cadence.due(trainer.global_step - 1))
        if missing:
            self._publish(trainer, Look(trainer.global_step), missing)
        for listener in self._at_end:
            listener(trainer)

    # ---- results ----------------------------------------------------------------------------

    def _publish(
        self,
        trainer: L.Trainer,
        look: Look,
        outcomes: Mapping[Series, Outcome],
    ) -> None:
        known = trainer.callback_metrics
        beside = {f"utility/{n}": float(known[n]) for n in self.utility if n in known}
        assert self._fit is not None
        self._results.playing |= outcomes.keys()
        beside |= privacy_values(accounting(self._fit.run.defenses))
        outcomes = self._results.add(look, outcomes, beside, shared=bool(self._fit.lineup.trained))
        values = self.latest
        # As LearningRateMonitor does: self.log would take a quarter of a millisecond for each name.
        numbers = torch.tensor(list(values.values()), device=trainer.strategy.root_device)
        known.update(zip(values, numbers.unbind(), strict=True))
        assert self._report is not None
        for channel in dict.fromkeys(self._series.values()):
            mine = {s: o for s, o in outcomes.items() if self._series[s] is channel}
            try:
                channel.published(look, mine, self._report)
            except Exception as error:
                self._report.warn_once(f"not all of a look was written: {reason(error)}")
        new = {name: value for name, value in values.items() if name in self.look_values}
        self._report.write(look, outcomes, new)
        if self._record is not None:
            utility = {n: beside[f"utility/{n}"] for n in self.utility if n in known}
            seconds = values.get("monitor/seconds", math.nan)
            defenses = accounting(self._fit.run.defenses)
            self._record.looked(look.step, utility, seconds, self.failures, defenses)
        for listener in self._listeners:
            listener(trainer)

    def record_decision(self, decision: GateDecision) -> None:
        """Leaves a line in ``run.jsonl``: what a gate has done, on the first process."""
        if self._record is not None:
            self._record.decided(decision)

    def _settings(self) -> dict[str, Any]:
        """For the run's record."""
        return {
            "looks": self.cadence.argument,
            "stages": [str(stage) for stage in self.stages],
            "local_steps": self.local_steps,
            "attacks": "auto" if self.auto else "listed",
            "reveal": self.reveal,
        }

    # ---- ends and checkpoints ---------------------------------------------------------------

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ends the run's record, and writes the report where it is asked for."""
        self._end(trainer, "finished")

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """As when a fit ends, and removes every tap: Lightning calls no teardown after this."""
        try:
            self._end(trainer, type(exception).__name__)
        finally:  # also where a second Ctrl-C ends the report
            _FITS.pop(trainer, None)
            self._close()

    def _end(self, trainer: L.Trainer, how: str) -> None:
        if self._record is None or self._record.ended:
            return
        self._last = self._told()
        self._record.ends(int(trainer.global_step), how, self._accounting)
        if self.report:
            from lightning_fedleak.report import write

            try:
                page, *_ = write([self._record.path], run=self._record.run)
                rank_zero_info(f"LeakageMonitor: {page}")
            except Exception as error:  # a report is no reason to lose a run
                rank_zero_warn(f"LeakageMonitor: no report: {error}")

    def _told(self) -> dict[str, Any]:
        """For a checkpoint: the run's id, and the releases of its defences."""
        if self._record is None:
            return self._last
        return {"run": self._record.run, "privacy": releases_by(self._accounting)}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Removes every tap."""
        _FITS.pop(trainer, None)
        self._close()

    def _close(self) -> None:
        if self._fit is not None:
            self._fit.close()
        for channel in self._channels:
            channel.close()
        self._listeners.clear()
        self._ready.clear()
        self._at_end.clear()
        self._heard.clear()
        self._gates.clear()
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with: plain numbers, strings and tensors."""
        kept = [channel.state_dict() for channel in self._channels]
        return {
            **self._results.state_dict(),
            "fit": self._told(),
            **{name: value for state in kept for name, value in state.items()},
            "attacks": {
                a.name: {
                    "config": a.fingerprint(),
                    "tensors": {k: v.detach().cpu() for k, v in a.state_dict().items()},
                }
                for a in self.attacks
                if a.name in self._prepared
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self._results.load_state_dict(state_dict)
        for channel in self._channels:
            channel.load_state_dict(state_dict)
        self._resumed = state_dict.get("fit") or {}
        self._restored = {
            name: saved for name, saved in state_dict["attacks"].items() if saved["tensors"]
        }


def _listed(attacks: Sequence[Attack] | Attack | str) -> list[Attack]:
    if isinstance(attacks, str):
        raise ValueError(f"attacks must be 'auto' or a list of attacks, got {attacks!r}")
    if isinstance(attacks, Attack | type):  # a class is refused by name later
        return [attacks]
    return list(attacks)


def _series_of(
    attacks: Sequence[Attack], channels: Sequence[Channel], stages: Sequence[Stage]
) -> dict[Series, Channel]:
    """The channel of each series, in the order of the logs."""
    owner = {attack.name: channel for channel in channels for attack in channel.attacks}
    found: dict[Series, Channel] = {}
    for stage in stages:
        for attack in attacks:
            channel = owner[attack.name]
            if (series := channel.series(attack, stage)) is not None:
                found[series] = channel
    return found | {s: channel for channel in channels for s in channel.further_series()}


def _moved(given: Mapping[str, Any]) -> str:
    """Why arguments are refused: with the spelling that does what was meant."""
    games = [f"{_MOVED[name]}=..." for name in given if name in _MOVED]
    if not games:
        name = next(iter(given))
        close = difflib.get_close_matches(name, signature(LeakageMonitor).parameters, n=1)
        hint = f". Did you mean {close[0]}=?" if close else ""
        return f"LeakageMonitor() got an unexpected keyword argument '{name}'{hint}"
    old = ", ".join(f"{name}=" for name in given if name in _MOVED)
    return f"LeakageMonitor({old}) is spelled LeakageMonitor(games=Games({', '.join(games)})) now"
