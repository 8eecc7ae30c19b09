"""Tokens a second that the loader delivers to stage 2, and that the demo model's forward pass takes.

    python benchmarks/loader.py [MODEL]

The data is 20,000 preference rows, which put the texts of data/demo together anew. Both numbers are medians of five
repetitions: of 2,000 pairs each from the loader, of one batch of 8 pairs each through the reward model.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)  # not this folder, whose data.py would hide data/

import pyarrow as pa  # noqa: E402
import pyarrow.parquet  # noqa: E402
import torch  # noqa: E402

from train_reward import RewardTrainConfig, build_model, encode_pairs, micro_batches  # noqa: E402
from utils.config import ModelConfig  # noqa: E402
from utils.launch import keep_freed_memory  # noqa: E402
from utils.loader import Batches  # noqa: E402
from utils.models import load_tokenizer  # noqa: E402

ROWS, PAIRS, REPETITIONS, BATCH = 20_000, 2_000, 5, 8


def write_rows(folder: str) -> None:
    """Random questions, each with two answers of the demo to any questions, in row groups of 1,000 rows."""
    texts = [
        json.loads(line) for line in (ROOT / "data/demo/preferences.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    draw = random.Random(0)
    rows = [
        {
            "id": str(i),
            "source": "demo",
            "prompt": draw.choice(texts)["prompt"],
            "chosen": draw.choice(texts)["chosen"],
            "rejected": draw.choice(texts)["rejected"],
            "margin": 1.0,
            "metadata": "{}",
        }
        for i in range(ROWS)
    ]
    pyarrow.parquet.write_table(
        pa.Table.from_pylist(rows), f"{folder}/train-00000-of-00001.parquet", row_group_size=1000
    )


def tokens(batches: list[dict]) -> int:
    """Tokens of both sides, without padding."""
    return sum(batch["attention_mask"].sum().item() for batch in batches)


def median_rate(name: str, rates: list[float]) -> float:
    median = statistics.median(rates)
    print(f"{name:32}{median:12,.0f} tokens/s   ({min(rates):,.0f} to {max(rates):,.0f})", flush=True)
    return median


def main(model_path: str) -> None:
    tokenizer, device = load_tokenizer(model_path), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        write_rows(folder)
        loader = Batches(
            folder,
            "train",
            ("preference",),
            BATCH,
            lambda rows: micro_batches(encode_pairs(rows, tokenizer, None), 0, BATCH),
        )
        delivered = []
        batches = loader.start()
        next(batches)  # the first one waits for the first window
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            count = sum(tokens(batch) for batch in islice(batches, PAIRS // BATCH))
            delivered.append(count / (time.perf_counter() - started))
        samples = list(islice(batches, REPETITIONS + 1))
        batches.close()

    keep_freed_memory()  # as `start_accelerator` does
    model = build_model(RewardTrainConfig(model=ModelConfig(model_path), data="", output_dir=""), device)
    taken = []
    for (batch,) in samples:
        started = time.perf_counter()
        with torch.no_grad():
            model(batch["input_ids"].to(device), batch["attention_mask"].to(device)).tolist()
        taken.append(tokens([batch]) / (time.perf_counter() - started))
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"{torch.get_num_threads()} threads, {device}, {dtype}, batches of {BATCH} pairs, median of {REPETITIONS}")
    ratio = median_rate("loader delivers", delivered) / median_rate("forward of the reward model takes", taken[1:])
    print(f"ratio {ratio:.0f}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct.Q4_1.gguf")
