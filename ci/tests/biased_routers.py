"""Small models of the transformers package whose routers have biases, and values for these."""
from transformers import (DeepseekV3Config, DeepseekV3ForCausalLM, Dots1Config, Dots1ForCausalLM, Glm4MoeConfig,
                          Glm4MoeForCausalLM)

CLASSES = {"dots1": (Dots1ForCausalLM, Dots1Config), "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig),
           "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config)}
EXPERTS = dict(n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=8, n_shared_experts=2, n_group=4, topk_group=2,
               first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True)
YARN = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 200}
OWN = {"dots1": dict(head_dim=8), "glm4_moe": dict(head_dim=12, use_qk_norm=True, attention_bias=True),
       "deepseek_v3": dict(kv_lora_rank=6, q_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
                           rope_scaling=YARN)}


def model_with_biases(family, **sizes):
    kind, config = CLASSES[family]
    if family == "deepseek_v3":
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    return kind(config(**sizes, **EXPERTS, **OWN[family]))


def biases_of(model):
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
