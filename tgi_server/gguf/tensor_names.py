"""The names of tensors in `transformers`, by those in GGUF files."""

# The names in `transformers` by those in files. {} stands for the number of the layer.
MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# With a norm before and after each part of a layer.
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# {} stands for the number of the expert.
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
BERT_OF_MODEL = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
}
BERT = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
NOMIC_BERT = {
    "attn_qkv": "attn.Wqkv",  # which `transformers` cuts into three
    "attn_output_norm": "post_attention_layernorm",
    "layer_output_norm": "post_mlp_layernorm",
}
DELTA_RULE = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_a": "linear_attn.A_log!",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias!",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
DELTA_RULE_QKVZ = {
    **{name: own for name, own in DELTA_RULE.items() if name != "attn_gate"},
    "attn_qkv": "linear_attn.in_proj_qkvz",
}
LFM2 = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "exp_probs_b": "feed_forward.expert_bias!",
}
LFM2_OF_MODEL = dict.fromkeys(("output_norm", "token_embd_norm"), "model.embedding_norm")
GEMMA4 = FOUR_NORMS | {
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar!",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale!",
    "ffn_gate_up_exps": "experts.gate_up_proj!",
    "ffn_down_exps": "experts.down_proj!",
    "ffn_down_exps.scale": "router.per_expert_scale!",
}
GEMMA4_OF_MODEL = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
SHARED_EXPERT = QWEN_EXPERTS | {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MAMBA = {
    "ssm_a": "A_log!",
    "ssm_conv1d": "conv1d",
    "ssm_d": "D!",
    "ssm_in": "in_proj",
    "ssm_out": "out_proj",
}
MAMBA1 = {name: f"mixer.{own}" for name, own in _MAMBA.items()} | {
    "attn_norm": "norm",
    "ssm_dt": "mixer.dt_proj",
    "ssm_x": "mixer.x_proj",
}
MAMBA1_OF_MODEL = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"}
_MAMBA2 = {name: f"mamba.{own}" for name, own in _MAMBA.items()} | {
    "ssm_dt": "mamba.dt_bias!",
    "ssm_norm": "mamba.norm",
}
FALCON_H1 = _MAMBA2 | {
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
FINAL_LAYERNORM = {"output_norm": "model.final_layernorm"}
JAMBA = (
    FALCON_H1
    | {f"ssm_{each}_norm": f"mamba.{each}_layernorm" for each in ("b", "c", "dt")}
    | {"ssm_dt": "mamba.dt_proj", "ssm_x": "mamba.x_proj", "ffn_gate_inp": "feed_forward.router"}
    | {f"ffn_{each}_exps": f"feed_forward.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")}
)
# The gate of a dense layer, or of the shared expert, and what it multiplies are one tensor in `transformers`.
GRANITE_HYBRID = _MAMBA2 | {
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{each}_exps": f"block_sparse_moe.experts.{{}}.{each}_proj" for each in ("gate", "up", "down")},
}
GRANITE_FLOAT_EXPERTS = {
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
NEMOTRON_H = {name: f"mixer.{own}" for name, own in _MAMBA.items()} | {
    "attn_norm": "norm",
    "ssm_dt": "mixer.dt_bias!",
    "ssm_norm": "mixer.norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b": "mixer.gate.e_score_correction_bias!",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
NEMOTRON_H_OF_MODEL = {"token_embd": "model.embeddings", "output_norm": "model.norm_f"}
GEMMA3N = FOUR_NORMS | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_scale": "altup.correct_output_scale!",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
# {} stands for the number of the projection.
GEMMA3N_OF_MODEL = GEMMA4_OF_MODEL | {
    "altup_proj": "model.altup_projections.{}",
    "altup_unembd_proj": "model.altup_unembed_projections.{}",
}
