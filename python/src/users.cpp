// What lies beside a model in training: averages of its parameters, a check of its replicas, adapters, another model that
// it fills, and the memory of the CPU's tensors.
#include "bindings.h"
#include "held.h"
#include "sharded.h"
#include "shardproof/checkpoint/adapters.h"
#include "shardproof/models/lora.h"
#include "shardproof/optim/ema.h"
#include "shardproof/optim/fingerprint_check.h"
#include "shardproof/sharding/transfer.h"

namespace shardproof::python {
namespace {

using Values = std::map<std::string, at::Tensor>;

void bind_ema(py::module_& module) {
  py::class_<Ema, UnlockedPtr<Ema>>(module, "Ema")
      .def(py::init([](ShardedMirror& held, double decay, const std::string& name) {
             const py::gil_scoped_release unlocked;
             return UnlockedPtr<Ema>(new Ema(held.sharded, EmaOptions{.decay = decay, .name = name}));
           }),
           py::arg("sharded"), py::arg("decay"), py::arg("name"))
      .def("update", &Ema::update, Unlocked())
      .def("set_decay", &Ema::set_decay, py::arg("decay"))
      .def("pieces", &Ema::pieces)
      .def(
          "gather", [](const Ema& ema) { return ema.gather(); }, Unlocked())
      .def(
          "gather_one", [](const Ema& ema, const std::string& parameter) { return ema.gather(parameter); },
          py::arg("parameter"), Unlocked())
      .def("write", &Ema::write, py::arg("values"), Unlocked())
      .def("swap_in", &Ema::swap_in, Unlocked())
      .def("swap_out", &Ema::swap_out, Unlocked())
      .def("put_back", &Ema::put_back, Unlocked())
      .def_property_readonly("is_swapped_in", &Ema::is_swapped_in);
}

void bind_fingerprint_check(py::module_& module) {
  py::class_<FingerprintCheck>(module, "FingerprintCheck")
      .def(py::init([](ShardedMirror& held, Optimizer& optimizer) {
             return std::make_unique<FingerprintCheck>(held.sharded, optimizer);
           }),
           py::arg("sharded"), py::arg("optimizer"), py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("step", &FingerprintCheck::step, Unlocked());
}

checkpoint::AdapterOptions adapter_options(const std::string& base_model, const std::string& module_prefix,
                                           bool fan_in_fan_out, bool overwrite) {
  return {.base_model = base_model,
          .module_prefix = module_prefix,
          .fan_in_fan_out = fan_in_fan_out,
          .overwrite = overwrite};
}

void bind_lora(py::module_& module) {
  py::class_<Lora>(module, "Lora")
      .def(py::init([](std::vector<std::string> layers, int64_t rank, double alpha, double dropout) {
             return described_lora(std::move(layers), {.rank = rank, .alpha = alpha, .dropout = dropout});
           }),
           py::arg("layers"), py::arg("rank"), py::arg("alpha"), py::arg("dropout"))
      .def_property_readonly("layers", &Lora::layers)
      .def_property_readonly("scale", &Lora::scale)
      .def(
          "merge", [](const Lora& lora, ShardedMirror& held) { lora.merge(held.sharded); }, py::arg("sharded"), Unlocked())
      .def(
          "save",
          [](const Lora& lora, const std::string& directory, ShardedMirror& held, const std::string& base_model,
             const std::string& module_prefix, bool fan_in_fan_out, bool overwrite) {
            checkpoint::save_adapters(directory, held.sharded, lora,
                                      adapter_options(base_model, module_prefix, fan_in_fan_out, overwrite));
          },
          py::arg("directory"), py::arg("sharded"), py::arg("base_model"), py::arg("module_prefix"), py::arg("fan_in_fan_out"),
          py::arg("overwrite"), Unlocked())
      .def(
          "load",
          [](const Lora& lora, const std::string& directory, ShardedMirror& held, const std::string& module_prefix) {
            checkpoint::load_adapters(directory, held.sharded, lora, {.module_prefix = module_prefix});
          },
          py::arg("directory"), py::arg("sharded"), py::arg("module_prefix"), Unlocked());
}

void move_parameters(Comm& world, ShardedMirror* from, ShardedMirror* to, int64_t bytes_at_once) {
  transfer(world, from ? &from->sharded : nullptr, to ? &to->sharded : nullptr, {.bytes_at_once = bytes_at_once});
}

}  // namespace

void bind_users(py::module_& module) {
  bind_ema(module);
  bind_fingerprint_check(module);
  bind_lora(module);
  module.def("transfer", &move_parameters, py::arg("world"), py::arg("source"), py::arg("target"), py::arg("bytes_at_once"),
             Unlocked());
}

}  // namespace shardproof::python
