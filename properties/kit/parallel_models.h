// Library models trained on meshes dp_replicate x dp_shard x cp x tp, to be compared with the run on one rank.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/shardproof.h"

namespace parallel_models {

struct MeshSetting {
  int64_t dp = 1, cp = 1, tp = 1;
  bool sequence_parallel = false;
  const char* strategy = "zero3";
  shardproof::ContextOptions context = {};
  bool recompute = false;  // and context_parallel before parallelize
  int64_t replicate = 1;
  int64_t overlap_pieces = 1;
  std::string str() const;
};

// A model after parallelize, if tp is above 1, and its forward.
struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(at::Tensor)> forward;
  shardproof::ParallelPlan plan;
};
using MakeModel = std::function<Model(const MeshSetting&)>;
constexpr int64_t kVocab = 13;
shardproof::GptOptions gpt_options(bool tied, double dropout = 0);
MakeModel gpt(bool tied, double dropout = 0);
MakeModel llama(bool tied, int64_t kv_heads, double attention_dropout = 0, bool qk_norm = false, bool qkv_bias = false);

struct Trained {
  std::vector<double> losses, norms;  // by step; losses are sums over the tokens that count
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

// Three steps of a global batch of four samples, a part of whose targets is ignored, in double. replicate x dp divides 4.
Trained train(const MakeModel& make, const MeshSetting& setting, int64_t length);

// Fails the test where they differ by more than other orders of sums do; losses by `loss_distance`.
void expect_same(const Trained& golden, const Trained& run, const std::string& where, double loss_distance = 1e-10);

// For lengths that the ranks do and do not divide.
void expect_equal_on_meshes(const MakeModel& make, const std::vector<MeshSetting>& settings,
                            const std::vector<int64_t>& lengths);

}  // namespace parallel_models
