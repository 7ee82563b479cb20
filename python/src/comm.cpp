// Communicators, and ranks that are threads.
#include "shardproof/comm/comm.h"

#include <fmt/ranges.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings.h"
#include "held.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/agree.h"
#include "shardproof/comm/c10d/c10d.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/threads/threads.h"

namespace shardproof::python {
namespace {

template <class Choice>
Choice choice_of(const std::string& given, const char* what, const std::vector<std::pair<std::string, Choice>>& choices) {
  std::vector<std::string> names;
  for (const auto& [name, choice] : choices) {
    if (name == given) return choice;
    names.push_back("'" + name + "'");
  }
  throw Error(fmt::format("[run_threads] {} must be one of {}, got '{}'", what, fmt::join(names, ", "), given));
}

ThreadsOptions threads_options(const std::string& schedule, const std::string& completion, const std::string& sum,
                               uint64_t seed, const std::optional<at::Device>& device) {
  using Options = ThreadsOptions;
  ThreadsOptions options;
  options.schedule = choice_of<Options::Schedule>(
      schedule, "schedule", {{"parallel", Options::Schedule::parallel}, {"serial", Options::Schedule::serial}});
  options.completion = choice_of<Options::Completion>(
      completion, "completion",
      {{"eager", Options::Completion::eager}, {"late", Options::Completion::late}, {"random", Options::Completion::random}});
  options.sum = choice_of<Options::Sum>(sum, "sum", {{"rank_order", Options::Sum::rank_order}, {"ring", Options::Sum::ring}});
  options.seed = seed;
  options.device = device;
  return options;
}

// What ends the world when a body raised: the library hands it back as it is, when it came first.
struct RaisedInBody final : std::exception {
  explicit RaisedInBody(int64_t failed) : rank(failed) {}
  const char* what() const noexcept override { return "a body of Python raised an exception"; }
  int64_t rank;
};

// Raises what a body raised, with a note that names its rank.
[[noreturn]] void raise_of_rank(const py::object& value, int64_t rank, int64_t world) {
  if (py::hasattr(value, "add_note"))
    value.attr("add_note")(fmt::format("raised by rank {} of {} in run_threads", rank, world));
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())), value.ptr());
  throw py::error_already_set();
}

py::list run_bodies(int64_t world, const py::function& body, const std::string& schedule, const std::string& completion,
                    const std::string& sum, uint64_t seed, const std::optional<at::Device>& device) {
  const ThreadsOptions options = threads_options(schedule, completion, sum, seed, device);
  py::list results, raised;
  for (int64_t rank = 0; rank < world; ++rank) {
    results.append(py::none());
    raised.append(py::none());
  }
  const auto run_rank = [&](std::shared_ptr<Comm> comm) {
    const auto rank = static_cast<size_t>(comm->rank());
    {
      const py::gil_scoped_acquire locked;
      try {
        results[rank] = body(std::move(comm));
        return;
      } catch (py::error_already_set& error) {
        raised[rank] = error.value();
      }
    }
    throw RaisedInBody(static_cast<int64_t>(rank));
  };
  int64_t failed = -1;
  try {
    const py::gil_scoped_release unlocked;
    run_threads(world, run_rank, options);
  } catch (const RaisedInBody& error) {
    failed = error.rank;
  }
  if (failed >= 0) raise_of_rank(raised[static_cast<size_t>(failed)], failed, world);
  return results;
}

C10dGroup group_of(const py::object& group) {
  return C10dGroup::unsafe_reclaim_from_nonowning(group.cast<c10d::ProcessGroup*>());
}

// `make_group`: a function of ranks and a name, or None.
std::shared_ptr<Comm> comm_of_group(const py::object& group, bool native, const py::object& make_group) {
  C10dOptions options{.sum = native ? C10dOptions::Sum::native : C10dOptions::Sum::rank_order, .make_group = {}};
  if (!make_group.is_none())
    options.make_group = [make = Held(make_group)](const std::vector<int>& ranks, const std::string& name) {
      const py::gil_scoped_acquire locked;
      return group_of(make.get()(ranks, name));
    };
  C10dGroup pointer = group_of(group);
  const py::gil_scoped_release unlocked;
  return comm_of(std::move(pointer), std::move(options));
}

Reduce reduce_of(const std::string& name) {
  if (name == "sum") return Reduce::sum;
  if (name == "max") return Reduce::max;
  SHARD_REQUIRE(name == "min", "comm", "op must be 'sum', 'max' or 'min', got '{}'", name);
  return Reduce::min;
}

at::Tensor all_gather(Comm& comm, const at::Tensor& tensor) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), comm.size());
  at::Tensor output = at::empty(shape, tensor.options());
  comm.all_gather(output, tensor.detach().contiguous()).wait();
  return output;
}

}  // namespace

void bind_comm(py::module_& module) {
  py::class_<Comm, std::shared_ptr<Comm>>(module, "Comm")
      .def_property_readonly("rank", &Comm::rank)
      .def_property_readonly("size", &Comm::size)
      .def_property_readonly("name", &Comm::name)
      .def(
          "barrier", [](Comm& comm) { comm.barrier().wait(); }, Unlocked())
      .def(
          "all_reduce",
          [](Comm& comm, const at::Tensor& tensor, const std::string& op) {
            comm.all_reduce(tensor.detach(), reduce_of(op)).wait();
            return tensor;
          },
          py::arg("tensor"), py::arg("op") = "sum", Unlocked())
      .def(
          "broadcast",
          [](Comm& comm, const at::Tensor& tensor, int64_t root) {
            comm.broadcast(tensor.detach(), root).wait();
            return tensor;
          },
          py::arg("tensor"), py::arg("root") = 0, Unlocked())
      .def("all_gather", &all_gather, py::arg("tensor"), Unlocked())
      .def("gather_texts", &gather_texts, py::arg("text"), Unlocked());
  module.def("run_threads", &run_bodies, py::arg("ranks"), py::arg("body"), py::arg("schedule") = "parallel",
             py::arg("completion") = "eager", py::arg("sum") = "rank_order", py::arg("seed") = 0,
             py::arg("device") = py::none());
  module.def("comm_of", &comm_of_group, py::arg("group"), py::arg("native") = false, py::arg("make_group") = py::none());
  py::class_<MeshComm, std::shared_ptr<MeshComm>>(module, "MeshComm")
      .def(py::init([](std::shared_ptr<Comm> comm, const std::string& mesh) {
             return std::make_shared<MeshComm>(std::move(comm), Mesh::parse(mesh));
           }),
           py::arg("comm").none(false), py::arg("mesh"))
      .def_property_readonly("mesh", [](const MeshComm& comms) { return comms.mesh().str(); })
      .def_property_readonly("rank", &MeshComm::rank)
      .def_property_readonly("size", [](const MeshComm& comms) { return comms.mesh().size(); })
      .def_property_readonly("data_rank", &MeshComm::data_rank)
      .def_property_readonly("data_size", &MeshComm::data_size)
      .def_property_readonly("world", [](MeshComm& comms) { return comms.world().shared(); })
      .def(
          "along", [](MeshComm& comms, const std::string& axis) { return comms.along({axis}).shared(); }, py::arg("axis"),
          Unlocked())
      .def("axes",
           [](const MeshComm& comms) {
             std::vector<std::pair<std::string, int64_t>> axes;
             for (const Axis& axis : comms.mesh().axes()) axes.emplace_back(axis.name, axis.size);
             return axes;
           })
      .def("coordinate",
           [](const MeshComm& comms, const std::string& axis) { return comms.mesh().coordinate(comms.rank(), axis); });
}

}  // namespace shardproof::python
