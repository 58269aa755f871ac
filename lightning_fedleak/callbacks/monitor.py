"""LeakageMonitor: attacks as in-training canaries, logged beside the user's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.membership import MembershipAttack
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.batches import BatchAdapter
from lightning_fedleak.callbacks.cadence import cadence_of
from lightning_fedleak.callbacks.canary_scores import CanaryScores, Reduction
from lightning_fedleak.callbacks.checks import (
    assumed_of,
    check_attacks,
    check_canaries,
    check_games,
    check_held_out,
    check_processes,
    check_rounds,
    known_stages,
    resolve_client,
)
from lightning_fedleak.callbacks.ledger import Ledger, Series, check_names
from lightning_fedleak.callbacks.live_inversion import check_texts
from lightning_fedleak.callbacks.look import Look
from lightning_fedleak.callbacks.opening import calibrate, watch_over
from lightning_fedleak.callbacks.outcome import Outcome
from lightning_fedleak.callbacks.privacy import privacy_tags, privacy_values
from lightning_fedleak.callbacks.reading import BatchReader
from lightning_fedleak.callbacks.report import JsonLines, Report
from lightning_fedleak.callbacks.results import Results
from lightning_fedleak.callbacks.reveal import RevealFiles
from lightning_fedleak.callbacks.sources import SCALE, GameSettings
from lightning_fedleak.callbacks.tensorboard import add_layout
from lightning_fedleak.callbacks.watch import Watch
from lightning_fedleak.canaries import CanarySet
from lightning_fedleak.snapshots import HeadOwnPart
from lightning_fedleak.threats import Capability


class LeakageMonitor(L.Callback):
    """Attacks what a client would share, during training, and logs how much it gives away.

    Training is not disturbed: parameters, optimizer state, logged losses and random numbers are
    bit-identical to the run without the monitor. An attack that fails is counted in
    ``monitor/failures`` and its metrics read NaN (*unknown*), never 0.

    A step that shares nothing (an AMP step that was skipped, a batch without a single target) is
    not looked at; the look moves to the next step, at most 20 times in a row, after which it
    counts as a failure. So does a fit that ends before a look that was due could end.

    The first step of each fit is looked at. Layers that are frozen or unfrozen on the way are
    followed at the next look.

    Under FSDP2 (``ModelParallelStrategy``) attacks get whole gradients, and for as long as they
    calibrate, refresh or invert texts the whole model, gathered on every process. Membership games
    are refused there.

    **Membership games.** A :class:`~lightning_fedleak.attacks.membership.MembershipAttack` assumes
    a server that puts trainable layers of its own into the model, behind the layer it reads, and
    sets dropout to 0. None is put in: at a look the server is asked about sentences of the batch
    and about others, what its layers' gradient would be follows from the step
    (:class:`~lightning_fedleak.callbacks.live_games.LiveGames`) and passes through the defences.
    ``exposed`` is always 1: no layer of the client's own has to be trained for that, and freezing
    any does not help. Texts are asked for as the model reads them: of a masked language model with
    its masked tokens, which a real server would have to guess. Tokens that the loss does not reach
    are not asked for. Rates are of the last ``window`` looks; accuracy, F1 and advantage are of the
    attack's own decisions, and the threshold of a TPR is fitted on other games than those scored.
    Those of one look alone are in ``look_values`` and in ``leakage.jsonl``.

    **Texts.** An :class:`~lightning_fedleak.attacks.inversion.InversionAttack` reads the hidden
    states that the user's own forward gives at its layer, as a split model would send them: at
    stage local before, at stage shared behind the defences that rewrite them, dropout included
    (:class:`~lightning_fedleak.callbacks.live_inversion.LiveInversion`). Its metrics are of
    ``texts`` texts a look; under the attack's ``budget_seconds`` what is not found in time is
    wrong, texts that were not begun do not count, and ``finished`` is below 1.

    Args:
        attacks: the attacks, each with a name of its own.
        every_n_steps: look at optimizer steps 0, n, 2n, ... Default 50.
        max_overhead: look so seldom that looks cost at most this share of the training time.
            Either this or ``every_n_steps``.
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
            into the model and holds the texts it asks for.
        tokenizer: decodes what ``reveal`` writes; without one it writes token ids.
        log_dir: where ``leakage.jsonl`` goes; default the logger's folder.
        anatomy: overrides for :func:`find_anatomy` (``model``, ``embedding``, ``head``, ...).
        targets: of membership games: sentences asked for at a look, at most so many that are in
            the batch and as many that are not.
        held_out: of membership games: texts that are in no batch, a
            :class:`~lightning_fedleak.attacks.public_text.PublicText`, and not the one that an
            attack is calibrated on. Default: sentences of the batches read shortly before a look;
            the first look, before which there was none, then has no result of these games yet, and
            the next step is looked at too.
        window: looks over which the games of membership attacks are pooled. At 16 targets a rate
            at 1% false positives is known after 63 looks.
        canary_scale: how strongly a dishonest server lets its own layers feed the model. It matters
            under clipping or noise only, where the default is the worst case: a canary takes the
            whole norm that it is clipped to. The Trainer's own ``gradient_clip_val`` does not act
            on it, only defences do: with noise and that clipping together leakage is overstated.
        canaries: texts of the user's own, in the training data by coin flips
            (:func:`~lightning_fedleak.canaries.with_canaries`). At a look at which some are in
            the batch, membership attacks are also asked for these and for as many that were left
            out of the data; logged as ``audit/<attack>``.
        texts: of each client's batch that inversion attacks reconstruct at a look, at most.
        score_canaries: ``"max"`` or ``"mean"``: at each look every canary is scored, included or
            not, and one score for each is kept over looks by this rule (:meth:`canary_scores`). One
            process only; costs a forward of all canaries at each look.

    Raises:
        ValueError: contradictory or unknown arguments.
    """

    def __init__(
        self,
        attacks: Sequence[Attack] | Attack,
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
        targets: int = 16,
        held_out: PublicText | None = None,
        window: int = 100,
        canary_scale: float = SCALE,
        canaries: CanarySet | None = None,
        texts: int = 4,
        score_canaries: Reduction | None = None,
    ) -> None:
        self.attacks = [attacks] if isinstance(attacks, Attack) else list(attacks)
        check_attacks(self.attacks)
        self.cadence = cadence_of(every_n_steps, max_overhead)
        self.stages = known_stages(stages)
        self.batch_adapter = batch_adapter
        self.reveal = reveal
        self.utility = (utility,) if isinstance(utility, str) else tuple(utility)
        if client not in (None, "rank", "world"):
            raise ValueError(f"client must be 'rank' or 'world', got {client!r}")
        self._client_given = client
        check_rounds(local_steps, self.attacks, self.stages, head_own_part=head_own_part)
        self.local_steps = local_steps
        self.head_own_part = head_own_part
        self.assume = assumed_of(self.attacks, assume)
        self.tokenizer = tokenizer
        self.log_dir = None if log_dir is None else Path(log_dir)
        self._anatomy_overrides = dict(anatomy or {})
        self.games = GameSettings(targets, held_out, window, canary_scale, canaries, score_canaries)
        check_held_out(self.attacks, held_out)
        if canaries is not None:
            check_canaries(self.attacks, self.stages)
        self._scores: CanaryScores | None = None
        if canaries is not None and score_canaries is not None:
            players = [a.name for a in self.attacks if isinstance(a, MembershipAttack)]
            self._scores = CanaryScores(score_canaries, players)
        check_texts(self.attacks, self.stages, texts)
        self.texts = texts
        self._ledger = Ledger(
            self.attacks, self.stages, self.games, head_own_part=head_own_part, texts=texts
        )
        self._results = Results(self._ledger, self._scores)
        self._restored: dict[str, Any] = {}
        self._prepared: set[str] = set()
        self._listeners: list[Callable[[L.Trainer], None]] = []
        self._heard: list[str] = []
        self._reset()

    def _reset(self) -> None:
        self._watch: Watch | None = None
        self._own_part: HeadOwnPart | None = None
        self._report: Report | None = None

    # ---- names ------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Distinguishes several monitors of one run in a checkpoint."""
        stages, attacks = ",".join(self.stages), ",".join(a.name for a in self.attacks)
        return f"LeakageMonitor[{stages}: {attacks}]"

    def metric_names(self) -> list[str]:
        """Names of the values that this monitor logs at each look."""
        return ["monitor/failures", "monitor/seconds", *self._ledger.names()]

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
        return 0.0 if self._watch is None else self._watch.processor_seconds

    @property
    def failures(self) -> int:
        """Results that are unknown."""
        return self._results.failures

    @property
    def last_step(self) -> int:
        """Optimizer step of the newest values."""
        return self._results.last_step

    @property
    def targets(self) -> int:
        """Texts of each kind that membership games ask for at a look, at most."""
        return self.games.targets

    def canary_scores(self, attack: str | None = None) -> Tensor:
        """(m,) one score for each of ``canaries=``, for a one-run audit.

        ::

            monitor = LeakageMonitor(attack, canaries=train.canaries, score_canaries="max")
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
        if self._scores is None:
            raise ValueError("canaries are scored with canaries=... and score_canaries='max'")
        return self._scores.of(attack)

    def subscribe(self, listener: Callable[[L.Trainer], None], logs: Sequence[str] = ()) -> None:
        """Calls ``listener(trainer)`` on every process after each look, until the fit ends.

        Args:
            listener: is called.
            logs: names of what it logs then, for TensorBoard's page.
        """
        self._listeners.append(listener)
        self._heard += logs

    # ---- set-up -----------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks what can be checked before the model is on its device."""
        if stage != "fit":
            return
        self.cadence.next_step = 0
        self._results.clear()
        others = [c for c in trainer.callbacks if isinstance(c, LeakageMonitor)]  # type: ignore[attr-defined]
        check_names(self._ledger, [c._ledger for c in others])
        self.client = resolve_client(self._client_given, trainer.strategy)
        check_processes(
            trainer.world_size,
            self.client,
            scored=self._scores is not None,
            rounds=self.local_steps is not None,
            head_own_part=self.head_own_part,
        )
        check_games(self.attacks, trainer.strategy, self.stages, self.client)
        if self.head_own_part:
            anatomy = self._find_anatomy(pl_module)
            if anatomy.head is None or not anatomy.tied:
                raise ValueError(
                    "head_own_part=True is for a tied head only; here the head's gradient is its "
                    "own and is attacked as it is shared"
                )
            self._own_part = HeadOwnPart(anatomy.head)

    def _find_anatomy(self, pl_module: L.LightningModule) -> Anatomy:
        return find_anatomy(pl_module, **self._anatomy_overrides)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the model's parts, checks and calibrates the attacks, installs the taps."""
        anatomy = self._find_anatomy(pl_module)
        self._reader = BatchReader(anatomy.kind, self.batch_adapter)
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder = folder if self.log_dir is None else self.log_dir
        self._jsonl = JsonLines(folder / "leakage.jsonl")
        self._report = Report(
            trainer,
            self.attacks,
            self._jsonl,
            RevealFiles(folder, trainer.global_rank, self.tokenizer) if self.reveal else None,
            pooled=trainer.world_size > 1 and self.client == "rank",
            local_steps=self.local_steps,
        )
        self._watch = watch_over(
            trainer,
            anatomy,
            self.attacks,
            assume=self.assume,
            client=self.client,
            stages=self.stages,
            cadence=self.cadence,
            local_steps=self.local_steps,
            own_part=self._own_part,
            games=self.games,
            texts=self.texts,
            kinds=self._ledger.kinds,
            witness=self._report,
        )
        self._prepared = self._watch.prepared
        restored, self._restored = self._restored, {}
        calibrate(self._watch, restored)
        if trainer.is_global_zero:
            add_layout(
                trainer.loggers,
                self.utility,
                self.attacks,
                self._ledger.prefixes,
                privacy_tags(trainer),
                self._heard,
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remembers how many looks came before this fit, and where it starts."""
        assert self._watch is not None
        self._results.begin()
        self._watch.begin(trainer.global_step)

    # ---- a step -----------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts a look where one is due, and takes the truth before any defence does."""
        assert self._watch is not None
        self._reader.check_first(trainer, batch)
        self._watch.step_starts(trainer.global_step)
        self._watch.add_batch(trainer.global_step, lambda: self._reader.read(batch))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Tells a step from a batch that only adds to it."""
        assert self._watch is not None
        self._watch.before_step(optimizer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Logs a look once its optimizer step is over."""
        assert self._watch is not None
        manual = not pl_module.automatic_optimization
        ended = self._watch.step_ends(batch is not None and (manual or bool(outputs)))
        if ended is None:
            return
        look, outcomes = ended
        if trainer.global_step == look.step:
            raise RuntimeError(
                "an optimizer stepped without Lightning, which counts no step then, so that "
                "LeakageMonitor cannot tell when to look again. In training_step use "
                "self.optimizers() without use_pl_optimizer=False."
            )
        settled = self._results.settled(outcomes)
        if settled is None:
            self.cadence.next_step = trainer.global_step
            return
        self._publish(trainer, look, settled)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A fit in which looks were due and none could end is unknown, not safe."""
        missing = self._results.missing(due=self.cadence.due(trainer.global_step - 1))
        if missing:
            self._publish(trainer, Look(trainer.global_step), missing)

    # ---- results ----------------------------------------------------------------------------

    def _publish(
        self,
        trainer: L.Trainer,
        look: Look,
        outcomes: Mapping[Series, Outcome],
    ) -> None:
        known = trainer.callback_metrics
        beside = {f"utility/{n}": float(known[n]) for n in self.utility if n in known}
        outcomes = self._results.add(look, outcomes, beside | privacy_values(trainer))
        values = self.latest
        # As LearningRateMonitor does: self.log would take a quarter of a millisecond for each name.
        numbers = torch.tensor(list(values.values()), device=trainer.strategy.root_device)
        known.update(zip(values, numbers.unbind(), strict=True))
        assert self._report is not None
        self._report.write(look, outcomes, values)
        for listener in self._listeners:
            listener(trainer)

    # ---- ends and checkpoints ---------------------------------------------------------------

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves a row in TensorBoard's table of runs."""
        if self._report is not None:
            self._report.write_summary(self.latest)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Removes every tap; Lightning calls no teardown after an exception."""
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Removes every tap."""
        self._close()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._own_part is not None:
            self._own_part.close()
        self._listeners.clear()
        self._heard.clear()
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with: plain numbers, strings and tensors."""
        return {
            **self._results.state_dict(),
            "next_step": self.cadence.next_step,
            "canaries": canaries.state_dict() if (canaries := self.games.canaries) else None,
            "attacks": {
                a.name: {
                    "config": repr(sorted(a.given().items())),
                    "tensors": {k: v.detach().cpu() for k, v in a.state_dict().items()},
                }
                for a in self.attacks
                if a.name in self._prepared
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self._results.load_state_dict(state_dict)
        soon = self.cadence.after_look(self.last_step, 0.0, 0.0)
        self.cadence.next_step = min(state_dict["next_step"], soon)
        committed = state_dict.get("canaries")
        if self.games.canaries is not None and committed is not None:
            self.games.canaries.load_state_dict(committed)
        self._restored = {
            name: saved for name, saved in state_dict["attacks"].items() if saved["tensors"]
        }
