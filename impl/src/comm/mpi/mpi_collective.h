// A collective: a word with every other rank, then whatever both have agreed to move.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/mpi/mpi_operation.h"
#include "testing/comm/collective_plan.h"

namespace shardproof::mpi {

class Collective final : public Operation {
 public:
  Collective(std::shared_ptr<Group> group, Call call);
  bool advance() override;
  std::vector<int64_t> missing() const override;

 private:
  enum class Meeting { awaited, agreed, none };
  // What this rank has to do with one other.
  struct Side {
    Meeting meeting = Meeting::awaited;
    std::byte* gives = nullptr;
    std::byte* takes = nullptr;  // null where what is taken goes into a sum
    int64_t gives_bytes = 0, takes_bytes = 0;
    std::vector<std::byte> body;     // what came with the word, of a sum
    std::vector<std::byte> scratch;  // where chunks of a sum arrive
    Flow out, in;
    Flow out_sum, in_sum;  // all_reduce: this rank's slice of the sum, and the peer's
    bool sums_open = false;
  };

  // Where elements lie in memory.
  struct Bytes {
    std::byte* data;
    int64_t count;
  };
  Bytes bytes_of(const at::Tensor& tensor, ElementRange range) const;
  void open_sides();
  void copy_own();
  void tell_all();
  void meet(int64_t peer);
  std::string find_mismatch(int64_t peer, const Header& theirs) const;
  void agree(int64_t peer, Message message);
  // The terms of the sum that have come from everywhere.
  void add_up();
  void add_chunk(int64_t chunk);
  bool all_agreed() const;
  bool exchange_sums();

  const int64_t element_bytes_;
  const bool sliced_;  // all_reduce: everybody adds up a slice and gives it to all
  const CollectivePlan plan_;
  std::vector<Side> sides_;  // by rank; of this rank's own side only what it gives to itself, and takes
  // Of a sum: where this rank's own term lies, where the result goes, how large it is, and how much is done.
  std::byte* own_term_ = nullptr;
  std::byte* result_ = nullptr;
  int64_t sum_bytes_ = 0, chunks_ = 0, chunks_added_ = 0;
};

}  // namespace shardproof::mpi
