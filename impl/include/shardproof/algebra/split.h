// How the ranks along one axis of a mesh cut one length among them. This header is arithmetic on integers only.
//
// A split has one of four rules. Each gives every part an ordered list of runs of the length:
//   even      each part has one chunk of ceil(length / parts), as torch.chunk cuts: 5 over 4 is 2,2,1,0. This is the default.
//   bounds    each part has one run, between explicit cut points. Such a cut is called ragged.
//   segments  the length consists of segments, and each segment is cut by itself, in granules that stay together. A part
//             holds its runs of all segments, in order. A segment with fewer granules than parts may be held in copies.
//   balanced  the length is cut in 2n even chunks for n parts, and part r holds the chunks r and 2n-1-r.
// Law: over the parts, the runs that are first copies tile the length.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/algebra/box.h"

namespace shardproof {

// A segment of a dim that is cut by itself, e.g. the query, key or value rows of a fused projection.
struct CutSegment {
  int64_t length = 0;   // the number of elements of the dim
  int64_t granule = 1;  // so many elements stay together, e.g. those of a head; it divides the length
  bool copied = false;  // whether granules are held in copies when there are fewer than parts, as key and value heads are
  bool operator==(const CutSegment&) const = default;
};

struct Split {
  std::string axis;
  // At most one of the next three is set and determines the rule. When none is set the rule is even.
  // Bounds are parts + 1 ascending cut points from 0 to the length. Under an outer uneven split the length differs from rank to
  // rank. The bounds then end at the longest length and are clamped to the shorter ones. The same holds for segments.
  std::vector<int64_t> bounds = {};
  // The lengths of the segments add up to the length. Granules are dealt out evenly. When a `copied` segment has fewer granules
  // than there are parts, their number must divide the parts, and parts / granules neighbours hold the same granule.
  std::vector<CutSegment> segments = {};
  // The balanced rule balances the load of causal attention: under a causal mask all parts have equal work. Context parallelism
  // in Megatron-LM and "zigzag" ring attention use this cut.
  bool balanced = false;

  // Whether every part holds one run and the runs follow each other in the order of the parts, as under the rules even and
  // bounds.
  bool is_contiguous() const { return segments.empty() && !balanced; }

  // E.g. "tp", "dp_shard:0|3|5", "tp:8/4+2/1*" (segments of 8 in granules of 4 and of 2, in copies), "cp:balanced".
  std::string str() const;
  bool operator==(const Split&) const = default;
};

// A split of the rule segments, and one of the rule balanced.
Split split_in_segments(std::string axis, std::vector<CutSegment> segments);
Split balanced_split(std::string axis);

// A run of the length that a part holds.
struct SplitRun {
  Interval whole;           // where the run lies in the whole length
  int64_t local = 0;        // where it begins in what the part holds
  int64_t copies = 1;       // how many neighbouring parts hold this run
  bool first_copy = true;   // whether no lower part holds it
  bool operator==(const SplitRun&) const = default;
};

// The runs of [0, length) that `part` of `parts` holds. They are ascending and not empty, and runs that follow each other are
// joined unless their numbers of copies differ. Throws Error when the rule does not fit the length and the parts.
std::vector<SplitRun> pieces(const Split& split, int64_t length, int64_t parts, int64_t part);

// The sum of the lengths of the runs that `pieces` returns.
int64_t piece_size(const Split& split, int64_t length, int64_t parts, int64_t part);

// The one run of a contiguous split, which may be empty. Law: the runs of all parts are disjoint, ascending and cover [0,
// length).
Interval piece(const Split& split, int64_t length, int64_t parts, int64_t part);

// The cut of a dim of known length among a known number of parts.
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

// How many parts hold the same run of segments that are held in copies; 1 when no segment is. Throws Error when segments have
// different numbers of copies.
int64_t copies_held(const Split& split, int64_t parts);

// Throws Error, which names `what`, when the rule does not fit the length and the parts.
void validate(const Split& split, int64_t length, int64_t parts, const std::string& what);

}  // namespace shardproof
