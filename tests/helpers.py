"""What several test files use: tiny models and tokenizers, configurations, given rollouts, launching a stage."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from train_ppo import PPOConfig, Rollout, Run, add_logprobs_and_values, new_state
from utils.config import LoraOptions, ModelConfig
from utils.guards import Guards
from utils.rewards import RewardConfig

ROOT = Path(__file__).parent.parent


TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_tokenizer(bos: bool = False):
    """Bytes as tokens, with a chat template; pad == eos, as many chat models have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|unk|>", "<|start|>", "<|end|>"]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(specials + alphabet)}, []))
    tokenizer.add_special_tokens(specials)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<|unk|>",
        eos_token="<|end|>",
        pad_token="<|end|>",
        **({"bos_token": "<|start|>"} if bos else {}),
    )
    fast.chat_template = TEMPLATE
    return fast


def tiny_llama(seed: int = 0, **changes):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    size = dict(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=2,
        pad_token_id=2,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(LlamaConfig(**(size | changes)))


def messages(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


CPU = torch.device("cpu")


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


def ppo_config(path, **changes):
    """Float32 roles with adapters that are not zero, so that roles differ."""
    settings = dict(
        model=ModelConfig(path, dtype="float32"),
        data="",
        output_dir="",
        reward_model=RewardConfig(style="rule", rule="gsm8k"),
        lora=LoraOptions(r=4),
    )
    return PPOConfig(**settings | changes)


def stir(model, scale=0.3):
    """Give all trained weights random values, as if training had happened."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * scale)


def rollouts(lengths=(2, 5, 12, 7, 1, 9)):
    torch.manual_seed(2)
    rows = []
    for i, n in enumerate(lengths):
        prompt, response = torch.randint(3, 259, (4 + i,)).tolist(), torch.randint(3, 259, (n,)).tolist()
        rows.append(Rollout(i, prompt, response, "", True))
    return rows


def base_config(model, data, output_dir, **changes):
    settings = dict(
        model=ModelConfig(model, dtype="float32"),
        data=data,
        output_dir=str(output_dir),
        lora=LoraOptions(r=4),
        reward_model=RewardConfig(style="function", function="test_ppo:letters_a"),
        train_batch_size=8,
        ppo_mini_batch_size=4,
        ppo_micro_batch_size_per_gpu=2,
        max_response_length=8,
        total_steps=4,
        lr=1e-2,
        report_to="none",
    )
    return PPOConfig(**settings | changes)


def given_rollouts(cfg, model):
    """Rollouts of different lengths with scores and with log-probabilities of a somewhat older policy."""
    rows = rollouts((2, 5, 12, 7, 1, 9, 3, 3))
    add_logprobs_and_values(rows, model, cfg, 0, CPU)
    torch.manual_seed(3)
    for row in rows:
        row.score = float(torch.randn(()))
        row.logprobs = [x + 0.1 * float(torch.randn(())) for x in row.logprobs]
        row.values = [float(torch.randn(())) for _ in row.logprobs]
    return rows


def run_of(cfg, roles, optimizer, guards=None, step=1, **changes):
    """A run in its `step`-th step with kl_coef 0.1, for `update`; changes: other fields of Run."""
    state = new_state(cfg) | {"step": step - 1, "draw": step, "kl_coef": 0.1}
    fields = dict(cfg=cfg, roles=roles, model=roles, optimizer=optimizer, state=state, pad_id=0)
    fields["accelerator"] = Accelerator(cpu=True) if "accelerator" not in changes else None
    fields["guards"] = guards or Guards(cfg.guards, Path("."), state, False)
    return Run(**fields | changes)


def weights_of(folder):
    from safetensors.torch import load_file

    return {
        str(f.relative_to(folder)): load_file(f)
        for f in sorted(Path(folder).rglob("*.safetensors"))
        if "checkpoints" not in str(f)
    }


def launch(config, stage, *options, timeout=600, succeeds=True, processes=None):
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(ROOT / "configs" / "accelerate" / config),
        "--main_process_port",
        "0",
        *([] if processes is None else ["--num_processes", str(processes)]),
        str(stage),
        *map(str, options),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout, cwd=ROOT)
    assert (result.returncode == 0) == succeeds, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout + result.stderr if not succeeds else result.stdout
