#include "harness/compare/pieces.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "harness/case/axes.h"
#include "harness/case/parallel.h"
#include "shardproof/algebra/strategy.h"

namespace harness {
namespace {

using shardproof::Interval;
using shardproof::Piece;

bool fits(const Piece& piece, const at::Tensor& whole) {
  return whole.sizes() == at::IntArrayRef(piece.shape) && 0 <= piece.run.begin && piece.run.begin < piece.run.end &&
         piece.run.end <= whole.numel() && piece.data.numel() == piece.run.size() && piece.data.scalar_type() == at::kFloat &&
         piece.data.is_contiguous();
}

Holders holders_of(const shardproof::Strategy& row, const shardproof::Mesh& mesh, bool has_main, bool small) {
  shardproof::Strategy strategy = shardproof::on_mesh(row, mesh);
  if (small) strategy.parameter = strategy.compute;
  const auto copies = [&](const shardproof::Layout& layout) {
    return std::ssize(replicas(mesh, layout, 0)) / (mesh.has(axes::ep) ? mesh.size(axes::ep) : 1);
  };
  return {.state = copies(strategy.state),
          .parameter = copies(has_main ? strategy.state : strategy.parameter),
          .compute_parameter = copies(strategy.parameter)};
}

}  // namespace

Copies copies_of(const Case& c) {
  const bool canonical = c.options.arithmetic != 0, has_main = c.options.compute != fp32 || canonical;
  const int64_t sharing = expert_ranks(c);
  const auto holders = [&](bool small, bool experts) {
    std::vector<Holders> result;
    if (experts && sharing == 1) return result;
    const auto seen = [&](const shardproof::Mesh& mesh) { return experts ? shardproof::expert_mesh(mesh, sharing) : mesh; };
    result.push_back(
        holders_of(shardproof::strategy(c.strategy), seen(shardproof::data_parallel_mesh(c.mesh)), has_main, small));
    if (has_unit_sharding(c)) result.push_back(holders_of(unit_strategy(c), seen(unit_mesh(c)), has_main, small));
    return result;
  };
  return {.holders = holders(false, false),
          .holders_of_small = holders(true, false),
          .holders_of_experts = holders(false, true),
          .holders_of_small_experts = holders(true, true),
          .keep_whole = c.options.of("keep_whole_numel_max"),
          .compute = canonical                   ? at::kDouble
                     : c.options.compute == bf16 ? at::kBFloat16
                     : c.options.compute == fp16 ? at::kHalf
                                                 : at::kFloat,
          .data_ranks = c.data_rank_of_each(),
          .tensor_ranks = c.tensor_ranks(),
          .cut = cut_parameters(c)};
}

std::vector<int64_t> Copies::of(const std::string& parameter, int64_t numel, int64_t Holders::* held) const {
  const auto found = cut.find(parameter);
  std::vector<int64_t> copies;
  const auto add = [&](const std::vector<Holders>& all) {
    for (const Holders& one : all)
      copies.push_back(found == cut.end() ? one.*held : one.*held / tensor_ranks * found->second);
  };
  // Of a parameter that is cut along tp or ep the largest part counts, which the comparison does not know.
  const bool is_shared = !holders_of_experts.empty() && is_of_experts(parameter);
  const bool is_small = keep_whole > 0 && numel <= keep_whole;
  const bool may_be_small = is_small || (keep_whole > 0 && (found != cut.end() || is_shared));
  if (!is_small) add(is_shared ? holders_of_experts : holders);
  if (may_be_small) add(is_shared ? holders_of_small_experts : holders_of_small);
  return copies;
}

FoundDifference tensor_kinds(const golden::StepTrace& golden, const std::vector<RankStep>& ranks, Copies copies,
                             std::vector<TensorKind>& kinds) {
  const auto kind = [&](const std::string& name, golden::Named tensors, int64_t Holders::* held) {
    TensorKind made{name, std::move(tensors), {}, {}};
    for (const auto& [parameter, value] : made.golden) made.copies.push_back(copies.of(parameter, value.numel(), held));
    return made;
  };
  golden::Named as_computed;
  for (const auto& [name, value] : golden.parameters) as_computed.emplace_back(name, value.to(copies.compute).to(at::kFloat));
  TensorKind gradients = kind("gradient", golden.gradients, &Holders::state);
  TensorKind parameters = kind("parameter", golden.parameters, &Holders::parameter);
  TensorKind rounded = kind("compute", std::move(as_computed), &Holders::compute_parameter);
  for (const RankStep& rank : ranks) {
    gradients.pieces.push_back(&rank.gradients);
    parameters.pieces.push_back(&rank.parameters);
    rounded.pieces.push_back(&rank.compute_parameters);
  }
  kinds.clear();
  if (!golden.skipped) kinds.push_back(std::move(gradients));
  for (size_t slot = 0; slot < golden.state.size(); ++slot) {
    const auto& [name, values] = golden.state[slot];
    TensorKind state = kind(name, values, &Holders::state);
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto& states = ranks[rank].state;
      const auto found =
          std::find_if(states.begin(), states.end(), [&name = name](const auto& item) { return item.first == name; });
      if (found == states.end()) return number_on(rank, "optimizer state " + name, "there is none");
      state.pieces.push_back(&found->second);
    }
    if (!values.empty()) kinds.push_back(std::move(state));
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    for (const auto& [name, pieces] : ranks[rank].state) {
      const bool known = std::any_of(golden.state.begin(), golden.state.end(),
                                     [&name = name](const auto& item) { return item.first == name; });
      if (!known && !pieces.empty()) return number_on(rank, "optimizer state " + name, "the golden run has none");
    }
  kinds.push_back(std::move(parameters));
  if (copies.compute != at::kFloat && copies.compute_parameters) kinds.push_back(std::move(rounded));
  return {};
}

FoundDifference sort_pieces(const TensorKind& kind, std::vector<std::vector<HeldPiece>>& sorted) {
  const golden::Named& golden = kind.golden;
  if (golden.empty())
    return Difference{.value = kind.name, .says = "the golden run has no tensors, so nothing would be compared"};
  sorted.assign(golden.size(), {});
  for (size_t rank = 0; rank < kind.pieces.size(); ++rank) {
    size_t at = 0;  // pieces mostly come in the golden order
    for (const Piece& piece : *kind.pieces[rank]) {
      size_t tried = 0;
      for (; tried < golden.size() && golden[at].first != piece.name; ++tried) at = (at + 1) % golden.size();
      if (tried == golden.size()) return element_on(rank, kind.name, piece.name, "", "the golden run has none");
      if (!fits(piece, golden[at].second))
        return element_on(
            rank, kind.name, piece.name, "",
            fmt::format("{} values for the elements [{}, {}) of [{}] do not fit into [{}]", piece.data.numel(), piece.run.begin,
                        piece.run.end, fmt::join(piece.shape, ", "), fmt::join(golden[at].second.sizes(), ", ")));
      sorted[at].push_back({rank, &piece});
    }
  }
  std::vector<Interval> runs;
  for (size_t i = 0; i < golden.size(); ++i) {
    const auto& [name, tensor] = golden[i];
    runs.clear();
    for (const HeldPiece& held : sorted[i]) runs.push_back(held.piece->run);
    const std::vector<int64_t>& allowed = kind.copies[i];
    const auto miscount = miscounted(runs, tensor.numel(), allowed.front());
    const bool as_others = std::any_of(allowed.begin() + 1, allowed.end(), [&, &tensor = tensor](int64_t copies) {
      return !miscounted(runs, tensor.numel(), copies);
    });
    if (miscount && !as_others)
      return Difference{
          .value = kind.name,
          .tensor = name,
          .element = index_of(miscount->element, tensor),
          .says = fmt::format("held by {} ranks, not by {}", miscount->copies == 0 ? "no" : std::to_string(miscount->copies),
                              fmt::join(allowed, " or "))};
  }
  return {};
}

Difference other_rounds(size_t rank, size_t rounds, size_t golden_rounds) {
  return number_on(rank, "loss", fmt::format("there are {} rounds, the golden run has {}", rounds, golden_rounds));
}

std::optional<Miscount> miscounted(const std::vector<Interval>& runs, int64_t length, int64_t copies) {
  std::vector<std::pair<int64_t, int64_t>> changes;  // position, how many more runs from there on
  changes.reserve(2 * runs.size());
  for (const Interval& run : runs) {
    changes.emplace_back(run.begin, 1);
    changes.emplace_back(run.end, -1);
  }
  std::sort(changes.begin(), changes.end());
  int64_t depth = 0, position = 0;
  for (const auto& [next, change] : changes) {
    if (next > position && depth != copies) return Miscount{position, depth};
    position = next;
    depth += change;
  }
  if (position < length) return Miscount{position, depth};
  return {};
}

std::string index_of(int64_t position, const at::Tensor& tensor) {
  std::vector<int64_t> index(static_cast<size_t>(tensor.dim()));
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    index[static_cast<size_t>(dim)] = position % tensor.size(dim);
    position /= tensor.size(dim);
  }
  return fmt::format("[{}]", fmt::join(index, ", "));
}

}  // namespace harness
