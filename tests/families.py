"""Every causal family of transformers at toy size, with random weights that are large enough to show faults."""

import dataclasses

import torch

VOCABULARY = 259  # of helpers.byte_tokenizer

# Size-like fields of configurations, under all the names that families have for them.
SIZES = {
    32: "hidden_size d_model n_embd embedding_size embedding_dim lru_width hidden_dim attention_hidden_size "
    "backbone_hidden_size input_embedding_size output_embedding_size word_embed_proj_dim hidden_size_per_layer_input "
    "mm_embed_dim audio_embed_dim output_channels projector_input_dim projector_output_dim",
    48: "intermediate_size ffn_dim d_ff dff dim_ff n_inner ffn_hidden_size moe_intermediate_size d_inner emb_dim "
    "shared_expert_intermediate_size shared_intermediate_size decoder_ffn_dim encoder_ffn_dim feed_forward_size "
    "mlp_dim dense_intermediate_size intermediate_size_mlp expert_ffn_hidden_size moe_shared_expert_intermediate_size",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers num_blocks "
    "num_decoder_layers num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_k moe_topk "
    "depth index_n_heads index_topk_blocks linear_num_key_heads attn_layer_period expert_layer_period "
    "swa_num_key_value_heads altup_num_inputs",
    4: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads num_experts "
    "attention_heads num_encoder_attention_heads num_decoder_attention_heads num_local_experts n_routed_experts "
    "moe_num_experts mamba_n_heads mamba_num_heads linear_num_value_heads linear_num_heads n_mamba_heads rotary_dim "
    "swa_num_attention_heads",
    8: "head_dim linear_key_head_dim linear_value_head_dim linear_head_dim d_head v_head_dim qk_nope_head_dim "
    "qk_rope_head_dim kv_channels sliding_window attention_window_size window_size local_attention index_head_dim "
    "attention_chunk_size sliding_window_size dim_head swa_head_dim global_head_dim laurel_rank d_rel "
    "rel_extent o_lora_rank",
    16: "kv_lora_rank q_lora_rank qk_head_dim mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank "
    "chunk_size mamba_chunk_size mamba_d_head mamba_head_dim router_hidden_size pronunciation_embed_dim "
    "shape_embed_dim hc_lowrank pronunciation_vocab_size shape_vocab_size attention_head_dim",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers n_group "
    "topk_group mamba_n_groups n_groups mamba_ngroups attn_layer_offset expert_layer_offset",
    256: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions",
    64: "mm_posemb_size position_embedding_size index_topk",  # indexers have ties: a row must not be longer
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size",
    0: "image_token_id image_token_index video_token_id audio_token_id boi_token_id eoi_token_id boa_token_id "
    "eoa_token_id boi_token_index eoi_token_index eoa_token_index vision_start_token_id vision_end_token_id "
    "cls_token_id sep_token_id mask_token_id eod_token_id",
}
FIELDS = {name: size for size, names in SIZES.items() for name in names.split()}
# Factors that families put on embeddings, states and logits: none of them 1, so that none can be left out unseen.
FACTORS = dict(
    embedding_multiplier=1.7, residual_multiplier=0.8, attention_multiplier=0.3, logits_scaling=0.6, logit_scale=0.4,
    lm_head_multiplier=0.5, key_multiplier=0.7, attention_out_multiplier=0.8, attention_in_multiplier=1.3,
    ssm_in_multiplier=0.8, ssm_out_multiplier=1.2, mlp_multipliers=[0.9, 1.1],
    ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
    final_logit_softcapping=3.0, attn_logit_softcapping=5.0, logits_soft_cap=3.0, output_logit_soft_cap=3.0,
    logits_mup_width_multiplier=1.5, scale_emb=1.6, scale_depth=1.2, dim_model_base=20, embedding_scale=1.5,
)  # fmt: skip


def toy_config(config_class, model_type: str | None = None, default=None):
    """The class's own defaults with every size made small, sub-configurations too."""
    names = {field.name for field in dataclasses.fields(config_class)}
    values = {name: value for name, value in (FIELDS | FACTORS).items() if name in names}
    if "layer_types" in names and "num_hidden_layers" in names:
        values["num_hidden_layers"] = 4  # room for each kind of layer
    values |= {k: v for k, v in dict(eos_token_id=2, pad_token_id=0, bos_token_id=1).items() if k in names}
    if "is_decoder" in names:
        values["is_decoder"] = True
    for name, sub_class in config_class.sub_configs.items():
        if sub_class.__name__ == "AutoConfig":
            sub_class = type(getattr(default or config_class(), name))
        values[name] = toy_config(sub_class)
    if "kv_lora_rank" in names:  # latent attention has as many keys as queries
        values["num_key_value_heads"] = 4
    values |= OVERRIDES.get(model_type or config_class.model_type, {})
    return config_class(**values)


LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
TWO_KINDS = [LINEAR, FULL, LINEAR, FULL]
# What the plain rule does not make right.
OVERRIDES = dict(
    bamba=dict(num_hidden_layers=4, attn_layer_indices=[1, 3]),
    blt=dict(encoder_hash_byte_group_vocab=50),
    cohere_compass_text=dict(layer_types=[SLIDING, SLIDING, SLIDING, FULL], rope_parameters={
        SLIDING: dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1]),
        FULL: dict(rope_type="default", rope_theta=1e6, mrope_section=[2, 1, 1])}),
    dbrx=dict(attn_config=dict(rope_theta=1e4, kv_n_heads=2, clip_qkv=8),
              ffn_config=dict(ffn_hidden_size=48, moe_top_k=2)),
    emu3_vqgan=dict(base_channels=32, channel_multiplier=[1], num_res_blocks=1, codebook_size=32),
    emu3=dict(vocabulary_map={"<image>": 0, "<|extra_200|>": 0}),
    falcon_h1=dict(mamba_d_ssm=64),
    granitemoehybrid=dict(layer_types=TWO_KINDS),
    mamba2=dict(head_dim=16),
    gemma3n_text=dict(num_hidden_layers=5, num_kv_shared_layers=2,
                      layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING]),
    gpt_neo=dict(attention_types=[[["global", "local"], 1]]),
    jamba=dict(num_hidden_layers=4),
    kimi_linear=dict(layer_types=TWO_KINDS),
    lfm2_moe=dict(layer_types=["conv", FULL, "conv", FULL]),
    longcat_flash=dict(zero_expert_num=2),
    qwen4_exp_text=dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=64,
                        indexer_compress_ratio=2),
    reformer=dict(axial_pos_shape=[16, 16], axial_pos_embds_dim=[16, 16]),
    xlstm=dict(hidden_size=64, embedding_dim=64, mode="train_with_padding", return_last_states=False),
    xmod=dict(default_language="en_XX"),
    zamba=dict(num_hidden_layers=4, attention_hidden_size=64, layers_block_type=[LINEAR, "hybrid", LINEAR, "hybrid"]),
    zamba2=dict(num_hidden_layers=4, layers_block_type=[LINEAR, "hybrid", LINEAR, "hybrid"]),
    zaya=dict(num_experts_per_tok=1),
)  # fmt: skip


def toy_model(model_type: str, seed: int = 0):
    """A random model of the family as its checkpoints are published, with all its towers; float32, eval mode."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    torch.manual_seed(seed)
    towers = model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto_class = AutoModelForImageTextToText if towers else AutoModelForCausalLM
    model = auto_class.from_config(toy_config(CONFIG_MAPPING[model_type], model_type)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("bias") and buffer.is_floating_point():  # of routers
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def causal_families() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
