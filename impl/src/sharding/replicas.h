// Whether parameters that tensor parallelism leaves whole on every rank train alike.
#pragma once

#include "shardproof/comm/mesh_comm.h"

namespace shardproof {

class ParallelState;
class Schedule;

// Throws Error, on every rank and with the parameter's name, when the final gradient of a parameter differs along the
// tensor-parallel axis though every rank has the whole parameter and nothing sums its gradient there. "Differs" is by more than
// 1% of its norm: kernels that add in no fixed order differ by less, and what is a term of a sum by more. Collective over the
// axes that split the optimizer's state, and over the tensor-parallel one.
void require_equal_replicas(const Schedule& schedule, MeshComm& comms, const ParallelState& parallel);

}  // namespace shardproof
