// A collective: a header to and from every other rank, then the data that both headers announce.
#pragma once

#include <ATen/core/Tensor.h>

#include "comm/finished_sum.h"
#include "comm/mpi/mpi_operation.h"
#include "internal/comm/collective_plan.h"

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
    bool owes_finite = false, awaits_finite = false;
    // all_reduce in slices: this rank's slice of the sum, and the peer's.
    bool sums_open = false;
    Flow out_sum, in_sum;

    bool is_idle() const { return out.done() && in.done() && !owes_finite && !awaits_finite; }
    bool sums_idle() const { return sums_open && out_sum.done() && in_sum.done(); }
  };

  // Where elements lie in memory.
  struct Bytes {
    std::byte* data;
    int64_t count;
  };
  Side& side_of(int64_t peer) { return sides_[static_cast<size_t>(peer)]; }
  const Side& side_of(int64_t peer) const { return sides_[static_cast<size_t>(peer)]; }
  Bytes bytes_of(const at::Tensor& tensor, ElementRange range) const;
  void open_sides();
  void copy_own();
  void post_headers();
  Header announce(int64_t peer);
  void match_header(int64_t peer);
  std::string find_mismatch(int64_t peer, const Header& theirs) const;
  void start_side(int64_t peer, Message message);
  void start_input(int64_t peer, Message message);
  bool advance_side(int64_t peer);
  void exchange_finite(int64_t peer);
  // Adds chunks of which all terms are there, but only a few at once, since the caller holds the engine's lock.
  void add_up();
  void add_chunk(int64_t chunk);
  bool is_there(int64_t rank, int64_t chunk) const;
  bool all_matched() const;
  bool is_added() const { return chunks_added_ == chunks_; }
  bool exchange_sums();
  void open_sums(int64_t peer);

  const int64_t element_bytes_;
  const bool sliced_;  // all_reduce: everybody adds up a slice and gives it to all
  const CollectivePlan plan_;
  const int64_t chunk_bytes_;  // of what is sent
  std::vector<Side> sides_;  // by rank; of this rank's own side only what it gives to itself, and takes
  // Of a sum: where this rank's own term lies, where the result goes, how large it is, and how much is done.
  std::byte* own_term_ = nullptr;
  std::byte* result_ = nullptr;
  int64_t sum_bytes_ = 0, chunks_ = 0, chunks_added_ = 0;
  SumFinish finish_;
  bool all_finite_ = true;  // this rank's sum, and those of the ranks that have told
};

}  // namespace shardproof::mpi
