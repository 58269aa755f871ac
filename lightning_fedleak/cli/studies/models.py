"""The models that studies measure: loaded by name, whole or with a LoRA."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from lightning_fedleak.cli.finetuning.assets import SourceError, loading, model_source
from lightning_fedleak.extras import install
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.model_runs import context_length
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps import Text, token_log_probs


def find_model(name: str | None, dtype: torch.dtype = torch.float32) -> Anatomy:
    """Return a language model in eval mode, with the head that its configuration names.

    Args:
        name: folder or name on the hub; None for the embedded model. The ``architectures`` of its
            configuration say whether it is causal, masked or an encoder without a head.
        dtype: of the weights.

    Raises:
        SourceError: there is no such model, or it cannot be reached.
        AnatomyError: its parts could not be found.
    """
    source, settings = model_source(name)
    with loading(source, "language model"):
        config = transformers.AutoConfig.from_pretrained(source, **settings)
        settings["dtype"] = dtype
        architectures = " ".join(getattr(config, "architectures", None) or ())
        if "MaskedLM" in architectures:
            model = transformers.AutoModelForMaskedLM.from_pretrained(source, **settings)
        elif "CausalLM" in architectures or "LMHead" in architectures:
            model = transformers.AutoModelForCausalLM.from_pretrained(source, **settings)
        else:
            model = transformers.AutoModel.from_pretrained(source, **settings)
            return find_anatomy(model.eval(), kind="classifier")
    return find_anatomy(model.eval())


def has_config_alone(name: str) -> bool:
    """Return whether a name is that of a folder with a model's configuration and no weights."""
    folder = Path(name).expanduser()
    weights = (path for end in ("safetensors", "bin") for path in folder.glob(f"*.{end}"))
    return (folder / "config.json").is_file() and not any(weights)


def find_shapes(name: str, rank: int, targets: str | None, seed: int) -> tuple[Anatomy, Anatomy]:
    """Return a causal model without numbers, and a narrow block of it with random ones.

    The block has few tokens, and shows which maps read an input that a token determines.

    Args:
        name: folder of the configuration.
        rank: see :func:`with_lora`, as the others.
        targets: names of modules.
        seed: of the adapters.

    Raises:
        SourceError: the configuration is of no causal language model.
    """
    auto: Any = transformers.AutoModelForCausalLM
    with loading(name, "causal language model"):
        config = transformers.AutoConfig.from_pretrained(name)
        block = copy.deepcopy(config)
        few = {"vocab_size": 64, "num_hidden_layers": 1, "intermediate_size": 64}
        layers = {"layer_types": (getattr(block, "layer_types", None) or [])[:1]}
        for key, value in {**few, **layers, "pad_token_id": None}.items():
            if getattr(block, key, None) is not None:
                setattr(block, key, value)
        with torch.device("meta"):
            bare = find_anatomy(auto.from_config(config, dtype=config.dtype).eval())
            shape = with_lora(bare, rank, targets, seed)
        bare = find_anatomy(auto.from_config(block, dtype=torch.float32).eval())
    return shape, with_lora(bare, rank, targets, seed)


def with_lora(anatomy: Anatomy, rank: int, targets: str | None, seed: int) -> Anatomy:
    """Return the model with PEFT's adapters, the only part that is then trained.

    Args:
        anatomy: of the model.
        rank: of the adapters; 0 returns the model unchanged.
        targets: names of modules separated by commas, or ``all-linear``; None for PEFT's choice.
        seed: of the adapters.

    Raises:
        SourceError: peft is not installed, or adapters do not fit such modules.
    """
    if rank == 0 and targets is not None:
        raise SourceError(
            f"--targets {targets} names modules with a LoRA: give its rank too, --lora-r 8 say"
        )
    if rank == 0:
        return anatomy
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SourceError(
            f"--lora-r needs the package peft: {install('peft')} (--lora-r 0 trains the whole "
            "model)"
        ) from error
    names = None if targets is None else targets.split(",")
    torch.manual_seed(seed)
    try:
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=names if names != ["all-linear"] else "all-linear",
            fan_in_fan_out=hasattr(anatomy.model, "transformer"),
        )
        model = get_peft_model(anatomy.model, config)
    except ValueError as error:
        raise SourceError(f"--targets {targets}: {error}") from error
    return find_anatomy(model.eval(), kind=anatomy.kind)


def check_context(anatomy: Anatomy, tokens: int, option: str) -> None:
    """Raise an error where the model reads no texts that are so long.

    Args:
        anatomy: the model's.
        tokens: of a text.
        option: for the message.

    Raises:
        SourceError: says how many tokens it reads.
    """
    context = context_length(anatomy)
    if context is not None and tokens > context:
        raise SourceError(
            f"{option} {tokens} is longer than the model's context of {context}: give "
            f"{context} or fewer"
        )


def ask_both(
    texts: Sequence[Text], model: str | Path, base: str | Path
) -> tuple[TokenSnapshot, TokenSnapshot]:
    """Return what the base and the trained model say of texts; one model is in memory at a time.

    Args:
        texts: the texts.
        model: folder of the trained model, or of PEFT adapters on ``base``.
        base: folder of the model that the training began from, or its name on the hub.

    Raises:
        SourceError: a model cannot be loaded, or is not causal.
    """
    anatomy = _causal(find_model(str(base)), "--base")
    before = token_log_probs(anatomy, texts)
    if (Path(model) / "adapter_config.json").is_file():
        after = token_log_probs(_with_adapters(anatomy, model), texts)
    else:
        del anatomy
        after = token_log_probs(_causal(find_model(str(model)), "--model"), texts)
    return before, after


def _causal(anatomy: Anatomy, option: str) -> Anatomy:
    if anatomy.kind != "causal":
        raise SourceError(
            f"{option} is a {anatomy.kind} model: what a model has memorized is read from a causal "
            "language model, which predicts every next token"
        )
    return anatomy


def _with_adapters(anatomy: Anatomy, folder: str | Path) -> Anatomy:
    """Return the base with the adapters of a folder."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise SourceError(f"--model holds adapters of PEFT: {install('peft')}") from error
    try:
        adapted = PeftModel.from_pretrained(anatomy.model, str(folder))
    except (OSError, ValueError, RuntimeError) as error:
        raise SourceError(f"the adapters in '{folder}' do not fit --base: {error}") from error
    return find_anatomy(adapted.eval())
