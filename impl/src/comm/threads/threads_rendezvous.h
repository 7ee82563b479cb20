// One collective on its way: the calls that have arrived, and what is known of each rank's part in it.
#pragma once

#include <c10/core/Event.h>

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "comm/threads/threads_exchange.h"
#include "shardproof/comm/comm.h"

namespace shardproof::threads {

// A copy of what was given and a mark on what will be received, for completions other than eager: until the call
// completes the output is garbage, and afterwards it is known whether anything was touched meanwhile.
class InFlight {
 public:
  explicit InFlight(const Call& call);

  const std::byte* snapshot() const { return snapshot_.get(); }
  // What the rank did to its tensors while they were in flight, e.g. "changed element 3 of its input".
  std::optional<std::string> find_input_change(const Call& call) const;
  std::optional<std::string> find_output_write(const Call& call) const;

 private:
  std::unique_ptr<std::byte[]> snapshot_;
};

// A rank's part.
struct Part {
  int64_t rank = -1;  // in the world
  bool arrived = false;
  bool waiting = false;  // the rank is blocked in this call
  bool waited = false;  // the rank has returned from its wait
  bool late = false;    // takes effect when it is waited for
  bool done = false;    // the output is final
  int64_t number = 0;   // of the rank's calls
  Call call;
  std::string purpose;  // CallLabel's
  std::optional<InFlight> in_flight;
  std::optional<c10::Event> ready;  // on a device: what the rank had queued when it called
};

struct Rendezvous {
  std::string group;
  int64_t sequence = 0;
  std::vector<Part> parts;  // by rank in the group; for point to point the sender, then the receiver
  int64_t arrived = 0;
  // Made when the last call arrived.
  std::unique_ptr<Exchange> exchange;
  std::optional<c10::Event> done;  // on a device: the exchange

  bool complete() const { return arrived == static_cast<int64_t>(parts.size()); }
  // "all_reduce(sum, float32 x 8), call 3 on 'world'"
  std::string title(int64_t part) const;
};

// How the call of `part` contradicts those that arrived before it, naming both ranks; nothing if it does not.
std::optional<std::string> find_mismatch(const Rendezvous& rendezvous, int64_t part);

// Successive collectives of the same ranks: the k-th call of one meets the k-th of every other.
class Stream {
 public:
  Stream(std::string group, std::vector<int64_t> ranks);
  // The rendezvous that the next call of `part` belongs to.
  std::shared_ptr<Rendezvous> join(int64_t part);

 private:
  std::string group_;
  std::vector<int64_t> ranks_;
  std::vector<int64_t> next_;  // by part
  int64_t first_ = 0;          // sequence number of open_.front()
  std::deque<std::shared_ptr<Rendezvous>> open_;
};

// What the communicators of one group share.
struct Group {
  Group(uint64_t id, std::string name, std::vector<int64_t> ranks);

  const uint64_t id;
  const std::string name;
  const std::vector<int64_t> ranks;  // in the world
  Stream collectives;
  std::map<std::tuple<int64_t, int64_t, int64_t>, Stream> channels;  // by source, target, tag
  at::Tensor shared;  // while ranks take it over; written by the first of them, between barriers
};

}  // namespace shardproof::threads
