// What every rank holds after a collective, as a loop over the elements of its output. An element is the list of the terms that
// were added to make it, in that order, so that a sum in another order is another element.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdint>
#include <numeric>
#include <ostream>
#include <utility>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof::spec {

// Element `index` of the input of `rank`.
struct Term {
  int64_t rank, index;
  friend bool operator==(const Term&, const Term&) = default;
};
using Element = std::vector<Term>;

// One collective, as all ranks call it.
struct Collective {
  Op op;
  int64_t size;   // ranks
  int64_t numel;  // of each rank's input; of a reduce-scatter, of each rank's output
  int64_t root;
  std::vector<std::vector<int64_t>> sizes;  // of an all-to-all: sizes[from][to]

  Call call(int64_t rank) const {
    const at::Tensor mine = at::empty({numel}, at::kByte), all = at::empty({numel * size}, at::kByte);
    if (op == Op::barrier) return {.op = op, .output = {}, .input = {}};
    if (op == Op::all_gather || op == Op::split) return {.op = op, .output = all, .input = mine};
    if (op == Op::reduce_scatter) return {.op = op, .output = mine, .input = all};
    if (op == Op::all_reduce) return {.op = op, .output = mine, .input = mine};
    if (op == Op::broadcast)
      return rank == root ? Call{.op = op, .output = {}, .input = mine, .peer = root}
                          : Call{.op = op, .output = mine, .input = {}, .peer = root};
    const std::vector<int64_t> outgoing = sizes[static_cast<size_t>(rank)], incoming = sizes_to(rank);
    const auto sum = [](const std::vector<int64_t>& counts) {
      return std::accumulate(counts.begin(), counts.end(), int64_t{0});
    };
    return {.op = op,
            .output = at::empty({sum(incoming)}, at::kByte),
            .input = at::empty({sum(outgoing)}, at::kByte),
            .output_sizes = incoming,
            .input_sizes = outgoing};
  }

  // By the definition of the verb in comm.h. Empty where the rank has no output.
  std::vector<Element> output(int64_t rank) const {
    std::vector<Element> made;
    switch (op) {
      case Op::all_gather:
      case Op::split:
        for (int64_t from = 0; from < size; ++from)
          for (int64_t i = 0; i < numel; ++i) made.push_back({{from, i}});
        break;
      case Op::reduce_scatter:
        for (int64_t i = 0; i < numel; ++i) made.push_back(everybodys(rank * numel + i));
        break;
      case Op::all_reduce:
        for (int64_t i = 0; i < numel; ++i) made.push_back(everybodys(i));
        break;
      case Op::broadcast:
        for (int64_t i = 0; i < numel && rank != root; ++i) made.push_back({{root, i}});
        break;
      case Op::all_to_all:
        for (int64_t from = 0; from < size; ++from) {
          const std::vector<int64_t>& given = sizes[static_cast<size_t>(from)];
          const int64_t begin = std::accumulate(given.begin(), given.begin() + rank, int64_t{0});
          for (int64_t i = 0; i < given[static_cast<size_t>(rank)]; ++i) made.push_back({{from, begin + i}});
        }
        break;
      case Op::barrier:
      case Op::send:
      case Op::recv:
        break;
    }
    return made;
  }

  friend std::ostream& operator<<(std::ostream& os, const Collective& c) {
    return os << fmt::format("{} of {} elements on {} ranks, root {}, sizes {}", to_string(c.op), c.numel, c.size, c.root,
                             c.sizes);
  }

 private:
  std::vector<int64_t> sizes_to(int64_t rank) const {
    std::vector<int64_t> incoming;
    for (const auto& given : sizes) incoming.push_back(given[static_cast<size_t>(rank)]);
    return incoming;
  }
  // The sum over all ranks, in rank order.
  Element everybodys(int64_t index) const {
    Element sum;
    for (int64_t from = 0; from < size; ++from) sum.push_back({from, index});
    return sum;
  }
};

}  // namespace shardproof::spec
