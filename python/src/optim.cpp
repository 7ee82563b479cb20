// The library's optimizers, learning-rate schedules and loss scaling.
#include <ATen/ATen.h>

#include "bindings.h"
#include "held.h"
#include "settings.h"
#include "sharded.h"
#include "shardproof/base/check.h"
#include "shardproof/optim/loss_scaler.h"
#include "shardproof/optim/lr_schedule.h"
#include "shardproof/optim/optimizer.h"

namespace shardproof::python {
namespace {

using Numbers = std::map<std::string, double>;

double take(Numbers& numbers, const std::string& name) {
  const auto found = numbers.extract(name);
  SHARD_REQUIRE(!found.empty(), "optimizer", "'{}' is missing", name);
  return found.mapped();
}

std::shared_ptr<UpdateRule> rule_of(const std::string& kind, Numbers n) {
  std::shared_ptr<UpdateRule> rule;
  if (kind == "sgd")
    rule = make_rule(SgdOptions{take(n, "lr"), take(n, "momentum"), take(n, "nesterov") != 0, take(n, "weight_decay")});
  else if (kind == "adam")
    rule = make_rule(AdamOptions{take(n, "lr"), take(n, "beta1"), take(n, "beta2"), take(n, "eps"), take(n, "weight_decay")});
  else if (kind == "adamw")
    rule = make_rule(AdamWOptions{take(n, "lr"), take(n, "beta1"), take(n, "beta2"), take(n, "eps"), take(n, "weight_decay")});
  else if (kind == "lion")
    rule = make_rule(LionOptions{take(n, "lr"), take(n, "beta1"), take(n, "beta2"), take(n, "weight_decay")});
  else if (kind == "muon")
    rule = make_rule(MuonOptions{take(n, "lr"), take(n, "momentum"), take(n, "weight_decay")});
  SHARD_REQUIRE(rule && n.empty(), "optimizer", "there is no rule '{}' with these settings{}", kind,
                n.empty() ? "" : ": " + n.begin()->first);
  return rule;
}

// Which parameters a group takes: a function of name and shape, called while the optimizer is made; None for all.
std::function<bool(const std::string&, const Shape&)> taker_of(const py::object& takes) {
  if (takes.is_none()) return {};
  const Held held(takes);
  return [held](const std::string& name, const Shape& shape) {
    const py::gil_scoped_acquire locked;
    return held.get()(name, shape).cast<bool>();
  };
}

using Group = std::tuple<py::object, std::string, Numbers, double, double>;  // takes, rule, settings, lr and decay factors

std::unique_ptr<Optimizer> make_optimizer(ShardedMirror& held, const std::vector<Group>& groups) {
  std::vector<ParameterGroup> chosen;
  for (const auto& [takes, kind, numbers, lr_factor, decay_factor] : groups)
    chosen.push_back(
        {.takes = taker_of(takes), .rule = rule_of(kind, numbers), .lr_factor = lr_factor, .decay_factor = decay_factor});
  return std::make_unique<Optimizer>(held.sharded, std::move(chosen));
}

py::list groups_of(const Optimizer& optimizer) {
  py::list groups;
  for (const Optimizer::Group& group : optimizer.groups()) {
    py::dict settings = dict_of(group.settings);
    settings["parameters"] = group.parameters;
    settings["state"] = group.state_names;
    groups.append(settings);
  }
  return groups;
}

void bind_scaler(py::module_& module) {
  py::class_<LossScaler>(module, "LossScaler")
      .def(py::init([](double initial, double growth, double backoff, int64_t growth_interval, double scale_min) {
             return LossScaler({.initial = initial,
                                .growth = growth,
                                .backoff = backoff,
                                .growth_interval = growth_interval,
                                .scale_min = scale_min});
           }),
           py::arg("initial") = 65536.0, py::arg("growth") = 2.0, py::arg("backoff") = 0.5, py::arg("growth_interval") = 2000,
           py::arg("scale_min") = 1.0 / 16384)
      .def_property_readonly("value", &LossScaler::value)
      .def("scale", &LossScaler::scale, py::arg("loss"))
      .def(
          "_unscale", [](LossScaler& scaler, ShardedMirror& held) { return scaler.unscale(held.sharded); }, Unlocked())
      .def("state_dict",
           [](const LossScaler& scaler) {
             py::dict state;
             state["scale"] = scaler.state().scale;
             state["good_steps"] = scaler.state().good_steps;
             return state;
           })
      .def(
          "load_state_dict",
          [](LossScaler& scaler, const py::dict& state) {
            scaler.set_state({state["scale"].cast<double>(), state["good_steps"].cast<int64_t>()});
          },
          py::arg("state"));
}

}  // namespace

void bind_optimizers(py::module_& module) {
  py::class_<OptimizerState>(module, "OptimizerState");
  py::class_<Optimizer, OptimizerState>(module, "Optimizer")
      .def("step", &Optimizer::step, Unlocked())
      .def("set_lr_factor", &Optimizer::set_lr_factor, py::arg("factor"))
      .def("state_names", &Optimizer::state_names)
      .def("state", &Optimizer::state, py::arg("state_name"))
      .def(
          "gather_state",
          [](const Optimizer& optimizer, const std::string& state_name) { return optimizer.gather_state(state_name); },
          py::arg("state_name"), Unlocked())
      .def(
          "gather_state_of",
          [](const Optimizer& optimizer, const std::string& state_name, const std::string& parameter) {
            return optimizer.gather_state(state_name, parameter);
          },
          py::arg("state_name"), py::arg("parameter"), Unlocked())
      .def("write_state", &Optimizer::write_state, py::arg("state_name"), py::arg("values"), Unlocked())
      .def("updates", &Optimizer::updates, py::arg("parameter"))
      .def("groups", &groups_of);
  module.def("make_optimizer", &make_optimizer, py::arg("sharded"), py::arg("groups"));
  module.def("warmup_cosine", &warmup_cosine, py::arg("step"), py::arg("warmup"), py::arg("total"), py::arg("last") = 0.0);
  module.def("warmup_linear", &warmup_linear, py::arg("step"), py::arg("warmup"), py::arg("total"), py::arg("last") = 0.0);
  module.def("warmup_stable_decay", &warmup_stable_decay, py::arg("step"), py::arg("warmup"), py::arg("total"),
             py::arg("decay"), py::arg("last") = 0.0);
  module.def("warmup_constant", &warmup_constant, py::arg("step"), py::arg("warmup"));
  module.def("warmup_inverse_sqrt", &warmup_inverse_sqrt, py::arg("step"), py::arg("warmup"));
  bind_scaler(module);
}

}  // namespace shardproof::python
