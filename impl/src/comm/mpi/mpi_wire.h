// The headers that ranks send each other besides their data: one stream of small messages between each two ranks of a group, in
// order.
#pragma once

#include <mpi.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof::mpi {

enum class Kind : int32_t {
  collective,  // "I make this call": the k-th of each rank matches the k-th of every other
  send,        // "this is for your recv with that tag"
  accept,      // "my recv was called": answers a send
  finite,      // "whether my part of that sum is finite": answers a `collective` that asks
  abandon,     // "I make no more calls in this group, because of ...": the body threw
  drained,     // after abandon: "nothing of mine is on its way any more"
};

struct Header {
  Kind kind = Kind::collective;
  Op op = Op::barrier;
  Reduce reduce = Reduce::sum;
  int32_t dtype = 0;
  int64_t sequence = 0;  // of the group's collectives; of the sends between two ranks
  int64_t numel = 0;
  int64_t root = -1;             // broadcast
  int64_t tag = 0;               // send
  int64_t send_bytes = 0, recv_bytes = 0;  // to, and from, the rank that gets this header
  int64_t body_bytes = 0;        // that follow: the data itself where it is small, the text of abandon
  double factor = 1;         // Finish::factor
  uint64_t purpose_hash = 0;
  std::array<char, 96> purpose = {};  // of `collective`: the beginning of what it is for (CallLabel)
  bool asks_finite = false;  // the sender's call is not done before it has got `finite`
  bool finite = true;        // of `finite`
};

struct Message {
  Header header;
  std::vector<std::byte> body;
};

// Data up to this size are eager: they travel with the header that announces them. Open MPI itself sends messages of this size
// at once, without asking the receiver.
constexpr int64_t kBodyBytesMax = 3728;
constexpr bool is_eager(int64_t bytes) {
  return bytes <= kBodyBytesMax;
}
// Data of other sizes are sent in chunks of this size, but for terms of sums.
constexpr int64_t kChunkBytes = 8 << 20;
constexpr int64_t kMessageBytesMax = static_cast<int64_t>(sizeof(Header)) + kBodyBytesMax;

// Headers have tag 0, and data have the tags above.
constexpr int kHeaderTag = 0;
int data_tag(int64_t sequence, int phase);
int send_data_tag(int64_t sequence);

// Throws BrokenInvariant naming the call unless `code` is success.
void check_mpi(int code, const char* what);

// The call that a header announces, e.g. "all_gather(float32 x 8)".
std::string describe(const Header& header);

}  // namespace shardproof::mpi
