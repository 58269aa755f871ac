"""Run the model on any text *without a trace*, for its logits or the hidden states at a layer.

Without a trace means that the run changes neither the model nor the random generators, so that
training continues as if it had not happened. Every forward of this package runs inside
:func:`undisturbed`, which restores them. The model's own ``forward`` is called, because it handles
masks, positions, PEFT and sharding. A run for hidden states stops after the layer.
"""

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_fedleak.model import model_state
from lightning_fedleak.model.anatomy import (
    Anatomy,
    Place,
    ids_argument,
    place_of,
    taking_ids,
    unwrap,
    walk,
    without_peft,
)
from lightning_fedleak.model.anatomy import accepts as accepts
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.model_state import is_compiled as is_compiled
from lightning_fedleak.model.snapshots import is_absent

LOGITS_AT_ONCE = 1 << 26  # logits of one run on a GPU: 256 MiB in float32
# On a CPU, 16 MiB: larger tensors get new memory from the system each time, which costs more.
LOGITS_ON_CPU = 1 << 22
TOKENS_AT_ONCE = 1 << 13  # tokens of one run for hidden states, which bounds the memory

# Packages whose hooks a model needs: for the whole model, for a run, and for a training step.
WHOLE_MODEL_PACKAGES = ("torch.nn.utils", "torch.ao", "transformers", "accelerate", "peft")
_DISTRIBUTED = ("fsdp", "_composable", "algorithms", "tensor.parallel")  # not its debuggers
_HOOK_PACKAGES = (*(f"torch.distributed.{name}" for name in _DISTRIBUTED), *WHOLE_MODEL_PACKAGES)
_DEEPSPEED = ("deepspeed",)
TRAINING_PACKAGES = (*_HOOK_PACKAGES, *_DEEPSPEED)

# The roots of the undisturbed() blocks that the current code runs in, outermost first.
_open_roots: ContextVar[tuple[nn.Module, ...]] = ContextVar("fedleak_open", default=())


def is_observed() -> bool:
    """Return whether the code runs inside :func:`undisturbed`.

    Hooks that change a client's data must do nothing then.
    """
    return bool(_open_roots.get())


@contextmanager
def undisturbed(anatomy: Anatomy) -> Iterator[nn.Module]:
    """Yield ``anatomy.model`` in eval mode, and restore everything after, also on an exception.

    Restored are the contents of the modules of ``anatomy.root``
    (:func:`~lightning_fedleak.model.model_state.preserve_model`: parameters, buffers, gradients,
    attributes that a forward or a hook writes), the state of the process
    (:func:`~lightning_fedleak.model.model_state.preserve_process`: random generators, autocast),
    and each module's ``training`` flag, without a call of a user's ``train()``. What FSDP2 had
    sharded is sharded again. Compiled modules run eagerly, and autocast stores no cast weights.
    Gradients stay enabled or disabled; a backward belongs inside. The yielded model takes
    ``input_ids``, whatever name its own forward has for them.

    Blocks may be nested: each restores modes and the state of the process, and the outermost block
    of a root restores its modules. :func:`is_observed` is True inside. State that no module holds
    is not restored: files, global variables, closures, class attributes, and objects whose state
    cannot be read.

    Raises:
        RuntimeError: a parameter was written to and could not be restored.
    """
    root, outer_roots = anatomy.root, _open_roots.get()
    modules = model_state.modules_of(root)
    flags = [m.training for m in modules]
    # In eval mode bitsandbytes' Linear4bit would pack its weights, and then has no backward.
    packing = [m for m in modules if getattr(m, "support_avx512bf16_for_cpu", False)]
    with ExitStack() as stack:
        stack.enter_context(model_state.preserve_process())
        if not any(root is outer for outer in outer_roots):
            stack.enter_context(model_state.preserve_model(root, anatomy.model))
        stack.enter_context(_reshard(modules))
        if is_compiled(root):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # Older torch would store weights that are cast without gradient for training.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        _open_roots.set((*outer_roots, root))
        try:
            for module in modules:
                if module.training:  # setting an attribute of a module is slow
                    module.training = False
            for module in packing:
                module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
            if ids_argument(anatomy.model) != "input_ids":  # an attribute, which is restored
                anatomy.model.forward = taking_ids(anatomy.model)
            yield anatomy.model
        finally:
            for module, flag in zip(modules, flags, strict=True):
                if module.training is not flag:
                    module.training = flag
            for module in packing:
                module.support_avx512bf16_for_cpu = True  # type: ignore[assignment]
            _open_roots.set(outer_roots)


def hidden_states(
    anatomy: Anatomy,
    layer: int,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Return the hidden states of texts at ``layer``, in eval mode and without gradient.

    Layers count as in Hugging Face's ``hidden_states``: 0 is the input of the first block (the
    output of the embeddings), k the output of block k, counted from 1. The last entry is the last
    block's output, before the final norm that GPT-2, Llama and T5 apply to ``hidden_states[-1]``.

    The model computes positions as in a training step with the same ids and mask. RoBERTa counts
    from the padding; GPT-2, Llama and BERT count from the first column whatever the mask, so that a
    text padded on the left is shifted. ``generate`` counts from the first real token: pass
    ``position_ids=(mask.cumsum(1) - 1).clamp(min=0)`` for that. Hidden states at padded positions
    have no meaning.

    Nothing is changed, see :func:`undisturbed`. Of all hooks only those run that the model needs:
    their functions come from ``torch.distributed`` (FSDP2, tensor parallel), ``torch.nn.utils``
    (``weight_norm``, pruning), ``torch.ao``, ``transformers``, ``accelerate`` and ``peft``. A
    user's hook that changes the computation does not run. Under FSDP2 and tensor parallel every
    rank must make the call, with texts of the same shape.

    Args:
        anatomy: the model; the layers of an encoder-decoder are those of its *encoder*.
        layer: 0 to the number of blocks.
        input_ids: (B, L) token ids, moved to the model's device.
        attention_mask: (B, L), 0 where padded, or None; ignored by a model that takes none.
        position_ids: (B, L), for a model whose ``forward`` takes them.

    Returns:
        (B, L, d) in the dtype and on the device of the layer, detached, without the virtual tokens
        of prompt tuning.

    Raises:
        ValueError: the model has no such layer, or a text is empty or longer than its context.
    """
    place = place_of(anatomy, layer)
    check_text(anatomy, input_ids, attention_mask, position_ids)
    device = anatomy.device
    rows = max(1, TOKENS_AT_ONCE // input_ids.shape[1])
    mask = attention_mask if accepts(anatomy.model, "attention_mask") else None
    inputs = {"input_ids": input_ids, "attention_mask": mask, "position_ids": position_ids}
    texts = [
        {name: x[a : a + rows].to(device) for name, x in inputs.items() if x is not None}
        for a in range(0, len(input_ids), rows)
    ]
    with undisturbed(anatomy) as model, torch.no_grad(), only_needed_hooks(anatomy.root):
        options = {"use_cache": False} if takes(model, "use_cache") else {}
        run = stop_at(model, place)
        states = [copy_context().run(run, **text, **options) for text in texts]
    length = input_ids.shape[1]
    return torch.cat([states_of_text(s, length, anatomy, layer) for s in states]).detach()


def sees_no_later(anatomy: Anatomy) -> bool:
    """Return whether no hidden state depends on a later token, from a run on two texts.

    It is False for a model without known blocks, or one that takes no ``input_ids``.
    """
    if not anatomy.blocks or why_not_run(anatomy) is not None:
        return False
    ids = torch.arange(4, device=anatomy.device).repeat(2, 1) % anatomy.embedding_rows
    ids[1, -1] = ids[1, 0]
    place = Place("", unwrap(anatomy.blocks[-1]), "output")
    with undisturbed(anatomy) as model, torch.no_grad(), only_needed_hooks(anatomy.root):
        states = stop_at(model, place)(input_ids=ids)
    return bool(torch.equal(states[0, 0], states[1, 0]))


@contextmanager
def only_needed_hooks(root: nn.Module, packages: Sequence[str] = _HOOK_PACKAGES) -> Iterator[None]:
    """Run only those module hooks inside the block that the model needs: :func:`hidden_states`.

    They run even if an exception stops the forward, so that FSDP2 frees the parameters that it
    gathered. Hooks that are registered inside the block stay. ZeRO-3's own hooks would count the
    run as part of a training step. Parameters are gathered for each call of their module instead.

    Args:
        root: module whose hooks, and whose submodules' hooks, are selected.
        packages: packages whose hooks run.
    """
    holders: list[dict[str, Any]] = [m.__dict__ for m in model_state.modules_of(root)]
    holders.append({n.removeprefix("_global"): v for n, v in vars(torch_module).items()})
    stores = [holder[name] for holder in holders for name in model_state.HOOKS if holder[name]]
    old_stores = [(store, OrderedDict(store)) for store in stores]
    try:
        for store in stores:
            for key in [k for k, hook in store.items() if not _comes_from(hook, packages)]:
                del store[key]
        with _always_called(holders), ExitStack() as stack:
            hooks = (hook for _, old in old_stores for hook in old.values())
            under_zero = any(_comes_from(hook, _DEEPSPEED) for hook in hooks)
            if packages == _HOOK_PACKAGES and under_zero:
                _gather_in_calls(root, stack)
            yield
    finally:
        for store, old in old_stores:
            new = {k: hook for k, hook in store.items() if k not in old}
            store.clear()
            store.update({**old, **new})


def _gather_in_calls(root: nn.Module, stack: ExitStack) -> None:
    """Gather ZeRO-3's shards before each call of their module, and free them after it."""
    sharded = {*filter(is_absent, root.parameters())}

    def gather(module: nn.Module, *_: object) -> None:
        if absent := [*filter(is_absent, _owned(module))]:
            absent[0].all_gather(absent)

    def free(module: nn.Module, *_: object) -> None:
        for parameter in _owned(module):
            if parameter in sharded and not is_absent(parameter):
                parameter.partition()

    for module in root.modules():
        if not sharded.isdisjoint(_owned(module)):
            stack.enter_context(module.register_forward_pre_hook(gather, prepend=True))
            stack.enter_context(module.register_forward_hook(free, always_call=True))


def _owned(module: nn.Module) -> list[Any]:
    """Return the parameters of a module itself, without those of its children."""
    return [parameter for parameter in module._parameters.values() if parameter is not None]


@contextmanager
def _always_called(holders: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Run the forward hooks of modules even if an exception stops the forward.

    ZeRO-3's hooks are excluded. A gradient checkpoint stops its recomputation by an exception, and
    its backward still needs the layer that these hooks would shard.
    """
    with_hooks = [x for x in holders if x["_forward_hooks"]]
    always = [(x["_forward_hooks_always_called"], x["_forward_hooks"]) for x in with_hooks]
    old_flags = [dict(flags) for flags, _ in always]
    for flags, store in always:
        flags |= {key: True for key, hook in store.items() if not _comes_from(hook, _DEEPSPEED)}
    try:
        yield
    finally:
        for (flags, store), old in zip(always, old_flags, strict=True):
            for key in [k for k in store if k in flags and k not in old]:
                del flags[key]
            flags.update(old)


def _comes_from(hook: Callable[..., Any], packages: Sequence[str]) -> bool:
    """Return whether a hook's function is defined in one of these packages."""
    home = model_state.hook_home(hook)
    return any(home == name or home.startswith(f"{name}.") for name in packages)


class _Stop(Exception):
    """A signal, not an error, that carries hidden states out of a forward."""

    def __init__(self, states: Any) -> None:
        super().__init__()
        self.states = states


def stop_at(model: Callable[..., Any], place: Place) -> Callable[..., Any]:
    """Return a function that runs ``model`` up to ``place`` and returns the hidden states there."""

    def stop(states: Any) -> NoReturn:
        raise _Stop(states)

    def run(**inputs: Any) -> Any:
        try:
            with place.on_states(stop):
                model(**inputs)
        except _Stop as signal:
            return signal.states
        raise ValueError(
            f"{type(model).__name__} never called its block: name the blocks that it calls with "
            "anatomy={'blocks': 'path.to.blocks'}"
        )

    return run


def stop_behind(model: nn.Module, places: Sequence[Place]) -> Callable[..., list[Any]]:
    """Return a function that runs ``model`` up to the last place for the states at each place."""
    *earlier, last = places
    run_to_last = stop_at(model, last)

    def run(**inputs: Any) -> list[Any]:
        states: dict[int, Any] = {}
        with ExitStack() as stack:
            for i, place in enumerate(earlier):
                stack.enter_context(place.on_states(functools.partial(states.__setitem__, i)))
            deepest = run_to_last(**inputs)
        return [*(states[i] for i in range(len(earlier))), deepest]

    return run


def states_of_text(states: Any, length: int, anatomy: Anatomy, layer: int) -> Tensor:
    """Return the states of a layer without virtual tokens.

    Raises:
        ValueError: the states are not a tensor (B, L, d).
    """
    lengths = length, length + virtual_tokens(anatomy)
    if isinstance(states, Tensor) and states.dim() == 3 and states.shape[1] in lengths:
        return states[:, -length:]
    raise ValueError(f"hidden states at layer {layer} are not of shape (B, {length}, d)")


def check_text(
    anatomy: Anatomy, input_ids: Tensor, mask: Tensor | None, positions: Tensor | None
) -> None:
    """Raise an error for texts (B, L) that the model cannot read.

    Raises:
        ValueError: shapes differ, a text is empty or too long, or the model takes no positions.
    """
    optional = [tensor for tensor in (mask, positions) if tensor is not None]
    context, problem = context_length(anatomy), None
    if input_ids.dim() != 2 or 0 in input_ids.shape:
        problem = f"input_ids must be (B, L), and not empty, not {tuple(input_ids.shape)}"
    elif any(tensor.shape != input_ids.shape for tensor in optional):
        problem = "attention_mask and position_ids need the shape of input_ids"
    elif mask is not None and not bool((mask != 0).any(1).all()):
        problem = "a text is empty: its attention_mask is 0 everywhere"
    elif positions is not None and not takes(anatomy.model, "position_ids"):
        problem = f"{type(without_peft(anatomy.model)).__name__}.forward takes no position_ids"
    elif context is not None and input_ids.shape[1] > context:
        problem = f"truncate texts to {context} tokens, the model's context"
    if problem is not None:
        raise ValueError(problem)


def context_length(anatomy: Anatomy) -> int | None:
    """Return the maximum number of text tokens of the model; None if unknown, as for T5.

    RoBERTa uses the first positions for padding, and prompt tuning for its virtual tokens.
    """
    core = without_peft(anatomy.model)
    config = getattr(core, "config", None)
    max_length = getattr(config, "max_position_embeddings", None)
    max_length = max_length or getattr(config, "max_target_positions", None)  # of Whisper
    max_length = max_length or getattr(core, "max_seq_length", None)  # of litgpt
    if not isinstance(max_length, int) or max_length < 1:
        return None
    for name, module in walk(core):
        table = name.rsplit(".", 1)[-1] == "position_embeddings"
        if table and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            max_length = min(max_length, module.num_embeddings - module.padding_idx - 1)
    return int(max_length) - virtual_tokens(anatomy)


def virtual_tokens(anatomy: Anatomy) -> int:
    """Return how many tokens prompt tuning and similar methods put before the text."""
    configs = getattr(anatomy.model, "peft_config", None)
    if not isinstance(configs, dict):
        return 0
    config = configs.get(getattr(anatomy.model, "active_adapter", None))
    return int(getattr(config, "num_virtual_tokens", None) or 0)


def takes(model: nn.Module, argument: str) -> bool:
    """Return whether the model's ``forward`` has an argument of that name."""
    return argument in inspect.signature(without_peft(model).forward).parameters


def _reads_ids(anatomy: Anatomy) -> bool:
    """Return whether the model's forward passes the ids that it gets to the input embeddings."""
    if (name := ids_argument(anatomy.model)) in (None, "input_ids"):
        return name is not None
    ids = torch.zeros(1, 2, dtype=torch.long, device=anatomy.device)
    run = stop_at(anatomy.model, Place("", anatomy.embedding, "input"))
    with undisturbed(anatomy), torch.no_grad(), only_needed_hooks(anatomy.root):
        try:
            return torch.equal(run(input_ids=ids), ids)
        except Exception:  # a user's forward of other inputs raises any error
            return False


def why_not_run(anatomy: Anatomy) -> str | None:
    """Return why no text can be run through the model, and what to change; None if it can.

    Models of Hugging Face take ``input_ids``. In other modules the only required argument may have
    another name. A model that takes no mask runs without one, as in its training step.
    """
    model = anatomy.model
    model_name, root_name = (type(without_peft(m)).__name__ for m in (model, anatomy.root))
    if not _reads_ids(anatomy):
        return (
            f"{model_name}.forward takes no input_ids: give {root_name} a method "
            "forward(self, input_ids) that returns the logits (B, L, vocabulary) of ids (B, L)"
        )
    arguments = inspect.signature(without_peft(model).forward).parameters
    masks = [name for name in arguments if "mask" in name]
    if masks and not accepts(model, "attention_mask"):
        return f"{model_name}.forward names a mask '{masks[0]}': rename it to attention_mask"
    return None


@contextmanager
def _reshard(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Shard the parameters of modules again after a block, so that the optimizer steps on shards.

    After a forward FSDP2 leaves the outermost module whole. If a forward stops early, ZeRO-3 leaves
    the parameters whole that it has prefetched.
    """
    groups = [m for m in modules if hasattr(m, "unshard") and hasattr(m, "reshard")]
    sharded = [
        m for m in groups if all(hasattr(p, "full_tensor") for p in _group_parameters(m, groups))
    ]
    # Each parameter once, even if modules share it.
    absent = {id(p): p for module in modules for p in _owned(module) if is_absent(p)}.values()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()  # type: ignore[operator]
        registries = (getattr(m, "ds_inflight_param_registry", None) for m in modules)
        in_flight: Any = next((x for x in registries if x is not None), {}) if absent else {}
        for p in absent:
            if p in in_flight:
                in_flight.pop(p).wait()
            p.ds_active_sub_modules.clear()
            if not is_absent(p):
                p.partition()


def _group_parameters(module: nn.Module, groups: list[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of ``module`` that belong to none of the ``groups`` inside it."""
    children = {id(m) for m in module.modules() if m is not module}
    nested = {id(p) for m in groups if id(m) in children for p in m.parameters()}
    return [p for p in module.parameters() if id(p) not in nested]


def rows_at_once(device: torch.device, vocabulary: int) -> int:
    """Return how many rows of logits are computed at once."""
    logits = LOGITS_ON_CPU if device.type == "cpu" else LOGITS_AT_ONCE
    return max(1, logits // max(1, vocabulary))


def micro_batches(
    anatomy: Anatomy, batch: TokenBatch, max_logits: int | None = None
) -> Iterator[TokenBatch]:
    """Yield blocks of rows with at most ``max_logits`` (or the device's) logits, or single rows."""
    device = anatomy.device
    labels = labels_of(batch)
    length = max(labels.shape[-1], batch.input_ids.shape[-1])
    vocabulary = anatomy.vocab_size
    tokens = max_logits // vocabulary if max_logits else rows_at_once(device, vocabulary)
    step = max(1, tokens // length)
    for a in range(0, len(batch.input_ids), step):
        mask = batch.attention_mask
        yield TokenBatch(
            input_ids=batch.input_ids[a : a + step].to(device),
            labels=labels[a : a + step].to(device),
            attention_mask=None if mask is None else mask[a : a + step].to(device),
            kind=batch.kind,
        )


def labels_of(batch: TokenBatch) -> Tensor:
    """Return the batch's labels; a causal batch without labels has its ids (-100 where padded).

    Raises:
        ValueError: a batch of another kind has no labels.
    """
    if batch.labels is not None:
        return batch.labels
    if batch.kind != "causal":
        raise ValueError(f"a batch of a {batch.kind} model needs labels to have a gradient")
    if batch.attention_mask is None:
        return batch.input_ids
    return batch.input_ids.masked_fill(batch.attention_mask == 0, IGNORE_INDEX)


def token_logits(
    model: nn.Module, batch: TokenBatch, parameters: Mapping[str, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits (N, V) at the predicting positions and the labels (N,) predicted there.

    Args:
        model: the language model, in the mode that it runs in.
        batch: on the model's device.
        parameters: values that replace the model's parameters, by name.
    """
    return predicting(run_logits(model, batch, parameters), batch)


def predicting(values: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Return the values (N, k) of (B, L, k) that predict a label, and the labels (N,).

    A causal model predicts the label of the *next* position, other models that of the same one.
    """
    labels = labels_of(batch)
    if batch.kind == "causal":
        values, labels = values[:, -labels.shape[1] : -1], labels[:, 1:]
    counted = labels != IGNORE_INDEX
    return values[counted], labels[counted]


def run_logits(
    model: nn.Module, batch: TokenBatch, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Return the model's logits (B, L, V) at every position."""
    inputs = _inputs_for(model, batch)
    output = model(**inputs) if parameters is None else call_with(model, parameters, **inputs)
    return logits_in(output)


def run_to(model: nn.Module, module: nn.Module, batch: TokenBatch) -> Tensor:
    """Return the states (B, L, d) that a module of the model gets; the model stops there."""
    states: Tensor = stop_at(model, Place("", module, "input"))(**_inputs_for(model, batch))
    return states


def _inputs_for(model: nn.Module, batch: TokenBatch) -> dict[str, Tensor]:
    """Return the arguments with which a model computes the logits of a batch."""
    inputs: dict[str, Tensor] = {"input_ids": batch.input_ids}
    if batch.attention_mask is not None and accepts(model, "attention_mask"):
        inputs["attention_mask"] = batch.attention_mask
    if batch.kind == "seq2seq":
        inputs["labels"] = labels_of(batch)
    return inputs


def call_with(model: nn.Module, parameters: Mapping[str, Tensor], **kwargs: Any) -> Any:
    """Return a model's output with other tensors in place of its parameters.

    Frozen parameters of a subclass are not replaced: a quantized one is more than its values.

    A module with several names, such as the embedding of an encoder and its decoder, is replaced
    under one of them: otherwise ``torch.func.functional_call`` would leave the tensors in it.

    Args:
        model: the model that is called.
        parameters: values by name; parameters tied to one of them are replaced too.
        kwargs: arguments of the forward.
    """
    model_parameters = model.named_parameters(remove_duplicate=False)
    values = {
        id(p): parameters[name]
        for name, p in model_parameters
        if name in parameters and (p.requires_grad or type(p) is nn.Parameter)
    }
    replacements = {
        f"{path}.{name}" if path else name: values[id(p)]
        for path, module in model.named_modules()  # each module once
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in values
    }
    return torch.func.functional_call(model, replacements, kwargs=kwargs, tie_weights=False)


def logits_in(output: Any) -> Tensor:
    """Return the logits in a model's output: a tensor, the first of a tuple, or ``.logits``."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, Mapping):
        logits = logits["logits"]
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    if not isinstance(logits, Tensor):
        raise ValueError(f"the model must return `.logits`, not a {type(output).__name__}")
    return logits
