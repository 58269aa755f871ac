"""A whole causal language model in a folder, as ``from_pretrained`` reads it, in milliseconds."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.helpers.models import own_rng

TEXTS = [
    "The courier left my new card at number nine, and number nine is a bakery.",
    "Please stop the payment of 41.70 to Harrow Cycles; I sent the bicycle back in March.",
    "Why did you charge me twice for one cup of tea in Lower Quill?",
    "My daughter Ines is sixteen on Friday and would like an account of her own.",
    "Someone called Piet rang and asked for the number on the back of my card.",
    "I moved to 12 Tanner's Yard last week, so kindly send the statements there.",
    "The machine at Ostrey station kept my card and gave me a receipt for it.",
    "Can I raise the limit to 900 for the weekend? We are buying a piano.",
    "I have not seen my salary from the Vale Hospital, which always comes on the first.",
    "Thank you for the refund. It came, but it went to my husband's account.",
    "How do I tell you that my mother has died? Her name was Odile Marchetti.",
    "The app asks for a code that goes to a telephone I no longer own.",
]


def tiny_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE of 384 entries, learned on ``TEXTS``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|endoftext|>",
        model_max_length=64,
    )  # fmt: skip


def save_tiny_causal_lm(folder: Path) -> Path:
    """Writes a GPT-2 of two blocks of 16 and its tokenizer; returns ``folder``."""
    tokenizer = tiny_tokenizer()
    sizes = {"vocab_size": len(tokenizer), "n_positions": 64, "n_embd": 16, "n_layer": 2}
    config = transformers.GPT2Config(**sizes, n_head=2, bos_token_id=0, eos_token_id=0)
    with own_rng(0):
        model = transformers.GPT2LMHeadModel(config)
        # As after some training: hidden states behind a new LayerNorm all sum to zero.
        torch.nn.init.normal_(model.transformer.ln_f.weight, mean=1.0, std=0.3)
        torch.nn.init.normal_(model.transformer.ln_f.bias, std=0.3)
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_tiny_bert(
    folder: Path, kind: type[transformers.PreTrainedModel], mask: str | None = None
) -> str:
    """Write an encoder of two blocks of 16 with a tokenizer, and return the folder's name."""
    tokenizer = tiny_tokenizer()
    if mask is not None:
        tokenizer.add_special_tokens({"mask_token": mask})
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    with own_rng(0):
        kind(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_tiny_llama(folder: Path, **settings: Any) -> Path:
    """Write a Llama of two blocks of 64, without a tokenizer, and return its folder."""
    size = {"hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    with own_rng(0):
        transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**size | heads | settings)
        ).save_pretrained(folder)
    return folder


def texts(path: Path, seed: int) -> str:
    """Write 30 texts of drawn letters, which repeat nothing of each other."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghiklmnoprstu", k=5)) for _ in range(300)]
    path.write_text("\n".join(" ".join(words[n : n + 10]) for n in range(0, 300, 10)) + "\n")
    return str(path)


def noisy_release(folder: Path) -> dict[str, str]:
    """Return the paths of a base, of a model that is the base and noise, and of texts."""
    base = str(save_tiny_causal_lm(folder / "base"))
    network = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    network.save_pretrained(folder / "model")
    sides = {"members": "members.txt", "held-out": "others.txt"}
    files = {side: texts(folder / name, n) for n, (side, name) in enumerate(sides.items())}
    return {"model": str(folder / "model"), "base": base, **files}


def model_of_words(vocabulary: int, begin: int, end: int) -> transformers.GPT2LMHeadModel:
    """Return an untrained GPT-2 of one block of 48, with these ids of a text's ends."""
    sizes = {"vocab_size": vocabulary, "n_positions": 16, "n_embd": 48, "n_layer": 1, "n_head": 2}
    quiet = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = transformers.GPT2Config(**sizes, **quiet, bos_token_id=begin, eos_token_id=end)
    return transformers.GPT2LMHeadModel(config)


def train(model: torch.nn.Module, rows: torch.Tensor, epochs: int = 6, batch: int = 6) -> None:
    """Train a model on rows of equal length in drawn order."""
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(rows)).split(batch):
            model(input_ids=rows[part], labels=rows[part]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
