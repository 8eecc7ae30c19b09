"""The loader's order, resume, formats, errors and threads, by value."""

import copy
import dataclasses
import json
import subprocess
import sys
import threading
import tracemalloc
from itertools import islice

import h5py
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from helpers import ROOT, byte_tokenizer, launch

import utils.loader
from prepare_data import DataConfig, prepare
from train_reward import RewardTrainConfig, encode_pairs, micro_batches, train
from utils.config import LoraOptions, ModelConfig, UserError
from utils.data import load_rows
from utils.loader import Batches, own_row
from utils.tracking import read_metrics

PROMPTS = ("prompts",)
PREFERENCE = ("preference",)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory) -> str:
    """A Parquet file of 5,003 prompts 0, 1, 2, ... in row groups of 1,000."""
    file = tmp_path_factory.mktemp("numbers") / "numbers.parquet"
    pyarrow.parquet.write_table(pa.table({"prompt": [str(i) for i in range(5003)]}), file, row_group_size=1000)
    return str(file)


def texts(rows: list[dict]) -> list[int]:
    return [int(row["prompt"][0]["content"]) for row in rows]


def numbered(file, batch_size: int = 64, **options) -> Batches:
    return Batches(str(file), "train", PROMPTS, batch_size, texts, **options)


def take(loader: Batches, count: int, step: int = 0) -> list:
    batches = loader.start(step)
    taken = list(islice(batches, count))
    batches.close()
    return taken


def flat(batches: list[list[int]]) -> list[int]:
    return [value for batch in batches for value in batch]


# --- order


@pytest.mark.parametrize("buffer_rows", [1, 2000, 5003])
def test_an_epoch_is_a_permutation_that_differs_by_epoch_and_seed(numbers, buffer_rows):
    loader = numbered(numbers, buffer_rows=buffer_rows)
    assert (loader.rows, loader.per_epoch, loader.kind) == (5003, 79, "prompts")
    two = take(loader, 2 * 79)
    first, second = flat(two[:79]), flat(two[79:])
    assert [len(batch) for batch in two] == 2 * [*[64] * 78, 11]
    other = flat(take(numbered(numbers, buffer_rows=buffer_rows, seed=1), 79))
    assert sorted(first) == sorted(second) == sorted(other) == list(range(5003))
    assert len({tuple(first), tuple(second), tuple(other), tuple(range(5003))}) == 4


def test_a_window_mixes_the_rows_of_blocks_that_are_not_neighbours(numbers):
    loader = numbered(numbers, buffer_rows=3000)
    epoch, begin = flat(take(loader, 79)), 0
    for window in loader.windows(0):
        rows = epoch[begin : begin + sum(block.rows for block in window)]
        begin += len(rows)
        assert {value // 1000 for value in rows} == {block.first // 1000 for block in window} and begin <= 5003
        if len(window) == 3:
            assert sum(a // 1000 != b // 1000 for a, b in zip(rows, rows[1:])) > len(rows) / 3
    windows = [[block.first // 1000 for block in window] for number in range(4) for window in loader.windows(number)]
    assert begin == 5003 and any(abs(a - b) > 1 for window in windows for a, b in zip(window, window[1:]))


def test_without_shuffling_the_order_is_that_on_disk_and_limit_takes_the_first_rows(numbers):
    assert flat(take(numbered(numbers, shuffle=False), 79)) == list(range(5003))
    few = numbered(numbers, 100, limit=1234)
    assert (few.rows, few.per_epoch) == (1234, 13) and sorted(flat(take(few, 13))) == list(range(1234))
    assert numbered(numbers, limit=9999).rows == 5003


def test_rows_within_the_buffer_get_a_uniform_permutation(tmp_path):
    """Three rows over 600 seeds: each of the six orders about 100 times (within 4 deviations of 9.1)."""
    (tmp_path / "three.jsonl").write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(3)))
    orders = [tuple(next(numbered(tmp_path / "three.jsonl", 3, seed=seed).batches(0))) for seed in range(600)]
    counts = {order: orders.count(order) for order in set(orders)}
    assert len(counts) == 6 and all(63 < count < 137 for count in counts.values()), counts


@pytest.mark.parametrize("world", [1, 2, 3, 70])
def test_ranks_share_each_batch_without_overlap(numbers, world):
    """5,003 rows leave a last batch of 11, so with 70 ranks some have nothing."""
    whole = take(numbered(numbers, buffer_rows=2000), 80)
    ranks = [take(numbered(numbers, buffer_rows=2000, rank=rank, world=world), 80) for rank in range(world)]
    for k, batch in enumerate(whole):
        assert [ranks[rank][k] for rank in range(world)] == [batch[rank::world] for rank in range(world)]
    assert world < 70 or ranks[11][78] == []


# --- resume


@pytest.mark.parametrize("rank, world", [(0, 1), (1, 2)])
def test_going_on_at_any_step_gives_the_rest_of_the_run(numbers, rank, world):
    loader = numbered(numbers, 512, buffer_rows=2000, rank=rank, world=world)
    straight = take(loader, 35)  # three epochs of ten batches and a half
    for step in range(30):
        assert take(loader, 5, step) == straight[step : step + 5], step


def test_going_on_reads_nothing_of_the_windows_before(numbers, monkeypatch):
    read, read_block = [], utils.loader.read_block

    def counted(block, wanted):
        read.append((block.first, len(wanted)))
        return read_block(block, wanted)

    loader = numbered(numbers, 500, buffer_rows=2000)
    monkeypatch.setattr(utils.loader, "read_block", counted)
    windows = [[block.first for block in window] for window in loader.windows(3)]
    wanted = next(islice(loader.batches(3 * loader.per_epoch + 9), 1))
    assert len(wanted) == 500 and {first for first, _ in read} == set(windows[2])
    assert sum(count for _, count in read) == sum(block.rows for block in list(loader.windows(3))[2]) - (
        4500 - sum(block.rows for window in list(loader.windows(3))[:2] for block in window)
    )


def test_depth_of_prefetching_changes_nothing(numbers):
    assert (
        take(numbered(numbers, prefetch=1), 100)
        == take(numbered(numbers, prefetch=8), 100)
        == list(islice(numbered(numbers).batches(0), 100))
    )


# --- formats


ROWS = [
    {"prompt": "Caf\u00e9?", "chosen": "\u00e9\u00e8 \U0001f600 one\u2028two", "rejected": "no", "margin": 0.5},
    {"prompt": "a\u0085b \ufeffc", "chosen": 'tab\tand "quotes"', "rejected": "line\nbreak", "margin": 2.0},
    {"prompt": "plain", "chosen": "x" * 300, "rejected": "\u4e2d\u6587", "margin": -1.25},
]


def write_formats(folder, rows: list[dict]) -> list[str]:
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8"
    )  # no \n at the end
    escaped = b"\xef\xbb\xbf" + b"\r\n \r\n".join(json.dumps(row).encode() for row in rows) + b"\n"  # BOM, blank lines
    (folder / "windows.jsonl").write_bytes(escaped)
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=2)
    with h5py.File(folder / "rows.h5", "w") as file, h5py.File(folder / "fixed.hdf5", "w") as fixed:
        group = fixed.create_group("train")
        for name in rows[0]:
            values = [row[name] for row in rows]
            if name == "margin":
                file[name], group[name] = values, values
            else:
                file.create_dataset(name, data=values, dtype=h5py.string_dtype())
                encoded = [value.encode() for value in values]
                group.create_dataset(name, data=encoded, dtype=f"S{max(map(len, encoded))}")
    return [str(folder / name) for name in ("rows.jsonl", "windows.jsonl", "rows.parquet", "rows.h5", "fixed.hdf5")]


def test_all_formats_give_equal_rows(tmp_path):
    files = write_formats(tmp_path, ROWS)
    found = []
    for file in files:
        (rows,) = take(Batches(file, "train", PREFERENCE, 3, shuffle=False), 1)
        assert [row.pop("id").removeprefix(file) for row in rows] == {
            "rows.h5": [":row 1", ":row 2", ":row 3"],
            "fixed.hdf5": [":train[0]", ":train[1]", ":train[2]"],
            "windows.jsonl": [":1", ":3", ":5"],
        }.get(file.split("/")[-1], [":1", ":2", ":3"])
        found.append(rows)
    wanted = [
        row | {"prompt": [{"role": "user", "content": row["prompt"]}], "source": None, "metadata": None}
        for row in ROWS
    ]
    assert found == [wanted] * 5
    together = Batches(files, "train", PREFERENCE, 15, shuffle=False)
    assert (
        together.rows == 15 and [row["margin"] for row in take(together, 1)[0]] == [row["margin"] for row in ROWS] * 5
    )


def test_a_prepared_folder_gives_the_rows_that_stage_1_wrote(preferences):
    rows = {}
    for split in ("train", "test"):
        loader = Batches(preferences, split, PREFERENCE, 10, shuffle=False)
        rows[split] = flat(take(loader, loader.per_epoch))
        assert rows[split] == load_rows(preferences, split, PREFERENCE)
    prompts = [row["prompt"][0]["content"] for row in rows["train"] + rows["test"]]
    assert sorted(prompts) == sorted(f"q{i}" for i in range(96)) and min(map(len, rows.values())) > 10
    assert all((row["chosen"][:4], row["rejected"][:3]) == ("yes ", "no ") for row in rows["train"] + rows["test"])


def test_trajectories_and_metadata_from_hdf5_and_json_lines(tmp_path):
    dialogue = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    with h5py.File(tmp_path / "t.h5", "w") as file:
        file.create_dataset("prompt", data=[json.dumps(dialogue), "[1, 2]"], dtype=h5py.string_dtype())
        file.create_dataset("response", data=["r", "q"], dtype=h5py.string_dtype())
        file["reward"] = [1.0, 0.0]
        file["logprobs"] = [[-0.5, -0.25], [-1.0, -2.0]]
    (tmp_path / "t.jsonl").write_text(
        json.dumps(
            {"prompt": dialogue, "response": "r", "reward": 1, "logprobs": [-0.5, -0.25], "metadata": {"\u00e9": 1}}
        )
        + "\n"
        + json.dumps({"prompt": "[1, 2]", "response": "q", "reward": 0, "logprobs": [-1, -2], "id": "mine"})
        + "\n"
    )
    one, two = (
        take(Batches(str(tmp_path / name), "train", ("prompts", "trajectories")[::-1], 2, shuffle=False), 1)[0]
        for name in ("t.h5", "t.jsonl")
    )
    assert two[0].pop("metadata") == '{"\u00e9": 1}' and one[0].pop("metadata") is None
    assert (
        two[1].pop("id") == "mine"
        and one[1].pop("id").endswith("row 2")
        and [r[0].pop("id")[-2:] for r in (one, two)] == [" 1", ":1"]
    )
    assert one == two and one[0]["prompt"] == dialogue and one[1]["logprobs"] == [-1.0, -2.0]


def test_missing_values_of_hdf5_are_nan(tmp_path):
    with h5py.File(tmp_path / "m.h5", "w") as file:
        for name in ("prompt", "chosen", "rejected"):
            file.create_dataset(name, data=["x"], dtype=h5py.string_dtype())
        file["margin"] = [float("nan")]
    assert take(Batches(str(tmp_path / "m.h5"), "train", PREFERENCE, 1), 1)[0][0]["margin"] is None


READ = """
import sys
from utils.loader import Batches
batches = Batches(sys.argv[1], "train", ("prompts",), 7).start()
print([[row["prompt"][0]["content"] for row in next(batches)] for _ in range(300)])
"""  # and ends without closing the iterator


def test_two_threads_and_two_processes_read_one_hdf5_file(tmp_path):
    with h5py.File(tmp_path / "n.h5", "w") as file:
        file.create_dataset("prompt", data=[str(i) for i in range(2100)], dtype=h5py.string_dtype())
    loader = numbered(tmp_path / "n.h5", 7)
    one, two = loader.start(), loader.start()
    pairs = [(next(one), next(two)) for _ in range(300)]
    one.close(), two.close()
    assert all(a == b for a, b in pairs) and sorted(flat([a for a, _ in pairs])) == list(range(2100))
    command = [sys.executable, "-c", READ, str(tmp_path / "n.h5")]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outs = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0] and [err for _, err in outs] == ["", ""]
    assert outs[0] == outs[1] and [[int(x) for x in batch] for batch in json.loads(outs[0][0].replace("'", '"'))] == [
        a for a, _ in pairs
    ]


# --- errors


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "p", "chosen": "c"}', r"bad.jsonl:5: rejected: expected text, found none; run prepare_data.py"),
        ('{"prompt": "p", "chosen": "c", "rejected": 3}', r"bad.jsonl:5: rejected: expected text, found int"),
        (
            '{"prompt": [], "chosen": "c", "rejected": "r"}',
            r"bad.jsonl:5: prompt: expected text or \{role, content\} messages, found list",
        ),
        (
            '{"prompt": "p", "chosen": "c", "rejected": "r", "margin": "0.5"}',
            r"bad.jsonl:5: margin: expected a number, found str",
        ),
        (
            '{"prompt": "p", "chosen": "c", "rejected": "r", "margin": Infinity}',
            r"bad.jsonl:5: margin: expected a number, found float",
        ),
        ('["p", "c", "r"]', r"bad.jsonl:5: expected an object with named columns, found list"),
        ('{"prompt": "p", ', r"bad.jsonl:5:16: broken_row \(.*\); run prepare_data.py"),
        ("\u3000", r"bad.jsonl:5: broken_row"),
    ],
)
def test_a_bad_row_is_named_in_the_thread_that_trains(tmp_path, line, message):
    good = json.dumps({"prompt": "p", "chosen": "c", "rejected": "r"})
    (tmp_path / "bad.jsonl").write_text("\n".join([good, good, "", good, line, good]), encoding="utf-8")
    batches = Batches(str(tmp_path / "bad.jsonl"), "train", PREFERENCE, 1, shuffle=False).start()
    assert all(next(batches)[0]["chosen"] == "c" for _ in range(3))
    with pytest.raises(UserError, match=message) as caught:
        next(batches)
    assert "\n" not in str(caught.value)
    wait_for_threads()


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "rows.csv",
            "prompt,chosen",
            r"rows.csv: rows are read from .jsonl, .parquet, .h5 and .hdf5; run prepare_data.py on it first",
        ),
        ("rows.jsonl.gz", "", r"rows.jsonl.gz: .*run prepare_data.py on it first"),
        ("rows.json", "[]", r"rows.json: .*run prepare_data.py on it first"),
        ("rows.parquet", "PAR", r"rows.parquet: cannot be read"),
        ("rows.h5", "HDF", r"rows.h5: not a readable HDF5 file"),
        ("rows.jsonl", "\n \n", r"rows.jsonl has no rows"),
        ("rows.jsonl", "{", r"rows.jsonl:1:2: broken_row"),
        (
            "rows.jsonl",
            '{"prompt": "p", "answer": "a"}',
            r"rows.jsonl:1: this needs preference \(prompt, chosen, rejected\), the row has answer, prompt; "
            "run prepare_data.py",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused_at_once(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        Batches(str(tmp_path / name), "train", PREFERENCE, 1)


def test_folders_that_cannot_be_used_are_refused_at_once(tmp_path, preferences):
    for data, split, kinds, message in (
        (tmp_path / "none", "train", PREFERENCE, "data folder .*none does not exist"),
        (tmp_path, "train", PREFERENCE, "has no train-"),
        (preferences, "train", PROMPTS, "holds preference; this needs prompts"),
    ):
        with pytest.raises(UserError, match=message):
            Batches(str(data), split, kinds, 1)


# --- threads and memory


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "loader":
            thread.join(5)
            assert not thread.is_alive()


def test_leaving_early_ends_the_thread(numbers):
    def names():
        return [thread.name for thread in threading.enumerate()]

    wait_for_threads()
    batches = numbered(numbers, 8, prefetch=2).start()
    next(batches)
    assert "loader" in names()
    batches.close()
    assert "loader" not in names()
    for _ in zip(range(3), numbered(numbers, 8, prefetch=2).start()):
        pass
    assert "loader" not in names()  # the iterator was dropped


def test_prefetching_stops_at_its_depth(numbers):
    made, enough = [], threading.Event()

    def collate(rows):
        made.append(len(rows))
        if len(made) == 4:
            enough.set()
        return rows

    batches = Batches(numbers, "train", PROMPTS, 8, collate, prefetch=2).start()
    next(batches)
    assert enough.wait(10)  # one taken, two waiting, one in hand
    enough.wait(0.2)
    assert len(made) == 4
    batches.close()


def test_blocks_in_memory_are_those_of_one_window(numbers, monkeypatch):
    held, most, read_block = [0], [0], utils.loader.read_block

    def watched(block, wanted):
        held[0] += 1
        most[0] = max(most[0], held[0])
        try:
            yield from read_block(block, wanted)
        finally:
            held[0] -= 1

    monkeypatch.setattr(utils.loader, "read_block", watched)
    loader = numbered(numbers, 50, buffer_rows=3000)
    assert len(loader.blocks) == 6 and held == [0]
    assert len(list(islice(loader.batches(0), 300))) == 300  # three epochs
    assert most == [3]


def test_memory_does_not_grow_with_the_rows(tmp_path):
    peaks = []
    for rows in (10_000, 100_000):
        file = tmp_path / f"{rows}.jsonl"
        with open(file, "w") as stream:
            for i in range(rows):
                stream.write(json.dumps({"prompt": str(i), "metadata": "m" * 200}) + "\n")
        tracemalloc.start()
        loader = numbered(file, 100, buffer_rows=3000)
        assert sum(len(batch) for batch in islice(loader.batches(0), loader.per_epoch)) == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0] < 6_000_000, peaks


def test_tensors_are_pinned_where_there_is_a_gpu(numbers, monkeypatch):
    pinned, devices = [], []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    loader = Batches(
        numbers, "train", PROMPTS, 2, lambda rows: [{"ids": ["a"], "x": torch.tensor(texts(rows))}], prefetch=1
    )
    batches = loader.start()
    (batch,) = next(batches)
    assert any(batch["x"] is tensor for tensor in pinned) and devices == [3]
    batches.close()


# --- the reward stage's collator


def test_pairs_are_padded_on_the_right_longest_first(tmp_path):
    rows = [
        {"id": "a", "prompt": [{"role": "user", "content": "q"}], "chosen": "yes", "rejected": "n", "margin": None},
        {"id": "b", "prompt": [{"role": "user", "content": "q"}], "chosen": "same", "rejected": "same", "margin": 1.0},
        {"id": "c", "prompt": [{"role": "user", "content": "qq"}], "chosen": "y", "rejected": "nope!", "margin": 0.5},
    ]
    tokenizer = copy.deepcopy(byte_tokenizer())
    pairs = encode_pairs(rows, tokenizer, None)
    assert [pair["id"] for pair in pairs] == ["a", "c"] and encode_pairs([], tokenizer, None) == []
    (batch,) = micro_batches(pairs, 0, 2)
    assert batch["ids"] == ["c", "a"] and batch["margin"].tolist() == [0.5, 0.0]
    lengths = batch["attention_mask"].sum(1).tolist()
    assert lengths == [
        len(pairs[1]["chosen"]),
        len(pairs[0]["chosen"]),
        len(pairs[1]["rejected"]),
        len(pairs[0]["rejected"]),
    ]
    for row, mask, length in zip(batch["input_ids"], batch["attention_mask"], lengths):
        assert mask[:length].all() and not mask[length:].any() and (row[length:] == 0).all()
        assert row[length - 1] == tokenizer.eos_token_id
    assert batch["input_ids"][0][: lengths[0]].tolist() == pairs[1]["chosen"]
    other = micro_batches(pairs, 9, 2)[0]
    assert torch.equal(other["input_ids"][batch["attention_mask"]], batch["input_ids"][batch["attention_mask"]])
    assert [part["ids"] for part in micro_batches(pairs, 0, 1)] == [["c"], ["a"]] and micro_batches([], 0, 4) == []
    longest = max(lengths)
    assert encode_pairs(rows, tokenizer, longest) == pairs
    with pytest.raises(
        UserError, match=f"row c: rejected with its prompt has {longest} tokens, the model has {longest - 1} positions"
    ):
        encode_pairs(rows, tokenizer, longest - 1)


def test_a_large_prepared_folder_has_small_blocks(tmp_path, tiny):
    with open(tmp_path / "raw.jsonl", "w") as file:
        for i in range(2500):
            file.write(json.dumps({"prompt": f"q{i}", "chosen": "yes", "rejected": "no"}) + "\n")
    prepare(
        DataConfig(
            source=str(tmp_path / "raw.jsonl"), tokenizer=tiny, output_dir=str(tmp_path / "data"), eval_fraction=0.0
        )
    )
    loader = Batches(str(tmp_path / "data"), "train", PREFERENCE, 100)
    assert [block.rows for block in loader.blocks] == [1000, 1000, 500]


def reward_config(model: str, data, output, **changes) -> RewardTrainConfig:
    defaults = dict(lora=LoraOptions(r=4), lr=1e-2, train_batch_size=1, log_every=1, report_to="none")
    return RewardTrainConfig(
        model=ModelConfig(model, dtype="float32"), data=str(data), output_dir=str(output), **(defaults | changes)
    )


def write_pairs(folder, equal: list[bool]) -> None:
    """A prepared folder whose train pairs are equal or not, and one test pair."""
    for split, flags in (("train", equal), ("test", [False])):
        rows = [
            {"prompt": "q", "chosen": f"a{i}", "rejected": f"a{i}" if same else "b", "margin": 0.5}
            for i, same in enumerate(flags)
        ]
        wanted = [own_row(row | {"source": "s", "metadata": "{}"}, "preference", str(i)) for i, row in enumerate(rows)]
        pyarrow.parquet.write_table(pa.Table.from_pylist(wanted), folder / f"{split}-00000-of-00001.parquet")


def test_pairs_of_equal_tokens_are_left_out_and_a_batch_without_others_changes_nothing(tiny, tmp_path, capsys):
    write_pairs(tmp_path, [True, False, False, True, True])
    cfg = reward_config(tiny, tmp_path, tmp_path / "run", epochs=2)
    train(cfg)
    steps = read_metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == list(range(1, 11))
    assert [sorted(step["pairs"] for step in part) for part in (steps[:5], steps[5:])] == [[0, 0, 0, 1, 1]] * 2
    assert all(("loss" in step) == (step["pairs"] == 1) for step in steps)
    out = capsys.readouterr().out
    assert "left out 6 of 10 pairs, whose tokens are equal" in out and out.count("  no pairs  left ") == 6
    train(dataclasses.replace(cfg, output_dir=str(tmp_path / "whole"), train_batch_size=5))
    assert [step["pairs"] for step in read_metrics(tmp_path / "whole")] == [2, 2]


def test_only_equal_pairs_are_an_error(tiny, tmp_path):
    write_pairs(tmp_path, [True, True])
    with pytest.raises(UserError, match="the tokens of all 2 training pairs are equal"):
        train(reward_config(tiny, tmp_path, tmp_path / "run"))
    assert not (tmp_path / "run" / "final").exists()


def test_max_pairs_is_of_the_first_rows_and_an_example_comes_before_training(tiny, preferences, tmp_path, capsys):
    train(
        reward_config(
            tiny, preferences, tmp_path / "run", max_pairs=10, train_batch_size=4, micro_batch_size_per_gpu=3
        )
    )
    assert [step["pairs"] for step in read_metrics(tmp_path / "run")] == [4, 4, 2]
    out = capsys.readouterr().out
    assert "10 train pairs" in out and "left out" not in out
    assert (
        0
        < out.index("first pair, chosen:   <|start|>user\nq")
        < out.index("yes ")
        < out.index("first pair, rejected: <|start|>user\nq")
        < out.index("step 1/3")
    )
    with pytest.raises(UserError, match="max_pairs 0 must be at least 1"):
        train(reward_config(tiny, preferences, tmp_path / "none", max_pairs=0))


def test_two_ranks_train_on_the_batches_of_one(tiny, tmp_path):
    """Batches of 3 and 2 rows, of which some are left out, so that the ranks have unequal shares, or none."""
    write_pairs(tmp_path, [False, True, False, False, True, True, False, False, True, True, False])
    runs = []
    for config in ("cpu.yaml", "multi_cpu.yaml"):
        options = {
            "model.path": tiny,
            "model.dtype": "float32",
            "data": tmp_path,
            "output_dir": tmp_path / config,
            "train_batch_size": 3,
            "epochs": 2,
        }
        options |= {"micro_batch_size_per_gpu": 1, "lr": 1e-2, "report_to": "none"}
        launch(
            config,
            ROOT / "train_reward.py",
            *(part for name, value in options.items() for part in (f"--{name}", value)),
        )
        runs.append(
            [
                {name: value for name, value in step.items() if not name.startswith("memory")}
                for step in read_metrics(tmp_path / config)
            ]
        )
    one, two = runs
    assert len(one) == 8 and {step["pairs"] for step in one} >= {1, 2} and sum(step["pairs"] for step in one) == 12
    assert [step.keys() for step in one] == [step.keys() for step in two]
    for a, b in zip(one, two):
        assert b == pytest.approx(a, rel=1e-3, abs=1e-4)
