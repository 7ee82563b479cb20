// What has to be so before NCCL is: where the processes' store is, what the environment must say, and, where nobody has started
// the processes, how they are started. Decisions are functions of what they are told, so that all of them can be tested
// anywhere.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/comm/nccl/nccl_store.h"
#include "shardproof/launch/launch.h"

namespace shardproof {

struct Advice {
  enum class Verdict { ok, warn, refuse };
  Verdict verdict = Verdict::ok;
  std::string text = {};  // why, and what to do; empty when ok
};

// Of CUDA_DEVICE_MAX_CONNECTIONS (`value`; null when unset): the number of queues between host and device. With one, kernels
// start in the order in which the host gave them, so that a gather waits behind the compute that it should overlap;
// tensor-parallel overlap before Blackwell (compute capability 10) relies on that very order.
Advice check_device_connections(const char* value, int64_t compute_capability_major, bool overlaps_sharding,
                                bool overlaps_tensor_parallel);

// How more ranks than GPUs run on one host, if they can.
struct GpuSharing {
  enum class Way { none, host_ids, multi_rank, impossible };
  Way way = Way::none;
  std::string text = {};  // what follows from it; or why it is impossible
};
// By NCCL's version code (22809 is 2.28.9): from 2.28 each rank of a GPU can pose as another host (NCCL_HOSTID), and from 2.30
// several ranks can be of one GPU (NCCL_MULTI_RANK_GPU_ENABLE). A rank's GPU is its number on the host modulo their count.
GpuSharing share_gpus(int64_t nccl_version, int64_t gpus, int64_t local_ranks);
// The variables that this rank needs for it, before NCCL is first used.
std::vector<std::pair<std::string, std::string>> sharing_variables(const GpuSharing& sharing, int64_t gpus, int64_t local_rank,
                                                                   const std::string& host);

std::string host_name();
// The GPUs that CTest has dealt to this test from its resource file, as CUDA_VISIBLE_DEVICES wants them; "" when none.
std::string dealt_gpus(const Environment& environment);

// Where the job's store is and whether this process serves it: at MASTER_ADDR and MASTER_PORT, which torchrun sets; without
// them, where all ranks are on one host, on a port of loopback that the job's number gives. Throws Error that says what to set.
TcpStoreOptions store_address(const Launch& launch, const Environment& environment);

// Starts `ranks` processes of this program with the variables of torchrun, serves their store, and returns the first exit code
// that is not 0 when all have ended. A process that dies is told to the others, so that they end; none stays when this one
// ends.
int start_ranks(int64_t ranks, const std::vector<std::string>& arguments);

}  // namespace shardproof
