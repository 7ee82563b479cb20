// One bucket's gradient on its way through a path of sums: reduce-scatters and all-reduces, one mesh axis after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "sharding/bucket_layout.h"
#include "sharding/memory_ledger.h"
#include "shardproof/comm/mesh_comm.h"

namespace shardproof {

struct ReductionDtypes {
  at::ScalarType gradient = at::kFloat;  // of the result, and between two sums
  at::ScalarType reduce = at::kFloat;    // on the wire, and of each addition
  bool float32_sums = false;
  bool average = false;  // each sum is divided by the size of its group, in `reduce`; or its terms are, where that is exact
  bool wide() const { return float32_sums && reduce != at::kFloat; }
};

class Reduction {
 public:
  struct Options {
    double divide_terms = 1;      // terms of the first sum are divided by it
    double divide_result = 1;     // the last sum is divided by it, where its backend does so on the way (is_divided)
    bool find_bad_terms = false;  // only where finds_bad_terms()
    bool is_registered = false;   // `local` lies in memory that the first sum's group lent (own_memory)
  };
  // Starts the first sum of the path, which must not be empty. `local` holds the first layout's part, in `gradient` or
  // `reduce`; it is used up, and may be summed in place. Collective.
  Reduction(MeshComm& comms, MemoryLedger& memory, const std::vector<Stage>& path, const ReductionDtypes& dtypes,
            at::Tensor local, const Options& options);

  // Whether the first sum of such a path says when some rank's terms are not finite, and leaves the terms as they are, so that
  // they need not be read before. Collective.
  static bool finds_bad_terms(MeshComm& comms, const std::vector<Stage>& path, const ReductionDtypes& dtypes,
                              c10::Device device);

  // Memory of the first sum's group in which `local` may be produced, so that nothing is copied before the sum; undefined where
  // the group has none, or where the sum takes another dtype. Collective.
  static at::Tensor own_memory(MeshComm& comms, MemoryLedger& memory, const std::vector<Stage>& path,
                               const ReductionDtypes& dtypes, int64_t numel);

  // Waits for the sum under way.
  void await_sum();
  // Then returns this rank's terms of that sum if some rank's may not be finite, and otherwise an undefined tensor.
  at::Tensor take_suspects() { return std::move(suspects_); }
  // Then starts the path's next sum. Returns false when there is none.
  bool start_next();
  // Then this rank's part of the last layout, in `gradient`. Once.
  at::Tensor take() { return std::move(value_); }
  // Whether it has been divided by Options::divide_result.
  bool is_divided() const { return is_divided_; }

  // Of buffers that a backend may be reading or writing.
  int64_t bytes_in_flight() const;
  bool is_first() const { return next_ == 0; }  // of the path
  int64_t bytes_sent() const { return wire_.defined() ? static_cast<int64_t>(wire_.nbytes()) : 0; }

 private:
  void start_hop();
  void start_sum(double factor);
  Finish choose_finish();
  double take_factor();
  at::Tensor on_the_wire(const at::Tensor& values);
  void start_wide_sum();
  at::Tensor sum_wide();
  at::Tensor cast(const at::Tensor& values, at::ScalarType dtype, MemoryKind kind);
  const Stage& stage() const { return path_[next_]; }
  Comm& group() { return comms_.along(stage().collective.axes); }

  MeshComm& comms_;
  MemoryLedger& memory_;
  const std::vector<Stage>& path_;
  ReductionDtypes dtypes_;
  bool wide() const { return dtypes_.wide(); }

  size_t next_ = 0;
  Options options_;        // `divide_terms` and `is_registered` are of the first sum, and reset when it begins
  double divide_sum_ = 1;  // what is left to divide by after the sum under way
  bool is_divided_ = false;
  std::shared_ptr<bool> all_finite_;  // of the sum under way; null where nobody asked
  at::Tensor value_;             // between sums
  at::Tensor wire_, received_;   // during one
  at::Tensor suspects_;
  Work work_;
};

}  // namespace shardproof
