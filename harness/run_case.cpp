#include "harness/run_case.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "harness/problem.h"
#include "harness/random.h"
#include "harness/sharded_run.h"
#include "harness/step_difference.h"
#include "harness/tolerance.h"

namespace harness {
namespace {

using Difference = std::optional<std::string>;

std::string first_word(const std::string& text) { return text.substr(0, text.find_first_of(" :")); }

// What the sharded run is held against.
class Reference {
 public:
  Reference(const Case& c, const golden::Run& run) : trace_(golden::train(run)) {
    if (c.mode != Mode::fast) return;
    truth_ = golden::train(run, at::kDouble);
    golden::Run other = run;
    other.order = run.order == golden::SumOrder::rounds_then_ranks ? golden::SumOrder::ranks_then_rounds
                                                                    : golden::SumOrder::rounds_then_ranks;
    other_order_ = golden::train(other);
  }

  Difference difference(size_t step, const std::vector<RankStep>& ranks, Verdict& verdict) const {
    if (truth_.empty()) return first_difference(trace_[step], ranks, &verdict.values_compared);
    for (const auto& [name, tensor] : trace_[step].parameters) verdict.values_compared += tensor.numel();
    return first_beyond_tolerance(truth_[step], {&trace_[step], &other_order_[step]}, ranks, &verdict.ratio_max);
  }

  const golden::Trace& trace() const { return trace_; }

 private:
  golden::Trace trace_, other_order_, truth_;
};

// Flips the lowest bit of one parameter. In fast mode doubles the largest piece of gradient: other tensors may be pure
// rounding (a key's bias has no gradient), where nothing can be noticed.
void plant_change(const Case& c, std::vector<RankStep>& ranks) {
  const Draws draws(c.seed, "control");
  std::vector<shardproof::Piece*> pieces;
  for (RankStep& rank : ranks)
    for (shardproof::Piece& piece : c.mode == Mode::fast ? rank.gradients : rank.parameters) pieces.push_back(&piece);
  if (c.mode == Mode::fast) {
    const auto largest = [](const auto* a, const auto* b) {
      return a->data.norm().template item<float>() < b->data.norm().template item<float>();
    };
    (*std::max_element(pieces.begin(), pieces.end(), largest))->data.mul_(2);
    return;
  }
  const at::Tensor& data = pieces[draws.bits(1) % pieces.size()]->data;
  float& value = data.mutable_data_ptr<float>()[draws.bits(2) % static_cast<uint64_t>(data.numel())];
  value = std::bit_cast<float>(std::bit_cast<uint32_t>(value) ^ 1u);
}

void compare(const Case& c, const Reference& reference, std::vector<std::vector<RankStep>> sharded, Verdict& verdict) {
  for (size_t step = 0; step < sharded.size(); ++step) {
    if (c.clip_norm > 0)
      ++(reference.trace()[step].gradient_norm > c.clip_norm ? verdict.steps_clipped : verdict.steps_not_clipped);
    if (auto difference = reference.difference(step, sharded[step], verdict)) {
      verdict.category = first_word(*difference);
      verdict.what = fmt::format("step {}: {}", step, *difference);
      return;
    }
  }
  plant_change(c, sharded.back());
  Verdict control;
  if (reference.difference(sharded.size() - 1, sharded.back(), control)) {
    verdict.held = true;
  } else {
    verdict.category = "control";
    verdict.what = "control: a planted change in the last step was not noticed";
  }
}

}  // namespace

Verdict run_case(const Case& c) {
  Verdict verdict;
  const golden::Run run = make_run(c);
  const Reference reference(c, run);
  try {
    compare(c, reference, run_sharded(c, run), verdict);
  } catch (const std::exception& error) {
    verdict.category = "error";
    // LibTorch appends a stack of frames to its messages.
    const std::string message = error.what();
    verdict.what = fmt::format("error: {}", message.substr(0, message.find("\nException raised from")));
  }
  return verdict;
}

}  // namespace harness
