"""Stage 1 against the tokenizer alone, and its memory with ten times the rows.

    python benchmarks/data.py [--rows 10000] [--model models/SmolLM2-135M-Instruct.Q4_1.gguf]

Rows are HH-like dialogues of three turns, put together from the demo's texts with words changed at random, so that no
two are alike. Prints seconds, rows a second, the ratio to the tokenizer alone (one process, the same texts), and peak
memory for `rows` and for ten times as many.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)  # not this folder, whose data.py would hide data/
os.environ["TOKENIZERS_PARALLELISM"] = "false"


def write_rows(file: Path, n: int) -> None:
    demo = [json.loads(line) for line in open(ROOT / "data/demo/preferences.jsonl", encoding="utf-8")]
    prompts = [row["prompt"][-1]["content"] if isinstance(row["prompt"], list) else row["prompt"] for row in demo]
    words = sorted({w for row in demo for w in row["chosen"].split() if w.isalpha()})
    rng = random.Random(0)

    def varied(text: str) -> str:
        return " ".join(rng.choice(words) if rng.random() < 0.2 else w for w in text.split())

    with open(file, "w", encoding="utf-8") as out:
        for _ in range(n):
            picked = rng.choices(range(len(demo)), k=3)
            start = "".join(
                f"\n\nHuman: {varied(prompts[i])}"
                f"\n\nAssistant: {varied(demo[i]['chosen'] + ' ' + demo[i]['rejected'])}"
                for i in picked[:2]
            )
            start += f"\n\nHuman: {varied(prompts[picked[2]])}\n\nAssistant: "
            chosen, rejected = (
                varied(f"{demo[picked[2]][name]} {demo[picked[1]][name]}") for name in ("chosen", "rejected")
            )
            out.write(json.dumps({"chosen": start + chosen, "rejected": start + rejected}) + "\n")


def tokenizer_alone(folder: Path, model: str, limit: int) -> tuple[float, int, int]:
    """Seconds, tokens and rows of tokenizing the texts of a prepared folder, 1,000 rows a call."""
    import pyarrow.parquet

    from utils.models import load_tokenizer

    tokenizer = load_tokenizer(model)
    seconds = tokens = rows = 0
    for file in sorted(folder.glob("*.parquet")):
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000, columns=["prompt", "chosen", "rejected"]):
            if rows < limit:
                part = batch.to_pylist()
                texts = ["\n".join(m["content"] for m in row["prompt"]) for row in part] + [
                    row[name] for row in part for name in ("chosen", "rejected")
                ]
                start = time.perf_counter()
                ids = tokenizer(texts, add_special_tokens=False).input_ids
                seconds += time.perf_counter() - start
                tokens += sum(map(len, ids))
                rows += len(part)
    return seconds, tokens, rows


def memory_of(pid: int) -> int:
    """Bytes that a process and its children hold, shared pages counted once (PSS)."""
    total = 0
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            total += next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(memory_of(int(child)) for child in (task / "children").read_text().split())
    except (OSError, StopIteration):
        pass
    return total


def run(source: Path, output: Path, model: str, workers: int) -> tuple[float, float]:
    """Seconds and peak MB of a whole run of stage 1."""
    command = [
        sys.executable,
        "prepare_data.py",
        "--source",
        str(source),
        "--tokenizer",
        model,
        "--output_dir",
        str(output),
        "--overwrite",
        "true",
    ]
    command += ["--max_prompt_length", "1024", "--max_response_length", "512", "--workers", str(workers)]
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    done = threading.Event()
    while not done.is_set():
        peak = max(peak, memory_of(process.pid))
        if process.poll() is not None:
            done.set()
        done.wait(0.1)
    if process.returncode:
        sys.exit("stage 1 failed")
    return time.perf_counter() - start, peak / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        write_rows(folder / "few.jsonl", options.rows)
        few_seconds, few_peak = run(folder / "few.jsonl", folder / "few", options.model, options.workers)
        alone, tokens, rows = tokenizer_alone(folder / "few", options.model, options.rows)
        alone *= options.rows / rows
        print(
            f"{options.rows:,} rows of {tokens / rows:.0f} tokens: {few_seconds:.1f} s "
            f"with {options.workers} workers, {options.rows / few_seconds:,.0f} rows/s"
        )
        print(f"tokenizer alone, one process: {alone:.1f} s; ratio {few_seconds / alone:.2f}", flush=True)
        write_rows(folder / "many.jsonl", 10 * options.rows)
        seconds, peak = run(folder / "many.jsonl", folder / "many", options.model, options.workers)
        print(
            f"{10 * options.rows:,} rows: {seconds:.1f} s, {10 * options.rows / seconds:,.0f} rows/s, "
            f"ratio {seconds / alone / 10:.2f}"
        )
        print(f"peak memory {few_peak:.0f} MB and {peak:.0f} MB, ratio {peak / few_peak:.3f}")


if __name__ == "__main__":
    main()
