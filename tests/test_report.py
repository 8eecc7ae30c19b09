"""The pages that stages write: what they say, by value; that a phone, the dark and long words do them no harm."""

import dataclasses
import html
import io
import json
import re
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from helpers import base_config, messages, ppo_config, run_of

import evaluate
import train_ppo
import train_reward
from train_ppo import Rollout, write_report
from utils import report
from utils.report import curves_svg, first_and_last, folded, page, table

EVIL = "<script>alert('1')</script> & </pre></td></table>\"'"


class Page(HTMLParser):
    """The text of each table row's cells, and every tag that was opened."""

    def __init__(self, text: str):
        super().__init__()
        self.rows, self.tags, self.text, self.cell = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.cell = True

    def handle_endtag(self, tag):
        self.cell = self.cell and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self.cell:
            self.rows[-1][-1] += data


def test_a_page_fits_a_phone_and_the_dark_and_breaks_long_words():
    text = page(EVIL, table(["a", "b"], [["x" * 400, "y"]], texts=True))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert "@media(prefers-color-scheme:dark)" in text and "color-scheme:light dark" in text
    assert "overflow-wrap:anywhere" in text.split("</style>")[0]
    assert (
        ".texts{table-layout:fixed}" in text and '<table class="texts">' in text
    )  # equal columns, whatever they hold
    assert not re.search(r"(src|href)=", text) and "script" not in Page(text).tags
    assert Page(text).rows == [["a", "b"], ["x" * 400, "y"]]


@pytest.mark.parametrize("evil", [EVIL, "a <b>", "</title>", "&amp;", "\x1b[31m<i>"])
def test_text_is_never_markup(evil):
    for made in (
        page(evil, ""),
        page("t", table([evil], [[evil]])),
        page("t", table([evil], [[evil]], texts=True)),
        page("t", folded(evil, evil)),
        page("t", first_and_last([{"step": 1, evil: 1.0}])),
    ):
        read = Page(made)
        known = {*"html head meta title style body h1 table tr th td details summary pre".split()}
        assert set(read.tags) <= known and evil in read.text


@pytest.fixture
def figures(monkeypatch):
    """Every figure that is made, in place of its SVG."""
    made = []
    for module in (report, evaluate):
        monkeypatch.setattr(module, "figure_svg", lambda figure: made.append(figure) or "")
    return made


def covered(figure) -> list:
    """Legends that overlap what is drawn, or lie outside the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).draw()
    bad = []
    for axis in figure.axes:
        if axis.get_legend() is not None:
            box = axis.get_legend().get_window_extent()
            inside = figure.bbox.x0 <= box.x0 and box.y1 <= figure.bbox.y1 and box.x1 <= figure.bbox.x1
            if box.y0 < axis.get_window_extent().y1 - 1 or not inside:
                bad.append(axis)
    return bad


@pytest.mark.parametrize("names", [("policy/loss", "policy/kl_loss"), ("a", "b", "c", "d")])
def test_a_legend_covers_no_curve(figures, names):
    metrics = [{"step": i} | {name: float(k * i) for k, name in enumerate(names)} for i in range(20)]
    curves_svg(metrics, [names, names[:1], ("never",)])
    many, one, *empty = figures[0].axes
    assert [len(axis.lines) for axis in (many, one)] == [len(names), 1] and not any(axis.axison for axis in empty)
    assert len(many.get_legend().get_texts()) == len(names) and covered(figures[0]) == []
    assert one.get_legend() is None and one.get_title() == names[0]


def stage_4_report(prompt="p", before="b", after="a", n=5) -> dict:
    samples = [
        {
            "prompt": prompt,
            "baseline": {"response": before, "gold_score": 1.0, "response_length": 3, "truncated": False},
            "policy": {"response": after, "gold_score": 2.0 + i, "response_length": 4, "truncated": False},
        }
        for i in range(n)
    ]
    cfg = evaluate.EvaluateConfig(
        policy=evaluate.ModelConfig(EVIL), baseline=evaluate.ModelConfig(EVIL), data="", output_dir=""
    )
    return evaluate.summarize(cfg, samples, ["gold_score"])


def test_a_legend_covers_no_histogram(figures):
    evaluate.html_report(stage_4_report(), [])
    assert len(figures[0].axes) == 2 and all(axis.get_legend() is not None for axis in figures[0].axes)
    assert covered(figures[0]) == []


def test_the_page_of_stage_4_keeps_its_columns_and_escapes():
    text = evaluate.html_report(stage_4_report(EVIL, "x" * 400, EVIL), [])
    assert '<table class="texts"><tr><th>prompt</th><th>before</th><th>after</th></tr>' in text
    read = Page(text)
    assert read.rows[-1] == [EVIL, "x" * 400 + "1.000", EVIL + "6.000"]
    assert read.tags.count("script") == 1 and text.count(html.escape(EVIL)) == 2 + 2 * 5  # its own, of data


def test_first_and_last_of_each_metric():
    metrics = [{"step": 1, "a": 1.0, "b": 2.0}, {"step": 2, "a": 3.0}, {"step": 5, "c": 0.123456}]
    assert Page(first_and_last(metrics)).rows == [
        ["", "first", "last"],
        ["a", "1 (step 1)", "3 (step 2)"],
        ["b", "2 (step 1)", "2 (step 1)"],
        ["c", "0.1235 (step 5)", "0.1235 (step 5)"],
    ]
    assert Page(first_and_last([])).rows == [["", "first", "last"]]


# --- stage 2


def test_the_page_of_stage_2_shows_the_most_wrong_pairs_first(tmp_path):
    chosen = torch.tensor([3.0, -1.0, 0.5, 0.5] + [-0.1] * 12)
    rejected = torch.tensor([1.0, 2.0, 0.5, 0.75] + [0.0] * 12)
    rows = [{"prompt": messages(f"q{i}"), "chosen": f"good {i}", "rejected": f"bad {i}"} for i in range(16)]
    rows[1] = {"prompt": messages(EVIL), "chosen": EVIL, "rejected": "x" * 400}
    (tmp_path / "config.yaml").write_text(f"lr: 1.0e-4\ndata: {EVIL}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.7}\n{"step": 9, "loss": 0.25, "margin": 1.5}\n')
    train_reward.write_report(
        tmp_path, train_reward.pair_metrics(chosen, rejected, list(range(len(chosen)))), rows, (chosen, rejected)
    )
    text = (tmp_path / "report.html").read_text()
    read = Page(text)
    pairs = [row for row in read.rows if len(row) == 3 and row[0] not in ("", "loss", "margin")]
    assert pairs[:4] == [
        ["prompt", "chosen, score", "rejected, score"],
        [EVIL, f"{EVIL}\n(-1.00)", "x" * 400 + "\n(+2.00)"],
        ["q3", "good 3\n(+0.50)", "bad 3\n(+0.75)"],
        ["q4", "good 4\n(-0.10)", "bad 4\n(+0.00)"],
    ]
    assert len(pairs) == 1 + 10 and "script" not in read.tags
    # of 16 pairs one is right and one a tie: 1.5 / 16, by Wilson 0.1724 +- 0.1505
    assert "Held-out accuracy 0.094 (95% interval 0.022 to 0.323, 16 pairs)" in read.text
    assert ["loss", "0.7 (step 1)", "0.25 (step 9)"] in read.rows and text.count("<svg") == 1
    assert f"lr: 1.0e-4\ndata: {EVIL}" in read.text


def test_pairs_that_are_right_are_not_shown_as_wrong(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    scores = torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])
    rows = [{"prompt": messages("q"), "chosen": "good", "rejected": "bad"}] * 2
    train_reward.write_report(tmp_path, train_reward.pair_metrics(*scores, list(range(len(scores[0])))), rows, scores)
    text = (tmp_path / "report.html").read_text()
    assert "accuracy 1.000" in text and "wrong" not in text and "good" not in text


def test_stage_2_writes_its_page(tmp_path, tiny, preferences):
    from utils.config import LoraOptions, ModelConfig

    cfg = train_reward.RewardTrainConfig(
        model=ModelConfig(tiny, dtype="float32"),
        data=preferences,
        output_dir=str(tmp_path / "out"),
        lora=LoraOptions(r=2),
        max_pairs=32,
        lr=0.0,  # so that about half of the pairs are wrong
        report_to="none",
    )
    result = train_reward.train(cfg)
    text = (tmp_path / "out" / "report.html").read_text()
    read = Page(text)
    low, high = result["accuracy_ci95"]
    assert (
        f"accuracy {result['accuracy']:.3f} (95% interval {low:.3f} to {high:.3f}, {result['n']} pairs)" in read.text
    )
    wrong = [row for row in read.rows if len(row) == 3 and re.fullmatch(r"q\d+", row[0])]
    gaps = [float(re.search(r"\((.*)\)$", row[1])[1]) - float(re.search(r"\((.*)\)$", row[2])[1]) for row in wrong]
    assert wrong and all("yes" in row[1] and "no" in row[2] for row in wrong)
    assert max(gaps) <= 0.01 and all(a <= b + 0.011 for a, b in zip(gaps, gaps[1:]))
    assert f"path: {tiny}" in read.text and json.loads((tmp_path / "out" / "report.json").read_text()) == result


# --- stage 3


@pytest.fixture
def run(tmp_path, tiny):
    """A run in its third step of 9, whose folder holds metrics and samples of two steps."""
    cfg = ppo_config(tiny, output_dir=str(tmp_path), total_steps=9)
    rows = [{"prompt": messages(EVIL)}, {"prompt": messages("second")}]
    rollouts = [Rollout(i % 2, [5], [6], f"{EVIL} {i}", True, score=i / 4) for i in range(12)]
    run = run_of(cfg, None, None, step=3, rows=rows, rollouts=rollouts, total_steps=9)
    (tmp_path / "config.yaml").write_text(f"data: {EVIL}\n")
    lines = [{"step": i, "objective/score_mean": i / 2, "policy/loss": -1.0, "policy/kl_loss": 0.1} for i in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    samples = [
        {"step": step, "prompt": f"held {i}", "response": EVIL, "score": step + i} for step in (1, 2) for i in range(3)
    ]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    return run


def test_the_page_of_stage_3_has_curves_samples_numbers_and_configuration(run):
    write_report(run)
    text = (run.folder / "report.html").read_text()
    read = Page(text)
    assert "Step 2 of 9" in read.text and text.count("<svg") == 1 and "script" not in read.tags
    rollouts = [[(EVIL, "second")[i % 2], f"{EVIL} {i}\n({i / 4:+.2f})"] for i in range(8)]
    held_out = [[f"held {i}", f"{EVIL}\n({2 + i:+.2f})"] for i in range(3)]
    header = [["prompt", "response, score"]]
    assert read.rows[: 9 + 4] == header + rollouts + header + held_out
    assert "Held-out prompts, step 2" in read.text
    assert ["objective/score_mean", "0.5 (step 1)", "1 (step 2)"] in read.rows
    assert f"data: {EVIL}" in read.text


def test_a_page_is_not_written_more_often_than_it_pays(run, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(train_ppo.time, "time", lambda: clock[0])
    file, written = run.folder / "report.html", []
    for seconds, pause in ((0, 60), (59, 60), (1, 60), (10, 0), (30, 60), (31, 60)):
        clock[0] += seconds
        file.unlink(missing_ok=True)
        write_report(run, pause)
        written.append(file.exists())
    assert written == [True, False, True, True, False, True]
    assert not list(run.folder.glob(".report*"))


def test_other_ranks_write_no_page(run):
    run.accelerator = dataclasses.make_dataclass("Rank", [("is_main_process", bool)])(False)
    write_report(run)
    assert not (run.folder / "report.html").exists()


def test_stage_3_writes_its_page_while_it_runs(tmp_path, tiny, preferences, monkeypatch):
    pages, whole = [], train_ppo.write_text
    monkeypatch.setattr(train_ppo, "write_text", lambda file, text: pages.append(text) or whole(file, text))
    monkeypatch.setattr(train_ppo, "finish", lambda run: pages.append("saved"))
    train_ppo.train(base_config(tiny, preferences, tmp_path / "out", total_steps=2, ppo_epochs=1))
    assert "Step 1 of 2" in pages[0] and "Rollouts of the last step" in pages[0]
    last = (tmp_path / "out" / "report.html").read_text()
    assert pages[-2:] == [last, "saved"] and "Step 2 of 2" in last
    assert Page(last).rows[1][0].startswith("q") and f"path: {tiny}" in last


def test_a_page_reads_answers_with_any_line_break_and_skips_half_a_line(tmp_path):
    """U+2028 and U+0085 end a line for str.splitlines, but not in a .jsonl; a killed run can leave half a line."""
    answers = [{"step": 2, "prompt": "q", "response": f"one{mark}two", "score": 0.5} for mark in "\u2028\x85"]
    lines = [json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers]
    (tmp_path / "samples.jsonl").write_text("".join(lines) + '{"step": 3, "prom', encoding="utf-8")
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    run = SimpleNamespace(
        is_main=True, reported=0.0, folder=tmp_path, state={"step": 2}, total_steps=3, rollouts=[], rows=[]
    )
    train_ppo.write_report(run)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Held-out prompts, step 2" in page and all(answer["response"] in page for answer in answers)


@pytest.mark.parametrize("steps, points", [(1, 1), (2000, 2000), (2001, 1001), (100_000, 2000)])
def test_long_runs_make_no_long_curves(figures, steps, points):
    curves_svg([{"step": i, "a": float(i % 9)} for i in range(steps)], [("a",)])
    assert len(figures[0].axes[0].lines[0].get_xdata()) == points


def test_pictures_are_the_same_for_the_same_data():
    metrics = [{"step": i, "a": i / 2} for i in range(3)]
    assert curves_svg(metrics, [("a",)]).startswith('<div class="figure"><svg style="min-width:64em" ')
    assert curves_svg(metrics, [("a",)]) == curves_svg(metrics, [("a",)]) != curves_svg(metrics[:2], [("a",)])
    assert curves_svg(metrics, [("b",)]) == "" == curves_svg([], [("a",)])
    assert io.StringIO(curves_svg(metrics, [("a",)])).read().count("fill: #ffffff") == 0  # clear, so dark in the dark
