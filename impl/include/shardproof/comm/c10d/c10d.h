// An existing process group of PyTorch as a communicator, so that the library trains inside a program that c10d started:
//
//   auto world = comm_of(process_group);               // e.g. from Python, or made in C++
//   auto comms = std::make_shared<MeshComm>(world, Mesh::parse("dp_shard=4"));
//
// Any backend that has `_allgather_base`, `alltoall_base`, `broadcast`, and `send` and `recv` by tags serves, e.g. Gloo. What
// it throws (a dead peer, its time-out) becomes an Error that names the call, the group and the rank.
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
  // `rank_order`: the bits of every other backend of ours. Terms are exchanged and summed here, so that an all_reduce needs
  // memory for every rank's. `native`: what the process group does, in its order, for the dtypes that it has.
  enum class Sum { rank_order, native };
  Sum sum = Sum::rank_order;
  // Makes the group of these ranks of the group that `comm_of` was given, ascending, of which this rank is one; all of them
  // call it, with the same name. Null: groups exchange messages through the given one, which needs no connections of their own
  // and sums in rank order. (ProcessGroup::splitGroup is not used: Gloo's, of 2.11, now and then leaves one of the ranks
  // waiting.)
  std::function<C10dGroup(const std::vector<int>& ranks, const std::string& name)> make_group;
};

// All ranks of the group must call it, and then leave the group to it: a collective of somebody else's between ours is only
// right where all ranks issue both in the same order. Throws Error when the group is null.
std::shared_ptr<Comm> comm_of(C10dGroup group, C10dOptions options = {}, std::string name = "world");

}  // namespace shardproof
