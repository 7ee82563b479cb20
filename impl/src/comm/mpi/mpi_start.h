// From a call to the operation that carries it out.
#pragma once

#include <memory>

#include "comm/mpi/mpi_operation.h"

namespace shardproof::mpi {

// The call as an operation; its headers are on their way when this returns.
std::shared_ptr<Operation> start_operation(const std::shared_ptr<Group>& group, Call call);

}  // namespace shardproof::mpi
