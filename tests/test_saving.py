"""What is saved is what was trained: rounding, names, families, and what other programs read."""

import json
import os
import shutil
import stat

import pytest
import torch
from helpers import CPU, byte_tokenizer, close, ppo_config, stir, tiny_llama
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from train_ppo import CriticConfig, build_roles, save_final
from train_reward import RewardTrainConfig, build_model
from train_reward import save_final as save_reward
from utils import models
from utils.config import LoraOptions, ModelConfig, UserError
from utils.models import load_causal_lm, load_reward_model, load_tokenizer, pad_apart_from_eos
from utils.saving import for_older_readers, model_card
from utils.tensors import round_randomly

IDS = torch.tensor([[5, 9, 20, 33, 7, 2]])
SIZE = dict(
    vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, eos_token_id=2, pad_token_id=0, bos_token_id=1, initializer_range=0.2,
)  # fmt: skip


def folder_of(model, path, tokenizer=None) -> str:
    model.save_pretrained(path)
    (tokenizer or byte_tokenizer()).save_pretrained(path)
    return str(path)


def trained(path, **changes):
    """Roles whose trained weights are not those of the start, and their configuration."""
    cfg = ppo_config(path, **changes)
    roles = build_roles(cfg, CPU)
    stir(roles, 0.1 if cfg.lora else 0.02)
    return cfg, roles


def live_logits(roles):
    with torch.no_grad(), models.arithmetic(roles.models.values(), roles.dtype), roles.use("policy") as lm:
        return lm(input_ids=IDS).logits.float()


def saved_logits(folder):
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()(input_ids=IDS).logits.float()


# --- rounding


@pytest.mark.parametrize("dtype, step", [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_random_rounding_keeps_the_mean_and_what_is_exact(dtype, step):
    def rounded(value, n=40_000):
        return round_randomly(torch.full((n,), value), dtype, torch.Generator().manual_seed(0)).float()

    quarter = rounded(1 + step / 4)  # a quarter of the way from 1 to the next number of this type
    assert set(quarter.tolist()) == {1.0, 1 + step}
    assert abs((quarter > 1).float().mean().item() - 0.25) < 0.01
    down = rounded(-1 - 3 * step / 4)
    assert set(down.tolist()) == {-1.0, -1 - step} and abs((down < -1).float().mean().item() - 0.75) < 0.01
    for exact in (0.0, 1.0, -0.5, 1 + step, float("inf"), 3.0):
        assert rounded(exact, 100).tolist() == [exact] * 100
    assert rounded(float("nan"), 3).isnan().all()
    same = torch.randn(50)
    assert round_randomly(same, torch.float32, torch.Generator()) is same


def test_small_training_survives_a_merge_into_bfloat16(tmp_path):
    """Most weights move by less than half a step. To the nearest, less than half of the change is left; here, all."""
    path = folder_of(tiny_llama(hidden_size=64, intermediate_size=256).to(torch.bfloat16), tmp_path / "base")
    cfg, roles = trained(path, model=ModelConfig(path, dtype="bfloat16"))
    layer = roles.lm("policy").model.layers[0].mlp.down_proj
    layer.lora_B["policy"].weight.data.mul_(0.0002 / layer.get_delta_weight("policy").float().std())
    base, delta = layer.base_layer.weight.float(), layer.get_delta_weight("policy").float()
    save_final(roles, load_tokenizer(path), cfg, tmp_path)
    saved = load_file(tmp_path / "final" / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    nearest = (base + delta).bfloat16().float() - base
    share = ((saved.float() - base) * delta).sum() / (delta**2).sum()
    assert saved.dtype == torch.bfloat16 and abs(share - 1) < 0.05
    assert (saved.float() - base).unique().numel() > 1 and abs(
        (nearest * delta).sum() / (delta**2).sum() - share
    ) > 0.1


def test_a_reward_adapter_scores_as_in_training_in_bfloat16(tmp_path):
    """Beside its layers, not merged: the live scores to the last bit."""
    path = folder_of(tiny_llama().to(torch.bfloat16), tmp_path / "base")
    cfg = RewardTrainConfig(
        ModelConfig(path, dtype="bfloat16"), data="", output_dir="", lora=LoraOptions(r=4), save_format="adapter"
    )
    model = build_model(cfg, CPU)
    stir(model, 0.05)
    save_reward(model, load_tokenizer(path), cfg, tmp_path / "reward")
    loaded = load_reward_model(ModelConfig(str(tmp_path / "reward"), dtype="bfloat16"), CPU)
    mask = torch.ones_like(IDS, dtype=torch.bool)
    with torch.no_grad(), models.arithmetic([loaded], torch.bfloat16):
        score = models.score_at_end(loaded.score, models.last_hidden(loaded, IDS, mask), mask)
        assert torch.equal(score, model(IDS, mask))


@pytest.mark.parametrize("dtype, saved", [("auto", torch.bfloat16), ("float32", torch.float32)])
def test_full_fine_tuning_keeps_the_type_of_its_base(tmp_path, dtype, saved):
    path = folder_of(tiny_llama().to(torch.bfloat16), tmp_path / "base")
    cfg, roles = trained(path, model=ModelConfig(path, dtype=dtype), lora=None, critic=CriticConfig("shared"))
    save_final(roles, load_tokenizer(path), cfg, tmp_path)
    weights = load_file(tmp_path / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {saved}
    assert json.loads((tmp_path / "final" / "config.json").read_text())["torch_dtype"] == str(saved)[6:]


# --- families


def moe(name):
    import transformers

    size = SIZE | {"num_experts_per_tok": 2}
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**size, num_local_experts=4))
    size |= {"num_experts": 4, "moe_intermediate_size": 16}
    kind = {"qwen3_moe": "Qwen3Moe", "olmoe": "Olmoe"}[name]
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**size))


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_are_saved_with_what_they_learned(tmp_path, name):
    torch.manual_seed(0)
    path = folder_of(moe(name), tmp_path / "base")
    cfg, roles = trained(path)
    assert any(".experts." in name and p.requires_grad for name, p in roles.named_parameters())
    save_final(roles, load_tokenizer(path), cfg, tmp_path)
    final, base = (load_file(tmp_path / name / "model.safetensors") for name in ("final", "base"))
    assert final.keys() == base.keys()
    assert any(".experts." in key and not torch.equal(final[key], base[key]) for key in final)
    close(saved_logits(tmp_path / "final"), live_logits(roles), 2e-4)


def vision_model():
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(0)
    text = SIZE | {"max_position_embeddings": 128, "final_logit_softcapping": 1.5}
    vision = dict(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=250)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = 2, 0, 1
    return Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("lora", [LoraOptions(r=4), None])
def test_only_what_text_passes_through_learns(tmp_path, lora):
    path = folder_of(vision_model(), tmp_path / "base")
    cfg = ppo_config(path, lora=lora, critic=CriticConfig("adapter" if lora else "shared"))
    roles = build_roles(cfg, CPU)
    learning = list(roles.trainable())
    assert learning and not any("vision" in name or "projector" in name for name in learning)
    assert models.max_positions(roles.lm("policy")) == 128
    mask = torch.ones_like(IDS, dtype=torch.bool)
    out = roles({"input_ids": IDS, "attention_mask": mask, "response_mask": mask}, ("policy", "critic"))
    (out["logprobs"].sum() + out["values"].sum()).backward()
    assert all(parameter.grad is not None for parameter in roles.trainable().values())
    with torch.no_grad(), roles.use("policy") as lm:  # the cap stands in text_config
        own = torch.log_softmax(lm(input_ids=IDS).logits[0, :-1].float(), -1)
    close(out["logprobs"], own.gather(-1, IDS[0, 1:, None])[:, 0])


def test_the_critic_reads_states_of_another_width_than_hidden_size(tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=259, hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, eos_token_id=2, bos_token_id=1, pad_token_id=0, do_layer_norm_before=False,
    )  # fmt: skip
    path = folder_of(OPTForCausalLM(config), tmp_path / "base")
    mask = torch.ones_like(IDS, dtype=torch.bool)
    batch = {"input_ids": IDS, "attention_mask": mask, "response_mask": mask}
    for kind in ("adapter", "shared", "separate"):
        roles = build_roles(ppo_config(path, critic=CriticConfig(kind)), CPU)
        assert roles.value_head.in_features == 16
        assert roles(batch, ("critic",))["values"].shape == (5,)


@pytest.mark.parametrize("tied", [True, False])
def test_a_lora_folder_with_added_tokens(tmp_path, tied):
    """A supervised run added two tokens and trained their embeddings and the head."""
    from peft import LoraConfig, get_peft_model

    path = folder_of(tiny_llama(tie_word_embeddings=tied), tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(path)
    model.resize_token_embeddings(261)
    saved = ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]
    options = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved, ensure_weight_tying=tied)
    model = get_peft_model(model, options).eval()
    stir(model, 0.2)
    model.save_pretrained(tmp_path / "sft")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<a>", "<b>"])
    tokenizer.save_pretrained(tmp_path / "sft")
    ids = torch.tensor([[5, 259, 20, 260, 7]])
    loaded = load_causal_lm(ModelConfig(str(tmp_path / "sft"), dtype="float32"), CPU)
    with torch.no_grad():
        close(loaded(input_ids=ids).logits, model(input_ids=ids).logits, 1e-4)


# --- what is refused at the start


def config_folder(tiny, tmp_path, **changes):
    shutil.copytree(tiny, tmp_path / "changed")
    file = tmp_path / "changed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return str(tmp_path / "changed")


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq"])
def test_quantised_bases_are_refused(tiny, tmp_path, method):
    path = config_folder(tiny, tmp_path, quantization_config={"quant_method": method, "load_in_4bit": True, "bits": 4})
    for load in (load_causal_lm, lambda cfg, device: models.new_reward_model(cfg, device, 0)):
        with pytest.raises(UserError, match=f"is quantised \\({method}\\).*give the plain model"):
            load(ModelConfig(path), CPU)


def test_a_kernel_that_is_not_installed_is_one_line(tiny):
    with pytest.raises(UserError, match="model.attn_implementation flash_attention_2") as error:
        load_causal_lm(ModelConfig(tiny, attn_implementation="flash_attention_2"), CPU)
    assert "\n" not in str(error.value)


def test_the_folder_above_the_model_is_named(tiny, tmp_path):
    shutil.copytree(tiny, tmp_path / "ppo" / "final")
    with pytest.raises(UserError, match=r"has no config.json; did you mean .*ppo/final/"):
        load_causal_lm(ModelConfig(str(tmp_path / "ppo")), CPU)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"empty has no config.json$"):
        load_causal_lm(ModelConfig(str(tmp_path / "empty")), CPU)


@pytest.mark.parametrize("save_format", ["adapter", "merged"])
def test_a_reward_model_is_no_policy(tiny, tmp_path, save_format):
    cfg = RewardTrainConfig(ModelConfig(tiny, dtype="float32"), "", "", LoraOptions(r=4), save_format)
    save_reward(build_model(cfg, CPU), load_tokenizer(tiny), cfg, tmp_path / "reward")
    with pytest.raises(UserError, match="is a reward model, which writes no text"):
        load_causal_lm(ModelConfig(str(tmp_path / "reward")), CPU)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"base_model_name_or_path": null}'])
def test_a_broken_adapter_config_is_named(tmp_path, text):
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(UserError, match="adapter_config.json"):
        load_causal_lm(ModelConfig(str(tmp_path)), CPU)


def test_a_converted_gguf_needs_no_lock(tmp_path, monkeypatch):
    """As on a disk for reading only."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"x")
    converted = tmp_path / "m.gguf.converted"
    converted.mkdir()
    (converted / "source").write_text(f"{file.stat().st_size} {file.stat().st_mtime_ns}")
    monkeypatch.setattr(models, "locked", lambda *a: pytest.fail("took the lock"))
    assert models.resolve_model_path(str(file)) == str(converted)


# --- what other programs read


def test_pad_token_where_reserved_tokens_stand_in_the_vocabulary_only():
    """Llama 3: named specials are bos and eos; reserved ones are among the added tokens."""
    tokenizer = byte_tokenizer(bos=True)
    tokenizer.add_special_tokens({"additional_special_tokens": []})
    tokenizer.add_tokens(["<|header|>", "<|reserved_special_token_0|>"], special_tokens=True)
    tokenizer.unk_token = None
    assert models._spare_token(tokenizer) == "<|reserved_special_token_0|>"
    tokenizer.add_tokens(["<|finetune_right_pad_id|>"], special_tokens=True)
    assert models._spare_token(tokenizer) == "<|finetune_right_pad_id|>"


def gpt2_like(path) -> str:
    """One special token, which begins, ends and pads, and a word that begins with the mark of a space."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|endoftext|>", "\u0120a", *alphabet]
    tokenizer = Tokenizer(kinds.BPE({token: i for i, token in enumerate(words)}, [("\u0120", "a")]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    end = "<|endoftext|>"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end)
    fast.save_pretrained(path)
    return str(path)


def test_pad_token_where_eos_is_the_only_special_token(tmp_path):
    tokenizer = load_tokenizer(gpt2_like(tmp_path))
    texts = ["a cat \u0120a and a", "\u0120a", "a"]
    before = tokenizer(texts).input_ids
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    tokenizer = pad_apart_from_eos(tokenizer)
    assert tokenizer.pad_token == "\u0120a" and tokenizer(texts[:1] + texts[2:]).input_ids == before[:1] + before[2:]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_plain_transformers_finds_the_score_in_a_padded_batch(tiny, tmp_path, kind):
    path = tiny
    if kind == "gpt2":
        shutil.copytree(tiny, tmp_path / "base")
        (tmp_path / "base" / "chat_template.jinja").unlink()
        path = gpt2_like(tmp_path / "base")
    cfg = RewardTrainConfig(ModelConfig(path, dtype="float32"), "", "", LoraOptions(r=4), save_format="merged")
    model, tokenizer = build_model(cfg, CPU), pad_apart_from_eos(load_tokenizer(path))
    stir(model)
    save_reward(model, tokenizer, cfg, tmp_path / "reward")
    from transformers import AutoModelForSequenceClassification

    rows = [[5, 6, 7, tokenizer.eos_token_id], [9, 9, 8, 7, 6, 5, 4, tokenizer.eos_token_id]]
    batch = AutoTokenizer.from_pretrained(tmp_path / "reward").pad({"input_ids": rows}, return_tensors="pt")
    assert batch["input_ids"].shape == (2, 8)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32).eval()
    with torch.no_grad():
        alone = [model(torch.tensor([r]), torch.ones(1, len(r), dtype=torch.bool)).item() for r in rows]
        close(plain(**batch).logits[:, 0], torch.tensor(alone), 1e-4)


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, {"rope_theta": 1e5}),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}},
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.4}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.4},
        ),
        ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        ({"rope_parameters": None, "rope_theta": 3.0}, {}),
        ({"model_type": "gpt2"}, {}),
    ],
)
def test_older_transformers_find_rotary_base_and_type(config, expected):
    assert for_older_readers(config) == config | expected
    assert for_older_readers({"text_config": config}) == {"text_config": config | expected}


def test_final_reads_everywhere(tmp_path):
    """Rotary base, tokenizer class, pad ids, file modes, and the tokenizer beside the adapter."""
    path = folder_of(tiny_llama(rope_theta=100_000.0), tmp_path / "base")
    cfg, roles = trained(path)
    umask = os.umask(0o027)
    try:
        save_final(roles, load_tokenizer(path), cfg, tmp_path)
    finally:
        os.umask(umask)
    config = json.loads((tmp_path / "final" / "config.json").read_text())
    generation = json.loads((tmp_path / "final" / "generation_config.json").read_text())
    settings = json.loads((tmp_path / "final" / "tokenizer_config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100_000.0
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    pad = load_tokenizer(path).pad_token_id
    assert config["pad_token_id"] == generation["pad_token_id"] == pad == 0
    for folder in ("final", "adapter", "critic"):
        modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / folder).iterdir()}
        assert modes == {0o640}
    assert AutoTokenizer.from_pretrained(tmp_path / "adapter").chat_template == load_tokenizer(path).chat_template
    close(saved_logits(tmp_path / "final"), live_logits(roles), 1e-4)


def test_a_model_card_names_base_licence_and_numbers(tmp_path):
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    card = model_card("Policy", str(tmp_path), {"reward": "gsm8k", "data": None})
    assert card.startswith("---\nlibrary_name: transformers\nlicense: apache-2.0\n---\n# Policy\n")
    assert "- reward: gsm8k\n" in card and "data" not in card and "- licence: apache-2.0" in card
    assert "base_model: org/name\n" in model_card("Policy", "org/name", {})
    assert "- licence: that of the base model" in model_card("Policy", "org/name", {})


def test_nothing_is_left_of_a_folder_that_could_not_be_written(tmp_path, monkeypatch):
    from utils.files import replacing

    with pytest.raises(OSError, match="No space"), replacing(tmp_path / "final") as temporary:
        save_file({"x": torch.zeros(3)}, temporary / "model.safetensors")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
