"""Models: what is read where, the four roles on one backbone, and what a saved model gives back."""

import json
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from helpers import CPU, ROOT, byte_tokenizer, close, messages, ppo_config, rollouts, stir, tiny_llama
from safetensors.torch import load_file

from train_ppo import CriticConfig, add_logprobs_and_values, build_roles, make_batch, save_final
from train_reward import RewardTrainConfig, build_model
from train_reward import save_final as save_reward
from utils.config import LoraOptions, ModelConfig, UserError
from utils.data import encode_prompt, encode_response
from utils.models import (
    chunked_logprobs,
    last_hidden,
    load_causal_lm,
    load_reward_model,
    load_tokenizer,
    new_reward_model,
    score_at_end,
    template_fingerprint,
    write_stats,
)
from utils.rewards import RewardConfig, RewardModel
from utils.rollout import Sampling, generate
from utils.saving import merged_state_dict
from utils.tensors import pad_rows

TEXTS = ["a", "some words", "eleven char", "x" * 40, "yes", "no no no"]


# --- tokenizers


def assert_on_the_reference(rows):
    """The policy's log-probabilities are there, and are those of the reference to the last bit."""
    for row in rows:
        assert len(row.logprobs) == len(row.response_ids) and row.logprobs == row.ref_logprobs


def test_pad_is_not_eos_where_another_special_token_exists(tiny):
    tokenizer = load_tokenizer(tiny)
    assert tokenizer.pad_token == "<|unk|>" and tokenizer.eos_token == "<|end|>" and len(tokenizer) == 259


def test_one_bos_or_none(tmp_path):
    plain, with_bos = byte_tokenizer(), byte_tokenizer(bos=True)
    assert (
        encode_prompt(plain, messages("hi"))[0] == 1 and encode_prompt(plain, messages("hi")).count(1) == 2
    )  # both from the template
    from tokenizers.processors import TemplateProcessing

    with_bos._tokenizer.post_processor = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
    assert with_bos("x").input_ids[0] == 1
    assert encode_prompt(with_bos, messages("hi")) == encode_prompt(plain, messages("hi"))  # not added twice
    with_bos.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert encode_prompt(with_bos, messages("hi")) == [1, *plain("hi").input_ids]  # added once
    assert encode_response(with_bos, "hi") == [*plain("hi").input_ids, 2]


def test_special_tokens_in_a_response_are_text():
    tokenizer = byte_tokenizer()
    ids = encode_response(tokenizer, "a<|end|>b")
    assert ids.count(2) == 1 and ids[-1] == 2 and len(ids) == len("a<|end|>b") + 1


def test_a_model_without_template_gets_one(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(str(tmp_path))
    text = tokenizer.decode(encode_prompt(tokenizer, messages("q")) + encode_response(tokenizer, " a"))
    assert text == "User: q\n\nAssistant: a<|end|>"


# --- log-probabilities


def families():
    from transformers import (
        CohereConfig,
        CohereForCausalLM,
        Gemma2Config,
        Gemma2ForCausalLM,
        GPT2Config,
        GPT2LMHeadModel,
        GraniteConfig,
        GraniteForCausalLM,
    )

    size = dict(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=1,
        initializer_range=0.2,
    )
    yield "llama", lambda: tiny_llama()
    yield (
        "gpt2",
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=128, initializer_range=0.2)
        ),
    )
    yield "gemma2", lambda: Gemma2ForCausalLM(Gemma2Config(**size, head_dim=8, final_logit_softcapping=2.0))
    yield "cohere", lambda: CohereForCausalLM(CohereConfig(**size, logit_scale=0.3))
    yield "granite", lambda: GraniteForCausalLM(GraniteConfig(**size, logits_scaling=4.0))


@pytest.mark.parametrize("name, build", list(families()), ids=[n for n, _ in families()])
def test_chunked_logprobs_are_those_of_the_whole_model(name, build, monkeypatch):
    monkeypatch.setattr("utils.models.LOGITS_CHUNK", 5)
    torch.manual_seed(0)
    model = build().eval()
    ids = torch.randint(3, 259, (2, 9))
    temperature = 0.5
    reference = (model(ids).logits[:, :-1].float() / temperature).log_softmax(-1)
    wanted = reference.gather(-1, ids[:, 1:, None])[..., 0].flatten()
    hidden = last_hidden(model, ids, torch.ones_like(ids))[:, :-1].reshape(-1, 32)
    logprobs, entropy = chunked_logprobs(model, hidden, ids[:, 1:].flatten(), temperature, entropy=True)
    close(logprobs, wanted)
    close(entropy, -(reference.exp() * reference).sum(-1).flatten())
    gradients = [torch.autograd.grad(x.sum(), list(model.parameters()), allow_unused=True) for x in (logprobs, wanted)]
    for a, b in zip(*gradients):
        if b is not None:
            close(a, b, 1e-3 * max(1.0, b.abs().max().item()))


# --- roles


def test_before_training_ratio_is_one_and_kl_zero(tiny):
    cfg = ppo_config(tiny)
    model, rows = build_roles(cfg, CPU), rollouts()
    add_logprobs_and_values(rows, model, cfg, 0, CPU)
    for row in rows:
        assert row.logprobs == row.ref_logprobs  # KL exactly 0
        assert row.values == [0.0] * len(row.response_ids)
        out = model(make_batch([row], 0, CPU), ("policy", "critic"), cfg.rollout.temperature)
        close(out["logprobs"], torch.tensor(row.logprobs))  # ratio 1, whatever the batch


@pytest.mark.parametrize("kind", ["adapter", "shared"])
def test_roles_do_not_depend_on_batch_or_padding(tiny, kind):
    cfg = ppo_config(tiny, critic=CriticConfig(kind=kind))
    model, rows = build_roles(cfg, CPU), rollouts()
    stir(model)
    together = model(make_batch(rows, 0, CPU), ("policy", "critic", "reference"), 0.7)
    again = model(make_batch(rows, 77, CPU), ("policy", "critic", "reference"), 0.7)
    single = [model(make_batch([row], 0, CPU), ("policy", "critic", "reference"), 0.7) for row in rows]
    for name in ("logprobs", "values", "ref_logprobs"):
        close(torch.cat([out[name] for out in single]), together[name])
        assert torch.equal(again[name], together[name])  # the padding's id does not matter
    assert (together["logprobs"] - together["ref_logprobs"]).abs().max() > 0.1


def test_roles_are_the_models_they_claim_to_be(tiny):
    """The policy is its merged model, the reference the untouched base, and temperature divides the logits."""
    model, rows = build_roles(ppo_config(tiny), CPU), rollouts((3, 3))
    stir(model)
    merged = load_causal_lm(ModelConfig(tiny, dtype="float32"), CPU)
    base = load_causal_lm(ModelConfig(tiny, dtype="float32"), CPU)
    merged.load_state_dict(merged_state_dict(model.models["backbone"], "policy"))
    out = model(make_batch(rows, 0, CPU), ("policy", "reference"), 0.5)
    for name, plain in (("logprobs", merged), ("ref_logprobs", base)):
        wanted = []
        for row in rows:
            ids = torch.tensor([row.prompt_ids + row.response_ids])
            logits = plain(ids).logits[0, len(row.prompt_ids) - 1 : -1] / 0.5
            wanted.append(logits.log_softmax(-1).gather(-1, ids[0, len(row.prompt_ids) :, None])[:, 0])
        close(out[name], torch.cat(wanted), 1e-4)


def test_switching_roles_keeps_gradients_apart(tiny):
    model, rows = build_roles(ppo_config(tiny), CPU), rollouts()
    stir(model)
    for role, name in (("policy", "logprobs"), ("critic", "values")):
        model.zero_grad()
        model(make_batch(rows, 0, CPU), (role,))[name].sum().backward()
        touched = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
        assert touched and all(
            (f".{role}." in n) or (role == "critic" and n.startswith("value_head")) for n in touched
        )
    policy, critic = model.groups()["policy"], model.groups()["critic"]
    assert len(policy) + len(critic) == len(model.trainable()) and not set(policy) & set(critic)


def test_checkpointing_gives_the_same_gradients(tiny):
    gradients = []
    for checkpointing in (False, True):
        cfg = ppo_config(tiny, model=ModelConfig(tiny, dtype="float32", gradient_checkpointing=checkpointing))
        model, rows = build_roles(cfg, CPU), rollouts()
        stir(model)
        out = model(make_batch(rows, 0, CPU), ("policy", "critic", "reference"))
        (out["logprobs"].sum() + out["values"].sum()).backward()  # recomputed after the roles were switched back
        gradients.append({n: p.grad for n, p in model.trainable().items()})
        with model.use("policy") as lm:
            tokens = generate(lm, [row.prompt_ids for row in rows], Sampling(20, 0.0, [2], 0))
        gradients[-1]["tokens"] = tokens
    assert gradients[0].pop("tokens") == gradients[1].pop("tokens")
    for name in gradients[0]:
        close(gradients[0][name], gradients[1][name], 1e-4)


def test_checkpointing_recomputes(tiny, monkeypatch):
    cfg = ppo_config(tiny, model=ModelConfig(tiny, dtype="float32", gradient_checkpointing=True))
    model = build_roles(cfg, CPU)
    calls = []
    layer = model.lm("policy").model.layers[0].mlp
    layer.register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    out = model(make_batch(rollouts(), 0, CPU), ("policy",))
    assert len(calls) == 1
    out["logprobs"].sum().backward()
    assert len(calls) == 2


def test_dropout_is_off_everywhere(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=128)).save_pretrained(
        tmp_path
    )
    byte_tokenizer().save_pretrained(tmp_path)
    cfg = ppo_config(str(tmp_path))
    model, rows = build_roles(cfg, CPU), rollouts()
    model.train()  # as a trainer may do
    add_logprobs_and_values(rows, model, cfg, 0, CPU)
    assert_on_the_reference(rows)


@pytest.mark.parametrize("names", [["q_proj", "lm_head"], ["q_proj", "embed_tokens"]])
def test_adapters_on_shared_layers_are_refused(tiny, names):
    with pytest.raises(UserError, match="the embedding or the output layer"):
        build_roles(ppo_config(tiny, lora=LoraOptions(r=4, target_modules=names)), CPU)


def test_full_fine_tuning_in_bfloat16_starts_at_the_reference(tiny):
    cfg = ppo_config(tiny, model=ModelConfig(tiny, dtype="bfloat16"), lora=None, critic=CriticConfig("shared"))
    model, rows = build_roles(cfg, CPU), rollouts()
    add_logprobs_and_values(rows, model, cfg, 0, CPU)
    assert_on_the_reference(rows)


def test_last_layers_end_the_backward_pass(tiny):
    cfg = ppo_config(tiny, lora=LoraOptions(r=4, last_layers=1))
    model, rows = build_roles(cfg, CPU), rollouts()
    assert {n.split("layers.")[1][0] for n in model.trainable() if "lora_" in n} == {"1"}
    seen = []
    model.lm("policy").model.layers[1].register_forward_pre_hook(
        lambda module, args: seen.append(args[0].requires_grad)
    )
    model(make_batch(rows, 0, CPU), ("policy",))
    assert seen == [False]
    whole = build_roles(ppo_config(tiny), CPU)
    assert {n.split("layers.")[1].split(".lora")[0][2:] for n in whole.trainable() if "lora_" in n} == {
        n.split("layers.")[1].split(".lora")[0][2:] for n in model.trainable() if "lora_" in n
    }
    with pytest.raises(UserError, match="between 1 and the model's 2 layers"):
        build_roles(ppo_config(tiny, lora=LoraOptions(last_layers=3)), CPU)


def test_a_policy_that_starts_from_an_adapter_has_kl_zero(tiny, tmp_path):
    model = build_roles(ppo_config(tiny), CPU)
    stir(model)
    tokenizer = load_tokenizer(tiny)
    save_final(model, tokenizer, ppo_config(tiny), tmp_path)
    cfg = ppo_config(str(tmp_path / "adapter"))
    started, rows = build_roles(cfg, CPU), rollouts()
    add_logprobs_and_values(rows, started, cfg, 0, CPU)
    assert_on_the_reference(rows)
    save_final(started, tokenizer, cfg, tmp_path / "again")
    assert {p.name for p in (tmp_path / "again").iterdir()} == {
        "final",
        "critic",
    }  # no adapter whose base is saved nowhere
    close(
        started(make_batch(rows, 0, CPU), ("policy",))["logprobs"],
        model(make_batch(rows, 0, CPU), ("policy",))["logprobs"],
        1e-4,
    )


def test_saved_policy_is_the_policy(tiny, tmp_path):
    """transformers opens `final/` without a word about keys, and decodes the same greedy text."""
    from transformers import AutoModelForCausalLM

    model = build_roles(ppo_config(tiny), CPU)
    stir(model)
    prompts = [row.prompt_ids for row in rollouts()]
    with model.use("policy") as lm:
        before = generate(lm, prompts, Sampling(12, 0.0, [2], 0))
    save_final(model, load_tokenizer(tiny), ppo_config(tiny), tmp_path)
    saved, info = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert generate(saved, prompts, Sampling(12, 0.0, [2], 0)) == before
    assert saved.config.use_cache and saved.config.tie_word_embeddings
    assert {p.name for p in tmp_path.iterdir()} == {"final", "adapter", "critic"}
    for name in ("adapter", "critic"):
        assert json.loads((tmp_path / name / "adapter_config.json").read_text())["base_model_name_or_path"] == tiny
    head = load_file(tmp_path / "critic" / "value_head.safetensors")
    assert torch.equal(head["weight"], model.value_head.weight) and torch.equal(head["bias"], model.value_head.bias)


def test_bfloat16_keeps_trained_weights_and_outputs_in_float32(tiny):
    outputs = []
    for dtype in ("float32", "bfloat16"):
        model, rows = build_roles(ppo_config(tiny, model=ModelConfig(tiny, dtype=dtype)), CPU), rollouts()
        stir(model, 0.1)
        assert {p.dtype for p in model.trainable().values()} == {torch.float32}
        assert model.lm("policy").model.embed_tokens.weight.dtype == getattr(torch, dtype)
        out = model(make_batch(rows, 0, CPU), ("policy", "critic", "reference"), entropy=True)
        (out["logprobs"].sum() + out["values"].sum()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.trainable().values()])
        outputs.append(out | {"gradient": gradient / gradient.norm()})
    for name in outputs[0]:
        a, b = outputs[0][name], outputs[1][name]
        assert b.dtype == torch.float32 and (a - b).norm() < 0.05 * a.norm(), name
        assert (a - b).abs().max() > 0  # it did run in bfloat16


# --- reward models


def scores_of(path, texts, batch_size=8):
    model, tokenizer = load_reward_model(ModelConfig(path, dtype="float32"), CPU), load_tokenizer(path)

    def forward(ids, mask):
        return score_at_end(model.score, last_hidden(model, ids, mask), mask)

    return RewardModel(forward, tokenizer, CPU).scores([messages("q")] * len(texts), texts, batch_size)


@pytest.fixture(scope="module")
def reward_folders(tiny, tmp_path_factory):
    """The same LoRA reward model saved in both formats, and a fully trained one; with their scores before saving."""
    found = {}
    for name in ("merged", "adapter", "full"):
        cfg = RewardTrainConfig(
            model=ModelConfig(tiny, dtype="float32"),
            data="",
            output_dir="",
            save_format=None if name == "full" else name,
            lora=None if name == "full" else LoraOptions(r=4),
        )
        model, tokenizer = build_model(cfg, CPU), load_tokenizer(tiny)
        stir(model, 0.1)
        folder = tmp_path_factory.mktemp(name)
        save_reward(model, tokenizer, cfg, folder)
        before = RewardModel(model, tokenizer, CPU).scores([messages("q")] * len(TEXTS), TEXTS, 8)
        found[name] = (str(folder), before)
    return found


@pytest.mark.parametrize("name", ["merged", "adapter", "full"])
def test_saved_reward_model_scores_the_same_in_a_new_process(reward_folders, name):
    folder, before = reward_folders[name]
    code = f"import sys; sys.path[:0] = {[str(ROOT), str(ROOT / 'tests')]!r}; from test_models import *; "
    code += f"print(json.dumps(scores_of({folder!r}, TEXTS)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    close(torch.tensor(json.loads(output.splitlines()[-1])), torch.tensor(before))
    assert max(before) - min(before) > 0.1


@pytest.mark.parametrize("name", ["merged", "full"])
def test_plain_transformers_reads_the_same_scores(reward_folders, name):
    """Their model looks for the last token that is not padding; the saved pad token makes that the eos."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder, before = reward_folders[name]
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
    assert model.config.num_labels == 1 and not info["missing_keys"] and not info["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [encode_prompt(tokenizer, messages("q")) + encode_response(tokenizer, text) for text in TEXTS]
    ids, mask = pad_rows(rows, tokenizer.pad_token_id, torch.long)
    close(model(ids, attention_mask=mask.long()).logits[:, 0].detach(), torch.tensor(before))


def test_peft_reads_the_adapter(reward_folders):
    from peft import AutoPeftModelForSequenceClassification

    folder, before = reward_folders["adapter"]
    model = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    tokenizer = load_tokenizer(folder)
    model.config.pad_token_id = tokenizer.pad_token_id  # the base says pad = eos, and their model skips padding
    scores = []
    for text in TEXTS:
        ids = torch.tensor([encode_prompt(tokenizer, messages("q")) + encode_response(tokenizer, text)])
        scores.append(model(ids).logits[0, 0].item())
    close(torch.tensor(scores), torch.tensor(before))


@pytest.mark.parametrize("batch_size", [1, 3, 6])
def test_score_does_not_depend_on_batch_mates(reward_folders, batch_size):
    folder, before = reward_folders["merged"]
    close(torch.tensor(scores_of(folder, TEXTS, batch_size)), torch.tensor(before))


@pytest.mark.parametrize("name", ["adapter", "merged"])
def test_reward_role_gives_the_reward_models_scores(tiny, reward_folders, name):
    """As an adapter on the policy's backbone, or as a model of its own."""
    folder, before = reward_folders[name]
    cfg = ppo_config(tiny, reward_model=RewardConfig(path=folder))
    model = build_roles(cfg, CPU)
    stir(model)
    assert model.roles["reward"] == (("backbone", "reward") if name == "adapter" else ("reward", None))
    rewards = [p.requires_grad for n, p in model.named_parameters() if "reward" in n or "score" in n]
    assert len(rewards) == (2 * 7 * 2 + 1 if name == "adapter" else 21) and not any(rewards)

    def forward(ids, mask):
        return model({"input_ids": ids, "attention_mask": mask, "response_mask": torch.zeros_like(mask)}, ("reward",))[
            "scores"
        ]

    with torch.no_grad():
        scores = RewardModel(forward, load_tokenizer(tiny), CPU).scores([messages("q")] * len(TEXTS), TEXTS, 4)
    close(torch.tensor(scores), torch.tensor(before))


@pytest.mark.parametrize(
    "kind, name, lora",
    [
        ("adapter", "adapter", LoraOptions(r=4)),
        ("separate", "adapter", LoraOptions(r=4)),
        ("separate", "merged", LoraOptions(r=4)),
        ("separate", "full", None),
    ],
)
def test_a_critic_can_start_from_a_reward_model(tiny, reward_folders, tmp_path, kind, name, lora):
    """Its value after a whole answer is the answer's score in the unit of rewards; the policy stays."""
    folder, before = reward_folders[name]
    shutil.copytree(folder, tmp_path / "reward")
    stats = {"score_mean": 2.0, "score_std": 4.0, "template_fingerprint": template_fingerprint(load_tokenizer(tiny))}
    write_stats(tmp_path / "reward", stats)
    cfg = ppo_config(tiny, critic=CriticConfig(kind, path=str(tmp_path / "reward")), lora=lora)
    model, tokenizer = build_roles(cfg, CPU), load_tokenizer(tiny)
    rows = [encode_prompt(tokenizer, messages("q")) + encode_response(tokenizer, text) + [5] for text in TEXTS]
    ids, mask = pad_rows(rows, 0, torch.long)
    last = mask & (
        torch.arange(ids.shape[1]) == mask.sum(1, keepdim=True) - 1
    )  # the token after the end, whose state is the whole answer
    with torch.no_grad():
        out = model(
            {"input_ids": ids, "attention_mask": mask, "response_mask": last}, ("policy", "critic", "reference")
        )
    close(out["values"], (torch.tensor(before) - 2) / 4)
    assert torch.equal(out["logprobs"], out["ref_logprobs"])
    trained = [n for n in model.trainable() if model._is_critic(n)]
    assert trained and all(p.dtype == torch.float32 for p in model.trainable().values())
    save_final(model, tokenizer, cfg, tmp_path / "out")
    head = load_file(tmp_path / "out" / "critic" / "value_head.safetensors")
    assert torch.equal(head["weight"], model.value_head.weight) and head["weight"].any()


@pytest.mark.parametrize("kind, message", [("separate", "without a score head"), ("adapter", "is not a LoRA of")])
def test_a_critic_cannot_start_from_a_language_model(tiny, kind, message):
    """Its head would be drawn at random, and the first values with it."""
    with pytest.raises(UserError, match=message):
        build_roles(ppo_config(tiny, critic=CriticConfig(kind, path=tiny)), CPU)


def test_dropout_of_a_loaded_adapter_is_off(tiny, reward_folders, tmp_path):
    shutil.copytree(reward_folders["adapter"][0], tmp_path / "reward")
    config = json.loads((tmp_path / "reward" / "adapter_config.json").read_text())
    (tmp_path / "reward" / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.5}))
    model = build_roles(ppo_config(tiny, reward_model=RewardConfig(path=str(tmp_path / "reward"))), CPU)
    batch = make_batch(rollouts(), 0, CPU)
    with torch.no_grad():
        assert torch.equal(model(batch, ("reward",))["scores"], model(batch, ("reward",))["scores"])


def test_reward_role_in_bfloat16_gives_the_reward_models_scores(tiny, reward_folders):
    """The head works in float32 in both places, so a score differs by no more than the hidden states do."""
    folder, _ = reward_folders["adapter"]
    model = build_roles(
        ppo_config(tiny, model=ModelConfig(tiny, dtype="bfloat16"), reward_model=RewardConfig(path=folder)), CPU
    )
    alone = load_reward_model(ModelConfig(folder, dtype="float32"), CPU)
    tokenizer = load_tokenizer(tiny)
    rows = [encode_prompt(tokenizer, messages("q")) + encode_response(tokenizer, text) for text in TEXTS]
    ids, mask = pad_rows(rows, 0, torch.long)
    with torch.no_grad():
        scores = model(
            {"input_ids": ids, "attention_mask": mask, "response_mask": torch.zeros_like(mask)}, ("reward",)
        )["scores"]
        wanted = score_at_end(alone.score, last_hidden(alone, ids, mask), mask)
    assert scores.dtype == torch.float32 and len(set(scores.tolist())) == len(TEXTS)
    assert (scores - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_score_is_read_at_the_last_real_token_with_pad_equal_to_eos():
    model = tiny_llama().eval()
    head = torch.nn.Linear(32, 1)
    rows = [[5, 6, 7, 8, 2], [5, 6, 7, 8, 9, 10, 11, 12, 2]]
    ids, mask = pad_rows(rows, 2, torch.long)
    together = score_at_end(head, last_hidden(model, ids, mask), mask)
    alone = [
        score_at_end(head, last_hidden(model, torch.tensor([r]), torch.ones(1, len(r))), torch.ones(1, len(r)))
        for r in rows
    ]
    close(together, torch.cat(alone))


def test_models_that_are_no_reward_models_are_refused(tiny, tmp_path):
    from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, BertModel

    with pytest.raises(UserError, match="without a score head"):
        load_reward_model(ModelConfig(tiny), CPU)
    AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=2).save_pretrained(tmp_path / "two")
    with pytest.raises(UserError, match="has 2 outputs"):
        load_reward_model(ModelConfig(str(tmp_path / "two")), CPU)
    BertForSequenceClassification(
        BertConfig(
            vocab_size=99, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, num_labels=1
        )
    ).save_pretrained(tmp_path / "bert")
    BertModel(
        BertConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    ).save_pretrained(tmp_path / "trunk")
    for folder, load in (
        ("bert", load_reward_model),
        ("bert", partial(new_reward_model, seed=0)),
        ("trunk", partial(new_reward_model, seed=0)),
    ):
        with pytest.raises(
            UserError, match=f"{folder} is a BertForSequenceClassification without a linear head named score"
        ):
            load(ModelConfig(str(tmp_path / folder)), CPU)
    model = build_roles(ppo_config(tiny), CPU)
    save_final(model, load_tokenizer(tiny), ppo_config(tiny), tmp_path)
    with pytest.raises(UserError, match="LoRA folder without a score head"):
        load_reward_model(ModelConfig(str(tmp_path / "adapter")), CPU)
    with pytest.raises(UserError, match="LoRA folder without a score head"):
        build_roles(ppo_config(tiny, reward_model=RewardConfig(path=str(tmp_path / "adapter"))), CPU)


def test_a_model_that_lacks_weights_is_refused(tiny, tmp_path):
    from safetensors.torch import save_file

    tiny_llama().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="lacks weights: model.layers.0.mlp.up_proj.weight"):
        load_causal_lm(ModelConfig(str(tmp_path)), CPU)


# --- rollouts


def test_generation_ends_at_any_eos_and_keeps_it(tiny):
    model = load_causal_lm(ModelConfig(tiny, dtype="float32"), CPU)
    prompts = [row.prompt_ids for row in rollouts()]
    free = generate(model, prompts, Sampling(10, 0.0, [2], 0))
    stops = [free[0][3], free[1][1]]
    stopped = generate(model, prompts, Sampling(10, 0.0, stops, 0))
    for a, b in zip(free, stopped):
        end = next((i + 1 for i, t in enumerate(a) if t in stops), len(a))
        assert b == a[:end]  # the sampled ids, eos included, nothing after it, nothing forced at the limit


def test_generation_does_not_depend_on_batch_or_model_defaults(tiny):
    model = load_causal_lm(ModelConfig(tiny, dtype="float32"), CPU)
    prompts = [row.prompt_ids for row in rollouts()]
    together = generate(model, prompts, Sampling(10, 0.0, [2], 0))
    assert [generate(model, [p], Sampling(10, 0.0, [2], 0))[0] for p in prompts] == together
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.max_length = 7
    assert generate(model, prompts, Sampling(10, 0.0, [2], 0)) == together
    assert model.generation_config.repetition_penalty == 5.0


def test_sampling_follows_the_temperature(tiny):
    """4000 first tokens at temperature 0.5 have the frequencies of softmax(logits / 0.5), top-k and top-p off."""
    model = load_causal_lm(ModelConfig(tiny, dtype="float32"), CPU)
    model.generation_config.top_k, model.generation_config.top_p = 3, 0.5
    prompt = [5, 6, 7]
    wanted = (model(torch.tensor([prompt])).logits[0, -1] / 0.5).softmax(-1)
    torch.manual_seed(0)
    first = torch.tensor([r[0] for r in generate(model, [prompt] * 4000, Sampling(1, 0.5, [2], 0, batch_size=4000))])
    frequency = torch.bincount(first, minlength=259) / 4000
    assert (frequency - wanted).abs().max() < 4 * (0.25 / 4000) ** 0.5
    assert (frequency > 0).sum() > 50
