// The extension module shardproof._mpi, apart from _C because it needs an MPI library to be opened.
#include "shardproof/comm/mpi/mpi.h"

#include <optional>

#include "held.h"
#include "shardproof/base/check.h"
#include "shardproof/launch/launch.h"

namespace shardproof::python {
namespace {

py::object run_mpi(const py::function& body, double timeout_seconds, const std::string& flight_directory) {
  py::object result = py::none();
  std::optional<py::error_already_set> raised;
  std::exception_ptr ended;
  {
    const py::gil_scoped_release unlocked;
    try {
      MpiWorld world({.timeout_seconds = timeout_seconds, .flight_directory = flight_directory});
      require_joined(world.rank(), world.size());
      world.run([&](std::shared_ptr<Comm> comm) {
        const py::gil_scoped_acquire locked;
        std::string text;
        try {
          result = body(comm);
          return;
        } catch (py::error_already_set& error) {
          text = error.what();
          raised = error;
        }
        throw Error(text);
      });
    } catch (...) {
      ended = std::current_exception();
    }
  }
  // An error of the library may be the answer to another rank's, which the world names.
  if (raised && !raised->matches(py::module_::import("shardproof._C").attr("Error"))) throw *raised;
  if (ended) std::rethrow_exception(ended);
  return result;
}

}  // namespace
}  // namespace shardproof::python

PYBIND11_MODULE(_mpi, module) {
  namespace py = pybind11;
  module.def("run_mpi", &shardproof::python::run_mpi, py::arg("body"), py::arg("timeout_seconds") = 300.0,
             py::arg("flight_directory") = "");
}
