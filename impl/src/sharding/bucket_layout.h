// Where the parameters of one bucket lie, and which part of the bucket each of a strategy's layouts gives this rank.
// Offsets do not depend on the mesh, unless parameters have granules that no cut takes apart; only the zero padding does. They
// are the same on every rank, also where tensor parallelism leaves the ranks parts of different sizes: then the largest ones
// decide.
//
// A bucket is what collectives move, and its even parts are what ranks hold. Units compute in another buffer, in which each
// parameter lies in one piece. The two are the same memory unless parameters are cut by rows (Granularity::row): then a bucket
// has the first rows of all parameters, which are rank 0's, then the next ones of all. A parameter that is cut along another
// dim has a rank's columns end to end, one row's after the other:
//
//   compute   a0 a1 a2 b0 b1 b2 b0 b1 b2
//   bucket    a0 b0 b0 | a1 b1 b1 | a2 b2 b2
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "shardproof/algebra/plan.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/sharding/piece.h"
#include "shardproof/sharding/shard_options.h"

namespace shardproof {

// One parameter in the bucket, as far as this rank's part along the tensor-parallel axis holds it.
struct BucketParameter {
  std::string name;
  Shape shape;
  int64_t offset = 0;  // in the buffer that units compute in, in elements
  int64_t numel = 0;
  int64_t room = 0;    // of the longest part along that axis: what lies behind it has one offset on all of its ranks
  Shape whole;         // shape of the whole parameter
  Placement own = {};  // how `shape` comes from it, on the tensor-parallel axis alone
  int64_t cut_dim = 0;  // along which Granularity::row cuts it
  int64_t granule = 1;  // cuts fall at multiples of it from the beginning; at most `room`, which keeps it whole
  bool is_cut() const { return own.layout != replicated(); }
};

// A part of one member that lies in a local interval. A member has several where rows are interleaved.
struct Segment {
  int64_t member = 0;
  Interval run;       // of the parameter's row-major elements
  int64_t local = 0;  // offset of its first element in the local buffer
  // Where a dim behind the first is cut, further runs of that size follow, each so many elements behind the one before.
  int64_t times = 1, stride = 0;
  int64_t size() const { return times * run.size(); }
  // Which of the parameter's elements the i-th one of the segment is.
  int64_t element(int64_t i) const { return run.begin + i / run.size() * stride + i % run.size(); }
};

// What this rank holds of the bucket under a layout: an interval, cut into segments and what lies between them.
struct LocalView {
  Layout layout;
  Interval interval;
  std::vector<Segment> segments;
  std::vector<Interval> padding;  // in local offsets
  int64_t size() const { return interval.size(); }
};

// One collective of a transition, and what this rank holds: after it, or, where the transition is a gather, before it.
struct Stage {
  CollectiveStep collective;
  LocalView part;
};

class BucketLayout {
 public:
  // Lays the members out (offsets are set here), each aligned; the total is padded so that every even split that the strategy
  // makes on this mesh divides it, and that it is a multiple of `bucket_multiple`. `strategy` is as `on_mesh` gives it. Where
  // members have granules and splits make n chunks, a chunk C is the least multiple of the alignment with which every cut falls
  // between granules and the members keep their order. With R rooms, A rounded up to the alignment, and G granules, those to
  // the least common multiple with it, C is at most each of these, rounded up to a multiple of what must divide it:
  //   sum(R + G - 1) / n, to a multiple of all G     and     max(A, sum(A) / floor((n + 1) / 2)).
  // Members that are all whole are placed by size instead, and C is at most max(A) + sum(A) / n.
  BucketLayout(std::vector<BucketParameter> members, const Strategy& strategy, const Mesh& mesh, int64_t rank,
               int64_t alignment_elements, bool by_rows, int64_t bucket_multiple = 1);

  const std::vector<BucketParameter>& members() const { return members_; }
  int64_t numel() const { return numel_; }
  // Whether units compute in another buffer, of as many elements, since members do not lie in one piece in the bucket.
  bool is_interleaved() const { return is_interleaved_; }
  // Copy between the two. `pack` fills a bucket that is zero.
  void pack(const at::Tensor& compute, const at::Tensor& bucket) const;
  void unpack(const at::Tensor& bucket, const at::Tensor& compute) const;
  int64_t rank() const { return rank_; }  // this one, in the mesh

  // Law: over the ranks along the splitting axes, the intervals are disjoint and cover [0, numel()).
  const LocalView& parameter() const { return parameter_; }
  const LocalView& accumulated() const { return accumulated_; }
  const LocalView& state() const { return state_; }
  const LocalView& whole() const { return whole_; }
  // What stays between forward and backward, as an interval alone, and the gather that makes the bucket whole again; null where
  // the row has no such layout.
  const Stage* between() const { return between_ ? &*between_ : nullptr; }

  // Gathers are one collective.
  const CollectiveStep& unshard() const { return unshard_; }
  const CollectiveStep& all_gather_updated() const { return all_gather_updated_; }
  // Sums go axis by axis, the innermost of the mesh first, so that every strategy adds in the same order.
  const std::vector<Stage>& reduce() const { return reduce_; }            // produced -> accumulated
  const std::vector<Stage>& reduce_last() const { return reduce_last_; }  // accumulated -> state

  // Where the elements of a member's whole parameter are, on all ranks, when each holds a view's part of the bucket.
  Placement placement(const BucketParameter& member, const LocalView& view) const;

  // What this rank holds of every member, by offset; `local` is the buffer that the view describes. Where a member has several
  // segments there, which only happens in views of more than the optimizer's part, its shard is a copy.
  std::vector<Shard> shards(const LocalView& view, const at::Tensor& local) const;

  // The part of `layout` that this rank holds: its interval alone, or all of it.
  LocalView interval(const Layout& layout, const Mesh& mesh, int64_t rank) const;
  LocalView view(const Layout& layout, const Mesh& mesh, int64_t rank) const;

 private:
  // Pieces of one member, all of one size, that lie in equal distances in the bucket, each as a segment describes it.
  struct Block {
    int64_t compute = 0;  // where the first piece begins there
    Segment first;        // local: in the bucket
    int64_t pieces = 1, distance = 0;
  };

  void place(int64_t alignment, int64_t cuts, int64_t multiple);
  int64_t place_in_order(int64_t alignment);
  int64_t place_granules(int64_t alignment, int64_t cuts, int64_t multiple);
  int64_t place_whole(int64_t alignment, int64_t cuts, int64_t multiple);
  void place_rows(int64_t alignment, const Strategy& strategy, int64_t cuts, int64_t multiple);
  void add_to_blocks(const Segment& segment, int64_t distance, size_t& last);
  void each_block(const at::Tensor& compute, const at::Tensor& bucket,
                  const std::function<void(const at::Tensor& compute, const at::Tensor& bucket)>& visit) const;
  std::vector<Stage> sum_path(Layout from, const Layout& to, const Mesh& mesh, int64_t rank) const;

  Mesh mesh_;
  int64_t rank_ = 0;
  std::vector<BucketParameter> members_;
  std::vector<size_t> by_offset_;  // members
  std::vector<Segment> placed_;    // every element of the bucket but padding, by offset
  bool is_by_rows_ = false, is_interleaved_ = false;
  std::vector<Block> blocks_;  // of this rank, where members are cut by rows
  int64_t numel_ = 0;
  LocalView parameter_, accumulated_, state_, whole_;
  CollectiveStep unshard_, all_gather_updated_;
  std::optional<Stage> between_;
  std::vector<Stage> reduce_, reduce_last_;
};

}  // namespace shardproof
