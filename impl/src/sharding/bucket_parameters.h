// Where the parameters of a bucket live. Between steps this rank holds the strategy's `parameter` layout; while the unit runs,
// the whole bucket:
//
//   sharded    --start_unshard-->  gathering  --finish_unshard-->  whole
//   whole      --reshard-->        sharded     the memory of the whole bucket is freed
//   whole      --reshard_within--> kept        a part of it stays between forward and backward
//   kept       --start_unshard-->  gathering   from that part, among fewer ranks
//   kept       --reshard-->        sharded
//
// Where the strategy keeps parameters whole, or all ranks see them in memory that they share, the states are the same and
// nothing is moved or freed.
//
// Buffers by name: `compute` all of the bucket's parameters, which are views of it; `gathered` the whole bucket, which is the
// same memory unless the bucket is interleaved: then it lives from a gather to its copy, or always where the strategy keeps
// parameters whole; `parameter` what rests between steps in the compute dtype (part of `gathered` unless the strategy shards
// it); `main` what the optimizer updates; `rounded` the same in the compute dtype, where main has a dtype of its own; `kept`
// what stays of `gathered` between forward and backward where that is neither all nor nothing. With Offload, main and rounded
// are in the host's memory.
//
// Getters wait for nothing. Whoever reads values behind an update awaits them first, or a check says so.
#pragma once

#include <ATen/core/Tensor.h>

#include <c10/core/Stream.h>

#include <optional>
#include <vector>

#include "sharding/bucket_part.h"

namespace shardproof {

enum class Residency { sharded, kept, gathering, whole };

// How main parameters are kept beside those that units compute with.
enum class Encoding {
  plain,     // not at all: main is a part of `parameter`
  beside,    // main has a dtype or place of its own, and `parameter` holds what it is in the compute dtype
  when_sent  // main has a dtype of its own, is all that this rank gives to a gather, and rests alone: `parameter` is undefined,
             // and each gather rounds main into this rank's place of `gathered`
};

class BucketParameters : private BucketPart {
 public:
  // Copies the parameters' values into the buffers, or fills those of meta parameters, and turns the parameters into views.
  // When rules.broadcast, rank 0's values along the axes of the sum win. Collective.
  BucketParameters(const BucketContext& context, const Initializer& initialize);
  ~BucketParameters();
  BucketParameters(const BucketParameters&) = delete;

  Residency residency() const { return residency_; }
  Encoding encoding() const { return encoding_; }

  // The whole bucket, gathered. `start` allocates and returns at once. Nothing when already there. Returns whether all ranks of
  // the mesh have to gather, too; replicas need not.
  bool start_unshard();
  void finish_unshard();
  // Releases the memory of `compute` while autograd keeps aliases of it, and makes the module's parameters unreadable. Throws
  // Error while a gather is in flight.
  void reshard();
  // The same, but groups of `ranks` neighbours along the axis of the gather keep the parameters between them until the next.
  void reshard_within(int64_t ranks);
  // The same, but what the strategy's row keeps between forward and backward stays.
  void reshard_between();
  // Throws Error, which names a parameter of the module that is no view of this memory any more, or that somebody has written
  // to where the optimizer would not see it.
  void require_own() const;
  bool frees_compute() const { return layout_.unshard().step != Step::none && !side_by_side(); }
  // Parameters are sharded, and whole all the time.
  bool side_by_side() const { return layout_.unshard().step != Step::none && rules_.gather == Gather::side_by_side; }
  int64_t compute_bytes() const;

  // Waits for what all_gather_updated started. Then parameters may be read.
  void await_updated();
  // Waits until the device has the values from before, too, where main() is on the host. Then that may be read and written.
  void await_main();
  const at::Tensor& parameter() const;
  int64_t resting_bytes() const;  // of `parameter`, or of `main` where it alone rests
  // Each parameter in the compute dtype. Where units find it, if the strategy keeps parameters whole; copies, with
  // Encoding::when_sent, or where the strategy keeps more of an interleaved bucket than it updates, but not all.
  std::vector<Shard> shards() const;
  const at::Tensor& main() const;
  // Where main() goes in the compute dtype; undefined where it has that dtype, or is rounded when it is sent.
  const at::Tensor& rounded() const;
  // Memory for the optimizer's state of so many elements, where main() is.
  at::Tensor allocate_state(int64_t numel) const;
  // A tensor in the memory of `values`, on the CPU, that counts as such a state from now on.
  at::Tensor adopt_state(const at::Tensor& values) const;
  // After main() was written: starts to bring `parameter` up to date on every rank, and returns at once. `is_rounded`:
  // rounded() is up to date already.
  void all_gather_updated(bool is_rounded = false);
  // Waits for that; with Publish::at_first_use it instead makes the module's parameters unreadable until somebody waits.
  void end_update();
  // After main() has got back what it held when `parameter` was copied: the same without communication. The copy is undefined
  // where this rank holds no more of the parameters than main().
  void put_back(const at::Tensor& parameter);

 private:
  int64_t versions() const;
  Encoding choose_encoding() const;
  at::Tensor round_main_into(const at::Tensor& place) const;
  at::Tensor to_gather() const;
  void write_own_part(bool is_rounded);
  void mark_changed();
  bool arrives() const { return updated_ == Updated::arriving || updated_ == Updated::hidden; }
  // Of an interleaved bucket that stays gathered: what was written to `gathered` gets where units compute.
  void unpack_updated();
  std::vector<at::Tensor> unreadable_parameters(const std::string& why) const;
  Comm& neighbours(int64_t ranks) const;
  void keep(Comm& group, Interval part);
  void allocate_parameters();
  void allocate_main();
  at::Tensor own_part() const;  // the state's part of `parameter`
  void fill_from_values();
  void fill_from_initializer(const Initializer& initialize);
  void point_parameters_at(const std::vector<at::Tensor>& data) const;

  // How far the last update is.
  enum class Updated {
    met,       // it is over, and so it is for the neighbours whose parts lie side by side with this rank's
    written,   // it is over on this rank; neighbours may still write
    arriving,  // the parts of other ranks are under way into `parameter`
    hidden     // the same, and until somebody waits the module's parameters are unreadable
  };
  // Who has waited for a gather. A capture knows no events from outside of it.
  struct Awaited {
    enum class In { steps, capture };
    c10::Stream on;
    In in;
  };
  struct Kept {
    at::Tensor part;
    Comm* group;  // which has all of it between its ranks
  };

  const Encoding encoding_ = choose_encoding();
  Residency residency_ = Residency::sharded;
  std::vector<at::Tensor> readable_;    // what the parameters are while the bucket is whole: views of compute_
  std::vector<at::Tensor> unreadable_;  // what they are while it is not
  Work unshard_work_;
  std::optional<Awaited> awaited_;  // the last gather
  Updated updated_ = Updated::written;
  Work update_work_;  // the gather of updated values into parameter_
  at::Tensor compute_, gathered_, parameter_, main_, rounded_;
  std::optional<Kept> kept_;
  HostTransfer upload_;   // of parameters, to the device
  int64_t versions_ = 0;  // of the parameters, as autograd counts changes
};

}  // namespace shardproof
