"""What became of the rows: counted, listed, and as a page."""

import html
import json
from collections import Counter, defaultdict

import numpy as np

from dataprep.chunks import chunk_keys, read_chunk
from dataprep.rules import REASONS, Decisions
from dataprep.shapes import ANSWERS
from utils.config import UserError
from utils.data import encode_prompt, encode_response, show
from utils.report import figure_svg, new_figure, page, table
from utils.tracking import say

EXAMPLES_PER_REASON = 3
ASKED_FOR = ("excluded", "already_there", "left_out_by_weight")  # no bad rows


class Tally:
    """What became of the rows, counted and with examples; each drop is also a line of a file."""

    def __init__(self, strict: bool, file):
        self.strict, self.file = strict, file
        self.rows_in = self.candidates = self.unused = self.longer_chosen = 0
        self.dropped: Counter[str] = Counter()
        self.shortened: Counter[str] = Counter()
        self.beside: Counter[str] = Counter()
        self.examples: dict[str, list[dict]] = defaultdict(list)
        self.sources: dict[str, dict] = {}
        self.histograms: dict[str, np.ndarray] = {}

    def add_source(self, name: str, shape: str) -> None:
        self.sources.setdefault(name, {"shape": shape, "rows": 0, "kept": 0})

    def drop(self, place: str, reason: str, detail: str) -> None:
        if self.strict and reason not in ASKED_FOR:
            raise UserError(f"{place}: {reason}: {detail}; --on_bad_row skip drops such rows")
        self.dropped[reason] += 1
        self.file.write(json.dumps({"place": place, "reason": reason, "detail": detail}, ensure_ascii=False) + "\n")
        if len(self.examples[reason]) < EXAMPLES_PER_REASON:
            self.examples[reason].append({"place": place, "detail": detail})

    def add_chunk(self, chunk: dict) -> None:
        """After pass 1 of a chunk. Its lists are taken out of it, so that memory does not grow with the drops."""
        for drop in chunk.pop("dropped"):
            self.drop(*drop)
        self.shortened.update(chunk.pop("shortened"))
        self.beside.update(chunk.pop("beside"))
        if chunk["role"] != "old":
            self.rows_in += chunk["rows"]
            self.candidates += chunk["candidates"]
            self.unused += chunk["unused"]
            self.sources[chunk["source"]]["rows"] += chunk["rows"]

    def add_decisions(self, chunks: list[dict], d: Decisions, kind: str) -> None:
        """After pass 2."""
        for i, chunk in enumerate(chunks):
            if chunk["role"] == "old" or not chunk["kept"]:
                continue
            codes = d.code[d.rows(i)]
            self.sources[chunk["source"]]["kept"] += int((codes == 0).sum())
            places = read_chunk(chunk["file"], ["_place"])["_place"] if codes.any() else None
            for k in np.flatnonzero(codes).tolist():
                reason, twin, detail = REASONS[codes[k]], int(d.twin[d.first[i] + k]), ""
                if twin >= 0 and self.dropped[reason] < 100:  # for each to be looked up there may be too many
                    detail = f"with {place_of(twin, chunks, d)}"
                self.drop(places[k].as_py(), reason, detail)
            self.add_lengths(chunk_keys(chunk["file"], ["lengths"])["lengths"][codes == 0], kind)
        self.file.close()

    def add_lengths(self, lengths: np.ndarray, kind: str) -> None:
        """Of the kept rows of a chunk: (kept, parts), in tokens."""
        for name, column in zip(("prompt", *ANSWERS[kind]), lengths.T):
            before = self.histograms.get(name, np.zeros(0, dtype=np.int64))
            counts = np.bincount(column, minlength=len(before))
            counts[: len(before)] += before
            self.histograms[name] = counts
        if kind == "preference":
            chosen, rejected = lengths[:, 1], lengths[:, 2]
            self.longer_chosen += float((chosen > rejected).sum() + (chosen == rejected).sum() / 2)

    def why_nothing_is_left(self) -> str:
        reason, n = self.dropped.most_common(1)[0]
        example = self.examples[reason][0]
        return (
            f"all {self.rows_in} rows were dropped, {n} of them as {reason}: {example['place']}: {example['detail']}"
        )

    def report(self, kind: str, rows_out: dict[str, int]) -> dict:
        report = {
            "kind": kind,
            "rows_in": self.rows_in,
            "candidates": self.candidates,
            "rows_out": rows_out,
            "dropped": dict(self.dropped.most_common()),
            "dropped_examples": self.examples,
            "shortened": dict(self.shortened),
            "only_in_metadata": dict(self.beside),
            "sources": self.sources,
            "tokens": {name: percentiles(h) for name, h in self.histograms.items() if h.sum()},
        }
        if self.unused:
            report["unused_rows"] = self.unused
        kept = sum(source["kept"] for source in self.sources.values())
        if kind == "preference" and kept:
            report["longer_answer_chosen"] = round(self.longer_chosen / kept, 4)
        return report


def place_of(row: int, chunks: list[dict], d: Decisions) -> str:
    """File and line that a row of pass 2 comes from."""
    i = int(np.searchsorted(d.first, row, side="right")) - 1
    return read_chunk(chunks[i]["file"], ["_place"])["_place"][row - int(d.first[i])].as_py()


def percentiles(histogram: np.ndarray) -> dict[str, int]:
    """Of lengths whose counts are `histogram`."""
    total, below = histogram.sum(), np.cumsum(histogram)
    return {
        f"p{p}": int(np.searchsorted(below, min(total - 1, total * p // 100), side="right"))
        for p in (0, 50, 90, 99, 100)
    }


# ---------------------------------------------------------------------------------------------------- the page


def report_page(report: dict, histograms: dict[str, np.ndarray], examples: list[dict], tokenizer) -> str:
    """report.html: what came in, what went out and why, lengths, and examples with the learned tokens marked."""
    out, kind = report["rows_out"], report["kind"]
    body = f"<p>{kind} from {len(report['sources'])} source(s): {report['rows_in']:,} rows read, "
    body += f"{report['candidates']:,} candidates, {out['train']:,} train and {out['test']:,} test rows written, "
    body += f"{sum(report['dropped'].values()):,} dropped.</p>"
    body += "<h2>Sources</h2>" + sources_table(report["sources"])
    if report["dropped"]:
        body += "<h2>Dropped</h2>" + dropped_table(report)
    if report["shortened"]:
        body += "<h2>Shortened</h2>" + table(["part", "rows"], [[k, f"{v:,}"] for k, v in report["shortened"].items()])
    if report["only_in_metadata"]:
        rows = [[key, f"{n:,}"] for key, n in report["only_in_metadata"].items()]
        body += "<h2>In messages besides role and content, kept as metadata alone</h2>" + table(["key", "rows"], rows)
    body += "<h2>Lengths in tokens</h2>"
    if any(h.sum() for h in histograms.values()):
        body += lengths_figure(histograms) + table(
            ["", *next(iter(report["tokens"].values()))],
            [[name, *map(str, p.values())] for name, p in report["tokens"].items()],
        )
    if "longer_answer_chosen" in report:
        body += f"<p>The longer answer is the chosen one in {report['longer_answer_chosen']:.1%} of the pairs, "
        body += "equally long ones counted as half (50% would be no preference for length).</p>"
    body += "<h2>Examples</h2><p>As training sees them; marked is what is learned from.</p>"
    return page("Data report", body + "".join(example_html(row, kind, tokenizer) for row in examples))


def sources_table(sources: dict[str, dict]) -> str:
    kept = max(1, sum(source["kept"] for source in sources.values()))
    return table(
        ["source", "shape", "rows", "kept", "share of the kept"],
        [
            [name, s["shape"], f"{s['rows']:,}", f"{s['kept']:,}", f"{s['kept'] / kept:.1%}"]
            for name, s in sources.items()
        ],
    )


def dropped_table(report: dict) -> str:
    rows = []
    for reason, n in report["dropped"].items():
        examples = "\n".join(f"{e['place']}: {e['detail']}" for e in report["dropped_examples"][reason])
        rows.append([reason, f"{n:,}", f"{n / report['candidates']:.1%}", examples])
    return table(["reason", "rows", "share", "examples"], rows)


def lengths_figure(histograms: dict[str, np.ndarray]) -> str:
    figure = new_figure(4 * len(histograms), 3)
    for axis, (name, histogram) in zip(figure.subplots(1, len(histograms), squeeze=False)[0], histograms.items()):
        axis.hist(np.arange(len(histogram)), bins=min(40, len(histogram)), weights=histogram)
        axis.set_title(name)
    return figure_svg(figure)


def example_html(row: dict, kind: str, tokenizer) -> str:
    prompt = tokenizer.decode(encode_prompt(tokenizer, row["prompt"]))
    text = f"<p style='white-space:pre-wrap'>{html.escape(prompt)}"
    for name in ANSWERS[kind]:
        answer = tokenizer.decode(encode_response(tokenizer, row[name]))
        text += f"\n<small>{name}</small> <mark>{html.escape(answer)}</mark>"
    for name in ("margin", "reward", "ground_truth"):
        text += f"\n<small>{name}</small> {html.escape(str(row[name]))}" if row.get(name) is not None else ""
    return text + "</p><hr>"


# ------------------------------------------------------------------------------------------------ the terminal


def print_example(row: dict, kind: str, tokenizer) -> None:
    """One row as training will see it; ‹...› marks the tokens that are learned from."""
    prompt = tokenizer.decode(encode_prompt(tokenizer, row["prompt"]))
    say("--- one row, decoded; ‹...› marks the response tokens" if show("‹") == "‹" else "--- one row, decoded")
    say(prompt)
    for name in ANSWERS[kind]:
        say(f"{name}: ‹{tokenizer.decode(encode_response(tokenizer, row[name]))}›")
    for name in ("margin", "reward", "ground_truth"):
        if row.get(name) is not None:
            say(f"{name}: {row[name]}")
    say("---")


def print_summary(tally: Tally, report: dict, rows_out: dict[str, int]) -> None:
    """What came in, what went out, and why not the rest. rows_out: new rows by split."""
    made = f" into {tally.candidates} candidates" if tally.candidates != tally.rows_in else ""
    written = f"{rows_out['train']} train, {rows_out['test']} test, {sum(tally.dropped.values())} dropped"
    say(f"{tally.rows_in} rows read{made}: {written}")
    for reason, n in tally.dropped.most_common():
        example = tally.examples[reason][0]
        say(f"  dropped {n} {reason}, e.g. {example['place']}: {example['detail']}")
    for reason, n in tally.dropped.items():
        if reason not in ASKED_FOR and n > tally.candidates / 5:
            way_out = "; --near_duplicates null keeps them" if reason == "near_duplicate" else ""
            say(f"  warning: {reason} takes {n} of {tally.candidates} rows; look at dropped.jsonl{way_out}")
    if tally.unused:
        say(f"  not used {tally.unused} further answers to a prompt; see --pairs")
    for part, n in tally.shortened.items():
        say(f"  shortened {n} {part}; the whole text is kept in the metadata")
    for key, n in tally.beside.items():
        say(f"  {n} rows have messages with {key}; templates get role and content, the rest is metadata alone")
    for split in [name for name in rows_out if not report["rows_out"][name]]:
        way_out = "; a higher eval_fraction or an eval_source fills it" if split == "test" else ""
        say(f"  the {split} split is empty{way_out}")
