"""Keeps chosen parameters out of training, and so out of the update."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Literal

import torch.distributed as dist
from torch import Tensor, nn

from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, State, refuse
from lightning_fedleak.defenses.checks import check_choice
from lightning_fedleak.model.anatomy import Anatomy, AnatomyError, find_anatomy, matrix_shape

Part = Literal["head", "embeddings", "head+embeddings"]
_PARTS: tuple[Part, ...] = ("head", "embeddings", "head+embeddings")
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.")


class Freeze(Defense):
    """Freezes the output head (with its bias), the input word embeddings, or parameters by name.

    Word recovery from the head's or the embeddings' gradient then has nothing to read. The
    gradients of all other parameters leave the client as before. Adapters that sit inside a
    frozen part (LoRA on the head, say) are frozen with it. Parameters that are trainable when
    the fit ends get back what they were when it began. FSDP2 keeps whole copies of parameters that
    do not follow: build a sharded module again for the next fit.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, Freeze
        >>> freeze = Freeze("head+embeddings", parameters=["*.wpe.*"])
        >>> strategy = DefendedStrategy("auto", defenses=[freeze])

    Args:
        part: what to freeze; None for ``parameters`` alone.
        parameters: patterns of names, as ``named_parameters`` of the LightningModule gives them
            (those of torch.compile's and FSDP's wrappers left out). ``*`` stands for anything, dots
            too: ``["*.attn.*", "model.lm_head.*"]``.
        when: ``"always"``, or ``"hardened"``: trained like the rest until a gate hardens the run
            (:meth:`harden`), and frozen from then on. Then DDP does not reduce inside backward, as
            with every defence that acts on gradients.

    Raises:
        DefenseError: an unknown part, or nothing to freeze; at setup, a model without that part, a
            pattern that no name matches, a shared matrix of which one role alone was named, or a
            model with nothing left to train; in a step, a part that something else has unfrozen
            meanwhile.
    """

    name = "freeze"
    guarantee = (
        "against whoever sees shared updates: the frozen parameters have no gradient and are not "
        "in the update. None for what the other parameters' gradients reveal."
    )

    def __init__(
        self,
        part: Part | None = None,
        parameters: Sequence[str] | None = None,
        when: Literal["always", "hardened"] = "always",
    ) -> None:
        self.part = check_choice("Freeze: part", part, _PARTS, optional=True)
        patterns = tuple(parameters or ())
        if part is None and not patterns:
            raise DefenseError(
                "Freeze: nothing is named; give a part, such as Freeze('head'), or patterns of "
                "names, such as Freeze(parameters=['*.attn.*'])"
            )
        self.when = check_choice("Freeze: when", when, ("always", "hardened"))
        self.parameters = patterns
        self._call = (
            f"Freeze({part!r}, parameters={[*patterns]})" if patterns else f"Freeze({part!r})"
        )
        self.active = when == "always"
        self._chosen: dict[str, nn.Parameter] = {}
        self._frozen: list[nn.Parameter] = []
        self._watched: dict[str, nn.Parameter] = {}

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
        frozen = self._by_pattern(context.root)
        if self.part is not None:
            try:
                anatomy = find_anatomy(context.root)
            except AnatomyError as error:
                raise DefenseError(f"{self._call}: {error} Or pass parameters=.") from error
            frozen |= self._by_part(self.part, anatomy)
        self._chosen = {n: p for n, p in context.root.named_parameters() if id(p) in frozen}
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if self.when == "hardened" and processes > context.clients:
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
        self._watched = dict(self._chosen)

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
        for name, parameter in self._watched.items():
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
        self._watched = {}
        self._chosen = {}

    def _by_pattern(self, root: nn.Module) -> dict[int, nn.Parameter]:
        """Return the parameters whose names match a pattern, by identity."""
        frozen: dict[int, nn.Parameter] = {}
        pairs = list(_named_parameters(root))
        for pattern in self.parameters:
            matches = {id(p): p for name, p in pairs if fnmatchcase(name, pattern)}
            if not matches:
                names = [name for name, _ in pairs]
                close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
                raise DefenseError(
                    f"{self._call}: no parameter is named like {pattern!r}. The model's "
                    f"{len(names)} parameters are named like {', '.join(close)}."
                )
            frozen |= matches
        for name, parameter in pairs:
            named = any(fnmatchcase(name, pattern) for pattern in self.parameters)
            if id(parameter) in frozen and not named:
                raise DefenseError(
                    f"{self._call}: '{name}' is one shared parameter with another that is named. "
                    "Add it to the patterns, or untie them (tie_word_embeddings=False)."
                )
        return frozen

    def _by_part(self, part: Part, anatomy: Anatomy) -> dict[int, nn.Parameter]:
        """Return the parameters of the part, by identity."""
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
        refuse(f"Freeze({part!r}): ", refusals)
        if part == "head":
            return head
        return embeddings if part == "embeddings" else head | embeddings


def _named_parameters(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every name of every parameter, a shared one under each of its names."""
    for name, parameter in root.named_parameters(remove_duplicate=False):
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        yield name, parameter


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
