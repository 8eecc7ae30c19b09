"""Writing models: what is saved is what was trained, in a form that other programs read."""

import json
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from utils.files import replacing, write_json
from utils.launch import whole
from utils.models import adapted_weight, quiet_in_logs
from utils.tensors import round_randomly


def merged_state_dict(
    model: nn.Module, adapter: str | None, keep: bool = True, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Plain transformers weights, on the CPU, with one adapter added to its layers; the model is untouched.

    dtype: of the float32 weights; null = the base's own. What has to be rounded is rounded at random, see
    `round_randomly`. Under ZeRO-3 all ranks call it, and those that do not write the weights say `keep=False`, which
    returns nothing.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = {} if adapter is None else _adapted_weights(base, adapter)
    merged, copies, generator = {}, {}, torch.Generator().manual_seed(0)
    for name, tensor in base.state_dict(keep_vars=True).items():
        if ".lora_" in name or ".modules_to_save." in name or ".original_module." in name:
            continue
        layer = layers.get(id(tensor))
        with whole([tensor, *(layer.parameters() if layer is not None else ())]):
            if not keep:
                continue
            if id(tensor) not in copies:  # tied weights stay one tensor
                value = tensor.detach()
                target = dtype if dtype is not None and value.dtype == torch.float32 else value.dtype
                if layer is not None:
                    value = value.float() + layer.get_delta_weight(adapter).detach().float()
                value = value.cpu().clone() if hasattr(tensor, "ds_id") else value.cpu()
                copies[id(tensor)] = round_randomly(value, target, generator)
            merged[name.replace(".base_layer", "")] = copies[id(tensor)]
    return merged


def _adapted_weights(base: nn.Module, adapter: str) -> dict[int, nn.Module]:
    """id of a base weight -> the LoRA layer whose `adapter` changes it."""
    layers = [m for m in base.modules() if hasattr(m, "get_delta_weight") and adapter in m.lora_A]
    return {id(adapted_weight(layer)): layer for layer in layers}


def saved_dtype(state: dict[str, Tensor]) -> torch.dtype:
    """The type of a model's matrices."""
    return next(tensor.dtype for tensor in state.values() if tensor.ndim > 1)


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
    for config in (base.config, base.config.get_text_config(), generation):
        if config is not None:
            config.pad_token_id = tokenizer.pad_token_id
    dtype = str(saved_dtype(state)).removeprefix("torch.")
    if generation is not None and not generation.do_sample:
        try:
            generation.validate(strict=True)
        except ValueError:  # sampling settings without do_sample, as some models ship them, are refused at saving
            generation.do_sample = True
    with replacing(folder) as temporary:
        base.save_pretrained(temporary, state_dict=state)
        save_tokenizer(tokenizer, temporary)
        for file in temporary.glob("config.json"):
            config = json.loads(file.read_text(encoding="utf-8")) | {"dtype": dtype}
            names = {old: new for old, new in base.config.attribute_map.items() if "experts" in old and new in config}
            write_json(file, for_older_readers(config | {old: config[new] for old, new in names.items()}))
        save_tensors(temporary, more or {})


def for_older_readers(config: dict) -> dict:
    """config.json with the keys of transformers 4 beside those of 5, inner configs too.

    Version 4 reads rope_theta, rope_scaling and torch_dtype, and falls back to defaults in silence without them.
    """
    config = {key: for_older_readers(value) if key.endswith("_config") and isinstance(value, dict) else value
              for key, value in config.items()}  # fmt: skip
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention")
    if isinstance(local, dict):  # one base for each kind of layer
        config.setdefault("rope_local_base_freq", local.get("rope_theta"))
        rope = rope.get("full_attention") or {}
    if "rope_theta" in rope:
        config.setdefault("rope_theta", rope["rope_theta"])
    if rope.get("partial_rotary_factor") is not None:
        config.setdefault("partial_rotary_factor", rope["partial_rotary_factor"])
    if rope.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        config.setdefault("rope_scaling", scaling)
    if isinstance(config.get("dtype"), str):
        config.setdefault("torch_dtype", config["dtype"])
    return config


def save_tokenizer(tokenizer, folder: Path) -> None:
    """As transformers writes it, under a class name that version 4 knows too."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(settings.get("extra_special_tokens"), list):  # a dict in version 4, which has this name for a list
        settings["additional_special_tokens"] = settings.pop("extra_special_tokens")
    write_json(file, settings)


def save_tensors(folder: Path, files: dict[str, dict[str, Tensor]]) -> None:
    from safetensors.torch import save_file

    for name, tensors in files.items():
        save_file(tensors, folder / name)


def save_adapter(
    model,
    adapter: str,
    folder: Path,
    tokenizer,
    head: Tensor | None = None,
    more: dict[str, dict[str, Tensor]] | None = None,
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
        save_tokenizer(tokenizer, temporary)
        save_tensors(temporary, more or {})
    config.task_type, config.modules_to_save = task, modules


def model_card(title: str, base: str, facts: dict[str, object]) -> str:
    """README.md of a model folder: what it was made from, how, and what was measured; the base's licence stays."""
    licence = base_licence(base)
    header = {"library_name": "transformers", "base_model": None if Path(base).exists() else base, "license": licence}
    lines = ["---", *(f"{key}: {value}" for key, value in header.items() if value), "---", f"# {title}", ""]
    lines += [f"- {name}: {value}" for name, value in {"base model": base, **facts}.items() if value is not None]
    lines += [f"- licence: {licence or 'that of the base model'}", "", "Made with flatrlhf.", ""]
    return "\n".join(lines)


def base_licence(base: str) -> str | None:
    """The licence that the model card in a local base folder names."""
    card = Path(base) / "README.md"
    found = re.search(r"^license:\s*(\S+)", card.read_text(encoding="utf-8", errors="replace"), re.M) if (
        card.is_file()
    ) else None  # fmt: skip
    return found[1] if found else None
