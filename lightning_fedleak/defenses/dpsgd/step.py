"""One training step of DP-SGD, from its batch to its release: recorded, looked at, clipped."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd.batch import (
    check_loader,
    count_samples,
    drawn_batch,
    loss_with_graph,
    on_device,
    same_draw,
    tensors_of,
    trainer_of,
)
from lightning_fedleak.defenses.dpsgd.clipped_sum import Clip, ClippedSum, Gathered, Moves
from lightning_fedleak.defenses.dpsgd.logical import Piece, pieces_of, run_pieces
from lightning_fedleak.defenses.dpsgd.loss_graph import (
    FormCheck,
    check_isolation,
    outputs_of,
    under_ddp,
)
from lightning_fedleak.defenses.dpsgd.per_sample import Clipping
from lightning_fedleak.defenses.dpsgd.recorder import TELLING, Call, Layout, Recorder
from lightning_fedleak.defenses.dpsgd.sampling import Sampling
from lightning_fedleak.defenses.processes import Team, local_part, unshard, whole_layers
from lightning_fedleak.model_runs import is_compiled, reset_compiled

SMALL = 1 << 20
"""Numbers in a buffer up to which it is compared in every step."""
LITTLE = 1 << 18
"""Trained weights up to which all are compared in every step."""
CHEAP = 4000
"""More than those, where a step multiplies so many times as many numbers as there are.

Comparing reads each trained weight three times, which takes .5% of a step at about 800 on a CPU.
"""
FEW = 256
"""Numbers of each weight that are compared in every step."""

CHECK_EVERY = 100
"""After the first, every so many releases are checked for what is cheap but not free to check."""

Kind = tuple[frozenset[tuple[str, Layout]], frozenset[tuple[str, str]]]
"""How layers were used in a step, and the operations of its loss."""


class Buffers:
    """The buffers and parameters of a model as they are now, to see whether a step writes to one.

    What training data change other than through the optimizer (an average of activations, a
    codebook, a sum of inputs, rows of an embedding that ``max_norm`` shortens) leaves with the
    model, and no noise covers it. Only that one was written to is seen, not with what, so that a
    step counter is refused too.

    Every write counts up a tensor's version, except one by ``.data``. So contents are compared as
    well: of small buffers in every step, of the rest where ``contents`` says so, of sparse ones
    never. Parameters are not looked at under FSDP2, which writes to them itself.

    Args:
        root: the module that is trained.
        contents: compare those of large buffers and of parameters too.
    """

    def __init__(self, root: nn.Module, *, contents: bool) -> None:
        self._root = root
        self._contents = contents
        self._read()

    def _read(self) -> None:
        self._before: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        parameters: dict[nn.Parameter, str] = {}
        sharded = False
        for name, module in self._root.named_modules():  # once through, a large model has many
            within = f"{name}." if name else ""
            sharded = sharded or isinstance(module, FSDPModule)
            for key, b in module._buffers.items():
                if b is not None:
                    copy = b.detach().clone() if self._compares(b) else None
                    self._before[within + key] = b, _version(b), copy
            for key, p in module._parameters.items():
                if p is not None:
                    parameters.setdefault(p, within + key)
        self._weights = [
            (name, p, _version(p), printed(p) if self._contents else None)
            for p, name in ({} if sharded else parameters).items()
        ]

    def _compares(self, buffer: Tensor) -> bool:
        dense = buffer.layout == torch.strided and not buffer.is_meta
        return dense and (self._contents or buffer.numel() <= SMALL)

    @contextmanager
    def sent_first(self) -> Iterator[None]:
        """Inside, the client's own processes send each other buffers before the root is called.

        DistributedDataParallel does, and runs ``training_step`` as the root's call.
        """

        def once(*_: Any) -> None:
            self._read()
            handle.remove()

        handle = self._root.register_forward_pre_hook(once)
        try:
            yield
        finally:
            handle.remove()

    def check_unchanged(self) -> None:
        """Refuses where one was written to, replaced or added since.

        Raises:
            DefenseError: says which.
        """
        for name, buffer in self._root.named_buffers():
            old, version, copy = self._before.get(name, (None, 0, None))
            same = buffer is old and _version(buffer) == version
            if not same or (copy is not None and not _equal(buffer, copy)):
                raise DefenseError(
                    f"DPSGD: training_step changed the buffer '{name}', which leaves with the "
                    "model and which no noise covers. Put the layer that keeps it into eval mode, "
                    "or keep what training data do not decide (a step counter) in a plain "
                    "attribute or outside of training_step."
                )
        for name, parameter, version, before in self._weights:
            changed = before is not None and not torch.equal(printed(parameter), before)
            if changed or _version(parameter) != version:
                raise DefenseError(
                    f"DPSGD: training_step wrote to the parameter '{name}' itself, which leaves "
                    "with the model, while noise covers the optimizer's updates alone. Let a "
                    "gradient train it, build an embedding without max_norm, or move what follows "
                    "from the weights alone (an average of them) to on_train_batch_end."
                )


class Weights:
    """The trained weights as the optimizer's last step left them.

    What else writes to them between two releases leaves with the next, and no noise covers it. An
    average that is swapped in for validation, and out again before the next batch, leaves what
    there was. All numbers are compared in every step where there are few, or few for the work that
    a step is (:data:`LITTLE`, :data:`CHEAP`); else from the first batch to the first release, and
    in one interval of ``every``. In the others :data:`FEW` numbers of each weight are; where a
    weight's version tells that more was written, and these are as they were, all are from then on.

    Args:
        every: releases.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._before: dict[nn.Parameter, tuple[int, Tensor]] = {}
        self._all = True
        self._written = False
        self._known: list[nn.Parameter] | None = None
        self._due = False
        self._endless: list[nn.Parameter] = []
        self._work = self._numbers = 0
        self._handle = register_optimizer_step_post_hook(self._stepped)

    def remove(self) -> None:
        """Takes the hook out."""
        self._handle.remove()

    def restart(self) -> None:
        """Training starts, perhaps from a checkpoint; weights are read at the first batch."""
        self._before, self._known, self._all, self._endless = {}, None, True, []

    def begin(self, root: nn.Module) -> None:
        """A batch comes.

        Raises:
            DefenseError: the optimizer's last step has left weights that are not finite. That
                follows from what was released alone.
        """
        self._due = False
        if self._known is None:
            self._known = [p for p in root.parameters() if p.requires_grad]
            self._numbers = sum(p.numel() for p in root.parameters())
            self._read(self._known)
        if self._endless:
            raise DefenseError(
                "DPSGD: weights are not finite after the last release "
                f"({_names(self._endless, root)}). What was released is clipped and finite, so the "
                "learning rate is too high for the noise, or for the weights' precision. Lower it."
            )

    def check(self, parameters: Sequence[nn.Parameter], root: nn.Module) -> None:
        """Refuses weights that are not as the optimizer's last step left them.

        Raises:
            DefenseError: says which.
        """
        known = [p for p in parameters if p in self._before]
        if not known:
            return
        now = self._prints(known)
        before = torch.stack([self._before[p][1] for p in known])
        changed = (now != before).nonzero().flatten().tolist()
        if changed:
            raise DefenseError(
                "DPSGD: weights were written to since the optimizer's last step "
                f"({_names([known[i] for i in changed], root)}), by a callback or hook perhaps. "
                "Noise covers the optimizer's updates alone, and nothing was released. Write to a "
                "copy of the weights, and swap averages out before the next batch."
            )
        versions = (_version(p) != self._before[p][0] for p in known if not isinstance(p, DTensor))
        self._written = self._written or (not self._all and any(versions))

    def released(self, releases: int, positions: int) -> None:
        """The optimizer is about to step.

        Args:
            releases: how many were made, with this one.
            positions: of all samples together, in the layer that has most.
        """
        trained = sum(local_part(p).numel() for p in self._known or ())
        self._work = max(self._work, positions * self._numbers)
        cheap = trained <= LITTLE or self._work >= CHEAP * trained
        self._all = cheap or self._written or releases % self._every == 0
        self._before, self._due = {}, True

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        if self._due and self._known is not None:
            own = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._read([p for p in self._known if id(p) in own])

    @torch.no_grad()
    def _read(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            return
        for parameter, found in zip(parameters, self._prints(parameters), strict=True):
            self._before[parameter] = _version(parameter), found
        floating = [p for p in parameters if p.is_floating_point() and p.element_size() > 1]
        sums = [_numbers(p, whole=self._all).sum(dtype=torch.float32) for p in floating]
        self._endless = []
        if sums and not bool(_together(sums).isfinite().all()):
            self._endless = [p for p in floating if not bool(local_part(p).isfinite().all())]

    def _prints(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        return _together([printed(p, whole=self._all) for p in parameters])


def _together(scalars: Iterable[Tensor]) -> Tensor:
    scalars = list(scalars)
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _numbers(parameter: Tensor, *, whole: bool) -> Tensor:
    own = local_part(parameter.detach())
    return own if whole else own.flatten()[:: max(1, own.numel() // FEW)]


def _names(parameters: Sequence[nn.Parameter], root: nn.Module) -> str:
    known = {p: name for name, p in root.named_parameters(remove_duplicate=False)}
    names = [f"'{known.get(p, tuple(p.shape))}'" for p in parameters[:5]]
    return ", ".join(names) + (" and others" if len(parameters) > 5 else "")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, NaN alike."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def printed(tensor: Tensor, *, whole: bool = True) -> Tensor:
    """A number that tells contents apart: the sum of the bits, 64 at a time, or of a few numbers'.

    An integer, so that it is the same wherever the contents lie; 0 for what has no bits to read.
    """
    own = local_part(tensor.detach())
    if own.is_meta or own.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    if own.is_complex():
        own = torch.view_as_real(own)
    bits = own.view(_BITS[own.element_size()]).flatten()
    if not whole:
        return bits[:: max(1, len(bits) // FEW)].sum()
    at_once = 8 // bits.element_size()
    end = len(bits) // at_once * at_once
    aligned = bits if bits.storage_offset() % at_once == 0 else bits.clone()
    return aligned[:end].view(torch.int64).sum() + bits[end:].sum()


def _released(context: DefenseContext) -> list[nn.Parameter]:
    """What an optimizer step is going to release, in its order; without a Trainer all trained."""
    optimizers = getattr(trainer_of(context), "optimizers", None)
    groups = [g["params"] for o in optimizers or () for g in o.param_groups]
    known = [p for group in groups for p in group] if optimizers else context.root.parameters()
    return [p for p in known if p.requires_grad]


def _check_same(before: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]) -> None:
    own = [p for p in parameters if p.requires_grad]
    if {id(p) for p in own} != {id(p) for p in before}:
        raise DefenseError(
            "DPSGD: what is trained changed between the first piece of a batch and its release, "
            "so samples were clipped without it. Freeze or unfreeze in on_train_batch_end, or in "
            "a callback at the start of an epoch; nothing was released."
        )


def _static(context: DefenseContext) -> bool:
    return bool(getattr(trainer_of(context).strategy.model, "static_graph", False))


def is_ddp(context: DefenseContext) -> bool:
    """Whether DistributedDataParallel runs ``training_step``."""
    strategy = getattr(trainer_of(context), "strategy", None)
    return isinstance(getattr(strategy, "model", None), DistributedDataParallel)


class DrawnBatches:
    """Sees to it that every batch is released once, by itself.

    Args:
        poisson: batches are Poisson samples, so that one must not be released twice.
    """

    def __init__(self, poisson: bool) -> None:
        self._poisson = poisson
        self._drawn: Any = None
        self._released: Any = None
        self._waiting = 0

    def begin(self, batch: Any, context: DefenseContext) -> None:
        """A batch comes.

        Raises:
            DefenseError: it was released already, or the one before it was not.
        """
        check_loader(context)
        self._drawn = drawn_batch(context, batch)
        if self._poisson and self._released is not None and same_draw(self._drawn, self._released):
            raise DefenseError(
                "DPSGD: this batch was released already (a second optimizer step on it, in an "
                "overridden optimizer_step perhaps). Every release is accounted as a Poisson "
                "sample of its own. Take one optimizer step on each batch, or pass poisson=False: "
                "then each example is accounted as if it were in all of them."
            )
        self._waiting += 1
        if self._waiting > 1:
            raise DefenseError(
                "DPSGD: a second batch came before the first was released (gradient accumulation, "
                "by a callback perhaps). Let every batch have its own optimizer step: a larger "
                "batch_size, of which DPSGD(max_physical_batch=...) runs a few rows at a time."
            )

    def released(self) -> None:
        """It has left the client."""
        self._released, self._waiting = self._drawn, 0


class LossCheck:
    """Looks at the loss: its form in every step, the rest where something is new, and at times.

    Args:
        trusted: the user has proved that the loss is a mean of per-sample means.

    Attributes:
        unchecked: something in the step since the last release was new.
        weights: see :class:`FormCheck`.
    """

    def __init__(self, trusted: bool) -> None:
        self.unchecked = False
        self.weights: Tensor | None = None
        self._trusted = trusted
        self._form = FormCheck()
        self._top: list[Call] = []
        self._separate = False
        self._seen: set[Kind] = set()
        self._looked = 0

    def is_due(self, releases: int) -> bool:
        """Whether the next release is to be checked for what is not checked in all of them."""
        return self.unchecked or releases % CHECK_EVERY == 0

    def check_form(self, loss: Tensor, recorder: Recorder) -> None:
        """Looks from the loss down to the layers.

        Args:
            loss: scalar with a graph.
            recorder: holds the calls of this step's layers.

        Raises:
            DefenseError: it is not known to be a mean of per-sample means.
        """
        if self._trusted:
            self._top, self._separate = outputs_of(loss, recorder.calls), True
            self.weights = None
        else:
            self._top = self._form(loss, recorder.calls, recorder.samples)
            self._separate = self._form.separate
            self.weights = self._form.weights

    def look(
        self, loss: Tensor, recorder: Recorder, releases: int, team: Team, *, counts: bool = True
    ) -> None:
        """Looks at the network, and at the loss where its form leaves it open, if it is time to.

        All processes of the client look where one of them has to, because backward may be a
        collective.

        Args:
            loss: as in :meth:`check_form`, which comes before.
            recorder: the same.
            releases: how many were made.
            team: the processes of this client.
            counts: whether this process has samples of its own.

        Raises:
            DefenseError: samples are mixed.
        """
        layouts = frozenset((call.name, call.layout) for call in recorder.calls if call.trained)
        kind = layouts, self._form.form
        new = counts and (kind not in self._seen or releases >= self._looked + CHECK_EVERY)
        due = new and recorder.samples > 1
        new, due, joint = map(bool, team.largest([new, due, not self._separate]))
        self.unchecked = self.unchecked or new
        top, self._top = self._top, []
        if not due:
            return
        with team.together(), recorder.looking():
            seen = check_isolation(
                under_ddp(loss),
                top,
                recorder.calls,
                recorder.samples,
                separate=not joint,
                # FSDP2 shards them after any backward, and not all of them know of the next one.
                restore=functools.partial(unshard, whole_layers(recorder.root)),
            )
        if recorder.samples == 1 or seen:
            self._looked = releases
        if recorder.samples > 1 and seen:
            self._seen.add(kind)


def zero_on_the_graph(root: nn.Module) -> Tensor:
    """What an empty batch has for a loss."""
    parameter = next(p for p in root.parameters() if p.requires_grad)
    return parameter.flatten()[:1].sum() * 0.0


def times_zero(output: Any) -> Any:
    """What ``training_step`` gave, with a loss of zero on the same graph."""
    if isinstance(output, Mapping):
        return {**output, "loss": output["loss"] * 0.0}
    return output * 0.0


class WatchedStep:
    """Stands around the training steps of one fit, one after the other.

    Args:
        root: the module that is trained; hooks are put on its layers.
        team: the processes of this client.
        clip: how long a sample's gradient may be.
        clipping: in which form per-sample gradients are kept.
        poisson: batches are Poisson samples.
        trusted: the user has proved that the loss is a mean of per-sample means.
        most: rows that are run at once; None for all.
        row: tells the number of the next release in its mechanism.

    Attributes:
        check: looks at the loss.
        moves: looks at whether the weights move by a release.
        weights: looks at whether they move otherwise.
        canaries: how many were released beside this step.
        clip: how long a sample's gradient may be.
        row: as given.
    """

    def __init__(
        self,
        root: nn.Module,
        team: Team,
        *,
        clip: Clip,
        clipping: Clipping,
        poisson: bool,
        trusted: bool,
        most: int | None = None,
        row: Callable[[], int] = int,
    ) -> None:
        self.row = row
        self.check = LossCheck(trusted)
        self.moves = Moves()
        self.weights = Weights(CHECK_EVERY)
        self.canaries = 0
        self._team = team
        self.clip = clip
        self._clipping: Clipping = clipping
        self._batches = DrawnBatches(poisson)
        self._compiled_anew = ExitStack()
        self._compiled_anew.enter_context(_compiled_anew(root))
        self._recorder = Recorder(root)
        self._clipped: ClippedSum | None = None
        self._gathered: Gathered | None = None
        self._users: Sequence[int] | None = None
        self._most = most
        self._begun = False
        self._stands_in = False
        self._refused: Exception | None = None
        self._compared: int | None = None

    def adopt(self) -> None:
        """Learns anew which parameters hang on which layer; to be called before training."""
        self._recorder.adopt()
        self.weights.restart()

    def given(self, batch: Any, sampling: Sampling, context: DefenseContext) -> Any:
        """The batch to run: one example that does not count in the place of none."""
        self._stands_in, self._refused = False, None
        try:
            if count_samples(batch) == 0:
                batch = on_device(sampling.placeholder(), context)
                self._stands_in = True
        except Exception as error:  # raised with the other processes, in `run`
            self._refused = error
        return batch

    def run_whole(
        self,
        step: Callable[[Any], Any],
        batch: Any,
        sampling: Sampling,
        releases: int,
        context: DefenseContext,
    ) -> Any:
        """Runs a logical batch, in pieces where it has more rows than are to be run at once.

        Args:
            step: gives a batch to ``training_step``, with :meth:`run` around it.
            batch: the logical one.
            sampling: how it was drawn.
            releases: how many were made.
            context: where.

        Returns:
            What ``training_step`` gives for the whole batch.

        Raises:
            DefenseError: as :meth:`run`.
        """
        self._begin(batch, sampling, context)
        samples = 0 if self._stands_in else count_samples(batch)
        self._begun = True
        try:
            if self._most is None:
                return step(batch)
            pieces = pieces_of(batch, samples, self._most, self._team, self._users)
            if len(pieces) == 1:
                return step(batch)
            parameters = _released(context)

            by_user = self._users is not None

            def before(piece: Piece) -> None:
                self._stands_in, self._clipped = not piece.rows, None
                whole = [] if by_user and not piece.rows else piece.users
                self._users = None if piece.of else whole

            def after(piece: Piece) -> None:
                if self._gathered is None:
                    due = self.check.is_due(releases)
                    self._gathered = Gathered(samples, context.device, probed=due)
                with self._team.together():
                    clipped = self.clipped(parameters, context)
                self._gathered.positions += self._recorder.positions
                self._gathered.add(clipped, parameters, piece, self._team)
                self._clipped = None
                self._recorder.clear()

            ddp = is_ddp(context) and not _static(context)
            return run_pieces(pieces, step, context, before=before, after=after, reduced_last=ddp)
        finally:
            self._begun = self._stands_in = False

    def _begin(self, batch: Any, sampling: Sampling, context: DefenseContext) -> None:
        """A logical batch comes."""
        with self._team.together():
            if self._refused is not None:
                raise self._refused
            self._batches.begin(batch, context)
            self.weights.begin(context.root)
            samples = 0 if self._stands_in else count_samples(batch)
            sampling.check_size(samples)
            sampling.check_turn(self.row(), samples)
            self._users = sampling.users_in(samples)
        self._clipped = self._gathered = None

    def run(
        self,
        training_step: Callable[[], Any],
        batch: Any,
        sampling: Sampling,
        releases: int,
        context: DefenseContext,
    ) -> Any:
        """Records the forward pass and looks at the loss; an empty batch gives a loss of zero.

        Args:
            training_step: of the module.
            batch: that it gets: a logical one, or a piece of it within :meth:`run_whole`.
            sampling: how it was drawn.
            releases: how many were made.
            context: where.

        Returns:
            What ``training_step`` gave, with a loss of zero where the batch does not count.

        Raises:
            DefenseError: there is no loss with a graph, it is not a mean of per-sample means,
                samples are mixed, a buffer was changed, or weights are not finite; here or in
                another process.
        """
        recorder, team = self._recorder, self._team
        if not self._begun:
            self._begin(batch, sampling, context)
        samples = count_samples(batch)
        if samples == 0:
            recorder.clear()
            return zero_on_the_graph(context.root)
        contents = self._compared is None or releases >= self._compared + CHECK_EVERY
        self._compared = releases if contents else self._compared
        buffers = Buffers(context.root, contents=contents)
        sent = buffers.sent_first() if is_ddp(context) else nullcontext()
        # A batch of few samples, where most have more, may be joined as it is by chance.
        tells = samples >= TELLING or sampling.expected < 8
        given = tensors_of(batch) if tells else ()
        with recorder.step(samples, counts=not self._stands_in, given=given), sent:
            output = training_step()
        with team.together():
            recorder.check()
            buffers.check_unchanged()
            loss = loss_with_graph(output, samples)
            self.check.check_form(loss, recorder)
        self.check.look(loss, recorder, releases, team, counts=not self._stands_in)
        recorder.calls = []
        if self._stands_in:
            recorder.clear()
            return times_zero(output)
        return output

    def clipped(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> ClippedSum:
        """Norms and clip factors of this step's samples in this process; computed once.

        Raises:
            DefenseError: per-sample gradients could not be recorded.
        """
        if self._clipped is None:
            recorder, gathered = self._recorder, self._gathered
            recorder.check()
            if gathered is not None and gathered.parameters is not None:
                _check_same(gathered.parameters, parameters)
            self._clipped = ClippedSum(
                parameters,
                recorder.parts,
                recorder.samples,
                self.clip,
                self._clipping,
                context,
                half=recorder.half,
                weights=self.check.weights if recorder.samples else None,
                gathered=gathered,
                users=self._users,
            )
        return self._clipped

    @property
    def can_compare(self) -> bool:
        """Whether all pieces' gradients are known well enough to be compared with autograd's."""
        return self._gathered is None or self._gathered.probed

    def released(self, releases: int, *, unchecked: bool = False) -> None:
        """It has left the client: lets go of all that was recorded.

        Args:
            releases: how many were made, with this one.
            unchecked: what is checked now and then could not be, and is to be in the next release.
        """
        positions = self._recorder.positions
        positions += 0 if self._gathered is None else self._gathered.positions
        self.weights.released(releases, positions)
        self._batches.released()
        self.canaries = 0
        self.check.unchecked = unchecked
        self._clipped = self._gathered = None
        self._recorder.clear()

    def remove(self) -> None:
        """Takes the hooks out."""
        self._recorder.remove()
        self.weights.remove()
        self._compiled_anew.close()


@contextmanager
def _compiled_anew(root: nn.Module) -> Iterator[None]:
    """Within it compiled code runs the hooks, and can be gone through backward more than once.

    The checks do so before the user's own backward. What is compiled with donated buffers gives
    their memory away in the first.
    """
    if not is_compiled(root):
        yield
        return
    reset_compiled(root)
    with functorch.patch(donated_buffer=False):
        yield
    reset_compiled(root)


__all__ = [
    "Buffers",
    "DrawnBatches",
    "LossCheck",
    "WatchedStep",
    "Weights",
    "is_ddp",
    "printed",
    "times_zero",
    "zero_on_the_graph",
]
