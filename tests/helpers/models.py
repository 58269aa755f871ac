"""Tiny random Hugging Face models, built from config without touching the global RNG."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import transformers

VOCAB = 97
DIM = 16
POSITIONS = 64


@contextmanager
def own_rng(seed: int) -> Iterator[None]:
    """Global draws inside start from ``seed``; the global state outside stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def tiny_gpt2(
    tied: bool = True,
    vocab: int = VOCAB,
    d: int = DIM,
    layers: int = 2,
    dropout: float = 0.1,
    seed: int = 0,
) -> transformers.GPT2LMHeadModel:
    config = transformers.GPT2Config(
        vocab_size=vocab, n_embd=d, n_layer=layers, n_head=2, n_positions=POSITIONS,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, tie_word_embeddings=tied,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with own_rng(seed):
        model = transformers.GPT2LMHeadModel(config)
    # At its initial gain of one the last LayerNorm makes every hidden state sum to zero, which no
    # trained model does and FlatChat rightly refuses.
    model.transformer.ln_f.weight.data.copy_(torch.linspace(0.5, 1.5, d))
    return model


def tiny_mixtral(experts: str = "eager") -> transformers.MixtralForCausalLM:
    config = transformers.MixtralConfig(
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=4,
        max_position_embeddings=POSITIONS, pad_token_id=0,
    )  # fmt: skip
    with own_rng(0):
        model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation(experts)
    return model


def tiny_llama(
    tied: bool = False, vocab: int = VOCAB, d: int = DIM, layers: int = 2, seed: int = 0
) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=d, intermediate_size=2 * d, num_hidden_layers=layers,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=POSITIONS,
        tie_word_embeddings=tied, pad_token_id=0,
    )  # fmt: skip
    with own_rng(seed):
        return transformers.LlamaForCausalLM(config)


def _bert_sizes(layers: int, dropout: float, d: int = DIM) -> dict[str, float | int]:
    return {
        "vocab_size": VOCAB, "hidden_size": d, "intermediate_size": 2 * d,
        "num_hidden_layers": layers, "num_attention_heads": 2, "max_position_embeddings": POSITIONS,
        "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip


def tiny_bert_mlm(
    d: int = DIM, layers: int = 2, dropout: float = 0.1
) -> transformers.BertForMaskedLM:
    with own_rng(0):
        return transformers.BertForMaskedLM(
            transformers.BertConfig(**_bert_sizes(layers, dropout, d))
        )


def tiny_distilbert_mlm(
    layers: int = 2, dropout: float = 0.1
) -> transformers.DistilBertForMaskedLM:
    config = transformers.DistilBertConfig(
        vocab_size=VOCAB, dim=DIM, hidden_dim=2 * DIM, n_layers=layers, n_heads=2,
        max_position_embeddings=POSITIONS, dropout=dropout, attention_dropout=dropout,
    )  # fmt: skip
    with own_rng(0):
        return transformers.DistilBertForMaskedLM(config)


def tiny_roberta_mlm(layers: int = 2, dropout: float = 0.1) -> transformers.RobertaForMaskedLM:
    with own_rng(0):
        return transformers.RobertaForMaskedLM(
            transformers.RobertaConfig(**_bert_sizes(layers, dropout))
        )


def tiny_bert_classifier(
    layers: int = 2, dropout: float = 0.1, labels: int = 3
) -> transformers.BertForSequenceClassification:
    config = transformers.BertConfig(**_bert_sizes(layers, dropout), num_labels=labels)
    with own_rng(0):
        return transformers.BertForSequenceClassification(config)


def tiny_roberta_classifier() -> transformers.RobertaForSequenceClassification:
    """Of three classes."""
    with own_rng(0):
        return transformers.RobertaForSequenceClassification(
            transformers.RobertaConfig(**_bert_sizes(2, 0.1), num_labels=3)
        )


def tiny_t5(layers: int = 2, dropout: float = 0.1) -> transformers.T5ForConditionalGeneration:
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=DIM, d_kv=DIM // 2, d_ff=2 * DIM, num_layers=layers,
        num_decoder_layers=layers, num_heads=2, dropout_rate=dropout, pad_token_id=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    with own_rng(0):
        return transformers.T5ForConditionalGeneration(config)


def tiny_marian(
    tied: bool = True,
    vocab: int = VOCAB,
    d: int = DIM,
    layers: int = 2,
    dropout: float = 0.1,
    decoder_vocab: int | None = None,
) -> transformers.MarianMTModel:
    """With ``decoder_vocab`` source and target have embeddings of their own."""
    config = transformers.MarianConfig(
        vocab_size=vocab, decoder_vocab_size=decoder_vocab or vocab,
        share_encoder_decoder_embeddings=decoder_vocab is None, d_model=d, encoder_layers=layers,
        decoder_layers=layers, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=2 * d, decoder_ffn_dim=2 * d, max_position_embeddings=POSITIONS,
        dropout=dropout, tie_word_embeddings=tied, pad_token_id=0, decoder_start_token_id=0,
        eos_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    with own_rng(0):
        model = transformers.MarianMTModel(config)
        if decoder_vocab is not None:  # transformers 4 builds both sides with the source's size
            model.resize_decoder_token_embeddings(decoder_vocab)
        return model


def tiny_bart(tied: bool = True, layers: int = 2) -> transformers.BartForConditionalGeneration:
    marian = tiny_marian(layers=layers).config
    names = ("vocab_size", "d_model", "encoder_layers", "decoder_layers", "encoder_ffn_dim")
    names += ("decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads")
    names += ("pad_token_id", "decoder_start_token_id", "eos_token_id", "max_position_embeddings")
    sizes = {name: getattr(marian, name) for name in names}
    with own_rng(0):
        return transformers.BartForConditionalGeneration(
            transformers.BartConfig(**sizes, tie_word_embeddings=tied)
        )
