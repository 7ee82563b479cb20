#include "foreign_optimizer.h"

#include <ATen/ATen.h>

#include <set>

#include "bindings.h"
#include "held.h"
#include "settings.h"
#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/pickle.h"
#include "shardproof/comm/agree.h"

namespace shardproof::python {
namespace {

using checkpoint::Value;

// Of one parameter: the names of its tensors, and of each scalar its dtype and value.
Value told_of(const ForeignOptimizer::State& state) {
  Value::Items tensors, scalars;
  for (const auto& [name, tensor] : state.tensors) tensors.push_back(Value::string(name));
  for (const auto& [name, value] : state.scalars)
    scalars.push_back(Value::tuple({Value::string(name), Value::string(std::string(dtype_info(value.scalar_type()).name)),
                                    Value::real(value.item<double>())}));
  return Value::tuple({Value::list(std::move(tensors)), Value::list(std::move(scalars))});
}

at::Tensor scalar_of(const Value& told) {
  const Value::Items& fields = told.as_list("scalar");
  return at::scalar_tensor(fields[2].as_float("scalar"), find_dtype(fields[1].as_string("scalar"))->dtype);
}

}  // namespace

ForeignOptimizer::ForeignOptimizer(ShardedMirror& held, std::vector<Group> groups,
                                   const std::map<std::string, at::Tensor>& plain)
    : world_(held.comms->world()), rank_(held.sharded.rank()), groups_(std::move(groups)) {
  const std::map<std::string, ParameterPlacement> placements = held.sharded.placements();
  std::map<std::string, c10::Device> devices;
  for (const Piece& piece : held.sharded.main_parameters()) devices.emplace(piece.name, piece.data.device());
  for (size_t g = 0; g < groups_.size(); ++g)
    for (const std::string& name : groups_[g].parameters) {
      Parameter parameter;
      if (const auto found = placements.find(name); found != placements.end()) {
        const auto device = devices.find(name);
        parameter = {found->second.shape, found->second.state,
                     at::TensorOptions(found->second.main).device(device == devices.end() ? at::kCPU : device->second)};
      } else {
        const at::Tensor& whole = plain.at(name);
        parameter = {whole.sizes().vec(), {held.comms->mesh(), replicated()}, whole.options()};
      }
      parameter.numel = owned_numel(parameter.shape, parameter.at.mesh, parameter.at.layout, rank_);
      parameter.group = g;
      parameters_[name] = std::move(parameter);
    }
}

void ForeignOptimizer::hold(const std::string& name, State state) {
  Parameter& parameter = parameters_.at(name);
  for (const auto& [what, tensor] : state.tensors) {
    SHARD_REQUIRE(tensor.scalar_type() == parameter.options.dtype(), "checkpoint",
                  "rank {}: the optimizer holds {} of {} as {}, and the parameter is {}; only state in the dtype of the main "
                  "parameter can be saved",
                  rank_, what, name, dtype_info(tensor.scalar_type()).name,
                  dtype_info(c10::typeMetaToScalarType(parameter.options.dtype())).name);
    SHARD_CHECK(tensor.numel() == parameter.numel, "checkpoint", "{} elements of {} of {}, of which this rank holds {}",
                tensor.numel(), what, name, parameter.numel);
  }
  parameter.state = std::move(state);
}

std::string ForeignOptimizer::told() const {
  Value::Pairs told;
  for (const auto& [name, parameter] : parameters_)
    if (parameter.numel > 0) told.emplace_back(Value::string(name), told_of(parameter.state));
  return checkpoint::write_pickle(Value::dict(std::move(told)), 4);
}

void ForeignOptimizer::share() {
  std::vector<std::string> all = gather_texts(world_, error_.empty() ? "t" + told() : "e" + error_), errors;
  for (const std::string& text : all) errors.push_back(text.starts_with('e') ? text.substr(1) : "");
  throw_first(errors);
  std::map<std::string, std::pair<size_t, Value>> known;  // by the first rank that holds a part
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const Value one = checkpoint::read_pickle(std::string_view(all[rank]).substr(1), {}, "what a rank holds");
    for (const auto& [key, value] : one.as_dict("state")) {
      const std::string& name = key.as_string("state");
      const auto [first, is_new] = known.try_emplace(name, rank, value);
      SHARD_REQUIRE(is_new || first->second.second == value, "checkpoint",
                    "the optimizer's state of {} is not the same on the ranks that hold parts of it: rank {} has {}, and rank "
                    "{} has {}",
                    name, first->second.first, first->second.second.str(), rank, value.str());
    }
  }
  for (const auto& [name, told] : known) {
    Parameter& parameter = parameters_.at(name);
    const Value::Items& fields = told.second.as_list("state");
    for (const Value& what : fields[0].as_list("state"))
      parameter.state.tensors.try_emplace(what.as_string("state"), at::empty({0}, parameter.options.device(at::kCPU)));
    for (const Value& scalar : fields[1].as_list("state"))
      parameter.state.scalars[scalar.as_list("state")[0].as_string("state")] = scalar_of(scalar);
  }
}

std::vector<std::string> ForeignOptimizer::state_names() const {
  std::set<std::string> names;
  for (const auto& [name, parameter] : parameters_)
    for (const auto& [what, tensor] : parameter.state.tensors) names.insert(what);
  return {names.begin(), names.end()};
}

std::vector<Shard> ForeignOptimizer::state_shards(const std::string& state_name) const {
  std::vector<Shard> shards;
  for (const auto& [name, parameter] : parameters_)
    if (const auto found = parameter.state.tensors.find(state_name); found != parameter.state.tensors.end())
      shards.push_back({name, parameter.shape, parameter.at, found->second});
  return shards;
}

std::vector<OptimizerState::Scalar> ForeignOptimizer::scalars() const {
  std::vector<Scalar> scalars;
  for (const auto& [name, parameter] : parameters_)
    for (const auto& [what, value] : parameter.state.scalars) scalars.push_back({name, what, value});
  return scalars;
}

// PyTorch's optimizers count in "step", where they count.
int64_t ForeignOptimizer::updates(const std::string& name) const {
  const State& state = parameters_.at(name).state;
  if (state.tensors.empty() && state.scalars.empty()) return 0;
  const auto step = state.scalars.find("step");
  return step == state.scalars.end() ? -1 : static_cast<int64_t>(step->second.item<double>());
}

void ForeignOptimizer::restore(const std::string& name, int64_t, bool with_state) {
  Parameter& parameter = parameters_.at(name);
  parameter.state = {};
  parameter.is_restored = true;
  if (!with_state) return;
  for (const std::string& what : groups_[parameter.group].state_names)
    parameter.state.tensors[what] = at::empty({parameter.numel}, parameter.options);
}

// `restore` has just made the old one, so nobody else has it.
bool ForeignOptimizer::replace_state(const std::string& name, const std::string& what, at::Tensor values) {
  at::Tensor& old = parameters_.at(name).state.tensors.at(what);
  if (!old.device().is_cpu()) return false;
  SHARD_CHECK(values.sizes() == old.sizes() && values.scalar_type() == old.scalar_type(), "optimizer",
              "{} of {} has {} elements, and is to be replaced by {}", what, name, old.numel(), values.numel());
  old = std::move(values);
  return true;
}

void ForeignOptimizer::restore_scalar(const std::string& name, const std::string& what, const at::Tensor& value) {
  parameters_.at(name).state.scalars[what] = value;
}

namespace {

using Groups = std::vector<std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<std::string>, py::dict>>;

std::unique_ptr<ForeignOptimizer> make_foreign(ShardedMirror& held, const Groups& given,
                                               const std::map<std::string, at::Tensor>& plain) {
  std::vector<OptimizerState::Group> groups;
  for (const auto& [parameters, state_names, scalar_names, settings] : given)
    groups.push_back({parameters, state_names, scalar_names, settings_of(settings)});
  const py::gil_scoped_release unlocked;
  return std::make_unique<ForeignOptimizer>(held, std::move(groups), plain);
}

}  // namespace

void bind_foreign_optimizer(py::module_& module) {
  using Tensors = std::map<std::string, at::Tensor>;
  py::class_<ForeignOptimizer, OptimizerState>(module, "ForeignOptimizer")
      .def(py::init(&make_foreign), py::arg("sharded"), py::arg("groups"), py::arg("plain"), py::keep_alive<1, 2>())
      .def(
          "hold",
          [](ForeignOptimizer& optimizer, const std::string& name, Tensors tensors, Tensors scalars) {
            optimizer.hold(name, {std::move(tensors), std::move(scalars)});
          },
          py::arg("parameter"), py::arg("tensors"), py::arg("scalars"))
      .def("fail", &ForeignOptimizer::fail, py::arg("error"))
      .def("share", &ForeignOptimizer::share, Unlocked())
      .def("is_restored", &ForeignOptimizer::is_restored, py::arg("parameter"))
      .def(
          "state",
          [](const ForeignOptimizer& optimizer, const std::string& name) {
            ForeignOptimizer::State state = optimizer.state(name);
            return std::pair(std::move(state.tensors), std::move(state.scalars));
          },
          py::arg("parameter"))
      .def("loaded_settings", [](const ForeignOptimizer& optimizer) {
        std::map<size_t, py::dict> settings;
        for (const auto& [group, loaded] : optimizer.loaded_settings()) settings[group] = dict_of(loaded);
        return settings;
      });
}

}  // namespace shardproof::python
