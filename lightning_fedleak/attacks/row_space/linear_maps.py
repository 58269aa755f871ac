"""The linear maps of a model, and the inputs that they read.

Attacks on a shared gradient use these maps to recover the batch's tokens. A linear map is a weight
matrix: of ``nn.Linear`` or ``Conv1D``, or a factor A or B of a LoRA. The rows of its gradient are
combinations of its inputs. :func:`find_linear_maps` lists the maps of a model. An input is known if
it depends only on the token (and its position), as before the first attention:
:func:`find_known_inputs` finds these inputs, and groups the maps that read the same one. Inputs are
compared in runs of the model, so that no norm, scaled embedding, fused projection or parallel block
has to be known by name.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.public_text import do_once
from lightning_fedleak.model import model_runs, snapshots
from lightning_fedleak.model.anatomy import (
    EMBEDDING_WEIGHT,
    Anatomy,
    Place,
    states_in,
    unwrap,
    walk,
)

_TOLERANCE = 1e-5  # relative difference up to which two float32 inputs are equal; not tuned
_NUMBERS = 1 << 20  # entries of the input computed in one run on a CPU; more are no faster
Findings = TypeVar("Findings")
_LOW_RANK = ("lora_A", "lora_B")
NO_GRADIENT_YET = (
    "LoRA's A has no gradient until B (of AdaLoRA: E) has moved; with warm-up from 0 that is step 2"
)


@dataclass(frozen=True)
class LinearMap:
    """A weight matrix that multiplies an input. Two maps of the same name and modules are equal.

    Attributes:
        name: The name of the parameter, in ``anatomy.root``.
        reader: the module that is called with the input.
        layer: the layer that the map belongs to: the reader itself, or the layer around an adapter.
        axis: the parameter's axis along the input: 1 for ``nn.Linear`` and LoRA's factors, 0 for
            GPT-2's ``Conv1D``.
        rows: number of outputs.
        factor: ``"A"`` or ``"B"`` for a factor of a low-rank adapter (B multiplies the output of
            A), or ``"whole"``.
        regularised: whether the loss has a term for the parameter itself (AdaLoRA's orthogonality),
            whose gradient is a combination of the parameter's rows.
        dropouts: the dropout modules directly before the map, for a factor B before its A.
    """

    name: str
    reader: nn.Module
    layer: nn.Module
    axis: int
    rows: int
    factor: str
    regularised: bool = False
    dropouts: tuple[nn.Module, ...] = ()


def find_linear_maps(anatomy: Anatomy) -> list[LinearMap]:
    """Return the linear maps of the language model, trained or not.

    The head and inactive adapters are excluded. A layer with a low-rank adapter gives three maps:
    its matrix and both factors. A matrix that several layers share is excluded, because its
    gradient is a sum over the inputs of all of them.
    """
    key = ("linear maps", id(anatomy.root))
    return do_once(key, lambda: _find_linear_maps(anatomy), subject=anatomy)


def _find_linear_maps(anatomy: Anatomy) -> list[LinearMap]:
    """Compute the result of :func:`find_linear_maps`, which is cached."""
    names = {id(p): n for n, p in anatomy.root.named_parameters(remove_duplicate=False)}
    maps: list[LinearMap] = []
    for _, module in walk(anatomy.model):
        maps.extend(_weight_map(module, module, "whole", names))
        maps.extend(_factors(module, names))
    head = anatomy.head
    head_modules = set() if head is None else {id(m) for m in head.modules()}
    uses = Counter(m.name for m in maps)
    return [m for m in maps if id(m.reader) not in head_modules and uses[m.name] == 1]


class PerMaps(Generic[Findings]):
    """A cached result of a function of a model's linear maps.

    It is computed again if other maps are in use, because adapters may be switched and modules be
    replaced during a fit.

    Args:
        find: computes the result from a model and its linear maps.
    """

    def __init__(self, find: Callable[[Anatomy, list[LinearMap]], Findings]) -> None:
        self._find = find
        self._latest: tuple[Anatomy, list[LinearMap], Findings] | None = None

    def get(self, anatomy: Anatomy) -> Findings:
        """Return the result; it is the same object while the same maps are in use."""
        maps, latest = find_linear_maps(anatomy), self._latest
        if latest is None or latest[0] is not anatomy or latest[1] != maps:
            self._latest = latest = (anatomy, maps, self._find(anatomy, maps))
        return latest[2]


def _weight_map(
    module: nn.Module, layer: nn.Module, factor: str, names: dict[int, str]
) -> Iterator[LinearMap]:
    """Yield the map of a module's weight, if it is an ``nn.Linear`` or a ``Conv1D``."""
    weight = module._parameters.get("weight")
    is_conv = type(module).__name__ == "Conv1D"
    if weight is None or weight.dim() != 2 or not (isinstance(module, nn.Linear) or is_conv):
        return
    if id(weight) in names:
        axis = 0 if is_conv else 1
        yield LinearMap(names[id(weight)], module, layer, axis, weight.shape[1 - axis], factor)


def _factors(module: nn.Module, names: dict[int, str]) -> Iterator[LinearMap]:
    """Yield the factors of a layer's active adapters, which ``walk`` does not enter.

    A layer of litgpt has at most one adapter, whose factors are its own parameters. A layer of PEFT
    has them in dictionaries by adapter: modules for LoRA, parameters for AdaLoRA. Where a factor is
    a parameter, no module is called with A's output, so that only A is yielded.
    """
    lora_a, dropout = module._parameters.get("lora_A"), module._modules.get("lora_dropout")
    if lora_a is not None and lora_a.dim() == 2 and id(lora_a) in names:
        dropouts_before = () if dropout is None else (dropout,)
        yield LinearMap(
            names[id(lora_a)], module, module, 1, len(lora_a), "A", dropouts=dropouts_before
        )
    for dict_name in _LOW_RANK:
        factors = module._modules.get(dict_name)
        if not isinstance(factors, nn.ModuleDict | nn.ParameterDict):
            continue
        factor = dict_name[-1]
        for adapter in getattr(module, "active_adapters", ()):
            if adapter not in factors:
                continue
            is_parameter = isinstance(factors, nn.ParameterDict)
            inner: Any = factors._parameters.get(adapter) if is_parameter else factors[adapter]
            adapters = module._modules.get("lora_dropout")
            dropouts: tuple[nn.Module, ...] = ()
            if isinstance(adapters, nn.ModuleDict) and adapter in adapters:
                dropouts = (adapters[adapter],)
            if not is_parameter:
                for linear in _weight_map(inner, module, factor, names):
                    yield replace(linear, dropouts=dropouts)
            elif factor == "A":
                # AdaLoRA's layer multiplies by its parameters itself: only its input is hooked.
                name, rows = names[id(inner)], len(inner)
                yield LinearMap(name, module, module, 1, rows, factor, True, dropouts)


def adalora_factors(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield AdaLoRA's factors A and B; the loss has a term for each of them."""
    for module in model.modules():
        for dict_name in _LOW_RANK:
            factors = module._modules.get(dict_name)
            if isinstance(factors, nn.ParameterDict):
                yield from factors.parameters()


def dropout_variance(dropouts: Sequence[nn.Module]) -> float:
    """Return the variance that dropouts in training mode add, relative to their input's square."""
    shares = [float(getattr(m, "p", 0.0)) for m in dropouts if m.training]
    return sum(p / (1 - p) if p < 1 else math.inf for p in shares)


@dataclass(frozen=True, eq=False)
class SharedInput:
    """An input and the maps that read it.

    Attributes:
        maps: the maps that read it, each called once in a forward.
        width: d, the length of one token's input vector.
    """

    maps: tuple[LinearMap, ...]
    width: int

    @property
    def reader(self) -> nn.Module:
        """Return a module that is called with the input; that of a whole matrix if there is one."""
        whole = (m for m in self.maps if m.factor == "whole")
        return next(whole, self.maps[0]).reader

    def trainable_maps(self, anatomy: Anatomy) -> tuple[LinearMap, ...]:
        """Return the maps whose parameter is currently trained."""
        return tuple(m for m in self.maps if anatomy.trainable(m.name))


@dataclass(frozen=True, eq=False)
class KnownInput(SharedInput):
    """An input that depends on the token alone, or on the token and its position.

    Attributes:
        positional: whether it depends on the position too.
        lone_token_maps: names of the maps whose gradient shows a token that attends to no other,
            from :func:`lone_token_maps`.
        dropouts: dropout modules before the input, such as that of the embeddings.
    """

    positional: bool
    lone_token_maps: frozenset[str]
    dropouts: tuple[nn.Module, ...] = ()


def nonzero_gradients(
    view: snapshots.Observation, maps: Iterable[LinearMap]
) -> dict[LinearMap, Tensor]:
    """Return the non-zero shared gradients of maps, each with one row per output of its map.

    Raises:
        UnusableObservation: a gradient has NaN or infinity, or is not in ``view``.
    """
    gradients = {}
    for linear in maps:
        g = snapshots.whole_tensor(view.gradient(linear.name))
        snapshots.check_finite(g, f"the gradient of {linear.name}")
        if bool(g.any()):
            gradients[linear] = g if linear.axis == 1 else g.T
    return gradients


def refuse_zeros(maps: Iterable[LinearMap], name: str = "every map that is read") -> NoReturn:
    """Raise the error for maps whose gradients are all zero.

    Raises:
        NotYet: a map is a LoRA's A, which has no gradient while B is zero.
        UnusableObservation: no map is a LoRA's A.
    """
    if any(m.factor == "A" for m in maps):
        raise snapshots.NotYet(NO_GRADIENT_YET)
    raise snapshots.UnusableObservation(f"the gradient of {name} is zero")


def find_shared_inputs(anatomy: Anatomy, maps: Sequence[LinearMap]) -> list[SharedInput]:
    """Return the distinct inputs that are as wide as hidden states, in the order of the forward.

    Maps of the same block that read the same input are grouped. LoRA's factors B are left out,
    because they read the output of A.
    """
    maps = [m for m in maps if m.factor != "B"]
    ids = _distant_tokens(anatomy, 8).view(2, 4)
    inputs = _inputs(anatomy, [m.reader for m in maps], ids)
    groups = _group_by_input([m for m in maps if id(m.reader) in inputs], inputs)
    order = {key: place for place, key in enumerate(inputs)}
    groups.sort(key=lambda group: min(order[id(m.reader)] for m in group[1]))
    width = anatomy.hidden_size
    return [SharedInput(tuple(members), width) for x, members in groups if x.shape[-1] == width]


def first_in_blocks(inputs: Iterable[SharedInput]) -> dict[str, SharedInput]:
    """Return the first input of each block, that of its attention, by the block's name."""
    blocks: dict[str, SharedInput] = {}
    for shared_input in inputs:
        blocks.setdefault(block_name(shared_input.maps[0].name), shared_input)
    return blocks


def _group_by_input(
    maps: Sequence[LinearMap], inputs: Mapping[int, Tensor]
) -> list[tuple[Tensor, list[LinearMap]]]:
    """Return each distinct input of a block with the maps of the block that read it."""
    groups: list[tuple[Tensor, list[LinearMap]]] = []
    for linear in maps:
        map_input = inputs[id(linear.reader)]
        for x, members in groups:
            same_block = block_name(members[0].name) == block_name(linear.name)
            if same_block and x.shape == map_input.shape and torch.equal(x, map_input):
                members.append(linear)
                break
        else:
            groups.append((map_input, [linear]))
    return groups


def find_known_inputs(anatomy: Anatomy, maps: Sequence[LinearMap]) -> list[KnownInput]:
    """Return the inputs that a token (and its position) determines, widest first.

    They are found by three runs on texts of four tokens: as they are, with other tokens at places 0
    and 2, and with one token repeated. An input at places 1 and 3 that changes with its neighbours
    has been mixed by attention. One that differs between places of a repeated token is positional.

    Args:
        anatomy: The model.
        maps: result of :func:`find_linear_maps`.
    """
    tokens = _distant_tokens(anatomy, 12)
    ids, neighbours = tokens[:8].view(2, 4), tokens[:8].view(2, 4).clone()
    neighbours[:, ::2] = tokens[8:].view(2, 2)
    same = ids[:1, 1:2].expand(2, 4).contiguous()
    readers = list({id(m.reader): m.reader for m in maps}.values())
    plain, replaced, constant = (_inputs(anatomy, readers, t) for t in (ids, neighbours, same))
    token_maps = []
    for linear in maps:
        a, b, c = (inputs.get(id(linear.reader)) for inputs in (plain, replaced, constant))
        if a is None or b is None or c is None:
            continue
        if _same_states(a[:, 1::2], b[:, 1::2]) and not _same_states(a[:, 1], a[:, 3]):
            token_maps.append(linear)
    known_inputs = []
    lone = lone_token_maps(anatomy, token_maps)
    for x, members in _group_by_input(token_maps, plain):
        repeated = constant[id(members[0].reader)]
        positional = not _same_states(repeated[:, 1], repeated[:, 3])
        dropouts = _dropouts_before(anatomy, members[0].reader, ids)
        names = lone & {m.name for m in members}
        known_inputs.append(KnownInput(tuple(members), x.shape[-1], positional, names, dropouts))
    return sorted(known_inputs, key=lambda known_input: -known_input.width)


def lone_token_maps(anatomy: Anatomy, maps: Sequence[LinearMap]) -> frozenset[str]:
    """Return the names of the maps whose gradient shows a token that attends only to itself.

    Values, outputs and feed-forwards show it. Queries and keys do not, because a softmax over a
    single key is 1 whatever they are. So the gradient of queries misses the first token of a causal
    text, the gradient of keys misses texts of two tokens, and in an encoder both miss texts of one
    token. A certificate from such gradients alone would ignore these tokens.

    The maps are found by runs on a text of one token, with the output of each map changed in turn.

    Args:
        anatomy: The model.
        maps: result of :func:`find_linear_maps`.
    """
    ids = _distant_tokens(anatomy, 1)[None]
    layers = {id(m.layer): m.layer for m in maps}
    with untraced(anatomy) as model:
        run = to_last_block(anatomy, model)
        plain = run(**text_for(anatomy, ids))
        visible = set()
        for key, layer in layers.items():
            # The output of a norm after the changed output changes too.
            with layer.register_forward_hook(lambda *call: call[-1].flip(-1) + 1):
                changed = run(**text_for(anatomy, ids))
            if not torch.equal(plain, changed):
                visible.add(key)
    return frozenset(m.name for m in maps if id(m.layer) in visible)


def to_last_block(anatomy: Anatomy, model: nn.Module) -> Callable[..., Tensor]:
    """Return a function that runs a classifier to its last block, other models to their logits.

    A classifier's head needs texts with an end or padding token, which the texts here lack.
    """
    if anatomy.kind == "classifier" and anatomy.blocks:
        return model_runs.stop_at(model, Place("", unwrap(anatomy.blocks[-1]), "output"))
    return lambda **text: model_runs.logits_in(model(**text))


def _dropouts_before(anatomy: Anatomy, reader: nn.Module, ids: Tensor) -> tuple[nn.Module, ...]:
    """Return the dropout modules that run before a reader, without those of a LoRA."""
    calls: list[nn.Module] = []
    dropouts = [
        m
        for n, m in anatomy.model.named_modules()
        if isinstance(m, nn.Dropout) and ".lora_dropout." not in f".{n}."
    ]
    with untraced(anatomy, dropouts, lambda m, *_: calls.append(m)):
        model_runs.stop_at(anatomy.model, Place("", reader, "input"))(**text_for(anatomy, ids))
    return tuple(dict.fromkeys(calls))


@contextmanager
def untraced(
    anatomy: Anatomy, modules: Iterable[nn.Module] = (), hook: Callable[..., None] = lambda *_: None
) -> Iterator[nn.Module]:
    """Yield the model for runs that leave its state unchanged.

    ``hook`` is called before each of ``modules``.
    """
    with (
        model_runs.undisturbed(anatomy) as model,
        torch.no_grad(),
        model_runs.only_needed_hooks(anatomy.root),
        ExitStack() as stack,
    ):
        for module in modules:
            stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield model


def _distant_tokens(anatomy: Anatomy, n: int) -> Tensor:
    """Return (n,) token ids far from the mean embedding, because untrained tokens are nearly equal.

    They repeat if the vocabulary is small.
    """
    weight = anatomy.parameter(EMBEDDING_WEIGHT)
    rows = vocabulary_size(anatomy)
    ids = torch.arange(0, rows, max(1, rows // 256))
    if weight is not None and weight.is_floating_point():
        embeddings = snapshots.whole_rows(weight, ids).float()
        order = (embeddings - embeddings.mean(0)).norm(dim=1).argsort(descending=True)
        ids = ids[order.cpu()]
    return ids.repeat(-(-n // len(ids)))[:n]


def block_name(name: str) -> str:
    """Return a parameter's name up to its first number, which names a block; else all of it."""
    parts = name.split(".")
    end = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[: end + 1])


def in_decoder(name: str) -> bool:
    """Return whether a parameter of this name is inside a decoder."""
    return ".decoder." in f".{name}"


def vocabulary_size(anatomy: Anatomy) -> int:
    """Return the number of token ids that the model reads."""
    weight = anatomy.parameter(EMBEDDING_WEIGHT)
    return anatomy.vocab_size if weight is None else int(weight.shape[0])


def _same_states(states: Tensor, other_states: Tensor) -> bool:
    """Return whether two states are equal up to rounding; False if they are all zero."""
    scale = float(states.abs().max())
    return scale > 0 and float((states - other_states).abs().max()) <= _TOLERANCE * scale


def text_for(anatomy: Anatomy, ids: Tensor) -> dict[str, object]:
    """Return the arguments of a forward on a text, on both sides of an encoder-decoder."""
    ids = ids.to(anatomy.device)
    text: dict[str, object] = {"input_ids": ids}
    if anatomy.kind == "seq2seq" and model_runs.takes(anatomy.model, "decoder_input_ids"):
        rows = anatomy.target_rows
        text["decoder_input_ids"] = ids if rows is None else ids % rows
    if model_runs.takes(anatomy.model, "use_cache"):
        text["use_cache"] = False
    return text


def _inputs(anatomy: Anatomy, readers: Sequence[nn.Module], ids: Tensor) -> dict[int, Tensor]:
    """Return the float32 input (B, L, d) of each reader, by its id.

    Readers that are called several times, or not on one vector per token, are omitted.
    """
    calls: dict[int, list[Tensor]] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, object]) -> None:
        states = states_in(args, kwargs)
        x = states if isinstance(states, Tensor) else next(iter(kwargs.values()), None)
        # ``ids`` stands for an input that is no tensor: below it is omitted, as it is no float.
        calls.setdefault(id(module), []).append(x if isinstance(x, Tensor) else ids)

    with untraced(anatomy, readers, keep) as model:
        to_last_block(anatomy, model)(**text_for(anatomy, ids))
    inputs = {}
    length = ids.shape[1] + model_runs.virtual_tokens(anatomy)  # those of prompt tuning come first
    for key, tensors in calls.items():
        # DoRA also calls readers with a unit matrix, to compute a norm without gradient.
        x, *further = [c for c in tensors if not _is_unit(c)] or [ids]
        if further or not x.is_floating_point() or x.numel() != len(ids) * length * x.shape[-1]:
            continue
        x = x.detach().reshape(len(ids), length, x.shape[-1])
        inputs[key] = x[:, -ids.shape[1] :].float()
    return inputs


def _is_unit(x: Tensor) -> bool:
    """Return whether a tensor is a unit matrix."""
    square = x.dim() == 2 and x.shape[0] == x.shape[1]
    return square and bool(torch.equal(x, torch.eye(len(x), dtype=x.dtype, device=x.device)))


def input_rows(
    anatomy: Anatomy, known_input: SharedInput, ids: Tensor, *, autocast: torch.dtype | None = None
) -> Tensor:
    """Return the value of an input for texts of token ids.

    Args:
        anatomy: the model, run only as far as these maps.
        known_input: the input.
        ids: (B, L) texts.
        autocast: dtype that the client's forward is cast to.

    Returns:
        (B, L, d) in the dtype that the client multiplies.
    """
    rows = torch.empty(0)
    for part, x in input_blocks(anatomy, known_input, ids, autocast=autocast):
        if not part.start:  # allocated once: concatenated parts would take twice the memory
            rows = x.new_empty(len(ids), *x.shape[1:])
        rows[part] = x
    return rows


def input_blocks(
    anatomy: Anatomy, known_input: SharedInput, ids: Tensor, *, autocast: torch.dtype | None = None
) -> Generator[tuple[slice, Tensor], None, None]:
    """Yield the result of :func:`input_rows` in blocks: a slice of the texts, and their rows."""
    run = model_runs.stop_at(anatomy.model, Place("", known_input.reader, "input"))
    n_tokens = model_runs.TOKENS_AT_ONCE
    if ids.device.type == "cpu":
        n_tokens = min(n_tokens, _NUMBERS // known_input.width)
    step = max(1, n_tokens // ids.shape[1])
    with untraced(anatomy):
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            with torch.autocast(anatomy.device.type, autocast, enabled=autocast is not None):
                x = run(**text_for(anatomy, part))
            if autocast is not None:
                x = x.to(autocast)
            x = x.reshape(len(part), -1, known_input.width)[:, -part.shape[1] :]
            # A token whose input is not finite is in no batch with a finite gradient.
            yield slice(start, start + len(part)), x.where(x.isfinite().all(-1, keepdim=True), 0)


def input_states(
    anatomy: Anatomy, inputs: Sequence[SharedInput], ids: Tensor, mask: Tensor | None = None
) -> list[Tensor]:
    """Return the values of several inputs for texts, from one run that ends at the last input.

    Args:
        anatomy: The model.
        inputs: inputs in the order of :func:`find_shared_inputs`.
        ids: (B, L) texts.
        mask: (B, L), 0 where padded.

    Returns:
        (B, L, d) float32 for each input.
    """
    text = text_for(anatomy, ids)
    if mask is not None and model_runs.accepts(anatomy.model, "attention_mask"):
        text["attention_mask"] = mask.to(anatomy.device)
    places = [Place("", shared.reader, "input") for shared in inputs]
    with untraced(anatomy):
        states = model_runs.stop_behind(anatomy.model, places)(**text)
    return [
        x.reshape(len(ids), -1, shared.width)[:, -ids.shape[1] :].float()
        for x, shared in zip(states, inputs, strict=True)
    ]
