// Differentiable collectives beside loops over the ranks; cuts of parameters.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_pieces.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using pieces::integers;
using pieces::piece_of;

namespace {

// Runs op on every rank's input, and backward with every rank's output gradient; returns (output, input gradient) by rank.
using Op = std::function<at::Tensor(const at::Tensor&, Comm&)>;
std::vector<std::pair<at::Tensor, at::Tensor>> run_op(int64_t ranks, const Op& op, const std::vector<at::Tensor>& inputs,
                                                      const std::vector<at::Tensor>& gradients) {
  std::vector<std::pair<at::Tensor, at::Tensor>> results(ranks);
  run_threads(ranks, [&](std::shared_ptr<Comm> comm) {
    const auto r = static_cast<size_t>(comm->rank());
    const at::Tensor x = inputs[r].clone().set_requires_grad(true);
    const at::Tensor y = op(x, *comm);
    y.backward(gradients[r]);
    results[r] = {y.detach().clone(), x.grad().clone()};
  });
  return results;
}

at::Tensor total(const std::vector<at::Tensor>& terms) {
  at::Tensor sum = terms[0].clone();
  for (size_t i = 1; i < terms.size(); ++i) sum += terms[i];
  return sum;
}

std::vector<at::Tensor> per_rank(int64_t ranks, const std::function<at::Tensor(int64_t)>& make) {
  std::vector<at::Tensor> tensors;
  for (int64_t r = 0; r < ranks; ++r) tensors.push_back(make(r));
  return tensors;
}

const std::vector<int64_t> kRanks = {1, 2, 3, 4};
constexpr int64_t kRows = 5, kWidth = 3;  // rows over 4 ranks: 2, 2, 1, 0

}  // namespace

TEST(Collectives, copy_passes_forward_and_sums_backward) {
  for (const int64_t n : kRanks) {
    const auto x = per_rank(n, [](int64_t) { return integers({kRows, kWidth}, 1); });
    const auto dy = per_rank(n, [](int64_t r) { return integers({kRows, kWidth}, r + 2); });
    for (const auto& [y, dx] : run_op(n, [](auto& t, Comm& g) { return collective::copy(t, g); }, x, dy)) {
      EXPECT_TRUE(at::equal(y, x[0]));
      EXPECT_TRUE(at::equal(dx, total(dy)));
    }
  }
}

TEST(Collectives, reduce_sums_forward_and_passes_backward) {
  for (const int64_t n : kRanks) {
    const auto x = per_rank(n, [](int64_t r) { return integers({kRows, kWidth}, r); });
    const auto dy = per_rank(n, [](int64_t) { return integers({kRows, kWidth}, 3); });
    for (const auto& [y, dx] : run_op(n, [](auto& t, Comm& g) { return collective::reduce(t, g); }, x, dy)) {
      EXPECT_TRUE(at::equal(y, total(x)));
      EXPECT_TRUE(at::equal(dx, dy[0]));
    }
  }
}

TEST(Collectives, gather_joins_pieces_and_keeps_the_own_piece_of_the_gradient) {
  for (const int64_t n : kRanks) {
    const at::Tensor whole = integers({2, kRows, kWidth}, 1), gradient = integers({2, kRows, kWidth}, 5);
    const auto results = run_op(
        n, [](auto& t, Comm& g) { return collective::gather(t, 1, kRows, g); },
        per_rank(n, [&](int64_t r) { return piece_of(whole, 1, n, r); }), per_rank(n, [&](int64_t) { return gradient; }));
    for (int64_t r = 0; r < n; ++r) {
      EXPECT_TRUE(at::equal(results[r].first, whole));
      EXPECT_TRUE(at::equal(results[r].second, piece_of(gradient, 1, n, r)));
    }
  }
}

TEST(Collectives, all_gather_joins_pieces_and_scatters_the_sum_of_gradients) {
  for (const int64_t n : kRanks) {
    const at::Tensor whole = integers({kRows, kWidth}, 1);
    const auto dy = per_rank(n, [](int64_t r) { return integers({kRows, kWidth}, r); });
    const auto results = run_op(
        n, [](auto& t, Comm& g) { return collective::all_gather(t, 0, kRows, g); },
        per_rank(n, [&](int64_t r) { return piece_of(whole, 0, n, r); }), dy);
    for (int64_t r = 0; r < n; ++r) {
      EXPECT_TRUE(at::equal(results[r].first, whole));
      EXPECT_TRUE(at::equal(results[r].second, piece_of(total(dy), 0, n, r)));
    }
  }
}

TEST(Collectives, scatter_and_reduce_scatter_gather_their_gradients) {
  for (const int64_t n : kRanks)
    for (const bool terms : {false, true}) {
      const auto x = per_rank(n, [&](int64_t r) { return integers({kRows, kWidth}, terms ? r : 0); });
      const at::Tensor gradient = integers({kRows, kWidth}, 4), result = terms ? total(x) : x[0];
      const auto results = run_op(
          n, [&](auto& t, Comm& g) { return terms ? collective::reduce_scatter(t, 0, g) : collective::scatter(t, 0, g); }, x,
          per_rank(n, [&](int64_t r) { return piece_of(gradient, 0, n, r); }));
      for (int64_t r = 0; r < n; ++r) {
        EXPECT_TRUE(at::equal(results[r].first, piece_of(result, 0, n, r)));
        EXPECT_TRUE(at::equal(results[r].second, gradient));
      }
    }
}

TEST(Collectives, all_to_all_turns_one_cut_into_another_and_its_gradient_back) {
  for (const int64_t n : kRanks) {
    const at::Tensor whole = integers({kRows, 7, 2}, 1), gradient = integers({kRows, 7, 2}, 2);
    const auto results = run_op(
        n, [](auto& t, Comm& g) { return collective::all_to_all(t, 0, 1, 7, g); },
        per_rank(n, [&](int64_t r) { return piece_of(whole, 1, n, r).contiguous(); }),
        per_rank(n, [&](int64_t r) { return piece_of(gradient, 0, n, r).contiguous(); }));
    for (int64_t r = 0; r < n; ++r) {
      EXPECT_TRUE(at::equal(results[r].first, piece_of(whole, 0, n, r)));
      EXPECT_TRUE(at::equal(results[r].second, piece_of(gradient, 1, n, r)));
    }
  }
}

TEST(Collectives, a_piece_of_the_wrong_size_is_refused_on_every_rank) {
  expect_error([] {
    run_threads(2, [](std::shared_ptr<Comm> comm) { collective::gather(at::zeros({2, 3}), 0, 5, *comm); });
  }, {"collective", "gather", "5 rows"});
}

TEST(Collectives, a_dim_that_the_tensor_does_not_have_is_refused) {
  for (const int64_t dim : {-3, 2, 3})
    expect_error(
        [&] { run_threads(2, [&](std::shared_ptr<Comm> comm) {
                collective::scatter(at::zeros({2, 3}), dim, *comm);
              }); },
        {"collective", "scatter", "2 dims", fmt::format("dim {}", dim)});
}

// The case that DTensor got wrong: tensor parallelism cuts dim 0, and the data-parallel strategy cuts what is left of it.
