#include "shardproof/fully_shard.h"

#include <ATen/ATen.h>

#include <cmath>

#include "flat_math.h"
#include "gradient_norm.h"
#include "sharded_state.h"
#include "shardproof/check.h"

namespace shardproof {

Sharded fully_shard(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options) {
  SHARD_REQUIRE(module != nullptr && comms != nullptr, "fully_shard", "needs a module and a mesh's communicators, got null");
  return Sharded(std::make_shared<ShardedState>(std::move(module), std::move(comms), std::move(options)));
}

Sharded::Sharded(std::shared_ptr<ShardedState> state) : state_(std::move(state)) {}
Sharded::Sharded(Sharded&&) noexcept = default;
Sharded& Sharded::operator=(Sharded&&) noexcept = default;
Sharded::~Sharded() = default;

void Sharded::set_last_microbatch(bool last) { state_->schedule().set_last_microbatch(last); }
void Sharded::zero_gradients() { state_->schedule().zero_gradients(); }
int64_t Sharded::step() const { return state_->schedule().step(); }

double Sharded::gradient_norm() {
  state_->schedule().require_final("the gradient norm");
  return shardproof::gradient_norm(*state_);
}

double Sharded::clip_gradients(double norm_max) {
  SHARD_REQUIRE(norm_max > 0, "clip_gradients", "norm_max must be above 0, got {}", norm_max);
  const double norm = gradient_norm();
  const double factor = norm_max / (norm + 1e-6);
  if (factor < 1)
    for (Bucket* bucket : state_->schedule().buckets())
      if (bucket->trainable())
        scale_by(bucket->gradient().mutable_data_ptr<float>(), static_cast<float>(factor), bucket->gradient().numel());
  return norm;
}

std::vector<Piece> Sharded::parameters() const {
  std::vector<Piece> pieces;
  for (const Bucket* bucket : state_->schedule().buckets())
    append_pieces(bucket->layout(), bucket->layout().parameter(), bucket->parameter(), pieces);
  return pieces;
}

std::vector<Piece> Sharded::gradients() const {
  std::vector<Piece> pieces;
  for (const Bucket* bucket : state_->schedule().buckets())
    if (bucket->final()) append_pieces(bucket->layout(), bucket->layout().state(), bucket->gradient(), pieces);
  return pieces;
}

std::vector<std::pair<std::string, at::Tensor>> Sharded::gather_parameters() const {
  at::NoGradGuard no_grad;
  std::vector<std::pair<std::string, at::Tensor>> whole;
  for (const auto& unit : state_->schedule().units()) {
    const bool was_sharded = unit->residency() == Unit::Residency::sharded;
    unit->finish_unshard();
    for (const auto& bucket : unit->buckets())
      for (size_t i = 0; i < bucket->views().size(); ++i)
        whole.emplace_back(bucket->layout().slots()[i].name, bucket->views()[i].clone());
    if (was_sharded) unit->reshard();
  }
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto& [name, sharded_as] : state_->aliases())
    for (const auto& [candidate, tensor] : whole)
      if (candidate == sharded_as) named.emplace_back(name, tensor);
  return named;
}

std::string Sharded::describe() const {
  std::string text;
  for (const auto& unit : state_->schedule().units()) {
    int64_t parameters = 0, rest = 0, compute = 0;
    for (const auto& bucket : unit->buckets()) {
      for (const Slot& slot : bucket->layout().slots()) parameters += slot.numel;
      rest += bucket->layout().parameter().size() * static_cast<int64_t>(sizeof(float));
      compute += bucket->layout().compute().size() * static_cast<int64_t>(sizeof(float));
    }
    text += fmt::format("{}: {} parameters in {} buckets, {} bytes at rest, {} in compute\n",
                        unit->name().empty() ? "(root)" : unit->name(), parameters, unit->buckets().size(), rest, compute);
  }
  return text;
}

}  // namespace shardproof
