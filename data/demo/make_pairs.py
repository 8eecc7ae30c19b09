"""Make data/demo/preferences.jsonl: answers sampled from the model itself, paired by the gold score.

    python data/demo/make_pairs.py MODEL.gguf

The model is told to answer in one short sentence and rarely does: most answers run on until they are cut
off. For each prompt of prompts.txt it answers three times, and once at a temperature where it rambles. The
best answer is paired with the worst and with one in between. About 10 minutes on two cores. Seeded: the
same machine writes the same file again.
"""

import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))

from data.demo.gold import score_one  # noqa: E402
from utils.config import ModelConfig  # noqa: E402
from utils.data import decode_response, encode_prompt  # noqa: E402
from utils.models import eos_ids, load_causal_lm, load_tokenizer  # noqa: E402
from utils.rollout import Sampling, generate  # noqa: E402

SYSTEM = "Answer in one short sentence."
ANSWERS = [(0.7, 3), (1.2, 1)]  # temperature, answers to each prompt
MAX_NEW_TOKENS = 32
MIN_GAP = 0.15  # gold scores of a pair differ by at least this


def dialogue(question: str) -> list[dict]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def main(model_path: str) -> None:
    torch.manual_seed(0)
    tokenizer = load_tokenizer(model_path)
    model = load_causal_lm(ModelConfig(model_path), torch.device("cpu"))
    questions = (HERE / "prompts.txt").read_text(encoding="utf-8").splitlines()
    answers: dict[str, set[str]] = {question: set() for question in questions}
    total = len(questions) * sum(n for _, n in ANSWERS)
    with tqdm(total=total, desc="answers") as progress:
        for temperature, n in ANSWERS:
            asked = [q for q in questions for _ in range(n)]
            prompts = [encode_prompt(tokenizer, dialogue(q)) for q in asked]
            how = Sampling(MAX_NEW_TOKENS, temperature, eos_ids(tokenizer, model), tokenizer.pad_token_id, 128)
            sampled = generate(model, prompts, how, progress)
            for question, ids in zip(asked, sampled):
                answers[question].add(decode_response(tokenizer, ids).strip())
    pairs = []
    for question, texts in answers.items():
        ranked = sorted((score_one(question, text), text) for text in texts if text)
        best = ranked[-1]
        for worse in [ranked[0], *ranked[len(ranked) // 2 : -1][:1]]:
            if best[0] - worse[0] >= MIN_GAP:
                pairs.append((question, best, worse))
    pairs = list(dict.fromkeys(pairs))
    with open(HERE / "preferences.jsonl", "w", encoding="utf-8") as file:
        for question, (good, chosen), (bad, rejected) in pairs:
            row = {
                "prompt": dialogue(question),
                "chosen": chosen,
                "rejected": rejected,
                "gold_chosen": round(good, 3),
                "gold_rejected": round(bad, 3),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{len(pairs)} pairs from {len(questions)} prompts")


if __name__ == "__main__":
    main(sys.argv[1])
