"""Tiny configs of any type of `transformers`: the fields of its default config, made small by what their names say."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any, Iterator, Optional

import transformers

VOCABULARY = 128


@dataclasses.dataclass(frozen=True)
class Scale:
    """How small a config becomes."""

    factor: int  # of dimensions
    layers: int = 2
    multiple: int = 1  # dimensions are multiples of it, and there are at most 4 heads if it is more than 1
    anew: bool = True  # whether the config is made with its fields, or a default one is changed


# Some sizes have to fit each other in ways that no rule knows, and hybrids have their first layer of attention late.
EVEN = Scale(16, multiple=32)
SCALES = (Scale(32), EVEN, dataclasses.replace(EVEN, anew=False), Scale(16), Scale(32, 4), Scale(32, 6), Scale(8), Scale(1))

_DIMENSION = re.compile(
    r"hidden|dim|intermediate|embe?d|ffn|ffw|^d_|rank|channels|width|inner|feature_size|proj|units|filter_size|state_size|neck"
    r"|planes"
)
_NO_DIMENSION = re.compile(
    r"^num_|^n_(?!embd|inner|embed)|vocab|layers|heads|position|max_|token|image|patch|kernel|stride|window|group|ratio|std"
    r"|drop|_act$|spatial|type_|_id$|^in_channels$|input_channels"
)
_DEPTH = re.compile(r"(^|_)(n_layers?|num_(\w+_)?layers|layers|num_blocks?|depth|blocks_per_\w+|layers_per_block)$")
_DEPTHS = re.compile(r"depths|layers|blocks")
_EXPERTS = re.compile(r"^(moe_)?(num|n)(_\w+)?_experts$|^ffn_num_experts$")
_CHOSEN_EXPERTS = re.compile(r"experts_per_tok|num_experts_per|top_?k$|num_selected|^moe_k$")
_HEADS = re.compile(r"heads$|^n_head|_heads?_|encoder_attention_heads|num_heads")
_TOKEN = re.compile(r"_token_(id|index|ids)$")
_LENGTH = re.compile(r"position|max_\w*length|n_ctx|max_seq|max_length")
_RANDOM = re.compile(r"drop|mask_(time|feature)_prob|jitter|noise|time_prob")
_SPECIAL = {"pad": 0, "bos": 1, "eos": 2, "dec": 1}

_PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# Where names do not tell.
EXTRA: "dict[str, dict]" = {
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_method": "greedy"},
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), {"prediction_length": 4}),
    "dory": {"n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1, "num_hidden_layers": 3},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "esm": {"mask_token_id": 3, "pad_token_id": 1},
    "gemma3n_text": {"activation_sparsity_pattern": [0.95, 0.0], "intermediate_size": 64},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2},
    "led": {"attention_window": [4, 4]},
    "longformer": {"attention_window": [4, 4]},
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "is_decoder": True},
    "xmod": {"default_language": "en_XX"},
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "hunyuan_vl_text", "ministral"), _PLAIN_ROPE),
}


def is_config(value: Any) -> bool:
    return isinstance(value, transformers.PreTrainedConfig)


def small_number(name: str, value: int, scale: Scale, layers: int, fields: dict, tokens: list) -> int:
    """A field that is a whole number, as it becomes."""
    if _TOKEN.search(name):
        if value < VOCABULARY:
            return value
        tokens.append(name)
        return _SPECIAL.get(name[:3], VOCABULARY - len(tokens))
    if "vocab" in name and "type" not in name:
        return min(value, VOCABULARY)
    if name in ("n_group", "topk_group", "num_expert_group", "n_groups_of_experts", "num_kv_shared_layers"):
        return min(value, 1)
    if name in ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"):
        return min(value, 1)
    if _EXPERTS.search(name):
        return min(value, 4)
    if _CHOSEN_EXPERTS.search(name) and "index" not in name:
        return min(value, 2)
    if _DEPTH.search(name) and "token" not in name and "feat_extract" not in name:
        return value if isinstance(fields.get("depths"), (list, tuple)) else min(value, layers)
    if _LENGTH.search(name):
        return min(value, 256)
    if name.endswith("chunk_size"):
        return min(value, 8)
    if name == "window_size" and "depths" in fields:
        return min(value, 2)
    if name in ("image_size", "img_size"):
        return min(value, 64)
    if name == "patch_size" and value > 8:
        return next((size for size in (8, 7) if value % size == 0), value)
    if _DIMENSION.search(name) and not _NO_DIMENSION.search(name) and value > 16:
        return smaller_dimension(value, scale.factor, scale.multiple)
    if scale.multiple > 1 and _HEADS.search(name):
        return min(value, 2 if "key_value" in name or "kv" in name else 4)
    return value


def smaller_dimension(value: int, factor: int, multiple: int) -> int:
    return max(value // factor // multiple * multiple, multiple, 4)


def small_list(name: str, value: list, scale: Scale, layers: int, depth: Optional[int], fields: dict) -> list:
    """A field that is a list, as it becomes."""
    numbers = all(type(each) is int for each in value)
    if name in ("image_size", "img_size"):
        return [64] * len(value)
    if name.endswith("_token_id"):
        return [min(each, 2) for each in value] if numbers else value
    if numbers and "depth" in name:
        return [min(each, 1 + (i == 0)) for i, each in enumerate(value)]
    if numbers and all(each > 16 for each in value) and _DIMENSION.search(name):
        return [smaller_dimension(each, min(scale.factor, 4), scale.multiple) for each in value]
    if numbers and scale.multiple > 1 and _HEADS.search(name):
        return [min(each, 4) for each in value]
    if depth is not None and len(value) == depth and depth > layers and "depths" not in fields:
        return list(value[:layers])
    return value


def small_fields(config: Any, scale: Scale, layers: int, tokens: list) -> dict:
    """The fields of a config that become others."""
    fields = {name: value for name, value in vars(config).items() if name[0] != "_" and name not in ("id2label", "label2id")}
    depths = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
    depth = next((fields[name] for name in depths if type(fields.get(name)) is int), None)
    given: dict = {}
    kinds = fields.get("layer_types")
    if isinstance(kinds, list) and kinds:  # one layer of each kind
        given["layer_types"] = list(dict.fromkeys(kinds))
        given["layer_types"] += given["layer_types"][-1:] * (layers - len(given["layer_types"]))
        layers = len(given["layer_types"])
    for name, value in fields.items():
        if name in given or isinstance(value, bool):
            continue
        if isinstance(value, float) and _RANDOM.search(name):
            given[name] = 0.0
        elif isinstance(value, int):
            given[name] = small_number(name, value, scale, layers, fields, tokens)
        elif isinstance(value, (list, tuple)) and value:
            given[name] = small_list(name, list(value), scale, layers, depth, fields)
        elif is_config(value):
            given[name] = small_fields(value, scale, layers, tokens)
    rope = fields.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        merged = {**fields, **given}
        size = merged.get("head_dim") or merged.get("hidden_size", 0) // (merged.get("num_attention_heads") or 1)
        half = int(size * rope.get("partial_rotary_factor", 1.0)) // 2
        given["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    given = {name: value for name, value in given.items() if value != fields[name] or name == "layer_types"}
    return given | EXTRA.get(config.model_type, {})


def as_arguments(config: Any, given: dict) -> dict:
    """The same fields as arguments of the config's class, configs within it as dicts."""
    return {
        name: {**sub.to_diff_dict(), "model_type": sub.model_type, **as_arguments(sub, value)} if is_config(sub) else value
        for name, value in given.items()
        for sub in [getattr(config, name, None)]
    }


def change(config: Any, given: dict) -> Any:
    for name, value in given.items():
        if is_config(getattr(config, name, None)) and isinstance(value, dict):
            change(getattr(config, name), value)
        else:
            setattr(config, name, value)
    return config


def configs(kind: str) -> "Iterator[Any]":
    """Configs of a type, the smallest first; in the place of one that cannot be made, the error."""
    cls = transformers.CONFIG_MAPPING[kind]
    default = cls()
    for scale in SCALES:
        given = small_fields(default, scale, scale.layers, [])
        for left_out in ("", "layer_types") if "layer_types" in given else ("",):
            fields = {name: value for name, value in given.items() if name != left_out}
            try:
                made = cls(**as_arguments(default, fields)) if scale.anew else change(copy.deepcopy(default), fields)
            except Exception as error:  # whatever the class raises
                yield error
                continue
            for each in (made, *(value for value in vars(made).values() if is_config(value))):
                if hasattr(each, "apply_spec_augment"):
                    each.apply_spec_augment = False
            yield made
