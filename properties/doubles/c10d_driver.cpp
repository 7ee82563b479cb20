// A Python module for ci/tests/c10d_ranks.py: the library inside the process group of a program that PyTorch started.
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "golden/collectives.h"
#include "properties/doubles/comm_worlds.h"
#include "properties/kit/bits.h"
#include "shardproof/comm/c10d/c10d.h"
#include "shardproof/shardproof.h"

namespace {

namespace py = pybind11;
using namespace shardproof;

C10dGroup group_of(const py::handle& object) {
  return c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(object.cast<c10d::ProcessGroup*>());
}

C10dOptions options_of(bool native, const py::object& make_group) {
  C10dOptions options{.sum = native ? C10dOptions::Sum::native : C10dOptions::Sum::rank_order, .make_group = {}};
  if (make_group.is_none()) return options;
  // Python counts its objects only where the lock is held.
  const std::shared_ptr<py::object> callable(new py::object(make_group), [](py::object* object) {
    const py::gil_scoped_acquire locked;
    delete object;
  });
  options.make_group = [callable](const std::vector<int>& ranks, const std::string&) {
    const py::gil_scoped_acquire locked;
    return group_of((*callable)(ranks));
  };
  return options;
}

void expect_bytes(const at::Tensor& got, const at::Tensor& expected, const std::string& what) {
  if (!kit::same_bits(got, expected)) throw std::runtime_error(what + " differs from its specification");
}

golden::Ranks inputs_of(const Comm& comm, int64_t numel, at::ScalarType dtype, int64_t salt) {
  golden::Ranks inputs;
  for (int64_t rank = 0; rank < comm.size(); ++rank) inputs.push_back(worlds::values(numel, dtype, rank, salt));
  return inputs;
}

void check_gathers(Comm& comm, int64_t numel, at::ScalarType dtype) {
  const auto rank = static_cast<size_t>(comm.rank());
  const golden::Ranks inputs = inputs_of(comm, numel, dtype, 1);
  at::Tensor output = at::empty({comm.size() * numel}, dtype);
  comm.all_gather(output, inputs[rank]).wait();
  expect_bytes(output, golden::all_gather(inputs)[rank], "all_gather");
  output.fill_(0);
  at::Tensor own = output.narrow(0, comm.rank() * numel, numel);
  own.copy_(inputs[rank]);
  comm.all_gather(output, own).wait();
  expect_bytes(output, golden::all_gather(inputs)[rank], "all_gather in place");
  for (int64_t root = 0; root < comm.size(); ++root) {
    at::Tensor value = inputs[rank].clone();
    comm.broadcast(value, root).wait();
    expect_bytes(value, inputs[static_cast<size_t>(root)], "broadcast");
  }
}

void check_reductions(Comm& comm, int64_t numel, at::ScalarType dtype) {
  const auto rank = static_cast<size_t>(comm.rank());
  for (const auto& [op, combine] : {std::pair{Reduce::sum, golden::Combine::sum}, std::pair{Reduce::max, golden::Combine::max},
                                    std::pair{Reduce::min, golden::Combine::min}}) {
    const golden::Ranks inputs = inputs_of(comm, numel, dtype, 2), wide = inputs_of(comm, numel * comm.size(), dtype, 3);
    at::Tensor all = inputs[rank].clone(), slice = at::empty({numel}, dtype), whole = wide[rank].clone();
    Work first = comm.all_reduce(all, op), second = comm.reduce_scatter(slice, whole, op);
    second.wait();  // in another order than they began
    first.wait();
    expect_bytes(all, golden::all_reduce(inputs, combine)[rank], "all_reduce");
    expect_bytes(slice, golden::reduce_scatter(wide, combine)[rank], "reduce_scatter");
    at::Tensor own = whole.narrow(0, comm.rank() * numel, numel);
    comm.reduce_scatter(own, whole, op).wait();
    expect_bytes(own, golden::reduce_scatter(wide, combine)[rank], "reduce_scatter in place");
  }
}

void check_exchanges(Comm& comm, at::ScalarType dtype) {
  const int64_t size = comm.size(), rank = comm.rank();
  std::vector<std::vector<int64_t>> sizes;  // from, to
  golden::Ranks inputs;
  for (int64_t from = 0; from < size; ++from) {
    std::vector<int64_t> row;
    int64_t numel = 0;
    for (int64_t to = 0; to < size; ++to) numel += row.emplace_back((from * 3 + to * 2) % 4);
    sizes.push_back(row);
    inputs.push_back(worlds::values(numel, dtype, from, 4));
  }
  std::vector<int64_t> received;
  for (int64_t from = 0; from < size; ++from) received.push_back(sizes[static_cast<size_t>(from)][static_cast<size_t>(rank)]);
  const at::Tensor expected = golden::all_to_all(inputs, sizes)[static_cast<size_t>(rank)];
  at::Tensor output = at::empty_like(expected);
  comm.all_to_all(output, inputs[static_cast<size_t>(rank)], received, sizes[static_cast<size_t>(rank)]).wait();
  expect_bytes(output, expected, "all_to_all");
  const golden::Ranks messages = inputs_of(comm, 5, dtype, 5);
  for (const int64_t distance : {int64_t{1}, size}) {  // to the next, and to itself
    const int64_t to = (rank + distance) % size, from = (rank + size - distance % size) % size;
    at::Tensor message = at::empty({5}, dtype);
    Work arrives = comm.recv(message, from, 7), leaves = comm.send(messages[static_cast<size_t>(rank)], to, 7);
    leaves.wait();
    arrives.wait();
    expect_bytes(message, messages[static_cast<size_t>(from)], "a message");
  }
  comm.barrier().wait();
}

// A tag on the wire has 31 bits, of which 12 are the group's number, and one tag of each group is that of collectives.
void check_tags(Comm& comm) {
  constexpr int64_t kLargest = (int64_t{1} << 19) - 2;
  const int64_t next = (comm.rank() + 1) % comm.size(), before = (comm.rank() + comm.size() - 1) % comm.size();
  for (const int64_t tag : {int64_t{0}, kLargest}) {
    at::Tensor message = at::empty({1});
    Work arrives = comm.recv(message, before, tag), leaves = comm.send(at::full({1}, comm.rank(), at::kFloat), next, tag);
    leaves.wait();
    arrives.wait();
    expect_bytes(message, at::full({1}, before, at::kFloat), "a message with tag " + std::to_string(tag));
  }
  for (const int64_t tag : {int64_t{-1}, kLargest + 1}) {
    std::string said;
    try {
      comm.send(at::ones({1}), next, tag);
    } catch (const Error& error) {
      said = error.what();
    }
    if (said.find("between 0 and " + std::to_string(kLargest)) == std::string::npos)
      throw std::runtime_error("tag " + std::to_string(tag) + " should be refused by its bounds, but: " +
                               (said.empty() ? "it was sent" : said));
  }
}

void check_comm(Comm& comm) {
  check_tags(comm);
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong, at::kByte}) {
    for (const int64_t numel : {0, 1, 5, 64, 257}) {
      check_gathers(comm, numel, dtype);
      check_reductions(comm, numel, dtype);
    }
    check_exchanges(comm, dtype);
  }
}

// Every verb on the group and on what it splits into, one of each parity.
void check_collectives(const py::object& group, const py::object& make_group) {
  const auto comm = comm_of(group_of(group), options_of(false, make_group));
  const py::gil_scoped_release unlocked;
  check_comm(*comm);
  const auto part = comm->split(comm->rank() % 2, comm->rank(), "parity");
  check_comm(*part);
  check_comm(*part->split(0, 0, "all of the part"));
  const auto reversed = comm->split(0, -comm->rank(), "the other way round");
  if (reversed->rank() != comm->size() - 1 - comm->rank()) throw std::runtime_error("the keys of a split are not its order");
  check_comm(*reversed);
  if (comm->split(comm->rank() == 0 ? -1 : 0, 0, "all but the first") == nullptr && comm->rank() != 0)
    throw std::runtime_error("a rank with a color is in no group");
  check_comm(*part);
}

std::vector<at::Tensor> trained(std::shared_ptr<Comm> comm, const std::string& mesh, const std::string& strategy_name) {
  auto comms = std::make_shared<MeshComm>(comm, Mesh::parse(mesh));
  Mlp model(MlpOptions{.widths = {6, 11, 3}});
  initialize_parameters(*model, 3, 0.4);
  Sharded sharded = fully_shard(model.ptr(), comms, {.strategy = strategy(strategy_name)});
  Optimizer optimizer = adamw(sharded, {.lr = 0.01});
  for (int64_t step = 0; step < 3; ++step) {
    call(model, at::arange(12, at::kFloat).view({2, 6}).add(step * 7 + comm->rank()).cos()).square().mean().backward();
    optimizer.step();
  }
  std::vector<at::Tensor> parameters;
  for (const auto& [name, value] : sharded.gather_parameters()) parameters.push_back(value.clone());
  return parameters;
}

// Three steps in this process group, and the same on rank-threads: in rank order they have the same bits. The largest
// difference of a value.
double train(const py::object& group, const std::string& mesh, const std::string& strategy_name, bool native) {
  const auto comm = comm_of(group_of(group), options_of(native, py::none()));
  const py::gil_scoped_release unlocked;
  const std::vector<at::Tensor> mine = trained(comm, mesh, strategy_name);
  std::vector<at::Tensor> expected;
  run_threads(comm->size(), [&](std::shared_ptr<Comm> thread) {
    const std::vector<at::Tensor> values = trained(thread, mesh, strategy_name);
    if (thread->rank() == 0) expected = values;
  });
  double distance = 0;
  for (size_t i = 0; i < expected.size(); ++i)
    distance = std::max(distance, (mine.at(i) - expected[i]).abs().max().item<double>());
  return distance;
}

// Issues a collective that the others do not, and tells what becomes of its second wait.
std::string wait_alone(const py::object& group) {
  const auto comm = comm_of(group_of(group));
  const py::gil_scoped_release unlocked;
  Work work = comm->all_reduce(at::ones({3}));
  std::string said;
  for (int waits = 0; waits < 2; ++waits) {
    said.clear();
    try {
      work.wait();
    } catch (const Error& error) {
      said = error.what();
    }
  }
  return said;
}

}  // namespace

PYBIND11_MODULE(c10d_driver, module) {
  module.def("check_collectives", check_collectives, py::arg("group"), py::arg("make_group") = py::none());
  module.def("train", train);
  module.def("wait_alone", wait_alone);
}
