// What has to be decided before NCCL starts: where the store of the processes is, what the environment must say, and how the
// processes are started where no launcher did. Decisions are pure functions of their arguments, so all of them can be tested on
// a machine without a GPU.
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
  std::string text = {};  // says why, and what to do; empty when the verdict is ok
};

// Judges CUDA_DEVICE_MAX_CONNECTIONS, the number of queues between host and device. `value` is null when it is not set. With
// one queue, kernels start in the order in which the host launched them, so a gather waits behind the computation that it
// should overlap. But before Blackwell (compute capability 10) the overlap of tensor parallelism relies on that order.
// Megatron-LM asks for the same settings.
Advice check_device_connections(const char* value, int64_t compute_capability_major, bool overlaps_sharding,
                                bool overlaps_tensor_parallel);

// What a rank tells the others before NCCL starts.
struct RankPlace {
  std::string host = {};
  std::vector<std::string> gpus = {};  // those that it sees, by an id that no other GPU has
  int64_t local_rank = -1;             // -1: its launcher does not say it
};
// That of this process.
RankPlace own_place(const Launch& launch);
// Those of all ranks of the job, through its store. Throws Error, which names the ranks that did not come in time, or says what
// ended the world.
std::vector<RankPlace> meet(NcclStore& store, const Launch& launch, const RankPlace& own, double timeout_seconds);

// The GPU of a rank: number local_rank % gpus of those that it sees. Where its launcher does not say the local rank, it is
// counted among the ranks of the same host.
struct GpuChoice {
  int64_t device = 0;
  int64_t nth = 0;           // how many lower ranks have the same GPU
  int64_t ranks_of_gpu = 1;  // of the GPU that most ranks have
  bool one_host = true;
};
GpuChoice choose_gpu(int64_t rank, const std::vector<RankPlace>& places);

// How more ranks than GPUs can run on one host.
struct GpuSharing {
  enum class Way { none, host_ids, multi_rank, impossible };
  Way way = Way::none;
  std::string text = {};  // says what follows from it, or why it is impossible
};
// Decides it by NCCL's version code (22809 is 2.28.9). From 2.28 each rank of a GPU can pose as a host of its own
// (NCCL_HOSTID), and from 2.30 several ranks can use one GPU (NCCL_MULTI_RANK_GPU_ENABLE). A rank uses the GPU number
// local_rank % gpus. Where ranks see different GPUs, each GPU is a case of its own: `gpus` is 1, and its ranks count from 0.
GpuSharing share_gpus(int64_t nccl_version, int64_t gpus, int64_t local_ranks);
// The environment variables that this rank has to set for it before it first uses NCCL.
std::vector<std::pair<std::string, std::string>> sharing_variables(const GpuSharing& sharing, int64_t gpus, int64_t local_rank,
                                                                   const std::string& host);

// Says what NCCL's symmetric kernels will not take of registered buffers, as far as it is known before NCCL starts. Empty when
// nothing is known against them. `why_no_windows` is NcclApi's, and `native_sums` says that NCCL adds the sums. Which of the
// GPUs reach each other only NCCL finds out.
std::string symmetric_kernels_note(const std::string& why_no_windows, GpuSharing::Way sharing, bool one_host, bool native_sums,
                                   const Environment& environment);

// The host's name and the number of its last start, because names repeat.
std::string host_name();
// The GPUs that CTest has assigned to this test from its resource file, in the form of CUDA_VISIBLE_DEVICES; "" when it
// assigned none.
std::string dealt_gpus(const Environment& environment);
// What torchrun calls this attempt of its job; "" without torchrun. All attempts may have one store.
std::string attempt_of(const Environment& environment);
// The command line of this process without the program's own path.
std::string own_command();

// Says where the job's store is and whether this process serves it. The store is at MASTER_ADDR and MASTER_PORT, which torchrun
// sets. Without them, and when all ranks are on one host, it is on a loopback port that follows from the job's number. Jobs
// that come to one store are told apart by what the launcher calls them, by their size and by `command`, the same on all ranks.
// Attempts of torchrun on one host do not see each other. Throws Error, which says what to set, in any other case.
TcpStoreOptions store_address(const Launch& launch, const Environment& environment, const std::string& command = own_command());

// Starts `ranks` processes of this program with the variables of torchrun and serves their store. SIGINT, SIGTERM and SIGUSR1
// of this process are handed on to all of them, which may have got the same signal from its sender as well. Returns when all
// have ended: the first exit code that is neither 0 nor `stopped_as_asked`, where 128 and the signal's number stands for a rank
// that was killed; else `stopped_as_asked` if a rank ended with that, else 0. When one of them dies or fails, the others are
// told and end. When this process dies, they get SIGTERM.
int start_ranks(int64_t ranks, const std::vector<std::string>& arguments, int stopped_as_asked = 0);

}  // namespace shardproof
