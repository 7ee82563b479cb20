"""Tiny models of mainstream architectures of transformers, as a user of `shardproof.verify` would make them: with defaults."""

import torch
import transformers

transformers.logging.set_verbosity_error()

WIDTH, HEADS, VOCABULARY, TOKENS = 16, 2, 31, 6
# What most configurations call these sizes.
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=HEADS,
    num_key_value_heads=1,
    max_position_embeddings=32,
    head_dim=WIDTH // HEADS,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_EXPERTS = dict(num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
_GPT2 = dict(n_layer=2, n_head=HEADS, n_embd=WIDTH, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
_BART = dict(
    d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS,
    encoder_ffn_dim=24, decoder_ffn_dim=24, dropout=0.0, decoder_start_token_id=2, forced_eos_token_id=2,
)  # fmt: skip
_T5 = dict(d_model=WIDTH, d_kv=8, d_ff=24, num_layers=2, num_heads=HEADS, dropout_rate=0.0, decoder_start_token_id=0)
_SHAPES = dict(num_hidden_layers=2, image_size=8, patch_size=4, num_labels=3)

# By name: the class, and what its configuration is given besides the common sizes.
MODELS = {
    "Llama": ("LlamaForCausalLM", {}),
    "Mistral": ("MistralForCausalLM", {}),
    "Mixtral": ("MixtralForCausalLM", _EXPERTS),
    "Qwen2": ("Qwen2ForCausalLM", {}),
    "Qwen2-MoE": ("Qwen2MoeForCausalLM", {**_EXPERTS, "shared_expert_intermediate_size": 12}),
    "Qwen3": ("Qwen3ForCausalLM", {}),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", _EXPERTS),
    "Gemma": ("GemmaForCausalLM", {}),
    "Gemma2": ("Gemma2ForCausalLM", {}),
    "Gemma3": ("Gemma3ForCausalLM", {}),
    "Phi": ("PhiForCausalLM", dict(num_key_value_heads=2, resid_pdrop=0.0, embd_pdrop=0.0)),
    "Phi3": ("Phi3ForCausalLM", dict(resid_pdrop=0.0, embd_pdrop=0.0)),
    "GPT-2": ("GPT2LMHeadModel", _GPT2),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {}),
    "OPT": ("OPTForCausalLM", dict(ffn_dim=24, word_embed_proj_dim=WIDTH, dropout=0.0)),
    "Bloom": ("BloomForCausalLM", dict(n_layer=2, n_head=HEADS)),
    "Falcon": ("FalconForCausalLM", {}),
    "StableLM": ("StableLmForCausalLM", {}),
    "OLMo2": ("Olmo2ForCausalLM", {}),
    "Cohere": ("CohereForCausalLM", {}),
    "BERT": ("BertForMaskedLM", _NO_DROPOUT),
    "RoBERTa": ("RobertaForMaskedLM", _NO_DROPOUT),
    "BART": ("BartForConditionalGeneration", _BART),
    "T5": ("T5ForConditionalGeneration", _T5),
    "Mamba": ("MambaForCausalLM", dict(state_size=4)),
    "ViT": ("ViTForImageClassification", {**_NO_DROPOUT, **_SHAPES}),
}


def made(name):
    """How to make a model, and batches for it."""
    kind = getattr(transformers, MODELS[name][0])
    own = MODELS[name][1]

    def make_model():
        config = kind.config_class()
        known = {key: value for key, value in _COMMON.items() if hasattr(config, key)}
        if isinstance(getattr(kind.config_class, "head_dim", None), property):  # Falcon computes it
            del known["head_dim"]
        return kind(kind.config_class(**{**known, **own}))

    def make_batch():
        if name == "ViT":
            return {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(0, 3, (2,))}
        ids = torch.randint(3, VOCABULARY, (2, TOKENS))
        return {"input_ids": ids, "labels": ids}

    return make_model, make_batch
