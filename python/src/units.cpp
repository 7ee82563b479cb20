// What Python's hooks call around the forward of a module that is a unit: the steps of `call` (hooks/unit.h).
#include "bindings.h"
#include "held.h"
#include "mirror.h"
#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/nn/random.h"

namespace shardproof::python {
namespace {

class UnitCall {
 public:
  UnitCall(const Mirror& mirror, const py::object& module) : image_(mirror.find(module)) {}

  bool is_unit() const { return unit_hooks(*image_) != nullptr; }
  bool recomputes() const { return is_unit() && hooks().recomputes(); }
  bool is_seen() const { return hooks().backward_is_seen(); }
  void before() { hooks().before_forward(*image_); }
  at::Tensor input(const at::Tensor& tensor) { return hooks().watch_input(tensor); }
  at::Tensor output(const at::Tensor& tensor) { return hooks().watch_output(tensor); }
  void after() { hooks().after_forward(*image_); }

  void forget_saved(const py::function& again, const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& buffers) {
    const Held held(again);
    const auto run = [held](const std::vector<at::Tensor>& values) {
      const py::gil_scoped_acquire locked;
      held.get()(values);
    };
    forgetting_.push_back(hooks().forget_saved(run, inputs, buffers));
  }
  void keep_saved() { forgetting_.pop_back(); }

 private:
  UnitHooks& hooks() const {
    UnitHooks* hooks = unit_hooks(*image_);
    SHARD_REQUIRE(hooks, "unit", "the forward of a {} that is no longer sharded", image_->name());
    return *hooks;
  }
  std::shared_ptr<torch::nn::Module> image_;
  std::vector<std::shared_ptr<void>> forgetting_;  // in forwards under way
};

void set_random_stream(uint64_t seed, uint64_t sites, int64_t first_sample) {
  random_stream() = {.seed = seed, .sites = sites, .first_sample = first_sample};
}

}  // namespace

void bind_units(py::module_& module) {
  py::class_<UnitCall>(module, "UnitCall")
      .def(py::init<const Mirror&, const py::object&>(), py::arg("mirror"), py::arg("module"))
      .def_property_readonly("is_unit", &UnitCall::is_unit)
      .def_property_readonly("recomputes", &UnitCall::recomputes)
      .def_property_readonly("is_seen", &UnitCall::is_seen)
      .def("before", &UnitCall::before, Unlocked())
      .def("input", &UnitCall::input, py::arg("tensor"))
      .def("output", &UnitCall::output, py::arg("tensor"))
      .def("after", &UnitCall::after, Unlocked())
      .def("forget_saved", &UnitCall::forget_saved, py::arg("again"), py::arg("inputs"), py::arg("buffers"))
      .def("keep_saved", &UnitCall::keep_saved);
  module.def("set_random_stream", &set_random_stream, py::arg("seed"), py::arg("sites") = 0, py::arg("first_sample") = 0);
  module.def("random_stream", [] {
    const RandomStream& now = random_stream();
    return py::make_tuple(now.seed, now.sites, now.first_sample);
  });
  module.def("dropout", &dropout, py::arg("input"), py::arg("probability"), py::arg("training"));
}

}  // namespace shardproof::python
