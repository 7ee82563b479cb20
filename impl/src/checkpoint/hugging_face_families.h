// What tells the families of configurations apart, for reading and for writing them.
#pragma once

#include <string>

namespace shardproof::checkpoint {

constexpr double kGptNormEps = 1e-5;  // of the library's layer norms

inline bool is_latent(const std::string& family) {
  return family == "deepseek_v3";
}

// Of whose layers with a window the first ones may have none.
inline bool has_full_layers(const std::string& family) {
  return family == "qwen2" || family == "qwen3" || family == "dots1";
}

// With the router of DeepSeek-V3, whose biases are in the files, and a shared expert.
inline bool has_router_biases(const std::string& family) {
  return family == "dots1" || family == "glm4_moe" || family == "deepseek_v3";
}

inline bool has_experts(const std::string& family) {
  return family == "mixtral" || family == "qwen3_moe" || has_router_biases(family);
}

}  // namespace shardproof::checkpoint
