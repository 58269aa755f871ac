"""The defence :class:`Freeze`: the output head or the word embeddings are not trained.

Parameters that are not trained have no gradient, so the update that a client sends does not hold
one. Attacks that read words from the gradient of the head or of the embeddings have no input then.
"""

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from lightning_fedleak.defenses import base
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy

Part = Literal["head", "embeddings", "head+embeddings"]


class Freeze(base.Defense):
    """Freezes the output head (with its bias), the input word embeddings, or both.

    Attacks that recover words from the gradient of the head or of the embeddings then have no
    input. The gradients of all other parameters leave the client as before. Adapters inside a
    frozen part, such as LoRA on the head, are frozen with it. At the end of the fit, the parameters
    that this defence froze are made trainable again. Under FSDP2 each module also holds unsharded
    copies of its parameters, and these stay frozen: build the sharded module again for the next
    fit.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, Freeze
        >>> freeze = Freeze("head+embeddings")
        >>> strategy = DefendedStrategy("auto", defenses=[freeze])

    Args:
        part: ``"head"``, ``"embeddings"`` or ``"head+embeddings"``.
        when: ``"always"`` freezes the part for the whole fit. With ``"hardened"`` it is trained
            until a gate, which watches how much a run leaks, calls :meth:`harden`, and is frozen
            from then on, also if the same object is used in a later fit. The gradients are then
            averaged over the clients after backward instead of by DDP inside backward, as for every
            defence that acts on gradients.

    Raises:
        DefenseError: ``part`` or ``when`` is unknown. At setup: the model has no such part, head
            and embeddings share one matrix and only one of them is to be frozen, or ``"hardened"``
            is combined with DDP or FSDP2 whose processes are one client. In an optimizer step: the
            part is no longer frozen.
        AnatomyError: At setup: the head and embeddings of the model are not found.
    """

    name = "freeze"
    guarantee = (
        "against whoever sees shared updates: the frozen parameters have no gradient and are not "
        "in the update. None for what the other parameters' gradients reveal."
    )
    _changing = ("active",)  # not a setting, so it is left out of the record of a run

    def __init__(self, part: Part, when: Literal["always", "hardened"] = "always") -> None:
        self.part: Part = base.check_choice("Freeze: part", part, get_args(Part))
        self.when = base.check_choice("Freeze: when", when, ("always", "hardened"))
        self._call = f"Freeze({part!r})"
        self.active = when == "always"
        self._part_parameters: dict[str, nn.Parameter] = {}
        self._frozen: list[nn.Parameter] = []

    def check_order(self, before: Sequence[base.Defense], after: Sequence[base.Defense]) -> None:
        """Raise an error if a per-sample defence would prepare the model before it is frozen."""
        super().check_order(before, after)
        if per_sample := [defense.name for defense in before if defense.per_sample]:
            raise base.DefenseError(
                f"put '{self.name}' before {', '.join(per_sample)}, which would prepare the model"
            )

    def before_setup(self, context: base.DefenseContext) -> None:
        """Freeze the part before the optimizer is built and DDP wraps the model."""
        part = self._find_part(find_anatomy(context.root))
        self._part_parameters = {n: p for n, p in context.root.named_parameters() if id(p) in part}
        if self.when == "hardened" and context.processes > 1:
            raise base.DefenseError(
                f"{self._call} cannot freeze in the middle of a run of one client under DDP or "
                "FSDP2. Use DefendedStrategy(client='rank'), or Freeze(when='always')."
            )
        if self.when == "always":
            self._freeze()

    def on_train_start(self, context: base.DefenseContext) -> None:
        """Freeze the part if it is to be frozen from the start of training.

        With ``"hardened"`` that is so if a gate had frozen it before the checkpoint was saved. It
        is done here, after the optimizer's state was restored: the state includes the part, so the
        optimizer must have been built while the part was trainable.
        """
        if self.active:
            self._freeze()

    def _freeze(self) -> None:
        """Freeze the part, and remember which of its parameters were trainable."""
        for parameter in self._part_parameters.values():
            parameter.grad = None
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)

    @property
    def acts_on_gradients(self) -> bool:
        """Return whether it may freeze during a run.

        It rewrites no gradient. But DDP's reducer, which averages gradients inside backward, does
        not support a parameter that is frozen after the model was wrapped. The strategy does
        without the reducer for defences that act on gradients, so this property is True then.
        """
        return self.when == "hardened"

    @property
    def acts_on_canaries(self) -> bool:
        """Return True: a monitor may simulate added layers (canaries) under this defence.

        Freezing leaves the gradients of such layers unchanged, so nothing has to be simulated.
        """
        return True

    @property
    def can_harden(self) -> bool:
        """Return whether it freezes the part only when a gate hardens the run."""
        return self.when == "hardened"

    def harden(self) -> str | None:
        """Freeze the part from the next step on; return a message, or None if it was frozen."""
        if self.active:
            return None
        self.active = True
        self._freeze()
        return f"freeze: {self._call} is frozen from now on"

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return whether the part is frozen."""
        return {"active": int(self.active)}

    def load_state_dict(self, state: base.State) -> None:
        """Remember that the part was frozen in the checkpoint; ``on_train_start`` freezes it."""
        self.active = self.active or bool(state.get("active", False))

    def before_release(self) -> None:
        """Raise an error if the part is no longer frozen, for example by a callback."""
        for name, parameter in self._part_parameters.items() if self.active else ():
            if parameter.requires_grad or parameter.grad is not None:
                raise base.DefenseError(
                    f"{self._call}: '{name}' is not frozen; the update was not released. Remove "
                    "what unfreezes it. Build a sharded model again in `configure_model`."
                )

    def teardown(self) -> None:
        """Make the parameters that it froze trainable again."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []
        self._part_parameters = {}

    def _find_part(self, anatomy: Anatomy) -> dict[int, nn.Parameter]:
        """Return the parameters of the part by ``id``.

        Raises:
            DefenseError: The model has no such part, or the part is half of a tied matrix.
        """
        part = self.part
        head = _parameters([] if anatomy.head is None else [anatomy.head])
        embeddings = _parameters(_word_embeddings(anatomy))
        tied = anatomy.tied or head.keys() & embeddings.keys()
        refusals = {
            "the model has no such part with parameters: freeze another": (
                (part != "embeddings" and not head) or (part != "head" and not embeddings)
            ),
            "use Freeze('head+embeddings'), because they are one tied matrix, or set "
            "tie_word_embeddings=False in the config": part != "head+embeddings" and tied,
        }
        base.refuse(f"{self._call}: ", refusals)
        if part == "head":
            return head
        return embeddings if part == "embeddings" else head | embeddings


def _word_embeddings(anatomy: Anatomy) -> list[nn.Module]:
    """Return the modules of input embeddings: in an encoder-decoder, also those of the decoder.

    The decoder's are recognized by their number of rows, that of the vocabulary.
    """
    if anatomy.kind != "seq2seq":
        return [anatomy.embedding]
    sizes = {anatomy.vocab_size, anatomy.embedding_rows}
    tables = (m for m in anatomy.model.modules() if isinstance(m, nn.Embedding))
    return [anatomy.embedding, *(m for m in tables if m.num_embeddings in sizes)]


def _parameters(modules: list[nn.Module]) -> dict[int, nn.Parameter]:
    """Return the parameters of modules by ``id``."""
    return {id(p): p for module in modules for p in module.parameters()}
