// Tensor and sequence parallelism of a mirrored module.
#include "bindings.h"
#include "mirror.h"
#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/parallel/experts/experts.h"
#include "shardproof/parallel/tensor/cross_entropy.h"
#include "shardproof/parallel/tensor/tensor_parallel.h"

namespace shardproof::python {
namespace {

std::vector<CutSegment> segments_of(const py::handle& style) {
  std::vector<CutSegment> segments;
  for (const auto& [length, granule, copied] : style.attr("segments").cast<std::vector<std::tuple<int64_t, int64_t, bool>>>())
    segments.push_back({.length = length, .granule = granule, .copied = copied});
  return segments;
}

ParallelStyle style_of(const py::handle& style) {
  const std::string kind = type_name(style);
  if (kind == "ColumnParallel")
    return ColumnParallel{.gather_output = style.attr("gather_output").cast<bool>(), .segments = segments_of(style)};
  if (kind == "RowParallel")
    return RowParallel{.input_is_parallel = style.attr("input_is_parallel").cast<bool>(), .segments = segments_of(style)};
  if (kind == "VocabParallel") return VocabParallel{};
  if (kind == "SequenceParallel") return SequenceParallel{};
  if (kind == "PartialGradients") return PartialGradients{};
  if (kind == "WholeSequence") return WholeSequence{};
  if (kind == "ColumnInput") return ColumnInput{};
  if (kind == "CutDropout") return CutDropout{.dim = style.attr("dim").cast<int64_t>(), .segments = segments_of(style)};
  if (kind == "ExpertParallel")
    return ExpertParallel{.ranks = style.attr("ranks").cast<int64_t>(), .cut_inside = style.attr("cut_inside").cast<bool>()};
  SHARD_REQUIRE(kind == "ScatterOutput", "tensor_parallel",
                "a plan holds styles (ColumnParallel, RowParallel, VocabParallel, SequenceParallel, PartialGradients, "
                "ScatterOutput, WholeSequence, ColumnInput, CutDropout, ExpertParallel), got a {}",
                kind);
  return ScatterOutput{.dim = style.attr("dim").cast<int64_t>()};
}

std::unique_ptr<TensorParallel> cut(const Mirror& mirror, std::shared_ptr<MeshComm> comms, const py::list& styles,
                                    const std::string& axis, std::optional<int64_t> sequence_dim, bool compare_replicas,
                                    int64_t overlap_pieces) {
  ParallelPlan plan{.styles = {},
                    .axis = axis,
                    .sequence_dim = sequence_dim,
                    .compare_replicas = compare_replicas,
                    .overlap_pieces = overlap_pieces};
  for (const auto& [pattern, style] : styles.cast<std::vector<std::pair<std::string, py::object>>>())
    plan.styles.emplace_back(pattern, style_of(style));
  const py::gil_scoped_release unlocked;
  return std::make_unique<TensorParallel>(parallelize(mirror.root(), std::move(comms), std::move(plan)));
}

// The forward of a module with a style: `forward` is Python's own, for styles that put something around it.
class StyledCall {
 public:
  StyledCall(const Mirror& mirror, const py::object& module) : image_(mirror.find(module)) {}

  bool has_style() const {
    const ParallelHooks* hooks = parallel_hooks(*image_);
    return hooks && (!hooks->only_places() || shares_experts());  // experts of one rank run as ever
  }
  bool shares_experts() const { return expert_group(*image_) || slice_group(*image_); }
  Dispatch dispatch(const at::Tensor& chosen, int64_t count) const {
    return {chosen, count, expert_group(*image_), slice_group(*image_)};
  }
  at::Tensor run(const py::function& forward, const at::Tensor& input) const {
    ParallelHooks* hooks = parallel_hooks(*image_);
    SHARD_REQUIRE(hooks, "tensor_parallel", "the forward of a {} whose style is gone", image_->name());
    const Held held(forward);
    const auto plain = [held](at::Tensor x) {
      const py::gil_scoped_acquire locked;
      return held.get()(x).cast<at::Tensor>();
    };
    const py::gil_scoped_release unlocked;
    return hooks->run(plain, input);
  }

 private:
  std::shared_ptr<torch::nn::Module> image_;
};

// The forward of a shardproof.Dropout whose input may be cut.
class DropoutCall {
 public:
  DropoutCall(const Mirror& mirror, const py::object& module)
      : image_(std::dynamic_pointer_cast<DropoutImage>(mirror.find(module))) {
    SHARD_REQUIRE(image_, "tensor_parallel", "a {} is no shardproof.Dropout", type_name(module));
  }

  at::Tensor run(const at::Tensor& input, double probability, bool training) const {
    return image_->run(input, probability, training);
  }

 private:
  std::shared_ptr<DropoutImage> image_;
};

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t entries, MeshComm& comms,
                         const std::string& axis, bool mean, double label_smoothing, int64_t ignore_index, int64_t vocab) {
  return vocab_parallel_cross_entropy(
      logits, targets, entries, comms.along({axis}),
      {.mean = mean, .label_smoothing = label_smoothing, .ignore_index = ignore_index, .vocab = vocab});
}

at::Tensor fused_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                               const at::Tensor& targets, bool mean, double label_smoothing, int64_t ignore_index,
                               int64_t vocab, int64_t logits_bytes_max, MeshComm* comms, const std::string& axis,
                               int64_t entries) {
  std::optional<VocabSplit> split;
  if (comms) split = VocabSplit{.entries = entries, .group = &comms->along({axis})};
  return fused_linear_cross_entropy(
      hidden, weight, bias.value_or(at::Tensor()), targets,
      {.mean = mean, .label_smoothing = label_smoothing, .ignore_index = ignore_index, .vocab = vocab}, logits_bytes_max,
      split);
}

}  // namespace

void bind_parallel(py::module_& module) {
  py::class_<TensorParallel>(module, "TensorParallel")
      .def("gather_parameters", &TensorParallel::gather_parameters, Unlocked())
      .def("parameters", [](const TensorParallel& parallel) {
        py::list parameters;
        for (const ParallelParameter& parameter : parallel.parameters())
          parameters.append(py::make_tuple(parameter.name, parameter.shape, parameter.grad_partial_ranks));
        return parameters;
      });
  module.def("parallelize", &cut, py::arg("mirror"), py::arg("comms"), py::arg("styles"), py::arg("axis"),
             py::arg("sequence_dim"), py::arg("compare_replicas"), py::arg("overlap_pieces"));
  py::class_<Dispatch>(module, "Dispatch")
      .def("rows", &Dispatch::rows, py::arg("x"), Unlocked())
      .def("experts", &Dispatch::experts, Unlocked())
      .def("sums", &Dispatch::sums, py::arg("rows"), py::arg("weights"), Unlocked());
  py::class_<StyledCall>(module, "StyledCall")
      .def(py::init<const Mirror&, const py::object&>(), py::arg("mirror"), py::arg("module"))
      .def_property_readonly("has_style", &StyledCall::has_style)
      .def_property_readonly("shares_experts", &StyledCall::shares_experts)
      .def("dispatch", &StyledCall::dispatch, py::arg("chosen"), py::arg("count"), Unlocked())
      .def("run", &StyledCall::run, py::arg("forward"), py::arg("input"));
  py::class_<DropoutCall>(module, "DropoutCall")
      .def(py::init<const Mirror&, const py::object&>(), py::arg("mirror"), py::arg("module"))
      .def("run", &DropoutCall::run, py::arg("input"), py::arg("probability"), py::arg("training"));
  module.def("vocab_parallel_cross_entropy", &cross_entropy, py::arg("logits"), py::arg("targets"), py::arg("entries"),
             py::arg("comms"), py::arg("axis"), py::arg("mean"), py::arg("label_smoothing"), py::arg("ignore_index"),
             py::arg("vocab"), Unlocked());
  module.def("fused_linear_cross_entropy", &fused_cross_entropy, py::arg("hidden"), py::arg("weight"), py::arg("bias"),
             py::arg("targets"), py::arg("mean"), py::arg("label_smoothing"), py::arg("ignore_index"), py::arg("vocab"),
             py::arg("logits_bytes_max"), py::arg("comms"), py::arg("axis"), py::arg("entries"), Unlocked());
}

}  // namespace shardproof::python
