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
  Shape sizes = shapes.at(recipe.parts[0].name);
  if (!sizes.empty()) {
    sizes[0] = 0;
    for (const WeightPart& part : recipe.parts) sizes[0] += part.rows ? part.rows->size() : shapes.at(part.name)[0];
  }
  if (recipe.turned) std::swap(sizes.at(0), sizes.at(1));
  return sizes;
}

// What the file will have, the same on every rank.
struct FilePlan {
  std::map<std::string, at::Tensor> plain;  // parameters that are not sharded
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
  plan.recipes = file_recipes(options.family, shapes, options.projections);
  for (const auto& [name, recipe] : plan.recipes) plan.specs[name] = {options.dtype, shape_in_file(recipe, shapes)};
  return plan;
}

// The whole tensor of the file. Collective.
at::Tensor gather_for_file(Sharded& sharded, const FilePlan& plan, const WeightRecipe& recipe) {
  std::vector<at::Tensor> parts;
  for (const WeightPart& part : recipe.parts) {
    const auto plain = plan.plain.find(part.name);
    at::Tensor whole = (plain == plan.plain.end() ? sharded.gather_main_parameter(part.name) : plain->second).to(at::kCPU);
    if (part.rows) whole = whole.narrow(0, part.rows->begin, part.rows->size());
    parts.push_back(whole);
  }
  const at::Tensor tensor = parts.size() == 1 ? parts[0] : at::cat(parts, 0);
  return (recipe.turned ? tensor.t() : tensor).contiguous();
}

// Rank 0 writes what all ranks gather. When writing fails, the gathers that others wait for still take place.
std::string write_on_rank_0(StagedFolder& folder, Sharded& sharded, const FilePlan& plan, const SaveWeightsOptions& options) {
  std::set<std::string> gathered;
  std::string error = error_of([&] {
    if (!options.config.empty()) write_file(*options.files, folder.path() + "/config.json", options.config);
    write_safetensors(
        *options.files, folder.path(), plan.specs,
        [&](const std::string& name) {
          gathered.insert(name);
          const at::Tensor tensor = rounded_weight(name, gather_for_file(sharded, plan, plan.recipes.at(name)), options.dtype);
          return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes());
        },
        options.file_bytes_max);
  });
  for (const auto& [name, recipe] : plan.recipes)
    if (!gathered.contains(name)) gather_for_file(sharded, plan, recipe);
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
  if (folder)
    error = write_on_rank_0(*folder, sharded, plan, options);
  else
    for (const auto& [name, recipe] : plan.recipes) gather_for_file(sharded, plan, recipe);
  agree(world, error);
  agree_on(world, [&] {
    if (folder) folder->commit();
  });
}

}  // namespace shardproof::checkpoint
