"""Loading and saving models, and the four roles of PPO on one backbone.

`RoleModel` holds policy, reference, critic and reward. With LoRA they share one frozen base model: `policy`,
`critic` and `reward` are adapters on it, and the reference is the base without an adapter.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib.util
import json
import math
import os
import re
import sys
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from utils.config import LoraOptions, ModelConfig, UserError, first_line
from utils.data import TEMPLATE_DATE, encode_dialogues
from utils.files import locked, replacing, write_json
from utils.tensors import round_randomly, token_entropy, token_logprobs
from utils.tracking import say, say_once

# A model without a chat template gets this one. Each turn ends with the eos token, as each response does.
PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
STATS_FILE = "reward_stats.json"  # beside a reward model: what its scores mean
FIXED_DIALOGUES = [  # what a template's fingerprint is made of; the first one every template can write
    [{"role": "user", "content": "Name a colour."}],
    [
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And 2 more?"},
    ],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}],
]
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

    def converted() -> bool:
        return (folder / "source").exists() and (folder / "source").read_text() == stamp

    if converted():  # a disk for reading only is enough then
        return str(folder)
    with locked(folder.with_name(folder.name + ".lock")):
        if converted():
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
            raise UserError(f"{file} cannot be read, it may be damaged ({first_line(error)}); get it again") from None
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
        raise UserError(f"no tokenizer at {path}: {first_line(error)}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {path} has no eos token, so responses could not end; set one and save it")
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise UserError(f"the tokenizer of {path} has chat templates {names} and none named default; name one so")
    if "strftime_now" in str(tokenizer.chat_template):
        say_once(f"the chat template of {path} prints the date; all stages read it as {TEMPLATE_DATE:%d %b %Y}")
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id == tokenizer.eos_token_id:
        tokenizer.pad_token = _spare_token(tokenizer) or tokenizer.eos_token
    return tokenizer


def _spare_token(tokenizer) -> str | None:
    """A special token that can pad: not eos, not bos; one that is made for it or reserved before any other."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    made_for_it = [t for word in ("pad", "reserved|unused") for t in added if re.search(word, t)]
    for token in (*made_for_it, tokenizer.unk_token, *tokenizer.all_special_tokens, *added):
        if token not in (None, tokenizer.eos_token, tokenizer.bos_token):
            return token
    return None


def pad_apart_from_eos(tokenizer):
    """The tokenizer, for a reward model: its pad token is not its eos token, if need be a word of the vocabulary.

    Plain transformers reads a score at the last token that is not the pad token. Every scored text ends with eos, so
    any other token will do; one whose spelling holds the mark of a space is never mistaken for text.
    """
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        words = sorted(tokenizer.get_vocab().items(), key=lambda item: -item[1])
        tokenizer.pad_token = next(
            (word for word, token in words if token != tokenizer.eos_token_id and re.match("[\u0120\u2581].", word)),
            tokenizer.pad_token,
        )
    return tokenizer


def template_fingerprint(tokenizer) -> str:
    """A short hash of what decides the ids of a dialogue: those of three fixed ones, eos and vocabulary.

    So it is the template that training uses which counts, whatever its name, and no comment or line break in it.
    """
    ids = []
    for dialogue in FIXED_DIALOGUES:
        try:
            ids.append(encode_dialogues(tokenizer, [dialogue]))
        except Exception as error:  # templates refuse what they do not know by errors of their own, as a system turn
            if len(dialogue) == 1:
                raise UserError(f"the chat template cannot write one user turn: {first_line(error)}") from None
            ids.append(None)
    return _short_hash(json.dumps([ids, tokenizer.eos_token_id, sorted(tokenizer.get_vocab().items())]))


def _older_fingerprint(tokenizer) -> str | None:
    """As folders of earlier versions hold it, of the template's own text; None where that text did not fix the ids."""
    template = tokenizer.chat_template
    if not isinstance(template, str) or "strftime_now" in template:
        return None
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return _short_hash("\0".join([template, str(tokenizer.eos_token_id), vocabulary]))


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def model_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware computes in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return torch.bfloat16 if torch.cpu._is_avx512_bf16_supported() else torch.float32


def stored_dtype(cfg: ModelConfig) -> torch.dtype:
    """The type that a fully trained model is saved in: that of its base, unless model.dtype names one."""
    if cfg.dtype != "auto":
        return getattr(torch, cfg.dtype)
    config = _config_of(dataclasses.replace(cfg, path=adapter_base(cfg.path) or cfg.path))
    dtype = config.dtype or config.get_text_config().dtype or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def adapter_base(path: str) -> str | None:
    """The base model of a LoRA folder, or None if `path` is not one."""
    file = Path(path) / "adapter_config.json"
    if not file.is_file():
        return None
    check_weights(file.parent)
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({error}); save the adapter again") from None
    if not base:
        raise UserError(f"{file} does not name its base model; write it there as base_model_name_or_path")
    return resolve_model_path(base)


def check_weights(folder: Path) -> None:
    """The header and the length of each safetensors file. Raises UserError."""
    from safetensors import safe_open

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

    A LoRA folder (`adapter_config.json`) is merged into its base. A reward model is refused, and one that could not be
    opened again when it is saved.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    base, dtype = adapter_base(cfg.path), dtype or model_dtype(cfg.dtype, device)
    scores = _has_score_head(_adapter_weights(cfg.path)) if base else _is_classifier(_config_of(cfg))
    if scores:
        raise UserError(f"{cfg.path} is a reward model, which writes no text; give a causal language model")
    if base:
        model = _merged(_from_pretrained(AutoModelForCausalLM, base, cfg, torch.float32), cfg.path, dtype)
    else:
        model = _from_pretrained(AutoModelForCausalLM, cfg.path, cfg, dtype)
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(model.config, "auto_map", None):
        raise UserError(
            f"{cfg.path} is a part of a larger model ({model.config.model_type}), which could not be saved"
        )
    return freeze(model).to(device)


def _merged(model: nn.Module, path: str, dtype: torch.dtype) -> nn.Module:
    """A float32 model with the LoRA folder at `path` in its weights, in `dtype`; see `round_randomly`."""
    model = _with_adapter(model, path).merge_and_unload()
    model.tie_weights()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = round_randomly(parameter.data, dtype, generator)
    return model


def _with_adapter(model: nn.Module, path: str) -> nn.Module:
    """peft's model of a LoRA folder; its tokens beyond the base's vocabulary get their rows."""
    from peft import PeftModel

    name = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    rows = [len(w) for key, w in _adapter_weights(path).items() if key.endswith(f"{name}.weight")]
    if rows and rows[0] != len(model.get_input_embeddings().weight):
        model.resize_token_embeddings(rows[0], mean_resizing=False)
    try:
        return PeftModel.from_pretrained(model, path)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UserError(f"the LoRA folder {path} does not fit its base: {first_line(error)}") from None


def load_reward_model(
    cfg: ModelConfig, device: torch.device, dtype: torch.dtype | None = None, merge: bool = False
) -> nn.Module:
    """A one-output `AutoModelForSequenceClassification` from a merged folder or a LoRA folder with its head.

    A LoRA folder's adapter stays beside its layers, as in training, so that nothing is rounded; merge: in the weights.
    A folder without a score head, or with more than one output, is refused.
    """
    from transformers import AutoModelForSequenceClassification

    dtype = dtype or model_dtype(cfg.dtype, device)
    base = adapter_base(cfg.path)
    if base:
        if not _has_score_head(_adapter_weights(cfg.path)):
            raise UserError(
                f"{cfg.path} is a LoRA folder without a score head, so not a reward model; see train_reward.py"
            )
        loaded = torch.float32 if merge else dtype
        model = _from_pretrained(AutoModelForSequenceClassification, base, cfg, loaded, num_labels=1)
        if merge:
            model = _merged(model, cfg.path, dtype)
        else:
            model = _with_adapter(model, cfg.path).get_base_model()
            model.score = getattr(model.score, "modules_to_save", {"default": model.score})["default"]
    else:
        config = _config_of(cfg)
        if not _is_classifier(config):
            raise UserError(
                f"{cfg.path} is a {'/'.join(config.architectures or []) or 'model'} without a score head; "
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

    if adapter_base(cfg.path) or _is_classifier(_config_of(cfg)):
        return load_reward_model(cfg, device, dtype, merge=True)
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

    path = resolve_model_path(cfg.path)
    if Path(path).is_dir() and not (Path(path) / "config.json").exists():
        inner = [f"{name}/" for name in ("final", "adapter") if (Path(path) / name).is_dir()]
        raise UserError(f"{path} has no config.json" + (f"; did you mean {path}/{inner[0]}?" if inner else ""))
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"no model at {cfg.path}: {first_line(error)}") from None


def _is_classifier(config) -> bool:
    """Whether a model's config says that it scores texts."""
    return any("SequenceClassification" in name or "RewardModel" in name for name in config.architectures or [])


def _has_score_head(weights: dict[str, Tensor]) -> bool:
    return any(key.endswith("score.weight") for key in weights)


@contextlib.contextmanager
def loading_quietly():
    """Inside, transformers does not report the weights that it misses: a new head is intended, others are checked."""
    from transformers.utils import logging

    quiet_in_logs()
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def _from_pretrained(auto_class, path: str, cfg: ModelConfig, dtype: torch.dtype, **kwargs):
    quantised = getattr(_config_of(dataclasses.replace(cfg, path=path)), "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else type(quantised).__name__
        raise UserError(f"{path} is quantised ({method}), so what is trained could not be saved; give the plain model")
    try:
        with loading_quietly():
            model, info = auto_class.from_pretrained(
                resolve_model_path(path),
                dtype=dtype,
                attn_implementation=cfg.attn_implementation,
                trust_remote_code=cfg.trust_remote_code,
                output_loading_info=True,
                **kwargs,
            )
    except ImportError as error:
        raise UserError(f"{path}: {first_line(error)} (model.attn_implementation {cfg.attn_implementation})") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"no model at {path}: {first_line(error)}") from None
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
    for module in model.modules():  # nn.Dropout has p; families name the rest dropout, attn_pdrop, layerdrop ...
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, nn.Dropout))):
                setattr(module, name, 0.0)
    return model


def _adapter_weights(path: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    file = Path(path) / "adapter_model.safetensors"
    if not file.is_file():
        raise UserError(f"{path} has adapter_config.json but no adapter_model.safetensors; the folder is incomplete")
    return load_file(file)


def max_positions(model) -> int | None:
    """Longest sequence (prompt and response, in tokens) that the model's positions allow."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def eos_ids(tokenizer, model) -> list[int]:
    """Every token that ends a response: the tokenizer's eos and those of the model's generation config."""
    more = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    more = more if isinstance(more, (list, tuple)) else [more]
    return sorted({tokenizer.eos_token_id, *(token for token in more if token is not None)})


# ---------------------------------------------------------------------------------------------------- forward


def train_all(model: nn.Module) -> nn.Module:
    """Full fine-tuning: gradients for all weights that text passes through; a vision tower's stay frozen."""
    for part in (decoder_of(model), model.get_output_embeddings(), getattr(model, "score", None)):
        if part is not None:
            part.requires_grad_(True)
    return model


def hidden_width(model: nn.Module) -> int:
    """Width of the states that a head reads; not always config.hidden_size (OPT-350m projects down)."""
    head = model.get_output_embeddings()
    return model.score.in_features if head is None else head.weight.shape[-1]


def trunk_of(model: nn.Module) -> nn.Module:
    """The transformer without its head; calling it gives hidden states."""
    return getattr(model, trunk_name(model))


def decoder_of(model: nn.Module) -> nn.Module:
    """The part of the trunk that text passes through: all of it but for towers for images and sound."""
    trunk, decoder = trunk_of(model), model.get_decoder()
    return decoder if any(decoder is module for module in trunk.modules()) else trunk


def trunk_name(model: nn.Module) -> str:
    """base_model_prefix, where there is such a part; Llama 4 and others name it differently."""
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"


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


class _Ready:
    """Stands in for a trunk that has run: called, it gives the states; all else in its output is None."""

    def __init__(self, hidden: Tensor):
        self.last_hidden_state = hidden

    def __call__(self, *args, **kwargs):
        return self

    def __getitem__(self, index):
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self if name == "decoder" else None  # some families call their trunk's decoder


def project(model: nn.Module, hidden: Tensor) -> Tensor:
    """Hidden states (N, H) -> logits (N, V), by the model's own code: its forward runs, with `hidden` for the trunk.

    Whatever a family does between states and logits (scaling, capping, more layers) is done here too.
    """
    place, trunk = trunk_name(model), trunk_of(model)
    ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
    model._modules[place] = _Ready(hidden[None])
    try:
        return model.forward(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    finally:
        model._modules[place] = trunk


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
            self.value_head = ScalarHead(hidden_width(self.lm("critic")), 1)
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
            stack.enter_context(disable_input_dtype_casting(model))
    return stack


def start_checkpointing(model: nn.Module, **kwargs) -> None:
    """Recompute each layer's activations in the backward pass.

    transformers does so in train mode only, and generates without a cache then, so the layers' mode
    follows whether gradients are on; dropout is 0 in either mode.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    try:
        model.gradient_checkpointing_enable({"use_reentrant": False, **kwargs})
    except ValueError as error:
        raise UserError(f"model.gradient_checkpointing: {first_line(error)}") from None
    model.enable_input_require_grads()

    def follow_grad_mode(part, args):
        for module in part.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.training = torch.is_grad_enabled()

    for part in {base, trunk_of(base), decoder_of(base)}:  # whichever is called
        part.register_forward_pre_hook(follow_grad_mode)


def _lora_layers(model: nn.Module) -> list[nn.Module]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _without_adapters(model: nn.Module) -> str | None:
    """A pattern for the modules that all-linear must leave alone.

    Outside the decoder: a vision tower, which no text passes through, and layers before the output embeddings, which
    the roles share. Inside: kinds of linear layers of a family's own, which compute something else.
    """
    text = {*decoder_of(model).modules(), model.get_output_embeddings()}
    names = [
        re.escape(name)
        for name, module in model.named_modules()
        if (module not in text and not any(module.children()) and name != "score")
        or (isinstance(module, nn.Linear) and type(module) not in (nn.Linear, ScalarHead))
    ]
    return "|".join(names) or None


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
        exclude_modules=_without_adapters(model.get_base_model() if isinstance(model, PeftModel) else model),
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
            raise UserError(f"lora.target_modules {options.target_modules}: {first_line(error)}") from None
    base, places = model.get_base_model(), [layer for layer in _lora_layers(model) if adapter in layer.lora_A]
    weights = {id(adapted_weight(layer)) for layer in places}
    if len(weights) < len(places):
        raise UserError(
            f"{type(base).__name__} uses the same weights in several places, so an adapter in each cannot be merged; "
            "leave those layers out by lora.target_modules, or set lora null"
        )
    if any(layer in (base.get_input_embeddings(), base.get_output_embeddings()) for layer in _lora_layers(base)):
        raise UserError(
            f"lora.target_modules {options.target_modules} names the embedding or the output layer, "
            "which the roles share; leave it out"
        )
    return model


def adapted_weight(layer: nn.Module) -> Tensor:
    """The base weight that a LoRA layer changes; experts are weights without a layer of their own."""
    return layer.get_param() if hasattr(layer, "get_param") else layer.get_base_layer().weight


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


# ---------------------------------------------------------------------------------------------- what scores mean


def read_stats(path: str, tokenizer=None, holder: str = "its folder holds") -> dict | None:
    """What the scores of a reward model mean (`reward_stats.json` beside it), or None if nobody measured it.

    tokenizer: what the model is about to read by, and holder says whose it is. Raises UserError where dialogues would
    have other ids than in the model's training, and where the file's numbers cannot scale a score.
    """
    file = Path(path) / STATS_FILE
    if not file.is_file():
        return None
    try:
        stats = {"temperature": 1.0} | json.loads(file.read_text(encoding="utf-8"))
        mean, std, temperature = (float(stats[name]) for name in ("score_mean", "score_std", "temperature"))
        known = stats["template_fingerprint"]
        if not (math.isfinite(mean) and 0 <= std < math.inf and 0 < temperature < math.inf):
            raise ValueError(f"mean {mean}, deviation {std}, temperature {temperature}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} says nothing usable ({error!r}); train_reward.py writes it anew") from None
    if tokenizer is not None and known not in (template_fingerprint(tokenizer), _older_fingerprint(tokenizer)):
        raise UserError(
            f"{path} was trained with another chat template or tokenizer than {holder}, "
            "so its scores would mean nothing; train it again"
        )
    return stats | {"score_mean": mean, "score_std": max(std, 1e-6), "temperature": temperature}


def score_scale(path: str, tokenizer=None) -> tuple[float, float]:
    """Mean and deviation of a reward model's scores on its held-out data; (0, 1) if nobody measured them.

    tokenizer: the policy's, where the model will read the policy's tokens; see `read_stats`.
    """
    stats = read_stats(path, tokenizer, "the policy has")
    return (stats["score_mean"], stats["score_std"]) if stats else (0.0, 1.0)


def write_stats(path: Path, stats: dict) -> None:
    write_json(path / STATS_FILE, stats)
