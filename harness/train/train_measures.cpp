#include "harness/train/train_measures.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace harness {
namespace {

using shardproof::Interval;
using shardproof::Piece;
using shardproof::Sharded;

}  // namespace

TrainMeasures::TrainMeasures(const Sharded& sharded) {
  for (const auto& [name, placed] : sharded.placements())
    first_copies_[name] = first_copies(placed.shape, placed.state.mesh, placed.state.layout, sharded.rank());
}

// Pieces of a parameter follow each other as they lie on this rank.
template <class Visit>
void TrainMeasures::each_first_copy(const std::vector<Piece>& pieces, const Visit& visit) const {
  std::map<std::string, int64_t> ends;
  for (const Piece& piece : pieces) {
    int64_t& end = ends[piece.name];
    const int64_t begin = end;
    end += piece.data.numel();
    for (const Interval& run : first_copies_.at(piece.name))
      if (const Interval own{std::max(run.begin, begin), std::min(run.end, end)}; own.size() > 0)
        visit(piece.data.narrow(0, own.begin - begin, own.size()));
  }
}

void TrainMeasures::count_gradients(const Sharded& sharded) {
  zeros_ = 0;
  each_first_copy(sharded.gradients(), [&](const at::Tensor& own) {
    zeros_ += own.numel() - own.count_nonzero().item<int64_t>();
  });
}

TrainMeasures::Result TrainMeasures::measure(const Sharded& sharded, bool stop, shardproof::Comm& world) const {
  const at::NoGradGuard no_grad;
  double squares = 0;
  each_first_copy(sharded.main_parameters(), [&](const at::Tensor& own) {
    squares += own.detach().to(at::kDouble).square().sum().item<double>();
  });
  at::Tensor sums = at::tensor({squares, static_cast<double>(zeros_), stop ? 1.0 : 0.0}, at::kDouble);
  world.all_reduce(sums).wait();
  const double* sum = sums.const_data_ptr<double>();
  return {.parameter_norm = std::sqrt(sum[0]), .zero_gradients = static_cast<int64_t>(sum[1]), .stop = sum[2] > 0};
}

}  // namespace harness
