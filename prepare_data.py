"""Stage 1: raw preferences, prompts or logged trajectories -> a Parquet folder and a data report.

    python prepare_data.py --source data/demo/preferences.jsonl --tokenizer MODEL --output_dir out/data
    python prepare_data.py --config configs/gsm8k_data.yaml

Reads what dataprep/sources.py reads. Each source's shape is recognised and printed. Rows that cannot be used are
dropped, counted by reason and listed in dropped.jsonl; lengths are measured in tokens after the chat template.

Two passes, neither of which holds the data in memory. Workers turn chunks of raw rows into checked rows with keys, one
file a chunk, so a killed run over local files goes on where it was (dataprep/chunks.py). Then the keys alone decide
what no row can know of itself (dataprep/rules.py: duplicates, contradictions, the split), and what is left is written.

Two commands work on a finished folder: `python -m dataprep.coverage` says how well it covers real prompts, and
`python -m dataprep.filter` leaves out pairs that a trained reward model contradicts.
"""

import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Literal, NamedTuple

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))  # this utils, not that of another folder

from dataprep.chunks import RowRules, Work, run_chunks
from dataprep.convert import group_rows
from dataprep.folder import first_rows, keep_files, open_list, restore_folder, workshop, write_splits
from dataprep.lengths import Limits
from dataprep.messages import as_messages
from dataprep.report import Tally, print_example, print_summary, report_page
from dataprep.rules import SplitRule, decide
from dataprep.shapes import GROUPED, PAIRED, USES, Columns, Shape, detect_source
from dataprep.similarity import hash64
from dataprep.sources import Chunk, Hub, as_label, hub_label, is_local, is_saved, read_file, read_source, source_files
from utils.config import UserError
from utils.data import answer_opening, folder_kind
from utils.files import replace_folder, write_json, write_text
from utils.rows import BadRow
from utils.run import check_output_dir, record_run, run_stage
from utils.tracking import say


@dataclass(frozen=True)
class Source:
    """A source with a weight or a place on the hub of its own."""

    path: str
    """file, folder, glob or hub name"""
    weight: float = 1.0
    """copies of each train row: 0.5 keeps a random half, 2 writes each row twice"""
    hub: Hub | None = None
    """where in this hub dataset to read; null = as the `hub` option says"""


@dataclass(frozen=True)
class DataConfig:
    """All of a data folder."""

    source: str | Source | list[str | Source]
    """files, folders, globs or hub names, each as text or as {path, weight, hub}"""
    tokenizer: str
    """model whose tokenizer and chat template measure the lengths: a folder, a .gguf file or a hub name"""
    output_dir: str
    """folder to write"""
    trust_remote_code: bool = False
    """run the tokenizer's own code, where it has some"""
    kind: Literal["preference", "prompts", "trajectories"] | None = None
    """what to make of the rows; null = detected from the first hundred rows, and printed"""
    eval_source: str | Source | list[str | Source] | None = None
    """sources of the test split, in place of eval_fraction; train rows with one of their prompts are dropped"""
    max_prompt_length: int = 512
    """tokens after the chat template, inclusive"""
    max_response_length: int = 256
    """tokens with eos, inclusive"""
    long_prompt: Literal["filter", "keep_last_turns"] = "filter"
    """of a prompt over the limit: drop the row, or drop its oldest turns (not a system turn at its start, and not the
    last one)"""
    long_response: Literal["filter", "truncate"] = "filter"
    """of an answer over the limit: drop the row, or cut the answer's end off"""
    pairs: Literal["best_worst", "all"] | None = None
    """pairs of several rated answers: the best against the worst (default), or all that differ"""
    near_duplicates: float | None = 0.9
    """a row is dropped if prompt and answers each share this part of their three-word runs with those of an earlier
    row, and their numbers are the same; so is a train row whose prompt is that near to a test prompt. null = only
    equal ones"""
    eval_fraction: float | None = None
    """share of the prompts that becomes the test split (default 0.05); a prompt is never in both"""
    prompt_suffix: str = ""
    """appended to the last user turn, for example an instruction on the answer's form"""
    on_bad_row: Literal["skip", "error"] = "skip"
    """skip and count a row that cannot be used, or stop at the first"""
    exclude: str | list[str] | None = None
    """JSONL files of objects with an `id` or a `prompt`, such as a PPO run's suspicious.jsonl, to leave out"""
    workers: int | None = None
    """processes that parse and tokenize; null = one for each core. The output does not depend on it"""
    seed: int = 0
    """decides which prompts are held out, and the order of the train rows"""
    refresh: bool = False
    """add what is new to an earlier output: its rows, their ids and their split stay as they are"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    columns: Columns = field(default_factory=Columns)
    hub: Hub = field(default_factory=Hub)


# --------------------------------------------------------------------------------------------- what is refused


def check_config(cfg: DataConfig) -> tuple[list[Source], list[Source]]:
    """Refuse what cannot work; returns the sources and the test sources, each with its place on the hub."""
    sources, test_sources = listed_sources(cfg.source), listed_sources(cfg.eval_source)
    if not sources:
        raise UserError("source is empty; give a file, a folder, a glob or a hub name")
    for source in [*sources, *test_sources]:
        check_source(source, cfg.output_dir)
    if any(source.weight != 1 for source in test_sources):
        raise UserError("weight would have no effect on eval_source; remove it")
    if cfg.hub != Hub() and all(
        s.hub is not None or is_local(s.path) and not os.path.isdir(s.path) for s in [*sources, *test_sources]
    ):
        raise UserError("hub.* is set but every source is a local file, so it would have no effect; remove it")
    if cfg.eval_fraction is not None and not 0 <= cfg.eval_fraction < 1:
        raise UserError(f"eval_fraction {cfg.eval_fraction} must be at least 0 and below 1")
    if cfg.eval_source is not None and cfg.eval_fraction is not None:
        raise UserError("eval_fraction would have no effect beside eval_source; give one of them")
    if cfg.near_duplicates is not None and not 0.7 <= cfg.near_duplicates <= 1:
        raise UserError(f"near_duplicates {cfg.near_duplicates} must be between 0.7 and 1, or null")
    if cfg.max_prompt_length < 1 or cfg.max_response_length < 2:
        raise UserError("max_prompt_length must be at least 1, max_response_length at least 2 (a token and eos)")
    if cfg.workers is not None and cfg.workers < 1:
        raise UserError(f"workers {cfg.workers} must be at least 1")
    if cfg.columns.choice_a is not None and cfg.columns.choice is None:
        raise UserError(
            "columns.choice_a would have no effect without columns.choice, answer_a and answer_b; name them too"
        )
    if cfg.refresh and cfg.overwrite:
        raise UserError("refresh keeps the earlier output and overwrite replaces it; give one of them")
    return [replace(s, hub=s.hub or cfg.hub) for s in sources], [
        replace(s, hub=s.hub or cfg.hub) for s in test_sources
    ]


def listed_sources(value) -> list[Source]:
    values = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
    return [v if isinstance(v, Source) else Source(v) for v in values]


def check_source(source: Source, output_dir: str) -> None:
    path = source.path
    if path[:1] in "[{":
        raise UserError(f"source {path} is not valid; write texts, or objects with path, weight and hub")
    if not 0 <= source.weight <= 1000:
        raise UserError(f"source {path}: weight {source.weight} must be between 0 and 1000")
    if os.path.isdir(path) and Path(output_dir).resolve().is_relative_to(Path(path).resolve()):
        raise UserError(
            f"output_dir {output_dir} lies inside the source {path}, which would then read what it wrote; "
            "choose another folder"
        )
    if source.hub is not None and is_local(path) and source.hub != Hub(split=source.hub.split):
        raise UserError(f"source {path} is a local file, so its hub options would have no effect; remove them")


def check_kind(cfg: DataConfig, kind: str) -> None:
    """Refuse options that would do nothing for rows of this kind."""
    for option, is_set, kinds in (
        ("pairs", cfg.pairs is not None, ("preference",)),
        ("long_response", cfg.long_response != "filter", ("preference", "trajectories")),
    ):
        if is_set and kind not in kinds:
            raise UserError(f"{option} would have no effect on {kind}; remove it")


def check_columns(cfg: DataConfig, shape: Shape, place: str) -> None:
    """Refuse options that would do nothing for rows of this shape."""
    named = [key for key, value in dataclasses.asdict(cfg.columns).items() if value is not None]
    unused = [f"columns.{key}" for key in named if key not in USES[shape.name]]
    unused += ["pairs"] if cfg.pairs and shape not in PAIRED else []
    if unused:
        raise UserError(
            f"{place}: {unused[0]} would have no effect on {shape.kind}, {shape.name}; remove it, or set --kind"
        )


# -------------------------------------------------------------------------------------------- an earlier output


class Earlier(NamedTuple):
    """A finished output that a refresh adds to."""

    folder: Path
    files: dict[str, list[Path]]
    """of each split"""


def find_earlier(cfg: DataConfig, output: Path) -> tuple[Earlier | None, str | None]:
    """The output that is added to, if any, and the kind of the rows, if known. Refuses what cannot be written over."""
    restore_folder(output)
    if not (cfg.refresh and output.exists() and any(output.iterdir())):
        check_output_dir(cfg.output_dir, cfg.overwrite)
        earlier, kind = None, cfg.kind
    else:
        files = {split: sorted(output.glob(f"{split}-*.parquet")) for split in ("train", "test")}
        earlier, kind = Earlier(output, files), folder_kind(cfg.output_dir)
        if cfg.kind not in (None, kind):
            raise UserError(f"output_dir {output} holds {kind}, so {cfg.kind} cannot be added; choose another folder")
    if kind is not None:
        check_kind(cfg, kind)
    if earlier:
        check_refresh(output, cfg)
    return earlier, kind


def check_refresh(output: Path, cfg: DataConfig) -> None:
    """What would put a prompt on both sides of the split, or leave rows in that should go, is refused."""
    if cfg.exclude is not None:
        raise UserError("exclude cannot take rows out of an earlier output; prepare it anew with --overwrite true")
    file = output / "config.yaml"
    before = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if before.get("prompt_suffix", cfg.prompt_suffix) != cfg.prompt_suffix:
        raise UserError(
            f"{file}: the earlier output has prompt_suffix {before['prompt_suffix']!r}, "
            "so its prompts would come again; refresh with the same"
        )
    if before.get("eval_source") is not None and cfg.eval_source is None:
        raise UserError(
            f"{file}: the earlier output has an eval_source, to which no other rows should come; refresh with the same"
        )


def all_sources(output: Path, cfg: DataConfig) -> DataConfig:
    """The configuration with the earlier output's sources too, for a folder that was refreshed."""
    file = output / "config.yaml"
    before = yaml.safe_load(file.read_text(encoding="utf-8"))["source"] if file.is_file() else []
    before, now = (
        value if isinstance(value, list) else [value] for value in (before, dataclasses.asdict(cfg)["source"])
    )
    return replace(cfg, source=[*before, *(source for source in now if source not in before)])


def add_earlier(report: dict, earlier: Earlier, new: Path, new_files: list[str]) -> None:
    """Make the report of new rows one of the whole folder `new`, with the reports before it."""
    import pyarrow.parquet

    file = earlier.folder / "report.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    already_there = report["dropped"].get("already_there", 0)
    report["added"] = {"rows": report["rows_out"], "files": new_files, "already_there": already_there}
    report["rows_out"] = {
        split: sum(pyarrow.parquet.read_metadata(f).num_rows for f in new.glob(f"{split}-*.parquet"))
        for split in earlier.files
    }
    report["earlier"] = [*before.pop("earlier", []), before]


# ------------------------------------------------------------------------------------- what the run starts from


def check_not_replaced(files: list[str], output: Path, cfg: DataConfig) -> None:
    """A source must not lie in the folder that is replaced."""
    inside = [file for file in files if cfg.overwrite and Path(file).resolve().is_relative_to(output)]
    if inside:
        raise UserError(
            f"source {inside[0]} lies in output_dir {cfg.output_dir}, which overwrite would replace; "
            "choose another output_dir"
        )


def local_files(source: Source) -> list[str]:
    """Files that a source is read from; none for the hub."""
    if is_saved(source.path):
        return sorted(str(f) for f in Path(source.path).rglob("*") if f.is_file())
    return source_files(source.path, source.hub.split)[0]


def read_excluded(files: list[str]) -> set[str]:
    """Ids and prompts (as JSON) of the objects in JSONL files."""
    excluded = set()
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"exclude {file} is not a file")
    for place, raw in (row for file in files for part in read_file(file) for row in part.rows()):
        if isinstance(raw, BadRow):  # such as a last line that a killed run left half-written
            say(f"{place}: {raw.reason}, left out of exclude")
            continue
        if not isinstance(raw, dict) or not ("id" in raw or "prompt" in raw):
            raise UserError(f"{place}: exclude needs objects with an id or a prompt (a list of messages)")
        excluded |= {str(raw["id"])} if "id" in raw else set()
        try:
            excluded |= {json.dumps(as_messages(raw["prompt"], "prompt"))} if "prompt" in raw else set()
        except BadRow as bad:
            raise UserError(f"{place}: {bad.detail}") from None
    return excluded


def row_rules(cfg: DataConfig) -> RowRules:
    from utils.models import load_tokenizer

    tokenizer = load_tokenizer(cfg.tokenizer, cfg.trust_remote_code)
    answer_opening(tokenizer, str(tokenizer.chat_template))  # its warning is said once, not in each worker
    return RowRules(
        tokenizer=tokenizer,
        limits=Limits(cfg.max_prompt_length, cfg.max_response_length, cfg.long_prompt, cfg.long_response),
        prompt_suffix=cfg.prompt_suffix,
        pairs=cfg.pairs or "best_worst",
        near_duplicates=cfg.near_duplicates,
        excluded=read_excluded([cfg.exclude] if isinstance(cfg.exclude, str) else cfg.exclude or []),
    )


def worker_count(cfg: DataConfig) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cfg.workers or cores


def fingerprint(cfg: DataConfig, files: list[str], rules: RowRules) -> str:
    """Equal for runs whose chunks are: by settings, local files, tokenizer, template, exclusions and code."""
    from utils.models import template_fingerprint

    here = Path(__file__).parent
    code = [Path(__file__), *sorted((here / "dataprep").glob("*.py")), here / "utils/data.py", here / "utils/rows.py"]
    settings = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in ("workers", "overwrite", "on_bad_row")}
    stamps = [(file, os.stat(file).st_size, os.stat(file).st_mtime_ns) for file in files]
    hashes = [hash64(file.read_text(encoding="utf-8")) for file in code]
    return json.dumps([settings, stamps, template_fingerprint(rules.tokenizer), sorted(rules.excluded), hashes])


# ------------------------------------------------------------------------------------ pass 1: rows -> chunk files


class Opened(NamedTuple):
    """A source whose first rows were looked at."""

    work: Work
    chunks: Iterator[Chunk]


def open_source(source: Source, role: str, cfg: DataConfig, kind: str | None) -> Opened:
    """Recognise the shape of a source by its first rows, however many have no object before them."""
    chunks = read_source(source.path, source.hub)
    seen: list[Chunk] = []
    some: list[tuple[str, dict]] = []
    while (not some or len(some) < 100 and len(seen) < 10) and (chunk := next(chunks, None)) is not None:
        seen.append(chunk)
        some += islice(((place, row) for place, row in chunk.rows() if isinstance(row, dict)), 100)
    chunks = chain(seen, chunks)
    if some:
        place, shape = detect_source(some, cfg.columns, kind)
        check_kind(cfg, shape.kind)
        check_columns(cfg, shape, place)
        say(f"{source.path}: {shape.kind}, {shape.name} (from {place})")
    else:
        shape = Shape(kind or "prompts", "no rows")  # every row is broken and says why
    split = f"[{source.hub.split}]" if source.hub.split else ""
    name = as_label(source.path) + split if is_local(source.path) else hub_label(source.path, source.hub)
    return Opened(Work(shape, cfg.columns, name, role, source.weight), chunks)


def open_first(sources: list[Source], cfg: DataConfig, kind: str | None) -> tuple[dict[int, Opened], str]:
    """Open sources up to the first one with rows, which decides the kind; returns them by identity, and the kind."""
    opened: dict[int, Opened] = {}
    for source in sources:
        work, _ = opened[id(source)] = open_source(source, "new", cfg, kind)
        if work.shape.name != "no rows":
            return opened, work.shape.kind
    return opened, kind or "prompts"


def earlier_tasks(earlier: Earlier | None, kind: str) -> Iterator[tuple[Chunk, Work]]:
    """Chunks of the earlier output, whose source is called by its split."""
    for split, files in earlier.files.items() if earlier else ():
        for file in files:
            for chunk in read_file(str(file)):
                yield chunk, Work(Shape(kind, "earlier output"), Columns(), split, "old")


def source_tasks(
    listed: list[tuple[str, Source]], opened: dict[int, Opened], cfg: DataConfig, kind: str, folder: Path, tally: Tally
) -> Iterator[tuple[Chunk, Work]]:
    """Chunks of all sources, each with its work. listed: (role, source) in the order in which they are read.

    Sources of one answer a row, such as up.jsonl and down.jsonl, become one, whose rows are sorted by prompt in
    `folder`, for the two answers of a pair may stand in different ones.
    """
    listed = list(listed)
    while listed:
        role, source = listed.pop(0)
        work, chunks = opened.pop(id(source), None) or open_source(source, role, cfg, kind)
        if work.shape.kind == "preference" and work.shape.name in GROUPED:
            for other in [other for other in listed if other[0] == role]:
                mate = opened.get(id(other[1])) or open_source(other[1], role, cfg, kind)
                opened[id(other[1])] = mate
                if mate.work == work._replace(source=mate.work.source):
                    work = work._replace(source=f"{work.source} + {mate.work.source}")
                    chunks = chain(chunks, opened.pop(id(other[1])).chunks)
                    listed.remove(other)
            chunks, work = group_rows(chunks, work.shape, cfg.columns, folder), work._replace(columns=Columns())
        tally.add_source(work.source, work.shape.name)
        for chunk in chunks:
            yield chunk, work


# ----------------------------------------------------------------------------------------------------- prepare


def prepare(cfg: DataConfig) -> dict:
    """Run stage 1; returns the report that is also written to report.json."""
    started = time.time()
    sources, test_sources = check_config(cfg)
    output = Path(cfg.output_dir).resolve()
    if Path.cwd().is_relative_to(output):
        raise UserError(
            f"output_dir {cfg.output_dir} holds the current folder, and is replaced as a whole; "
            "choose a folder inside it"
        )
    earlier, kind = find_earlier(cfg, output)
    rules = row_rules(cfg)
    listed = [*(("test", source) for source in test_sources), *(("new", source) for source in sources)]
    local = [local_files(source) for _, source in listed]
    files = [file for part in local for file in part]
    check_not_replaced(files, output, cfg)
    about = fingerprint(cfg, [*files, *sorted(map(str, output.glob("*.parquet")))], rules) if all(local) else None
    with workshop(output, about) as folder:
        if find_earlier(cfg, output) != (earlier, kind):  # which refuses what another run may have finished meanwhile
            raise UserError(f"output_dir {output} was changed by another run meanwhile; run again")
        tally = Tally(cfg.on_bad_row == "error", open_list(folder / "dropped.jsonl", earlier and earlier.folder))

        # 1. rows -> chunk files, in parallel
        opened, kind = open_first(sources, cfg, kind)
        tasks = chain(earlier_tasks(earlier, kind), source_tasks(listed, opened, cfg, kind, folder, tally))
        parts = sum(1 if is_saved(source.path) else max(1, len(part)) for (_, source), part in zip(listed, local))
        chunks = []
        for chunk in run_chunks(tasks, folder / "chunks", worker_count(cfg), rules, parts):
            tally.add_chunk(chunk)
            chunks.append(chunk)
        if not tally.rows_in:
            raise UserError(f"source {', '.join(source.path for source in sources)} has no rows")

        # 2. what no row can know of itself
        fraction = 0.0 if cfg.eval_source is not None else 0.05 if cfg.eval_fraction is None else cfg.eval_fraction
        d = decide(chunks, folder, kind, cfg.near_duplicates, SplitRule(fraction, cfg.seed))
        tally.add_decisions(chunks, d, kind)
        if not d.new_rows().any() and not earlier:
            raise UserError(tally.why_nothing_is_left())

        # 3. write; nothing is replaced before everything is there
        new = folder / "new"
        new.mkdir()
        rows_out, new_files = write_splits(chunks, d, kind, cfg.seed, new, earlier.files if earlier else {})
        os.replace(folder / "dropped.jsonl", new / "dropped.jsonl")
        report = tally.report(kind, rows_out)
        if earlier:
            add_earlier(report, earlier, new, new_files)
        shown = first_rows(new, new_files, 5)
        write_text(new / "report.html", report_page(report, tally.histograms, shown, rules.tokenizer))
        write_json(new / "report.json", report)
        record_run(new, all_sources(output, cfg) if earlier else cfg, started)
        if output.exists():
            keep_files(output, new)
        replace_folder(new, output)
        shutil.rmtree(folder)

    # 4. say what happened
    if shown:
        print_example(shown[0], kind, rules.tokenizer)
    print_summary(tally, report, rows_out)
    say(f"wrote {output}")
    return report


if __name__ == "__main__":
    run_stage(prepare, DataConfig)
