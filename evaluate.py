"""Stage 4: is the new policy better than the one it started from?

    python evaluate.py --config configs/demo_eval.yaml
    python evaluate.py --policy.path out/ppo/final --baseline.path MODEL --data out/data \\
        --reward_model.path out/reward/final --output_dir out/eval

Both models answer the same held-out prompts. Writes `report.json` and a self-contained `report.html`.
"""

import html
import json
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from utils.config import AtLeast0, Count, ModelConfig, UserError, WholeNumber, check_ranges
from utils.data import decode_response, encode_prompts, load_prompts, show
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
from utils.report import curves_svg, figure_svg, new_figure, page, table
from utils.rewards import (
    RewardConfig,
    check_ground_truth,
    check_reward_config,
    function_scorer,
    open_scorer,
    rule_scorer,
)
from utils.rollout import Sampling, generate
from utils.run import check_output_dir, open_output_dir, record_run, run_stage
from utils.tensors import longest_first, pad_rows
from utils.tracking import peak_memory_gb, progress_bar, read_metrics

BOOTSTRAP_SAMPLES = 10_000


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
    """95% percentile-bootstrap interval of the mean over prompts (Efron 1979)."""
    import numpy

    values = numpy.asarray(differences, dtype=float)
    draws = numpy.random.default_rng(seed).integers(0, len(values), (BOOTSTRAP_SAMPLES, len(values)))
    low, high = numpy.percentile(values[draws].mean(1), [2.5, 97.5])
    return [round(float(low), 5), round(float(high), 5)]


def compare(baseline: list[float], policy: list[float], seed: int) -> dict:
    """{baseline, policy, difference, ci95 of the difference, n}; the lists are paired by prompt."""
    n = len(policy)
    mean_b, mean_p = sum(baseline) / n, sum(policy) / n
    return {
        "baseline": round(mean_b, 5),
        "policy": round(mean_p, 5),
        "difference": round(mean_p - mean_b, 5),
        "ci95": bootstrap_interval([p - b for b, p in zip(baseline, policy)], seed),
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


def exact_kl(policy_logits: Tensor, baseline_logits: Tensor) -> Tensor:
    """KL(policy || baseline) of next-token distributions, in nats, fp32: (N, V), (N, V) -> (N,)."""
    p, q = policy_logits.float().log_softmax(-1), baseline_logits.float().log_softmax(-1)
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
        scorers["reward_score"] = open_scorer(cfg.reward_model, cfg.micro_batch_size_per_gpu, device, cfg.policy.dtype)
    if cfg.gold_function is not None:
        scorers["gold_score"] = function_scorer(cfg.gold_function)
    scorers |= {rule: rule_scorer(rule) for rule in cfg.rules}
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row.get(name) for row in rows] for name in ("id", "ground_truth", "reference", "metadata")}
    for metric, scorer in scorers.items():
        for name in ("baseline", "policy"):
            texts = [result[name]["response"] for result in results]
            columns["ended"] = [not result[name]["truncated"] for result in results]
            for result, value in zip(results, scorer(prompts, texts, columns)):
                result[name][metric] = value
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
    print(f"\n{n} held-out prompts; win rate judged by {report['win_rate_judge']}")
    print(f"{'':26}{'before':>9}{'after':>9}{'change':>9}   95% interval of the change")
    for label, before, after, change, interval in table_rows(report):
        print(f"{label:26}{before:>9}{after:>9}{change:>9}   {interval}")
    for sample in report["samples"][:n_samples]:
        print(show(f"\n> {'…' * (len(sample['prompt']) > 200)}{sample['prompt'][-200:]}"))
        sides = [textwrap.wrap(sample[name]["response"], 46) or ["(empty)"] for name in ("baseline", "policy")]
        print(f"  {'before':48}after")
        for i in range(max(map(len, sides))):
            left, right = (side[i] if i < len(side) else "" for side in sides)
            print(show(f"  {left:48}{right}"))
    print()


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
        axis.set_title(LABELS.get(metric, metric))
        axis.legend()
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
Intervals are 95% bootstrap intervals of the change, over prompts.</p>
{table(["", "before", "after", "change", "95% interval"], table_rows(report))}
<h2>Scores</h2>{figure_svg(figure)}{"<h2>Training</h2>" + training if training else ""}
<h2>All answers</h2><table><tr><th>prompt</th><th>before</th><th>after</th></tr>{samples}</table>
<script type="application/json" id="comparison">{json.dumps(report["comparison"])}</script>""",
    )


# --------------------------------------------------------------------------------------------------- evaluate


def evaluate(cfg: EvaluateConfig) -> dict:
    """Run stage 4; returns the report that is also written to report.json."""
    started = time.time()
    check_config(cfg)
    check_output_dir(cfg.output_dir, cfg.overwrite)
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
        print(f"peak memory {memory:.2f} GB; report: {folder / 'report.html'}", flush=True)
    accelerator.end_training()
    return report


if __name__ == "__main__":
    run_stage(evaluate, EvaluateConfig)
