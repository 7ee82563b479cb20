#include "comm/mpi/mpi_collective.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"
#include "testing/base/stream_copy.h"

namespace shardproof::mpi {
namespace {

constexpr int64_t kCopyChunkBytes = 8 << 20;
// Terms of a sum come in chunks that are added up while they are in the cache.
constexpr int64_t kSumChunkBytes = 512 << 10;
constexpr int64_t kSlots = 2;
// From this size on, what a rank gives to itself goes past the caches, since it would leave them before it is read.
constexpr size_t kStreamedBytesMin = 4 << 20;

bool is_eager(int64_t bytes) {
  return bytes <= kBodyBytesMax;
}

// The second one goes on even where the first one is not through.
bool advance_both(Flow& first, Flow& second) {
  const bool through = first.advance();
  return second.advance() && through;
}

int64_t element_bytes(const Call& call) {
  return static_cast<int64_t>(c10::elementSize(dtype(call)));
}

}  // namespace

Collective::Collective(std::shared_ptr<Group> group, Call given)
    : Operation(std::move(group), std::move(given)),
      element_bytes_(element_bytes(call)),
      sliced_(call.op == Op::all_reduce && !is_eager(numel(call) * element_bytes_)),
      plan_(call, group_->rank(), group_->size(), sliced_ ? AllReduceBy::slices : AllReduceBy::whole) {
  SHARD_REQUIRE(!plan_.sums() || can_reduce(dtype(call)), "mpi", "{} on '{}': {} cannot be reduced; convert it first",
                describe(call), group_->name(), dtype_name(dtype(call)));
  sequence = group_->next_sequence();
  open_sides();
  post_headers();
  copy_own();
}

Collective::Bytes Collective::bytes_of(const at::Tensor& tensor, ElementRange range) const {
  if (!tensor.defined()) return {nullptr, 0};
  auto* const data = static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
  return {data + range.begin * element_bytes_, range.length * element_bytes_};
}

void Collective::open_sides() {
  sides_.resize(static_cast<size_t>(group_->size()));
  sides_[static_cast<size_t>(group_->rank())].match = Match::found;
  for (int64_t peer = 0; peer < group_->size(); ++peer) {
    Side& side = sides_[static_cast<size_t>(peer)];
    const Bytes to_send = bytes_of(call.input, plan_.send_range(peer));
    side.send_data = to_send.data, side.send_bytes = to_send.count;
    side.recv_bytes = plan_.recv_range(peer).length * element_bytes_;
    if (!plan_.sums()) side.recv_data = bytes_of(call.output, plan_.recv_range(peer)).data;
  }
  if (!plan_.sums()) return;
  own_term_ = bytes_of(call.input, plan_.summed()).data;
  result_ = bytes_of(call.output, plan_.result()).data;
  sum_bytes_ = plan_.summed().length * element_bytes_;
  chunks_ = (sum_bytes_ + kSumChunkBytes - 1) / kSumChunkBytes;
}

void Collective::copy_own() {
  const Side& own = sides_[static_cast<size_t>(group_->rank())];
  if (plan_.sums() || own.recv_bytes == 0 || own.recv_data == own.send_data) return;
  const auto bytes = static_cast<size_t>(own.recv_bytes);
  if (bytes < kStreamedBytesMin)
    std::memcpy(own.recv_data, own.send_data, bytes);
  else
    stream_copy(own.recv_data, own.send_data, bytes);
}

void Collective::post_headers() {
  for (int64_t k = 1; k < group_->size(); ++k) {
    const int64_t peer = (group_->rank() + k) % group_->size();
    const Side& side = sides_[static_cast<size_t>(peer)];
    Header announced = header(Kind::collective);
    announced.send_bytes = side.send_bytes;
    announced.recv_bytes = side.recv_bytes;
    if (is_eager(side.send_bytes)) announced.body_bytes = side.send_bytes;
    group_->post(peer, announced, side.send_data);
  }
}

std::string Collective::find_mismatch(int64_t peer, const Header& theirs) const {
  const Header mine = header(Kind::collective);
  const Side& side = sides_[static_cast<size_t>(peer)];
  const bool same_types = mine.op == Op::barrier || mine.dtype == theirs.dtype;
  const bool same = mine.op == theirs.op && mine.reduce == theirs.reduce && same_types && mine.numel == theirs.numel &&
                    mine.root == theirs.root;
  const bool fits = side.send_bytes == theirs.recv_bytes && side.recv_bytes == theirs.send_bytes;
  if (same && fits) return "";
  const std::string sizes =
      same ? fmt::format(" (rank {0} sends {1} bytes to rank {2}, which takes {3}; rank {2} sends {4}, rank {0} takes {5})",
                         group_->world_ranks()[static_cast<size_t>(group_->rank())], side.send_bytes,
                         group_->world_ranks()[static_cast<size_t>(peer)], theirs.recv_bytes, theirs.send_bytes,
                         side.recv_bytes)
           : "";
  const auto name = [&](int64_t rank, const std::string& text) {
    return fmt::format("rank {} calls {}", group_->world_ranks()[static_cast<size_t>(rank)], text);
  };
  std::string first = name(group_->rank(), describe(call)), second = name(peer, describe(theirs));
  if (peer < group_->rank()) std::swap(first, second);
  return fmt::format(
      "ranks disagree on call {} of '{}'{}: {}, {}{}; all ranks of a group must make the same calls in the same order",
      sequence, group_->name(), label.empty() ? "" : fmt::format(", for {}", label), first, second, sizes);
}

void Collective::match_header(int64_t peer) {
  Side& side = sides_[static_cast<size_t>(peer)];
  if (auto message = group_->match_collective(peer, sequence)) {
    std::string mismatch = find_mismatch(peer, message->header);
    side.match = mismatch.empty() ? Match::found : Match::failed;
    if (mismatch.empty()) return start_flows(peer, std::move(*message));
    fail(std::move(mismatch), false);
  } else if (const Message* last = group_->abandoned(peer)) {
    side.match = Match::failed;
    fail_abandoned(peer, *last);
  }
}

void Collective::start_flows(int64_t peer, Message message) {
  Side& side = sides_[static_cast<size_t>(peer)];
  const int tag = data_tag(sequence, 0);
  const int64_t chunk_bytes = plan_.sums() ? kSumChunkBytes : kCopyChunkBytes;
  if (!is_eager(side.send_bytes))
    side.out = Flow(group_->comm(), peer, tag, Flow::Way::out, side.send_data, side.send_bytes, chunk_bytes);
  if (is_eager(side.recv_bytes)) {
    if (plan_.sums())
      side.body = std::move(message.body);
    else if (side.recv_bytes > 0)
      std::memcpy(side.recv_data, message.body.data(), message.body.size());
    return;
  }
  if (plan_.sums()) {
    side.scratch.resize(static_cast<size_t>(kSlots * std::min(chunk_bytes, side.recv_bytes)));
    side.in = Flow(group_->comm(), peer, tag, Flow::Way::in, side.scratch.data(), side.recv_bytes, chunk_bytes, kSlots);
  } else {
    side.in = Flow(group_->comm(), peer, tag, Flow::Way::in, side.recv_data, side.recv_bytes, chunk_bytes);
  }
}

bool Collective::all_matched() const {
  return std::all_of(sides_.begin(), sides_.end(), [](const Side& side) { return side.match == Match::found; });
}

void Collective::add_chunk(int64_t chunk) {
  const int64_t begin = chunk * kSumChunkBytes, length = std::min(kSumChunkBytes, sum_bytes_ - begin);
  std::vector<const std::byte*> terms;
  terms.reserve(sides_.size());
  for (const int64_t rank : order_of_terms(group_->size())) {
    const Side& side = sides_[static_cast<size_t>(rank)];
    if (rank == group_->rank())
      terms.push_back(own_term_ + begin);
    else
      terms.push_back(is_eager(sum_bytes_) ? side.body.data() : side.in.at(chunk));
  }
  device_math(at::kCPU).reduce(element_type(dtype(call)), call.reduce, terms, length / element_bytes_, result_ + begin);
}

void Collective::add_up() {
  const auto is_there = [&](const Side& side) {
    return &side == &sides_[static_cast<size_t>(group_->rank())] || is_eager(sum_bytes_) ||
           side.in.chunks_through() > chunks_added_;
  };
  while (chunks_added_ < chunks_ && std::all_of(sides_.begin(), sides_.end(), is_there)) {
    add_chunk(chunks_added_++);
    for (Side& side : sides_) {
      side.in.release(chunks_added_);
      side.in.advance();
    }
  }
}

// The second half of an all-reduce in slices. A peer's slice of the sum arrives where the terms for that peer lay, so those
// must have left.
bool Collective::exchange_sums() {
  bool through = true;
  for (int64_t peer = 0; peer < group_->size(); ++peer) {
    Side& side = sides_[static_cast<size_t>(peer)];
    if (peer == group_->rank()) continue;
    if (!side.sums_open && side.out.done() && chunks_added_ == chunks_) {
      side.sums_open = true;
      const int tag = data_tag(sequence, 1);
      side.out_sum = Flow(group_->comm(), peer, tag, Flow::Way::out, result_, sum_bytes_, kCopyChunkBytes);
      const Bytes to_receive = bytes_of(call.output, plan_.recv_sum_range(peer));
      side.in_sum = Flow(group_->comm(), peer, tag, Flow::Way::in, to_receive.data, to_receive.count, kCopyChunkBytes);
    }
    through &= side.sums_open && advance_both(side.out_sum, side.in_sum);
  }
  return through;
}

bool Collective::advance() {
  if (done_) return true;
  bool through = true;
  for (int64_t peer = 0; peer < group_->size(); ++peer) {
    Side& side = sides_[static_cast<size_t>(peer)];
    if (side.match == Match::pending) match_header(peer);
    if (peer != group_->rank()) through &= side.match != Match::pending && advance_both(side.out, side.in);
  }
  if (plan_.sums() && all_matched()) {
    add_up();
    through &= chunks_added_ == chunks_;
    if (sliced_) through = exchange_sums() && through;
  }
  // The peers that agreed send all the same.
  if (!error_.empty())
    for (Side& side : sides_) side.in.release(side.in.chunks_through());
  if (!through) return false;
  done_ = error_.empty();
  return true;
}

std::vector<int64_t> Collective::missing() const {
  std::vector<int64_t> ranks;
  for (size_t peer = 0; peer < sides_.size(); ++peer)
    if (sides_[peer].match == Match::pending) ranks.push_back(group_->world_ranks()[peer]);
  if (!ranks.empty()) return ranks;
  for (size_t peer = 0; peer < sides_.size(); ++peer) {
    const Side& side = sides_[peer];
    const bool idle =
        static_cast<int64_t>(peer) == group_->rank() ||
        (side.out.done() && side.in.done() && side.out_sum.done() && side.in_sum.done() && (!sliced_ || side.sums_open));
    if (!idle) ranks.push_back(group_->world_ranks()[peer]);
  }
  return ranks;
}

}  // namespace shardproof::mpi
