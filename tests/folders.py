"""Tiny random models saved as the folders that users have: config, safetensors and tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, ids 0-255; 256 is the beginning of a sequence, 257 its end."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """A Llama of 6 layers whose greedy text is not constant."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 258, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "bos_token_id": 256, "eos_token_id": 257, "initializer_range": 0.2, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def save_tiny_model(folder: Path, **changes: object) -> Path:
    """Save a tiny Llama and its tokenizer into `folder`."""
    tiny_llama(**changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
