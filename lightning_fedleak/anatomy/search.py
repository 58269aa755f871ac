"""Finding the parts of a language model wherever it sits in a module."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile

from torch import nn

from lightning_fedleak.anatomy.parts import Anatomy, AnatomyError, Kind
from lightning_fedleak.anatomy.wrappers import (
    leaf,
    matrix_shape,
    path_of,
    peft_kind,
    transparent_child,
    unwrap,
    walk,
    without_peft,
)

Named = tuple[str, nn.Module]


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
    found = _given(root, None, model, "model") or _find_model(root)
    scope = root if found is None else unwrap(found)
    given_embedding = _given(root, scope, embedding, "embedding")
    given_head = _given(root, scope, head, "head")
    if found is not None and callable(getattr(scope, "get_input_embeddings", None)):
        core = without_peft(scope)
        the_embedding = given_embedding or _own_embedding(root, core)
        the_kind = kind or _kind_by_name(core)
        the_head = given_head or _own_head(root, scope, core, the_embedding, the_kind)
        the_kind = the_kind or _kind_by_head(root, core, the_embedding, the_head)
    else:
        the_embedding, the_head = _plain_parts(root, scope, given_embedding, given_head, kind)
        if found is None:
            scope = _common_ancestor(root, [the_embedding, the_head])
        core = scope
        transformer = any(isinstance(m, nn.Transformer) for m in scope.modules())
        the_kind = kind or ("seq2seq" if transformer else "causal")
    if the_kind not in ("causal", "masked", "seq2seq", "classifier"):
        raise AnatomyError(
            f"kind must be 'causal', 'masked', 'seq2seq' or 'classifier', got {the_kind!r}."
        )

    shape = _shape(the_embedding, "embedding")
    rows = shape[0] if the_head is None else _shape(the_head, "head")[0]
    the_blocks = _blocks(root, scope, core, blocks, the_kind, (the_embedding, the_head))
    return Anatomy(
        root=root,
        model=scope,
        kind=the_kind,
        embedding=the_embedding,
        embedding_name=_path(root, the_embedding, "embedding"),
        head=the_head,
        head_name=None if the_head is None else _path(root, the_head, "head"),
        blocks=tuple(m for _, m in the_blocks),
        block_names=tuple(n for n, _ in the_blocks),
        tied=_tied(scope, the_embedding, the_head),
        vocab_size=rows,
        hidden_size=shape[1],
        peft=peft_kind(scope),
    )


def _given(
    root: nn.Module, model: nn.Module | None, part: str | nn.Module | None, argument: str
) -> nn.Module | None:
    """The module that the user named or gave; None where the argument is None."""
    if part is None:
        return None
    if isinstance(part, nn.Module):
        if path_of(root, part) is None:
            raise AnatomyError(
                f"{argument}= is a {type(part).__name__} that is no part of "
                f"{type(root).__name__}; give a module inside it, or its name."
            )
        return part
    for place in (root, model):
        if place is not None:
            try:
                return place.get_submodule(part)
            except AttributeError:
                continue
    names = [n for n, _ in walk(root) if n.count(".") < 3 and n]
    raise AnatomyError(
        f"{argument}='{part}' is no module of {type(root).__name__}"
        + ("" if model is None or model is root else f" or of {type(model).__name__} inside it")
        + f". Its modules are: {_listed(names)}."
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
        if transparent_child(module) is None and _has_embeddings(module):
            lightning = hasattr(module, "training_step")
            if hasattr(getattr(module, "config", None), "model_type") and not lightning:
                known.append((name, module))
                continue
            exposing.append((name, module))
        children = [(f"{name}.{n}" if name else n, m) for n, m in module.named_children()]
        stack.extend(reversed(children))
    models = _outermost(known)
    if not models:
        inner = [(n, m) for n, m in exposing if not hasattr(m, "training_step")]
        models = _outermost(inner or exposing)
    if len(models) > 1:
        listed = "; ".join(f"'{n}' ({type(unwrap(m)).__name__})" for n, m in models)
        raise AnatomyError(
            f"{type(root).__name__} holds {len(models)} language models: {listed}. Say which one "
            f"is trained on the private text: model='{models[0][0]}', for instance."
        )
    return models[0][1] if models else None


def _has_embeddings(module: nn.Module) -> bool:
    return callable(getattr(module, "get_input_embeddings", None)) and (
        _asked(module, "get_input_embeddings") is not None
    )


def _outermost(modules: list[Named]) -> list[Named]:
    """Those that are not inside another of them."""
    inside = {id(m) for _, outer in modules for m in outer.modules() if m is not outer}
    return [(n, m) for n, m in modules if id(m) not in inside]


def _asked(model: nn.Module | None, getter: str) -> nn.Module | None:
    """What a getter of the model says, if that is a layer with a matrix."""
    ask = getattr(model, getter, None)
    if not callable(ask):
        return None
    try:
        answer = ask()
    except (NotImplementedError, AttributeError):
        return None
    return answer if isinstance(answer, nn.Module) and matrix_shape(answer) else None


def _encoder_decoder(core: nn.Module) -> bool:
    return bool(getattr(getattr(core, "config", None), "is_encoder_decoder", False))


def _side(core: nn.Module, name: str) -> nn.Module | None:
    """Encoder or decoder of an encoder-decoder model."""
    ask = getattr(core, f"get_{name}", None)
    try:
        side = ask() if callable(ask) else None
    except (NotImplementedError, AttributeError):
        side = None
    if isinstance(side, nn.Module):
        return side
    return next((m for n, m in walk(core) if n.rsplit(".", 1)[-1] == name), None)


def _own_embedding(root: nn.Module, core: nn.Module) -> nn.Module:
    """Input embeddings by the model's getter; of an encoder-decoder those the encoder calls.

    T5 and BART answer with ``shared``, a module that their forward never calls and whose weight is
    no longer the encoder's where the model is untied.
    """
    side = _side(core, "encoder") if _encoder_decoder(core) else None
    answer = _asked(side, "get_input_embeddings") or _asked(core, "get_input_embeddings")
    if answer is not None and path_of(root, answer) is not None:
        return answer
    raise _missing(
        root,
        "input embeddings",
        f"get_input_embeddings() of {type(core).__name__}, a module inside the model",
        _matrices(root, (nn.Embedding,)),
        "embedding",
    )


def _own_head(
    root: nn.Module, model: nn.Module, core: nn.Module, embedding: nn.Module, kind: Kind | None
) -> nn.Module | None:
    """Output layer by the model's getter, else by search in the model, else beside it."""
    if kind != "classifier":
        answer = _asked(core, "get_output_embeddings")
        if answer is not None and path_of(root, answer) is not None:
            _check_rows(root, core, embedding, answer)
            return answer
    blocks = {id(m) for _, b in _block_lists(core) for m in b.modules()}
    linears = [(n, m) for n, m in _layers(core, (nn.Linear,)) if id(m) not in blocks]
    if kind == "classifier":
        classes = getattr(getattr(core, "config", None), "num_labels", None)
        fitting = [m for _, m in linears if classes in (None, _shape(m, "head")[0])]
        if fitting:
            return fitting[-1]
    else:
        fitting = [
            m for _, m in linears if _shape(m, "head")[0] == _shape(embedding, "embedding")[0]
        ]
        if len(fitting) == 1:
            return fitting[0]
    inside = {id(m) for m in model.modules()}
    beside = [(n, m) for n, m in _layers(root, (nn.Linear,)) if id(m) not in inside]
    if not beside and kind != "classifier":
        return None
    if len(beside) == 1:
        return beside[0][1]
    raise _missing(
        root,
        "output head",
        f"get_output_embeddings() of {type(core).__name__}, its last linear layer, one linear "
        "layer beside it",
        _matrices(root, (nn.Linear,), outside=blocks),
        "head",
    )


def _check_rows(root: nn.Module, core: nn.Module, embedding: nn.Module, head: nn.Module) -> None:
    words, rows = _shape(embedding, "embedding")[0], _shape(head, "head")[0]
    if rows != words and not _encoder_decoder(core):
        raise AnatomyError(
            f"get_output_embeddings() of {type(core).__name__} gives '{path_of(root, head)}' with "
            f"{rows} rows, but there are {words} input embeddings in "
            f"'{path_of(root, embedding)}'. If that is meant so, name it: "
            f"head='{path_of(root, head)}'."
        )


def _kind_by_name(core: nn.Module) -> Kind | None:
    """Kind by the class's (or a base class's) name, as Hugging Face names models."""
    names = [c.__name__ for c in type(core).__mro__]

    def ends(*suffixes: str) -> bool:
        return any(n.endswith(suffixes) for n in names)

    if ends("ForSequenceClassification", "ForTokenClassification", "ForMultipleChoice"):
        return "classifier"
    if _encoder_decoder(core):
        return "seq2seq"
    if ends("ForMaskedLM", "ForPreTraining") and not ends("LMHeadModel", "ForCausalLM"):
        return "masked"
    if ends("LMHeadModel", "ForCausalLM", "ForConditionalGeneration"):
        return "causal"
    return None


def _kind_by_head(
    root: nn.Module, core: nn.Module, embedding: nn.Module, head: nn.Module | None
) -> Kind:
    """Kind of a model whose class does not say it, where its head does."""
    rows = None if head is None else _shape(head, "head")[0]
    if rows is not None and rows != _shape(embedding, "embedding")[0]:
        return "classifier"
    if rows is not None and not hasattr(core, "config"):
        return "causal"
    raise AnatomyError(
        f"what the labels of {type(core).__name__} in {type(root).__name__} mean cannot be seen "
        "from its class. Say it: kind='causal' (next tokens), 'masked', 'seq2seq' or 'classifier'."
    )


def _plain_parts(
    root: nn.Module,
    scope: nn.Module,
    embedding: nn.Module | None,
    head: nn.Module | None,
    kind: Kind | None,
) -> tuple[nn.Module, nn.Module | None]:
    """Embedding and head of a plain module: the one pair with the same number of rows."""
    embeddings = [embedding] if embedding else [m for _, m in _layers(scope, (nn.Embedding,))]
    linears = [head] if head else [m for _, m in _layers(scope, (nn.Linear,))]
    if embedding and head:
        return embedding, head
    if kind == "classifier" and len(embeddings) == 1 and linears:
        return embeddings[0], linears[-1]
    pairs = [
        (e, h)
        for e in embeddings
        for h in linears
        if _shape(e, "embedding")[0] == _shape(h, "head")[0]
    ]
    if len(pairs) == 1:
        return pairs[0]
    if embedding and not pairs:
        return embedding, None
    raise _missing(
        root,
        "language model" if not pairs else "single pair of embedding and head",
        "a Hugging Face or PEFT model, a module with get_input_embeddings(), one nn.Embedding and "
        "one nn.Linear with the same number of rows",
        _matrices(scope, (nn.Embedding, nn.Linear)),
        "embedding",
        "head",
    )


def _common_ancestor(root: nn.Module, parts: list[nn.Module | None]) -> nn.Module:
    """The innermost module that holds all parts and can be called."""
    paths = [_path(root, p, "part").split(".") for p in parts if p is not None]
    levels = takewhile(lambda level: len(set(level)) == 1, zip(*paths, strict=False))
    shared = [level[0] for level in levels]
    while shared:
        module = root.get_submodule(".".join(shared))
        if type(module).forward is not nn.Module.forward and module not in parts:
            return unwrap(module)
        shared = shared[:-1]
    return unwrap(root)


def _block_lists(model: nn.Module) -> list[Named]:
    """Lists of at least one block (a module with children and parameters), outermost only."""
    lists: list[Named] = []
    for name, module in walk(model):
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 0:
            blocks = [unwrap(b) for b in module]
            alike = isinstance(module, nn.ModuleList) or len({type(b) for b in blocks}) == 1
            if alike and all(any(True for _ in b.children()) for b in blocks):
                lists.append((name, module))
    return _outermost(lists)


def _blocks(
    root: nn.Module,
    model: nn.Module,
    core: nn.Module,
    name: str | None,
    kind: Kind,
    ends: tuple[nn.Module, nn.Module | None],
) -> list[Named]:
    """Transformer blocks with their names in ``root``: of the decoder where there is one."""
    chosen = _given(root, model, name, "blocks")
    if chosen is not None and not (isinstance(chosen, nn.ModuleList | nn.Sequential) and chosen):
        raise AnatomyError(
            f"blocks='{name}' is a {type(chosen).__name__}; name a ModuleList or Sequential that "
            "holds the transformer blocks."
        )
    if chosen is None:
        decoder = _side(core, "decoder") if kind == "seq2seq" or _encoder_decoder(core) else None
        lists = [
            module
            for _, module in _block_lists(decoder or core)
            if not any(m is end for end in ends for m in module.modules())
        ]
        if not lists:
            return []
        chosen = max(lists, key=lambda m: sum(p.numel() for p in m.parameters()))
    prefix = _path(root, chosen, "blocks")
    return [(f"{prefix}.{n}" if prefix else n, unwrap(m)) for n, m in chosen.named_children()]


def _tied(model: nn.Module, embedding: nn.Module, head: nn.Module | None) -> bool:
    weight = None if head is None else leaf(head)._parameters.get("weight")
    if weight is None:
        return False
    embeddings = [leaf(embedding), *(leaf(m) for _, m in _layers(model, (nn.Embedding,)))]
    return any(e._parameters.get("weight") is weight for e in embeddings)


def _layers(root: nn.Module, types: tuple[type[nn.Module], ...]) -> list[Named]:
    """Layers of these types in use, in order of registration, each once, PEFT layers whole."""
    seen: set[int] = set()
    layers: list[Named] = []
    for name, module in walk(root):
        layer = leaf(module)
        if isinstance(layer, types) and id(layer) not in seen:
            seen.add(id(layer))
            layers.append((name, module))
    return layers


def _matrices(
    root: nn.Module, types: tuple[type[nn.Module], ...], outside: Iterable[int] = ()
) -> list[str]:
    skip = set(outside)
    return [
        f"'{n}' ({type(leaf(m)).__name__}, {_shape(m, 'part')[0]} rows)"
        for n, m in _layers(root, types)
        if id(m) not in skip
    ]


def _shape(module: nn.Module, argument: str) -> tuple[int, int]:
    shape = matrix_shape(module)
    if shape is None:
        raise AnatomyError(
            f"{argument} is a {type(module).__name__} without a weight matrix; name a layer with "
            f"one: {argument}='path.to.layer'."
        )
    return shape


def _path(root: nn.Module, module: nn.Module, part: str) -> str:
    path = path_of(root, module)
    if path is None:
        raise AnatomyError(f"the {part} ({type(module).__name__}) is not inside the module given.")
    return path


def _missing(
    root: nn.Module, part: str, looked_for: str, found: list[str], *arguments: str
) -> AnatomyError:
    named = ", ".join(f"{a}='path.to.module'" for a in arguments)
    return AnatomyError(
        f"found no {part} in {type(root).__name__}. Looked for: {looked_for}. "
        f"Found: {_listed(found)}. Name it: find_anatomy(module, {named}), or give the module "
        "itself."
    )


def _listed(items: list[str], most: int = 12) -> str:
    if not items:
        return "nothing"
    more = f", and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
