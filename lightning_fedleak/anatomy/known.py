"""Embedding, head and kind of a model that has ``get_input_embeddings``, each checked."""

from __future__ import annotations

from torch import nn

from lightning_fedleak.anatomy.blocks import block_lists, is_encoder_decoder, side_of
from lightning_fedleak.anatomy.layers import (
    layers_of,
    listed_layers,
    missing_part,
    rows_of,
)
from lightning_fedleak.anatomy.parts import AnatomyError, Kind
from lightning_fedleak.anatomy.wrappers import matrix_shape, path_of

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
