// A strategy is six layouts of a bucket, the one-dimensional address space that holds a unit's parameters. Everything that a
// strategy does follows from the transitions between these layouts. `lower` turns each into one step, or into none when the two
// layouts are equal, so no code above has to ask which strategy it is. The rows are DDP, ZeRO stages 1 to 3 (Rajbhandari et al.
// 2020), FSDP2's HSDP and Megatron-FSDP's HFSDP.
//
//   unshard   parameter -> compute                 before a unit's forward and backward
//             between -> compute                   before the backward, where the row says what stays gathered until then
//   reduce    produced -> accumulated              after every microbatch
//             accumulated -> state                 after the last one
//   publish   state -> parameter                   after the optimizer
//
// On the mesh axes r = `dp_replicate` and s = `dp_shard`:
//
//             parameter  compute  produced        accumulated     state
//   ddp       b          b        b, partial r,s  b, partial r,s  b
//   zero1     b          b        b, partial r,s  b, partial r,s  b+s
//   zero2     b          b        b, partial r,s  b+s, partial r  b+s
//   zero3     b+s        b        b, partial r,s  b+s, partial r  b+s
//   hsdp      b+s        b        b, partial r,s  b+s, partial r  b+s       zero3 on a mesh that must have both axes
//   hfsdp     b+s        b        b, partial r,s  b+s, partial r  b+s+r     the outer axis shards only what the optimizer has
//   hzero2    b          b        b, partial r,s  b+s, partial r  b+s+r     zero2 along s, zero1 along r (Megatron-FSDP)
//
// Here b means that the bucket is replicated, +s that it is split flat over s, and +r that each of these pieces is split again
// over r. `partial` means that ranks along the axis hold terms of a sum. A mesh without `dp_replicate` (or, for ddp, without
// either axis) counts as one where that axis has size 1. docs/strategies.md lists the memory and the collectives that follow.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "shardproof/algebra/layout.h"

namespace shardproof {

struct Strategy {
  std::string name;
  std::vector<std::string> axes;  // the axes that a mesh must have
  Layout parameter;               // the layout of parameters between steps
  Layout compute;                 // that of parameters while their unit runs
  Layout produced;                // that of a gradient as the backward produces it
  Layout accumulated;             // that of a gradient between microbatches
  Layout state;                   // that of optimizer state, of main parameters and of the gradient that the optimizer reads
  // What a rank keeps of the gathered bucket between a unit's forward and its backward. Empty: Reshard (shard_options.h)
  // decides, which by default keeps nothing but `parameter`.
  std::optional<Layout> between = {};
};

// The rows above, and those that were registered. The harness draws strategies from this list.
const std::vector<Strategy>& strategies();

// Adds a row. `strategy` then finds it, and the harness draws it like the others. Call it at the start of a process, with the
// same row in every process of a job, and not while ranks run. Throws Error when the name is not a word or is taken, or when
// parameters would have to move by anything but an all-gather. Whether sums can turn `produced` into `accumulated` and `state`
// depends on the mesh, so fully_shard checks that.
void register_strategy(Strategy row);

// All other rows that are possible over r and s, so that tests cover more than the well-known ones. They have names such as
// row_b_t_sr, which is row_PARAMETER_ACCUMULATED_STATE. For parameter and state the letters are the axes of the splits, and b
// means replicated. For accumulated gradients t means terms along both axes; s and p mean that they are summed over s, and
// split over s (s) or whole (p), while ranks along r still hold terms. A
// fourth letter, as in row_sr_t_sr_s, is the axis that the bucket stays split over between forward and backward.
const std::vector<Strategy>& free_rows();

// The row of this name, of either kind. Throws Error, which lists the names of the table, when there is no such row.
const Strategy& strategy(std::string_view name);

// Every axis that the strategy names, whether it needs it or not.
std::set<std::string> axis_names(const Strategy& strategy);

// The strategy as it is on this mesh, without the axes that the mesh does not have. Throws Error, which names the strategy and
// the mesh, when the mesh lacks an axis that the strategy needs, or has none of the axes over which it sums.
Strategy on_mesh(Strategy strategy, const Mesh& mesh);

// The mesh as strategies see it. Ranks along `cp` compute on other tokens, so gradients are summed over them as over
// `dp_shard`, and parameters are split over both: the two axes become one axis `dp_shard`. A mesh without any of the axes
// dp_replicate, dp_shard and cp is one replica, and gets a `dp_shard` of size 1. Throws Error when `cp` does not follow
// `dp_shard` directly.
Mesh data_parallel_mesh(const Mesh& mesh);

// The same ranks as experts see them. `ranks` neighbours hold different experts and lie along the last axis, `ep`; the ranks
// that have the same ones lie along what is left of dp_shard and, where ep takes all of dp_shard and more, of dp_replicate. On
// dp_replicate=2,dp_shard=4 two ranks give dp_replicate=2,dp_shard=2,ep=2, and eight give dp_replicate=1,dp_shard=1,ep=8.
// Throws Error when that does not divide. `mesh` is as data_parallel_mesh gives it.
Mesh expert_mesh(const Mesh& mesh, int64_t ranks);

// The strategy whose reduction after every microbatch goes all the way to the layout that the optimizer reads, so that nothing
// is left to sum after the last one. Rows that add microbatches before they reduce (ddp, zero1) stay as they are.
Strategy reducing_replicas_every_time(Strategy strategy);

// Whether gradients are added over microbatches before they are reduced over ranks, as in ddp and zero1. A reference run has to
// take its sums in the same order.
bool accumulates_before_reducing(const Strategy& strategy);

}  // namespace shardproof
