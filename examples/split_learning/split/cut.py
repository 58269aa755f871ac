"""The cut of a model into the parts of its two sides, and their comparison with the whole."""

import copy
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.model.anatomy import (
    EMBEDDING_WEIGHT,
    Anatomy,
    find_anatomy,
    find_path,
    leaf,
    place_of,
    states_out,
    without_peft,
)
from lightning_fedleak.model.model_runs import (
    context_length,
    only_needed_hooks,
    undisturbed,
    virtual_tokens,
)
from lightning_fedleak.model.model_state import preserve_model, preserve_process
from lightning_fedleak.validate import check_choice

from .halves import Arrive, Leave, ModelPart, Nothing, SplitError

# Difference of logits, as a share of the largest, up to which parts compute what the whole model
# does; more would accept parts that compute something else. Not tuned.
_AGREE = {torch.float32: 1e-4, torch.float64: 1e-9}
_AGREE_OTHERWISE = 5e-2  # of half precision


@dataclass(frozen=True)
class SplitModel:
    """A model in two halves, of which each side keeps one.

    Attributes:
        layer: the split; ``layer_name`` is its name in snapshots.
        width: numbers in a hidden state at the split.
        bottom: the client's, from the tokens to the split.
        top: the server's, from the split to the logits or, with ``tail``, to the last block.
        tail: the client's too, the norm and the head; None where the server has them.
        last_name: name of the last block's output.
        drifts: the reason why training is refused, or None.
    """

    layer: int
    layer_name: str
    last_name: str
    width: int
    bottom: ModelPart
    top: ModelPart
    tail: ModelPart | None
    drifts: str | None = None


def split_model(
    model: nn.Module,
    layer: int,
    *,
    head: Literal["server", "client"] = "server",
    untie: bool = False,
) -> SplitModel:
    """Return the two halves of a model after block ``layer``, without copying a weight.

    The parts share the parameters of ``model``: a process that keeps only its part, and no
    reference to ``model``, has no other weights in memory. The parts are compared with the whole
    model on a short text.

    A tied matrix of embeddings and head stays one parameter with the head on the client. With the
    head on the server it exists on both sides, and its two gradients are never added. Inference is
    not affected; training is refused unless the matrix is frozen or ``untie`` allows the two
    matrices to differ.

    Args:
        model: a Hugging Face causal model, or an encoder with a head; PEFT too.
        layer: 0 (after the embeddings) to the number of blocks (the server has the head alone);
            with the head on the client, less than that.
        head: the side with norm and head. With ``"client"`` (the U shape) labels never leave the
            client; with ``"server"`` they are shared for training.
        untie: train a tied matrix as two that begin equal. The server's is a copy.

    Raises:
        SplitError: the model cannot be cut at this layer, or its parts compute something else.
        ValueError: it has no such layer.

    Examples:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from split import split_model
        >>> config = LlamaConfig(
        ...     vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2
        ... )
        >>> split = split_model(LlamaForCausalLM(config), layer=1, head="client")
        >>> split.width
        16
    """
    check_choice("head", head, ("server", "client"), error=SplitError)
    anatomy = find_anatomy(model)
    place = place_of(anatomy, layer)
    last = len(anatomy.blocks)
    if anatomy.kind == "seq2seq" or virtual_tokens(anatomy) or anatomy.head is None:
        raise SplitError(
            f"{type(anatomy.model).__name__} cannot be run in two halves: causal models and "
            "encoders with a head can, without virtual tokens"
        )
    if head == "client" and layer == last:
        raise SplitError(
            f"with the head on the client and layer={layer} of {last} nothing is left for the "
            "server: take a layer below"
        )
    survey = _survey(anatomy)
    bottom = _cut_part(anatomy, survey, 0, layer, "tokens", "states")
    if head == "client":
        top = _cut_part(anatomy, survey, layer, last, "states", "states")
        tail = _cut_part(anatomy, survey, last, last, "states", "logits")
    else:
        top, tail = _cut_part(anatomy, survey, layer, last, "states", "logits"), None
    drifts = None
    if anatomy.tied and tail is None and anatomy.trainable(EMBEDDING_WEIGHT):
        if untie:
            head_layer = leaf(top.model.get_submodule(_path(anatomy, anatomy.head)))
            weight = head_layer.get_parameter("weight").detach().clone()
            head_layer._parameters["weight"] = nn.Parameter(weight)
        else:
            drifts = (
                "the embeddings (client) and the head (server) are one matrix, whose two copies "
                "would differ after training: split with head='client', freeze the matrix, or "
                "split with untie=True to train two"
            )
    split = SplitModel(
        layer, place.name, anatomy.block_names[-1], survey.width, bottom, top, tail, drifts
    )
    _check_parts(anatomy, split, survey)
    return split


@dataclass(frozen=True)
class _Survey:
    """The results of a run of the whole model on a short text.

    Attributes:
        below: paths of leaf modules called before the first block.
        above: paths of leaf modules called after the last.
        output_form: a block's output without its tensors: a tuple of None, or None.
        width: numbers in a hidden state.
        text: arguments of the run; ``logits`` are its result.
    """

    below: set[str]
    above: set[str]
    output_form: Any
    width: int
    text: dict[str, Tensor]
    logits: Tensor


def _path(anatomy: Anatomy, module: nn.Module | None) -> str:
    path = None if module is None else find_path(anatomy.model, module)
    if path is None:
        raise SplitError(f"{type(module).__name__} is not inside {type(anatomy.model).__name__}")
    return path


def _blocks_path(anatomy: Anatomy) -> str:
    paths = [_path(anatomy, block).rpartition(".") for block in anatomy.blocks]
    whole = anatomy.model.get_submodule(paths[0][0])
    if not isinstance(whole, nn.ModuleList) or len(whole) != len(paths):
        raise SplitError(
            f"the blocks of {type(anatomy.model).__name__} are not the members of one ModuleList"
        )
    return paths[0][0]


def _trial_text(anatomy: Anatomy) -> dict[str, Tensor]:
    length = min(6, context_length(anatomy) or 6)
    config = getattr(without_peft(anatomy.model), "config", None)
    padding = getattr(config, "pad_token_id", None)
    ids = torch.arange(2 * length).view(2, length) + 3
    mask = torch.ones_like(ids)
    if padding is not None:
        ids[ids == padding] = 3 if padding != 3 else 4
        ids[1, -2:], mask[1, -2:] = padding, 0
    return {"input_ids": ids.to(anatomy.device), "attention_mask": mask.to(anatomy.device)}


def _survey(anatomy: Anatomy) -> _Survey:
    """Run the whole model once, and record the modules before, in and after its blocks."""
    inside = {id(m) for block in anatomy.blocks for m in block.modules()}
    called: dict[str, set[str]] = {"below": set(), "above": set()}
    outputs: list[Any] = []
    text = _trial_text(anatomy)
    with undisturbed(anatomy) as model, torch.no_grad(), only_needed_hooks(anatomy.root):
        handles = [
            block.register_forward_hook(lambda _, __, output: outputs.append(output))
            for block in anatomy.blocks
        ]
        for path, module in model.named_modules():
            if id(module) in inside or any(True for _ in module.children()):
                continue

            def note(_: nn.Module, __: Any, path: str = path) -> None:
                called["above" if len(outputs) == len(anatomy.blocks) else "below"].add(path)

            handles.append(module.register_forward_pre_hook(note))
        try:
            output = copy_context().run(model, **text)
        except Exception as error:
            raise SplitError(
                f"{type(model).__name__} cannot be run on token ids and a mask alone: "
                f"{type(error).__name__}: {error}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
    states = states_out(outputs[-1]) if len(outputs) == len(anatomy.blocks) else None
    logits = getattr(output, "logits", None)
    if not isinstance(states, Tensor) or states.dim() != 3 or not isinstance(logits, Tensor):
        raise SplitError(
            f"{type(anatomy.model).__name__} does not run each block once and end in logits"
        )
    last = outputs[-1]
    output_form = (None,) * len(last) if isinstance(last, tuple | list) else None
    return _Survey(called["below"], called["above"], output_form, states.shape[-1], text, logits)


def _cut_part(
    anatomy: Anatomy, survey: _Survey, start: int, stop: int, begins: str, ends: str
) -> ModelPart:
    """Return blocks of the model from tokens or states on, up to states or logits."""
    whole, blocks = anatomy.model, _blocks_path(anatomy)
    memo: dict[int, Any] = {id(t): t for t in (*whole.parameters(), *whole.buffers())}
    with only_needed_hooks(anatomy.root):
        model = copy.deepcopy(whole, memo)
    arrive = Arrive(survey.output_form) if begins == "states" else None
    leave = Leave() if ends == "states" else None
    part_blocks = list(model.get_submodule(blocks).children())[start:stop]
    members = [m for m in (arrive, *part_blocks, leave) if m is not None]
    first, last = start - (arrive is not None), len(anatomy.blocks) - 1
    _resize(model, len(members), first, len(anatomy.blocks))
    for i, member in enumerate(members):
        like = anatomy.blocks[min(max(first + i, 0), last)]
        if hasattr(like, "attention_type") and not hasattr(member, "attention_type"):
            member.attention_type = like.attention_type
    model.set_submodule(blocks, nn.ModuleList(members))
    used = set(survey.below) if begins == "tokens" else set()
    used |= survey.above if ends == "logits" else set()
    for path, module in whole.named_modules():
        inside = path == blocks or path.startswith(f"{blocks}.")
        if not inside and path not in used:
            _drop_leaf(model, path, module, embeds=path in survey.below)
    return ModelPart(model, anatomy.hidden_size, stop, arrive, leave)


def _drop_leaf(model: nn.Module, path: str, module: nn.Module, *, embeds: bool) -> None:
    """Replace a leaf with weights or dropout, which a part does not use, by one without."""
    if any(True for _ in module.children()):
        return
    if any(True for _ in module.parameters()) or isinstance(module, nn.Dropout):
        nothing = embeds and hasattr(module, "embedding_dim")
        model.set_submodule(path, Nothing(module) if nothing else nn.Identity())


def _resize(model: nn.Module, count: int, first: int, whole: int) -> None:
    """Set the number of blocks in the part's configuration."""
    config = getattr(without_peft(model), "config", None)
    if config is None:
        return
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if hasattr(config, "num_hidden_layers"):
        config.num_hidden_layers = count
    types = getattr(config, "layer_types", None)
    if isinstance(types, list | tuple) and len(types) == whole:
        places = [min(max(first + i, 0), whole - 1) for i in range(count)]
        config.layer_types = [types[p] for p in places]


@torch.no_grad()
def _check_parts(anatomy: Anatomy, split: SplitModel, survey: _Survey) -> None:
    """Compare the parts, run in sequence, with the whole model.

    Raises:
        SplitError: they compute something else.
    """
    mask = survey.text["attention_mask"]
    parts = [p for p in (split.bottom, split.top, split.tail) if p is not None]
    states = survey.text["input_ids"]
    try:
        with preserve_process(), preserve_model(nn.ModuleList(parts)):
            for part in parts:
                part.eval()
            for part in parts[:-1]:
                states = part.states(states, mask)
            logits = parts[-1].output(states, mask).logits
    except Exception as error:
        raise SplitError(
            f"{type(anatomy.model).__name__} cannot be run in parts: "
            f"{type(error).__name__}: {error}"
        ) from error
    expected = survey.logits
    if logits.shape[:2] == mask.shape:
        logits, expected = logits[mask != 0], expected[mask != 0]
    tolerance = _AGREE.get(expected.dtype, _AGREE_OTHERWISE)
    difference = (logits - expected).abs().max().float()
    if not bool(difference <= tolerance * expected.float().abs().max()):
        raise SplitError(
            f"{type(anatomy.model).__name__} computes something else in parts than as a whole "
            f"(logits differ by {float(difference):.2g})"
        )
