"""`make demo`, whole: the pipeline must make the model measurably better on held-out prompts."""

import json
import subprocess

import pytest
from helpers import ROOT


@pytest.mark.slow
def test_demo_raises_the_gold_score():
    subprocess.run(["make", "demo"], cwd=ROOT, check=True)
    report = json.loads((ROOT / "out" / "demo" / "eval" / "report.json").read_text())
    gold, kl = report["comparison"]["gold_score"], report["comparison"]["kl_per_token"]
    assert gold["ci95"][0] > 0 and gold["difference"] > 0.1
    assert report["comparison"]["reward_score"]["ci95"][0] > 0
    assert 0 < kl["policy"] < 1
    assert "<svg" in (ROOT / "out" / "demo" / "eval" / "report.html").read_text()
