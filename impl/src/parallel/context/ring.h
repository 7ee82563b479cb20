// The ring of ring attention (Liu, Zaharia and Abbeel 2023): what each rank has travels from rank to rank until every rank has
// seen it. Sums may travel along, to which each rank adds; they take one step more, and so come home.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "shardproof/algebra/context_cut.h"
#include "shardproof/comm/comm.h"

namespace shardproof {

class Ring {
 public:
  // Keeps the group alive. Tensors have the positions that the cut gives a rank along dim -2.
  Ring(const DimCut& cut, Comm& group) : cut_(cut), group_(group.shared()) {}

  const DimCut& cut() const { return cut_; }
  int64_t rank() const { return group_->rank(); }

  // Calls visit(what the rank `source` had, source) for every rank, this one first. Collective. While a visit computes, the
  // next tensor is on its way.
  void go_round(at::Tensor mine, const std::function<void(const at::Tensor& theirs, int64_t source)>& visit) const;

  // The same with a sum for each rank's positions: `zeros` on every rank at first, and passed to whoever visits with what that
  // rank had, to be added to. Returns the sum for this rank's positions.
  using AddingVisit = std::function<void(const at::Tensor& theirs, const at::Tensor& sum, int64_t source)>;
  at::Tensor go_round_adding(at::Tensor mine, at::Tensor zeros, const AddingVisit& visit) const;

 private:
  class Pass;
  // On to the next rank; what arrives has the positions of the rank before `source`.
  Pass pass_on(const at::Tensor& mine, int64_t source) const;
  int64_t before(int64_t rank) const { return (rank + group_->size() - 1) % group_->size(); }

  DimCut cut_;
  std::shared_ptr<Comm> group_;
};

}  // namespace shardproof
