#include "comm/mpi/mpi_start.h"

#include "comm/mpi/mpi_collective.h"
#include "comm/mpi/mpi_transfer.h"

namespace shardproof::mpi {

std::shared_ptr<Operation> start_operation(const std::shared_ptr<Group>& group, Call call) {
  if (call.op == Op::send) return std::make_shared<Send>(group, std::move(call));
  if (call.op == Op::recv) return std::make_shared<Recv>(group, std::move(call));
  return std::make_shared<Collective>(group, std::move(call));
}

}  // namespace shardproof::mpi
