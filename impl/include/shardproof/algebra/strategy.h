// A strategy is six layouts of a bucket, the one-dimensional address space that holds a unit's parameters. Everything a
// strategy does follows from the transitions between them, each one `lower` step; equal layouts give no step, so no code
// above asks which strategy it is.
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
// b: replicated; +s: split flat over s, +r: each of those pieces split again over r; partial: its ranks hold terms of a sum.
// A mesh without `dp_replicate` (or, for ddp, without either one) is one where that axis has size 1. docs/strategies.md has
// the memory and the collectives that follow.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "shardproof/algebra/layout.h"

namespace shardproof {

struct Strategy {
  std::string name;
  std::vector<std::string> axes;  // that a mesh must have
  Layout parameter;               // between steps
  Layout compute;                 // while the unit runs
  Layout produced;                // a gradient as backward makes it
  Layout accumulated;             // a gradient between microbatches
  Layout state;                   // the optimizer's state, and the gradient that the optimizer reads
  // What a rank keeps of the gathered bucket from a unit's forward to its backward. None: as Reshard says (shard_options.h),
  // which by itself keeps nothing but `parameter`.
  std::optional<Layout> between = {};
};

// The rows above and those that were registered. The harness draws from this list.
const std::vector<Strategy>& strategies();

// Adds a row, which `strategy` finds from then on and the harness draws like the others. At the start of a process, on every
// rank alike, and not while ranks run. Throws Error when the name is no word or taken, or when parameters would have to move by
// anything but an all-gather. Whether gradients reach `accumulated` and `state` by sums, fully_shard finds out on its mesh.
void register_strategy(Strategy row);

// Rows that nobody has given a name, so that not only famous ones are tested: all that are possible over r and s, but those of
// the table. They are called row_PARAMETER_ACCUMULATED_STATE, as row_b_t_sr. The letters are the axes of the splits; b stands
// for whole, t for terms along both axes, s and p in the middle for sums over s, split and whole, that are terms along r. A
// fourth letter, as in row_sr_t_sr_s, is the axis that the bucket stays split over between forward and backward.
const std::vector<Strategy>& free_rows();

// Of either kind. Throws Error listing the names of the table.
const Strategy& strategy(std::string_view name);

// The strategy as it is on this mesh: axes of the rows that the mesh lacks are gone. Throws Error, naming both, when the mesh
// lacks an axis the strategy needs, or has none of those that it sums over.
Strategy on_mesh(Strategy strategy, const Mesh& mesh);

// The mesh as strategies see it: the ranks along `cp` compute on other tokens, so gradients are summed over them as over
// `dp_shard`, and parameters split over both; the two axes become one, `dp_shard`. A mesh without any of the three axes is one
// replica, and has `dp_shard` of size 1 here. Throws Error when `cp` does not follow `dp_shard`.
Mesh data_parallel_mesh(const Mesh& mesh);

// The same strategy with nothing left to be summed between microbatches: each reduction goes all the way to the layout that the
// optimizer reads. Rows that add locally first (ddp, zero1) stay as they are.
Strategy reducing_replicas_every_time(Strategy strategy);

// True when gradients are added over microbatches before they are reduced over ranks (ddp, zero1): the order of sums that
// a reference run has to follow.
bool accumulates_before_reducing(const Strategy& strategy);

}  // namespace shardproof
