// A sharded model in training whose every value is a function of its place and a stamp, so that what was loaded tells which
// save it comes from.
#pragma once

#include <ATen/ATen.h>

#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/shardproof.h"

namespace shardproof::checkpoint {

class Stamped {
 public:
  Stamped(std::shared_ptr<Comm> world, const std::vector<int64_t>& widths, const std::string& strategy_name = "zero3")
      : world_(world), model_(MlpOptions{.widths = widths}) {
    initialize_parameters(*model_, 1);
    sharded.emplace(fully_shard(model_.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", world->size()}})),
                                {.strategy = strategy(strategy_name)}));
    optimizer.emplace(adamw(*sharded, {.lr = 0.01}));
    call(model_, at::ones({1, widths.front()})).square().sum().backward();
    optimizer->step();  // so that it has state
  }

  void stamp(int64_t stamp) {
    const at::NoGradGuard no_grad;
    each([&](const Piece& piece, int64_t kind) { piece.data.copy_(values(piece, stamp, kind)); });
    sharded->main_parameters_changed();
  }

  // On every rank, of all that this rank holds.
  bool has(int64_t stamp) {
    bool all = true;
    each([&](const Piece& piece, int64_t kind) { all &= piece.data.equal(values(piece, stamp, kind)); });
    at::Tensor wrong = at::full({1}, all ? 0 : 1, at::kLong);
    world_->all_reduce(wrong, Reduce::max).wait();
    return wrong.item<int64_t>() == 0;
  }

  std::optional<Sharded> sharded;
  std::optional<Optimizer> optimizer;

 private:
  static at::Tensor values(const Piece& piece, int64_t stamp, int64_t kind) {
    return (at::arange(piece.run.begin, piece.run.end, at::kLong) * 7 + stamp * 13 + kind * 101)
        .remainder(100003)
        .to(at::kFloat);
  }
  template <typename Body>
  void each(const Body& body) {
    for (const Piece& piece : sharded->main_parameters()) body(piece, 0);
    int64_t kind = 1;
    for (const std::string& state_name : optimizer->state_names()) {
      for (const Piece& piece : optimizer->state(state_name)) body(piece, kind);
      ++kind;
    }
  }
  std::shared_ptr<Comm> world_;
  Mlp model_;
};

}  // namespace shardproof::checkpoint
