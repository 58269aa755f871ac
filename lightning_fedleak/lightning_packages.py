"""Lightning is two packages, ``lightning.pytorch`` and ``pytorch_lightning``, of twin classes.

``lightning`` installs both, and a program may load either. A run is of one of them: that of its
Trainer. Both are imported here, which takes a tenth of a second more than one, so that what a class
is does not hang on what the program imported before.
"""

from __future__ import annotations

import importlib
from abc import ABCMeta
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import Callback as EitherCallback
    from lightning.pytorch.strategies import Strategy as AnyStrategy
    from lightning.pytorch.strategies import Strategy as EitherStrategy

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def both(*names: str) -> tuple[Any, ...]:
    """What has one of these names in either package; of classes, for ``isinstance``.

    Args:
        names: below the package: ``"strategies.DDPStrategy"``.
    """
    return tuple(_named(package, name) for name in names for package in PACKAGES)


def package_of(of: object) -> str:
    """The package that a Trainer, a strategy, an accelerator or a class of them comes from.

    Raises:
        TypeError: from neither.
    """
    for kind in (of if isinstance(of, type) else type(of)).__mro__:
        if (package := _home(kind)) is not None:
            return package
    raise TypeError(f"{of!r} is an object of neither {' nor '.join(PACKAGES)}")


def twin(name: str, of: object) -> Any:
    """What has a name in the package that something comes from.

    Args:
        name: below the package: ``"strategies.DDPStrategy"``.
        of: as :func:`package_of` takes it.
    """
    return _named(package_of(of), name)


def mixed(what: str, of: object, with_: object) -> str | None:
    """One sentence where two things are of different packages; None where they are of one.

    Args:
        what: names the first of them.
        of: the first.
        with_: the Trainer, or what it has chosen itself.
    """
    own, other = package_of(of), package_of(with_)
    if own == other:
        return None
    return f"{what} is of `{own}` and this Trainer of `{other}`: import both from one of the two."


def _named(package: str, name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"{package}.{module}"), attribute)


def _home(kind: type) -> str | None:
    names = (p for p in PACKAGES if f"{kind.__module__}.".startswith(f"{p}."))
    return next(names, None)


def _elsewhere(callback: object, trainer: str) -> str:
    name = type(callback).__name__
    return (
        f"{name} is a callback of Lightning's Trainer and does not work in {trainer}: train the "
        f"model in Trainer(callbacks=[{name}(...)]) of lightning.pytorch, a causal language model "
        "by lightning_fedleak.finetuning.CausalLMFineTuning(model)."
    )


# ---- classes that both packages take for their own ------------------------------------------


class _OwnFirst(ABCMeta):
    """Of several packages' classes, those of the first come before all of the others."""

    def mro(cls) -> list[type]:
        """As usual, with the other package's classes behind the last of the own one's."""
        order = super().mro()
        own = next(filter(None, map(_home, order)), None)
        others = [kind for kind in order if _home(kind) not in (None, own)]
        kept = [kind for kind in order if kind not in others]
        end = max((place for place, kind in enumerate(kept, 1) if _home(kind)), default=0)
        return [*kept[:end], *others, *kept[end:]]


if not TYPE_CHECKING:

    class EitherCallback(*both("callbacks.Callback")):
        """A callback for the Trainers of both packages, and of no other library."""

        def on_init_end(self, *_: object, **__: object) -> None:
            """Refuses the Trainer of transformers, which calls this first."""
            raise TypeError(_elsewhere(self, "transformers.Trainer"))

        def on_after_setup(self, *_: object, **__: object) -> None:
            """Refuses Fabric, which calls this first."""
            raise TypeError(_elsewhere(self, "Fabric"))

    class EitherStrategy(*both("strategies.Strategy"), metaclass=_OwnFirst):
        """A strategy for the Trainers of both packages.

        One that also is a class of one package has its methods, never the other's.
        """

    AnyStrategy = Union[both("strategies.Strategy")]  # noqa: UP007


__all__ = [
    "PACKAGES",
    "AnyStrategy",
    "EitherCallback",
    "EitherStrategy",
    "both",
    "mixed",
    "package_of",
    "twin",
]
