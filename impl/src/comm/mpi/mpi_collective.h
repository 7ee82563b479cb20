// A collective: a header to and from every other rank, then the data that both headers announce.
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
  enum class Match { pending, found, failed };
  // What this rank has to do with one other.
  struct Side {
    Match match = Match::pending;
    std::byte* send_data = nullptr;
    std::byte* recv_data = nullptr;  // null where what arrives is a term of a sum
    int64_t send_bytes = 0, recv_bytes = 0;
    std::vector<std::byte> body;     // a small term of a sum, which came with the header
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
  void post_headers();
  void match_header(int64_t peer);
  std::string find_mismatch(int64_t peer, const Header& theirs) const;
  void start_flows(int64_t peer, Message message);
  // The terms of the sum that have come from everywhere.
  void add_up();
  void add_chunk(int64_t chunk);
  bool all_matched() const;
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
