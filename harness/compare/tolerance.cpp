#include "harness/compare/tolerance.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

namespace harness {
namespace {

using Values = std::vector<double>;
using Traces = std::vector<const golden::StepTrace*>;

Values doubles(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kDouble).contiguous();
  return {values.const_data_ptr<double>(), values.const_data_ptr<double>() + values.numel()};
}

double norm(const Values& values) {
  double sum = 0;
  for (const double value : values) sum += value * value;
  return std::sqrt(sum);
}

double distance(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return std::sqrt(sum);
}

double farthest_of(const Values& truth, const std::vector<Values>& references) {
  double farthest = 0;
  for (const Values& values : references) farthest = std::max(farthest, distance(truth, values));
  return farthest;
}

// Of each element the rank that is farthest from the truth, and of those the farthest.
struct Farthest {
  Values distances;
  const HeldPiece* held = nullptr;
  int64_t element = 0;

  Farthest(const Values& truth, const std::vector<HeldPiece>& pieces) : distances(truth.size(), 0) {
    for (const HeldPiece& piece : pieces) {
      const float* values = piece.piece->data.const_data_ptr<float>();
      for (int64_t i = piece.piece->run.begin; i < piece.piece->run.end; ++i) {
        double& most = distances[static_cast<size_t>(i)];
        const double here = std::abs(values[i - piece.piece->run.begin] - truth[static_cast<size_t>(i)]);
        if (!held || !(here <= distances[static_cast<size_t>(element)])) held = &piece, element = i;
        if (!(here <= most)) most = here;
      }
    }
  }
  float value() const { return held->piece->data.const_data_ptr<float>()[element - held->piece->run.begin]; }
};

// A tensor of a step, and what else it is judged by.
struct Judged {
  std::string kind, name;
  at::Tensor whole;                  // the truth
  at::Tensor before;                 // what the step began with, where it only changes something
  at::Tensor gradient;               // of the same parameter, in the truth
  double kind_size, gradients_size;  // of all tensors of the kind, and of all gradients
  std::vector<Values> references;
};

class Judge {
 public:
  Judge(at::ScalarType compute, double* ratio_max, int64_t* compared)
      : floor_(distance_floor(compute)), spacing_(spacing_around_zero(compute)), ratio_max_(ratio_max), compared_(compared) {}

  // Empty when `found` is near enough; else how far off it is. A distance up to `least` is as good as none.
  std::string too_far(double found, double reference, double least, double size) {
    const double unit = std::max(reference, least);
    if (found == 0 && std::isfinite(unit)) return {};
    const double ratio = found / unit;  // infinite when all but the sharded run are zero
    if (!(ratio <= *ratio_max_)) *ratio_max_ = ratio;
    if (ratio <= kToleranceFactor) return {};  // false for NaN
    return fmt::format(
        "relative distance {:.3g} from the float64 run, {:.3g} times that of unsharded float32 runs (allowed {})", found / size,
        ratio, kToleranceFactor);
  }

  FoundDifference scalar(Difference difference, double truth, const Values& references, double sharded) {
    ++*compared_;
    double reference = 0;
    for (const double value : references) reference = std::max(reference, std::abs(value - truth));
    const std::string far = too_far(std::abs(sharded - truth), reference, floor_ * std::abs(truth), std::abs(truth));
    if (far.empty()) return {};
    difference.says = fmt::format("truth {:.17g}, golden {:.17g}, sharded {:.17g}: {}", truth, references[0], sharded, far);
    return difference;
  }

  // How far off the tensor may be where all references are the truth.
  double least_of(const Judged& judged) const {
    const at::Tensor &before = judged.before, &gradient = judged.gradient;
    double own = size_of(judged.whole, before);
    // A parameter without a gradient is frozen. It is judged by itself, however far others move.
    const bool is_frozen = before.defined() && !gradient.defined();
    const bool is_nothing = floor_ > kSingleFloor && !is_frozen && own <= kNothing * judged.kind_size;
    if (is_nothing) own = judged.kind_size;
    const double spacing = spacing_of(gradient, is_nothing ? judged.gradients_size : size_of(gradient, {}));
    return (floor_ + spacing) * own + (before.defined() ? kSingleFloor * norm(doubles(judged.whole)) : 0);
  }

  FoundDifference tensor(const Judged& judged, const std::vector<HeldPiece>& pieces) {
    const Values truth = doubles(judged.whole);
    const double reference = farthest_of(truth, judged.references);
    const Farthest farthest(truth, pieces);
    for (const HeldPiece& held : pieces) *compared_ += held.piece->run.size();
    const double size = norm(truth), least = least_of(judged);
    const std::string far = too_far(norm(farthest.distances), reference, least, size);
    if (far.empty()) return {};
    const auto at = static_cast<size_t>(farthest.element);
    return element_on(
        farthest.held->rank, judged.kind, judged.name, index_of(farthest.element, judged.whole),
        fmt::format("truth {:.17g}, golden {:.9g}, sharded {:.9g}: {}", truth[at], judged.references[0][at], farthest.value(),
                    far));
  }

  // How much of a gradient of that size, and of what follows from it, the spacing of numbers around zero may be.
  double spacing_of(const at::Tensor& gradient, double size) const {
    if (spacing_ == 0 || !gradient.defined() || size == 0) return 0;
    return spacing_ * std::sqrt(static_cast<double>(gradient.numel())) / size;
  }

  // Of what the step made of the tensor; 0 where there is none.
  static double size_of(const at::Tensor& whole, const at::Tensor& before) {
    if (!whole.defined()) return 0;
    return before.defined() ? distance(doubles(whole), doubles(before)) : norm(doubles(whole));
  }

 private:
  // What is smaller than this, beside the other tensors of its kind, is zero but for the rounding of float64.
  static constexpr double kNothing = 0x1p-40;
  static constexpr double kSingleFloor = distance_floor(at::kFloat);

  double floor_, spacing_;
  double* ratio_max_;
  int64_t* compared_;
};

FoundDifference scalars(Judge& judge, const golden::StepTrace& truth, const Traces& references,
                        const std::vector<RankStep>& ranks, const Copies& copies) {
  const auto of_references = [&](const auto& value_of) {
    Values values;
    for (const golden::StepTrace* trace : references) values.push_back(value_of(*trace));
    return values;
  };
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].losses.size() != truth.losses.size())
      return other_rounds(rank, ranks[rank].losses.size(), truth.losses.size());
  for (size_t round = 0; round < truth.losses.size(); ++round)
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      const auto loss = [&](const golden::StepTrace& trace) { return trace.losses[round].at(copies.data_rank(rank)); };
      Difference what = number_on(rank, "loss", "");
      what.round = static_cast<int64_t>(round);
      if (auto difference = judge.scalar(what, loss(truth), of_references(loss), ranks[rank].losses[round])) return difference;
    }
  for (size_t rank = 0; rank < ranks.size() && copies.buffers; ++rank) {
    if (ranks[rank].evaluated.empty() != truth.evaluated.empty())
      return number_on(rank, "evaluation", "one run has it, and one has not");
    if (truth.evaluated.empty()) continue;
    const auto evaluated = [&](const golden::StepTrace& trace) { return trace.evaluated.at(copies.data_rank(rank)); };
    if (auto difference = judge.scalar(number_on(rank, "evaluation", ""), evaluated(truth), of_references(evaluated),
                                       ranks[rank].evaluated[0]))
      return difference;
  }
  const auto gradient_norm = [](const golden::StepTrace& trace) { return trace.gradient_norm; };
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (auto difference = judge.scalar(number_on(rank, "gradient norm", ""), truth.gradient_norm, of_references(gradient_norm),
                                       ranks[rank].gradient_norm))
      return difference;
  return {};
}

// `before` may be empty.
double size_of_all(const golden::Named& tensors, const golden::Named& before) {
  double size = 0;
  for (size_t i = 0; i < tensors.size(); ++i)
    size = std::hypot(size, Judge::size_of(tensors[i].second, before.empty() ? at::Tensor() : before[i].second));
  return size;
}

// Undefined where the parameter has none.
at::Tensor gradient_of(const golden::StepTrace& trace, const std::string& parameter) {
  for (const auto& [name, gradient] : trace.gradients)
    if (name == parameter) return gradient;
  return {};
}

}  // namespace

FoundDifference first_beyond_tolerance(const Unsharded& unsharded, const std::vector<RankStep>& ranks, const Copies& copies,
                                       double* ratio_max, int64_t* compared) {
  const auto& [truth, before, references] = unsharded;
  Judge judge(copies.compute, ratio_max, compared);
  if (auto difference = scalars(judge, truth, references, ranks, copies)) return difference;
  std::vector<TensorKind> kinds;
  if (auto difference = tensor_kinds(truth, ranks, copies, kinds)) return difference;
  std::vector<std::vector<TensorKind>> reference_kinds(references.size());  // the same kinds in the same order
  for (size_t r = 0; r < references.size(); ++r)
    if (auto difference = tensor_kinds(*references[r], ranks, copies, reference_kinds[r])) return difference;
  std::vector<std::vector<HeldPiece>> sorted;
  const double gradients_size = size_of_all(truth.gradients, {});
  for (size_t k = 0; k < kinds.size(); ++k) {
    if (auto difference = sort_pieces(kinds[k], sorted)) return difference;
    const bool are_parameters = kinds[k].name == "parameter";
    const double kind_size = size_of_all(kinds[k].golden, are_parameters ? before : golden::Named());
    for (size_t i = 0; i < sorted.size(); ++i) {
      const auto& [name, whole] = kinds[k].golden[i];
      std::vector<Values> of_references;
      for (const auto& trace_kinds : reference_kinds) of_references.push_back(doubles(trace_kinds[k].golden.at(i).second));
      const Judged judged{
          kinds[k].name, name, whole, are_parameters ? before[i].second : at::Tensor(), gradient_of(truth, name), kind_size,
          gradients_size, std::move(of_references)};
      if (auto difference = judge.tensor(judged, sorted[i])) return difference;
    }
  }
  return {};
}

size_t best_known_parameter(const Unsharded& unsharded, at::ScalarType compute) {
  const auto& [truth, before, references] = unsharded;
  const Judge judge(compute, nullptr, nullptr);
  const double gradients_size = size_of_all(truth.gradients, {}), kind_size = size_of_all(truth.parameters, before);
  size_t best = 0;
  double least = INFINITY;
  for (size_t i = 0; i < truth.parameters.size(); ++i) {
    const auto& [name, whole] = truth.parameters[i];
    Judged judged{"parameter", name, whole, before[i].second, gradient_of(truth, name), kind_size, gradients_size, {}};
    for (const golden::StepTrace* trace : references) judged.references.push_back(doubles(trace->parameters[i].second));
    const Values values = doubles(whole);
    const double off = std::max(judge.least_of(judged), farthest_of(values, judged.references)) / norm(values);
    if (off < least) least = off, best = i;
  }
  return best;
}

}  // namespace harness
