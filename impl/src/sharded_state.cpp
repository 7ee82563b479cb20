#include "sharded_state.h"

#include <map>
#include <unordered_map>

#include "shardproof/check.h"
#include "unit_attachment.h"

namespace shardproof {
namespace {

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

// A unit before its buckets exist.
struct UnitPlan {
  std::string name;
  std::shared_ptr<torch::nn::Module> module;
  std::vector<NamedParameter> parameters;
};

void require_shardable(const NamedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  SHARD_REQUIRE(tensor.scalar_type() == at::kFloat, "fully_shard", "parameter {} must be float32, got {}", parameter.name,
                c10::toString(tensor.scalar_type()));
  SHARD_REQUIRE(tensor.device().is_cpu(), "fully_shard", "parameter {} must be on the CPU, got {}", parameter.name,
                tensor.device().str());
  SHARD_REQUIRE(tensor.is_contiguous(), "fully_shard", "parameter {} must be contiguous; assign its .contiguous() first",
                parameter.name);
}

void validate(const ShardOptions& options, const Mesh& mesh) {
  const Strategy& strategy = options.strategy;
  for (const Layout* layout :
       {&strategy.parameter, &strategy.compute, &strategy.produced, &strategy.accumulated, &strategy.state}) {
    std::vector<std::string> axes = layout->partial;
    for (const Split& split : layout->flat) axes.push_back(split.axis);
    for (const std::string& axis : axes)
      SHARD_REQUIRE(mesh.has(axis), "fully_shard", "strategy {} shards over the mesh axis {}, which mesh '{}' lacks",
                    strategy.name, axis, mesh.str());
  }
  const int64_t alignment = options.alignment_bytes;
  SHARD_REQUIRE(alignment >= 64 && (alignment & (alignment - 1)) == 0, "fully_shard",
                "alignment_bytes must be a power of two and at least 64, got {}", alignment);
  SHARD_REQUIRE(options.bucket_bytes_max >= 0, "fully_shard", "bucket_bytes_max must not be negative, got {}",
                options.bucket_bytes_max);
  SHARD_REQUIRE(options.gradient_divide >= 0, "fully_shard", "gradient_divide must not be negative, got {}",
                options.gradient_divide);
}

bool is_within(const std::string& name, const std::string& prefix) {
  return prefix.empty() || (name.size() > prefix.size() && name.starts_with(prefix) && name[prefix.size()] == '.');
}

// Units in order of registration, the root first. A tensor belongs to the innermost unit of its first name; one that other
// units use as well belongs to the root, which is whole as long as any of them runs.
std::vector<UnitPlan> plan_units(const std::shared_ptr<torch::nn::Module>& root, const UnitSelector& selects,
                                 std::vector<std::pair<std::string, std::string>>& aliases) {
  std::vector<UnitPlan> plans{{"", root, {}}};
  if (selects)
    for (const auto& item : root->named_modules("", /*include_self=*/false))
      if (selects(item.key(), *item.value())) plans.push_back({item.key(), item.value(), {}});

  const auto innermost = [&](const std::string& name) {
    size_t best = 0;
    for (size_t i = 1; i < plans.size(); ++i)
      if (is_within(name, plans[i].name) && plans[i].name.size() >= plans[best].name.size()) best = i;
    return best;
  };
  struct Use {
    std::string name;
    at::Tensor tensor;
    size_t unit;
  };
  std::vector<Use> uses;  // one a tensor, in order
  std::unordered_map<c10::TensorImpl*, size_t> use_of;
  for (const auto& item : root->named_parameters(/*recurse=*/true)) {
    const auto [found, is_new] = use_of.try_emplace(item.value().unsafeGetTensorImpl(), uses.size());
    const size_t unit = innermost(item.key());
    if (is_new) uses.push_back({item.key(), item.value(), unit});
    Use& use = uses[found->second];
    if (use.unit != unit) use.unit = 0;
    aliases.emplace_back(item.key(), use.name);
  }
  for (const Use& use : uses) plans[use.unit].parameters.push_back({use.name, use.tensor});
  return plans;
}

// Parameters of one unit, split by requires-grad and by size.
std::vector<std::vector<NamedParameter>> split_into_buckets(const UnitPlan& plan, int64_t bytes_max) {
  std::vector<std::vector<NamedParameter>> buckets;
  for (const bool trainable : {true, false}) {
    int64_t bytes = 0;
    bool open = false;
    for (const NamedParameter& parameter : plan.parameters) {
      if (parameter.tensor.requires_grad() != trainable) continue;
      const int64_t more = static_cast<int64_t>(parameter.tensor.nbytes());
      if (!open || (bytes_max > 0 && bytes + more > bytes_max)) {
        buckets.emplace_back();
        bytes = 0;
        open = true;
      }
      buckets.back().push_back(parameter);
      bytes += more;
    }
  }
  return buckets;
}

std::unique_ptr<Bucket> make_bucket(const std::vector<NamedParameter>& parameters, const std::shared_ptr<MeshComm>& comms,
                                    const ShardOptions& options) {
  std::vector<Slot> slots;
  std::vector<at::Tensor> tensors;
  for (const NamedParameter& parameter : parameters) {
    require_shardable(parameter);
    slots.push_back({parameter.name, parameter.tensor.sizes().vec(), 0, parameter.tensor.numel()});
    tensors.push_back(parameter.tensor);
  }
  BucketLayout layout(std::move(slots), options.strategy, comms->mesh(), comms->rank(),
                      options.alignment_bytes / static_cast<int64_t>(sizeof(float)));
  return std::make_unique<Bucket>(std::move(tensors), std::move(layout), comms, options);
}

void broadcast_buffers(const torch::nn::Module& module, MeshComm& comms, const ShardOptions& options) {
  at::NoGradGuard no_grad;
  for (const at::Tensor& buffer : module.buffers()) {
    at::Tensor values = buffer.contiguous();
    comms.along(options.strategy.produced.partial).broadcast(values, 0).wait();
    if (values.data_ptr() != buffer.data_ptr()) buffer.copy_(values);
  }
}

}  // namespace

ShardedState::ShardedState(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options)
    : module_(std::move(module)), comms_(std::move(comms)), options_(std::move(options)), schedule_(comms_->rank()) {
  validate(options_, comms_->mesh());
  const std::vector<UnitPlan> plans = plan_units(module_, options_.units, aliases_);
  SHARD_REQUIRE(!aliases_.empty(), "fully_shard", "module {} has no parameters to shard", module_->name());
  for (const UnitPlan& plan : plans)
    SHARD_REQUIRE(unit_hooks(*plan.module) == nullptr, "fully_shard",
                  "module '{}' is sharded already; destroy the Sharded that holds it first", plan.name);
  for (const UnitPlan& plan : plans) {
    std::vector<std::unique_ptr<Bucket>> buckets;
    for (const auto& parameters : split_into_buckets(plan, options_.bucket_bytes_max))
      buckets.push_back(make_bucket(parameters, comms_, options_));
    const bool is_root = plan.module == module_;
    auto unit = std::make_unique<Unit>(schedule_, plan.name, std::move(buckets), is_root || !options_.reshard_after_forward);
    attach_hooks(*plan.module, *unit);
    attached_.push_back(plan.module);
    schedule_.add(std::move(unit));
  }
  if (options_.broadcast_initial_values) broadcast_buffers(*module_, *comms_, options_);
}

ShardedState::~ShardedState() {
  for (const auto& module : attached_) detach_hooks(*module);
}

}  // namespace shardproof
