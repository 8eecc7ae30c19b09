"""Tiny random models and data, built here: nothing is downloaded."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer(bos: bool = False):
    """Bytes as tokens, with a chat template; pad == eos, as many chat models have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|unk|>", "<|start|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(specials + alphabet)}, []))
    tokenizer.add_special_tokens(specials)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<|unk|>", eos_token="<|end|>", pad_token="<|end|>",
        **({"bos_token": "<|start|>"} if bos else {}),
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_llama(seed: int = 0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    size = dict(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, eos_token_id=2, pad_token_id=2, bos_token_id=None, tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(LlamaConfig(**(size | changes)))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """Folder of a tiny Llama with tied embeddings and a byte tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def preferences(tmp_path_factory, tiny) -> str:
    """A prepared preference folder: chosen answers say yes, rejected ones no."""
    from prepare_data import DataConfig, prepare

    folder = tmp_path_factory.mktemp("preferences")
    with open(folder / "raw.jsonl", "w") as file:
        for i in range(96):
            file.write(json.dumps({"prompt": f"q{i}", "chosen": f"yes {i % 7}", "rejected": f"no {i % 5}"}) + "\n")
    prepare(DataConfig(source=str(folder / "raw.jsonl"), tokenizer=tiny, output_dir=str(folder / "data"), eval_fraction=0.25))
    return str(folder / "data")


def messages(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]
