// Files of the families' weights: out of models on a mesh and into them, and as the families define them.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "properties/kit/bits.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/family_models.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/format/torch_file.h"
#include "shardproof/checkpoint/weights.h"

namespace shardproof::family_files {

using namespace checkpoint;
using namespace family_models;

struct Setup {
  int64_t replicate = 1, dp = 1, tp = 1;
  std::string strategy = "zero3";
  int64_t sharing = 1;  // ranks that share experts
  int64_t ranks() const { return replicate * dp * tp; }
  Mesh mesh() const { return Mesh({{"dp_replicate", replicate}, {"dp_shard", dp}, {"tp", tp}}); }
  std::string str() const { return fmt::format("{} on {}, {} share experts", strategy, mesh().str(), sharing); }
};

// Runs the body on every rank of the mesh, with the model of this seed.
inline void on_mesh(const HuggingFaceModel& model, const Setup& setup, uint64_t seed,
                    const std::function<void(Sharded&, int64_t rank)>& body) {
  run_threads(setup.ranks(), [&](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, setup.mesh());
    const auto module = made(model);
    initialize_parameters(*module, uniform_initializer(seed, 0.5));
    std::optional<TensorParallel> parallel;
    ParallelPlan plan;
    if (setup.tp > 1)
      plan = is_gpt(model) ? gpt_plan(std::get<GptOptions>(model.options)) : llama_plan(llama_of(model), setup.tp);
    if (setup.sharing > 1) plan.styles.emplace_back("model.layers.*.mlp.experts", ExpertParallel{setup.sharing});
    if (!plan.styles.empty()) parallel.emplace(parallelize(module, comms, plan));
    Sharded sharded =
        fully_shard(module, comms, {.strategy = strategy(setup.strategy), .units = by_type<GptBlockImpl, LlamaLayerImpl>()});
    body(sharded, comm->rank());
  });
}

inline void save_from(const HuggingFaceModel& model, const Setup& setup, uint64_t seed, const std::string& folder,
                      const SaveWeightsOptions& options) {
  on_mesh(model, setup, seed, [&](Sharded& sharded, int64_t) { save_weights(folder, sharded, options); });
}

// What differs after loading; "" when nothing does.
inline std::string differences(const HuggingFaceModel& model, const Setup& setup, const std::string& path,
                               const LoadWeightsOptions& options, const Values& expected) {
  std::vector<std::string> found(static_cast<size_t>(setup.ranks()));
  on_mesh(model, setup, /*seed=*/99, [&](Sharded& sharded, int64_t rank) {
    load_weights(path, sharded, options);
    for (const auto& [name, value] : sharded.gather_parameters())
      if (!kit::same_bits(value, expected.at(name))) found[static_cast<size_t>(rank)] += name + " ";
  });
  std::string all;
  for (const std::string& names : found) all += names;
  return all;
}

inline Setup drawn_setup(const HuggingFaceModel& model) {
  Setup setup{drawn(1, 2), drawn(1, 3), drawn(1, 2)};
  setup.strategy = *rc::gen::elementOf(std::vector<std::string>{"zero3", "zero2", "ddp", "hsdp"});
  if (!has_experts(model)) return setup;
  setup.sharing = *rc::gen::elementOf(std::vector<int64_t>{1, setup.dp, setup.replicate * setup.dp});
  return setup;
}

// The matrices of a stack of experts, by the names that hub files have.
inline Values experts_by_definition(const HuggingFaceModel& model, const std::string& stack, const at::Tensor& value) {
  const bool mixtral = model.family == "mixtral";
  const std::string layer = stack.substr(0, stack.find(".mlp.")) + (mixtral ? ".block_sparse_moe" : ".mlp");
  const int64_t width = llama_of(model).expert_intermediate;
  Values experts;
  for (int64_t e = 0; e < value.size(0); ++e) {
    const auto put = [&](const char* in_mixtral, const char* otherwise, const at::Tensor& matrix) {
      experts[fmt::format("{}.experts.{}.{}.weight", layer, e, mixtral ? in_mixtral : otherwise)] = matrix;
    };
    if (stack.ends_with("down_proj")) {
      put("w2", "down_proj", value[e]);
      continue;
    }
    put("w1", "gate_proj", value[e].narrow(0, 0, width));
    put("w3", "up_proj", value[e].narrow(0, width, width));
  }
  return experts;
}

// What a file of the family holds, by the definition of its layout, with all projections as the package has them.
inline Values by_definition(const HuggingFaceModel& model, const Values& values) {
  Values stored;
  for (const auto& [name, value] : values) {
    const bool of_head = name == "lm_head.weight";
    if (of_head && is_tied(model)) continue;
    if (name.find(".experts.") != name.npos) {
      stored.merge(experts_by_definition(model, name, value));
      continue;
    }
    if (const size_t gate = name.find(".mlp.gate."); model.family == "mixtral" && gate != name.npos) {
      stored[name.substr(0, gate) + ".block_sparse_moe.gate.weight"] = value;
      continue;
    }
    const bool projection = is_gpt(model) && name.starts_with("h.") && value.dim() == 2;
    stored[(is_gpt(model) && !of_head ? "transformer." : "") + name] = projection ? value.t().contiguous() : value;
  }
  return stored;
}

inline at::Tensor read_whole(const StoredWeight& weight) {
  const at::Tensor tensor = at::empty(weight.sizes, weight.dtype);
  Box box;
  for (const int64_t size : weight.sizes) box.push_back({0, size});
  WeightReader(system_files()).read(weight, box, tensor.mutable_data_ptr());
  return tensor;
}

inline Values read_all(const std::string& path) {
  Values values;
  for (const auto& [name, weight] : open_weights(system_files(), path)) values[name] = read_whole(weight);
  return values;
}

inline void write_torch(const std::string& path, const Values& values, const std::map<std::string, Path>& paths = {},
                        const std::map<std::string, Value>& others = {}) {
  std::map<std::string, SafeTensorSpec> specs;
  for (const auto& [name, value] : values) specs[name] = {value.scalar_type(), value.sizes().vec()};
  write_torch_file(system_files(), path, specs, others, paths,
                   [&](const std::string& name) { return bytes_in(values.at(name)); });
}

}  // namespace shardproof::family_files
