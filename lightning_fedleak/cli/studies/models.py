"""The models that studies measure: loaded by name, whole or with a LoRA.

An *anatomy* is a model with the places of its parts, such as its embedding, blocks and head.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from lightning_fedleak.cli.finetuning import load_tokenizer, refuse_errors
from lightning_fedleak.cli.finetuning.assets import SourceError, as_path, loading, model_source
from lightning_fedleak.extras import require_package
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy, matrix_shape, walk
from lightning_fedleak.model.loading import are_equal, load_adapters, load_whole, weight_sums
from lightning_fedleak.model.model_runs import context_length
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps import Text, token_log_probs
from lightning_fedleak.progress import bars
from lightning_fedleak.validate import WrongModel


def find_model(name: str | None) -> Anatomy:
    """Return a language model in float32 and eval mode, with the head that its configuration names.

    Args:
        name: folder or name on the hub; None for the embedded model. The ``architectures`` of its
            configuration say whether it is causal, masked or an encoder without a head.

    Raises:
        SourceError: there is no such model, or it cannot be reached.
        AnatomyError: its parts could not be found.
    """
    source, settings = model_source(name)
    with loading(source, "language model"):
        config = transformers.AutoConfig.from_pretrained(source, **settings)
        auto = _find_auto_class(config)
        is_encoder = auto is transformers.AutoModel
        model, _ = load_whole(
            auto, source, may_lack_head=is_encoder, dtype=torch.float32, **settings
        )
    # An encoder without a head has the parts of a classifier.
    return find_anatomy(model.eval(), kind="classifier" if is_encoder else None)


def _find_auto_class(config: Any) -> Any:
    """Return the class that loads the head which the ``architectures`` of a configuration name."""
    architectures = " ".join(getattr(config, "architectures", None) or ())
    if "MaskedLM" in architectures:
        return transformers.AutoModelForMaskedLM
    if "CausalLM" in architectures or "LMHead" in architectures:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModel


def has_config_without_weights(name: str) -> bool:
    """Return whether a name is that of a folder with a model's configuration and no weights."""
    folder = as_path(name)
    weights = (path for end in ("safetensors", "bin") for path in folder.glob(f"*.{end}"))
    return (folder / "config.json").is_file() and not any(weights)


def build_model(
    name: str,
    rank: int,
    targets: str | None,
    *,
    blocks: int | None = None,
    tokens: int | None = None,
    mlp: int | None = None,
) -> Anatomy:
    """Return a causal model of a configuration, with random weights or on the meta device.

    Args:
        name: folder of the configuration.
        rank: see :func:`with_lora`.
        targets: see :func:`with_lora`.
        blocks: the number of its blocks; None, here and below: as configured.
        tokens: the size of its vocabulary.
        mlp: the width of its MLPs.

    Raises:
        SourceError: the configuration is of no causal language model; or see :func:`with_lora`.
        AnatomyError: the parts of the model could not be found.
    """
    with loading(name, "causal language model"):
        config = transformers.AutoConfig.from_pretrained(name)
        auto, dtype = _find_auto_class(config), config.dtype if blocks is None else torch.float32
        layers = (getattr(config, "layer_types", None) or [])[:blocks]
        sizes = {"vocab_size": tokens, "num_hidden_layers": blocks, "intermediate_size": mlp}
        for key, value in {**sizes, "layer_types": layers}.items():
            if value is not None and getattr(config, key, None) is not None:
                setattr(config, key, value)
        if tokens is not None:
            config.pad_token_id = None  # which may be beyond them
        model = auto.from_config(config, dtype=dtype)
    if auto != transformers.AutoModelForCausalLM:
        raise SourceError(
            f"the architectures of '{name}/config.json' name no causal language model, the only "
            "kind whose costs are known without weights: give --model a folder with weights"
        )
    return with_lora(find_anatomy(model.eval()), rank, targets, seed=0)


def with_lora(anatomy: Anatomy, rank: int, targets: str | None, seed: int) -> Anatomy:
    """Return the model with PEFT's adapters of alpha 2 * rank, the only part that is then trained.

    It sets the global seed of torch.

    Args:
        anatomy: The anatomy of the model.
        rank: The rank of the adapters; 0 returns the model unchanged.
        targets: names of modules separated by commas, or ``all-linear``; None for PEFT's choice.
        seed: The seed of the adapters.

    Raises:
        SourceError: peft is not installed, or adapters do not fit such modules.
    """
    if rank == 0 and targets is not None:
        raise SourceError(
            f"--targets {targets} names modules for a LoRA: also give its rank, such as --lora-r 8"
        )
    if rank == 0:
        return anatomy
    with require_package(
        "peft", "--lora-r (0 trains the whole model) needs the package peft", SourceError
    ):
        from peft import LoraConfig, get_peft_model
    names = None if targets is None else targets.split(",")
    torch.manual_seed(seed)
    no_default = "PEFT knows no default for this model: pass --targets"
    unfit = no_default if targets is None else f"--targets {targets}"
    layers = [*walk(anatomy.blocks[0] if anatomy.blocks else anatomy.model)]
    ends = {name.rpartition(".")[2] for name, layer in layers if len(matrix_shape(layer) or ()) > 1}
    with refuse_errors(unfit, ValueError, hint=f"A block has {', '.join(sorted(ends))}"):
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=names if names != ["all-linear"] else "all-linear",
            # GPT-2's linear maps store their weights transposed.
            fan_in_fan_out=hasattr(anatomy.model, "transformer"),
        )
        model = get_peft_model(anatomy.model, config)
    return find_anatomy(model.eval(), kind=anatomy.kind)


def check_context(anatomy: Anatomy, tokens: int, option: str) -> None:
    """Raise an error if a text has more tokens than the model's context.

    Args:
        anatomy: The anatomy of the model.
        tokens: The number of tokens of a text.
        option: The option that the message names.

    Raises:
        SourceError: The text is longer; the message says how many tokens the model reads.
    """
    context = context_length(anatomy)
    if context is not None and tokens > context:
        raise SourceError(
            f"{option} {tokens} is longer than the model's context of {context}: give fewer"
        )


Head = Literal["causal", "row", "token", "masked"]
"""What a released model predicts: next tokens, a class of each row or token, or masked tokens."""
_HEADS: dict[str, tuple[Head, Any]] = {
    "ForSequenceClassification": ("row", transformers.AutoModelForSequenceClassification),
    "ForTokenClassification": ("token", transformers.AutoModelForTokenClassification),
    "ForMaskedLM": ("masked", transformers.AutoModelForMaskedLM),
}


def released_config(model: str | Path, base: str | Path) -> tuple[Any, Head]:
    """Return the configuration of a trained model, and what its ``architectures`` predict.

    If ``model`` holds adapters, the configuration is that of the base.

    Raises:
        SourceError: There is no configuration, or a classifier's adapters are for a base that has
            no classification head.
    """
    adapters, of_base = (Path(folder) / "adapter_config.json" for folder in (model, base))
    if of_base.is_file() and not of_base.with_name("config.json").exists():
        name = _read_config(of_base).get("base_model_name_or_path")
        raise SourceError(f"--base '{base}' holds adapters, and no model: their base is '{name}'")
    source, settings = model_source(str(base if adapters.is_file() else model))
    with loading(source, "language model"):
        config = transformers.AutoConfig.from_pretrained(source, **settings)
    names = getattr(config, "architectures", None) or ()
    heads = [head for end, (head, _) in _HEADS.items() if any(n.endswith(end) for n in names)]
    head = heads[0] if heads else "causal"
    task = _read_config(adapters).get("task_type") if adapters.is_file() else None
    if task in (tasks := {"SEQ_CLS": "row", "TOKEN_CLS": "token"}) and tasks[task] != head:
        raise SourceError(
            "--model holds adapters of a classifier, and --base has no such head: save the base "
            "with its head before training, and give that folder"
        )
    return config, head


def _read_config(path: Path) -> Mapping[str, str]:
    """Return the fields of a configuration of adapters; raise a SourceError if it has none."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError):
        content = None
    if not isinstance(content, dict):
        raise SourceError(f"'{path}' cannot be read as the configuration of adapters")
    return content


def load_released(name: str, config: Any, head: Head, option: str) -> Anatomy:
    """Return a model with the head of the trained one.

    Args:
        name: The folder of the model, or its name on the hub.
        config: The config of the trained model.
        head: The kind of prediction of the trained model.
        option: The option that names the model, which also decides what happens to missing weights.
            ``"--model"``: an error. ``"--base"``: they are set to 0, so that all classes are
            equally likely. Any other: they keep their random initial values.

    Raises:
        SourceError: The model cannot be loaded, or is a trained model without its head.
    """
    if head == "causal":
        anatomy = find_model(name)
        if anatomy.kind != "causal":
            raise SourceError(
                f"{option} is a {anatomy.kind} model: memorization is measured for causal and "
                "masked language models, and for classifiers of texts and of tokens"
            )
        return anatomy
    source, settings = model_source(name)
    auto = next(auto for predicted, auto in _HEADS.values() if predicted == head)
    labels = {} if head == "masked" else {"num_labels": config.num_labels}
    settings |= labels | {"dtype": torch.float32}
    with loading(source, "model of that architecture"):
        model, lacking = load_whole(auto, source, may_lack_head=option != "--model", **settings)
    for key, parameter in model.named_parameters():
        if key in lacking and option == "--base":
            parameter.data.zero_()
    return find_anatomy(model.eval())


def log_probs_before_and_after(
    texts: Sequence[Text], model: str | Path, base: str | Path, dtype: str | None = None
) -> tuple[TokenSnapshot, TokenSnapshot]:
    """Return the token log-probabilities of the base and of the trained model, one after the other.

    Args:
        texts: the texts.
        model: folder of the trained model, or of PEFT adapters on ``base``.
        base: folder of the model that the training began from, or its name on the hub.
        dtype: see :func:`query_texts`.

    Raises:
        SourceError: a model cannot be loaded, or its kind is not supported.
        WrongModel: the trained model lacks weights, or has those of the base.
    """
    config, head = released_config(model, base)
    mask = mask_of(base, head)
    anatomy = load_released(str(base), config, head, "--base")
    before, sums = query_texts(anatomy, texts, mask, "--base", dtype), weight_sums(anatomy.model)
    del anatomy
    trained = load_trained(model, base, "--model")
    after = query_texts(trained, texts, mask, "--model", dtype)
    if are_equal(sums, weight_sums(trained.model)) or torch.equal(
        after.log_probs, before.log_probs
    ):
        raise WrongModel(
            f"the weights of --model '{model}' are those of --base '{base}': nothing was trained, "
            "or one of the two is the wrong folder"
        )
    return before, after


def check_read_by(anatomy: Anatomy, texts: Sequence[Text], option: str) -> None:
    """Raise an error if a model cannot read some texts.

    Raises:
        SourceError: They have tokens that the model does not know, or are too long for it.
    """
    weight: Any = anatomy.embedding.weight
    token = max(int(text.ids.max()) for text in texts)
    if token >= len(weight):
        raise SourceError(
            f"the tokenizer of --base gives token {token}, and {option} knows {len(weight)} tokens:"
            " give the base that the training began from, with its own tokenizer"
        )
    check_context(anatomy, max(len(text.ids) for text in texts), "--length")


def query_texts(
    anatomy: Anatomy, texts: Sequence[Text], mask: int | None, option: str, dtype: str | None = None
) -> TokenSnapshot:
    """Return the token log-probabilities of a model, on a GPU if there is one, with a bar.

    Args:
        anatomy: The anatomy of the model.
        texts: The texts.
        mask: The id of the mask token; None if the model is not a masked one.
        option: The option that names the model.
        dtype: The name of the floating-point type of its weights and outputs; None: as loaded.

    Raises:
        SourceError: See :func:`check_read_by`.
    """
    check_read_by(anatomy, texts, option)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    anatomy.model.to(device, None if dtype is None else getattr(torch, dtype))
    with refuse_errors(f"{option} cannot be queried", Exception), bars(sys.stderr.isatty()):
        return token_log_probs(anatomy, texts, mask)


def load_trained(model: str | Path, base: str | Path, option: str) -> Anatomy:
    """Return a trained model.

    Args:
        model: folder of the trained model, or of PEFT adapters on ``base``.
        base: see :func:`log_probs_before_and_after`.
        option: The option that names the model.

    Raises:
        SourceError: it cannot be loaded, or its kind is not supported.
    """
    config, head = released_config(model, base)
    if (Path(model) / "adapter_config.json").is_file():
        anatomy = load_released(str(base), config, head, "--base")
        with loading(str(model), "adapters that fit --base"):
            return find_anatomy(load_adapters(anatomy.model, str(model)).eval())
    return load_released(str(model), config, head, "--model")


def mask_of(base: str | Path, head: Head) -> int | None:
    """Return the id of the mask token of a masked model; None for any other model."""
    mask: int | None = load_tokenizer(base).mask_token_id if head == "masked" else None
    if head == "masked" and mask is None:
        raise SourceError(
            "--model is a masked model, and the tokenizer of --base has no mask token"
        )
    return mask
