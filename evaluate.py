"""Stage 4: is the new policy better than the one it started from?

    python evaluate.py --config configs/demo_eval.yaml
    python evaluate.py --policy.path out/ppo/final --baseline.path MODEL --data out/data \\
        --reward_model.path out/reward/final --output_dir out/eval

Both models answer the same held-out prompts. Writes `report.json` and a self-contained `report.html`.
"""

import html
import json
import math
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))  # this utils, not that of another folder

from utils.config import AtLeast0, Count, ModelConfig, UserError, WholeNumber, check_ranges
from utils.data import decode_response, encode_prompts, load_prompts
from utils.files import write_json, write_text
from utils.launch import gather_lists, split_for_rank, start_accelerator
from utils.models import (
    LOGITS_CHUNK,
    arithmetic,
    eos_ids,
    last_hidden,
    load_causal_lm,
    load_tokenizer,
    max_positions,
    project,
)
from utils.report import curves_svg, figure_svg, legend_above, new_figure, page, table
from utils.rewards import (
    SCORED_BY,
    RewardConfig,
    check_ground_truth,
    check_reward_config,
    function_scorer,
    open_scorer,
    rule_scorer,
)
from utils.rollout import Sampling, generate
from utils.run import alone, open_output_dir, record_run, run_stage
from utils.tensors import longest_first, pad_rows
from utils.tracking import peak_memory_gb, progress_bar, read_metrics, say

BOOTSTRAP_SAMPLES = 10_000
Z95 = 1.959964  # of a 95% interval


@dataclass(frozen=True)
class EvaluateConfig:
    """All of a comparison."""

    policy: ModelConfig
    """the new policy"""
    baseline: ModelConfig
    """what it is compared with, usually the model it was trained from"""
    data: str
    """a folder that prepare_data.py wrote; its test split is used"""
    output_dir: str
    """folder to write"""
    reward_model: RewardConfig | None = None
    """scores both models' responses: metric reward_score"""
    rules: list[Literal["gsm8k", "gsm8k_strict"]] = field(default_factory=list)
    """rules to report the accuracy of"""
    gold_function: str | None = None
    """module:name of a function that knows the true score: metric gold_score"""
    max_prompts: Count | None = None
    """use only the first so many test prompts"""
    max_prompt_length: Count = 512
    """tokens; a longer prompt in the data is an error"""
    max_response_length: Count = 256
    """tokens to generate at most"""
    temperature: AtLeast0 = 0.0
    """of the responses; 0 = greedy"""
    micro_batch_size_per_gpu: Count = 16
    """responses a forward pass on one rank"""
    show_samples: WholeNumber = 2
    """answers to show side by side on the terminal: those to the first test prompts"""
    overwrite: bool = False
    """replace the output of an earlier run"""
    seed: WholeNumber = 0
    """of sampling and of the bootstrap"""


def check_config(cfg: EvaluateConfig) -> None:
    """Everything that can be refused before a model is loaded."""
    check_ranges(cfg)
    if cfg.reward_model is not None:
        check_reward_config(cfg.reward_model)
    if cfg.reward_model is None and not cfg.rules and cfg.gold_function is None:
        raise UserError("nothing to compare by: give reward_model.path, rules or gold_function")
    for name in ("policy", "baseline"):
        if getattr(cfg, name).gradient_checkpointing:
            raise UserError(f"{name}.gradient_checkpointing has no effect where nothing is trained; remove it")


# ---------------------------------------------------------------------------------------------------- metrics


def bootstrap_interval(differences: list[float], seed: int) -> list[float]:
    """95% percentile-bootstrap interval of the mean over prompts (Efron 1979), in constant memory."""
    import numpy

    values, generator = numpy.asarray(differences, dtype=float), numpy.random.default_rng(seed)
    chunk = max(1, 1_000_000 // len(values))  # samples at a time
    sizes = [min(chunk, BOOTSTRAP_SAMPLES - i) for i in range(0, BOOTSTRAP_SAMPLES, chunk)]
    means = [values[generator.integers(0, len(values), (size, len(values)))].mean(1) for size in sizes]
    low, high = numpy.percentile(numpy.concatenate(means), [2.5, 97.5])
    return [round(float(low), 5), round(float(high), 5)]


def paired_share_interval(more: int, fewer: int, n: int) -> list[float]:
    """95% score interval of (more - fewer) / n, where that many of n pairs changed up and down (Tango 1998).

    Unlike the bootstrap it holds for rare changes, and without any.
    """

    def lower(up: int, down: int) -> float:
        low, high = -1.0, (up - down) / n
        while high - low > 1e-9:
            d = (low + high) / 2
            b = (2 * n - up + down) * d - up - down
            rate = (math.sqrt(max(0.0, b * b + 8 * n * down * d * (1 - d))) - b) / (4 * n)  # of downs, given d
            if up - down - n * d > Z95 * math.sqrt(n * max(0.0, 2 * rate + d - d * d)):
                low = d
            else:
                high = d
        return low

    return [lower(more, fewer), -lower(fewer, more)]


def compare(baseline: list[float], policy: list[float], seed: int) -> dict:
    """{baseline, policy, difference, ci95 of the difference, n}; the lists are paired by prompt.

    What is 0 or 1 (or -1 or 1) for each prompt, or a win, tie or loss, is compared as a share, all else as a mean.
    """
    n = len(policy)
    mean_b, mean_p = sum(baseline) / n, sum(policy) / n
    differences, values = [p - b for b, p in zip(baseline, policy)], {*baseline, *policy}
    win_rate = {*baseline} == {0.5} and values <= {0.0, 0.5, 1.0}
    step = 1.0 if values <= {0.0, 1.0} else 2.0 if values <= {-1.0, 1.0} else 0.5 if win_rate else None
    if step is None:
        interval = bootstrap_interval(differences, seed)
    else:
        ends = paired_share_interval(sum(d > 0 for d in differences), sum(d < 0 for d in differences), n)
        interval = [round(step * end, 5) for end in ends]
    return {
        "baseline": round(mean_b, 5),
        "policy": round(mean_p, 5),
        "difference": round(mean_p - mean_b, 5),
        "ci95": interval,
        "n": n,
    }


def wins(baseline: list[float], policy: list[float]) -> list[float]:
    """1 where the policy's score is higher, 0 where it is lower, 0.5 for a tie."""
    return [0.5 + 0.5 * (p > b) - 0.5 * (p < b) for b, p in zip(baseline, policy)]


@torch.no_grad()
def kl_per_token(policy, baseline, prompts, responses, micro_batch_size: int, bar=None) -> list[float]:
    """KL(policy || baseline) of each response: exact over the vocabulary, mean over its tokens, nats, temperature 1.

    prompts, responses: token ids, one list a row; no response is empty.
    """
    device, dtype = (getattr(next(policy.parameters()), name) for name in ("device", "dtype"))
    known = min(model.get_input_embeddings().weight.shape[0] for model in (policy, baseline))
    responses = [known_part(ids, known) for ids in responses]
    results = [0.0] * len(prompts)
    for part in longest_first([len(p) + len(r) for p, r in zip(prompts, responses)], micro_batch_size):
        ids, mask = pad_rows([prompts[i] + responses[i] for i in part], 0, torch.long)  # (B, S); the mask hides the 0s
        starts = torch.tensor([len(prompts[i]) for i in part])[:, None]
        before = (mask & (torch.arange(ids.shape[1]) >= starts))[:, 1:].to(device)  # states that drew a token
        with arithmetic([policy], dtype):
            h, g = (last_hidden(m, ids.to(device), mask.to(device))[:, :-1][before] for m in (policy, baseline))
            kl = [  # (N,) in all, over the response tokens in row order
                exact_kl(project(policy, h[i : i + LOGITS_CHUNK]), project(baseline, g[i : i + LOGITS_CHUNK]))
                for i in range(0, len(h), LOGITS_CHUNK)
            ]
        for i, tokens in zip(part, torch.cat(kl).cpu().split([len(responses[i]) for i in part])):
            results[i] = tokens.mean().item()
        if bar is not None:
            bar.update(len(part))
    return results


def known_part(response: list[int], known: int) -> list[int]:
    """Up to the first token that is no row of the smaller embedding, which both models draw before, but neither reads.

    Models of one tokenizer can have different numbers of such spare rows; where one is drawn, its place holds a 0.
    """
    end = next((i for i, token in enumerate(response) if token >= known), None)
    return response if end is None else [*response[:end], 0]


def exact_kl(policy_logits: Tensor, baseline_logits: Tensor) -> Tensor:
    """KL(policy || baseline) of next-token distributions over their common vocabulary, nats, fp32: 2 x (N, V) -> (N,).

    Where one has more rows than the other, they are left out, and the rest is a distribution again.
    """
    common = min(policy_logits.shape[-1], baseline_logits.shape[-1])
    p, q = (logits[:, :common].float().log_softmax(-1) for logits in (policy_logits, baseline_logits))
    return (p.exp() * (p - q)).sum(-1)


# ------------------------------------------------------------------------------------- 1 to 3 answers, KL, scores


def answer(cfg: EvaluateConfig, rows: list[dict], accelerator) -> list[dict]:
    """{prompt, baseline, policy} of each row.

    A side holds `response`, `response_length` (tokens, with eos) and `truncated`. Where both models have one
    vocabulary, policy also holds `kl_per_token`.
    """
    results = [{"prompt": row["prompt"][-1]["content"]} for row in rows]
    models, tokenizers = {}, {}
    for name, model_cfg in (("baseline", cfg.baseline), ("policy", cfg.policy)):
        tokenizer = tokenizers[name] = load_tokenizer(model_cfg.path, model_cfg.trust_remote_code)
        with accelerator.main_process_first():
            model = models[name] = load_causal_lm(model_cfg, accelerator.device)
        prompts = encode_prompts(tokenizer, rows, cfg.max_prompt_length, cfg.max_response_length, max_positions(model))
        torch.manual_seed(cfg.seed + accelerator.process_index)
        stop_ids = eos_ids(tokenizer, model)
        how = Sampling(cfg.max_response_length, cfg.temperature, stop_ids, tokenizer.pad_token_id)
        with progress_bar(label=f"{name} answers", unit="prompts", total=len(rows)) as bar:
            responses = generate(model, prompts, how, bar)
        for result, ids in zip(results, responses):
            result[name] = {
                "response": decode_response(tokenizer, ids),
                "response_length": len(ids),
                "truncated": ids[-1] not in stop_ids,
            }
    if tokenizers["policy"].get_vocab() == tokenizers["baseline"].get_vocab():
        with progress_bar(label="KL", unit="responses", total=len(rows)) as bar:
            micro = cfg.micro_batch_size_per_gpu
            kl = kl_per_token(models["policy"], models["baseline"], prompts, responses, micro, bar)
        for result, value in zip(results, kl):
            result["policy"]["kl_per_token"] = value
    return results


def score(cfg: EvaluateConfig, rows: list[dict], results: list[dict], device: torch.device) -> list[str]:
    """Add every score that the configuration asks for to both sides of the results; returns the scores' names."""
    scorers = {}
    if cfg.reward_model is not None:
        micro, dtype = cfg.micro_batch_size_per_gpu, cfg.policy.dtype
        scorers["reward_score"] = open_scorer(cfg.reward_model, micro, device, dtype, scaled=True)
    if cfg.gold_function is not None:
        scorers["gold_score"] = function_scorer(cfg.gold_function)
    scorers |= {rule: rule_scorer(rule) for rule in cfg.rules}
    different = [i for i, r in enumerate(results) if r["policy"]["response"] != r["baseline"]["response"]]
    for metric, scorer in scorers.items():
        for name, fresh in (("baseline", range(len(rows))), ("policy", different)):
            mine = [rows[i] for i in fresh]
            columns = {column: [row.get(column) for row in mine] for column in SCORED_BY}
            columns["ended"] = [not results[i][name]["truncated"] for i in fresh]
            texts = [results[i][name]["response"] for i in fresh]
            values = scorer([row["prompt"] for row in mine], texts, columns) if mine else []
            for i, value in zip(fresh, values):
                results[i][name][metric] = value
        for result in results:  # an equal answer is scored once, so that it is a tie whatever scores
            result["policy"].setdefault(metric, result["baseline"][metric])
    return list(scorers)


def summarize(cfg: EvaluateConfig, results: list[dict], scored_by: list[str]) -> dict:
    """The report: each metric of all ranks' results compared, with the win rate by the best score that there is."""
    sides = {
        metric: ([r["baseline"][metric] for r in results], [r["policy"][metric] for r in results])
        for metric in [*scored_by, "response_length", "truncated"]
    }
    comparison = {metric: compare(*side, cfg.seed) for metric, side in sides.items()}
    judge = next((m for m in ("gold_score", "reward_score") if m in scored_by), scored_by[0])
    half = [0.5] * len(results)
    comparison["win_rate"] = compare(half, wins(*sides[judge]), cfg.seed)
    if all("kl_per_token" in r["policy"] for r in results):
        kl = [r["policy"]["kl_per_token"] for r in results]
        comparison["kl_per_token"] = compare([0.0] * len(results), kl, cfg.seed)
        comparison["kl_per_token"]["ci95"] = bootstrap_interval(kl, cfg.seed)  # 0s are no share
    return {
        "comparison": comparison,
        "win_rate_judge": judge,
        "temperature": cfg.temperature,
        "policy": cfg.policy.path,
        "baseline": cfg.baseline.path,
        "samples": results,
    }


# ---------------------------------------------------------------------------------------------------- 4 report

LABELS = {
    "gold_score": "gold score",
    "reward_score": "reward score",
    "win_rate": "win rate",
    "kl_per_token": "KL per token (nats)",
    "response_length": "response length (tokens)",
    "truncated": "cut off (share)",
}


def table_rows(report: dict) -> list[list[str]]:
    rows = []
    for metric in [
        *(m for m in LABELS if m in report["comparison"]),
        *(m for m in report["comparison"] if m not in LABELS),
    ]:
        c = report["comparison"][metric]
        low, high = c["ci95"]
        rows.append(
            [
                LABELS.get(metric, metric),
                f"{c['baseline']:.3f}",
                f"{c['policy']:.3f}",
                f"{c['difference']:+.3f}",
                f"[{low:+.3f}, {high:+.3f}]",
            ]
        )
    return rows


def print_report(report: dict, n_samples: int) -> None:
    n = len(report["samples"])
    say(f"\n{n} held-out prompts; win rate judged by {report['win_rate_judge']}")
    say(f"{'':26}{'before':>9}{'after':>9}{'change':>9}   95% interval of the change")
    for label, before, after, change, interval in table_rows(report):
        say(f"{label:26}{before:>9}{after:>9}{change:>9}   {interval}")
    for sample in report["samples"][:n_samples]:
        say(f"\n> {'…' * (len(sample['prompt']) > 200)}{sample['prompt'][-200:]}")
        sides = [textwrap.wrap(sample[name]["response"], 46) or ["(empty)"] for name in ("baseline", "policy")]
        say(f"  {'before':48}after")
        for i in range(max(map(len, sides))):
            left, right = (side[i] if i < len(side) else "" for side in sides)
            say(f"  {left:48}{right}")
    say()


def training_curves(policy_path: str) -> list[dict]:
    """Metrics of the PPO run that wrote the policy, where its folder still stands around it."""
    return read_metrics(Path(policy_path).parent) if Path(policy_path).is_dir() else []


def html_report(report: dict, curves: list[dict]) -> str:
    """One page without outside links: table, score histograms, training curves, all samples side by side."""
    scores = [m for m in report["comparison"] if m in report["samples"][0]["baseline"] and m != "truncated"]
    figure = new_figure(4 * len(scores), 3)
    for axis, metric in zip(figure.subplots(1, len(scores), squeeze=False)[0], scores):
        values = [[s[name][metric] for s in report["samples"]] for name in ("baseline", "policy")]
        axis.hist(values, bins=15, label=["before", "after"])
        axis.set_xlabel(LABELS.get(metric, metric))
        legend_above(axis)
    names = ["objective/score_mean", "objective/kl_per_token", "rollout/response_length_mean", "objective/entropy"]
    training = curves_svg(curves, [(name,) for name in names])
    judge = report["win_rate_judge"]
    samples = "".join(
        f"<tr><td>{html.escape(s['prompt'])}</td>"
        + "".join(
            f"<td>{html.escape(s[name]['response'])}<br><small>{s[name][judge]:.3f}</small></td>"
            for name in ("baseline", "policy")
        )
        + "</tr>"
        for s in report["samples"]
    )
    return page(
        "Before and after",
        f"""
<p>Baseline <code>{html.escape(report["baseline"])}</code>, policy <code>{html.escape(report["policy"])}</code>;
{len(report["samples"])} held-out prompts, temperature {report["temperature"]}; win rate judged by {judge}.
Intervals are 95% intervals of the change, over prompts.</p>
{table(["", "before", "after", "change", "95% interval"], table_rows(report))}
<h2>Scores</h2>{figure_svg(figure)}{"<h2>Training</h2>" + training if training else ""}
<h2>All answers</h2><table class="texts"><tr><th>prompt</th><th>before</th><th>after</th></tr>{samples}</table>
<script type="application/json" id="comparison">{json.dumps(report["comparison"])}</script>""",
    )


# --------------------------------------------------------------------------------------------------- evaluate


@alone
def evaluate(cfg: EvaluateConfig) -> dict:
    """Run stage 4; returns the report that is also written to report.json."""
    started = time.time()
    check_config(cfg)
    accelerator = start_accelerator(Path(cfg.output_dir), "none", cfg.seed)
    rows = load_prompts(cfg.data, "test")[: cfg.max_prompts]
    if cfg.rules or (cfg.reward_model and any(part.style == "rule" for part in cfg.reward_model.parts)):
        check_ground_truth(rows)
    mine = split_for_rank(rows, accelerator.process_index, accelerator.num_processes)

    # 1. both models answer; 2. KL along the policy's answers
    results = answer(cfg, mine, accelerator)

    # 3. scores
    scored_by = score(cfg, mine, results, accelerator.device)
    results = gather_lists(results)

    # 4. report
    report = summarize(cfg, results, scored_by)
    if accelerator.is_main_process:
        folder = open_output_dir(cfg.output_dir, cfg.overwrite)
        write_json(folder / "report.json", report)
        write_text(folder / "report.html", html_report(report, training_curves(cfg.policy.path)))
        record_run(folder, cfg, started)
        print_report(report, cfg.show_samples)
        memory = peak_memory_gb(accelerator.device)
        say(f"peak memory {memory:.2f} GB; report: {folder / 'report.html'}")
    accelerator.end_training()
    return report


if __name__ == "__main__":
    run_stage(evaluate, EvaluateConfig)
