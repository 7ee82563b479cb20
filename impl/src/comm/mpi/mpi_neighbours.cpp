#include "comm/mpi/mpi_neighbours.h"

#include <unistd.h>

#include <algorithm>
#include <vector>

#include "comm/mpi/mpi_wire.h"
#include "shardproof/base/check.h"

namespace shardproof::mpi {
namespace {

// What each process tells the others of its host.
struct Shares {
  int64_t world_rank = 0, process = 0;
  MemoryFile file;
};

// As much as the host has memory. Among many ranks less, twice the host's memory for all together: each process maps the files
// of all, and has only so many addresses.
size_t bytes_to_share(int ranks) {
  const size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(memory, 2 * memory / static_cast<size_t>(ranks));
}

Neighbours map_neighbours(const std::vector<Shares>& all, int64_t own_process) {
  Neighbours neighbours;
  for (const Shares& one : all)
    if (one.process != own_process) neighbours[one.world_rank] = std::make_shared<process::PeerMemory>(one.process, one.file);
  return neighbours;
}

}  // namespace

Neighbours find_neighbours(MPI_Comm host, bool wanted) {
  int size = 1, world_rank = 0;
  check_mpi(MPI_Comm_size(host, &size), "MPI_Comm_size");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank), "MPI_Comm_rank");
  if (size == 1) return {};
  Shares own{.world_rank = world_rank, .process = getpid(), .file = {}};
  if (wanted) own.file = reserve_shared_memory(bytes_to_share(size));
  std::vector<Shares> all(static_cast<size_t>(size));
  constexpr int kBytes = sizeof(Shares);
  check_mpi(MPI_Allgather(&own, kBytes, MPI_BYTE, all.data(), kBytes, MPI_BYTE, host), "MPI_Allgather");
  Neighbours neighbours;
  int found = std::ranges::all_of(all, [](const Shares& one) { return one.file.file >= 0; });
  try {
    if (found) neighbours = map_neighbours(all, own.process);
  } catch (const Error&) {
    found = 0;
  }
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &found, 1, MPI_INT, MPI_MIN, host), "MPI_Allreduce");
  if (!found) {
    drop_shared_memory();
    return {};
  }
  share_host_pool();
  return neighbours;
}

}  // namespace shardproof::mpi
