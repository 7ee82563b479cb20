#include "comm/mpi/mpi_flow.h"

#include "comm/mpi/mpi_wire.h"

namespace shardproof::mpi {
namespace {
constexpr size_t kPostedMax = 4;
}

Flow::Flow(MPI_Comm comm, int64_t peer, int tag, Way way, std::byte* data, int64_t bytes, int64_t chunk_bytes, int64_t slots)
    : comm_(comm),
      peer_(static_cast<int>(peer)),
      tag_(tag),
      way_(way),
      data_(data),
      bytes_(bytes),
      chunk_bytes_(chunk_bytes),
      slots_(slots),
      chunks_((bytes + chunk_bytes - 1) / chunk_bytes) {}

void Flow::post() {
  MPI_Request request = MPI_REQUEST_NULL;
  const int count = static_cast<int>(length(posted_));
  const int code = way_ == Way::out ? MPI_Isend(at(posted_), count, MPI_BYTE, peer_, tag_, comm_, &request)
                                    : MPI_Irecv(at(posted_), count, MPI_BYTE, peer_, tag_, comm_, &request);
  check_mpi(code, way_ == Way::out ? "MPI_Isend" : "MPI_Irecv");
  requests_.push_back(request);
  ++posted_;
}

bool Flow::advance() {
  while (posted_ < chunks_ && requests_.size() < kPostedMax && (slots_ == 0 || posted_ < released_ + slots_)) post();
  while (!requests_.empty()) {
    int through = 0;
    check_mpi(MPI_Test(&requests_.front(), &through, MPI_STATUS_IGNORE), "MPI_Test");
    if (!through) break;
    requests_.pop_front();
    ++through_;
    if (posted_ < chunks_ && (slots_ == 0 || posted_ < released_ + slots_)) post();
  }
  return done();
}

}  // namespace shardproof::mpi
