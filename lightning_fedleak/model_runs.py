"""The model run on any text, nothing left behind: its logits, and hidden states at a layer.

Every forward of ours goes through one door, :func:`undisturbed`. A run goes through the whole
model's own ``forward``, so that masks, positions, PEFT and sharding are the model's own business;
one for hidden states is cut off right behind the layer, so that no work is done above.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.text_layers import Place, place_of, states_in, states_out
from lightning_fedleak.anatomy.wrappers import matrix_shape, unwrap, walk, without_peft
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model_state import (
    HOOKS,
    hook_home,
    modules_of,
    preserve_model,
    preserve_process,
)

LOGITS_AT_ONCE = 1 << 26
TOKENS_AT_ONCE = 1 << 13

_OF_WHOLE_MODELS = ("torch.nn.utils", "torch.ao", "transformers", "accelerate", "peft")
_KEPT = ("torch.distributed", *_OF_WHOLE_MODELS)

_open: ContextVar[tuple[nn.Module, ...]] = ContextVar("fedleak_open", default=())


def is_observed() -> bool:
    """Whether an :func:`undisturbed` is open: what runs is the server's copy, say.

    Hooks that stand for what a client does to its own data must do nothing then.
    """
    return bool(_open.get())


@contextmanager
def undisturbed(anatomy: Anatomy) -> Iterator[nn.Module]:
    """Yields ``anatomy.model`` in eval mode and puts everything back after, also on an exception.

    The door that every forward of ours goes through. Put back are what modules of ``anatomy.root``
    hold (:func:`~lightning_fedleak.model_state.preserve_model` says what: parameters, buffers,
    gradients, attributes that a forward or a hook writes) and the state of the process
    (:func:`~lightning_fedleak.model_state.preserve_process`: random generators, autocast), and each
    module's own ``training`` flag, set directly so that no ``train()`` of a user's module runs.
    What FSDP2 had sharded is sharded again. Compiled modules run eagerly, and autocast keeps no
    cast weights. Gradients stay enabled or disabled as they are; a backward belongs inside.

    May be nested: the outermost one of a root puts its modules back, each one modes and random
    generators. Meanwhile :func:`is_observed` says so.

    Out of reach is what no module holds: files, global variables, closures, class attributes, and
    objects whose state cannot be read.

    Raises:
        ModelWritten: a parameter was written to and could not be put back.
    """
    root, before = anatomy.root, _open.get()
    modules = modules_of(root)
    flags = [m.training for m in modules]
    with ExitStack() as stack:
        stack.enter_context(preserve_process())
        if not any(root is other for other in before):
            stack.enter_context(preserve_model(root, anatomy.model))
        stack.enter_context(_sharded_again(root))
        stack.enter_context(_compiled_run_eagerly(root))
        stack.enter_context(_casts_not_cached())
        _open.set((*before, root))
        try:
            for module in modules:
                module.training = False
            yield anatomy.model
        finally:
            for module, flag in zip(modules, flags, strict=True):
                module.training = flag
            _open.set(before)


def hidden_states(
    anatomy: Anatomy,
    layer: int,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    at_once: int = TOKENS_AT_ONCE,
) -> Tensor:
    """Hidden states of texts at ``layer``, in eval mode and without gradient.

    As in Hugging Face's ``hidden_states``: 0 is the input of the first block (the output of the
    embeddings), k the output of block k, counted from 1. One difference: the last entry is here
    the last block's own output, while GPT-2's, Llama's and T5's ``hidden_states[-1]`` has been
    through the final norm.

    Positions are the model's own affair: given ids and mask it does what it does in a training
    step that gives it the same. RoBERTa counts from the padding; GPT-2, Llama and BERT count from
    the first column whatever the mask, so that a text padded on the left is shifted (and its hidden
    states differ under learned positions). ``generate`` counts from the first real token instead;
    for that give ``position_ids=(mask.cumsum(1) - 1).clamp(min=0)``.

    Hidden states at padded positions are whatever the model computes there; they mean nothing.

    Everything is left as it was, also after an exception, see :func:`undisturbed`. No forward,
    forward-pre or backward hook runs during the call, of one module or global, but those that the
    model needs to compute at all: those whose functions come from ``torch.distributed`` (FSDP2,
    tensor parallel), ``torch.nn.utils`` (``weight_norm``, pruning), ``torch.ao``, ``transformers``,
    ``accelerate`` and ``peft``. A hook of the user's own that changes what the model computes is
    therefore left out. Compiled models and blocks run eagerly. Under FSDP2 and tensor parallel
    every rank must make the call, with texts of the same shape.

    Args:
        anatomy: of the model; of an encoder-decoder the *encoder's* blocks are meant, which read
            ``input_ids``.
        layer: 0 to the number of blocks.
        input_ids: (B, L) token ids, moved to the model's device.
        attention_mask: (B, L), 0 where padded, or None where nothing is; not given to a model that
            takes none.
        position_ids: (B, L), for a model whose ``forward`` takes them.
        at_once: tokens in one run at most (at least one row), which bounds the memory.

    Returns:
        (B, L, d) in the dtype and on the device of the layer, detached. Prompt tuning's virtual
        tokens are left out.

    Raises:
        ValueError: the model has no such layer, there is no text or an empty one, shapes do not
            match, or a text is longer than the model's context.
        TypeError: the model is wrapped by FSDP1, whose forward cannot be cut off.
    """
    place = place_of(anatomy, layer)
    check_text(anatomy, input_ids, attention_mask, position_ids)
    if at_once < 1:
        raise ValueError(f"at_once must be a positive number of tokens, got {at_once}")
    if any("_fsdp_wrapped_module" in m._modules for m in modules_of(anatomy.root)):
        raise TypeError(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), whose forward cannot be "
            "cut off behind a layer; use FSDP2 (ModelParallelStrategy)"
        )
    device = anatomy.device
    rows = max(1, at_once // input_ids.shape[1])
    texts: list[dict[str, Tensor]] = []
    for a in range(0, len(input_ids), rows):
        text = {"input_ids": input_ids[a : a + rows].to(device)}
        if attention_mask is not None and accepts(anatomy.model, "attention_mask"):
            text["attention_mask"] = attention_mask[a : a + rows].to(device)
        if position_ids is not None:
            text["position_ids"] = position_ids[a : a + rows].to(device)
        texts.append(text)
    with undisturbed(anatomy) as model, torch.no_grad(), only_needed_hooks(anatomy.root):
        options = {"use_cache": False} if takes(model, "use_cache") else {}
        run = stop_at(model, place)
        states = [copy_context().run(run, **text, **options) for text in texts]
    length = input_ids.shape[1]
    return torch.cat([states_of_text(s, length, anatomy, layer) for s in states]).detach()


def sees_no_later(anatomy: Anatomy) -> bool:
    """Whether no hidden state hangs on a later token, seen by running the blocks on two texts.

    False for a model whose blocks are not known, or which takes no ``input_ids``.
    """
    if not anatomy.blocks or why_not_run(anatomy) is not None:
        return False
    rows = matrix_shape(anatomy.embedding)
    tokens = anatomy.vocab_size if rows is None else rows[0]
    ids = torch.arange(4, device=anatomy.device).repeat(2, 1) % tokens
    ids[1, -1] = ids[1, 0]
    place = Place("", unwrap(anatomy.blocks[-1]), "output")
    with undisturbed(anatomy) as model, torch.no_grad(), only_needed_hooks(anatomy.root):
        states = stop_at(model, place)(input_ids=ids)
    return bool(torch.equal(states[0, 0], states[1, 0]))


@contextmanager
def whole_model(root: nn.Module) -> Iterator[None]:
    """Within it every process has the whole parameters of what FSDP2 shards, and runs alone.

    The server's own copy of the model, as attacks that run it need it: how often they do may hang
    on the data, and a collective in it would leave the other processes waiting. Gathered are all
    sharded parameters, at the price of their memory on every process. The model's own tensors are
    put back as they were. Of the hooks those of FSDP2 do not run either, see
    :func:`only_needed_hooks`. What is computed within is in the parameters' own dtype, also where a
    ``MixedPrecisionPolicy`` of FSDP2 has the client compute in another. Without sharded parameters
    nothing happens.

    A collective: every process must enter it, outside of forward and backward.
    """
    sharded = [
        (module, name, parameter)
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and hasattr(parameter, "full_tensor")
    ]
    if not sharded:
        yield
        return
    whole: dict[int, nn.Parameter] = {}
    for _, _, parameter in sharded:
        if id(parameter) not in whole:
            gathered = parameter.full_tensor()
            whole[id(parameter)] = nn.Parameter(
                gathered.detach(), requires_grad=parameter.requires_grad
            )
    try:
        for module, name, parameter in sharded:
            module._parameters[name] = whole[id(parameter)]
        with only_needed_hooks(root, _OF_WHOLE_MODELS):
            yield
    finally:
        for module, name, parameter in sharded:
            module._parameters[name] = parameter


@contextmanager
def only_needed_hooks(root: nn.Module, kept: Sequence[str] = _KEPT) -> Iterator[None]:
    """Within it, of the hooks on modules only those run that the model needs to compute at all.

    Which these are says :func:`hidden_states`. They run to the end even where the forward is cut
    off by an exception, so that FSDP2 gives back what it gathered. Hooks registered meanwhile stay.

    Args:
        root: with all modules inside it.
        kept: the packages whose hooks run.
    """
    holders: list[dict[str, Any]] = [m.__dict__ for m in modules_of(root)]
    holders.append({n.removeprefix("_global"): v for n, v in vars(torch_module).items()})
    stores = [holder[name] for holder in holders for name in HOOKS if holder[name]]
    always = [
        (h["_forward_hooks_always_called"], h["_forward_hooks"])
        for h in holders
        if h["_forward_hooks"]
    ]
    before = [(store, OrderedDict(store)) for store in stores]
    called = [(flags, dict(flags)) for flags, _ in always]
    try:
        for store in stores:
            for key in [k for k, hook in store.items() if not _is_of(hook, kept)]:
                del store[key]
        for flags, store in always:
            flags.update(dict.fromkeys(store, True))
        yield
    finally:
        for store, old in before:
            new = {k: hook for k, hook in store.items() if k not in old}
            store.clear()
            store.update({**old, **new})
        for (flags, store), (_, old_flags) in zip(always, called, strict=True):
            for key in [k for k in store if k in flags and k not in old_flags]:
                del flags[key]
            flags.update(old_flags)


def _is_of(hook: Callable[..., Any], packages: Sequence[str]) -> bool:
    home = hook_home(hook)
    return any(home == name or home.startswith(f"{name}.") for name in packages)


class _Reached(Exception):
    """Not an error: carries the hidden states out of the forward."""

    def __init__(self, states: Any) -> None:
        super().__init__()
        self.states = states


def stop_at(model: Callable[..., Any], place: Place) -> Callable[..., Any]:
    """``model`` as a function that stops at ``place`` and returns the hidden states there."""
    block = place.module

    def leave_before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(states_in(args, kwargs))

    def leave_behind(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        raise _Reached(states_out(output))

    def run(**inputs: Any) -> Any:
        handle = (
            block.register_forward_pre_hook(leave_before, with_kwargs=True)
            if place.side == "input"
            else block.register_forward_hook(leave_behind)
        )
        try:
            model(**inputs)
        except _Reached as reached:
            return reached.states
        finally:
            handle.remove()
        raise ValueError(
            f"{type(model).__name__} never called its block ({type(block).__name__}); name the "
            "blocks that it calls with anatomy={'blocks': 'path.to.blocks'}"
        )

    return run


def states_of_text(states: Any, length: int, anatomy: Anatomy, layer: int) -> Tensor:
    """What a layer gave, less virtual tokens; refuses what is no (B, L, d)."""
    virtual = virtual_tokens(anatomy)
    found: object = type(states).__name__
    if isinstance(states, Tensor):
        found = list(states.shape)
        if states.dim() == 3 and states.shape[1] in (length, length + virtual):
            return states[:, -length:]
    raise ValueError(
        f"hidden states at layer {layer} should have {length} positions, as the text, and 3 "
        f"dimensions; the model gives {found} there"
    )


def check_text(
    anatomy: Anatomy, input_ids: Tensor, mask: Tensor | None, positions: Tensor | None
) -> None:
    """Refuses texts (B, L) that the model cannot read, masks and positions of another shape.

    Raises:
        ValueError: an empty or too long text, a wrong shape, or positions the model does not take.
    """
    shape = tuple(input_ids.shape)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids must be (B, L), got {shape}")
    if 0 in shape:
        raise ValueError(f"input_ids holds no text: its shape is {shape}")
    for name, given in (("attention_mask", mask), ("position_ids", positions)):
        if given is not None and tuple(given.shape) != shape:
            raise ValueError(f"{name} is {tuple(given.shape)}, but input_ids is {shape}")
    if mask is not None and not bool((mask != 0).any(1).all()):
        empty = int((mask == 0).all(1).nonzero()[0])
        raise ValueError(f"text {empty} is empty: its attention_mask is 0 everywhere")
    if positions is not None and not takes(anatomy.model, "position_ids"):
        raise ValueError(
            f"{type(without_peft(anatomy.model)).__name__}.forward takes no position_ids"
        )
    context = context_length(anatomy)
    if context is not None and shape[1] > context:
        raise ValueError(
            f"the texts are {shape[1]} tokens long, but the model's context holds {context}; "
            "truncate them"
        )


def context_length(anatomy: Anatomy) -> int | None:
    """Tokens of text that the model takes at most; None where it does not say, as with T5.

    RoBERTa's first positions are spent on padding, and prompt tuning's on its virtual tokens.
    """
    core = without_peft(anatomy.model)
    most = getattr(getattr(core, "config", None), "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return None
    for name, module in walk(core):
        table = name.rsplit(".", 1)[-1] == "position_embeddings"
        if table and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            most = min(most, module.num_embeddings - module.padding_idx - 1)
    return int(most) - virtual_tokens(anatomy)


def virtual_tokens(anatomy: Anatomy) -> int:
    """Tokens that prompt tuning and its like put before the text."""
    configs = getattr(anatomy.model, "peft_config", None)
    if not isinstance(configs, dict):
        return 0
    config = configs.get(getattr(anatomy.model, "active_adapter", None))
    return int(getattr(config, "num_virtual_tokens", None) or 0)


def takes(model: nn.Module, argument: str) -> bool:
    """Whether the model's ``forward`` has an argument of that name."""
    return argument in inspect.signature(without_peft(model).forward).parameters


def accepts(model: nn.Module, argument: str) -> bool:
    """Whether the model's ``forward`` can be called with an argument of that name."""
    forward = without_peft(model).forward
    parameters = inspect.signature(forward).parameters
    if getattr(forward, "__qualname__", "") == "LightningModule.forward":  # which computes nothing
        return False
    return argument in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def why_not_run(anatomy: Anatomy) -> str | None:
    """Why no text can be run through the model, with the mend; None where it takes ``input_ids``.

    Models of Hugging Face do, and a module of one's own whose ``forward`` names them so. One that
    takes no mask is run without, as its own training step runs it.
    """
    model = anatomy.model
    own, around = (type(without_peft(m)).__name__ for m in (model, anatomy.root))
    if not accepts(model, "input_ids"):
        return (
            f"{own}.forward takes no input_ids: give {around} a method forward(self, input_ids) "
            "that returns the logits (B, L, vocabulary) of ids (B, L)"
        )
    arguments = inspect.signature(without_peft(model).forward).parameters
    masks = [name for name in arguments if "mask" in name]
    if masks and not accepts(model, "attention_mask"):
        return f"{own}.forward calls a mask '{masks[0]}': padding is told by attention_mask"
    return None


def is_compiled(root: nn.Module) -> bool:
    """Whether torch.compile runs it, a part of it, or its ``training_step`` (as Lightning does)."""
    return _is_compiled_function(getattr(root, "training_step", None)) or any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or _is_compiled_function(module.forward)
        for module in modules_of(root)
    )


def _is_compiled_function(function: object) -> bool:
    return hasattr(function, "_torchdynamo_orig_callable") and not hasattr(
        function, "_torchdynamo_disable"
    )


def reset_compiled(root: nn.Module) -> None:
    """To be called after hooks came or went: what was compiled before would run on as it was."""
    if is_compiled(root):
        torch.compiler.reset()


@contextmanager
def _compiled_run_eagerly(root: nn.Module) -> Iterator[None]:
    """Within it compiled modules of ``root`` run as they were before."""
    if not is_compiled(root):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _sharded_again(root: nn.Module) -> Iterator[None]:
    """After it what FSDP2 had sharded is sharded: its outermost module stays whole otherwise.

    A ``zero_grad`` or an optimizer would then act on the whole parameters in place of the shards.
    """
    groups = [m for m in modules_of(root) if hasattr(m, "unshard") and hasattr(m, "reshard")]
    sharded = [m for m in groups if all(hasattr(p, "full_tensor") for p in _own(m, groups))]
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()  # type: ignore[operator]


def _own(module: nn.Module, groups: list[nn.Module]) -> list[nn.Parameter]:
    """Parameters of ``module`` that are in no other of ``groups`` inside it."""
    inside = {id(m) for m in module.modules() if m is not module}
    others = {id(p) for m in groups if id(m) in inside for p in m.parameters()}
    return [p for p in module.parameters() if id(p) not in others]


@contextmanager
def _casts_not_cached() -> Iterator[None]:
    """Older torch would keep weights cast without gradient for the training step's use."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def micro_batches(anatomy: Anatomy, batch: TokenBatch) -> Iterator[TokenBatch]:
    """``batch`` in runs of rows whose logits stay within a few hundred megabytes."""
    device = anatomy.device
    labels = labels_of(batch)
    length = max(labels.shape[-1], batch.input_ids.shape[-1])
    step = max(1, LOGITS_AT_ONCE // max(1, length * anatomy.vocab_size))
    for a in range(0, len(batch.input_ids), step):
        mask = batch.attention_mask
        yield TokenBatch(
            input_ids=batch.input_ids[a : a + step].to(device),
            labels=labels[a : a + step].to(device),
            attention_mask=None if mask is None else mask[a : a + step].to(device),
            kind=batch.kind,
        )


def labels_of(batch: TokenBatch) -> Tensor:
    """The batch's labels; of a causal batch without, its own ids (-100 where padded).

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
    """Logits (N, V) at the predicting positions and the labels (N,) predicted there.

    Args:
        model: the language model, in the mode it is to run in.
        batch: on the model's device.
        parameters: used in place of the model's own, by name.
    """
    return predicting(run_logits(model, batch, parameters), batch)


def predicting(values: Tensor, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Of values per position (B, L, k), those that predict a label, (N, k), and the labels (N,).

    A causal model predicts the label of the *next* position; the others that of their own.
    """
    labels = labels_of(batch)
    if batch.kind == "causal":
        values, labels = values[:, -labels.shape[1] : -1], labels[:, 1:]
    kept = labels != IGNORE_INDEX
    return values[kept], labels[kept]


def run_logits(
    model: nn.Module, batch: TokenBatch, parameters: Mapping[str, Tensor] | None = None
) -> Tensor:
    """The model's logits at every position, (B, L, V); without the mask where it takes none."""
    kwargs: dict[str, Tensor] = {"input_ids": batch.input_ids}
    if batch.attention_mask is not None and accepts(model, "attention_mask"):
        kwargs["attention_mask"] = batch.attention_mask
    if batch.kind == "seq2seq":
        kwargs["labels"] = labels_of(batch)
    out = model(**kwargs) if parameters is None else call_with(model, parameters, **kwargs)
    return logits_in(out)


def call_with(model: nn.Module, parameters: Mapping[str, Tensor], **kwargs: Any) -> Any:
    """What a model returns with other tensors in place of its parameters.

    As ``torch.func.functional_call``, also where a module stands at two places: as the embedding of
    an encoder and of its decoder. There that would leave the given tensors in the model, and no
    longer tie them at the next call.

    Args:
        model: called with ``kwargs``.
        parameters: by name; what is tied to one of them is replaced too.
        kwargs: of the forward.
    """
    named = model.named_parameters(remove_duplicate=False)
    given = {id(own): parameters[name] for name, own in named if name in parameters}
    once = {
        f"{place}.{name}" if place else name: given[id(own)]
        for place, module in model.named_modules()  # each module once
        for name, own in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(own) in given
    }
    return torch.func.functional_call(model, once, kwargs=kwargs, tie_weights=False)


def logits_in(out: Any) -> Tensor:
    """Logits in whatever a model returns: a tensor, the first of a tuple, or ``.logits``."""
    logits = getattr(out, "logits", out)
    if isinstance(logits, Mapping):
        logits = logits["logits"]
    if isinstance(logits, (tuple, list)):
        logits = logits[0]
    if not isinstance(logits, Tensor):
        raise ValueError(
            f"the model returned {type(out).__name__}; expected logits as a tensor, as the first "
            "of a tuple, or as `.logits`"
        )
    return logits


class inputs_of:
    """Context: collects the inputs a module is called with."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.seen: list[Tensor] = []

    def __enter__(self) -> list[Tensor]:
        self.handle = self.module.register_forward_pre_hook(
            lambda _, args: self.seen.append(args[0])
        )
        return self.seen

    def __exit__(self, *_: object) -> None:
        self.handle.remove()
