#include "sharding/shard_plan.h"

#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <unordered_map>

#include "parallel/tensor/parallel_state.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

using torch::nn::Module;

// Parameters that look into one memory would each get a copy.
void require_separate(const std::vector<NamedParameter>& parameters) {
  struct Range {
    const std::byte* end;
    const std::string* name;
  };
  std::map<const std::byte*, Range> ranges;  // by where they begin; those that are there are apart
  for (const NamedParameter& parameter : parameters) {
    const at::Tensor& tensor = parameter.tensor;
    if (tensor.is_meta() || tensor.numel() == 0 || !tensor.is_contiguous()) continue;
    const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto* end = begin + tensor.nbytes();
    const auto after = ranges.lower_bound(begin);
    const auto require_apart = [&](bool apart, const Range& other) {
      SHARD_REQUIRE(
          apart, "fully_shard",
          "parameters {} and {} share memory but are not one tensor. Register the same tensor under both names to tie them",
          *other.name, parameter.name);
    };
    if (after != ranges.end()) require_apart(end <= after->first, after->second);
    if (after != ranges.begin()) require_apart(std::prev(after)->second.end <= begin, std::prev(after)->second);
    ranges.emplace_hint(after, begin, Range{end, &parameter.name});
  }
}

int64_t cut_dim_of(const NamedParameter& parameter, const ShardOptions& options) {
  const int64_t dims = parameter.tensor.dim();
  if (options.granularity != Granularity::row || dims == 0) return 0;
  if (!options.shard_dim_of) return std::min(options.shard_dim, dims - 1);
  const int64_t dim = options.shard_dim_of(parameter.name, parameter.tensor);
  SHARD_REQUIRE(-dims <= dim && dim < dims, "fully_shard",
                "shard_dim_of (in Python the function shard_dim) says dim {} for parameter {}, which has {} dims. Let it "
                "return one from {} to {}",
                dim, parameter.name, dims, -dims, dims - 1);
  return dim < 0 ? dim + dims : dim;
}

// The shapes of what ranks along the axis that cuts a parameter hold of it.
std::vector<Shape> shapes_of_parts(const at::Tensor& tensor, const ParallelState* parallel) {
  const ParallelParameter* known = parallel ? parallel->find(tensor) : nullptr;
  if (!known) return {tensor.sizes().vec()};
  const Mesh& view = parallel->view(known->layout);
  std::vector<Shape> shapes;
  for (int64_t part = 0; part < view.size(); ++part) shapes.push_back(local_shape(known->shape, view, known->layout, part));
  return shapes;
}

int64_t granule_of(const NamedParameter& parameter, const ShardOptions& options, const ParallelState* parallel) {
  constexpr int64_t kAll = std::numeric_limits<int64_t>::max();
  if (options.granularity == Granularity::tensor) return kAll;
  if (!options.granule_of) return options.granule;
  const std::vector<Shape> parts = shapes_of_parts(parameter.tensor, parallel);
  int64_t most = 1, common = 1;
  for (const Shape& shape : parts) most = std::max(most, numel(shape));
  for (const Shape& shape : parts) {
    if (numel(shape) == 0) continue;
    const int64_t own = options.granule_of(parameter.name, at::empty(shape, parameter.tensor.options().device(at::kMeta)));
    SHARD_REQUIRE(own >= 1, "fully_shard",
                  "granule_of (in Python the function granule) says {} elements for parameter {}. Let it return 1 or more; "
                  "as many as the parameter has keep it whole",
                  own, parameter.name);
    const int64_t times = own / std::gcd(common, own);
    common = times > most / common ? kAll : times * common;  // what is above `most` may be beyond 64 bits
  }
  return common;
}

void require_shardable(const NamedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  SHARD_REQUIRE(tensor.is_floating_point(), "fully_shard",
                "parameter {} must be floating, got {}; register it as a buffer, or ignore it", parameter.name,
                c10::toString(tensor.scalar_type()));
  SHARD_REQUIRE(tensor.is_leaf(), "fully_shard",
                "parameter {} is the result of a computation, not a leaf; assign a detached copy", parameter.name);
}

// What `options` leaves open is as `others` has it.
void fill_open(UnitOptions& options, const UnitOptions& others) {
  if (!options.reshard_after_forward) options.reshard_after_forward = others.reshard_after_forward;
  if (!options.precision) options.precision = others.precision;
  if (!options.strategy) options.strategy = others.strategy;
  if (!options.mesh) options.mesh = others.mesh;
  if (!options.gradient_divide) options.gradient_divide = others.gradient_divide;
  options.recompute |= others.recompute;
  options.offload_activations |= others.offload_activations;
}

std::vector<UnitPlan> choose_units(const std::shared_ptr<Module>& root, const std::vector<Sharding::Entry>& entries,
                                   const ShardOptions& options) {
  std::vector<UnitPlan> plans{{{{"", root}}, {}, {}}};
  const auto all = root->named_modules("", /*include_self=*/true);
  std::unordered_map<const Module*, std::string> names;
  std::unordered_map<const Module*, int64_t> order;  // of the first of a module's names
  for (const auto& item : all) {
    names.emplace(item.value().get(), item.key());
    order.emplace(item.value().get(), std::ssize(order));
  }
  std::unordered_map<const Module*, bool> taken;
  for (const Sharding::Entry& entry : entries) {
    UnitPlan plan{{}, entry.options, {}};
    for (const auto& module : entry.modules) {
      const auto found = names.find(module.get());
      SHARD_REQUIRE(found != names.end(), "fully_shard", "module {} is a unit but not below the root {}", module->name(),
                    root->name());
      SHARD_REQUIRE(!std::exchange(taken[module.get()], true), "fully_shard", "module '{}' is in two units", found->second);
      plan.modules.emplace_back(found->second, module);
    }
    if (plan.modules.front().second == root && plan.modules.size() == 1) plans[0].options = entry.options;
    else plans.push_back(std::move(plan));
  }
  if (options.units)
    for (const auto& item : all)
      if (item.value() != root && options.units(item.key(), *item.value()) && !std::exchange(taken[item.value().get()], true))
        plans.push_back({{{item.key(), item.value()}}, {}, {}});
  const auto place = [&](const UnitPlan& plan) { return order.at(plan.modules.front().second.get()); };
  std::stable_sort(plans.begin() + 1, plans.end(), [&](const UnitPlan& a, const UnitPlan& b) { return place(a) < place(b); });
  std::unordered_map<const Module*, std::vector<UnitPlan*>> plans_of;  // the root may be in a second unit, with others
  for (UnitPlan& plan : plans)
    for (const auto& [name, module] : plan.modules) plans_of[module.get()].push_back(&plan);
  for (const auto& item : all)
    if (const auto found = plans_of.find(item.value().get()); found != plans_of.end())
      for (UnitPlan* plan : found->second) plan->names.push_back(item.key());
  for (UnitPlan& plan : plans) {
    if (options.unit_options) fill_open(plan.options, options.unit_options(plan.name()));
    for (const auto& [name, module] : plan.modules) {
      plan.options.recompute |= options.recompute && options.recompute(name, *module);
      plan.options.offload_activations |= options.offload_activations && options.offload_activations(name, *module);
    }
  }
  return plans;
}

bool is_recomputed(const std::string& name, const UnitPlans& plans) {
  const auto within = [&](const std::string& outer) { return !outer.empty() && (name == outer || is_within(name, outer)); };
  for (const UnitPlan& unit : plans.units)
    if (unit.options.recompute && std::ranges::any_of(unit.names, within)) return true;
  return std::ranges::any_of(plans.recomputed, [&](const RecomputedPlan& plan) { return within(plan.name); });
}

void choose_recomputed(UnitPlans& plans, const torch::nn::Module& root, const ShardOptions& options) {
  if (!options.recompute_modules) return;
  for (const auto& item : root.named_modules("", /*include_self=*/false)) {
    if (!options.recompute_modules(item.key(), *item.value()) || is_recomputed(item.key(), plans)) continue;
    const auto has = [&](const UnitPlan& unit) {
      return std::ranges::any_of(unit.modules, [&](const auto& module) { return module.second == item.value(); });
    };
    const auto unit = std::ranges::find_if(plans.units, has);
    if (unit != plans.units.end()) unit->options.recompute = true;
    else plans.recomputed.push_back({item.key(), item.value()});
  }
}

}  // namespace

bool is_within(const std::string& name, const std::string& prefix) {
  return prefix.empty() || (name.size() > prefix.size() && name.starts_with(prefix) && name[prefix.size()] == '.');
}

std::vector<std::string> modules_around(const std::string& name) {
  std::vector<std::string> around;
  for (size_t end = name.rfind('.'); end != std::string::npos && end > 0; end = name.rfind('.', end - 1))
    around.push_back(name.substr(0, end));
  around.emplace_back();
  return around;
}

UnitPlans plan_units(const std::shared_ptr<Module>& root, const std::vector<Sharding::Entry>& entries,
                     const ShardOptions& options) {
  UnitPlans result{.units = choose_units(root, entries, options), .aliases = {}};
  std::unordered_map<std::string, size_t> unit_called;
  for (size_t i = 1; i < result.units.size(); ++i)
    for (const std::string& module_name : result.units[i].names) unit_called[module_name] = i;
  const auto innermost = [&](const std::string& name) {
    for (const std::string& module_name : modules_around(name))
      if (const auto found = unit_called.find(module_name); found != unit_called.end()) return found->second;
    return size_t{0};
  };
  struct Use {
    NamedParameter parameter;
    size_t unit;
  };
  std::vector<Use> uses;  // one a tensor, in order
  std::unordered_map<c10::TensorImpl*, size_t> use_of;
  for (const auto& item : root->named_parameters(/*recurse=*/true)) {
    const bool is_new = !use_of.contains(item.value().unsafeGetTensorImpl());
    if (is_new && options.ignored && options.ignored(item.key(), item.value())) continue;
    const size_t index = use_of.try_emplace(item.value().unsafeGetTensorImpl(), uses.size()).first->second;
    const size_t unit = innermost(item.key());
    if (is_new) uses.push_back({{item.key(), item.value()}, unit});
    if (uses[index].unit != unit) uses[index].unit = 0;
    result.aliases.emplace_back(item.key(), uses[index].parameter.name);
  }
  std::vector<NamedParameter> all;
  const std::shared_ptr<ParallelState> parallel = parallel_state(*root);
  for (const Use& use : uses) {
    require_shardable(use.parameter);
    all.push_back(use.parameter);
    all.back().cut_dim = cut_dim_of(use.parameter, options);
    all.back().granule = granule_of(use.parameter, options, parallel.get());
    result.units[use.unit].parameters.push_back(all.back());
  }
  require_separate(all);
  choose_recomputed(result, *root, options);
  return result;
}

bool stays_whole(const NamedParameter& parameter, const ShardOptions& options) {
  return options.keep_whole_numel_max > 0 && parameter.room <= options.keep_whole_numel_max &&
         options.strategy.parameter != options.strategy.compute;
}

std::vector<std::vector<NamedParameter>> split_into_buckets(const UnitPlan& plan, const ShardOptions& options) {
  using Kind = std::tuple<bool, at::ScalarType, bool, int64_t, bool, int64_t>;  // trained ones first
  const auto kind_of = [&](const NamedParameter& parameter) {
    const at::Tensor& tensor = parameter.tensor;
    return Kind{!tensor.requires_grad(),         tensor.scalar_type(),  tensor.is_meta(), parameter.grad_partial_ranks,
                stays_whole(parameter, options), parameter.expert_ranks};
  };
  std::map<Kind, std::vector<NamedParameter>> kinds;
  for (const NamedParameter& parameter : plan.parameters) kinds[kind_of(parameter)].push_back(parameter);
  std::vector<std::vector<NamedParameter>> buckets;
  for (const auto& [kind, parameters] : kinds) {
    int64_t total = 0, placed = 0, bytes = 0, made = 0, left = std::ssize(parameters);
    for (const NamedParameter& parameter : parameters) total += parameter.bytes();
    for (const NamedParameter& parameter : parameters) {
      const bool is_full = options.bucket_bytes_max > 0 && bytes + parameter.bytes() > options.bucket_bytes_max;
      // Of `bucket_count` buckets the next one begins where those before have their part of all bytes, or each that is to come
      // needs a parameter.
      const int64_t to_come = options.bucket_count - made;
      const bool has_its_part = to_come > 0 && (placed * options.bucket_count >= total * made || left <= to_come);
      if (made == 0 || is_full || has_its_part) {
        buckets.emplace_back();
        bytes = 0;
        ++made;
      }
      buckets.back().push_back(parameter);
      bytes += parameter.bytes();
      placed += parameter.bytes();
      --left;
    }
  }
  return buckets;
}

}  // namespace shardproof
