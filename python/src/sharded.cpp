#include "sharded.h"

#include "bindings.h"
#include "held.h"
#include "options.h"
#include "shardproof/base/check.h"
#include "shardproof/sharding/hand_over.h"
#include "shardproof/sharding/note.h"

namespace shardproof::python {
namespace {

// What is None is as the options of all units say.
UnitOptions unit_options(const py::dict& given) {
  UnitOptions options;
  options.precision = precision_of(given["precision"]);
  options.recompute = given["recompute"].cast<bool>();
  options.offload_activations = given["offload_activations"].cast<bool>();
  options.gradient_divide = given["gradient_divide"].cast<std::optional<double>>();
  if (!given["reshard_after_forward"].is_none()) options.reshard_after_forward = reshard_of(given["reshard_after_forward"]);
  if (!given["strategy"].is_none()) options.strategy = strategy(given["strategy"].cast<std::string>());
  if (!given["mesh"].is_none()) options.mesh = Mesh::parse(given["mesh"].cast<std::string>());
  return options;
}

// `units`: of each its modules and its options.
UnlockedPtr<ShardedMirror> shard(std::shared_ptr<Mirror> mirror, std::shared_ptr<MeshComm> comms, const py::list& units,
                                 const py::dict& options) {
  mirror->rank = comms->rank();
  mirror->require_same_parameters();  // `parallelize` may have made it
  ShardOptions chosen = options_of(options);
  Sharding sharding(comms, std::move(chosen));
  for (const py::handle& unit : units) {
    const auto [modules, own] = unit.cast<std::pair<std::vector<py::object>, py::dict>>();
    Sharding::Modules images;
    for (const py::object& module : modules) images.push_back(mirror->find(module));
    sharding.unit(std::move(images), unit_options(own));
  }
  const py::gil_scoped_release unlocked;
  Sharded sharded = sharding.shard(mirror->root());
  return UnlockedPtr<ShardedMirror>(new ShardedMirror{std::move(mirror), std::move(comms), std::move(sharded)});
}

// The optimizer's step was somebody else's: parameters follow the main ones, gradients are forgotten.
void finish_foreign_step(ShardedMirror& held, const std::string& done) {
  note(held.sharded, done);
  held.sharded.main_parameters_changed();
  held.sharded.skip_step();
}

// Before somebody else, whose name errors begin with, writes main parameters that other ranks may be reading.
void begin_foreign_step(ShardedMirror& held, const std::string& who) {
  held.sharded.main_parameters_will_change(who.c_str());
}

std::map<std::string, at::Tensor> by_name(const std::vector<Shard>& shards) {
  std::map<std::string, at::Tensor> named;
  for (const Shard& shard : shards) named.emplace(shard.name, shard.data);
  return named;
}

// Names of the parameters that have a gradient, and what this rank holds of them.
std::pair<std::vector<std::string>, std::map<std::string, at::Tensor>> hand_over(ShardedMirror& held) {
  HandedGradients handed = hand_over_gradients(held.sharded);
  return {std::move(handed.used), by_name(handed.shards)};
}

// Of each main parameter that this rank has a part of: its name, its shape, the first element of the part, and the part.
std::vector<std::tuple<std::string, Shape, int64_t, at::Tensor>> main_parts(ShardedMirror& held) {
  std::vector<std::tuple<std::string, Shape, int64_t, at::Tensor>> parts;
  for (const Shard& shard : main_shards(held.sharded)) {
    const auto runs = owned_runs(shard.shape, shard.at.mesh, shard.at.layout, held.sharded.rank());
    parts.emplace_back(shard.name, shard.shape, runs.front().whole.begin, shard.data);
  }
  return parts;
}

// Makes a tensor, and whatever looks into its storage, look into the memory of another one that is laid out alike. False where
// it has not all of its storage.
bool share_memory(const at::Tensor& tensor, const at::Tensor& other) {
  const c10::Storage& storage = tensor.storage();
  if (tensor.storage_offset() != 0 || storage.nbytes() != other.nbytes() || tensor.strides() != other.strides() ||
      tensor.scalar_type() != other.scalar_type() || tensor.device() != other.device())
    return false;
  auto owner = std::make_unique<c10::Storage>(other.storage());
  c10::DataPtr memory(
      other.mutable_data_ptr(), owner.get(), [](void* held) { delete static_cast<c10::Storage*>(held); }, other.device());
  owner.release();
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  return true;
}

void end_step_of_others(ShardedMirror& held, const std::string& done) {
  end_updated_step(held.sharded, done);
}

void watch(ShardedMirror& held, const py::object& told) {
  watch_backwards(held.sharded, [kept = python::Held(told)](bool begins) {
    const py::gil_scoped_acquire locked;
    kept.get()(begins);
  });
}

// Of what an optimizer works on: "model" where every rank has all of it, "tensor" where each parameter that a rank has is
// whole, and "element" where some rank has a part of one.
std::string held_as(ShardedMirror& held) {
  bool has_all = true;
  for (const auto& [name, parameter] : held.sharded.placements())
    for (int64_t rank = 0; rank < parameter.state.mesh.size(); ++rank) {
      const int64_t own = owned_numel(parameter.shape, parameter.state.mesh, parameter.state.layout, rank);
      const bool is_whole = own == numel(parameter.shape);
      if (!is_whole && own > 0) return "element";
      has_all &= is_whole;
    }
  return has_all ? "model" : "tensor";
}

py::dict bytes_of(const MemoryBytes& bytes) {
  py::dict kinds;
  for (int kind = 0; kind < kMemoryKinds; ++kind) {
    const auto which = static_cast<MemoryKind>(kind);
    kinds[to_string(which)] = py::make_tuple(bytes.now(which), bytes.peak(which));
  }
  kinds["total"] = py::make_tuple(bytes.now_total(), bytes.peak_total_bytes);
  return kinds;
}

void bind_pieces(py::module_& module) {
  py::class_<Piece>(module, "Piece")
      .def_readonly("name", &Piece::name)
      .def_readonly("shape", &Piece::shape)
      .def_property_readonly("begin", [](const Piece& piece) { return piece.run.begin; })
      .def_property_readonly("end", [](const Piece& piece) { return piece.run.end; })
      .def_readonly("data", &Piece::data);
}

void bind_unit_handles(py::module_& module) {
  py::class_<UnitHandle>(module, "UnitHandle")
      .def_property_readonly("name", &UnitHandle::name)
      .def_property_readonly("is_unsharded", &UnitHandle::is_unsharded)
      .def_property_readonly("gradient_sync", &UnitHandle::gradient_sync)
      .def("start_unshard", &UnitHandle::start_unshard, Unlocked())
      .def("unshard", &UnitHandle::unshard, Unlocked())
      .def("reshard", &UnitHandle::reshard, Unlocked())
      .def(
          "set_reshard_after_forward",
          [](UnitHandle& unit, const py::object& reshard) { unit.set_reshard_after_forward(reshard_of(reshard)); },
          py::arg("reshard"))
      .def("set_reshard_after_backward", &UnitHandle::set_reshard_after_backward, py::arg("reshard"))
      .def("set_unshard_in_backward", &UnitHandle::set_unshard_in_backward, py::arg("unshard"))
      .def("set_gradient_sync", &UnitHandle::set_gradient_sync, py::arg("sync"), py::arg("recurse") = true)
      .def("set_forward_prefetch", &UnitHandle::set_forward_prefetch, py::arg("units"))
      .def("set_backward_prefetch", &UnitHandle::set_backward_prefetch, py::arg("units"));
}

}  // namespace

void bind_sharded(py::module_& module) {
  bind_pieces(module);
  bind_unit_handles(module);
  using Held = ShardedMirror;
  using Values = std::map<std::string, at::Tensor>;
  py::class_<ShardedMirror, UnlockedPtr<ShardedMirror>>(module, "Sharded")
      .def_property_readonly("step", [](Held& held) { return held.sharded.step(); })
      .def_property_readonly("rank", [](Held& held) { return held.sharded.rank(); })
      .def("require_same_parameters", [](Held& held) { held.mirror->require_same_parameters(); })
      .def_property_readonly("comms", [](Held& held) { return held.comms; })
      .def_property_readonly("gradient_sync", [](Held& held) { return held.sharded.gradient_sync(); })
      .def(
          "set_last_microbatch", [](Held& held, bool last) { held.sharded.set_last_microbatch(last); }, py::arg("last"))
      .def(
          "set_gradient_sync", [](Held& held, bool sync) { held.sharded.set_gradient_sync(sync); }, py::arg("sync"))
      .def(
          "add_tokens", [](Held& held, int64_t tokens) { held.sharded.add_tokens(tokens); }, py::arg("tokens"))
      .def(
          "zero_gradients", [](Held& held) { held.sharded.zero_gradients(); }, Unlocked())
      .def(
          "gradient_norm", [](Held& held, double order) { return held.sharded.gradient_norm(order); }, py::arg("order") = 2,
          Unlocked())
      .def(
          "clip_gradients",
          [](Held& held, double norm_max, double order) { return held.sharded.clip_gradients(norm_max, order); },
          py::arg("norm_max"), py::arg("order") = 2, Unlocked())
      .def(
          "divide_gradients", [](Held& held, double divisor) { held.sharded.divide_gradients(divisor); }, py::arg("divisor"))
      .def(
          "gradients_are_finite", [](Held& held) { return held.sharded.gradients_are_finite(); }, Unlocked())
      .def(
          "skip_step", [](Held& held) { held.sharded.skip_step(); }, Unlocked())
      .def(
          "parameters", [](Held& held) { return held.sharded.parameters(); }, Unlocked())
      .def(
          "main_parameters", [](Held& held) { return held.sharded.main_parameters(); }, Unlocked())
      .def(
          "gradients", [](Held& held) { return held.sharded.gradients(); }, Unlocked())
      .def(
          "main_parameters_will_change", [](Held& held) { held.sharded.main_parameters_will_change(); }, Unlocked())
      .def(
          "main_parameters_changed", [](Held& held) { held.sharded.main_parameters_changed(); }, Unlocked())
      .def("begin_foreign_step", &begin_foreign_step, py::arg("who"), Unlocked())
      .def("finish_foreign_step", &finish_foreign_step, py::arg("done"), Unlocked())
      .def("hand_over_gradients", &hand_over, Unlocked())
      .def("main_shards", &main_parts, Unlocked())
      .def(
          "gradient_shards", [](Held& held) { return by_name(gradient_shards(held.sharded)); }, Unlocked())
      .def("end_updated_step", &end_step_of_others, py::arg("done"), Unlocked())
      .def("watch_backwards", &watch, py::arg("told"))
      .def("held_as", &held_as)
      .def(
          "gather_parameters", [](Held& held) { return held.sharded.gather_parameters(); }, Unlocked())
      .def(
          "gather_main_parameters", [](Held& held) { return held.sharded.gather_main_parameters(); }, Unlocked())
      .def(
          "gather_gradients", [](Held& held) { return held.sharded.gather_gradients(); }, Unlocked())
      .def(
          "gather_main_parameter", [](Held& held, const std::string& name) { return held.sharded.gather_main_parameter(name); },
          py::arg("name"), Unlocked())
      .def(
          "gather_gradient", [](Held& held, const std::string& name) { return held.sharded.gather_gradient(name); },
          py::arg("name"), Unlocked())
      .def(
          "write_parameters", [](Held& held, const Values& values) { held.sharded.write_parameters(values); },
          py::arg("values"), Unlocked())
      .def(
          "write_gradients", [](Held& held, const Values& values) { held.sharded.write_gradients(values); }, py::arg("values"),
          Unlocked())
      .def(
          "unit", [](Held& held, const std::string& name) { return held.sharded.unit(name); }, py::arg("name"),
          py::keep_alive<0, 1>())
      .def("unit_names",
           [](Held& held) {
             std::vector<std::string> names;
             for (const UnitHandle& unit : held.sharded.units()) names.push_back(unit.name());
             return names;
           })
      .def("memory",
           [](Held& held) {
             const MemoryUse use = held.sharded.memory();
             return py::make_tuple(bytes_of(use), bytes_of(use.host));
           })
      .def("reset_peak_memory", [](Held& held) { held.sharded.reset_peak_memory(); })
      .def(
          "describe", [](Held& held) { return held.sharded.describe(); }, Unlocked());
  module.def("named_options", &list_of_options);
  module.def("share_memory", &share_memory, py::arg("tensor"), py::arg("other"));
  module.def("shard", &shard, py::arg("mirror"), py::arg("comms"), py::arg("units"), py::arg("options"));
}

}  // namespace shardproof::python
