"""DefendedStrategy: a Lightning strategy in which defences act before data leaves the client.

A Lightning strategy decides where a model trains and how processes exchange gradients. This one
takes such a strategy, and becomes an instance of its class with methods that call the defences
(:mod:`~lightning_fedleak.strategies.seams`). A *release* is the update of one optimizer step that
leaves the client. The methods that raise errors stand in for the strategy until it is known.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from lightning_fedleak import lightning_packages
from lightning_fedleak.defenses import Defense, DefenseError
from lightning_fedleak.defenses.release import CanaryHook, Client, Tap, UpdateRelease
from lightning_fedleak.lightning_packages import EitherStrategy, both, twin
from lightning_fedleak.strategies.seams import combined, seam_of

_AUTOMATIC_NAMES = ("auto", "single_device")  # resolved by the Trainer's devices
_SUPPORTED = (
    "Pass 'auto', 'single_device', a DDP name that the Trainer's package registers ('ddp', ...), "
    "or an instance of SingleDeviceStrategy, DDPStrategy, ModelParallelStrategy (FSDP2) or of a "
    "subclass: DefendedStrategy('auto', defenses=[...])."
)


class DefendedStrategy(EitherStrategy):
    """A strategy in which defences act before an update leaves the client.

    In an optimizer step the gradient passes three stages (see
    :class:`~lightning_fedleak.model.snapshots.Stage`). *local* is a client's gradient before the
    defences, *shared* the result of the defences, and *aggregate* the gradient that the optimizer
    gets. Functions that are called with the gradients of a stage are *taps*.

    - ``client="rank"``, one device. *local* is the gradient after backward, accumulation and
      Lightning's gradient clipping; *aggregate* equals *shared*.
    - ``client="rank"``, DDP, with at least one defence that acts on gradients. Every process is a
      client. The model is not wrapped in ``DistributedDataParallel``, whose reducer would send
      undefended gradients. No defence acts on data that the module sends itself (``all_gather`` in
      a loss, metrics logged with ``sync_dist=True``). *local* is this process's gradient, after
      Lightning's clipping, and *aggregate* is the mean of the shared gradients of all processes. A
      gradient of None counts as zero. Buffers (BatchNorm's running statistics) are still sent from
      rank 0 to the other ranks, as DDP does, and no defence acts on them: switch this off with
      ``DDPStrategy(broadcast_buffers=False)``.
    - ``client="rank"``, DDP, without a defence that acts on gradients. DDP is unchanged and reduces
      inside backward, so taps are called for *aggregate* only. The local gradient, which equals the
      shared one, can be read in ``param.register_post_accumulate_grad_hook``.
    - ``client="world"``. All processes are machines of one client. DDP reduces first: *local* is
      the reduced gradient, and *shared* has the same noise on every rank.
    - ``client="world"``, ``ModelParallelStrategy`` (FSDP2). The same, but gradients are DTensors:
      taps and defences get this process's shards. They are called on every process at once, so that
      each may call ``.full_tensor()``. A defence that acts on gradients must declare
      ``takes_shards``. The states of optimizers and defences are restored after setup.
      ``client="rank"`` is an error, because FSDP2 reduces inside backward, and no process holds the
      gradient of its own data.

    With several optimizers (manual optimization) each step of each optimizer is a release of that
    optimizer's parameters, so a clip bounds each separately. Without defences, training is
    bit-identical to training with the plain strategy.

    A name is resolved when the Trainer gets the strategy, and ``"auto"`` as the Trainer would
    resolve it. From then on the object is also an instance of that strategy's class, for example of
    ``DDPStrategy``, from the Trainer's package (``lightning`` or ``pytorch_lightning``).

    Examples:
        >>> import lightning as L
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import DefendedStrategy, Freeze, GradientNoise
        >>> from lightning_fedleak.cli.finetuning import CausalLMFineTuning
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1)
        >>> module = CausalLMFineTuning(GPT2LMHeadModel(config))  # stands for your own
        >>> defenses = [Freeze("head+embeddings"), GradientNoise(clip=1.0, sigma=0.01)]
        >>> trainer = L.Trainer(max_steps=1, strategy=DefendedStrategy("auto", defenses=defenses))
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        >>> [defense.name for defense in trainer.strategy.defenses]
        ['freeze', 'gradient_noise']

    Args:
        strategy: The name or an instance of the strategy to wrap. Do not use the instance anywhere
            else.
        defenses: The defences, in the order in which they act.
        client: ``"rank"`` if each process is a client, ``"world"`` if all together are one client.
        outside_epsilon: Whether callbacks and schedulers that decide by a metric are allowed under
            DP-SGD. Epsilon does not cover their decisions, unless the metric is of public data.

    Raises:
        DefenseError: The strategy is not supported, is not from the Trainer's package, or does not
            work with the defences. Some errors are raised only when a Trainer gets the strategy, or
            at ``trainer.fit``.
        RuntimeError: At ``trainer.fit``: defences cannot act between the gradients and the update
            of an optimizer (LBFGS, or a fused optimizer under a GradScaler).
    """

    def __init__(
        self,
        strategy: str | lightning_packages.AnyStrategy = "auto",
        defenses: Sequence[Defense] = (),
        client: Client = "rank",
        *,
        outside_epsilon: bool = False,
    ) -> None:
        super().__init__()
        # It runs the defences at each update; the name must not be one that a strategy uses.
        self._fedleak = UpdateRelease(defenses, client, "DefendedStrategy")
        self.outside_epsilon = outside_epsilon
        if not isinstance(strategy, str):
            self._become(strategy)
            return
        if strategy not in _AUTOMATIC_NAMES:
            _check_name(strategy, *both("strategies.StrategyRegistry"))
        self._fedleak_name = strategy
        # The Trainer sets these attributes before it calls `_configure_launcher`.
        self.cluster_environment: Any = None
        self.parallel_devices: list[torch.device] | None = None
        self.num_nodes = 1
        self._layer_sync: Any = None

    @property
    def defenses(self) -> tuple[Defense, ...]:
        """Return the defences, in the order in which they act."""
        return self._fedleak.defenses

    @property
    def client(self) -> Client:
        """Return ``"rank"`` if each process is a client, ``"world"`` if all are one client."""
        return self._fedleak.client

    @property
    def separates_stages(self) -> bool:
        """Return whether taps are called for local and shared, with these gradients in ``p.grad``.

        It is False only if DDP reduces inside backward and each rank is a client.
        """
        if type(self) is DefendedStrategy:
            _not_attached()
        return self._fedleak.separates_stages

    def add_tap(self, fn: Tap) -> Callable[[], None]:
        """Call ``fn(stage, optimizer)`` while ``p.grad`` holds that stage's gradient.

        It is called in every optimizer step, for local, shared and aggregate in this order if
        ``separates_stages`` is True, and only for aggregate otherwise. ``fn`` runs without autograd
        and must not write to ``p.grad``, which is not a copy. The optimizer is the torch optimizer.
        Taps are removed when the fit ends (at teardown).

        Returns:
            A function that removes the tap, which may be called twice.
        """
        return self._fedleak.add_tap(fn)

    def add_canaries(self, fn: CanaryHook) -> Callable[[], None]:
        """Call ``fn(defense, parameters, context)`` right before each defence acts on gradients.

        It is called between the taps of local and shared, in every optimizer step. ``p.grad`` is
        the input of the defence and must not be written to. With a canary, the simulated gradient
        of layers that a dishonest server could add, ``defense.on_canary(canary, parameters,
        context)`` returns the gradient that the defence would release for these layers. ``fn`` is
        removed when the fit ends.

        Returns:
            A function that removes ``fn``, which may be called twice.
        """
        return self._fedleak.add_canaries(fn)

    def _become(self, inner: EitherStrategy) -> None:
        """Turn this object into an instance of the inner strategy's class with defences."""
        _check_inner(inner)
        attributes = {"_fedleak": self._fedleak, "outside_epsilon": self.outside_epsilon}
        self.__dict__ = vars(inner) | attributes
        cls = type(inner)
        self.__class__ = combined(f"Defended{cls.__name__}", seam_of(cls), cls, DefendedStrategy)
        self._check_combination()  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        """Build the inner strategy from its name, because devices and nodes are set now."""
        if type(self) is not DefendedStrategy:
            super()._configure_launcher()
            return
        inner = self._resolve()
        assert self.accelerator is not None
        inner.accelerator = self.accelerator
        inner._precision_plugin = self._precision_plugin
        if self._checkpoint_io is not None:
            inner._checkpoint_io = self._checkpoint_io
        if isinstance(inner, twin("strategies.DDPStrategy", self.accelerator)):
            inner.cluster_environment = inner.cluster_environment or self.cluster_environment
            inner.parallel_devices = inner.parallel_devices or self.parallel_devices
            inner.num_nodes = self.num_nodes
            inner._layer_sync = self._layer_sync
            inner.set_world_ranks()
        self._become(inner)
        self._configure_launcher()

    def _resolve(self) -> Any:
        """Return the named strategy, or the Trainer's default one, from the Trainer's package."""
        accelerator = self.accelerator
        if self._fedleak_name not in _AUTOMATIC_NAMES:
            return _by_name(self._fedleak_name, accelerator)
        devices = self.parallel_devices or []
        names = ("CPUAccelerator", "CUDAAccelerator", "MPSAccelerator")
        if not isinstance(accelerator, both(*(f"accelerators.{name}" for name in names))):
            raise DefenseError(
                f"DefendedStrategy('{self._fedleak_name}') runs on CPU, CUDA and MPS, and not on "
                f"the accelerator {type(accelerator).__name__}"
            )
        if len(devices) == 1 and self.num_nodes == 1:
            return twin("strategies.SingleDeviceStrategy", accelerator)(device=devices[0])
        if self._fedleak_name == "single_device":
            raise DefenseError("DefendedStrategy('single_device') has several devices: pass 'ddp'")
        interactive = twin("trainer.connectors.accelerator_connector._IS_INTERACTIVE", accelerator)
        forks = interactive and self.num_nodes == 1
        return _by_name("ddp_fork" if forks else "ddp", accelerator)

    # Lightning's abstract methods, which must exist while the name of the strategy is unresolved.
    @property
    def root_device(self) -> torch.device:
        """Raise an error: the value is not known before a Trainer has the strategy."""
        _not_attached()

    @property
    def is_global_zero(self) -> bool:
        """Raise an error: the value is not known before a Trainer has the strategy."""
        _not_attached()

    def model_to_device(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: the call is not possible before a Trainer has the strategy."""
        _not_attached()

    reduce = barrier = broadcast = all_gather = model_to_device  # each raises the same error


def _not_attached() -> NoReturn:
    """Raise an error for a use before the Trainer has resolved the strategy's name."""
    raise RuntimeError("this DefendedStrategy has not been given to a Trainer yet")


def _check_name(name: str, *registries: Any) -> None:
    """Raise an error unless one of the registries has a supported DDP strategy of this name."""
    classes = [registry[name]["strategy"] for registry in registries if name in registry]
    if not any(issubclass(c, both("strategies.DDPStrategy")) and _is_supported(c) for c in classes):
        raise DefenseError(f"DefendedStrategy: strategy={name!r} is not supported. {_SUPPORTED}")


def _by_name(name: str, accelerator: object) -> Any:
    """Return a registered DDP strategy from the package of the Trainer's accelerator."""
    registry = twin("strategies.StrategyRegistry", accelerator)
    _check_name(name, registry)
    return registry.get(name)


def _is_supported(cls: type) -> bool:
    """Return whether a class is supported, or derives from a supported class.

    The strategies of DeepSpeed and XLA are not supported, although they derive from such classes.
    """
    supported = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
    unsupported = ("DeepSpeedStrategy", "single_xla.SingleDeviceXLAStrategy", "xla.XLAStrategy")
    return issubclass(cls, both(*(f"strategies.{name}" for name in supported))) and not issubclass(
        cls, both(*(f"strategies.{name}" for name in unsupported))
    )


def _check_inner(inner: EitherStrategy) -> None:
    """Raise an error if a strategy instance cannot be wrapped."""
    fits = _is_supported(type(inner)) and not isinstance(inner, DefendedStrategy)
    if not fits or inner._launcher is not None or inner._lightning_module is not None:
        raise DefenseError(
            f"DefendedStrategy: {type(inner).__name__} is not supported, or this one is already "
            f"defended or used by a Trainer. {_SUPPORTED}"
        )
