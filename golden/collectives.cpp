#include "golden/collectives.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <stdexcept>

namespace golden {
namespace {

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(fmt::format("golden: collective: expected {}", what));
}

void require_equal_sizes(const Ranks& inputs) {
  require(!inputs.empty(), "at least one rank");
  for (const at::Tensor& t : inputs) require(t.numel() == inputs[0].numel(), "the same numel on every rank");
}

}  // namespace

at::Tensor combine(const Ranks& terms, Combine op) {
  require_equal_sizes(terms);
  at::Tensor result = terms[0].flatten().clone();
  for (size_t r = 1; r < terms.size(); ++r) {
    const at::Tensor term = terms[r].flatten();
    if (op == Combine::sum) result = result + term;
    if (op == Combine::max) result = at::maximum(result, term);
    if (op == Combine::min) result = at::minimum(result, term);
  }
  return result;
}

Ranks all_gather(const Ranks& inputs) {
  require_equal_sizes(inputs);
  Ranks outputs;
  for (size_t r = 0; r < inputs.size(); ++r) {
    Ranks slices;
    for (const at::Tensor& input : inputs) slices.push_back(input.flatten());
    outputs.push_back(at::cat(slices));
  }
  return outputs;
}

Ranks reduce_scatter(const Ranks& inputs, Combine op) {
  require_equal_sizes(inputs);
  const int64_t ranks = static_cast<int64_t>(inputs.size()), slice = inputs[0].numel() / ranks;
  require(slice * ranks == inputs[0].numel(), "a numel that the ranks divide");
  Ranks outputs;
  for (int64_t r = 0; r < ranks; ++r) {
    Ranks terms;
    for (const at::Tensor& input : inputs) terms.push_back(input.flatten().narrow(0, r * slice, slice));
    outputs.push_back(combine(terms, op));
  }
  return outputs;
}

Ranks all_reduce(const Ranks& inputs, Combine op) {
  Ranks outputs;
  for (size_t r = 0; r < inputs.size(); ++r) outputs.push_back(combine(inputs, op));
  return outputs;
}

Ranks all_to_all(const Ranks& inputs, const std::vector<std::vector<int64_t>>& sizes) {
  require(!inputs.empty() && sizes.size() == inputs.size(), "one list of sizes a rank");
  std::vector<Ranks> arriving(inputs.size());
  for (size_t s = 0; s < inputs.size(); ++s) {
    require(sizes[s].size() == inputs.size(), "one size for each target rank");
    int64_t start = 0;
    for (size_t r = 0; r < inputs.size(); start += sizes[s][r++])
      arriving[r].push_back(inputs[s].flatten().narrow(0, start, sizes[s][r]));
    require(start == inputs[s].numel(), "sizes that sum to the input's numel");
  }
  Ranks outputs;
  for (const Ranks& slices : arriving) outputs.push_back(at::cat(slices));
  return outputs;
}

Ranks broadcast(const Ranks& inputs, int64_t root) {
  require(root >= 0 && root < static_cast<int64_t>(inputs.size()), "a root among the ranks");
  require_equal_sizes(inputs);
  Ranks outputs;
  for (size_t r = 0; r < inputs.size(); ++r)
    outputs.push_back(inputs[static_cast<size_t>(root)].flatten().clone());
  return outputs;
}

}  // namespace golden
