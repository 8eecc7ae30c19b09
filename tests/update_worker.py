"""Run under accelerate launch: PPO and reward updates on given data; rank 0 saves weights and metrics of each case.

update_worker.py MODEL OUTPUT
"""

import sys
from pathlib import Path

import torch
from helpers import given_rollouts, ppo_config, run_of, stir

from train_ppo import AlgorithmConfig, CriticConfig, RolloutConfig, build_roles, experience, new_state, update
from train_reward import RewardTrainConfig, build_model, micro_batches, optimizer_step
from utils.checkpoint import trained_parameters, training_state
from utils.config import LoraOptions, ModelConfig
from utils.guards import GO_ON, GuardConfig, Guards, Verdict
from utils.launch import load_device, prepare, start_accelerator
from utils.run import leave


def result(model, optimizer, metrics):
    return {
        "metrics": metrics,
        "weights": {n: training_state(p, optimizer)["weight"] for n, p in trained_parameters(model).items()},
    }


class FirstIsBad(Guards):
    """Skips the first optimizer step of the run."""

    def check_gradients(self, step, norms):
        self.state["skips"] += 1
        return GO_ON if self.state["skips"] > 1 else Verdict("skip step")


def ppo(accelerator, critic: CriticConfig, adam=False, steps: int = 1, skip=False, idle: int = 0, **changes):
    """idle: first steps whose gradients are exactly 0, which Adam counts all the same."""
    cfg = ppo_config(
        tiny,
        train_batch_size=8,
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=1,
        critic=critic,
        **{"algorithm": AlgorithmConfig(entropy_coef=0.1)} | changes,
    )
    model = build_roles(cfg, accelerator.device, load_device(accelerator))
    stir(model, 0.1 if cfg.lora else 0.02)
    rows = given_rollouts(cfg, model)
    groups = [{"params": parameters} for parameters in model.groups().values()]
    # a large epsilon, so that gradients that are nothing but rounding do not become whole steps
    optimizer = (
        torch.optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.0) if adam else torch.optim.SGD(groups, lr=0.1)
    )
    roles = model
    model, optimizer = prepare(accelerator, model, optimizer, 1)
    tensors, _ = experience(rows, cfg, 0.1)
    guards = FirstIsBad(GuardConfig(), Path("."), new_state(cfg), False) if skip else None
    for step in range(1, steps + 1):
        run = run_of(cfg, roles, optimizer, guards, step, model=model, accelerator=accelerator)
        nothing = {"advantages": torch.zeros_like(tensors["advantages"])}
        metrics, _ = update(run, rows, tensors | nothing if step <= idle else tensors)
    return result(model, optimizer, metrics)


def reward(accelerator, lora: LoraOptions | None):
    """Seven pairs in micro-batches of two: of two ranks one has two pairs, the other five, so three rounds."""
    cfg = RewardTrainConfig(
        model=ModelConfig(tiny, dtype="float32"), data="", output_dir="", lora=lora, micro_batch_size_per_gpu=2
    )
    model = build_model(cfg, accelerator.device, load_device(accelerator))
    stir(model, 0.1 if lora else 0.02)
    torch.manual_seed(5)
    pairs = [
        {
            "id": str(i),
            "chosen": torch.randint(3, 259, (3 + i,)).tolist(),
            "rejected": torch.randint(3, 259, (9 - i,)).tolist(),
            "margin": None,
        }
        for i in range(7)
    ]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model, optimizer = prepare(accelerator, model, optimizer, 2)
    shares = {1: [pairs], 2: [pairs[:2], pairs[2:]], 3: [pairs[:2], [], pairs[2:]]}
    mine = shares[accelerator.num_processes][accelerator.process_index]
    metrics = optimizer_step(model, optimizer, micro_batches(mine, 0, 2), cfg, accelerator)
    return result(model, optimizer, metrics)


if __name__ == "__main__":
    tiny, output = sys.argv[1:]
    accelerator = start_accelerator(Path("."), "none", 0)
    results = {
        "critic adapter": ppo(accelerator, CriticConfig()),
        "critic shared": ppo(accelerator, CriticConfig("shared")),
        "full": ppo(accelerator, CriticConfig("shared"), lora=None),
        "separate": ppo(accelerator, CriticConfig("separate")),
        "full separate": ppo(accelerator, CriticConfig("separate"), lora=None),
        "grpo": ppo(
            accelerator,
            CriticConfig(),
            rollout=RolloutConfig(n=4),
            algorithm=AlgorithmConfig("grpo", kl_in="loss", clip_ratio_c=3.0),
        ),
        "checkpointing": ppo(
            accelerator, CriticConfig(), model=ModelConfig(tiny, dtype="float32", gradient_checkpointing=True)
        ),
        "warm-up": ppo(accelerator, CriticConfig("shared", warmup_steps=1), adam=True, steps=3),
        "first gradients 0": ppo(
            accelerator,
            CriticConfig(),
            adam=True,
            steps=4,
            idle=3,
            rollout=RolloutConfig(n=4),
            algorithm=AlgorithmConfig("rloo"),
        ),
        "skipped": ppo(accelerator, CriticConfig(), adam=True, skip=True),
        "reward": reward(accelerator, LoraOptions(r=4)),
        "reward full": reward(accelerator, None),
    }
    if accelerator.is_main_process:
        torch.save({"world": accelerator.num_processes, "results": results}, output)
    accelerator.end_training()
    leave(0)
