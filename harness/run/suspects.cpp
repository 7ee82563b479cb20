#include "harness/run/suspects.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <memory>

namespace harness {
namespace {

// Gradients of each microbatch by itself, [round][data-parallel rank].
class Terms {
 public:
  explicit Terms(const golden::Run& run) {
    const golden::Step& step = run.steps.front();
    for (size_t round = 0; round < step.microbatches.size(); ++round) {
      terms_.emplace_back();
      for (size_t rank = 0; rank < step.microbatches[round].size(); ++rank) terms_.back().push_back(alone(run, round, rank));
    }
  }

  const std::vector<std::vector<Values>>& each() const { return terms_; }
  int64_t rounds() const { return std::ssize(terms_); }
  int64_t ranks() const { return std::ssize(terms_.front()); }

  // The sum of those that `counts` says so often.
  Values sum(const std::function<double(int64_t round, int64_t rank)>& counts) const {
    Values total;
    for (const at::Tensor& like : terms_[0][0]) total.push_back(at::zeros_like(like));
    for (int64_t round = 0; round < rounds(); ++round)
      for (int64_t rank = 0; rank < ranks(); ++rank)
        for (size_t i = 0; i < total.size(); ++i)
          total[i].add_(terms_[static_cast<size_t>(round)][static_cast<size_t>(rank)][i], counts(round, rank));
    return total;
  }

 private:
  static Values alone(const golden::Run& run, size_t round, size_t rank) {
    golden::Run one = run;
    for (size_t k = 0; k < one.steps[0].microbatches.size(); ++k)
      for (size_t r = 0; r < one.steps[0].microbatches[k].size(); ++r)
        if (k != round || r != rank) one.steps[0].microbatches[k][r].weight = 0;
    return in_double(golden::train(one, at::kDouble).front().gradients);
  }

  std::vector<std::vector<Values>> terms_;
};

}  // namespace

bool near(double a, double b) {
  return std::isfinite(a) && std::isfinite(b) && std::abs(a - b) <= 1e-4 * std::abs(b);
}

Values in_double(const golden::Named& tensors) {
  Values values;
  for (const auto& [name, tensor] : tensors) values.push_back(tensor.to(at::kDouble).contiguous().view({-1}));
  return values;
}

std::optional<Values> in_order(const golden::Named& tensors, const golden::Named& names) {
  Values values;
  for (const auto& [name, like] : names) {
    const at::Tensor* const found = find_tensor(tensors, name);
    if (!found || found->numel() != like.numel()) return {};
    values.push_back(found->to(at::kDouble).contiguous().view({-1}));
  }
  return values;
}

const at::Tensor* find_tensor(const golden::Named& tensors, const std::string& name) {
  const auto found = std::ranges::find(tensors, name, &golden::Named::value_type::first);
  return found == tensors.end() ? nullptr : &found->second;
}

std::vector<Suspect> gradient_suspects(const Case& c, const golden::Run& run) {
  const auto terms = std::make_shared<Terms>(run);
  std::vector<Suspect> suspects;
  const auto add = [&](std::string text, std::function<double(int64_t round, int64_t rank)> counts) {
    suspects.push_back({std::move(text), [terms, values = terms->sum(counts)](int64_t) { return values; }});
  };
  // Of what each rank holds by itself: `together` says whose terms a rank has.
  const auto add_own = [&](std::string text, std::function<bool(int64_t own, int64_t rank)> together) {
    const std::vector<int64_t> data_ranks = c.data_rank_of_each();
    suspects.push_back({.text = std::move(text),
                        .values =
                            [=](int64_t rank) {
                              return terms->sum([&](int64_t, int64_t other) {
                                return together(data_ranks[static_cast<size_t>(rank)], other) ? 1 : 0;
                              });
                            },
                        .apart = true});
  };
  const int64_t ranks = terms->ranks(), rounds = terms->rounds(), shards = c.shards();
  if (ranks > 1) {
    add_own("each rank has its own terms alone: they were not summed over ranks",
            [](int64_t own, int64_t r) { return own == r; });
    for (int64_t r = 0; r < ranks; ++r)
      add(fmt::format("the terms of data-parallel rank {} are missing", r), [r](int64_t, int64_t x) { return x != r; });
  }
  if (shards > 1 && c.replicas() > 1) {
    add_own("the sum over dp_replicate is missing", [shards](int64_t own, int64_t r) { return own / shards == r / shards; });
    add_own("the sum over dp_shard is missing", [shards](int64_t own, int64_t r) { return own % shards == r % shards; });
  }
  for (int64_t k = 0; rounds > 1 && k < rounds; ++k) {
    add(fmt::format("microbatch {} of {} is missing", k, rounds), [k](int64_t x, int64_t) { return x != k; });
    add(fmt::format("microbatch {} of {} was added twice", k, rounds), [k](int64_t x, int64_t) { return x == k ? 2 : 1; });
    add(fmt::format("only microbatch {} of {} is there", k, rounds), [k](int64_t x, int64_t) { return x == k; });
  }
  if (rounds > 1) {
    add("sums of earlier microbatches were added again with each later one",
        [rounds](int64_t x, int64_t) { return static_cast<double>(rounds - x); });
    if (ranks > 1)
      add("sums of earlier microbatches were summed over ranks again with each later one",
          [=](int64_t x, int64_t) { return std::pow(static_cast<double>(ranks), static_cast<double>(rounds - 1 - x)); });
  }
  return suspects;
}

golden::Run plain_step(golden::Run run, size_t step, const golden::Named& parameters) {
  golden::Step only = run.steps[step];
  only.after = {};
  only.clip_norm = 0;
  run.parameters = parameters;
  run.steps = {std::move(only)};
  run.model.canonical = false;
  run.precision = {};
  run.scaling = {};
  run.optimizer = {.kind = golden::Optimizer::Kind::sgd, .lr = 0};
  run.ema = 0;
  run.jitter = 0;
  return run;
}

std::vector<std::vector<Values>> gradient_terms(const golden::Run& run) {
  return Terms(run).each();
}

std::string factor_in_words(const Case& c, const golden::Step& step, double factor) {
  struct Known {
    double size;
    std::string name;
  };
  const std::vector<Known> all = {{static_cast<double>(c.data_ranks()), "the number of data-parallel ranks"},
                                  {static_cast<double>(c.shards()), "the number of ranks along dp_shard"},
                                  {static_cast<double>(c.replicas()), "the number of ranks along dp_replicate"},
                                  {static_cast<double>(c.context_ranks()), "the number of ranks along cp"},
                                  {static_cast<double>(c.mesh.size()), "the number of all ranks"},
                                  {step.divide * step.divide_before, "the divisor of the gradients"},
                                  {c.mode == Mode::canonical ? 0x1p44 : 0, "the unit of sums in fixed point"}};
  std::vector<std::string> names;
  double size = 0;
  for (const Known& known : all)
    if (known.size > 1 && (near(factor, known.size) || near(factor, 1 / known.size))) {
      names.push_back(known.name);
      size = known.size;
    }
  if (names.empty()) return "";
  return fmt::format("{}{:.6g}, {}", factor < 1 ? "1/" : "", size, fmt::join(names, " or "));
}

}  // namespace harness
