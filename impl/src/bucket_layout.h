// Where the parameters of one bucket lie, and which part of the bucket each of a strategy's layouts gives this rank.
// Offsets do not depend on the mesh; only the length of the zero padding at the end does.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/piece.h"
#include "shardproof/plan.h"
#include "shardproof/strategy.h"

namespace shardproof {

// One parameter in the bucket.
struct Slot {
  std::string name;
  Shape shape;
  int64_t offset = 0;  // in elements
  int64_t numel = 0;
};

// The part of one slot that lies in a local interval.
struct Segment {
  int64_t slot = 0;
  Interval run;      // of the parameter's row-major elements
  int64_t local = 0;  // offset of its first element in the local buffer
};

// A local interval cut into segments and what lies between them.
struct LocalView {
  Interval interval;  // of the bucket
  std::vector<Segment> segments;
  std::vector<Interval> padding;  // in local offsets
  int64_t size() const { return interval.size(); }
};

class BucketLayout {
 public:
  // Lays the slots out in order (offsets are set here), each aligned; the total is padded so that every even split that the
  // strategy makes on this mesh divides it.
  BucketLayout(std::vector<Slot> slots, const Strategy& strategy, const Mesh& mesh, int64_t rank, int64_t alignment_elements);

  const std::vector<Slot>& slots() const { return slots_; }
  int64_t numel() const { return numel_; }

  // Law: over the ranks along the splitting axes, the intervals are disjoint and cover [0, numel()).
  const LocalView& parameter() const { return parameter_; }
  const LocalView& compute() const { return compute_; }
  const LocalView& produced() const { return produced_; }
  const LocalView& accumulated() const { return accumulated_; }
  const LocalView& state() const { return state_; }

  const Lowered& unshard() const { return unshard_; }
  const Lowered& reduce() const { return reduce_; }
  const Lowered& reduce_last() const { return reduce_last_; }
  const Lowered& publish() const { return publish_; }

 private:
  LocalView view(const Layout& layout, const Mesh& mesh, int64_t rank) const;

  std::vector<Slot> slots_;
  int64_t numel_ = 0;
  LocalView parameter_, compute_, produced_, accumulated_, state_;
  Lowered unshard_, reduce_, reduce_last_, publish_;
};

// A view's segments as pieces of the parameters; `local` is the buffer the view describes.
void append_pieces(const BucketLayout& layout, const LocalView& view, const at::Tensor& local, std::vector<Piece>& pieces);

}  // namespace shardproof
