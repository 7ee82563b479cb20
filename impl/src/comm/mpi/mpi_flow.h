// Bytes on their way between this rank and one other, in chunks.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>

namespace shardproof::mpi {

class Flow {
 public:
  enum class Way { out, in };

  Flow() = default;  // nothing, and through with it
  // `slots` above 0: chunk c lies at slot c % slots of `data`, and must be released before its slot is used again.
  Flow(MPI_Comm comm, int64_t peer, int tag, Way way, std::byte* data, int64_t bytes, int64_t chunk_bytes, int64_t slots = 0);

  // Posts what may be posted, looks what has arrived. True when the last chunk is through.
  bool advance();
  int64_t chunks_through() const { return through_; }
  void release(int64_t chunks) { released_ = chunks; }
  bool done() const { return through_ == chunks_; }

  std::byte* at(int64_t chunk) const { return data_ + (slots_ > 0 ? chunk % slots_ : chunk) * chunk_bytes_; }
  int64_t length(int64_t chunk) const { return std::min(chunk_bytes_, bytes_ - chunk * chunk_bytes_); }

 private:
  void post();

  MPI_Comm comm_ = MPI_COMM_NULL;
  int peer_ = -1, tag_ = 0;
  Way way_ = Way::out;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0, chunk_bytes_ = 1, slots_ = 0, chunks_ = 0;
  int64_t posted_ = 0, through_ = 0, released_ = 0;
  std::deque<MPI_Request> requests_;  // of chunks [through_, posted_)
};

}  // namespace shardproof::mpi
