// Checkpoints of a sharded model, in the format that PyTorch's distributed checkpoints have.
#include "bindings.h"
#include "held.h"
#include "sharded.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/manager.h"
#include "shardproof/checkpoint/weights.h"

namespace shardproof::python {
namespace {

namespace ck = checkpoint;

ck::Value value_of(const py::handle& object, const std::string& name) {
  if (object.is_none()) return ck::Value();
  if (py::isinstance<py::bool_>(object)) return ck::Value::boolean(object.cast<bool>());
  if (py::isinstance<py::int_>(object)) return ck::Value::integer(object.cast<int64_t>());
  if (py::isinstance<py::float_>(object)) return ck::Value::real(object.cast<double>());
  if (py::isinstance<py::str>(object)) return ck::Value::string(object.cast<std::string>());
  if (py::isinstance<py::bytes>(object)) return ck::Value::bytes(object.cast<std::string>());
  if (py::isinstance<py::dict>(object)) {
    ck::Value::Pairs pairs;
    for (const auto& [key, value] : py::reinterpret_borrow<py::dict>(object))
      pairs.emplace_back(value_of(key, name), value_of(value, name));
    return ck::Value::dict(std::move(pairs));
  }
  const bool is_tuple = py::isinstance<py::tuple>(object);
  SHARD_REQUIRE(is_tuple || py::isinstance<py::list>(object), "checkpoint",
                "'{}' holds a {}, and only None, bool, int, float, str, bytes, list, tuple and dict can be saved with a model",
                name, type_name(object));
  ck::Value::Items items;
  for (const py::handle& item : object) items.push_back(value_of(item, name));
  return is_tuple ? ck::Value::tuple(std::move(items)) : ck::Value::list(std::move(items));
}

py::object object_of(const ck::Value& value) {
  const std::string what = "a saved value";
  switch (value.kind()) {
    case ck::Value::Kind::kNone:
      return py::none();
    case ck::Value::Kind::kBool:
      return py::bool_(value.as_bool(what));
    case ck::Value::Kind::kInt:
      return py::int_(value.as_int(what));
    case ck::Value::Kind::kFloat:
      return py::float_(value.as_float(what));
    case ck::Value::Kind::kString:
      return py::str(value.as_string(what));
    case ck::Value::Kind::kBytes:
      return py::bytes(value.as_bytes(what));
    case ck::Value::Kind::kDict: {
      py::dict result;
      for (const auto& [key, item] : value.as_dict(what)) result[object_of(key)] = object_of(item);
      return result;
    }
    case ck::Value::Kind::kList:
    case ck::Value::Kind::kTuple: {
      py::list result;
      for (const ck::Value& item : value.as_list(what)) result.append(object_of(item));
      return value.kind() == ck::Value::Kind::kTuple ? py::object(py::tuple(result)) : py::object(result);
    }
    default:
      throw Error("[checkpoint] a saved value is an object of Python: " + value.str());
  }
}

std::map<std::string, ck::Value> values_of(const py::dict& values) {
  std::map<std::string, ck::Value> result;
  for (const auto& [key, value] : values) {
    const auto name = key.cast<std::string>();
    result[name] = value_of(value, name);
  }
  return result;
}

py::dict objects_of(const std::map<std::string, ck::Value>& values) {
  py::dict result;
  for (const auto& [name, value] : values) result[name.c_str()] = object_of(value);
  return result;
}

ck::TrainerState state_of(int64_t step, const py::dict& values, const py::dict& of_rank, const LossScaler* scaler) {
  ck::TrainerState state{.step = step, .values = values_of(values), .of_rank = values_of(of_rank)};
  if (scaler) state.scaler = scaler->state();
  return state;
}

py::dict dict_of(const ck::Loaded& loaded, LossScaler* scaler) {
  if (scaler && loaded.trainer.scaler) scaler->set_state(*loaded.trainer.scaler);
  py::dict result;
  result["step"] = loaded.trainer.step;
  result["values"] = objects_of(loaded.trainer.values);
  result["of_rank"] = objects_of(loaded.trainer.of_rank);
  result["skipped"] = loaded.skipped;
  return result;
}

void save_checkpoint(const std::string& directory, ShardedMirror& held, const OptimizerState* optimizer, int64_t step,
                     const py::dict& values, const py::dict& of_rank, const LossScaler* scaler, bool overwrite) {
  const ck::TrainerState state = state_of(step, values, of_rank, scaler);
  const py::gil_scoped_release unlocked;
  ck::save(directory, held.sharded, optimizer, state, {.overwrite = overwrite});
}

py::dict load_checkpoint(const std::string& directory, ShardedMirror& held, OptimizerState* optimizer, LossScaler* scaler,
                         bool partial) {
  ck::Loaded loaded;
  {
    const py::gil_scoped_release unlocked;
    loaded = ck::load(directory, held.sharded, optimizer, {.partial = partial, .needs_scaler = scaler != nullptr});
  }
  return dict_of(loaded, scaler);
}

bool manager_save(ck::Manager& manager, ShardedMirror& held, const OptimizerState* optimizer, int64_t step,
                  const py::dict& values, const py::dict& of_rank, const LossScaler* scaler) {
  const ck::TrainerState state = state_of(step, values, of_rank, scaler);
  const py::gil_scoped_release unlocked;
  return manager.save(held.sharded, optimizer, state);
}

py::object manager_load(ck::Manager& manager, ShardedMirror& held, OptimizerState* optimizer, LossScaler* scaler,
                        bool partial) {
  std::optional<ck::Loaded> loaded;
  {
    const py::gil_scoped_release unlocked;
    loaded = manager.load_latest(held.sharded, optimizer, {.partial = partial, .needs_scaler = scaler != nullptr});
  }
  return loaded ? py::object(dict_of(*loaded, scaler)) : py::none();
}

py::dict load_weights(const std::string& path, ShardedMirror& held, const std::string& family, const std::string& entry,
                      const std::string& prefix, bool partial) {
  ck::LoadedWeights loaded;
  {
    const py::gil_scoped_release unlocked;
    loaded = ck::load_weights(path, held.sharded, {.family = family, .entry = entry, .prefix = prefix, .partial = partial});
  }
  py::dict result;
  result["missing"] = loaded.missing;
  result["unused"] = loaded.unused;
  result["bytes_read"] = loaded.bytes_read;
  return result;
}

ck::Projections projections_of(const std::string& name) {
  if (name == "family") return ck::Projections::as_family;
  if (name == "fused") return ck::Projections::fused;
  SHARD_REQUIRE(name == "separate", "checkpoint", "projections are 'family', 'fused' or 'separate', got '{}'", name);
  return ck::Projections::separate;
}

void save_weights(const std::string& folder, ShardedMirror& held, const std::string& family, const std::string& dtype,
                  const std::string& projections, const std::string& config, uint64_t file_bytes_max, bool overwrite) {
  const DtypeInfo* info = find_dtype(dtype);
  SHARD_REQUIRE(info, "checkpoint", "there is no dtype '{}' for weights; known are float32, bfloat16, float16 and float64",
                dtype);
  const ck::SaveWeightsOptions options{.family = family,
                                       .dtype = info->dtype,
                                       .projections = projections_of(projections),
                                       .config = config,
                                       .file_bytes_max = file_bytes_max,
                                       .overwrite = overwrite};
  const py::gil_scoped_release unlocked;
  ck::save_weights(folder, held.sharded, options);
}

void bind_manager(py::module_& module) {
  py::class_<ck::Manager>(module, "Manager")
      .def(
          py::init([](const std::string& directory, int64_t keep, bool in_background, bool copy_in_background, bool overwrite) {
            return std::make_unique<ck::Manager>(
                directory,
                ck::ManagerOptions{
                    .keep = keep, .async = in_background, .copy_in_background = copy_in_background, .overwrite = overwrite});
          }),
          py::arg("directory"), py::arg("keep") = 0, py::arg("in_background") = false, py::arg("copy_in_background") = false,
          py::arg("overwrite") = false)
      .def("save", &manager_save, py::arg("sharded"), py::arg("optimizer"), py::arg("step"), py::arg("values"),
           py::arg("of_rank"), py::arg("scaler"))
      .def("poll", &ck::Manager::poll, Unlocked())
      .def("wait", &ck::Manager::wait, Unlocked())
      .def("load_latest", &manager_load, py::arg("sharded"), py::arg("optimizer"), py::arg("scaler"), py::arg("partial"))
      .def("steps", &ck::Manager::steps)
      .def("latest", &ck::Manager::latest);
}

}  // namespace

void bind_checkpoints(py::module_& module) {
  module.def("save", &save_checkpoint, py::arg("directory"), py::arg("sharded"), py::arg("optimizer"), py::arg("step"),
             py::arg("values"), py::arg("of_rank"), py::arg("scaler"), py::arg("overwrite"));
  module.def("load", &load_checkpoint, py::arg("directory"), py::arg("sharded"), py::arg("optimizer"), py::arg("scaler"),
             py::arg("partial"));
  module.def("load_weights", &load_weights, py::arg("path"), py::arg("sharded"), py::arg("family"), py::arg("entry"),
             py::arg("prefix"), py::arg("partial"));
  module.def("save_weights", &save_weights, py::arg("folder"), py::arg("sharded"), py::arg("family"), py::arg("dtype"),
             py::arg("projections"), py::arg("config"), py::arg("file_bytes_max"), py::arg("overwrite"));
  bind_manager(module);
}

}  // namespace shardproof::python
