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
  UnitCall(std::shared_ptr<const Mirror> mirror, const py::object& module)
      : mirror_(std::move(mirror)), image_(mirror_->find(module)) {}

  bool is_unit() const { return unit_hooks(*image_) != nullptr; }
  bool recomputes() const { return is_unit() && hooks().recomputes(); }
  bool is_seen() const { return hooks().backward_is_seen(); }
  void before() {
    if (image_ == mirror_->root()) mirror_->require_same_parameters();
    const py::gil_scoped_release unlocked;
    hooks().before_forward(*image_);
  }
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
  std::shared_ptr<const Mirror> mirror_;
  std::shared_ptr<torch::nn::Module> image_;
  std::vector<std::shared_ptr<void>> forgetting_;  // in forwards under way
};

// A deep copy of a module, and torch.save of one, come by its hooks.
py::object refuse_copy(const UnitCall&, int) {
  throw Error(
      "[fully_shard] a sharded model cannot be copied or pickled, since its ranks share it. Copy or save what state_dict() of "
      "its Sharded returns, or call shardproof.save; or call remove() of the Sharded first");
}

void set_random_stream(uint64_t seed, uint64_t sites, int64_t first_sample) {
  random_stream() = {.seed = seed, .sites = sites, .first_sample = first_sample};
}

}  // namespace

void bind_units(py::module_& module) {
  py::class_<UnitCall>(module, "UnitCall")
      .def(py::init<std::shared_ptr<Mirror>, const py::object&>(), py::arg("mirror"), py::arg("module"))
      .def_property_readonly("is_unit", &UnitCall::is_unit)
      .def_property_readonly("recomputes", &UnitCall::recomputes)
      .def_property_readonly("is_seen", &UnitCall::is_seen)
      .def("before", &UnitCall::before)
      .def("input", &UnitCall::input, py::arg("tensor"))
      .def("output", &UnitCall::output, py::arg("tensor"))
      .def("after", &UnitCall::after, Unlocked())
      .def("__reduce_ex__", &refuse_copy)
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
