#include "mirror.h"

#include <torch/csrc/autograd/python_variable.h>
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
struct Image final : Module, StandsForPython {
  using Module::Module;
};

// Styles of tensor parallelism ask for these types, and for their members.
struct LinearImage final : torch::nn::LinearImpl, StandsForPython {
  LinearImage(const at::Tensor& own_weight, const at::Tensor& own_bias)
      : LinearImpl(torch::nn::LinearOptions(1, 1).bias(own_bias.defined())) {
    weight = parameters_["weight"] = own_weight;
    if (own_bias.defined()) bias = parameters_["bias"] = own_bias;
  }
};

struct EmbeddingImage final : torch::nn::EmbeddingImpl, StandsForPython {
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

// The module itself, with its parameters where its C++ type has them. A tensor that a hook computes, as the weight is under
// torch.nn.utils.weight_norm, is no parameter, and the module then no plain layer.
std::shared_ptr<Module> image_of(const py::object& module) {
  const MetaInit no_memory;  // what the constructors below make is replaced, and must draw no random numbers
  const py::module_ nn = py::module_::import("torch.nn");
  const py::dict parameters = module.attr("_parameters");
  const bool has_weight = parameters.contains("weight") && !parameters["weight"].is_none();
  if (has_weight && parameters.contains("bias") && py::type::handle_of(module).is(nn.attr("Linear")))
    return std::make_shared<LinearImage>(parameters["weight"].cast<at::Tensor>(), tensor_or_nothing(parameters["bias"]));
  if (has_weight && py::type::handle_of(module).is(nn.attr("Embedding")))
    return std::make_shared<EmbeddingImage>(embedding_options(module), parameters["weight"].cast<at::Tensor>());
  if (py::isinstance(module, py::module_::import("shardproof.units").attr("Dropout"))) return std::make_shared<DropoutImage>();
  return std::make_shared<Image>(type_name(module));
}

py::object parameter_type() { return py::module_::import("torch.nn").attr("Parameter"); }

void require_plain(const py::handle& name, const py::handle& value, const py::object& owner) {
  SHARD_REQUIRE(py::type::handle_of(value).is(parameter_type()), "fully_shard",
                "parameter '{}' of a {} is a {}, and must be a plain torch.nn.Parameter. Make a lazy module run once, and take "
                "off whatever has wrapped or quantized the parameter",
                py::str(name).cast<std::string>(), type_name(owner), type_name(value));
}

// The items of one of a module's dicts, without those that are None.
template <class Visit>
void each_item(const py::handle& module, const char* dict, const Visit& visit) {
  for (const auto& [name, value] : module.attr(dict).cast<py::dict>())
    if (!value.is_none()) visit(name, value);
}

std::string below(const std::string& prefix, const py::handle& name) { return prefix + py::str(name).cast<std::string>(); }

void collect_buffers(const py::handle& module, const std::string& prefix, ModuleBuffers& buffers) {
  const py::set transient = module.attr("_non_persistent_buffers_set");
  each_item(module, "_buffers", [&](const py::handle& name, const py::handle& value) {
    (transient.contains(name) ? buffers.transient : buffers.state)[below(prefix, name)] = value.cast<at::Tensor>();
  });
  each_item(module, "_modules", [&](const py::handle& name, const py::handle& child) {
    collect_buffers(child, below(prefix, name) + ".", buffers);
  });
}

// Null for what is no parameter: torch.func.functional_call lends a tensor for one forward.
void collect_parameters(const py::handle& module, const std::string& prefix, std::map<std::string, const void*>& parameters) {
  each_item(module, "_parameters", [&](const py::handle& name, const py::handle& value) {
    const bool is_lent = !py::type::handle_of(value).is(parameter_type());
    parameters[below(prefix, name)] = is_lent ? nullptr : THPVariable_Unpack(value.ptr()).unsafeGetTensorImpl();
  });
  each_item(module, "_modules", [&](const py::handle& name, const py::handle& child) {
    collect_parameters(child, below(prefix, name) + ".", parameters);
  });
}

// The same without texts, since it is looked at in each step: hashes of the names, which Python keeps, and addresses.
void see(const py::handle& module, std::vector<intptr_t>& seen) {
  static const py::handle parameters = PyUnicode_InternFromString("_parameters");
  static const py::handle children = PyUnicode_InternFromString("_modules");
  const auto each = [&](const py::handle& dict, const auto& visit) {
    const py::object items = py::getattr(module, dict);
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(items.ptr(), &at, &name, &value);) {
      if (value == Py_None) continue;
      seen.push_back(PyObject_Hash(name));
      visit(value);
    }
    seen.push_back(0);
  };
  each(parameters, [&](PyObject* value) {
    seen.push_back(reinterpret_cast<intptr_t>(THPVariable_Unpack(value).unsafeGetTensorImpl()));
  });
  each(children, [&](PyObject* child) { see(child, seen); });
}

}  // namespace

py::object StandsForPython::module() const {
  py::object module = reference->get()();
  SHARD_REQUIRE(!module.is_none(), "fully_shard", "the model that was sharded is gone. Keep it as long as its Sharded");
  return module;
}

ModuleBuffers StandsForPython::present_buffers() const {
  const py::gil_scoped_acquire locked;
  ModuleBuffers buffers;
  collect_buffers(module(), "", buffers);
  return buffers;
}

std::map<std::string, std::string> StandsForPython::extra_state() const {
  const py::gil_scoped_acquire locked;
  return py::module_::import("shardproof.module_state").attr("saved")(module()).cast<std::map<std::string, std::string>>();
}

std::function<void()> StandsForPython::reads_extra_state(const std::map<std::string, std::string>& entries) const {
  const py::gil_scoped_acquire locked;
  py::dict given;
  for (const auto& [name, entry] : entries) given[py::str(name)] = py::bytes(entry);
  const Held put(py::module_::import("shardproof.module_state").attr("reads")(module(), given));
  return [put] {
    const py::gil_scoped_acquire again;
    put.get()();
  };
}

at::Tensor DropoutImage::run(const at::Tensor& input, double probability, bool training) const {
  if (!training || probability == 0) return input;
  const DropoutSite site = next_dropout_site(probability);
  return input * dropout_mask(site, rows_in_whole(input.sizes()), input.scalar_type(), input.device());
}

Mirror::Mirror(const py::object& module) {
  root_ = reflect(module);
  collect_parameters(module, "", parameters_);
  see(module, seen_);
}

std::shared_ptr<Module> Mirror::reflect(const py::object& module) {
  const auto found = images_.find(module.ptr());
  if (found != images_.end()) return found->second;
  for (const auto& [name, value] : module.attr("_parameters").cast<py::dict>())
    if (!value.is_none()) require_plain(name, value, module);
  const std::shared_ptr<Module> image = image_of(module);
  images_[module.ptr()] = image;
  dynamic_cast<StandsForPython&>(*image).reference.emplace(py::weakref(module));
  for (const auto& [name, value] : module.attr("_parameters").cast<py::dict>()) {
    const auto parameter = tensor_or_nothing(value);
    const auto key = py::str(name).cast<std::string>();
    if (parameter.defined() && !image->named_parameters(/*recurse=*/false).contains(key))
      image->register_parameter(key, parameter, parameter.requires_grad());
  }
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

// Modules without parameters may come and go.
void Mirror::require_same_parameters() const {
  const py::object module = dynamic_cast<const StandsForPython&>(*root_).module();
  std::vector<intptr_t> seen;
  seen.reserve(seen_.size());
  see(module, seen);
  if (seen == seen_) return;
  std::map<std::string, const void*> now;
  collect_parameters(module, "", now);
  std::string changed;
  const auto note = [&](const std::string& name, const char* what) {
    if (changed.empty()) changed = name + what;
  };
  for (const auto& [name, tensor] : parameters_)
    if (!now.contains(name)) note(name, " was taken away");
  for (const auto& [name, tensor] : now)
    if (!parameters_.contains(name)) note(name, " was added");
    else if (tensor && tensor != parameters_.at(name)) note(name, " was replaced by another tensor");
  SHARD_REQUIRE(changed.empty(), "fully_shard",
                "rank {}: parameter {} after the model was sharded, so training and checkpoints would not follow. To give it a "
                "value, call load_state_dict or write_parameters of the Sharded. To change the model, call remove() of the "
                "Sharded, change it, and shard it again",
                rank, changed);
  seen_ = std::move(seen);
}

void bind_mirror(py::module_& module) {
  py::class_<Mirror, std::shared_ptr<Mirror>>(module, "Mirror").def(py::init<const py::object&>(), py::arg("module"));
}

}  // namespace shardproof::python
