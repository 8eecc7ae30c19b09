"""Loading and saving models, and the four roles of PPO on one backbone.

`RoleModel` holds policy, reference, critic and reward. With LoRA they share one frozen base model: `policy`,
`critic` and `reward` are adapters on it, and the reference is the base without an adapter.
"""

import contextlib
import difflib
import hashlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from utils.config import LoraOptions, ModelConfig, UserError
from utils.files import locked, replacing, write_json
from utils.launch import whole
from utils.tensors import token_entropy, token_logprobs
from utils.tracking import say

# A model without a chat template gets this one. Each turn ends with the eos token, as each response does.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
STATS_FILE = "reward_stats.json"  # beside a reward model: what its scores mean
LOGITS_CHUNK = 256  # positions projected to the vocabulary at a time


# ---------------------------------------------------------------------------------------------------- loading


def resolve_model_path(path: str) -> str:
    """A folder or hub name as it is; a `.gguf` file as the folder that holds its converted copy.

    The GGUF parser is slow and such models cannot be saved, so the file is converted once to a plain float32
    safetensors folder beside it (`NAME.gguf.converted/`), and again when the file has changed.
    """
    file = Path(path)
    if file.suffix != ".gguf":
        is_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path, re.ASCII) and path[0] not in "."
        if not file.exists() and (not is_name or ("/" in path and file.parent.is_dir())):
            folder = file.expanduser().parent
            near = difflib.get_close_matches(file.name, os.listdir(folder) if folder.is_dir() else [], 1, 0.75)
            raise UserError(f"model folder {path} does not exist" + (f"; {folder / near[0]} does" if near else ""))
        check_weights(file)
        return path
    if not file.is_file():
        raise UserError(f"model file {path} does not exist")
    folder = file.with_name(file.name + ".converted")
    stamp = f"{file.stat().st_size} {file.stat().st_mtime_ns}"
    if (folder / "source").exists() and (folder / "source").read_text() == stamp:
        return str(folder)
    with locked(folder.with_name(folder.name + ".lock")):
        if (folder / "source").exists() and (folder / "source").read_text() == stamp:
            return str(folder)
        if importlib.util.find_spec("gguf") is None:
            raise UserError(f"{path}: .gguf files need a package that is not installed: pip install gguf")
        from transformers import AutoModelForCausalLM, AutoTokenizer

        quiet_in_logs()
        say(f"converting {file} to {folder} (once)")
        try:
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
        except Exception as error:  # of the parser, which knows no kinds
            raise UserError(f"{file} cannot be read, it may be damaged ({_first_line(error)}); get it again") from None
        # The weights are plain float32 by now; without these lines saving is refused as "quantized".
        model.hf_quantizer, model.is_quantized = None, False
        del model.config.quantization_config
        model.config.dtype = torch.float32
        with replacing(folder) as temporary:
            model.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
            (temporary / "source").write_text(stamp)
    return str(folder)


def load_tokenizer(path: str, trust_remote_code: bool = False):
    """The tokenizer of a model, with a chat template and a pad token that is not the eos token where possible.

    A pad token apart from eos lets any code that searches for padding, such as the classification models of
    transformers, read the right position. No token is ever added, so embeddings keep their size.
    """
    from transformers import AutoTokenizer

    source = adapter_base(path) or resolve_model_path(path)
    if adapter_base(path) and (Path(path) / "tokenizer_config.json").exists():
        source = path
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer at {path}: {_first_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {path} has no eos token, so responses could not end; set one and save it")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        specials = [tokenizer.unk_token, *tokenizer.all_special_tokens, tokenizer.eos_token]
        taken = (None, tokenizer.eos_token, tokenizer.bos_token)
        tokenizer.pad_token = next((t for t in specials if t not in taken), tokenizer.eos_token)
    return tokenizer


def template_fingerprint(tokenizer) -> str:
    """A short hash of all that decides the ids of a dialogue: template, eos and vocabulary."""
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    text = "\0".join([tokenizer.chat_template, str(tokenizer.eos_token_id), vocabulary])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware computes in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def adapter_base(path: str) -> str | None:
    """The base model of a LoRA folder, or None if `path` is not one."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return None
    check_weights(file.parent)
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged ({type(error).__name__}: {_first_line(error)}); save it again") from None
    return resolve_model_path(base)


def check_weights(folder: Path) -> None:
    """The header and the length of each safetensors file. Raises UserError."""
    from safetensors import SafetensorError, safe_open

    for file in sorted(folder.glob("*.safetensors")):
        try:
            safe_open(file, "pt")
        except SafetensorError as error:
            raise UserError(f"{file} is damaged or not whole ({error}); get it again") from None


def same_model(path: str, other: str) -> bool:
    """Whether two paths or hub names mean the same model."""
    one, two = resolve_model_path(path), resolve_model_path(other)
    return one == two or (Path(one).exists() and Path(two).exists() and Path(one).samefile(two))


def load_causal_lm(cfg: ModelConfig, device: torch.device, dtype: torch.dtype | None = None):
    """A causal language model in eval mode with all dropout off and all weights frozen.

    A LoRA folder (`adapter_config.json`) is merged into its base.
    """
    from transformers import AutoModelForCausalLM

    base = adapter_base(cfg.path)
    model = _from_pretrained(AutoModelForCausalLM, base or cfg.path, cfg, dtype or model_dtype(cfg.dtype, device))
    if base:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, cfg.path).merge_and_unload()
    return freeze(model).to(device)


def load_reward_model(cfg: ModelConfig, device: torch.device, dtype: torch.dtype | None = None):
    """A one-output `AutoModelForSequenceClassification` from a merged folder or a LoRA folder with its head.

    A folder without a score head, or with more than one output, is refused.
    """
    from transformers import AutoModelForSequenceClassification

    dtype = dtype or model_dtype(cfg.dtype, device)
    base = adapter_base(cfg.path)
    if base:
        if not any(key.endswith("score.weight") for key in _adapter_weights(cfg.path)):
            raise UserError(
                f"{cfg.path} is a LoRA folder without a score head, so not a reward model; see train_reward.py"
            )
        from peft import PeftModel

        model = _from_pretrained(AutoModelForSequenceClassification, base, cfg, dtype, num_labels=1)
        model = PeftModel.from_pretrained(model, cfg.path).merge_and_unload()
    else:
        config = _config_of(cfg)
        architectures = config.architectures or []
        if not any("SequenceClassification" in name or "RewardModel" in name for name in architectures):
            raise UserError(
                f"{cfg.path} is a {'/'.join(architectures) or 'model'} without a score head; "
                "give a reward model, see train_reward.py"
            )
        if config.num_labels != 1:
            raise UserError(f"{cfg.path} has {config.num_labels} outputs; a reward model has one")
        model = _from_pretrained(AutoModelForSequenceClassification, cfg.path, cfg, dtype)
    return freeze(model).to(device)


def new_reward_model(cfg: ModelConfig, device: torch.device, seed: int, dtype: torch.dtype | None = None):
    """A language model's trunk with a new one-output score head, drawn from N(0, 1/(hidden+1)).

    (Stiennon et al. 2020.) A path that is a reward model already keeps its head.
    """
    from transformers import AutoModelForSequenceClassification

    if adapter_base(cfg.path) or "SequenceClassification" in "".join(_config_of(cfg).architectures or []):
        return load_reward_model(cfg, device, dtype)
    model = _from_pretrained(
        AutoModelForSequenceClassification, cfg.path, cfg, dtype or model_dtype(cfg.dtype, device), num_labels=1
    )
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(model.score.weight.shape, generator=generator) / (model.score.in_features + 1) ** 0.5
    model.score.weight.data.copy_(weight)
    if getattr(model.score, "bias", None) is not None:
        model.score.bias.data.zero_()
    return freeze(model).to(device)


def _config_of(cfg: ModelConfig):
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(resolve_model_path(cfg.path), trust_remote_code=cfg.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"no model at {cfg.path}: {_first_line(error)}") from None


def _from_pretrained(auto_class, path: str, cfg: ModelConfig, dtype: torch.dtype, **kwargs):
    from transformers.utils import logging

    quiet_in_logs()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # "score.weight newly initialized" is intended; a missing head is checked above
    try:
        model, info = auto_class.from_pretrained(
            resolve_model_path(path),
            dtype=dtype,
            attn_implementation=cfg.attn_implementation,
            trust_remote_code=cfg.trust_remote_code,
            output_loading_info=True,
            **kwargs,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"no model at {path}: {_first_line(error)}") from None
    finally:
        logging.set_verbosity(level)
    if auto_class.__name__ == "AutoModelForSequenceClassification":
        if not isinstance(getattr(model, "score", None), nn.Linear):
            raise UserError(
                f"{path} is a {type(model).__name__} without a linear head named score; choose a decoder model"
            )
        head = ScalarHead(model.score.in_features, model.score.out_features, bias=model.score.bias is not None)
        head.load_state_dict(model.score.state_dict())
        model.score = head
    missing = [key for key in info["missing_keys"] if not ("num_labels" in kwargs and key.startswith("score."))]
    if missing:
        raise UserError(f"{path} lacks weights: {', '.join(sorted(missing)[:3])}{' ...' if len(missing) > 3 else ''}")
    return model


def quiet_in_logs() -> None:
    """The bars of transformers are for terminals."""
    from transformers.utils import logging

    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def freeze(model: nn.Module) -> nn.Module:
    """Eval mode for good: no gradients and every dropout off, so that any two forwards of one text agree."""
    model.eval().requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name in "attention_dropout attn_pdrop resid_pdrop embd_pdrop hidden_dropout classifier_dropout".split():
        if isinstance(getattr(model, "config", None) and getattr(model.config, name, None), float):
            setattr(model.config, name, 0.0)
    return model


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _adapter_weights(path: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    file = Path(path) / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(f"{path} has adapter_config.json but no adapter_model.safetensors; the folder is incomplete")
    return load_file(file)


def max_positions(model) -> int | None:
    """Longest sequence (prompt and response, in tokens) that the model's positions allow."""
    return getattr(model.config, "max_position_embeddings", None)


def eos_ids(tokenizer, model) -> list[int]:
    """Every token that ends a response: the tokenizer's eos and those of the model's generation config."""
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = more if isinstance(more, (list, tuple)) else [more]
    return sorted({tokenizer.eos_token_id, *(token for token in more if token is not None)})


# ---------------------------------------------------------------------------------------------------- forward


def trunk_of(model: nn.Module) -> nn.Module:
    """The transformer without its head; calling it gives hidden states."""
    return getattr(model, model.base_model_prefix)


def last_hidden(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, S) ids, right-padded -> (B, S, H)."""
    return trunk_of(model)(
        input_ids=input_ids, attention_mask=attention_mask.long(), use_cache=False
    ).last_hidden_state


class ScalarHead(nn.Linear):
    """Hidden states (..., H) -> (..., 1) in fp32, whatever the dtype of states and weights."""

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return nn.functional.linear(
                hidden.float(), self.weight.float(), None if self.bias is None else self.bias.float()
            )


def score_at_end(head: nn.Module, hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """Scores (B,) in fp32, read at each row's last real token, found by the mask and never by a token id."""
    last = attention_mask.long().sum(-1) - 1
    return head(hidden[torch.arange(len(hidden), device=hidden.device), last])[:, 0]


def project(model: nn.Module, hidden: Tensor) -> Tensor:
    """Hidden states (N, H) -> logits (N, V), with the scaling or capping that some families apply."""
    logits = model.get_output_embeddings()(hidden)
    config = model.config
    if getattr(config, "logits_scaling", None):  # Granite divides
        logits = logits / config.logits_scaling
    if getattr(config, "logit_scale", None):  # Cohere multiplies
        logits = logits * config.logit_scale
    if getattr(config, "final_logit_softcapping", None):  # Gemma 2 caps
        logits = torch.tanh(logits / config.final_logit_softcapping) * config.final_logit_softcapping
    return logits


def chunked_logprobs(
    model: nn.Module, hidden: Tensor, labels: Tensor, temperature: float, entropy: bool
) -> list[Tensor]:
    """Log-probabilities of `labels` at `temperature`, and entropies if asked: (N, H), (N,) -> [(N,)] or [(N,), (N,)].

    In fp32 and nats. Logits exist for LOGITS_CHUNK positions at a time and are computed again in the
    backward pass, so memory does not grow with the batch.
    """

    def chunk(h: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        logits = project(model, h).float() / temperature
        return (token_logprobs(logits, y), token_entropy(logits)) if entropy else (token_logprobs(logits, y),)

    outputs = []
    for start in range(0, len(labels), LOGITS_CHUNK):
        h, y = hidden[start : start + LOGITS_CHUNK], labels[start : start + LOGITS_CHUNK]
        outputs.append(checkpoint(chunk, h, y, use_reentrant=False) if h.requires_grad else chunk(h, y))
    return [torch.cat(parts) for parts in zip(*outputs)]


class RoleModel(nn.Module):
    """Policy, reference, critic and reward behind one forward and one `accelerator.prepare`.

    roles: role -> (name of its model in `models`, name of its adapter or None for the plain weights).
    Trained weights are float32; the arithmetic runs in the dtype of the frozen weights.
    """

    def __init__(self, models: dict[str, nn.Module], roles: dict[str, tuple[str, str | None]], dtype: torch.dtype):
        super().__init__()
        self.models = nn.ModuleDict(models)
        self.roles = roles
        self.dtype = dtype
        self.value_head: ScalarHead | None = None
        if "critic" in roles:
            self.value_head = ScalarHead(self.lm("critic").config.get_text_config().hidden_size, 1)
            nn.init.zeros_(self.value_head.weight)  # values start at 0, the mean of whitened returns
            nn.init.zeros_(self.value_head.bias)
        self.score_head: ScalarHead | None = None
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()

    def lm(self, role: str) -> nn.Module:
        """The transformers model behind a role, without peft's wrapper."""
        model = self.models[self.roles[role][0]]
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    @contextlib.contextmanager
    def use(self, role: str):
        """Inside, the role's model runs with the role's adapter.

        peft's `set_adapter` would turn off the gradients of the other adapters, so the active name is set
        on the layers directly.
        """
        name, adapter = self.roles[role]
        layers = _lora_layers(self.models[name])
        before = [(layer._active_adapter, layer._disable_adapters) for layer in layers]
        for layer in layers:
            layer._active_adapter, layer._disable_adapters = [adapter] if adapter else [], adapter is None
        self.current_role = role
        try:
            yield self.lm(role)
        finally:
            for layer, (active, disabled) in zip(layers, before):
                layer._active_adapter, layer._disable_adapters = active, disabled

    def enable_checkpointing(self) -> None:
        """Gradient checkpointing whose recomputation runs with the adapter that the forward ran with."""

        def contexts():
            return contextlib.nullcontext(), self.use(self.current_role)

        for name in {self.roles[role][0] for role in ("policy", "critic") if role in self.roles}:
            start_checkpointing(self.models[name], context_fn=contexts)

    def forward(
        self, batch: dict[str, Tensor], roles: tuple[str, ...], temperature: float = 1.0, entropy: bool = False
    ) -> dict[str, Tensor]:
        """Response-token outputs of the asked roles, from right-padded prompt + response rows.

        batch: `input_ids` (B, S), `attention_mask` (B, S) bool, `response_mask` (B, S) bool, true on response
        tokens. Returns flat fp32 tensors over the N response tokens in row order: `logprobs` and, if asked,
        `entropy` (policy), `ref_logprobs` (reference), `values` (critic: of the state before each token); and
        `scores` (B,) (reward).
        """
        ids, mask, response = batch["input_ids"], batch["attention_mask"], batch["response_mask"][:, 1:]
        labels = ids[:, 1:][response]  # (N,)
        out, states = {}, None
        with arithmetic(self.models.values(), self.dtype):
            for role in roles:
                if role == "critic" and self.roles["critic"] == self.roles["policy"] and "logprobs" in out:
                    pass  # a shared trunk has run already
                else:
                    with self.use(role) as lm:
                        hidden = last_hidden(lm, ids, mask)  # (B, S, H)
                    states = hidden[:, :-1][response]  # (N, H): the state that each response token was drawn from
                if role == "policy":
                    names = ("logprobs", "entropy")
                    out |= zip(names, chunked_logprobs(self.lm(role), states, labels, temperature, entropy))
                elif role == "reference":
                    out["ref_logprobs"] = chunked_logprobs(self.lm(role), states, labels, temperature, False)[0]
                elif role == "critic":
                    out["values"] = self.value_head(states)[:, 0]
                elif role == "reward":
                    head = self.score_head if self.score_head is not None else self.lm("reward").score
                    out["scores"] = score_at_end(head, hidden, mask)
        return out

    def trainable(self) -> dict[str, nn.Parameter]:
        """All trained parameters by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Trained parameters of `policy` and, if there is one, of `critic`."""
        groups = {"policy": [], "critic": []}
        for name, parameter in self.trainable().items():
            groups["critic" if self._is_critic(name) else "policy"].append(parameter)
        return {name: parameters for name, parameters in groups.items() if parameters}

    def _is_critic(self, name: str) -> bool:
        return name.startswith("value_head.") or ".critic." in f".{name}"


def arithmetic(models, dtype: torch.dtype) -> contextlib.ExitStack:
    """Autocast to `dtype` unless it is float32, with peft's own casts to float32 off."""
    stack = contextlib.ExitStack()
    if dtype != torch.float32:
        from peft.helpers import disable_input_dtype_casting

        models = list(models)
        stack.enter_context(torch.autocast(next(models[0].parameters()).device.type, dtype))
        for model in models:
            if hasattr(model, "get_base_model"):
                stack.enter_context(disable_input_dtype_casting(model))
    return stack


def start_checkpointing(model: nn.Module, **kwargs) -> None:
    """Recompute each layer's activations in the backward pass.

    transformers does so in train mode only, and generates without a cache then, so the layers' mode
    follows whether gradients are on; dropout is 0 in either mode.
    """
    model.gradient_checkpointing_enable({"use_reentrant": False, **kwargs})
    model.enable_input_require_grads()

    def follow_grad_mode(trunk, args):
        for module in trunk.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.training = torch.is_grad_enabled()

    trunk_of(model.get_base_model() if hasattr(model, "get_base_model") else model).register_forward_pre_hook(
        follow_grad_mode
    )


def _lora_layers(model: nn.Module) -> list[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def add_lora(model: nn.Module, options: LoraOptions, adapter: str, seed: int, task: str | None = "CAUSAL_LM"):
    """Put a new adapter on `model` (wrapped on the first call); A is drawn from the seed, B is 0."""
    from peft import LoraConfig, PeftModel, get_peft_model

    layers, targets = None, options.target_modules
    if options.last_layers is not None:
        n = model.config.get_text_config().num_hidden_layers
        if not 1 <= options.last_layers <= n:
            raise UserError(f"lora.last_layers {options.last_layers} must be between 1 and the model's {n} layers")
        layers = list(range(n - options.last_layers, n))
        if targets == "all-linear":  # peft wants names when layers are chosen
            trunk = trunk_of(model.get_base_model() if isinstance(model, PeftModel) else model)
            linear = (
                m for m in trunk.named_modules() if isinstance(m[1], nn.Linear) or type(m[1]).__name__ == "Conv1D"
            )
            targets = sorted(
                {
                    name.split(".")[-1]
                    for name, _ in linear
                    if ".lora_" not in name and name.split(".")[-1] != "base_layer"
                }
                | {name.split(".")[-2] for name, _ in trunk.named_modules() if name.endswith(".base_layer")}
            )
    config = LoraConfig(
        r=options.r,
        lora_alpha=options.lora_alpha,
        target_modules=targets,
        layers_to_transform=layers,
        task_type=task,
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            if not isinstance(model, PeftModel):
                model = get_peft_model(model, config, adapter_name=adapter)
            else:
                model.add_adapter(adapter, config)
        except ValueError as error:
            raise UserError(f"lora.target_modules {options.target_modules}: {_first_line(error)}") from None
    base = model.get_base_model()
    if any(layer in (base.get_input_embeddings(), base.get_output_embeddings()) for layer in _lora_layers(base)):
        raise UserError(
            f"lora.target_modules {options.target_modules} names the embedding or the output layer, "
            "which the roles share; leave it out"
        )
    return model


def add_reward_adapter(model: nn.Module, path: str, adapter: str) -> ScalarHead:
    """Load a LoRA reward model onto the shared backbone as a frozen adapter; returns its frozen score head."""
    from peft import PeftConfig, set_peft_model_state_dict

    config = PeftConfig.from_pretrained(path)
    weights = _adapter_weights(path)
    heads = [key for key in weights if key.endswith("score.weight")]
    if not heads:
        raise UserError(f"{path} is a LoRA folder without a score head, so not a reward model; see train_reward.py")
    score = weights.pop(heads[0])
    config.task_type, config.modules_to_save, config.inference_mode, config.lora_dropout = (
        "CAUSAL_LM",
        None,
        False,
        0.0,
    )
    model.add_adapter(adapter, config)
    result = set_peft_model_state_dict(model, weights, adapter_name=adapter)
    places = [p for n, p in model.named_parameters() if f".{adapter}." in n]
    if result.unexpected_keys or len(places) != len(weights):
        raise UserError(f"{path} does not fit the model: {len(weights)} adapter weights for {len(places)} places")
    for parameter in places:
        parameter.requires_grad_(False)
    head = ScalarHead(score.shape[1], 1, bias=False)
    head.weight.data.copy_(score)
    return head.requires_grad_(False)


# ---------------------------------------------------------------------------------------------------- saving


def merged_state_dict(model: nn.Module, adapter: str | None, keep: bool = True) -> dict[str, Tensor]:
    """Plain transformers weights, on the CPU, with one adapter added to its layers; the model is untouched.

    Under ZeRO-3 all ranks call it, and those that do not write the weights say `keep=False`, which returns nothing.
    """
    merged, copies = {}, {}
    layers = {}
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    if adapter is not None:
        layers = {
            name: m for name, m in base.named_modules() if hasattr(m, "get_delta_weight") and adapter in m.lora_A
        }
    for name, tensor in base.state_dict(keep_vars=True).items():
        if ".lora_" in name or ".modules_to_save." in name or ".original_module." in name:
            continue
        module, _, leaf = name.rpartition(".base_layer.")
        changed = module in layers and leaf == "weight"
        with whole([tensor, *(layers[module].parameters() if changed else ())]):
            if not keep:
                continue
            if id(tensor) not in copies:  # tied weights stay one tensor
                value = tensor.detach()
                if changed:
                    value = (value.float() + layers[module].get_delta_weight(adapter).detach().float()).to(value.dtype)
                copies[id(tensor)] = value.cpu().clone() if hasattr(tensor, "ds_id") else value.cpu()
            merged[name.replace(".base_layer.", ".")] = copies[id(tensor)]
    return merged


def save_model(
    model: nn.Module,
    state: dict[str, Tensor],
    tokenizer,
    folder: Path,
    more: dict[str, dict[str, Tensor]] | None = None,
) -> None:
    """Write a plain Hugging Face folder (safetensors), whole or not at all; `more`: file name -> tensors beside it."""
    quiet_in_logs()
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    generation = getattr(base, "generation_config", None)
    if generation is not None and not generation.do_sample:
        try:
            generation.validate(strict=True)
        except ValueError:  # sampling settings without do_sample, as some models ship them, are refused at saving
            generation.do_sample = True
    with replacing(folder) as temporary:
        base.save_pretrained(temporary, state_dict=state)
        tokenizer.save_pretrained(temporary)
        save_tensors(temporary, more or {})


def save_tensors(folder: Path, files: dict[str, dict[str, Tensor]]) -> None:
    from safetensors.torch import save_file

    for name, tensors in files.items():
        save_file(tensors, folder / name)


def save_adapter(
    model, adapter: str, folder: Path, head: Tensor | None = None, more: dict[str, dict[str, Tensor]] | None = None
) -> None:
    """Write one adapter as a peft folder, with a one-output `score` head where given; `more` as for save_model."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    weights = {
        k: v.detach().cpu().contiguous() for k, v in get_peft_model_state_dict(model, adapter_name=adapter).items()
    }
    config = model.peft_config[adapter]
    task, modules = config.task_type, config.modules_to_save
    if Path(config.base_model_name_or_path).is_dir():  # so that the folder opens from anywhere
        config.base_model_name_or_path = str(Path(config.base_model_name_or_path).resolve())
    if head is not None:
        weights["base_model.model.score.weight"] = head.detach().cpu().contiguous()
        config.task_type, config.modules_to_save = "SEQ_CLS", ["score"]
    with replacing(folder) as temporary:
        config.save_pretrained(temporary)
        save_file(weights, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        save_tensors(temporary, more or {})
    config.task_type, config.modules_to_save = task, modules


def read_stats(path: str) -> dict | None:
    """What the scores of a reward model mean (`reward_stats.json` beside it), or None if nobody measured it."""
    file = Path(path) / STATS_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def score_scale(path: str) -> tuple[float, float]:
    """Mean and deviation of a reward model's scores on its held-out data; (0, 1) if nobody measured them."""
    stats = read_stats(path)
    return (stats["score_mean"], max(stats["score_std"], 1e-6)) if stats else (0.0, 1.0)


def write_stats(path: Path, stats: dict) -> None:
    write_json(path / STATS_FILE, stats)
