// One process of an MPI job in which something goes wrong, for mpi_faults_props: makes calls of one kind until a rank does what
// it was told to, and says how that ended.
//   mpi_driver FAULT OP VICTIM STEP ELEMENTS TIMEOUT_S FLIGHT_DIRECTORY
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "shardproof/base/check.h"
#include "shardproof/base/failed_check.h"
#include "shardproof/comm/mpi/mpi.h"
#include "internal/base/call_label.h"

using namespace shardproof;

namespace {

using Clock = std::chrono::steady_clock;

struct Arguments {
  std::string fault, op;
  int64_t victim = 0, step = 0, elements = 0;
  MpiOptions options;
};

struct Buffers {
  at::Tensor mine, whole;
};

Work start(Comm& comm, const std::string& op, const Buffers& buffers) {
  const int64_t size = comm.size(), numel = buffers.mine.numel();
  if (op == "all_gather") return comm.all_gather(buffers.whole, buffers.mine);
  if (op == "reduce_scatter") return comm.reduce_scatter(buffers.mine, buffers.whole);
  if (op == "all_reduce") return comm.all_reduce(buffers.mine);
  if (op == "finite_all_reduce") return comm.finished_all_reduce(buffers.mine, {.all_finite = std::make_shared<bool>()});
  if (op == "broadcast") return comm.broadcast(buffers.mine, size - 1);
  if (op == "barrier") return comm.barrier();
  if (op == "send") {  // from the last rank to the first
    if (comm.rank() == size - 1) return comm.send(buffers.mine, 0, 7);
    return comm.rank() == 0 ? comm.recv(buffers.mine, size - 1, 7) : comm.barrier();
  }
  const std::vector<int64_t> sizes(static_cast<size_t>(size), numel);
  if (op == "all_to_all") return comm.all_to_all(buffers.whole, at::ones({numel * size}, buffers.mine.options()), sizes, sizes);
  throw Error("no such op: " + op);
}

Buffers buffers_of(const Comm& comm, int64_t numel, at::ScalarType dtype) {
  return {at::ones({numel}, dtype), at::ones({numel * comm.size()}, dtype)};
}

// What the victim does instead of its call.
void misbehave(const Arguments& a, Comm& comm, Comm& other) {
  if (a.fault == "kill") ::raise(SIGKILL);
  if (a.fault == "stop") ::raise(SIGSTOP);
  if (a.fault == "exit") ::_exit(0);
  if (a.fault == "throw") throw Error("the disk is full");
  if (a.fault == "nan") throw NonFiniteError("the loss is nan");
  if (a.fault == "check") throw FailedCheck("replicas differ");
  if (a.fault == "slow") std::this_thread::sleep_for(std::chrono::duration<double>(a.options.timeout_seconds * 3 + 3));
  Buffers buffers = buffers_of(comm, a.elements, at::kFloat);
  if (a.fault == "kill_midway") {
    const Work work = start(comm, a.op, buffers);
    ::raise(SIGKILL);
  }
  if (a.fault == "throw_midway" || a.fault == "throw_ahead") {
    const Work work = start(comm, a.op, buffers);
    throw Error("the disk is full");
  }
  if (a.fault == "throw_to_self") {
    const Work work = comm.send(buffers.mine, comm.rank(), 9);
    throw Error("the disk is full");
  }
  if (a.fault == "order") start(comm, a.op == "all_reduce" ? "barrier" : "all_reduce", buffers).wait();
  if (a.fault == "size") start(comm, a.op, buffers_of(comm, a.elements + 1, at::kFloat)).wait();
  if (a.fault == "dtype") start(comm, a.op, buffers_of(comm, a.elements, at::kInt)).wait();
  if (a.fault == "root") comm.broadcast(buffers.mine, 0).wait();  // the others' root is the last rank
  if (a.fault == "factor") comm.finished_all_reduce(buffers.mine, {.factor = 0.5}).wait();
  if (a.fault == "reduce") comm.all_reduce(buffers.mine, Reduce::max).wait();  // the others add
  if (a.fault == "group") start(other, a.op, buffers).wait();
}

void run(const Arguments& a, const std::shared_ptr<Comm>& comm, Clock::time_point& last_good) {
  const CallLabel label("unit 'h.3'");
  const auto group = comm->split(0, comm->rank(), "dp"), other = comm->split(0, -comm->rank(), "tp");
  const Buffers buffers = buffers_of(*comm, a.elements, at::kFloat);
  for (int64_t step = 0;; ++step) {
    if (step == a.step && comm->rank() == a.victim) misbehave(a, *group, *other);
    if (a.fault == "none" && step == a.step) return;
    // The victim throws meanwhile, before the others make the call that it had begun. If it does so later, the test passes all
    // the same, and only notices less.
    if (a.fault == "throw_ahead" && step == a.step) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    start(*group, a.op, buffers).wait();
    last_good = Clock::now();
  }
}

int report(int64_t rank, const char* kind, const std::string& text, Clock::time_point last_good) {
  std::string line = text;
  for (char& c : line)
    if (c == '\n') c = '|';
  fmt::print("ENDED rank {} {} after {:.2f} s: {}\n", rank, kind,
             std::chrono::duration<double>(Clock::now() - last_good).count(), line);
  std::fflush(stdout);
  return 3;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) {
    fmt::print(stderr, "mpi_driver FAULT OP VICTIM STEP ELEMENTS TIMEOUT_S FLIGHT_DIRECTORY, got {} arguments\n",
               argc - 1);
    return 2;
  }
  Arguments a{.fault = argv[1],
              .op = argv[2],
              .victim = std::stol(argv[3]),
              .step = std::stol(argv[4]),
              .elements = std::stol(argv[5])};
  a.options.timeout_seconds = std::stod(argv[6]);
  a.options.flight_directory = argv[7];
  MpiWorld world(a.options);
  Clock::time_point last_good = Clock::now();
  try {
    world.run([&](std::shared_ptr<Comm> comm) { run(a, comm, last_good); });
  } catch (const WorldLostError& error) {
    return report(world.rank(), "lost", error.what(), last_good);
  } catch (const NonFiniteError& error) {
    return report(world.rank(), "non_finite", error.what(), last_good);
  } catch (const FailedCheck& error) {
    return report(world.rank(), "failed_check", error.what(), last_good);
  } catch (const std::exception& error) {
    return report(world.rank(), "error", error.what(), last_good);
  }
  fmt::print("ENDED rank {} well\n", world.rank());
  return 0;
}
