"""Find a language model inside any module, with its embedding, head and blocks: its *anatomy*.

:func:`find_anatomy` does so for Hugging Face models by their getters (``get_input_embeddings``),
and for plain modules by the numbers of rows of their layers. The kind of a model says what its
labels mean: next tokens (``"causal"``), masked tokens (``"masked"``), a decoder's tokens
(``"seq2seq"``) or classes (``"classifier"``).
"""

from collections.abc import Iterable
from inspect import signature
from itertools import chain
from typing import get_args

from torch import nn

from lightning_fedleak.model.anatomy import parts
from lightning_fedleak.model.anatomy.blocks import (
    Named,
    block_lists,
    call_getter,
    common_path,
    count_rows,
    find_blocks,
    find_layers,
    find_side,
    is_encoder_decoder,
    missing_part_error,
    outermost,
    path_in,
    resolve_module,
    weight_shape,
)
from lightning_fedleak.model.anatomy.parts import Anatomy, AnatomyError, Kind
from lightning_fedleak.validate import check_choice

# Endings of the names of Hugging Face's classes.
_CLASSIFIERS = (
    *("ForSequenceClassification", "ForTokenClassification"),
    *("ForMultipleChoice", "ForQuestionAnswering"),
)
_CAUSAL = ("LMHeadModel", "ForCausalLM", "DoubleHeadsModel")


def call_matrix_getter(model: nn.Module | None, getter: str) -> nn.Module | None:
    """Return the layer that a getter (``get_input_embeddings``) returns; None without a matrix."""
    layer = call_getter(model, getter)
    return layer if layer is not None and parts.matrix_shape(layer) else None


def find_embedding(root: nn.Module, model: nn.Module) -> nn.Module:
    """Return the layer that ``get_input_embeddings`` returns, preferably that of the encoder.

    The getters of T5 and BART themselves return ``shared``, a module that their forward never
    calls. If the model is untied, the weight of ``shared`` is not the encoder's.

    Raises:
        AnatomyError: The getter returns no layer inside ``root``.
    """
    encoder = find_side(model, "encoder") if is_encoder_decoder(model) else None
    for owner in (encoder, model):
        layer = call_matrix_getter(owner, "get_input_embeddings")
        if layer is not None and parts.find_path(root, layer) is not None:
            return layer
    embeddings = find_layers(root, (nn.Embedding,))
    raise missing_part_error(root, "input embeddings", embeddings, "embedding")


def infer_kind_from_name(model: nn.Module) -> Kind | None:
    """Infer the kind from the name of the class or a base class, by Hugging Face's convention."""
    names = [c.__name__ for c in type(model).__mro__]

    def ends(*suffixes: str) -> bool:
        return any(n.endswith(suffixes) for n in names)

    if ends(*_CLASSIFIERS):
        return "classifier"
    if is_encoder_decoder(model):
        return "seq2seq"
    if ends(*_CAUSAL):
        return "causal"
    if ends("ForMaskedLM", "ForPreTraining"):
        return "masked"
    return "causal" if ends("ForConditionalGeneration") else None


def infer_kind_from_head(
    root: nn.Module, model: nn.Module, embedding: nn.Module, head: nn.Module | None
) -> Kind:
    """Infer the kind from the head, for a model whose class name does not show it.

    A model without a head, such as a sentence encoder, predicts no tokens: a classifier.

    Raises:
        AnatomyError: The kind cannot be inferred from the head either.
    """
    if head is None or count_rows(head) != count_rows(embedding):
        return "classifier"
    if not hasattr(model, "config"):
        return "causal"
    raise AnatomyError(
        f"what do the labels of {type(model).__name__} in {type(root).__name__} mean? Set kind="
        "'causal' (next tokens), 'masked', 'seq2seq' or 'classifier'."
    )


def find_head(
    root: nn.Module, model: nn.Module, embedding: nn.Module, kind: Kind | None, required: bool
) -> nn.Module | None:
    """Return the output layer: the getter's, else one in the model, else another in ``root``.

    Args:
        root: The module that is searched.
        model: The language model in it, without its PEFT wrapper.
        embedding: The model's input embeddings.
        kind: The meaning of the labels, or None if it is not known yet.
        required: Whether a missing head is an error; otherwise None is returned.

    Raises:
        AnatomyError: A required head is missing, or there are several.
    """
    layer = None if kind == "classifier" else call_matrix_getter(model, "get_output_embeddings")
    if layer is not None and parts.find_path(root, layer) is not None:
        _check_rows(root, model, embedding, layer)
        return layer
    in_blocks = _module_ids(block_lists(model))
    linears = [m for _, m in find_layers(model, (nn.Linear,), in_blocks)]
    if kind == "classifier":
        n_classes = getattr(getattr(model, "config", None), "num_labels", None)
        if type(model).__name__.endswith("ForMultipleChoice"):
            n_classes = 1  # a score of each choice, whatever the config says
        heads = [m for m in linears if n_classes in (None, count_rows(m))][-1:]
    else:
        heads = [m for m in linears if count_rows(m) == count_rows(embedding)]
    if len(heads) == 1:
        return heads[0]
    outside_model = [m for _, m in find_layers(root, (nn.Linear,), _module_ids([("", model)]))]
    if not required and not heads and len(outside_model) <= 1:
        return next(iter(outside_model), None)
    part = "single output head" if heads or outside_model else "output head"
    raise missing_part_error(root, part, find_layers(root, (nn.Linear,), in_blocks), "head")


def _module_ids(parts: Iterable[Named]) -> set[int]:
    """Return the ``id`` of each module inside these modules, themselves included."""
    return {id(m) for _, part in parts for m in part.modules()}


def _check_rows(root: nn.Module, model: nn.Module, embedding: nn.Module, head: nn.Module) -> None:
    """Raise ``AnatomyError`` if a model without an encoder has a head of another vocabulary."""
    words, rows = count_rows(embedding), count_rows(head)
    if rows != words and not is_encoder_decoder(model):
        path = parts.find_path(root, head)
        raise AnatomyError(
            f"{type(model).__name__} has {words} input embeddings, and its head '{path}' {rows} "
            f"rows: if that is intended, pass head='{path}'"
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
    """Return the parts of the language model inside ``root``.

    The function searches, in this order, for one Hugging Face (or PEFT) model; one module with
    ``get_input_embeddings``; one pair of ``nn.Embedding`` and ``nn.Linear`` with the same number of
    rows. It checks what the getters of a model return: the input embeddings of an encoder-decoder
    are those that its encoder calls, and a head must have a row for each token. A model without a
    head (``BertModel``) may have a head elsewhere in ``root``. Parts that are passed as arguments
    are not searched for. Names are paths in ``root``, or in the language model.

    Args:
        root: The LightningModule, or any module.
        model: The language model, if ``root`` holds several.
        embedding: The input embeddings. If a plain module has no linear layer of vocabulary size,
            set only this argument; the anatomy then has no head.
        head: The output layer. If the model has none and multiplies by its embedding matrix, pass
            the embedding here as well.
        blocks: The name of the ``ModuleList`` or ``Sequential`` of transformer blocks.
        kind: The meaning of the labels. For a module without ``get_input_embeddings`` the default
            is ``"seq2seq"`` if it holds an ``nn.Transformer``, and ``"causal"`` otherwise.

    Raises:
        AnatomyError: A part is missing, or there are several. The message lists them and names the
            argument to set.
    """
    check_choice("kind", kind, get_args(Kind), optional=True, error=AnatomyError)
    named_model = resolve_module(root, None, model, "model")
    if named_model is None:
        named_model = _find_model(root)
    scope = root if named_model is None else parts.unwrap(named_model)
    embedding_layer = resolve_module(root, scope, embedding, "embedding")
    head_layer = resolve_module(root, scope, head, "head")
    core = parts.without_peft(scope)
    if named_model is not None and call_matrix_getter(core, "get_input_embeddings") is not None:
        if embedding_layer is None:
            embedding_layer = find_embedding(root, core)
        name_kind = infer_kind_from_name(core)
        if head_layer is None:
            required = kind is None and name_kind is not None
            head_layer = find_head(root, core, embedding_layer, kind or name_kind, required)
        resolved_kind = (
            kind or name_kind or infer_kind_from_head(root, core, embedding_layer, head_layer)
        )
    else:
        embedding_layer, head_layer = _plain_parts(root, scope, embedding_layer, head_layer, kind)
        if named_model is None:
            core = scope = _common_ancestor(root, [embedding_layer, head_layer])
        resolved_kind = kind or _plain_kind(scope)

    shape = weight_shape(embedding_layer, "embedding")
    rows = shape[0] if head_layer is None else count_rows(head_layer, "head")
    search_decoder = resolved_kind == "seq2seq" or is_encoder_decoder(core)
    block_list = find_blocks(root, core, blocks, search_decoder, (embedding_layer, head_layer))
    return Anatomy(
        root=root,
        model=scope,
        kind=resolved_kind,
        embedding=embedding_layer,
        embedding_name=path_in(root, embedding_layer, "embedding"),
        head=head_layer,
        head_name=None if head_layer is None else path_in(root, head_layer, "head"),
        blocks=tuple(m for _, m in block_list),
        block_names=tuple(n for n, _ in block_list),
        tied=_is_tied(scope, embedding_layer, head_layer),
        vocab_size=rows,
        embedding_rows=shape[0],
        hidden_size=shape[1],
        peft=parts.peft_kind(scope),
        target_rows=_target_rows(core, embedding_layer) if is_encoder_decoder(core) else None,
    )


def _target_rows(model: nn.Module, embedding: nn.Module) -> int | None:
    """Return the rows of the decoder's embedding if its vocabulary differs from the encoder's.

    The vocabularies differ if the sizes do, or if the configuration says that they are not shared.
    """
    decoder = find_side(model, "decoder")
    layer = None if decoder is None else call_matrix_getter(decoder, "get_input_embeddings")
    if layer is None or parts.leaf(layer) is parts.leaf(embedding):
        return None
    config = getattr(model, "config", None)
    is_separate = getattr(config, "share_encoder_decoder_embeddings", True) is False
    rows = count_rows(layer)
    return rows if is_separate or rows != count_rows(embedding) else None


def _find_model(root: nn.Module) -> nn.Module | None:
    """Return the only language model inside ``root`` that has ``get_input_embeddings``, or None.

    Hugging Face models are preferred to other modules, and these to a LightningModule.

    Raises:
        AnatomyError: There are several.
    """
    with_getter = [
        (name, module)
        for name, module in root.named_modules()
        if parts.transparent_child(module) is None  # a wrapper's getter may be its child's
        and call_matrix_getter(module, "get_input_embeddings") is not None
    ]
    others = [(n, m) for n, m in with_getter if not hasattr(m, "training_step")]
    hugging_face = [(n, m) for n, m in others if hasattr(getattr(m, "config", None), "model_type")]
    models = outermost(hugging_face or others or with_getter)
    if len(models) > 1:
        names = ", ".join(repr(name) for name, _ in models)
        raise AnatomyError(
            f"{type(root).__name__} holds {len(models)} language models: name the one to attack, "
            f"settings=WatchSettings(anatomy={{'model': ...}}) or model=..., of {names}"
        )
    return models[0][1] if models else None


def _plain_parts(
    root: nn.Module,
    scope: nn.Module,
    embedding: nn.Module | None,
    head: nn.Module | None,
    kind: Kind | None,
) -> tuple[nn.Module, nn.Module | None]:
    """Return embedding and head of a plain module: the only pair with the same number of rows.

    Layers inside blocks are ignored: one may have as many rows as a position embedding.
    """
    if embedding is not None and head is not None:
        return embedding, head
    lists = block_lists(scope)
    in_blocks = _module_ids(part for part in lists if not find_layers(part[1], (nn.Embedding,)))
    embeddings = find_layers(scope, (nn.Embedding,), in_blocks)
    if embedding is not None:
        embeddings = [(path_in(root, embedding, "embedding"), embedding)]
    linears = find_layers(scope, (nn.Linear,), in_blocks)
    if head is not None:
        linears = [(path_in(root, head, "head"), head)]
    if kind == "classifier" and len(embeddings) == 1 and linears:
        return embeddings[0][1], linears[-1][1]
    pairs = [(e, h) for e in embeddings for h in linears if count_rows(e[1]) == count_rows(h[1])]
    if len(pairs) == 1:
        return pairs[0][0][1], pairs[0][1][1]
    # An adaptive softmax has no row for each token that could be read.
    without_head = embedding or find_layers(scope, (nn.AdaptiveLogSoftmaxWithLoss,))
    if without_head and not pairs and len(embeddings) == 1:
        return embeddings[0][1], None
    part = "single language model" if pairs else "language model"
    candidates = [*chain(*pairs)] or find_layers(scope, (nn.Embedding, nn.Linear), in_blocks)
    raise missing_part_error(root, part, candidates, "embedding", "head")


def _plain_kind(model: nn.Module) -> Kind:
    """Return the kind of a plain module: ``"seq2seq"`` if it holds an ``nn.Transformer``."""
    has_transformer = any(isinstance(m, nn.Transformer) for m in model.modules())
    return "seq2seq" if has_transformer else "causal"


def _common_ancestor(root: nn.Module, modules: list[nn.Module | None]) -> nn.Module:
    """Return the innermost module that holds all modules and whose forward takes ``input_ids``.

    If no such forward takes ``input_ids``, return the innermost module with a forward.
    """
    shared = common_path(path_in(root, m, "part") for m in modules if m is not None)
    holders = [root.get_submodule(".".join(shared[:n])) for n in range(len(shared), 0, -1)]
    callable_holders = [
        parts.unwrap(m)
        for m in holders
        if type(m).forward is not nn.Module.forward and m not in modules
    ]
    callable_holders.append(parts.unwrap(root))
    for module in callable_holders:
        if "input_ids" in signature(module.forward).parameters:
            return module
    return callable_holders[0]


def _is_tied(model: nn.Module, embedding: nn.Module, head: nn.Module | None) -> bool:
    """Return whether the head's weight is also the weight of an embedding of the model."""
    weight = None if head is None else parts.leaf(head)._parameters.get("weight")
    if weight is None:
        return False
    embeddings = [
        parts.leaf(embedding),
        *(parts.leaf(m) for _, m in find_layers(model, (nn.Embedding,))),
    ]
    return any(e._parameters.get("weight") is weight for e in embeddings)
