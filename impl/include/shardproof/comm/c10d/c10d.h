// Makes an existing process group of PyTorch a communicator, so that the library trains inside a program that c10d started:
//
//   auto world = comm_of(process_group);               // the group may come from Python or from C++
//   auto comms = std::make_shared<MeshComm>(world, Mesh::parse("dp_shard=4"));
//
// The group's backends must have `_allgather_base`, `alltoall_base` and `broadcast`, and where groups along axes are not made,
// `send` and `recv` with tags, as Gloo has. One of them must take tensors of the CPU. An exception of a backend, e.g. for a
// dead peer or a time-out, becomes an Error that names the call, the group and the rank. NCCL's throws none: its calls only
// order streams, and after the time-out its watchdog ends the process (TORCH_NCCL_ASYNC_ERROR_HANDLING).
// Over such a backend collectives run on a stream beside the caller's, which `wait` orders behind them; the host waits for
// none. `send` and `recv` may stop the host there until the peer calls, so ranks that send to each other should take turns.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace c10d {
class ProcessGroup;
}

namespace shardproof {

using C10dGroup = c10::intrusive_ptr<c10d::ProcessGroup>;

struct C10dOptions {
  // `rank_order` gives the bits of the library's other backends. Ranks exchange the terms and add them here, so an all_reduce
  // needs memory for every rank's term, or over a backend that only orders streams, as NCCL's, for two tensors. `native` leaves
  // sums to the process group, with its order and its dtypes.
  enum class Sum { rank_order, native };
  Sum sum = Sum::rank_order;
  // Makes a process group of these ranks, in this order; they are numbers in the group that `comm_of` was given. This rank is
  // one of them. All of them call it with the same name, and no others. When it is null, smaller groups send messages through
  // the given group: they need no connections of their own, and their sums are in rank order. A backend that has no tags, as
  // NCCL's, cannot do that: `split` throws. (The library does not use
  // ProcessGroup::splitGroup, because that of Gloo in PyTorch 2.11 now and then leaves a rank waiting.)
  std::function<C10dGroup(const std::vector<int>& ranks, const std::string& name)> make_group;
};

// Wraps the process group. Afterwards other code should leave the group alone: its collectives are correct only if all ranks
// issue them and the library's in the same order. Throws Error when the group is null. Collective over the group.
std::shared_ptr<Comm> comm_of(C10dGroup group, C10dOptions options = {}, std::string name = "world");

}  // namespace shardproof
