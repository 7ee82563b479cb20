// The collectives of `bench collectives` by Open MPI alone: raw_mpi REPEATS MIB... . One JSON line of rank 0.
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

constexpr int kWarmup = 2;

void call(const std::string& op, std::vector<float>& whole, std::vector<float>& part) {
  const int all = static_cast<int>(whole.size()), one = static_cast<int>(part.size());
  if (op == "all_reduce") MPI_Allreduce(MPI_IN_PLACE, whole.data(), all, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  if (op == "all_gather") MPI_Allgather(part.data(), one, MPI_FLOAT, whole.data(), one, MPI_FLOAT, MPI_COMM_WORLD);
  if (op == "reduce_scatter") MPI_Reduce_scatter_block(whole.data(), part.data(), one, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
}

std::string times_of(const std::string& op, int mib, int repeats, int size) {
  const size_t numel = (static_cast<size_t>(mib) << 18) / static_cast<size_t>(size) * static_cast<size_t>(size);
  std::vector<float> whole(numel), part(numel / static_cast<size_t>(size));
  std::string text;
  for (int i = -kWarmup; i < repeats; ++i) {
    whole.assign(whole.size(), 1);
    part.assign(part.size(), 1);
    MPI_Barrier(MPI_COMM_WORLD);
    const double start = MPI_Wtime();
    call(op, whole, part);
    double own = (MPI_Wtime() - start) * 1e3, slowest = 0;
    MPI_Allreduce(&own, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (i >= 0) text += (text.empty() ? "" : ",") + std::to_string(slowest);
  }
  return "\"" + std::to_string(mib) + "\":[" + text + "]";
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  std::string text;
  for (const char* op : {"all_reduce", "all_gather", "reduce_scatter"}) {
    std::string sizes;
    for (int i = 2; i < argc; ++i)
      sizes += (sizes.empty() ? "" : ",") + times_of(op, std::atoi(argv[i]), std::atoi(argv[1]), size);
    text += (text.empty() ? "\"" : ",\"") + std::string(op) + "\":{" + sizes + "}";
  }
  if (rank == 0) std::printf("{%s}\n", text.c_str());
  MPI_Finalize();
  return 0;
}
