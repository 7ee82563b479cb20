// In the place of the MPI backend where none was found.
#include "shardproof/comm/mpi/mpi.h"

namespace shardproof {

bool mpi_available() {
  return false;
}

class MpiWorld::Impl {};

MpiWorld::MpiWorld(const MpiOptions&) {
  throw Error(
      "[mpi] this build has no MPI: CMake found none. Install Open MPI (ci/setup does), run cmake again and rebuild, or use "
      "--backend threads");
}
MpiWorld::~MpiWorld() = default;
int64_t MpiWorld::rank() const {
  return 0;
}
int64_t MpiWorld::size() const {
  return 1;
}
void MpiWorld::run(const std::function<void(std::shared_ptr<Comm>)>&, int64_t) {}

}  // namespace shardproof
