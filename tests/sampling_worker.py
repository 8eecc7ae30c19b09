"""Run under accelerate launch: every rank samples from the same prompt; rank 0 prints what each drew."""

import json
import sys
from pathlib import Path

from accelerate.utils import gather_object

from train_ppo import seed_sampling
from utils.config import ModelConfig
from utils.launch import start_accelerator
from utils.models import load_causal_lm
from utils.rollout import Sampling, generate
from utils.run import leave

accelerator = start_accelerator(Path("."), "none", 0)
model = load_causal_lm(ModelConfig(sys.argv[1]), accelerator.device)
seed_sampling(0, 1, accelerator.process_index)
samples = gather_object(generate(model, [[5, 6, 7]], Sampling(20, 1.0, [2], 0)))
accelerator.print(json.dumps(samples))
accelerator.end_training()
leave(0)
