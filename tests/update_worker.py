"""Run under accelerate launch: one PPO update and one reward update on given data; rank 0 saves the weights.

    update_worker.py MODEL OUTPUT CRITIC
"""

import sys
from pathlib import Path

import torch

from test_models import ppo_config, stir
from test_ppo import given_rollouts
from train_ppo import AlgorithmConfig, CriticConfig, build_roles, experience, update
from train_reward import RewardTrainConfig, build_model, optimizer_step
from utils.config import LoraOptions, ModelConfig
from utils.launch import start_accelerator


def ppo(tiny, critic, accelerator):
    cfg = ppo_config(
        tiny, train_batch_size=8, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=1, critic=CriticConfig(kind=critic),
        algorithm=AlgorithmConfig(entropy_coef=0.1),
    )
    model = build_roles(cfg, accelerator.device)
    stir(model, 0.1)
    rows = given_rollouts(cfg, model)
    groups = model.groups()
    optimizer = torch.optim.SGD([{"params": groups["policy"]}, {"params": groups["critic"]}], lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    tensors, _ = experience(rows, cfg, 0.1)
    metrics = update(rows, tensors, wrapped, optimizer, cfg, 1, 0, accelerator)
    return {"weights": {n: p.detach() for n, p in model.trainable().items()}, "metrics": metrics}


def reward(tiny, accelerator):
    """Seven pairs: with two ranks and micro-batches of two, one rank runs a pair short."""
    cfg = RewardTrainConfig(model=ModelConfig(tiny, dtype="float32"), data="", output_dir="", lora=LoraOptions(r=4), micro_batch_size_per_gpu=2)
    model = build_model(cfg, accelerator.device)
    stir(model, 0.1)
    torch.manual_seed(5)
    pairs = [
        {"id": str(i), "chosen": torch.randint(3, 259, (3 + i,)).tolist(), "rejected": torch.randint(3, 259, (9 - i,)).tolist(), "margin": None} for i in range(7)
    ]
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    metrics = optimizer_step(wrapped, optimizer, pairs, 0, cfg, accelerator)
    return {"weights": {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}, "metrics": metrics}


if __name__ == "__main__":
    tiny, output, critic = sys.argv[1:]
    accelerator = start_accelerator(Path("."), "none", 0)
    result = {"world": accelerator.num_processes, "ppo": ppo(tiny, critic, accelerator), "reward": reward(tiny, accelerator)}
    if accelerator.is_main_process:
        torch.save(result, output)
    accelerator.end_training()
