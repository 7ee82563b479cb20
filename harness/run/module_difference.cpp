#include "harness/run/module_difference.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <tuple>

#include "harness/case/axes.h"
#include "harness/case/facets.h"
#include "harness/case/parallel.h"
#include "harness/run/ranks.h"
#include "harness/run/suspects.h"
#include "harness/run/wrong_pieces.h"
#include "shardproof/base/name_pattern.h"

namespace harness {
namespace {

using shardproof::ModuleCall;

enum class Aspect { parameter, input, output, output_gradient };

// One tensor of one call that is not what it is in the unsharded run.
struct WrongCall {
  size_t round = 0;
  bool backward = false;
  size_t order = 0;  // among the calls of the microbatch, in the order of the pass
  Aspect aspect = Aspect::parameter;
  const ModuleCall* golden = nullptr;
  std::string parameter = "";  // its name, where it is one
  bool reordered = false;      // the module's parameters together have the right elements, in another order
  at::Tensor wanted, held;     // float64
  std::string note = "";
  size_t rank = 0;

  auto key() const { return std::tuple(round, backward, order, aspect); }
};

// Relative, in the Frobenius norm: what roundings of a deep model may reach.
double tolerance_of(const Case& c, Aspect aspect) {
  if (c.options.arithmetic != 0) return 1e-9;  // in float64, and sums are exact
  const bool low = c.options.compute != fp32 || c.options.gradient != fp32;
  if (aspect == Aspect::parameter) return low ? 1e-2 : 1e-5;
  return low ? 1e-1 : 1e-3;
}

at::Tensor in_double(const at::Tensor& tensor) {
  return tensor.to(at::kCPU, at::kDouble).contiguous();
}

// Whether the gradient of the module's output is a sum over ranks of which each has its terms: those of its own queries, where
// ranks hold key heads in copies.
bool has_terms_of_ranks(const Case& c, const std::string& module) {
  const auto is_within = [&](const char* part) { return module.find(part) != std::string::npos; };
  return has_copied_heads(c) && std::ranges::any_of(std::array{".k_proj", ".v_proj", ".k_norm"}, is_within);
}

// Whether the style cuts the module's rows or columns as a whole, not segment by segment.
bool is_cut_in_one(const shardproof::ParallelPlan& plan, const std::string& module) {
  for (const auto& [pattern, style] : plan.styles) {
    if (!shardproof::name_matches(pattern, module)) continue;
    if (const auto* column = std::get_if<shardproof::ColumnParallel>(&style)) return column->segments.size() <= 1;
    if (const auto* row = std::get_if<shardproof::RowParallel>(&style)) return row->segments.size() <= 1;
    if (const auto* experts = std::get_if<shardproof::ExpertParallel>(&style)) return !experts->cut_inside;
    return true;
  }
  return true;
}

// Whether both have the same elements in their parameters, in whatever order.
bool has_elements_of(const ModuleCall& a, const ModuleCall& b) {
  const auto sorted = [](const ModuleCall& call) {
    std::vector<at::Tensor> all{at::empty({0}, at::kDouble)};
    for (const auto& item : call.parameters) all.push_back(in_double(item.second).flatten());
    return std::get<0>(at::cat(all).sort());
  };
  const at::Tensor x = sorted(a), y = sorted(b);
  return x.sizes() == y.sizes() && x.numel() > 1 && norm_of(x - y) <= 1e-5 * norm_of(y);
}

// The traces of all ranks in one microbatch, beside those of the golden microbatches that they had.
class Round {
 public:
  Round(const Case& c, const shardproof::ParallelPlan& plan, size_t round, const TracedStep& traced)
      : case_(c), plan_(plan), round_(round), traced_(traced), data_ranks_(c.data_rank_of_each()) {}

  // The first of this rank.
  std::optional<WrongCall> first(size_t rank) const {
    const MicrobatchTrace& golden = traced_.golden[static_cast<size_t>(data_ranks_[rank])][round_];
    const size_t calls = golden.calls.size();
    for (size_t i = 0; i < calls; ++i)
      if (auto found = in_forward(golden.calls[i], rank)) return placed(std::move(*found), rank, i, false);
    for (size_t i = 0; i < calls; ++i)
      if (auto found = in_backward(golden.calls[calls - 1 - i], rank)) return placed(std::move(*found), rank, i, true);
    return {};
  }

 private:
  const MicrobatchTrace& of_rank(size_t rank) const { return traced_.ranks[rank].at(round_); }

  WrongCall placed(WrongCall found, size_t rank, size_t order, bool backward) const {
    found.round = round_, found.backward = backward, found.order = order, found.rank = rank;
    found.note = call_of(*found.golden, rank)->note;
    return found;
  }

  const ModuleCall* call_of(const ModuleCall& golden, size_t rank) const {
    for (const ModuleCall& call : of_rank(rank).calls)
      if (call.module == golden.module && call.number == golden.number) return &call;
    return nullptr;
  }

  std::optional<WrongCall> in_forward(const ModuleCall& golden, size_t rank) const {
    const ModuleCall* const held = call_of(golden, rank);
    if (!held) return {};
    for (size_t i = 0; i < std::min(golden.parameters.size(), held->parameters.size()); ++i) {
      const auto of = [i](const ModuleCall& call) { return call.parameters[i].second; };
      if (auto found = compare(golden, Aspect::parameter, rank, of)) {
        found->parameter = golden.parameters[i].first;
        found->reordered = has_elements_of(*held, golden);
        return found;
      }
    }
    if (auto found = compare(golden, Aspect::input, rank, [](const ModuleCall& call) { return call.input; })) return found;
    return compare(golden, Aspect::output, rank, [](const ModuleCall& call) { return call.output; });
  }

  std::optional<WrongCall> in_backward(const ModuleCall& golden, size_t rank) const {
    if (!call_of(golden, rank) || has_terms_of_ranks(case_, golden.module)) return {};
    return compare(golden, Aspect::output_gradient, rank, [](const ModuleCall& call) { return call.output_gradient; });
  }

  template <class Of>
  std::optional<WrongCall> compare(const ModuleCall& golden, Aspect aspect, size_t rank, const Of& of) const {
    const at::Tensor held = of(*call_of(golden, rank)), whole = of(golden);
    if (!held.defined() || !whole.defined()) return {};
    const double scale = aspect == Aspect::output_gradient ? of_rank(rank).scale : 1;
    const at::Tensor values = in_double(held) / scale;
    const std::optional<at::Tensor> wanted = part(golden, in_double(whole), rank, of, aspect == Aspect::parameter);
    if (!wanted || wanted->numel() == 0) return {};
    if (norm_of(values - *wanted) <= tolerance_of(case_, aspect) * norm_of(*wanted)) return {};
    return WrongCall{.aspect = aspect, .golden = &golden, .wanted = *wanted, .held = values};
  }

  // The part of the golden tensor that this rank should have; nothing where that is not plain.
  template <class Of>
  std::optional<at::Tensor> part(const ModuleCall& golden, at::Tensor whole, size_t rank, const Of& of, bool parameter) const {
    const at::Tensor held = of(*call_of(golden, rank));
    if (held.dim() != whole.dim()) return {};
    const at::Tensor& positions = of_rank(rank).positions;
    if (!parameter && positions.defined()) {
      if (whole.dim() < 2) return {};
      whole = whole.index_select(1, positions);
    }
    if (held.sizes() == whole.sizes()) return whole;
    if (case_.tensor_ranks() == 1 || !is_cut_in_one(plan_, golden.module)) return {};
    return cut_over_tp(golden, whole, rank, of);
  }

  // Where the ranks along tp have parts of one dim, side by side.
  template <class Of>
  std::optional<at::Tensor> cut_over_tp(const ModuleCall& golden, const at::Tensor& whole, size_t rank, const Of& of) const {
    const at::Tensor held = of(*call_of(golden, rank));
    std::optional<int64_t> dim;
    for (int64_t d = 0; d < held.dim(); ++d) {
      if (held.size(d) == whole.size(d)) continue;
      if (dim) return {};
      dim = d;
    }
    int64_t begin = 0, end = 0;
    for (const int64_t peer : case_.mesh.peers(static_cast<int64_t>(rank), {axes::tp})) {
      const ModuleCall* const call = call_of(golden, static_cast<size_t>(peer));
      if (!call || of(*call).dim() != whole.dim()) return {};
      if (peer == static_cast<int64_t>(rank)) begin = end;
      end += of(*call).size(*dim);
    }
    if (end != whole.size(*dim)) return {};
    return whole.narrow(*dim, begin, held.size(*dim));
  }

  const Case& case_;
  const shardproof::ParallelPlan& plan_;
  size_t round_;
  const TracedStep& traced_;
  const std::vector<int64_t> data_ranks_;
};

std::string in_words(const std::vector<WrongCall>& found, const Case& c) {
  const WrongCall& first = found.front();
  std::string what;
  switch (first.aspect) {
    case Aspect::parameter:
      what = fmt::format("reads another {} in the forward", first.parameter);
      break;
    case Aspect::input:
      what = "gets another input";
      break;
    case Aspect::output:
      what = "gives another output of the same input and parameters";
      break;
    case Aspect::output_gradient:
      what = "gets another gradient of its output";
      break;
  }
  std::set<int64_t> ranks;
  for (const WrongCall& difference : found) ranks.insert(static_cast<int64_t>(difference.rank));
  const std::string& module = first.golden->module;
  std::string text = fmt::format("microbatch {}: {} {}", first.round, module.empty() ? "the model" : module, what);
  if (const std::string where = on_ranks(ranks, c.mesh.size()); !where.empty()) text += " " + where;
  if (!first.note.empty() && !first.backward) text += ", after " + first.note;
  return text;
}

bool is_close(const at::Tensor& a, const at::Tensor& b) {
  return norm_of(a - b) <= 1e-5 * norm_of(b);
}

// "elements [0, 6)": the first run of elements that differ, and whether there are more.
std::string wrong_elements(const WrongCall& d) {
  const at::Tensor wrong = ((d.held - d.wanted).abs() <= 1e-5 * d.wanted.abs()).logical_not().flatten();  // NaN too
  const at::Tensor indices = wrong.nonzero().flatten();
  const int64_t begin = indices[0].item<int64_t>();
  int64_t end = begin;
  while (end < wrong.numel() && wrong[end].item<bool>()) ++end;
  const bool more = indices.numel() > end - begin;
  if (begin == 0 && end == wrong.numel()) return fmt::format("all {} elements of {}", end, d.parameter);
  return fmt::format("elements [{}, {}){} of {}", begin, end, more ? " and others" : "", d.parameter);
}

std::string guess_of_parameter(const std::vector<WrongCall>& found, const golden::Named* earlier, bool loaded) {
  const WrongCall& first = found.front();
  const auto all = [&](const auto& is) { return std::ranges::all_of(found, is); };
  if (first.golden->module.empty())
    return wrong_elements(first) + ", a buffer, are not what the unsharded model computes for it";
  const at::Tensor* const old = earlier ? find_tensor(*earlier, first.parameter) : nullptr;
  if (old && old->numel() == first.held.numel() &&
      all([&](const WrongCall& d) { return is_close(d.held.flatten(), in_double(*old).flatten()); }))
    return "the forward reads the parameters of the step before";
  if (loaded && all([](const WrongCall& d) { return norm_of(d.held - kResumedBeginning) == 0; }))
    return fmt::format("{} is what the new run was built with: the load did not bring it there", first.parameter);
  if (all([](const WrongCall& d) { return d.reordered; }))
    return fmt::format("the elements that {} reads are there in another order, as if the pieces of ranks were swapped",
                       first.golden->module);
  if (all([](const WrongCall& d) { return norm_of(d.held) == 0; }))
    return loaded ? "the forward reads zeros: the load did not bring them back, or nothing was gathered there"
                  : "the forward reads zeros: nothing was gathered there, or it is the padding of another place";
  if (!earlier) return wrong_elements(first) + " are not the initial values that rank 0 has";
  return wrong_elements(first) + " are wrong where the forward reads them";
}

// "between A and B": the call before this one, in the order of the pass.
std::string guess_of_flow(const WrongCall& first, const MicrobatchTrace& golden) {
  const std::string& module = first.golden->module;
  const auto at = [&](size_t order) -> const std::string& {
    return golden.calls[first.backward ? golden.calls.size() - 1 - order : order].module;
  };
  switch (first.aspect) {
    case Aspect::input:
      return at(first.order - 1).empty()  // what read the buffers
                 ? fmt::format("the input of the model is wrong on its way to {}", module)
                 : fmt::format("what lies between {} and {} goes wrong in the forward", at(first.order - 1), module);
    case Aspect::output:
      return fmt::format("the forward of {} goes wrong: what it reads is right", module);
    case Aspect::output_gradient:
      return first.order == 0 ? fmt::format("the backward goes wrong between the loss and {}", module)
                              : fmt::format(
                                    "the backward goes wrong between the outputs of {} and {}: the gradient of the former "
                                    "is right",
                                    at(first.order - 1), module);
    case Aspect::parameter:
      break;
  }
  return "";
}

// A factor in the gradient, the same on all ranks that have a wrong one.
std::string factor_in_gradient(const std::vector<WrongCall>& found, const Case& c, const golden::Step& step) {
  std::optional<double> factor;
  for (const WrongCall& d : found) {
    const double square = d.wanted.square().sum().item<double>();
    const double own = (d.held * d.wanted).sum().item<double>() / std::max(square, 1e-300);
    const bool fits =
        square > 0 && norm_of(d.held - own * d.wanted) <= 1e-3 * norm_of(d.wanted) && (!factor || near(own, *factor));
    if (!fits) return "";
    factor = own;
  }
  const std::string words = factor_in_words(c, step, *factor);
  return words.empty() ? fmt::format(", and is {:.4g} times what it should be", *factor)
                       : fmt::format(", and is {:.4g} times what it should be: {}", *factor, words);
}

}  // namespace

ModuleDifference module_difference(const Case& c, const golden::Step& step, const TracedStep& traced,
                                   const golden::Named* earlier) {
  const shardproof::ParallelPlan plan = c.tensor_ranks() > 1 ? parallel_plan(c) : shardproof::ParallelPlan{};
  std::vector<WrongCall> found;
  for (size_t round = 0; round < step.microbatches.size() && found.empty(); ++round) {
    const Round compared(c, plan, round, traced);
    for (size_t rank = 0; rank < traced.ranks.size(); ++rank)
      if (auto first = compared.first(rank)) found.push_back(std::move(*first));
  }
  if (found.empty() && !traced.model_is_right)
    return {.where = "every module reads and gives what it does in the unsharded model, whose gradients are wrong too",
            .guess = "the model itself computes something else than the golden one"};
  if (found.empty())
    return {.where = "every module reads and gives what it does unsharded: what follows the backward is wrong", .guess = ""};
  std::ranges::stable_sort(found, {}, &WrongCall::key);
  std::erase_if(found, [key = found.front().key()](const WrongCall& d) { return d.key() != key; });
  const WrongCall& first = found.front();
  ModuleDifference result{.where = in_words(found, c), .guess = ""};
  const auto data_rank = static_cast<size_t>(c.data_rank_of_each()[first.rank]);
  if (first.aspect == Aspect::parameter)
    result.guess = guess_of_parameter(found, earlier, step.after.has_value());
  else
    result.guess = guess_of_flow(first, traced.golden[data_rank][first.round]);
  if (first.backward) result.guess += factor_in_gradient(found, c, step);
  return result;
}

}  // namespace harness
