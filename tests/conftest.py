"""Tiny random models and data, built here: nothing is downloaded."""

import json
import os
import signal

import pytest
from helpers import byte_tokenizer, tiny_llama

os.environ.setdefault("HF_HUB_OFFLINE", "1")
signal.signal(
    signal.SIGINT, signal.default_int_handler
)  # a shell's background job ignores it, and so would its children
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
    prepare(
        DataConfig(
            source=str(folder / "raw.jsonl"), tokenizer=tiny, output_dir=str(folder / "data"), eval_fraction=0.25
        )
    )
    return str(folder / "data")
