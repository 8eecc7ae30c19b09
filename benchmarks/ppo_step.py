"""Seconds by phase and peak memory of one PPO step of the demo model. `make bench`

Prints the median of three steps after one to warm up, the number of copies of the base model in memory, and
the largest fp32 tensor that the update holds, beside what (micro-batch, tokens, vocabulary) would be.
"""

import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[0] = str(ROOT)  # not this folder, whose data.py would hide data/

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from prepare_data import DataConfig, prepare  # noqa: E402
from train_ppo import PPOConfig, Rollout, build_roles, make_batch, train  # noqa: E402
from utils.config import parse_config  # noqa: E402
from utils.tracking import peak_memory_gb  # noqa: E402


class LargestFloat32(TorchDispatchMode):
    """Remembers the largest fp32 tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.dtype == torch.float32
                and tensor.is_contiguous()
                and "view" not in str(function)
                and tensor.untyped_storage().data_ptr() not in self.known
            ):
                self.numel = max(self.numel, tensor.numel())
        return out

    def watch(self, model):
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return self


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = f"{folder}/data"
        model = "models/SmolLM2-135M-Instruct.Q4_1.gguf"
        prepare(
            DataConfig(
                source="data/demo/preferences.jsonl",
                tokenizer=model,
                output_dir=data,
                max_prompt_length=48,
                max_response_length=48,
            )
        )
        options = [
            "--config",
            "configs/demo_ppo.yaml",
            "--data",
            data,
            "--output_dir",
            f"{folder}/ppo",
            "--reward_model.path",
            "null",
            "--reward_model.style",
            "function",
            "--reward_model.function",
            "data.demo.gold:score",
            "--critic.kind",
            "adapter",
            "--total_steps",
            "4",
            "--report_to",
            "none",
        ]
        cfg = parse_config(PPOConfig, options)
        steps = train(cfg)[1:]
        print(f"\none PPO step, {cfg.train_batch_size} responses, median of {len(steps)} steps (seconds)")
        for phase in ("rollout", "score", "logprobs", "update", "total"):
            print(f"  {phase:10}{statistics.median(step[f'time/{phase}'] for step in steps):8.2f}")
        print(f"  peak memory {peak_memory_gb():.2f} GB")

        roles = build_roles(cfg, torch.device("cpu"))
        base = sum(p.numel() for n, p in roles.named_parameters() if "lora_" not in n and "head" not in n)
        print(f"  weights besides adapters and heads: {base:,} = one base model for policy, reference and critic")
        prompt, response = 27, cfg.max_response_length
        rows = [Rollout(0, [5] * prompt, [6] * response, "", True)] * 32
        largest = LargestFloat32().watch(roles)
        with largest:
            out = roles(make_batch(rows, 0, "cpu"), ("policy", "critic"), 1.0)
            (out["logprobs"].sum() + out["values"].sum()).backward()
        whole = len(rows) * (prompt + response) * roles.lm("policy").config.vocab_size
        print(
            f"  largest fp32 tensor in an update of 32 responses: {largest.numel * 4 / 2**20:.0f} MiB "
            f"(all logits would be {whole * 4 / 2**20:.0f} MiB)"
        )


if __name__ == "__main__":
    main()
