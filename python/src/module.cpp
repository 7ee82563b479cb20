// The extension module shardproof._C: the library's classes as Python sees them. The package around it
// (python/shardproof) gives them the names and defaults that its pages describe.
#include "bindings.h"
#include "shardproof/base/check.h"
#include "shardproof/base/failed_check.h"
#include "shardproof/base/name_pattern.h"

PYBIND11_MODULE(_C, module) {
  namespace py = pybind11;
  using namespace shardproof;
  module.doc() = "The C++ library of Shardproof. Use the package `shardproof`, which wraps it.";
  const auto error = py::register_exception<Error>(module, "Error", PyExc_RuntimeError);
  py::register_exception<NonFiniteError>(module, "NonFiniteError", error);
  py::register_exception<FailedCheck>(module, "FailedCheck", error);
  py::register_exception<BrokenInvariant>(module, "BrokenInvariant", PyExc_AssertionError);
  module.def("name_matches", &name_matches, py::arg("pattern"), py::arg("name"));
  python::bind_comm(module);
  python::bind_mirror(module);
  python::bind_units(module);
  python::bind_sharded(module);
  python::bind_optimizers(module);
  python::bind_updates(module);
  python::bind_foreign_optimizer(module);
  python::bind_checkpoints(module);
  python::bind_parallel(module);
  python::bind_users(module);
}
