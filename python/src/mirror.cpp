#include "mirror.h"

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "bindings.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/dropout_mask.h"
#include "shardproof/nn/meta_init.h"

namespace shardproof::python {
namespace {

using torch::nn::Module;

// A module without a forward of its own: Python has that.
struct Image final : Module, BuffersOfPython {
  using Module::Module;
};

// Styles of tensor parallelism ask for these types, and for their members.
struct LinearImage final : torch::nn::LinearImpl, BuffersOfPython {
  LinearImage(const at::Tensor& own_weight, const at::Tensor& own_bias)
      : LinearImpl(torch::nn::LinearOptions(1, 1).bias(own_bias.defined())) {
    weight = parameters_["weight"] = own_weight;
    if (own_bias.defined()) bias = parameters_["bias"] = own_bias;
  }
};

struct EmbeddingImage final : torch::nn::EmbeddingImpl, BuffersOfPython {
  EmbeddingImage(const torch::nn::EmbeddingOptions& own_options, const at::Tensor& own_weight)
      : EmbeddingImpl(torch::nn::EmbeddingOptions(1, 1)) {
    options = own_options;
    weight = parameters_["weight"] = own_weight;
  }
};

at::Tensor tensor_or_nothing(const py::handle& object) {
  return object.is_none() ? at::Tensor() : object.cast<at::Tensor>();
}

torch::nn::EmbeddingOptions embedding_options(const py::object& module) {
  torch::nn::EmbeddingOptions options(module.attr("num_embeddings").cast<int64_t>(),
                                      module.attr("embedding_dim").cast<int64_t>());
  options.padding_idx(module.attr("padding_idx").cast<std::optional<int64_t>>());
  options.max_norm(module.attr("max_norm").cast<std::optional<double>>());
  options.scale_grad_by_freq(module.attr("scale_grad_by_freq").cast<bool>()).sparse(module.attr("sparse").cast<bool>());
  return options;
}

// The module itself, with its parameters where its C++ type has them.
std::shared_ptr<Module> image_of(const py::object& module) {
  const MetaInit no_memory;  // what the constructors below make is replaced, and must draw no random numbers
  const py::module_ nn = py::module_::import("torch.nn");
  if (py::type::handle_of(module).is(nn.attr("Linear")))
    return std::make_shared<LinearImage>(module.attr("weight").cast<at::Tensor>(), tensor_or_nothing(module.attr("bias")));
  if (py::type::handle_of(module).is(nn.attr("Embedding")))
    return std::make_shared<EmbeddingImage>(embedding_options(module), module.attr("weight").cast<at::Tensor>());
  if (py::isinstance(module, py::module_::import("shardproof.units").attr("Dropout"))) return std::make_shared<DropoutImage>();
  return std::make_shared<Image>(type_name(module));
}

void require_plain(const py::handle& name, const py::handle& value, const py::object& owner) {
  const py::object parameter_type = py::module_::import("torch.nn").attr("Parameter");
  SHARD_REQUIRE(py::type::handle_of(value).is(parameter_type), "fully_shard",
                "parameter '{}' of a {} is a {}, and must be a plain torch.nn.Parameter. Make a lazy module run once, and take "
                "off whatever has wrapped or quantized the parameter",
                py::str(name).cast<std::string>(), type_name(owner), type_name(value));
}

}  // namespace

at::Tensor DropoutImage::run(const at::Tensor& input, double probability, bool training) const {
  if (!training || probability == 0) return input;
  const DropoutSite site = next_dropout_site(probability);
  return input * dropout_mask(site, rows_in_whole(input.sizes()), input.scalar_type(), input.device());
}

Mirror::Mirror(const py::object& module) {
  root_ = reflect(module);
}

std::shared_ptr<Module> Mirror::reflect(const py::object& module) {
  const auto found = images_.find(module.ptr());
  if (found != images_.end()) return found->second;
  for (const auto& [name, value] : module.attr("_parameters").cast<py::dict>())
    if (!value.is_none()) require_plain(name, value, module);
  const std::shared_ptr<Module> image = image_of(module);
  images_[module.ptr()] = image;
  for (const auto& [name, value] : module.attr("_parameters").cast<py::dict>()) {
    const auto parameter = tensor_or_nothing(value);
    const auto key = py::str(name).cast<std::string>();
    if (parameter.defined() && !image->named_parameters(/*recurse=*/false).contains(key))
      image->register_parameter(key, parameter, parameter.requires_grad());
  }
  for (const auto& [name, value] : module.attr("_buffers").cast<py::dict>())
    if (!value.is_none()) image->register_buffer(py::str(name).cast<std::string>(), value.cast<at::Tensor>());
  dynamic_cast<BuffersOfPython&>(*image).transient = module.attr("_non_persistent_buffers_set").cast<std::set<std::string>>();
  for (const auto& [name, value] : module.attr("_modules").cast<py::dict>())
    if (!value.is_none())
      image->register_module(py::str(name).cast<std::string>(), reflect(py::reinterpret_borrow<py::object>(value)));
  return image;
}

std::shared_ptr<Module> Mirror::find(const py::object& module) const {
  const auto found = images_.find(module.ptr());
  SHARD_REQUIRE(found != images_.end(), "fully_shard", "a module of type {} is not part of the model that is sharded",
                type_name(module));
  return found->second;
}

void bind_mirror(py::module_& module) {
  py::class_<Mirror, std::shared_ptr<Mirror>>(module, "Mirror").def(py::init<const py::object&>(), py::arg("module"));
}

}  // namespace shardproof::python
