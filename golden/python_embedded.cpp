// libgolden_python: everything that touches Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
// Python first, as its headers demand.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <golden_oracle.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <tuple>

#include "golden/python.h"

namespace golden {
namespace {

namespace py = pybind11;

void require_started(const PyStatus& status, const std::string& venv) {
  if (PyStatus_Exception(status))
    throw EnvironmentError(fmt::format("golden: Python of {} does not start: {}. Run ./ci/setup.", venv,
                                       status.err_msg != nullptr ? status.err_msg : "no reason given"));
}

// Isolated: no PYTHON* variables, no user site, no signal handlers, the caller's standard streams and locale
// as they are. Being started as the environment's own python makes it find the environment's packages. It is
// never finalised: threads may still hold tensors at exit, and the process' memory goes anyway.
void start_python(const std::string& venv) {
  PyPreConfig before;
  PyPreConfig_InitIsolatedConfig(&before);
  before.utf8_mode = 1;
  require_started(Py_PreInitialize(&before), venv);

  PyConfig config;
  PyConfig_InitIsolatedConfig(&config);
  const std::string python = venv + "/bin/python";
  PyStatus status = PyConfig_SetBytesString(&config, &config.executable, python.c_str());
  if (!PyStatus_Exception(status)) status = PyConfig_SetBytesString(&config, &config.program_name, python.c_str());
  if (!PyStatus_Exception(status)) status = Py_InitializeFromConfig(&config);
  PyConfig_Clear(&config);
  require_started(status, venv);
  PyEval_SaveThread();  // releases the interpreter's lock, which each call takes for itself
}

// A function of a source, which needs `package`, or all its names. Kept for good.
py::object* load(const std::string& venv, const char* source, const char* file, const char* function, const char* package) {
  try {
    py::dict names;
    names["__name__"] = "golden_oracle";
    names["__builtins__"] = py::module_::import("builtins");
    py::module_::import("builtins")
        .attr("exec")(py::module_::import("builtins").attr("compile")(source, file, "exec"), names);
    return new py::object(function ? py::object(names[function]) : names);
  } catch (const py::error_already_set& error) {
    throw EnvironmentError(fmt::format("golden: {} of {} does not load: {}. Run ./ci/setup.", package, venv, error.what()));
  }
}

py::object& oracle(const std::string& venv) {
  static py::object* loaded = load(venv, kOracleSource, "golden/oracle.py", "train", "PyTorch");
  return *loaded;
}

py::object& hugging_face(const std::string& venv) {
  static py::object* loaded = load(venv, kHuggingFaceSource, "golden/hugging_face.py", "run", "transformers");
  return *loaded;
}

// Of golden/engine.py.
py::object engine_function(const std::string& venv, const char* function) {
  static py::object* names = load(venv, kEngineSource, "golden/engine.py", nullptr, "Python");
  return (*names)[function];
}

py::tuple to_python(const at::Tensor& tensor) {
  const at::Tensor t = tensor.detach().contiguous();
  const char* dtype = t.scalar_type() == at::kLong ? "int64" : t.scalar_type() == at::kFloat ? "float32" : "float64";
  // Copied: the tensor may be gone before Python is done with it.
  py::bytearray data(static_cast<const char*>(t.const_data_ptr()), t.nbytes());
  return py::make_tuple(data, dtype, t.sizes().vec());
}

py::dict to_python(const Mlp& mlp) {
  static constexpr const char* kActivations[] = {"identity", "relu", "tanh", "gelu"};
  py::dict options;
  options["widths"] = mlp.widths;
  options["activation"] = kActivations[static_cast<int>(mlp.activation)];
  options["bias"] = mlp.bias;
  return options;
}

py::dict to_python(const Gpt& gpt) {
  py::dict options;
  options["layers"] = gpt.layers;
  options["hidden"] = gpt.hidden;
  options["heads"] = gpt.heads;
  options["vocab"] = gpt.vocab;
  options["positions"] = gpt.positions;
  options["tied"] = gpt.tied;
  options["gelu"] = gpt.tanh_gelu ? "tanh" : "none";
  return options;
}

py::dict to_python(const Conv& conv) {
  py::dict options;
  options["channels"] = conv.channels;
  options["kernel"] = conv.kernel;
  options["classes"] = conv.classes;
  options["norm"] = conv.norm;
  options["batch"] = conv.batch;
  return options;
}

py::dict to_python(const Odd& odd) {
  py::dict options;
  options["width"] = odd.width;
  options["calls"] = odd.calls;
  options["gain"] = odd.gain;
  options["cube"] = odd.cube;
  options["empty"] = odd.empty;
  options["side"] = odd.side;
  options["never"] = odd.never;
  options["tied"] = odd.tied;
  return options;
}

// None where there are none.
py::object experts_to_python(const Llama& llama) {
  static constexpr const char* kScores[] = {"softmax", "chosen_softmax", "sigmoid"};
  if (llama.experts == 0) return py::none();
  py::dict options;
  options["count"] = llama.experts;
  options["per_token"] = llama.experts_per_token;
  options["width"] = llama.expert_width;
  options["shared"] = llama.shared_width;
  options["score"] = kScores[static_cast<int>(llama.score)];
  options["normalized"] = llama.normalized;
  options["scale"] = llama.expert_scale;
  options["groups"] = llama.expert_groups;
  options["groups_per_token"] = llama.groups_per_token;
  options["balance"] = llama.expert_balance;
  options["z"] = llama.expert_z;
  options["bias"] = llama.expert_bias;
  options["capacity"] = llama.expert_capacity;
  return options;
}

py::dict to_python(const Llama& llama) {
  py::dict options;
  options["layers"] = llama.layers;
  options["hidden"] = llama.hidden;
  options["heads"] = llama.heads;
  options["kv_heads"] = llama.kv_heads;
  options["intermediate"] = llama.intermediate;
  options["vocab"] = llama.vocab;
  options["tied"] = llama.tied;
  options["experts"] = experts_to_python(llama);
  options["dense_layers"] = llama.dense_layers;
  options["qk_norm"] = llama.qk_norm;
  options["qkv_bias"] = llama.qkv_bias;
  options["head"] = llama.head();
  options["eps"] = llama.eps;
  options["theta"] = llama.theta;
  options["window"] = llama.window;
  options["full_layers"] = llama.full_layers;
  options["document_end"] = llama.document_end;
  options["slower"] = py::none();
  if (llama.rope_factor != 1)
    options["slower"] = py::make_tuple(llama.rope_factor, llama.rope_low, llama.rope_high, llama.rope_positions);
  return options;
}

std::pair<const char*, py::dict> bare_to_python(const Model& model) {
  switch (model.kind) {
    case Model::Kind::mlp:
      return {"mlp", to_python(model.mlp)};
    case Model::Kind::gpt:
      return {"gpt", to_python(model.gpt)};
    case Model::Kind::conv:
      return {"conv", to_python(model.conv)};
    case Model::Kind::odd:
      return {"odd", to_python(model.odd)};
    case Model::Kind::llama:
      return {"llama", to_python(model.llama)};
  }
  throw std::logic_error("golden: unknown model");
}

std::pair<const char*, py::dict> to_python(const Model& model) {
  auto result = bare_to_python(model);
  const Adapters& adapters = model.adapters;
  if (!adapters.layers.empty()) result.second["adapters"] = py::make_tuple(adapters.layers, adapters.rank, adapters.scale());
  return result;
}

py::dict to_python(const Optimizer& o) {
  py::list groups;
  for (const Optimizer::Group& group : o.groups)
    groups.append(py::make_tuple(group.pattern, group.lr_factor, group.decay_factor));
  py::dict options;
  options["kind"] = o.kind == Optimizer::Kind::sgd ? "sgd" : o.kind == Optimizer::Kind::adam ? "adam" : "adamw";
  options["lr"] = o.lr;
  options["momentum"] = o.momentum;
  options["nesterov"] = o.nesterov;
  options["weight_decay"] = o.weight_decay;
  options["beta1"] = o.beta1;
  options["beta2"] = o.beta2;
  options["eps"] = o.eps;
  options["groups"] = groups;
  return options;
}

py::dict to_python(const Step& step) {
  py::list rounds;
  for (const auto& round : step.microbatches) {
    py::list ranks;
    for (const Microbatch& m : round) ranks.append(py::make_tuple(to_python(m.input), to_python(m.target), m.weight, m.branch));
    rounds.append(ranks);
  }
  py::dict options;
  options["microbatches"] = rounds;
  // Each local sum is divided before, and sums are linear.
  options["divide"] = step.divide * step.divide_before;
  options["clip_norm"] = step.clip_norm;
  options["norm_order"] = step.norm_order;
  options["lr_factor"] = step.lr_factor;
  options["frozen"] = step.frozen;
  return options;
}

at::Tensor tensor_from_python(const py::handle& given) {
  const auto pair = given.cast<std::pair<std::string, std::vector<int64_t>>>();
  at::Tensor t = at::empty(pair.second, at::kDouble);
  if (pair.first.size() != t.nbytes()) throw std::logic_error("golden: oracle.py returned a tensor of another size");
  std::memcpy(t.mutable_data_ptr(), pair.first.data(), t.nbytes());
  return t;
}

Named named_from_python(const py::handle& given) {
  Named named;
  for (const py::handle pair : given)
    named.emplace_back(pair[py::int_(0)].cast<std::string>(), tensor_from_python(pair[py::int_(1)]));
  return named;
}

StepTrace step_from_python(const py::handle& given) {
  StepTrace step;
  step.losses = given["losses"].cast<std::vector<std::vector<double>>>();
  step.gradient_norm = given["gradient_norm"].cast<double>();
  step.gradients = named_from_python(given["gradients"]);
  step.parameters = named_from_python(given["parameters"]);
  for (const py::handle slot : given["state"])
    step.state.emplace_back(slot[py::int_(0)].cast<std::string>(), named_from_python(slot[py::int_(1)]));
  return step;
}

// The arguments of `train` in golden/oracle.py.
struct RunInPython {
  std::string kind;
  py::dict model, optimizer;
  py::list parameters, steps;

  explicit RunInPython(const Run& run) : optimizer(to_python(run.optimizer)) {
    std::tie(kind, model) = to_python(run.model);
    for (const auto& [name, value] : run.parameters) parameters.append(py::make_tuple(name, to_python(value)));
    for (const Step& step : run.steps) steps.append(to_python(step));
  }
};

Trace train_with(py::object& python_train, const Run& run) {
  const RunInPython there(run);
  const py::object result = python_train(there.kind, there.model, there.parameters, there.optimizer, there.steps);
  Trace trace;
  for (const py::handle step : result) trace.push_back(step_from_python(step));
  return trace;
}

EngineTrace train_with(const py::object& python_train, const EngineRun& run) {
  const RunInPython there(*run.run);
  const py::object result = python_train(run.package, kOracleSource, run.setup, there.kind, there.model, there.parameters,
                                         there.optimizer, there.steps);
  EngineTrace trace;
  for (const py::handle step : result) {
    std::vector<StepTrace>& ranks = trace.emplace_back();
    for (const py::handle rank : step) ranks.push_back(step_from_python(rank));
  }
  return trace;
}

PeerResult run_with(py::object& python_run, const PeerRun& run) {
  py::list parameters;
  for (const auto& [name, value] : run.parameters) parameters.append(py::make_tuple(name, to_python(value)));
  static const std::map<at::ScalarType, const char*> dtypes = {
      {at::kDouble, "float64"}, {at::kFloat, "float32"}, {at::kBFloat16, "bfloat16"}, {at::kHalf, "float16"}};
  const py::object result =
      python_run(run.config, parameters, to_python(run.tokens), to_python(run.targets), dtypes.at(run.dtype));
  return {tensor_from_python(result["logits"]), named_from_python(result["gradients"])};
}

}  // namespace
}  // namespace golden

extern "C" __attribute__((visibility("default"))) void golden_python_train(const std::string& venv, const golden::Run& run,
                                                                           golden::Trace* trace) {
  if (!Py_IsInitialized()) golden::start_python(venv);
  const pybind11::gil_scoped_acquire lock;
  pybind11::object& train = golden::oracle(venv);
  try {
    *trace = golden::train_with(train, run);
  } catch (const pybind11::error_already_set& error) {
    throw std::runtime_error(fmt::format("golden: oracle.py failed: {}", error.what()));
  }
}

extern "C" __attribute__((visibility("default"))) void golden_python_transformers(const std::string& venv,
                                                                                  const golden::PeerRun& run,
                                                                                  golden::PeerResult* result) {
  if (!Py_IsInitialized()) golden::start_python(venv);
  const pybind11::gil_scoped_acquire lock;
  pybind11::object& peer = golden::hugging_face(venv);
  try {
    *result = golden::run_with(peer, run);
  } catch (const pybind11::error_already_set& error) {
    throw std::runtime_error(fmt::format("golden: hugging_face.py failed: {}", error.what()));
  }
}

extern "C" __attribute__((visibility("default"))) void golden_python_facts_of_engine(const std::string& venv,
                                                                                    const std::string& package,
                                                                                    const std::string& engine,
                                                                                    golden::EngineFacts* facts) {
  if (!Py_IsInitialized()) golden::start_python(venv);
  const pybind11::gil_scoped_acquire lock;
  try {
    const pybind11::tuple told = golden::engine_function(venv, "facts")(package, kOracleSource, engine);
    *facts = {told[0].cast<std::string>(), told[1].cast<bool>()};
  } catch (const pybind11::error_already_set& error) {
    throw golden::EnvironmentError(error.what());
  }
}

extern "C" __attribute__((visibility("default"))) void golden_python_engine(const std::string& venv,
                                                                           const golden::EngineRun& run,
                                                                           golden::EngineTrace* trace) {
  if (!Py_IsInitialized()) golden::start_python(venv);
  const pybind11::gil_scoped_acquire lock;
  try {
    *trace = golden::train_with(golden::engine_function(venv, "train"), run);
  } catch (const pybind11::error_already_set& error) {
    throw std::runtime_error(pybind11::str(error.value()).cast<std::string>());
  }
}
