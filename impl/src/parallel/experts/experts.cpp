#include "shardproof/parallel/experts/experts.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <numeric>
#include <span>

#include "shardproof/algebra/split.h"
#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"
#include "internal/parallel/experts/products.h"

namespace shardproof {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Each row goes to one place, so the backwards need no sums but the one over a token's experts, in their order.

// The rows at these places among `count`, and zeros at the others.
at::Tensor at_places(const at::Tensor& rows, const at::Tensor& places, int64_t count) {
  const std::vector<int64_t> sizes = {count, rows.size(1)};
  at::Tensor all = places.numel() == count ? at::empty(sizes, rows.options()) : at::zeros(sizes, rows.options());
  return all.index_copy_(0, places, rows);
}

struct Spread : torch::autograd::Function<Spread> {
  static Variable forward(AutogradContext* ctx, const Variable& x, int64_t each, const at::Tensor& order) {
    ctx->save_for_backward({order});
    ctx->saved_data["sizes"] = std::vector<int64_t>{x.size(0), each, x.size(1)};
    return x.index_select(0, order.floor_divide(each));
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const std::vector<int64_t> sizes = ctx->saved_data["sizes"].toIntVector();
    const at::Tensor choices = at_places(dy[0], ctx->get_saved_variables()[0], sizes[0] * sizes[1]);
    return {choices.view(sizes).sum(1), {}, {}};
  }
};

struct Collect : torch::autograd::Function<Collect> {
  static Variable forward(AutogradContext* ctx, const Variable& rows, const at::Tensor& order, int64_t choices) {
    ctx->save_for_backward({order});
    return at_places(rows, order, choices);
  }
  // Every rank's backward comes here first, so that all of them refuse.
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    SHARD_REQUIRE(!c10::GradMode::is_enabled(), "experts",
                  "a backward with create_graph through experts: they have no second gradient. Leave create_graph out");
    return {dy[0].index_select(0, ctx->get_saved_variables()[0]), {}, {}};
  }
};

// Of each run of so many numbers.
std::vector<int64_t> sums_of(const std::vector<int64_t>& numbers, const std::vector<int64_t>& lengths) {
  std::vector<int64_t> sums;
  auto next = numbers.begin();
  for (const int64_t length : lengths) {
    sums.push_back(std::accumulate(next, next + length, int64_t{0}));
    next += length;
  }
  return sums;
}

std::vector<int64_t> numbers_in(const at::Tensor& list) {
  return {list.const_data_ptr<int64_t>(), list.const_data_ptr<int64_t>() + list.numel()};
}

// How many of the sorted choices each expert has; -1 for each where a choice is neither an expert nor -1.
at::Tensor counts_of(const at::Tensor& sorted, int64_t count) {
  if (sorted.is_meta()) return at::empty({count}, sorted.options());
  const at::Tensor below = at::searchsorted(sorted, at::arange(-1, count + 1, sorted.options()));
  const at::Tensor strays = below[0].ne(0).logical_or(below[count + 1].ne(sorted.numel()));
  return (below.narrow(0, 2, count) - below.narrow(0, 1, count)).masked_fill(strays, -1);
}

void require_experts(const std::vector<int64_t>& counts, const at::Tensor& flat, int64_t count) {
  if (std::ranges::count(counts, -1) == 0) return;
  const int64_t least = flat.min().item<int64_t>(), most = flat.max().item<int64_t>();
  SHARD_REQUIRE(least >= -1, "experts", "a token was sent to expert {}; experts are counted from 0, and -1 is nowhere", least);
  SHARD_REQUIRE(most < count, "experts", "a token was sent to expert {}, and there are {}", most, count);
}

// What each rank is told: the counts of its experts, and expert 0's. That one tells a rank without experts of strays, too.
at::Tensor words_to(const at::Tensor& counts, const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> words;
  for (const at::Tensor& part : counts.split_with_sizes(sizes)) words.insert(words.end(), {part, counts.narrow(0, 0, 1)});
  return at::cat(words);
}

// What arrived from each rank of `group`, without the last word of each.
std::vector<int64_t> heard(std::span<const int64_t> words, int64_t own, const Comm& group) {
  std::vector<int64_t> counts;
  for (int64_t from = 0; from < group.size(); ++from) {
    const std::span<const int64_t> told = words.subspan(static_cast<size_t>(from * (own + 1)), static_cast<size_t>(own + 1));
    SHARD_REQUIRE(std::ranges::count(told, -1) == 0, "experts",
                  "rank {} of '{}' sent a token to an expert that there is not; its own message says which", from,
                  group.name());
    counts.insert(counts.end(), told.begin(), told.end() - 1);
  }
  return counts;
}

// What arrives at a rank where all count alike. `sizes`: how many experts each of them has.
std::vector<int64_t> from_each(const std::vector<int64_t>& counts, const std::vector<int64_t>& sizes, int64_t rank) {
  const auto begin = counts.begin() + std::accumulate(sizes.begin(), sizes.begin() + rank, int64_t{0});
  std::vector<int64_t> arriving;
  for (size_t from = 0; from < sizes.size(); ++from)
    arriving.insert(arriving.end(), begin, begin + sizes[static_cast<size_t>(rank)]);
  return arriving;
}

}  // namespace

std::vector<int64_t> even_counts(int64_t choices, int64_t experts) {
  std::vector<int64_t> counts(static_cast<size_t>(experts), choices / experts);
  std::for_each_n(counts.begin(), choices % experts, [](int64_t& count) { ++count; });
  return counts;
}

// Row n * k + j of what is sorted is token n's j-th choice of k. What goes nowhere would come first. The host waits for a
// device once, when it has to know the counts.
Dispatch::Dispatch(const at::Tensor& chosen, int64_t count, std::shared_ptr<Comm> group, std::shared_ptr<Comm> slices,
                   collective::Sum sum)
    : group_(std::move(group)), slices_(std::move(slices)), sum_(std::move(sum)), chosen_(chosen), own_(count) {
  SHARD_REQUIRE(chosen.dim() == 2 && chosen.scalar_type() == at::kLong, "experts",
                "choices [{}] of {}; expected [tokens, experts of one] of int64", fmt::join(chosen.sizes(), ", "),
                c10::toString(chosen.scalar_type()));
  const at::Tensor flat = chosen.flatten();
  const auto [sorted, order] = at::sort(flat, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  std::vector<at::Tensor> counts = {counts_of(sorted, count)};
  std::vector<int64_t> sizes;
  if (group_) {
    std::vector<int64_t> words;
    for (int64_t rank = 0; rank < group_->size(); ++rank) {
      sizes.push_back(piece({}, count, group_->size(), rank).size());
      words.push_back(sizes.back() + 1);
    }
    own_ = sizes[static_cast<size_t>(group_->rank())];
    counts.push_back(at::empty({group_->size() * (own_ + 1)}, flat.options()));
    group_->all_to_all(counts[1], words_to(counts[0], sizes), std::vector(sizes.size(), own_ + 1), words).wait();
  }
  const std::vector<int64_t> known = chosen.is_meta() ? even_counts(flat.numel(), count) : numbers_in(at::cat(counts).cpu());
  blocks_.assign(known.begin(), known.begin() + count);
  require_experts(blocks_, flat, count);
  const int64_t rows = std::accumulate(blocks_.begin(), blocks_.end(), int64_t{0});
  order_ = order.narrow(0, flat.numel() - rows, rows);
  if (!group_) return;
  sent_ = sums_of(blocks_, sizes);
  blocks_ = chosen.is_meta() ? from_each(blocks_, sizes, group_->rank())
                             : heard(std::span(known).subspan(blocks_.size()), own_, *group_);
  received_ = sums_of(blocks_, std::vector(sizes.size(), own_));
}

at::Tensor Dispatch::rows(const at::Tensor& x) const {
  SHARD_REQUIRE(x.dim() == 2 && x.size(0) == chosen_.size(0), "experts", "x [{}] with choices of {} tokens",
                fmt::join(x.sizes(), ", "), chosen_.size(0));
  at::Tensor rows = Spread::apply(x, chosen_.size(1), order_);
  if (group_) rows = collective::exchange_rows(rows, sent_, received_, *group_);
  return slices_ ? collective::copy(rows, *slices_, sum_) : rows;
}

at::Tensor Dispatch::experts() const {
  const auto blocks = static_cast<int64_t>(blocks_.size());
  const at::Tensor numbers = at::arange(blocks, at::kLong).remainder(std::max<int64_t>(own_, 1));
  return numbers.repeat_interleave(at::tensor(blocks_, at::kLong)).to(chosen_.device());
}

at::Tensor Dispatch::outputs(const at::Tensor& rows) const {
  const at::Tensor sum = slices_ ? collective::reduce(rows, *slices_, sum_) : rows;
  const at::Tensor home = group_ ? collective::exchange_rows(sum, received_, sent_, *group_) : sum;
  return Collect::apply(home, order_, chosen_.numel()).view({chosen_.size(0), chosen_.size(1), home.size(1)});
}

at::Tensor Dispatch::sums(const at::Tensor& rows, const at::Tensor& weights) const {
  SHARD_REQUIRE(weights.sizes() == chosen_.sizes(), "experts", "weights [{}] of choices [{}]", fmt::join(weights.sizes(), ", "),
                fmt::join(chosen_.sizes(), ", "));
  return (outputs(rows) * weights.unsqueeze(-1)).sum(1);
}

std::shared_ptr<Comm> expert_group(const torch::nn::Module& module) {
  const ParallelHooks* hooks = parallel_hooks(module);
  return hooks ? hooks->expert_group() : nullptr;
}

std::shared_ptr<Comm> slice_group(const torch::nn::Module& module) {
  const ParallelHooks* hooks = parallel_hooks(module);
  return hooks ? hooks->slice_group() : nullptr;
}

ExpertsImpl::ExpertsImpl(int64_t experts, int64_t hidden, int64_t intermediate) : count_(experts) {
  SHARD_REQUIRE(experts > 0 && hidden > 0 && intermediate > 0, "experts",
                "sizes must be positive, got {} experts, hidden={} and intermediate={}", experts, hidden, intermediate);
  const auto filled = [](at::Tensor values) {  // as torch.nn.Linear is
    const double bound = 1 / std::sqrt(static_cast<double>(values.size(-1)));
    return values.is_meta() ? values : values.uniform_(-bound, bound);
  };
  gate_up_proj = register_parameter("gate_up_proj", filled(at::empty({experts, 2 * intermediate, hidden})));
  down_proj = register_parameter("down_proj", filled(at::empty({experts, hidden, intermediate})));
}

at::Tensor ExpertsImpl::forward(at::Tensor x, at::Tensor experts, at::Tensor weights) {
  const Dispatch dispatch(experts, count_, expert_group(*this), slice_group(*this),
                          is_canonical() ? collective::Sum::exact(canonical_name()) : collective::Sum());
  SHARD_REQUIRE(expert_group(*this) || gate_up_proj.size(0) == count_, "experts",
                "a module of {} experts has {} of them: give the style ExpertParallel to it, and not to one around it", count_,
                gate_up_proj.size(0));
  const at::Tensor given = dispatch.rows(x);
  const bool exact = is_canonical() && gate_up_proj.size(0) > 0;
  const at::Tensor rows = exact ? canonically(dispatch, given) : plainly(dispatch, given);
  return is_canonical() ? canonical_ops::mixture(dispatch.outputs(rows), weights) : dispatch.sums(rows, weights);
}

at::Tensor ExpertsImpl::plainly(const Dispatch& dispatch, const at::Tensor& rows) const {
  const auto product = [&](const at::Tensor& x, const at::Tensor& weight) {
    return expert_products(x, weight, dispatch.blocks(), x.is_cuda() && suit_groups(x, weight));
  };
  const std::vector<at::Tensor> both = product(rows, gate_up_proj).chunk(2, -1);
  return product(at::silu(both[0]) * both[1], down_proj);
}

// Sums of an expert's gradient are exact, so that all rows are multiplied together, whatever ranks they come from.
at::Tensor ExpertsImpl::canonically(const Dispatch& dispatch, const at::Tensor& rows) const {
  const at::Tensor expert = dispatch.experts(), order = at::argsort(expert, /*stable=*/true);
  const std::vector<at::Tensor> gate_up = gate_up_proj.unbind(0), down = down_proj.unbind(0);
  const std::vector<int64_t> counts = numbers_in(at::bincount(expert, {}, std::ssize(gate_up)).cpu());
  std::vector<at::Tensor> outputs = rows.index_select(0, order).split_with_sizes(counts);
  for (size_t e = 0; e < outputs.size(); ++e) {
    const std::vector<at::Tensor> both = canonical_ops::linear(outputs[e], gate_up[e], {}, canonical_name()).chunk(2, -1);
    outputs[e] = canonical_ops::linear(canonical_ops::silu(both[0]) * both[1], down[e], {}, canonical_name());
  }
  return at::cat(outputs).index_select(0, at::argsort(order));
}

}  // namespace shardproof
