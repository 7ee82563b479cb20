#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <map>
#include <optional>
#include <set>

#include "checkpoint/state_names.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/weights.h"
#include "shardproof/comm/agree.h"

namespace shardproof::checkpoint {
namespace {

Shape shape_in_file(const WeightRecipe& recipe, const WeightShapes& shapes) {
  const auto shape = [&](const WeightPart& part) { return part.shape(shapes.at(part.name)); };
  Shape sizes = shape(recipe.parts[0]);
  for (size_t i = 1; i < recipe.parts.size(); ++i) sizes.at(0) += shape(recipe.parts[i]).at(0);
  if (recipe.turned) std::swap(sizes.at(0), sizes.at(1));
  return sizes;
}

// What the file will have, the same on every rank.
struct FilePlan {
  std::map<std::string, at::Tensor> plain;  // parameters that are not sharded, and biases of routers
  std::map<std::string, WeightRecipe> recipes;
  std::map<std::string, SafeTensorSpec> specs;
};

FilePlan plan_file(Sharded& sharded, const SaveWeightsOptions& options) {
  SHARD_REQUIRE(at::isFloatingType(options.dtype) && options.file_bytes_max > 0, "checkpoint",
                "weights are saved in a floating dtype, and in files of more than 0 bytes; got {} and {}",
                dtype_name(options.dtype), options.file_bytes_max);
  const ModelNames names = names_of_model(sharded);
  WeightShapes shapes;
  for (const auto& [name, parameter] : names.parameters) shapes[name] = parameter.sizes;
  FilePlan plan;
  for (const auto& item : sharded.impl().module->named_parameters())
    if (const auto found = names.plain.find(item.key()); found != names.plain.end()) {
      plan.plain[item.key()] = found->second;
      shapes[item.key()] = found->second.sizes().vec();
    }
  for (const auto& [name, tensor] : names.plain)
    if (is_router_bias(name)) {
      plan.plain[name] = tensor;
      shapes[name] = tensor.sizes().vec();
    }
  plan.recipes = file_recipes(options.family, shapes, options.projections);
  for (const auto& [name, recipe] : plan.recipes)
    plan.specs[name] = {is_router_bias(name) ? Dtype::Float : options.dtype, shape_in_file(recipe, shapes)};
  return plan;
}

// Whole tensors of the file. A parameter is gathered once, and kept while more tensors are to be made of it.
class Gatherer {
 public:
  Gatherer(Sharded& sharded, const FilePlan& plan) : sharded_(sharded), plan_(plan) {
    for (const auto& [name, recipe] : plan.recipes)
      for (const WeightPart& part : recipe.parts) ++left_[part.name];
  }

  // Collective. All ranks ask for the same tensors, in the same order.
  at::Tensor operator()(const WeightRecipe& recipe) {
    std::vector<at::Tensor> parts;
    for (const WeightPart& part : recipe.parts) {
      at::Tensor rows = parameter(part.name);
      if (part.matrix) rows = rows.select(0, *part.matrix);
      if (part.rows) rows = rows.narrow(0, part.rows->begin, part.rows->size());
      parts.push_back(rows);
    }
    const at::Tensor tensor = parts.size() == 1 ? parts[0] : at::cat(parts, 0);
    return (recipe.turned ? tensor.t() : tensor).contiguous();
  }

 private:
  at::Tensor parameter(const std::string& name) {
    at::Tensor& kept = kept_[name];
    const auto plain = plan_.plain.find(name);
    if (!kept.defined())
      kept = (plain == plan_.plain.end() ? sharded_.gather_main_parameter(name) : plain->second).to(at::kCPU);
    const at::Tensor whole = kept;
    if (--left_.at(name) == 0) kept_.erase(name);
    return whole;
  }

  Sharded& sharded_;
  const FilePlan& plan_;
  std::map<std::string, int64_t> left_;  // how many more times each is asked for
  std::map<std::string, at::Tensor> kept_;
};

// Rank 0 writes what all ranks gather. When writing fails, the gathers that others wait for still take place.
std::string write_on_rank_0(StagedFolder& folder, Gatherer& gather, const FilePlan& plan, const SaveWeightsOptions& options) {
  std::set<std::string> gathered;
  std::string error = error_of([&] {
    if (!options.config.empty()) write_file(*options.files, folder.path() + "/config.json", options.config);
    write_safetensors(
        *options.files, folder.path(), plan.specs,
        [&](const std::string& name) {
          gathered.insert(name);
          const at::Tensor tensor = rounded_weight(name, gather(plan.recipes.at(name)), plan.specs.at(name).dtype);
          return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
        },
        options.file_bytes_max);
  });
  for (const auto& [name, recipe] : plan.recipes)
    if (!gathered.contains(name)) gather(recipe);
  return error;
}

}  // namespace

void save_weights(const std::string& directory, Sharded& sharded, const SaveWeightsOptions& options) {
  const at::NoGradGuard no_grad;
  Sharded::Impl& state = sharded.impl();
  Comm& world = state.comms->world();
  state.require_own_values("checkpoint::save_weights");
  FilePlan plan;
  std::optional<StagedFolder> folder;
  agree_on(world, [&] {
    plan = plan_file(sharded, options);
    if (world.rank() == 0) folder.emplace(*options.files, directory, options.overwrite);
  });
  std::string error;
  Gatherer gather(sharded, plan);
  if (folder)
    error = write_on_rank_0(*folder, gather, plan, options);
  else
    for (const auto& [name, recipe] : plan.recipes) gather(recipe);
  agree(world, error);
  agree_on(world, [&] {
    if (folder) folder->commit();
  });
}

}  // namespace shardproof::checkpoint
