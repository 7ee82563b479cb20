// How the ranks along one axis of a mesh cut one length among them. Pure integers, no Torch.
//
// A split has one of four rules. Each gives every part an ordered list of runs of the length:
//   even      one chunk of ceil(length / parts) each, as torch.chunk cuts: 5 over 4 is 2,2,1,0. The default.
//   bounds    ragged: one run each, between explicit cut points.
//   segments  the length consists of segments, and each segment is cut by itself, in granules that stay together. A part
//             holds its runs of all segments, in order. A segment with fewer granules than parts may be held in copies.
//   balanced  of 2n even chunks, part r of n holds the chunks r and 2n-1-r.
// Law: over the parts, the runs that are first copies tile the length.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/algebra/box.h"

namespace shardproof {

// A part of a dim that is cut by itself, e.g. the query, key or value rows of a fused projection.
struct CutSegment {
  int64_t length = 0;   // in elements of the dim
  int64_t granule = 1;  // so many stay together, e.g. the size of a head; divides the length
  bool copied = false;  // granules that are fewer than the parts are held in copies, as key and value heads are
  bool operator==(const CutSegment&) const = default;
};

struct Split {
  std::string axis;
  // At most one of these three is set, and names the rule; none is set: even.
  // parts + 1 ascending cut points from 0 to the length. Under an outer uneven split the length differs from rank to rank:
  // the bounds then end at the longest and are clamped to the shorter ones. The same holds for segments.
  std::vector<int64_t> bounds = {};
  // Their lengths add up to the length. Granules are dealt out evenly. Those of a `copied` segment that are fewer than the
  // parts must divide them; parts / granules neighbours then hold the same granule.
  std::vector<CutSegment> segments = {};
  // Load balance of causal attention: under a causal mask all parts have equal work. The cut is that of context parallelism
  // in Megatron-LM and of "zigzag" ring attention.
  bool balanced = false;

  // Every part holds one run, and the runs follow each other in the order of the parts: the rule is even or bounds.
  bool is_contiguous() const { return segments.empty() && !balanced; }

  // E.g. "tp", "dp_shard:0|3|5", "tp:8/4+2/1*" (segments of 8 in granules of 4 and of 2, in copies), "cp:balanced".
  std::string str() const;
  bool operator==(const Split&) const = default;
};

// Splits of the two rules with several runs.
Split split_in_segments(std::string axis, std::vector<CutSegment> segments);
Split balanced_split(std::string axis);

// A run of the length that a part holds.
struct SplitRun {
  Interval whole;           // in the whole length
  int64_t local = 0;        // where it begins in what the part holds
  int64_t copies = 1;       // so many neighbouring parts hold this run
  bool first_copy = true;   // no lower part holds it
  bool operator==(const SplitRun&) const = default;
};

// What `part` of `parts` holds of [0, length): runs that are not empty, ascending, and not neighbours unless their numbers of
// copies differ. Throws Error when the rule does not fit the length and the parts.
std::vector<SplitRun> pieces(const Split& split, int64_t length, int64_t parts, int64_t part);

// The sum of the lengths of `pieces`.
int64_t piece_size(const Split& split, int64_t length, int64_t parts, int64_t part);

// The one run of a contiguous split; it may be empty. Law: the pieces are disjoint, ascending and cover [0, length).
Interval piece(const Split& split, int64_t length, int64_t parts, int64_t part);

// The ragged split that cutting [0, length) by a contiguous `split` makes in the part `window` of it; how a parameter in a
// bucket sees the cut of the bucket. Law: piece(within(s, l, n, w), |w|, n, i) is piece(s, l, n, i) and w, counted from
// w.begin.
Split within(const Split& split, int64_t length, int64_t parts, Interval window);

// A dim of known length that a known number of parts cut.
struct DimCut {
  Split split;
  int64_t length = 0;
  int64_t parts = 1;

  std::vector<SplitRun> runs(int64_t part) const { return pieces(split, length, parts, part); }
  int64_t count(int64_t part) const { return piece_size(split, length, parts, part); }
  // The indices of the dim that `part` holds, in order. Law: there are count(part) of them.
  std::vector<int64_t> positions(int64_t part) const;
  bool operator==(const DimCut&) const = default;
};

// How many parts hold the same run of the segments that are held in copies; 1 where none are. Throws Error when segments are
// held in different numbers of copies.
int64_t copies_held(const Split& split, int64_t parts);

// Throws Error that names `what`, when the rule does not fit the length and the parts.
void validate(const Split& split, int64_t length, int64_t parts, const std::string& what);

}  // namespace shardproof
