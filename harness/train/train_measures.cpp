#include "harness/train/train_measures.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace harness {
namespace {

using shardproof::Piece;
using shardproof::Placement;
using shardproof::Sharded;

// Where the runs of this rank begin that no lower rank has as well.
std::set<int64_t> own_runs(const shardproof::Shape& shape, const Placement& at, int64_t rank) {
  std::set<int64_t> begins;
  for (const shardproof::Axis& axis : at.mesh.axes())
    if (!at.layout.splits(axis.name) && at.mesh.coordinate(rank, axis.name) != 0) return begins;
  for (const shardproof::OwnedRun& run : owned_runs(shape, at.mesh, at.layout, rank))
    if (run.first_copy) begins.insert(run.whole.begin);
  return begins;
}

}  // namespace

TrainMeasures::TrainMeasures(const Sharded& sharded) {
  for (const auto& [name, placement] : sharded.placements()) {
    parameters_[name] = own_runs(placement.shape, placement.state, sharded.rank());
    gradients_[name] = own_runs(placement.shape, placement.gradient, sharded.rank());
  }
}

bool TrainMeasures::counts(const Own& own, const Piece& piece) {
  const auto found = own.find(piece.name);
  return found != own.end() && found->second.contains(piece.run.begin);
}

void TrainMeasures::count_gradients(const Sharded& sharded) {
  zeros_ = 0;
  for (const Piece& piece : sharded.gradients())
    if (counts(gradients_, piece)) zeros_ += piece.data.numel() - piece.data.count_nonzero().item<int64_t>();
}

TrainMeasures::Result TrainMeasures::measure(const Sharded& sharded, bool stop, shardproof::Comm& world) const {
  const at::NoGradGuard no_grad;
  double squares = 0;
  for (const Piece& piece : sharded.main_parameters())
    if (counts(parameters_, piece)) squares += piece.data.detach().to(at::kDouble).square().sum().item<double>();
  at::Tensor sums = at::tensor({squares, static_cast<double>(zeros_), stop ? 1.0 : 0.0}, at::kDouble);
  world.all_reduce(sums).wait();
  const double* sum = sums.const_data_ptr<double>();
  return {.parameter_norm = std::sqrt(sum[0]), .zero_gradients = static_cast<int64_t>(sum[1]), .stop = sum[2] > 0};
}

}  // namespace harness
