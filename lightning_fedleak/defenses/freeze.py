"""Keeps the head or the embeddings out of training, and so out of the update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from torch import Tensor, nn

from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, State, refuse
from lightning_fedleak.defenses.checks import check_choice
from lightning_fedleak.defenses.host import rank_and_world_size
from lightning_fedleak.model.anatomy import Anatomy, AnatomyError, find_anatomy, matrix_shape

Part = Literal["head", "embeddings", "head+embeddings"]


class Freeze(Defense):
    """Freezes the output head (with its bias), the input word embeddings, or both.

    Word recovery from the head's or the embeddings' gradient then has nothing to read. The
    gradients of all other parameters leave the client as before. Adapters that sit inside a
    frozen part (LoRA on the head, say) are frozen with it. Parameters that are trainable when
    the fit ends get back what they were when it began. FSDP2 keeps whole copies of parameters that
    do not follow: build a sharded module again for the next fit.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, Freeze
        >>> freeze = Freeze("head+embeddings")
        >>> strategy = DefendedStrategy("auto", defenses=[freeze])

    Args:
        part: what to freeze.
        when: ``"always"``, or ``"hardened"``: trained like the rest until a gate hardens the run
            (:meth:`harden`), and frozen from then on. Then DDP does not reduce inside backward, as
            with every defence that acts on gradients.

    Raises:
        DefenseError: an unknown part; at setup, a model without that part, a tied matrix of which
            only one role was named, or a model with nothing left to train; in a step, a part that
            something else has unfrozen meanwhile.
    """

    name = "freeze"
    guarantee = (
        "against whoever sees shared updates: the frozen parameters have no gradient and are not "
        "in the update. None for what the other parameters' gradients reveal."
    )
    _changing = ("active",)

    def __init__(self, part: Part, when: Literal["always", "hardened"] = "always") -> None:
        self.part: Part = check_choice("Freeze: part", part, get_args(Part))
        self.when = check_choice("Freeze: when", when, ("always", "hardened"))
        self._call = f"Freeze({part!r})"
        self.active = when == "always"
        self._chosen: dict[str, nn.Parameter] = {}
        self._frozen: list[nn.Parameter] = []

    def check_order(self, before: Sequence[Defense], after: Sequence[Defense]) -> None:
        """Raise an error where a per-sample defence would prepare the model before it is frozen."""
        super().check_order(before, after)
        if early := [defense.name for defense in before if defense.per_sample]:
            raise DefenseError(
                f"{self._call}: {', '.join(early)} would prepare the model before it is frozen. "
                f"Put '{self.name}' before it."
            )

    def before_setup(self, context: DefenseContext) -> None:
        """Freeze before optimizer and DDP see the parameters."""
        try:
            frozen = self._find_part(find_anatomy(context.root))
        except AnatomyError as error:
            raise DefenseError(f"{self._call}: {error}") from error
        self._chosen = {n: p for n, p in context.root.named_parameters() if id(p) in frozen}
        if self.when == "hardened" and rank_and_world_size()[1] > context.clients:
            raise DefenseError(
                f"{self._call} freezes in the middle of a run, which DDP and FSDP2 cannot follow. "
                "Use client='rank', or when='always'."
            )
        if self.when == "always":
            self._freeze()

    def on_train_start(self, context: DefenseContext) -> None:
        """Freeze what a gate froze before the run was interrupted.

        Not before: the optimizer whose state is restored was made when it was trained.
        """
        if self.active:
            self._freeze()

    def _freeze(self) -> None:
        for parameter in self._chosen.values():
            parameter.grad = None
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)

    @property
    def acts_on_gradients(self) -> bool:
        """Return True where it may freeze during a run, which DDP's reducer could not follow."""
        return self.when == "hardened"

    @property
    def acts_on_canaries(self) -> bool:
        """Return True: frozen parameters change nothing for layers that a server has added."""
        return True

    @property
    def can_harden(self) -> bool:
        """Return whether it waits for a gate."""
        return self.when == "hardened"

    def harden(self) -> str | None:
        """Freeze from the next step on."""
        if self.active:
            return None
        self.active = True
        self._freeze()
        return f"freeze: {self._call} is frozen from now on"

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return whether it has been frozen."""
        return {"active": int(self.active)}

    def load_state_dict(self, state: State) -> None:
        """Keep a resumed run frozen."""
        self.active = self.active or bool(state.get("active", False))

    def before_release(self) -> None:
        """Raise an error in a step in which something has unfrozen the part, such as a schedule."""
        for name, parameter in self._chosen.items() if self.active else ():
            if parameter.requires_grad or parameter.grad is not None:
                raise DefenseError(
                    f"{self._call}: '{name}' is frozen and trains or has a gradient: the update "
                    "was not released. Drop the defence, or what unfreezes layers; build a sharded "
                    "model again in `configure_model`."
                )

    def teardown(self) -> None:
        """Make trainable again what it froze."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []
        self._chosen = {}

    def _find_part(self, anatomy: Anatomy) -> dict[int, nn.Parameter]:
        """Return the parameters of the part, by identity."""
        part = self.part
        head = _parameters([] if anatomy.head is None else [anatomy.head])
        embeddings = _parameters(_word_embeddings(anatomy))
        tied = anatomy.tied or head.keys() & embeddings.keys()
        refusals = {
            "this model has no output head with parameters: use Freeze('embeddings')": (
                part != "embeddings" and not head
            ),
            "the input embeddings have no parameters": part != "head" and not embeddings,
            "head and input embeddings are one tied matrix. Use Freeze('head+embeddings'), or "
            "untie them: tie_word_embeddings=False in the config": (
                part != "head+embeddings" and tied
            ),
        }
        refuse(f"{self._call}: ", refusals)
        if part == "head":
            return head
        return embeddings if part == "embeddings" else head | embeddings


def _word_embeddings(anatomy: Anatomy) -> list[nn.Module]:
    """Return the input embeddings, with an encoder-decoder's also the decoder's."""
    if anatomy.kind != "seq2seq":
        return [anatomy.embedding]
    shape = matrix_shape(anatomy.embedding)
    sizes = {anatomy.vocab_size, shape[0] if shape else 0}
    tables = (m for m in anatomy.model.modules() if isinstance(m, nn.Embedding))
    return [anatomy.embedding, *(m for m in tables if m.num_embeddings in sizes)]


def _parameters(modules: list[nn.Module]) -> dict[int, nn.Parameter]:
    return {id(p): p for module in modules for p in module.parameters()}
