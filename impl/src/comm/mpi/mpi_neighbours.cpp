#include "comm/mpi/mpi_neighbours.h"

#include <sys/types.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "comm/mpi/mpi_wire.h"
#include "shardproof/base/check.h"

namespace shardproof::mpi {
namespace {

// What each process tells the others: where they find a number, and which one. Processes in other containers may have the same
// process numbers, and would find another file there, or none.
struct Sample {
  int64_t world_rank = 0, process = 0;
  int32_t file = -1;
  uint64_t number = 0;
};

Sample make_sample(int64_t world_rank) {
  std::random_device random;
  Sample sample{.world_rank = world_rank,
                .process = getpid(),
                .file = make_memory_file(sizeof(uint64_t)),
                .number = (uint64_t{random()} << 32) | random()};
  if (sample.file >= 0 && pwrite(sample.file, &sample.number, sizeof(sample.number), 0) != ssize_t{sizeof(sample.number)}) {
    close(sample.file);
    sample.file = -1;
  }
  return sample;
}

bool can_read(const Sample& sample) {
  if (sample.file < 0) return false;
  try {
    process::PeerMemory memory(sample.process);
    return std::memcmp(memory.at({sample.file, 0}, sizeof(sample.number)), &sample.number, sizeof(sample.number)) == 0;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

Neighbours find_neighbours(MPI_Comm host, bool wanted) {
  int size = 1, rank = 0, world_rank = 0;
  check_mpi(MPI_Comm_size(host, &size), "MPI_Comm_size");
  check_mpi(MPI_Comm_rank(host, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &world_rank), "MPI_Comm_rank");
  if (size == 1) return {};
  const Sample own = make_sample(world_rank);
  std::vector<Sample> samples(static_cast<size_t>(size));
  constexpr int kBytes = sizeof(Sample);
  check_mpi(MPI_Allgather(&own, kBytes, MPI_BYTE, samples.data(), kBytes, MPI_BYTE, host), "MPI_Allgather");
  int readable = wanted;
  for (const Sample& sample : samples) readable = readable && can_read(sample);
  check_mpi(MPI_Allreduce(MPI_IN_PLACE, &readable, 1, MPI_INT, MPI_MIN, host), "MPI_Allreduce");
  if (own.file >= 0) close(own.file);
  Neighbours neighbours;
  if (!readable) return neighbours;
  for (const Sample& sample : samples)
    if (sample.world_rank != world_rank) neighbours[sample.world_rank] = std::make_shared<process::PeerMemory>(sample.process);
  return neighbours;
}

}  // namespace shardproof::mpi
