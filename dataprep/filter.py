"""Leave out train pairs that a trained reward model contradicts.

    python -m dataprep.filter --data out/data --reward_model out/reward/final --output_dir out/filtered

Writes a new data folder: the train split without those pairs, which go to contradicted.jsonl, and the test split as it
is, else it would flatter the next model. The reward model should have been trained on other pairs.
"""

import dataclasses
import json
import math
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataprep.folder import ROWS_PER_GROUP, restore_folder, workshop
from utils.config import UserError
from utils.data import split_files
from utils.files import replace_folder, write_json
from utils.run import check_output_dir, record_run, run_stage
from utils.tracking import progress_bar, say

REASON = "contradicted_by_reward_model"


@dataclass(frozen=True)
class FilterConfig:
    data: str
    """a preference folder that prepare_data.py wrote"""
    reward_model: str
    """folder of a reward model that was trained on other pairs"""
    output_dir: str
    """folder to write"""
    min_probability: float = 0.05
    """train pairs whose chosen answer is the better one with less probability than this, by the model's calibrated
    scores, are left out"""
    micro_batch_size: int = 16
    """answers a forward pass"""
    overwrite: bool = False
    """replace the output of an earlier run"""


# preference rows -> {probability, score_chosen, score_rejected} each; probability that chosen is the better answer
Judge = Callable[[list[dict]], list[dict]]


def check_config(cfg: FilterConfig, output: Path) -> None:
    if not 0 < cfg.min_probability < 0.5:
        raise UserError(f"min_probability {cfg.min_probability} must be above 0 and below 0.5")
    if cfg.micro_batch_size < 1:
        raise UserError(f"micro_batch_size {cfg.micro_batch_size} must be at least 1")
    if not Path(cfg.reward_model).is_dir():
        raise UserError(f"reward_model {cfg.reward_model} is not a folder; train_reward.py writes one under final/")
    data = Path(cfg.data).resolve()
    if data.is_relative_to(output) or output.is_relative_to(data):
        raise UserError(f"output_dir {cfg.output_dir} and data {cfg.data} overlap; choose another output_dir")
    if Path(cfg.reward_model).resolve().is_relative_to(output):
        raise UserError(f"reward_model {cfg.reward_model} lies in output_dir {cfg.output_dir}; choose another one")
    if Path.cwd().is_relative_to(output):
        raise UserError(f"output_dir {cfg.output_dir} holds the current folder; choose a folder inside it")


def filter_pairs(cfg: FilterConfig) -> dict:
    """Write the new folder; returns the report that is also written to report.json."""
    started = time.time()
    output = Path(cfg.output_dir).resolve()
    check_config(cfg, output)
    train_files = [Path(file) for file in split_files(cfg.data, "train", ("preference",))]
    restore_folder(output)
    check_output_dir(cfg.output_dir, cfg.overwrite)
    judge = load_judge(cfg)
    with workshop(output, about=None) as folder:
        check_output_dir(cfg.output_dir, cfg.overwrite)  # another run may just have ended
        building = folder / "building"
        building.mkdir()
        rows_in, rows_out, pairs = write_train(train_files, building, judge, cfg.min_probability)
        if not rows_out:
            raise UserError(f"reward_model {cfg.reward_model} contradicts all {rows_in} train rows; was it trained?")
        report = finish_folder(cfg, building, rows_in, started)
        os.rename(building, folder / "new")
        replace_folder(folder / "new", output)
        shutil.rmtree(folder)
    say(f"{rows_in} train rows read: {rows_out} kept; {pairs} pairs are contradicted, see contradicted.jsonl")
    say(f"wrote {output}")
    return report


def load_judge(cfg: FilterConfig) -> Judge:
    """The reward model as a function of preference rows."""
    import torch

    from utils.rewards import open_reward_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = open_reward_model(cfg.reward_model, device)

    def judge(rows: list[dict]) -> list[dict]:
        answers = [row[name] for name in ("chosen", "rejected") for row in rows]
        scores = model.scores([row["prompt"] for row in rows] * 2, answers, cfg.micro_batch_size)
        return [
            {
                "probability": 0.5 + 0.5 * math.tanh((chosen - rejected) / model.temperature / 2),  # sigmoid
                "score_chosen": chosen,
                "score_rejected": rejected,
            }
            for chosen, rejected in zip(scores, scores[len(rows) :])
        ]

    return judge


def write_train(files: list[Path], folder: Path, judge: Judge, min_probability: float) -> tuple[int, int, int]:
    """Write the files without contradicted pairs, under their names, and contradicted.jsonl.

    Returns the numbers of rows in and out, and of pairs that were left out; one of weight 2 stands in the files twice.
    """
    import pyarrow as pa
    import pyarrow.parquet

    rows_in = rows_out = 0
    gone: set[str] = set()
    total = sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
    with (
        progress_bar(label="filtering", unit="rows", total=total) as bar,
        open(folder / "contradicted.jsonl", "w", encoding="utf-8") as aside,
    ):
        for file in files:
            parquet = pyarrow.parquet.ParquetFile(file)
            with pyarrow.parquet.ParquetWriter(folder / file.name, parquet.schema_arrow, compression="zstd") as writer:
                for batch in parquet.iter_batches(ROWS_PER_GROUP):
                    rows, kept = batch.to_pylist(), []
                    for row, judged in zip(rows, judge(rows)):
                        kept.append(judged["probability"] >= min_probability)
                        if not kept[-1] and row["id"] not in gone:
                            gone.add(row["id"])
                            judged["probability"] = float(f"{judged['probability']:.4g}")
                            aside.write(json.dumps(row | judged, ensure_ascii=False) + "\n")
                    writer.write_batch(batch.filter(pa.array(kept)))
                    rows_in, rows_out = rows_in + len(rows), rows_out + sum(kept)
                    bar.update(len(rows))
    return rows_in, rows_out, len(gone)


def finish_folder(cfg: FilterConfig, folder: Path, rows_in: int, started: float) -> dict:
    """Add the test split, and what the folder says of itself; returns the report.

    config.yaml stays stage 1's, with which the rows can be made again; this run's own is filter.yaml.
    """
    import pyarrow.parquet

    data = Path(cfg.data)
    for file in sorted(data.glob("test-*.parquet")):
        shutil.copyfile(file, folder / file.name)
    record_run(folder, cfg, started)
    os.rename(folder / "config.yaml", folder / "filter.yaml")
    if (data / "config.yaml").is_file():
        shutil.copyfile(data / "config.yaml", folder / "config.yaml")
    before = data / "report.json"
    before = json.loads(before.read_text(encoding="utf-8")) if before.is_file() else {}
    rows_out = {
        split: sum(pyarrow.parquet.read_metadata(file).num_rows for file in folder.glob(f"{split}-*.parquet"))
        for split in ("train", "test")
    }
    dropped = {REASON: rows_in - rows_out["train"]} if rows_in > rows_out["train"] else {}
    report = {
        "kind": "preference",
        "rows_in": rows_in + rows_out["test"],
        "rows_out": rows_out,
        "dropped": dropped,
        "filter": dataclasses.asdict(cfg),
        "earlier": [*before.pop("earlier", []), before],
    }
    write_json(folder / "report.json", report)
    return report


if __name__ == "__main__":
    run_stage(filter_pairs, FilterConfig)
