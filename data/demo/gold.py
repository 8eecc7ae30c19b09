"""The known preference behind the demo data: short, direct answers that are about the question and come to an end.

`score` is the true ("gold") score that the reward model has to learn from pairs and that evaluate.py reports
beside the reward model's own. It cannot be met by shortness alone: an answer that misses any of the four
checks gets at most 0.3.
"""

import re

FULL_MARKS_WORDS, NO_MARKS_WORDS = 20, 45  # brevity falls from 1 to 0 between these lengths
COMMON = frozenset(
    "a about after all also am an and any are as at be because been before best but by can could did do does each "
    "for from give good had has have he her here him his how i if in into is it its just like make makes many may me "
    "more most much my name need no not of on one or other our out over people she should simple so some such take "
    "tell than that the their them then there these they thing things this those to two up us use used very was way "
    "ways we were what when where which while who why will with would you your".split()
)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9']+", text.lower())


def topic(text: str) -> set[str]:
    """Stems (first five letters) of the words that carry meaning."""
    return {word[:5] for word in words(text) if word not in COMMON and len(word) > 2}


def checks(question: str, answer: str) -> dict[str, bool]:
    """The four conditions of a good answer."""
    answer = answer.strip()
    said = words(answer)
    trigrams = list(zip(said, said[1:], said[2:]))
    plain = sum(c.isascii() and (c.isalnum() or c in " .,;:'\"!?()-%$") for c in answer)
    return {
        "ends": bool(re.search(r"[.!][\"')]?$", answer)),
        "sentence": len(said) >= 4 and bool(re.match(r"[\"'(]?[A-Z0-9]", answer)) and plain == len(answer),
        "no_repetition": bool(said) and len(set(trigrams)) == len(trigrams) and len(set(said)) >= 0.6 * len(said),
        "on_topic": bool(topic(question) & topic(answer)) and len(topic(answer) - topic(question)) >= 2,
    }


def score_one(question: str, answer: str) -> float:
    """0 to 0.3 by the number of checks met, or 0.4 to 1 by brevity when all four are."""
    met = sum(checks(question, answer).values())
    if met < 4:
        return 0.1 * met
    length = len(words(answer))
    brevity = (NO_MARKS_WORDS - length) / (NO_MARKS_WORDS - FULL_MARKS_WORDS)
    return 0.4 + 0.6 * min(1.0, max(0.0, brevity))


def score(prompts: list[list[dict]], responses: list[str], **columns) -> list[float]:
    """Gold scores of responses, in the form that `reward_model.function` and `gold_function` expect."""
    return [score_one(prompt[-1]["content"], response) for prompt, response in zip(prompts, responses)]
