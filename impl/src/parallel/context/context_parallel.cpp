#include "shardproof/parallel/context/context_parallel.h"

#include <ATen/ATen.h>

#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/nn/sequence_lengths.h"

namespace shardproof {
namespace {

struct Way {
  decltype(&ring_attention) native;
  decltype(&canonical_ring_attention) canonical;
};
// By ContextAttention.
constexpr Way kWays[] = {{ring_attention, canonical_ring_attention},
                         {gathered_attention, canonical_gathered_attention},
                         {ulysses_attention, canonical_ulysses_attention}};

}  // namespace

// What the parts of the module ask about sequences.
class ContextState final : public SequenceRule, public RowPlacement, public std::enable_shared_from_this<ContextState> {
 public:
  ContextState(std::shared_ptr<MeshComm> comms, ContextOptions options)
      : comms_(std::move(comms)), options_(std::move(options)), group_(comms_->along({options_.axis})) {}
  ~ContextState() override {
    for (SequencePart* part : parts_) part->rule = nullptr;
    for (PlacementAware* aware : aware_) aware->context_placement = nullptr;
  }

  void attach(const std::shared_ptr<torch::nn::Module>& root);
  std::shared_ptr<void> held() override { return shared_from_this(); }

  DimCut cut() const { return context_cut(options_.split, sequence_lengths()[number_], group_.size()); }
  Comm& group() const { return group_; }
  void set_length(int64_t length) { sequence_lengths()[number_] = length; }

  std::vector<int64_t> positions(int64_t length) override {
    require_length(length);
    return cut().positions(group_.rank());
  }

  int64_t length(int64_t own) override {
    require_length(own);
    return cut().length;
  }

  void sum(at::Tensor& own) override { group_.all_reduce(own).wait(); }

  at::Tensor whole(const at::Tensor& own) override {
    require_length(own.size(1));
    return context_gather(own.detach(), 1, cut(), group_);
  }

  at::Tensor attend(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight,
                    const std::optional<AttentionDropout>& dropout) override {
    require_length(q.size(2));
    return kWays[way()].native(q, k, v, cut(), sight, dropout, group_);
  }

  at::Tensor attend_canonically(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight,
                                const std::optional<AttentionDropout>& dropout, const std::string& name) override {
    require_length(q.size(2));
    return kWays[way()].canonical(q, k, v, cut(), sight, dropout, name, group_);
  }

  // Positions are dim 1 of what is dropped out.
  void to_whole(std::vector<DimRows>& dims) const override {
    if (dims.size() < 2) return;
    require_length(dims[1].length);
    const DimCut own = cut();
    const std::vector<int64_t> positions = own.positions(group_.rank());
    for (int64_t& row : dims[1].rows) row = positions.at(static_cast<size_t>(row));
    dims[1].length = own.length;
  }

 private:
  size_t way() const { return static_cast<size_t>(options_.attention); }

  void require_length(int64_t length) const {
    const DimCut own = cut();
    SHARD_REQUIRE(length == own.count(group_.rank()), "context_parallel",
                  "rank {} of {} along {} has {} of the {} positions of a sequence, and was given {}. Cut every batch with "
                  "ContextParallel::cut",
                  group_.rank(), group_.size(), options_.axis, own.count(group_.rank()), own.length, length);
  }

  std::shared_ptr<MeshComm> comms_;
  ContextOptions options_;
  Comm& group_;
  const int64_t number_ = new_sequence_number();
  // They point here without owning: this lives as long as the ContextParallel, and a Sharded made meanwhile.
  std::shared_ptr<torch::nn::Module> root_;
  std::vector<SequencePart*> parts_;
  std::vector<PlacementAware*> aware_;
};

void ContextState::attach(const std::shared_ptr<torch::nn::Module>& root) {
  root_ = root;
  bool attends = false;
  const auto unowned = std::shared_ptr<ContextState>(std::shared_ptr<void>(), this);
  for (const auto& item : root->named_modules("", /*include_self=*/true)) {
    torch::nn::Module& module = *item.value();
    SHARD_REQUIRE(!unit_hooks(module), "context_parallel",
                  "module '{}' is sharded already; call context_parallel before fully_shard", item.key());
    if (auto* part = dynamic_cast<SequencePart*>(&module)) {
      SHARD_REQUIRE(!part->rule, "context_parallel", "module '{}' is context parallel already", item.key());
      attends |= module.as<AttentionImpl>() || module.as<PositionsImpl>();
      parts_.push_back(part);
      part->rule = unowned;
    } else if (auto* dropout = dynamic_cast<DropoutImpl*>(&module)) {
      aware_.push_back(dropout);
      dropout->context_placement = unowned;
    }
  }
  SHARD_REQUIRE(attends, "context_parallel",
                "module {} has no Attention or Positions below it, so that its tokens would not see those of other ranks; "
                "write it with those of attention.h",
                root->name());
}

ContextParallel::ContextParallel(ContextParallel&&) noexcept = default;
ContextParallel& ContextParallel::operator=(ContextParallel&&) noexcept = default;
ContextParallel::~ContextParallel() = default;

at::Tensor ContextParallel::cut(const at::Tensor& whole, int64_t dim) {
  SHARD_REQUIRE(dim >= -whole.dim() && dim < whole.dim(), "context_parallel", "a tensor of sizes {} has no dim {}",
                fmt::join(whole.sizes(), "x"), dim);
  state_->set_length(whole.size(dim));
  return context_piece(whole, dim, state_->cut(), state_->group().rank());
}

at::Tensor ContextParallel::join(const at::Tensor& own, int64_t dim) const {
  return context_gather(own, dim, state_->cut(), state_->group());
}

DimCut ContextParallel::layout() const {
  return state_->cut();
}

ContextParallel context_parallel(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms,
                                 ContextOptions options) {
  SHARD_REQUIRE(module != nullptr && comms != nullptr, "context_parallel",
                "needs a module and a mesh's communicators, got null");
  SHARD_REQUIRE(comms->mesh().has(options.axis), "context_parallel",
                "mesh '{}' has no axis {}; name it in ContextOptions::axis", comms->mesh().str(), options.axis);
  auto state = std::make_shared<ContextState>(std::move(comms), std::move(options));
  state->attach(module);
  return ContextParallel(std::move(state));
}

}  // namespace shardproof
