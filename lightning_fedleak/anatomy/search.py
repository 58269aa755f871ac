"""Finding the parts of a language model wherever it sits in a module."""

from __future__ import annotations

from itertools import takewhile
from typing import get_args

from torch import nn

from lightning_fedleak.anatomy.blocks import block_lists, find_blocks, is_encoder_decoder
from lightning_fedleak.anatomy.known import (
    asked,
    embedding_of,
    head_of,
    kind_by_head,
    kind_by_name,
)
from lightning_fedleak.anatomy.layers import (
    Named,
    given_module,
    layers_of,
    listed_layers,
    missing_part,
    outermost,
    path_in,
    rows_of,
    shape_of,
)
from lightning_fedleak.anatomy.parts import Anatomy, AnatomyError, Kind
from lightning_fedleak.anatomy.wrappers import (
    leaf,
    peft_kind,
    transparent_child,
    unwrap,
    without_peft,
)


def find_anatomy(
    root: nn.Module,
    *,
    model: str | nn.Module | None = None,
    embedding: str | nn.Module | None = None,
    head: str | nn.Module | None = None,
    blocks: str | None = None,
    kind: Kind | None = None,
) -> Anatomy:
    """Finds the parts of the language model inside ``root``.

    Looked for are, in this order: one Hugging Face (or PEFT) model; one module with
    ``get_input_embeddings``; one pair of ``nn.Embedding`` and ``nn.Linear`` with the same number of
    rows. What the getters of a model say is checked: the input embeddings of an encoder-decoder are
    those its encoder calls, and a head must have as many rows as there are words. A model without a
    head of its own (``BertModel``) may have it beside it in ``root``. A part that is given is taken
    instead of searched. Names are paths in ``root``, or in the language model.

    Args:
        root: the LightningModule, or any module.
        model: the language model, where ``root`` holds several.
        embedding: input embeddings. Given alone for a plain module that has no linear layer of
            vocabulary size, it makes an anatomy without a head.
        head: output layer. A model that multiplies by its embedding matrix, without a layer of its
            own, names that embedding here too.
        blocks: name of the ``ModuleList`` or ``Sequential`` of transformer blocks.
        kind: what the labels mean. Of a plain module without a ``config`` it cannot be seen:
            ``"seq2seq"`` is assumed if it holds an ``nn.Transformer``, ``"causal"`` otherwise.

    Raises:
        AnatomyError: a part is missing, or there are several; lists them and the argument to give.
    """
    if kind not in (None, *get_args(Kind)):
        raise AnatomyError(f"kind must be one of {', '.join(get_args(Kind))}; got {kind!r}.")
    found = given_module(root, None, model, "model")
    if found is None:
        found = _find_model(root)
    scope = root if found is None else unwrap(found)
    the_embedding = given_module(root, scope, embedding, "embedding")
    the_head = given_module(root, scope, head, "head")
    core = without_peft(scope)
    if found is not None and asked(core, "get_input_embeddings") is not None:
        if the_embedding is None:
            the_embedding = embedding_of(root, core)
        named = kind_by_name(core)
        if the_head is None:
            required = kind is None and named is not None
            the_head = head_of(root, core, the_embedding, kind or named, required)
        the_kind = kind or named or kind_by_head(root, core, the_embedding, the_head)
    else:
        the_embedding, the_head = _plain_parts(root, scope, the_embedding, the_head, kind)
        if found is None:
            core = scope = _common_ancestor(root, [the_embedding, the_head])
        the_kind = kind or _plain_kind(scope)

    shape = shape_of(the_embedding, "embedding")
    rows = shape[0] if the_head is None else rows_of(the_head, "head")
    decoder_only = the_kind == "seq2seq" or is_encoder_decoder(core)
    the_blocks = find_blocks(root, core, blocks, decoder_only, (the_embedding, the_head))
    return Anatomy(
        root=root,
        model=scope,
        kind=the_kind,
        embedding=the_embedding,
        embedding_name=path_in(root, the_embedding, "embedding"),
        head=the_head,
        head_name=None if the_head is None else path_in(root, the_head, "head"),
        blocks=tuple(m for _, m in the_blocks),
        block_names=tuple(n for n, _ in the_blocks),
        tied=_tied(scope, the_embedding, the_head),
        vocab_size=rows,
        hidden_size=shape[1],
        peft=peft_kind(scope),
    )


def _find_model(root: nn.Module) -> nn.Module | None:
    """The one language model inside ``root`` that has ``get_input_embeddings``, if any."""
    known: list[Named] = []
    exposing: list[Named] = []
    stack: list[Named] = [("", root)]
    seen: set[int] = set()
    while stack:
        name, module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if transparent_child(module) is None and asked(module, "get_input_embeddings") is not None:
            lightning = hasattr(module, "training_step")
            if hasattr(getattr(module, "config", None), "model_type") and not lightning:
                known.append((name, module))
                continue
            exposing.append((name, module))
        children = [(f"{name}.{n}" if name else n, m) for n, m in module.named_children()]
        stack.extend(reversed(children))
    models = outermost(known)
    if not models:
        inner = [(n, m) for n, m in exposing if not hasattr(m, "training_step")]
        models = outermost(inner or exposing)
    if len(models) > 1:
        listed = "; ".join(f"'{n}' ({type(unwrap(m)).__name__})" for n, m in models)
        raise AnatomyError(
            f"{type(root).__name__} holds {len(models)} language models: {listed}. Say which one "
            f"is trained on the private text: model='{models[0][0]}', for instance."
        )
    return models[0][1] if models else None


def _plain_parts(
    root: nn.Module,
    scope: nn.Module,
    embedding: nn.Module | None,
    head: nn.Module | None,
    kind: Kind | None,
) -> tuple[nn.Module, nn.Module | None]:
    """Embedding and head of a plain module: the one pair with the same number of rows.

    Layers inside blocks are left out: their widths may equal a number of positions by chance.
    """
    if embedding is not None and head is not None:
        return embedding, head
    inner = {
        id(m)
        for _, blocks in block_lists(scope)
        if not layers_of(blocks, (nn.Embedding,))
        for m in blocks.modules()
    }
    embeddings = [(n, m) for n, m in layers_of(scope, (nn.Embedding,)) if id(m) not in inner]
    if embedding is not None:
        embeddings = [(path_in(root, embedding, "embedding"), embedding)]
    linears = [(n, m) for n, m in layers_of(scope, (nn.Linear,)) if id(m) not in inner]
    if head is not None:
        linears = [(path_in(root, head, "head"), head)]
    if kind == "classifier" and len(embeddings) == 1 and linears:
        return embeddings[0][1], linears[-1][1]
    pairs = [(e, h) for e in embeddings for h in linears if rows_of(e[1]) == rows_of(h[1])]
    if len(pairs) == 1:
        return pairs[0][0][1], pairs[0][1][1]
    if embedding is not None and not pairs:
        return embedding, None
    raise missing_part(
        root,
        "single language model" if pairs else "language model",
        "a Hugging Face or PEFT model, a module with get_input_embeddings(), one nn.Embedding and "
        "one nn.Linear with the same number of rows",
        [f"'{e}' with '{h}' ({rows_of(m)} rows)" for (e, m), (h, _) in pairs]
        or listed_layers(scope, (nn.Embedding, nn.Linear), outside=inner),
        "embedding",
        "head",
    )


def _plain_kind(model: nn.Module) -> Kind:
    transformer = any(isinstance(m, nn.Transformer) for m in model.modules())
    return "seq2seq" if transformer else "causal"


def _common_ancestor(root: nn.Module, parts: list[nn.Module | None]) -> nn.Module:
    """The innermost module that holds all parts and can be called."""
    paths = [path_in(root, p, "part").split(".") for p in parts if p is not None]
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    shared = [level[0] for level in levels]
    while shared:
        module = root.get_submodule(".".join(shared))
        if type(module).forward is not nn.Module.forward and module not in parts:
            return unwrap(module)
        shared = shared[:-1]
    return unwrap(root)


def _tied(model: nn.Module, embedding: nn.Module, head: nn.Module | None) -> bool:
    weight = None if head is None else leaf(head)._parameters.get("weight")
    if weight is None:
        return False
    embeddings = [leaf(embedding), *(leaf(m) for _, m in layers_of(model, (nn.Embedding,)))]
    return any(e._parameters.get("weight") is weight for e in embeddings)
