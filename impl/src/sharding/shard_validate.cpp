#include "sharding/shard_validate.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "parallel/tensor/parallel_state.h"
#include "shardproof/algebra/axes.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/nn/attention.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/state_buffers.h"
#include "shardproof/sharding/named_options.h"

namespace shardproof {
namespace {

constexpr int64_t kBucketMultipleMax = int64_t{1} << 30;

}  // namespace

void validate(const ShardOptions& options, const Mesh& mesh) {
  for (const NamedOption& option : named_options())
    SHARD_REQUIRE(option.get(options) >= option.least, "fully_shard", "{} must be at least {:g}, got {:g}", option.name,
                  option.least, option.get(options));
  SHARD_REQUIRE(options.bucket_multiple <= kBucketMultipleMax, "fully_shard", "bucket_multiple must be at most {}, got {}",
                kBucketMultipleMax, options.bucket_multiple);
  const int64_t alignment = options.alignment_bytes;
  SHARD_REQUIRE((alignment & (alignment - 1)) == 0, "fully_shard", "alignment_bytes must be a power of two, got {}", alignment);
  SHARD_REQUIRE(options.bucket_bytes_max == 0 || options.bucket_count == 0, "fully_shard",
                "give bucket_bytes_max or bucket_count, not both");
  SHARD_REQUIRE(
      options.granularity != Granularity::row || options.gather != Gather::side_by_side, "fully_shard",
      "ranks that compute in memory that they share (gather side_by_side) need each parameter there in one piece, and "
      "granularity `row` cuts it in several. Use gather `copied`, or another granularity");
  SHARD_REQUIRE((options.granule == 1 && !options.granule_of) || options.granularity == Granularity::element, "fully_shard",
                "granule says where granularity `element` cuts parameters, and granularity `{}` cuts them elsewhere. Leave one "
                "of the two out",
                named_option("granularity").text(static_cast<double>(options.granularity)));
  SHARD_REQUIRE(!options.divide_by_tokens || (options.gradient_divide == 0 && options.divide == Divide::after), "fully_shard",
                "divide_by_tokens takes the place of gradient_divide and needs Divide::after");
  SHARD_REQUIRE(options.gradient_magnitude_max > 0, "fully_shard", "gradient_magnitude_max must be above 0, got {}",
                options.gradient_magnitude_max);
  SHARD_REQUIRE(
      options.numerics != Numerics::canonical || options.gradient_divide != 0 || options.divide_by_tokens || mesh.size() == 1,
      "fully_shard",
      "canonical sums cannot divide by the number of ranks, which depends on the mesh. Weigh the losses by the global batch "
      "and set gradient_divide to 1, or divide by tokens");
}

Strategy strategy_on(const ShardOptions& options, const Mesh& mesh) {
  return on_mesh(options.reduce_replicas_every_microbatch ? reducing_replicas_every_time(options.strategy) : options.strategy,
                 mesh);
}

void validate_view(const std::string& unit, int64_t rank, const Mesh& view, const Strategy& own, const Mesh& mesh,
                   const Strategy& all, const ParallelState* parallel) {
  const auto summed = [&](const Mesh& on, const Strategy& strategy) {
    std::vector<int64_t> ranks = on.peers(rank, strategy.produced.partial);
    std::sort(ranks.begin(), ranks.end());
    return ranks;
  };
  SHARD_REQUIRE(summed(view, own) == summed(mesh, all), "fully_shard",
                "unit '{}' sums gradients of rank {} over ranks {} of its mesh '{}', and other units over ranks {} of '{}'. "
                "Give it a mesh whose data-parallel axes join the same ranks",
                unit, rank, fmt::join(summed(view, own), " "), view.str(), fmt::join(summed(mesh, all), " "), mesh.str());
  if (!parallel || parallel->parts() == 1) return;
  const std::string& axis = parallel->axis();
  SHARD_REQUIRE(view.has(axis) && view.peers(rank, {axis}) == mesh.peers(rank, {axis}), "fully_shard",
                "unit '{}' has mesh '{}', and parameters were cut along {} of '{}'. Give both meshes the same axis {}", unit,
                view.str(), axis, mesh.str(), axis);
}

void validate(const Reshard& reshard, const Strategy& strategy, const Mesh& mesh) {
  if (reshard.ranks() == 0) return;
  int64_t ranks = 1;
  std::vector<std::string> axes;  // that parameters are gathered over
  for (const Split& split : strategy.parameter.flat) {
    ranks *= mesh.size(split.axis);
    axes.push_back(split.axis);
  }
  if (axes.empty()) ranks = mesh.size();  // kept whole by everybody, so that nothing is left to keep
  SHARD_REQUIRE(axes.empty() ? reshard.ranks() <= ranks : ranks % reshard.ranks() == 0, "fully_shard",
                "reshard_after_forward within {} ranks: {} has {}, which is not a multiple", reshard.ranks(),
                axes.empty() ? "the mesh" : fmt::format("{}", fmt::join(axes, " x ")), ranks);
}

void require_parallel(const Mesh& mesh, const ParallelState* parallel) {
  constexpr const char* kAxis = axes::tp;
  SHARD_REQUIRE(
      !mesh.has(kAxis) || mesh.size(kAxis) == 1 || (parallel && parallel->axis() == kAxis), "fully_shard",
      "mesh '{}' has {} ranks along {}, and no module was cut along it. Call parallelize before fully_shard, or leave the "
      "axis out",
      mesh.str(), mesh.size(kAxis), kAxis);
}

void require_shared(const Mesh& mesh, const Strategy& strategy, const ParallelState* parallel) {
  const std::set<std::string> known = axis_names(strategy);
  std::vector<std::string> alone;
  for (const Axis& axis : mesh.axes()) {
    if (axis.size == 1 || axis.name == axes::tp || (parallel && axis.name == parallel->axis())) continue;
    if (known.contains(axis.name)) return;
    alone.push_back(axis.name);
  }
  SHARD_REQUIRE(alone.empty(), "fully_shard",
                "mesh '{}': strategy '{}' sums gradients over {}, of which the mesh has one rank, and nothing over {}. Each "
                "rank along {} would train a model of its own. Name that axis dp_shard, or dp_replicate for replicas",
                mesh.str(), strategy.name, fmt::join(known, " and "), fmt::join(alone, " and "), fmt::join(alone, " and "));
}

namespace {

// Sums that tensor and context parallelism cut inside of a module depend on the cut, unless it computes them exactly.
void require_canonical(const torch::nn::Module& root, const Mesh& mesh, const ShardOptions& options) {
  if (options.numerics != Numerics::canonical || uses_canonical_arithmetic(root)) return;
  for (const char* axis : {axes::cp, axes::tp})
    SHARD_REQUIRE(
        !mesh.has(axis) || mesh.size(axis) == 1, "fully_shard",
        "Numerics::canonical on mesh '{}' with {} ranks along {}: sums inside of the module would depend on the mesh. "
        "Call use_canonical_arithmetic on it first",
        mesh.str(), mesh.size(axis), axis);
}

}  // namespace

std::shared_ptr<MeshComm> data_parallel_comms(const torch::nn::Module& root, const ShardOptions& options,
                                              std::shared_ptr<MeshComm> comms) {
  constexpr const char* kAxis = axes::cp;
  const Mesh& mesh = comms->mesh();
  require_canonical(root, mesh, options);
  const Mesh seen = data_parallel_mesh(mesh);
  if (seen == mesh) return comms;
  if (mesh.has(kAxis) && mesh.size(kAxis) > 1)
    for (const auto& item : root.named_modules("", /*include_self=*/true)) {
      const auto* part = dynamic_cast<const SequencePart*>(item.value().get());
      SHARD_REQUIRE(!part || part->rule, "fully_shard",
                    "mesh '{}' has {} ranks along {}, and module '{}' sees the positions of one rank. Call context_parallel "
                    "before fully_shard, or leave the axis out",
                    mesh.str(), mesh.size(kAxis), kAxis, item.key());
    }
  return comms->on(seen);
}

namespace {

template <class Dtype>
std::string name_of(const std::optional<Dtype>& dtype) {
  return dtype ? c10::toString(*dtype) : "open";
}

std::string said(const Precision& p) {
  return fmt::format("main {}, compute {}, gradient {}, reduce {}, output {}, cast_inputs {}, float32_sums {}", name_of(p.main),
                     name_of(p.compute), name_of(p.gradient), name_of(p.reduce), name_of(p.output), p.cast_inputs,
                     p.float32_sums);
}

std::string said(const Reshard& reshard) {
  if (reshard.ranks() > 0) return fmt::format("within {}", reshard.ranks());
  return reshard.asks_strategy() ? "by strategy" : reshard.keeps_everything() ? "never" : "always";
}

std::string said(const Strategy& s) {
  return fmt::format("{}: {} / {} / {} / {} / {} / {}", s.name, s.parameter.str(), s.compute.str(), s.produced.str(),
                     s.accumulated.str(), s.state.str(), s.between ? s.between->str() : "open");
}

std::string said(const UnitPlan& plan) {
  const UnitOptions& o = plan.options;
  std::string text = fmt::format("modules {}", fmt::join(plan.names, " "));
  if (o.reshard_after_forward) text += ", reshard_after_forward " + said(*o.reshard_after_forward);
  if (o.precision) text += ", " + said(*o.precision);
  if (o.recompute) text += ", recompute";
  if (o.offload_activations) text += ", offload_activations";
  if (o.strategy) text += ", strategy " + said(*o.strategy);
  if (o.mesh) text += ", mesh " + o.mesh->str();
  if (o.gradient_divide) text += fmt::format(", gradient_divide {}", *o.gradient_divide);
  return text;
}

std::string said(const at::Tensor& tensor, const Shape& shape) {
  return fmt::format("{} [{}]{}", c10::toString(tensor.scalar_type()), fmt::join(shape, ", "),
                     tensor.is_meta() ? ", without values" : "");
}

}  // namespace

Facts facts_of(const torch::nn::Module& root, const UnitPlans& plans, const ShardOptions& o, const Mesh& mesh,
               const std::string& failure) {
  Facts facts = torch_facts();
  facts.insert(facts.end(),
               {{"mesh", mesh.str()}, {"option strategy", said(o.strategy)}, {"option precision", said(o.precision)}});
  const auto add = [&](const std::string& name, const std::string& value) { facts.emplace_back("option " + name, value); };
  for (const NamedOption& option : named_options()) add(option.name, option.text(option.get(o)));
  add("reshard_after_forward", said(o.reshard_after_forward));
  add("initialize", o.initialize ? "given" : "not given");
  add("granule_of", o.granule_of ? "given" : "not given");
  if (!failure.empty()) facts.emplace_back("failure", failure);
  std::vector<std::string> units;
  for (const UnitPlan& plan : plans.units) units.push_back(plan.name().empty() ? "the root" : plan.name());
  facts.emplace_back("list of units", fmt::format("{}", fmt::join(units, " ")));
  for (const auto& [name, first] : plans.aliases)
    if (name != first) facts.emplace_back("name " + name, "tied to " + first);
  const std::shared_ptr<ParallelState> parallel = parallel_state(root);
  for (const UnitPlan& plan : plans.units) {
    facts.emplace_back("unit '" + plan.name() + "'", said(plan));
    for (size_t i = 0; i < plan.parameters.size(); ++i) {
      const at::Tensor& tensor = plan.parameters[i].tensor;
      const ParallelParameter* cut = parallel ? parallel->find(tensor) : nullptr;
      facts.emplace_back("parameter " + plan.parameters[i].name,
                         fmt::format("{}{}{}{}, number {} of unit '{}'", said(tensor, cut ? cut->shape : tensor.sizes().vec()),
                                     tensor.requires_grad() ? "" : ", frozen",
                                     o.granularity == Granularity::row && tensor.dim() > 0
                                         ? fmt::format(", cut along dim {}", plan.parameters[i].cut_dim)
                                         : "",
                                     o.granule_of ? fmt::format(", in granules of {}", plan.parameters[i].granule) : "",
                                     i + 1, plan.name()));
    }
  }
  for (const RecomputedPlan& plan : plans.recomputed) facts.emplace_back("recomputed module '" + plan.name + "'", "there");
  const ModuleBuffers buffers = buffers_of(root);
  for (const auto* kind : {&buffers.state, &buffers.transient})
    for (const auto& [name, buffer] : *kind) facts.emplace_back("buffer " + name, said(buffer, buffer.sizes().vec()));
  return facts;
}

c10::Device device_of(const torch::nn::Module& root, const ShardOptions& options) {
  std::optional<c10::Device> found = options.device;
  for (const auto& item : root.named_parameters(/*recurse=*/true)) {
    if (item.value().is_meta() || (options.ignored && options.ignored(item.key(), item.value()))) continue;
    if (!found) found = item.value().device();
    SHARD_REQUIRE(item.value().device() == *found, "fully_shard",
                  "parameter {} is on {}, others or the option device are on {}; move the module to one device", item.key(),
                  item.value().device().str(), found->str());
  }
  const c10::Device device = found.value_or(at::kCPU);
  SHARD_REQUIRE(has_device_math(device), "fully_shard",
                "parameters are on {}, and this process has no arithmetic for it. Move the module to the CPU, or to a GPU of "
                "CUDA after shardproof::use_cuda(), which Python's fully_shard calls by itself",
                device.str());
  return device;
}

}  // namespace shardproof
