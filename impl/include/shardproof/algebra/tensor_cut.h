// How tensor parallelism cuts a parameter: along one dim, perhaps in several segments that lie behind each other in it (the
// q, k and v rows of a fused projection, gate and up of a gated MLP), each of which is cut by itself. What a rank holds is its
// pieces of all segments, in order. Pure integers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/algebra/layout.h"

namespace shardproof {

struct CutSegment {
  int64_t length = 0;   // rows of the dim
  int64_t granule = 1;  // that stay together, e.g. the size of a head; divides the length
  bool copied = false;  // fewer granules than ranks are held in copies, as key and value heads are
  bool operator==(const CutSegment&) const = default;
};

// Rows of the dim that a rank holds, in its own numbering and in that of the whole.
struct CutRows {
  Interval local, whole;
  bool first_copy = true;  // no lower rank holds the same rows
};

// A run of the whole tensor's row-major elements and where it is in the local one's.
struct CutRun {
  Interval whole;
  int64_t local = 0;
  bool first_copy = true;
};

struct TensorCut {
  int64_t dim = 0;
  std::vector<CutSegment> segments;  // their lengths add up to the size of the dim

  // Granules are dealt out evenly, as torch.chunk cuts. `copied` ones that are fewer than the parts, which they must divide,
  // are held by parts / granules neighbours each. Law: over the parts, the rows that are first copies tile the dim exactly.
  std::vector<CutRows> rows(int64_t parts, int64_t part) const;

  // How many ranks hold the same rows of the segments that are held in copies; 1 where none are. Throws Error when segments
  // differ.
  int64_t copies(int64_t parts) const;

  // Of the tensor that `part` holds.
  Shape local_shape(const Shape& whole, int64_t parts, int64_t part) const;

  // The runs of the whole that the run `local` of the local tensor's row-major elements is made of, ascending in `local`.
  // Law: reading them from the whole gives the local run.
  std::vector<CutRun> runs(const Shape& whole, int64_t parts, int64_t part, Interval local) const;
};

// Throws Error, naming `what`, when dim or segments do not fit the shape, or a segment's granules and the parts do not go
// together.
void validate(const TensorCut& cut, const Shape& whole, int64_t parts, const std::string& what);

}  // namespace shardproof
