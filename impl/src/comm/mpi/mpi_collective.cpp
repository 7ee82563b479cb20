#include "comm/mpi/mpi_collective.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "comm/disagreement.h"
#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"

namespace shardproof::mpi {
namespace {

// Terms of a sum come in chunks that are added up while they are in the cache.
constexpr int64_t kSumChunkBytes = 512 << 10;
constexpr int64_t kSlots = 2;
// How many bytes a look adds, since the engine's other callers wait for its end.
constexpr int64_t kBytesAtOnce = 8 << 20;

int64_t element_bytes(const Call& call) {
  return static_cast<int64_t>(c10::elementSize(dtype(call)));
}

}  // namespace

Collective::Collective(std::shared_ptr<Group> group, Call given)
    : Operation(std::move(group), std::move(given)),
      element_bytes_(element_bytes(call)),
      sliced_(call.op == Op::all_reduce && !is_eager(numel(call) * element_bytes_)),
      plan_(call, group_->rank(), group_->size(), sliced_ ? AllReduceBy::slices : AllReduceBy::whole),
      chunk_bytes_(plan_.sums() ? kSumChunkBytes : kChunkBytes),
      finish_{call.finish.factor, call.finish.all_finite != nullptr} {
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
  const Side& own = side_of(group_->rank());
  if (!plan_.sums() && own.recv_data != own.send_data && own.recv_bytes > 0)
    std::memcpy(own.recv_data, own.send_data, static_cast<size_t>(own.recv_bytes));
}

void Collective::post_headers() {
  for (int64_t k = 1; k < group_->size(); ++k) {
    const int64_t peer = (group_->rank() + k) % group_->size();
    group_->post(peer, announce(peer), side_of(peer).send_data);
  }
}

Header Collective::announce(int64_t peer) {
  Side& side = side_of(peer);
  Header announced = header(Kind::collective);
  announced.send_bytes = side.send_bytes;
  announced.recv_bytes = side.recv_bytes;
  announced.factor = finish_.factor;
  // Where every rank adds up everything, it knows by itself whether all is finite.
  announced.asks_finite = finish_.asks_finite && (call.op != Op::all_reduce || sliced_);
  if (is_eager(side.send_bytes)) announced.body_bytes = side.send_bytes;
  side.awaits_finite = announced.asks_finite;
  return announced;
}

std::string Collective::find_mismatch(int64_t peer, const Header& theirs) const {
  const Header mine = header(Kind::collective);
  const Side& side = sides_[static_cast<size_t>(peer)];
  const bool same_types = mine.op == Op::barrier || mine.dtype == theirs.dtype;
  const bool same = mine.op == theirs.op && mine.reduce == theirs.reduce && same_types && mine.numel == theirs.numel &&
                    mine.root == theirs.root && finish_.factor == theirs.factor && mine.purpose_hash == theirs.purpose_hash;
  const bool fits = side.send_bytes == theirs.recv_bytes && side.recv_bytes == theirs.send_bytes;
  if (same && fits) return "";
  const std::string sizes =
      same ? fmt::format(" (rank {0} sends {1} bytes to rank {2}, which takes {3}; rank {2} sends {4}, rank {0} takes {5})",
                         group_->world_ranks()[static_cast<size_t>(group_->rank())], side.send_bytes,
                         group_->world_ranks()[static_cast<size_t>(peer)], theirs.recv_bytes, theirs.send_bytes,
                         side.recv_bytes)
           : "";
  const std::string purpose = mine.purpose_hash == theirs.purpose_hash ? label : theirs.purpose.data();
  const auto in_world = [&](int64_t rank) { return group_->world_ranks()[static_cast<size_t>(rank)]; };
  return disagreement(sequence, group_->name(), {in_world(group_->rank()), describe(call), label},
                      {in_world(peer), describe(theirs), purpose}, sizes);
}

void Collective::match_header(int64_t peer) {
  Side& side = sides_[static_cast<size_t>(peer)];
  if (auto message = group_->match_collective(peer, sequence)) {
    std::string mismatch = find_mismatch(peer, message->header);
    side.match = mismatch.empty() ? Match::found : Match::failed;
    if (mismatch.empty()) return start_side(peer, std::move(*message));
    fail(std::move(mismatch), false);
  } else if (const Message* last = group_->abandoned(peer)) {
    side.match = Match::failed;
    fail_abandoned(peer, *last);
  }
}

void Collective::start_side(int64_t peer, Message message) {
  Side& side = side_of(peer);
  side.owes_finite = message.header.asks_finite;
  finish_.asks_finite |= message.header.asks_finite;
  if (!is_eager(side.send_bytes))
    side.out = Flow(group_->comm(), peer, data_tag(sequence, 0), Flow::Way::out, side.send_data, side.send_bytes, chunk_bytes_);
  start_input(peer, std::move(message));
}

void Collective::start_input(int64_t peer, Message message) {
  Side& side = side_of(peer);
  const bool is_small = is_eager(side.recv_bytes);
  const int tag = data_tag(sequence, 0);
  if (is_small && plan_.sums()) {
    side.body = std::move(message.body);
  } else if (is_small) {
    if (side.recv_bytes > 0) std::memcpy(side.recv_data, message.body.data(), message.body.size());
  } else if (plan_.sums()) {
    side.scratch.resize(static_cast<size_t>(kSlots * std::min(chunk_bytes_, side.recv_bytes)));
    side.in = Flow(group_->comm(), peer, tag, Flow::Way::in, side.scratch.data(), side.recv_bytes, chunk_bytes_, kSlots);
  } else {
    side.in = Flow(group_->comm(), peer, tag, Flow::Way::in, side.recv_data, side.recv_bytes, chunk_bytes_);
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
    const Side& side = side_of(rank);
    if (rank == group_->rank())
      terms.push_back(own_term_ + begin);
    else
      terms.push_back(is_eager(sum_bytes_) ? side.body.data() : side.in.at(chunk));
  }
  all_finite_ &= add_and_finish(device_math(at::kCPU), element_type(dtype(call)), call.reduce, std::move(terms),
                                length / element_bytes_, result_ + begin, finish_);
}

bool Collective::is_there(int64_t rank, int64_t chunk) const {
  const Side& side = side_of(rank);
  return rank == group_->rank() || is_eager(sum_bytes_) || side.in.chunks_through() > chunk;
}

void Collective::add_up() {
  const auto all_there = [this] {
    for (int64_t rank = 0; rank < group_->size(); ++rank)
      if (!is_there(rank, chunks_added_)) return false;
    return true;
  };
  // At least one, however many ranks there are.
  for (int64_t bytes = 0; bytes < kBytesAtOnce && !is_added() && all_there(); bytes += group_->size() * kSumChunkBytes) {
    add_chunk(chunks_added_++);
    for (Side& side : sides_) {
      side.in.release(chunks_added_);
      side.in.advance();
    }
  }
}

// The second half of an all-reduce in slices. A peer's slice of the sum arrives where the terms for that peer lay, so those
// must have been sent.
bool Collective::exchange_sums() {
  bool through = true;
  for (int64_t k = 1; k < group_->size(); ++k) {
    const int64_t peer = (group_->rank() + k) % group_->size();
    Side& side = side_of(peer);
    if (!side.sums_open && side.is_idle() && is_added()) open_sums(peer);
    side.out_sum.advance();
    side.in_sum.advance();
    through &= side.sums_idle();
  }
  return through;
}

void Collective::open_sums(int64_t peer) {
  Side& side = side_of(peer);
  const Bytes to_receive = bytes_of(call.output, plan_.recv_sum_range(peer));
  const int tag = data_tag(sequence, 1);
  side.sums_open = true;
  side.out_sum = Flow(group_->comm(), peer, tag, Flow::Way::out, result_, sum_bytes_, kChunkBytes);
  side.in_sum = Flow(group_->comm(), peer, tag, Flow::Way::in, to_receive.data, to_receive.count, kChunkBytes);
}

// A call that has failed adds nothing, and tells all the same: the peers that agreed end it as well.
void Collective::exchange_finite(int64_t peer) {
  Side& side = side_of(peer);
  if (side.owes_finite && (is_added() || !error_.empty())) {
    side.owes_finite = false;
    group_->post(peer, {.kind = Kind::finite, .sequence = sequence, .finite = all_finite_});
  }
  if (!side.awaits_finite) return;
  if (const auto told = group_->match_answer(peer, Kind::finite, sequence)) {
    side.awaits_finite = false;
    all_finite_ &= told->finite;
  }
}

bool Collective::advance_side(int64_t peer) {
  Side& side = side_of(peer);
  if (side.match != Match::found) return side.match == Match::failed;
  side.out.advance();
  side.in.advance();
  exchange_finite(peer);
  return side.is_idle();
}

bool Collective::advance() {
  if (done_) return true;
  for (int64_t peer = 0; peer < group_->size(); ++peer)
    if (side_of(peer).match == Match::pending) match_header(peer);
  if (plan_.sums() && all_matched()) add_up();
  bool through = true;
  for (int64_t k = 1; k < group_->size(); ++k) through &= advance_side((group_->rank() + k) % group_->size());
  if (plan_.sums() && all_matched()) {
    through &= is_added();
    if (sliced_) through = exchange_sums() && through;
  }
  // The peers that agreed send all the same.
  if (!error_.empty())
    for (Side& side : sides_) side.in.release(side.in.chunks_through());
  if (!through) return false;
  done_ = error_.empty();
  if (done_ && call.finish.all_finite) *call.finish.all_finite = all_finite_;
  return true;
}

std::vector<int64_t> Collective::missing() const {
  std::vector<int64_t> ranks;
  for (size_t peer = 0; peer < sides_.size(); ++peer)
    if (sides_[peer].match == Match::pending) ranks.push_back(group_->world_ranks()[peer]);
  if (!ranks.empty()) return ranks;
  for (size_t peer = 0; peer < sides_.size(); ++peer) {
    const Side& side = side_of(static_cast<int64_t>(peer));
    const bool is_through = static_cast<int64_t>(peer) == group_->rank() || (side.is_idle() && (!sliced_ || side.sums_idle()));
    if (!is_through) ranks.push_back(group_->world_ranks()[peer]);
  }
  return ranks;
}

}  // namespace shardproof::mpi
