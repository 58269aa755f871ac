"""Finding the parts of a language model wherever it sits in a module, each checked."""

from __future__ import annotations

from inspect import signature
from itertools import takewhile
from typing import get_args

from torch import nn

from lightning_fedleak.anatomy.blocks import block_lists, find_blocks, is_encoder_decoder, side_of
from lightning_fedleak.anatomy.named_layers import (
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
    matrix_shape,
    path_of,
    peft_kind,
    transparent_child,
    unwrap,
    without_peft,
)

_CLASSIFIERS = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForMultipleChoice",
    "ForQuestionAnswering",
)
_CAUSAL = ("LMHeadModel", "ForCausalLM", "DoubleHeadsModel")


def asked(model: nn.Module | None, getter: str) -> nn.Module | None:
    """What ``get_input_embeddings`` or ``get_output_embeddings`` says, if it has a matrix."""
    ask = getattr(model, getter, None)
    if not callable(ask):
        return None
    try:
        answer = ask()
    except (NotImplementedError, AttributeError):
        return None
    return answer if isinstance(answer, nn.Module) and matrix_shape(answer) else None


def embedding_of(root: nn.Module, model: nn.Module) -> nn.Module:
    """Input embeddings by the model's getter; of an encoder-decoder those its encoder calls.

    T5 and BART answer with ``shared``, a module that their forward never calls and whose weight is
    not the encoder's where the model is untied.

    Raises:
        AnatomyError: the getter gives no layer inside ``root``.
    """
    side = side_of(model, "encoder") if is_encoder_decoder(model) else None
    for answer in (asked(side, "get_input_embeddings"), asked(model, "get_input_embeddings")):
        if answer is not None and path_of(root, answer) is not None:
            return answer
    raise missing_part(
        root,
        "input embeddings",
        f"what get_input_embeddings() of {type(model).__name__} gives, if it is inside the module",
        listed_layers(root, (nn.Embedding,)),
        "embedding",
    )


def kind_by_name(model: nn.Module) -> Kind | None:
    """Kind by the name of the class or of a base class, as Hugging Face names models."""
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


def kind_by_head(
    root: nn.Module, model: nn.Module, embedding: nn.Module, head: nn.Module | None
) -> Kind:
    """Kind of a model whose class does not say it, where its head does.

    Raises:
        AnatomyError: it cannot be seen.
    """
    if head is not None:
        if rows_of(head) != rows_of(embedding):
            return "classifier"
        if not hasattr(model, "config"):
            return "causal"
    raise AnatomyError(
        f"what the labels of {type(model).__name__} in {type(root).__name__} mean cannot be seen "
        "from its class. Say it: kind='causal' (next tokens), 'masked', 'seq2seq' or 'classifier'."
    )


def head_of(
    root: nn.Module, model: nn.Module, embedding: nn.Module, kind: Kind | None, required: bool
) -> nn.Module | None:
    """Output layer by the model's getter, else by search in the model, else beside it in ``root``.

    Args:
        root: the module searched.
        model: the language model in it, without its PEFT wrapper.
        embedding: its input embeddings.
        kind: what the labels mean, as far as known.
        required: whether the model's class promises a head.

    Raises:
        AnatomyError: a promised head is missing, or there are several.
    """
    inner = {id(m) for _, blocks in block_lists(model) for m in blocks.modules()}
    outer = [(n, m) for n, m in layers_of(model, (nn.Linear,)) if id(m) not in inner]
    if kind == "classifier":
        classes = getattr(getattr(model, "config", None), "num_labels", None)
        fitting = [m for _, m in outer if classes in (None, rows_of(m))][-1:]
    else:
        answer = asked(model, "get_output_embeddings")
        if answer is not None and path_of(root, answer) is not None:
            _check_rows(root, model, embedding, answer)
            return answer
        words = rows_of(embedding)
        fitting = [m for _, m in outer if rows_of(m) == words]
    if len(fitting) == 1:
        return fitting[0]
    inside = {id(m) for m in root.modules()} & {id(m) for m in model.modules()}
    beside = [m for _, m in layers_of(root, (nn.Linear,)) if id(m) not in inside]
    if not required and not fitting and len(beside) == 1:
        return beside[0]
    if not required and not fitting and not beside:
        return None
    raise missing_part(
        root,
        "output head" if not fitting and not beside else "single output head",
        f"get_output_embeddings() of {type(model).__name__}, a linear layer at its end, one linear "
        "layer beside it",
        listed_layers(root, (nn.Linear,), outside=inner),
        "head",
    )


def _check_rows(root: nn.Module, model: nn.Module, embedding: nn.Module, head: nn.Module) -> None:
    words, rows = rows_of(embedding), rows_of(head)
    if rows != words and not is_encoder_decoder(model):
        path = path_of(root, head)
        raise AnatomyError(
            f"get_output_embeddings() of {type(model).__name__} gives '{path}' with {rows} rows, "
            f"but there are {words} input embeddings in '{path_of(root, embedding)}'. If that is "
            f"meant so, name it: head='{path}'."
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
        target_rows=_target_rows(core, the_embedding) if is_encoder_decoder(core) else None,
    )


def _target_rows(model: nn.Module, embedding: nn.Module) -> int | None:
    """Rows of the decoder's embedding, where its vocabulary is another than the encoder's.

    So it is where their sizes differ, and where the model's configuration says that the two are not
    shared. Two matrices of one size are of one vocabulary otherwise.
    """
    decoder = side_of(model, "decoder")
    other = None if decoder is None else asked(decoder, "get_input_embeddings")
    if other is None or leaf(other) is leaf(embedding):
        return None
    config = getattr(model, "config", None)
    apart = getattr(config, "share_encoder_decoder_embeddings", True) is False
    rows = rows_of(other)
    return rows if apart or rows != rows_of(embedding) else None


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
    """The innermost module that holds all parts and is called with ``input_ids``.

    Without one the innermost that can be called.
    """
    paths = [path_in(root, p, "part").split(".") for p in parts if p is not None]
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    shared = [level[0] for level in levels]
    holders = [root.get_submodule(".".join(shared[:n])) for n in range(len(shared), 0, -1)]
    called = [
        unwrap(m) for m in holders if type(m).forward is not nn.Module.forward and m not in parts
    ]
    called.append(unwrap(root))
    return next((m for m in called if "input_ids" in signature(m.forward).parameters), called[0])


def _tied(model: nn.Module, embedding: nn.Module, head: nn.Module | None) -> bool:
    weight = None if head is None else leaf(head)._parameters.get("weight")
    if weight is None:
        return False
    embeddings = [leaf(embedding), *(leaf(m) for _, m in layers_of(model, (nn.Embedding,)))]
    return any(e._parameters.get("weight") is weight for e in embeddings)
