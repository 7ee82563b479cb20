#include "parallel/tensor/styles.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <map>

#include "parallel/tensor/parallel_linear.h"
#include "parallel/tensor/placements.h"
#include "shardproof/algebra/axes.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/parallel/collective_ops.h"
#include "shardproof/parallel/tensor/parallel_layers.h"

namespace shardproof {
namespace {

template <class Wanted>
Wanted& require_type(torch::nn::Module& module, const std::string& name, const char* style, const char* type) {
  auto* wanted = dynamic_cast<Wanted*>(&module);
  SHARD_REQUIRE(wanted, "tensor_parallel", "style {} needs a {}, and module '{}' is {}", style, type, name, module.name());
  return *wanted;
}

// The name in the whole module, which a parameter that was cut already has kept.
std::string name_in(const ParallelState& state, const at::Tensor& parameter) {
  for (const auto& [name, tensor] : state.named)
    if (tensor.is_same(parameter)) return name;
  throw BrokenInvariant("[tensor_parallel] a parameter is not of the module");
}

// Of the whole parameter, which another module that shares it may have cut already.
Shape whole_shape(const ParallelState& state, const at::Tensor& parameter) {
  const ParallelParameter* known = state.find(parameter);
  return known ? known->shape : parameter.sizes().vec();
}

void cut_to(ParallelState& state, const at::Tensor& parameter, ParallelParameter description) {
  const at::NoGradGuard no_grad;
  parameter.set_data(parameter.is_meta() ? at::empty(state.local_shape(description), parameter.options())
                                         : state.cut(description.layout, parameter.detach().contiguous()));
  state.add(parameter, std::move(description));
}

// A parameter that two modules share is cut once, and must be cut alike.
void cut_parameter(ParallelState& state, const at::Tensor& parameter, int64_t dim, const std::vector<CutSegment>& segments) {
  const std::string name = name_in(state, parameter);
  const Shape shape = whole_shape(state, parameter);
  SHARD_REQUIRE(dim < std::ssize(shape), "tensor_parallel", "parameter {} has {} dims; it cannot be cut along dim {}", name,
                shape.size(), dim);
  const Split split = state.split(segments);
  validate(split, shape[static_cast<size_t>(dim)], state.parts(), fmt::format("dim {} of parameter {}", dim, name));
  const Layout layout = split_dim(replicated(), dim, split);
  if (const ParallelParameter* known = state.find(parameter)) {
    SHARD_REQUIRE(known->layout == layout, "tensor_parallel",
                  "parameter {} is shared by modules whose styles cut it in different ways. Give them styles that cut the same "
                  "dim in the same segments",
                  name);
    return;
  }
  const int64_t terms = copies_held(split, state.parts());
  cut_to(state, parameter, {name, shape, layout, terms});
}

// Whole on every rank, each of which computes a term of its gradient.
void describe_partial_gradient(ParallelState& state, const at::Tensor& parameter) {
  if (!state.find(parameter))
    state.add(parameter, {name_in(state, parameter), parameter.sizes().vec(), replicated(), state.parts()});
}

LinearArithmetic arithmetic_of(const ParallelState& state, const std::string& name) {
  return {.canonical = state.canonical, .name = name, .pieces = state.plan().overlap_pieces};
}

at::Tensor into_parallel(ParallelState& state, const std::string& name, const at::Tensor& x) {
  const auto dim = state.plan().sequence_dim;
  const collective::Sum sum = state.canonical ? collective::Sum::exact(name + ", gradient of the input") : collective::Sum();
  return dim ? collective::all_gather(x, *dim, state.sequence_length(x.size(*dim)), state.group(), sum)
             : collective::copy(x, state.group(), sum);
}

// Attention without a head has nothing to compute with.
void require_granules_everywhere(const ParallelState& state, const std::string& name, const std::vector<CutSegment>& segments) {
  for (const CutSegment& segment : segments) {
    if (segment.granule == 1 || segment.copied) continue;
    const int64_t granules = segment.length / segment.granule, parts = state.parts(), most = (granules + parts - 1) / parts;
    SHARD_REQUIRE(
        (parts - 1) * most < granules, "tensor_parallel",
        "module '{}': {} heads (of {} rows) are dealt to the {} ranks along {} by {}, and leave a rank without one. Use "
        "fewer ranks or another number of heads",
        name, granules, segment.granule, parts, state.axis(), most);
  }
}

class Column final : public StyleHooks {
 public:
  Column(const std::shared_ptr<ParallelState>& owner, const std::string& name, torch::nn::Module& module, ColumnParallel style)
      : StyleHooks(owner),
        name_(name),
        linear_(require_type<torch::nn::LinearImpl>(module, name, "ColumnParallel", "torch::nn::Linear")),
        style_(std::move(style)),
        outputs_(whole_shape(*owner, linear_.weight).front()) {
    SHARD_REQUIRE(!style_.gather_output || style_.segments.size() <= 1, "tensor_parallel",
                  "module '{}': outputs of several segments cannot be gathered into one", name);
    require_granules_everywhere(*owner, name, style_.segments);
    cut_parameter(*owner, linear_.weight, 0, style_.segments);
    if (linear_.bias.defined()) cut_parameter(*owner, linear_.bias, 0, style_.segments);
  }
  at::Tensor run(const Forward&, at::Tensor x) override {
    const auto owner = state();
    std::optional<SequenceSplit> sequence;
    if (const auto dim = owner->plan().sequence_dim) sequence = {*dim, owner->sequence_length(x.size(*dim))};
    const at::Tensor y = column_linear(x, linear_.weight, linear_.bias, owner->group(), sequence, arithmetic_of(*owner, name_));
    return style_.gather_output ? collective::gather(y, -1, outputs_, owner->group()) : y;
  }

 private:
  std::string name_;
  torch::nn::LinearImpl& linear_;
  ColumnParallel style_;
  int64_t outputs_;
};

class Row final : public StyleHooks {
 public:
  Row(const std::shared_ptr<ParallelState>& owner, const std::string& name, torch::nn::Module& module, RowParallel style)
      : StyleHooks(owner),
        name_(name),
        linear_(require_type<torch::nn::LinearImpl>(module, name, "RowParallel", "torch::nn::Linear")),
        style_(std::move(style)) {
    SHARD_REQUIRE(style_.input_is_parallel || style_.segments.size() <= 1, "tensor_parallel",
                  "module '{}': a replicated input is cut evenly, not in segments", name);
    cut_parameter(*owner, linear_.weight, 1, style_.segments);
    if (linear_.bias.defined() && owner->plan().sequence_dim) describe_partial_gradient(*owner, linear_.bias);
  }
  at::Tensor run(const Forward&, at::Tensor x) override {
    const auto owner = state();
    const auto dim = owner->plan().sequence_dim;
    if (!style_.input_is_parallel) x = collective::scatter(x, -1, owner->group());
    if (dim) owner->saw_sequence(x.size(*dim));
    return row_linear(x, linear_.weight, linear_.bias, owner->group(), dim, arithmetic_of(*owner, name_));
  }

 private:
  std::string name_;
  torch::nn::LinearImpl& linear_;
  RowParallel style_;
};

class Vocab final : public StyleHooks {
 public:
  Vocab(const std::shared_ptr<ParallelState>& owner, const std::string& name, torch::nn::Module& module)
      : StyleHooks(owner),
        name_(name),
        embedding_(require_type<torch::nn::EmbeddingImpl>(module, name, "VocabParallel", "torch::nn::Embedding")) {
    const int64_t rows = whole_shape(*owner, embedding_.weight).front();
    SHARD_REQUIRE(!embedding_.options.max_norm() && !embedding_.options.scale_grad_by_freq() && !embedding_.options.sparse(),
                  "tensor_parallel", "module '{}': max_norm, scale_grad_by_freq and sparse cannot be cut by rows", name);
    first_row_ = piece({}, rows, owner->parts(), owner->part()).begin;
    cut_parameter(*owner, embedding_.weight, 0, {});
  }
  at::Tensor run(const Forward&, at::Tensor tokens) override {
    const auto owner = state();
    const auto dim = owner->plan().sequence_dim;
    if (dim) owner->saw_sequence(tokens.size(*dim));
    if (owner->canonical) {
      // One rank has the row, the others zeros: this sum is exact as it is.
      const at::Tensor found = canonical_ops::embedding(embedding_.weight, tokens - first_row_, name_);
      return dim ? collective::reduce_scatter(found, *dim, owner->group()) : collective::reduce(found, owner->group());
    }
    return vocab_parallel_embedding(tokens, embedding_.weight, first_row_, owner->group(), dim,
                                    embedding_.options.padding_idx().value_or(-1));
  }

 private:
  std::string name_;
  torch::nn::EmbeddingImpl& embedding_;
  int64_t first_row_;
};

class Sequence final : public StyleHooks {
 public:
  Sequence(const std::shared_ptr<ParallelState>& owner, torch::nn::Module& module) : StyleHooks(owner) {
    if (!owner->plan().sequence_dim) return;
    place_along_sequence(owner, module);
    for (const at::Tensor& parameter : module.parameters(/*recurse=*/true)) describe_partial_gradient(*owner, parameter);
  }
  at::Tensor run(const Forward& forward, at::Tensor x) override { return forward(std::move(x)); }
};

class Partial final : public StyleHooks {
 public:
  Partial(const std::shared_ptr<ParallelState>& owner, const std::string& name, torch::nn::Module& module) : StyleHooks(owner) {
    const std::vector<at::Tensor> parameters = module.parameters(/*recurse=*/true);
    SHARD_REQUIRE(!parameters.empty(), "tensor_parallel",
                  "style PartialGradients is for parameters, and module '{}' ({}) has none. Leave it without a style", name,
                  module.name());
    for (const at::Tensor& parameter : parameters) {
      const ParallelParameter* known = owner->find(parameter);
      SHARD_REQUIRE(!known || known->layout == replicated(), "tensor_parallel",
                    "style PartialGradients of module '{}' is for whole parameters, and {} is cut by another style", name,
                    known->name);
      describe_partial_gradient(*owner, parameter);
    }
  }
  at::Tensor run(const Forward& forward, at::Tensor x) override { return forward(std::move(x)); }
};

class Scattered final : public StyleHooks {
 public:
  Scattered(const std::shared_ptr<ParallelState>& owner, ScatterOutput style) : StyleHooks(owner), style_(style) {}
  at::Tensor run(const Forward& forward, at::Tensor x) override {
    const auto owner = state();
    const at::Tensor y = forward(std::move(x));
    return owner->plan().sequence_dim ? collective::scatter(y, style_.dim, owner->group()) : y;
  }

 private:
  ScatterOutput style_;
};

class Whole final : public StyleHooks {
 public:
  using StyleHooks::StyleHooks;
  at::Tensor run(const Forward& forward, at::Tensor x) override {
    const auto owner = state();
    const auto dim = owner->plan().sequence_dim;
    if (!dim) return forward(std::move(x));
    const at::Tensor whole = collective::gather(x, *dim, owner->sequence_length(x.size(*dim)), owner->group());
    return collective::scatter(forward(whole), *dim, owner->group());
  }
};

constexpr const char *kFirst = "gate_up_proj", *kLast = "down_proj";  // of experts that can be cut inside

void require_slices(const std::string& name, const torch::nn::Module& module) {
  std::map<std::string, Shape> shapes;
  std::vector<std::string> said;
  for (const auto& item : module.named_parameters()) {
    shapes[item.key()] = item.value().sizes().vec();
    said.push_back(fmt::format("{} [{}]", item.key(), fmt::join(item.value().sizes(), ", ")));
  }
  const Shape first = shapes[kFirst], last = shapes[kLast];
  SHARD_REQUIRE(shapes.size() == 2 && first.size() == 3 && last.size() == 3 && first == Shape({last[0], 2 * last[2], last[1]}),
                "tensor_parallel",
                "style ExpertParallel with cut_inside needs gate_up_proj [experts, 2 * intermediate, hidden] and down_proj "
                "[experts, hidden, intermediate], and module '{}' has {}. Leave cut_inside out",
                name, fmt::join(said, ", "));
}

// Cuts a parameter inside of each expert: the rows of gate and of up, or the columns of down.
Layout slice_experts(Layout layout, const ParallelState& state, const std::string& parameter, const Shape& shape) {
  const bool is_first = parameter == kFirst;
  const std::vector<CutSegment> halves(is_first ? 2 : 0, CutSegment{shape[1] / 2});
  return split_dim(std::move(layout), is_first ? 1 : 2, state.split(halves));
}

// The module itself sends rows to the other ranks, by a Dispatch.
class SharedExperts final : public StyleHooks {
 public:
  SharedExperts(const std::shared_ptr<ParallelState>& owner, const std::string& name, torch::nn::Module& module,
                const ExpertParallel& style)
      : StyleHooks(owner) {
    const std::vector<at::Tensor> parameters = module.parameters(/*recurse=*/true);
    const auto count = [](const at::Tensor& parameter) { return parameter.dim() == 0 ? 0 : parameter.size(0); };
    for (const at::Tensor& parameter : parameters)
      SHARD_REQUIRE(
          parameter.dim() > 1 && count(parameter) == count(parameters.front()), "tensor_parallel",
          "style ExpertParallel cuts the first dim, that of experts, of all parameters of module '{}', and {} is [{}] "
          "where others have {}",
          name, name_in(*owner, parameter), fmt::join(parameter.sizes(), ", "), count(parameters.front()));
    SHARD_REQUIRE(
        std::ranges::any_of(parameters, [](const at::Tensor& parameter) { return parameter.dim() > 2; }), "tensor_parallel",
        "style ExpertParallel is for modules with a matrix for each expert in one parameter, and module '{}' ({}) has none",
        name, module.name());
    for (const at::Tensor& parameter : parameters)
      SHARD_REQUIRE(!owner->find(parameter), "tensor_parallel",
                    "parameter {} of module '{}' has another style already; give ExpertParallel to one module that has it",
                    name_in(*owner, parameter), name);
    for (const auto& buffer : module.named_buffers(/*recurse=*/true))
      SHARD_REQUIRE(
          count(buffer.value()) != count(parameters.front()), "tensor_parallel",
          "buffer {} of module '{}' has a row for each of {} experts, and the style ExpertParallel cuts parameters only. "
          "Make it a parameter, or keep it outside of the module",
          buffer.key(), name, count(parameters.front()));
    if (style.cut_inside) require_slices(name, module);
    Comm& group = owner->share_experts(style);
    if (group.size() > 1) group_ = group.shared();
    if (style.cut_inside && owner->parts() > 1) slices_ = owner->group().shared();
    for (const auto& item : module.named_parameters()) {
      const at::Tensor& parameter = item.value();
      const Shape shape = parameter.sizes().vec();
      Layout layout = group_ ? split_dim(replicated(), 0, Split{axes::ep}) : replicated();
      if (slices_) layout = slice_experts(std::move(layout), *owner, item.key(), shape);
      if (group_) take_values_of_rank_0(parameter, group);  // those along edp follow later
      if (group_ || slices_) cut_to(*owner, parameter, {name_in(*owner, parameter), shape, layout});
    }
  }
  at::Tensor run(const Forward& forward, at::Tensor x) override { return forward(std::move(x)); }
  bool only_places() const override { return true; }
  std::shared_ptr<Comm> expert_group() const override { return group_; }
  std::shared_ptr<Comm> slice_group() const override { return slices_; }

 private:
  std::shared_ptr<Comm> group_, slices_;  // null where there is one rank
};

class Input final : public StyleHooks {
 public:
  Input(const std::shared_ptr<ParallelState>& owner, std::string name) : StyleHooks(owner), name_(std::move(name)) {}
  at::Tensor run(const Forward& forward, at::Tensor x) override { return forward(into_parallel(*state(), name_, x)); }

 private:
  std::string name_;
};

}  // namespace

std::shared_ptr<StyleHooks> make_style(const std::shared_ptr<ParallelState>& state, const std::string& name,
                                       torch::nn::Module& module, const ParallelStyle& style) {
  struct Make {
    const std::shared_ptr<ParallelState>& state;
    const std::string& name;
    torch::nn::Module& module;
    std::shared_ptr<StyleHooks> operator()(const ColumnParallel& s) { return std::make_shared<Column>(state, name, module, s); }
    std::shared_ptr<StyleHooks> operator()(const RowParallel& s) { return std::make_shared<Row>(state, name, module, s); }
    std::shared_ptr<StyleHooks> operator()(const VocabParallel&) { return std::make_shared<Vocab>(state, name, module); }
    std::shared_ptr<StyleHooks> operator()(const SequenceParallel&) { return std::make_shared<Sequence>(state, module); }
    std::shared_ptr<StyleHooks> operator()(const ScatterOutput& s) { return std::make_shared<Scattered>(state, s); }
    std::shared_ptr<StyleHooks> operator()(const WholeSequence&) { return std::make_shared<Whole>(state); }
    std::shared_ptr<StyleHooks> operator()(const ColumnInput&) { return std::make_shared<Input>(state, name); }
    std::shared_ptr<StyleHooks> operator()(const PartialGradients&) {
      return std::make_shared<Partial>(state, name, module);
    }
    std::shared_ptr<StyleHooks> operator()(const CutDropout& s) { return cut_dropout(state, name, module, s); }
    std::shared_ptr<StyleHooks> operator()(const CutAttention& s) { return cut_attention(state, name, module, s); }
    std::shared_ptr<StyleHooks> operator()(const ExpertParallel& s) {
      return std::make_shared<SharedExperts>(state, name, module, s);
    }
  };
  return std::visit(Make{state, name, module}, style);
}

}  // namespace shardproof
