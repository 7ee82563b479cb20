#include "comm/threads/threads_rendezvous.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "comm/disagreement.h"

namespace shardproof::threads {
namespace {

struct Bytes {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;
};

Bytes bytes_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.numel() == 0) return {};
  auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {begin, begin + tensor.nbytes()};
}

// `whole` without `hole`: what lies before it and what lies after.
std::vector<Bytes> without(Bytes whole, Bytes hole) {
  if (hole.end <= whole.begin || whole.end <= hole.begin) return {whole};
  return {{whole.begin, std::max(whole.begin, hole.begin)}, {std::min(whole.end, hole.end), whole.end}};
}

// An all-gather may keep its input in the output, where it stays valid throughout; all other outputs are overwritten.
std::vector<Bytes> poisoned(const Call& call) {
  if (call.op == Op::all_gather) return without(bytes_of(call.output), bytes_of(call.input));
  return {bytes_of(call.output)};
}

std::vector<Bytes> kept(const Call& call) {
  if (call.op == Op::all_gather) return {bytes_of(call.input)};
  return without(bytes_of(call.input), bytes_of(call.output));
}

// All ones is a NaN in every floating-point format; 0x7f.. is an index out of every range.
std::byte poison(const Call& call) {
  return std::byte{static_cast<unsigned char>(at::isFloatingType(call.output.scalar_type()) ? 0xff : 0x7f)};
}

// Where the two first differ; the end of `range` where they do not. Nearly always they are the same, which memcmp sees fastest.
const std::byte* first_change(Bytes range, const std::byte* before) {
  const auto bytes = static_cast<size_t>(range.end - range.begin);
  if (bytes == 0 || std::memcmp(range.begin, before, bytes) == 0) return range.end;
  return std::mismatch(range.begin, range.end, before).first;
}

// The first byte that is not `value`. All are, where the first one is and each is the same as the one before it.
const std::byte* first_other(Bytes range, std::byte value) {
  if (range.begin == range.end) return range.end;
  if (*range.begin != value) return range.begin;
  return first_change({range.begin + 1, range.end}, range.begin);
}

int64_t element(const std::byte* at, const at::Tensor& tensor) {
  return (at - static_cast<const std::byte*>(tensor.const_data_ptr())) /
         static_cast<int64_t>(tensor.element_size());
}

}  // namespace

InFlight::InFlight(const Call& call) {
  if (call.input.defined()) {
    snapshot_ = std::make_unique_for_overwrite<std::byte[]>(call.input.nbytes());
    if (call.input.numel() > 0) std::memcpy(snapshot_.get(), call.input.const_data_ptr(), call.input.nbytes());
  }
  for (const Bytes& range : poisoned(call))
    std::fill(const_cast<std::byte*>(range.begin), const_cast<std::byte*>(range.end), poison(call));
}

std::optional<std::string> InFlight::find_input_change(const Call& call) const {
  const Bytes input = bytes_of(call.input);
  for (const Bytes& range : kept(call)) {
    const std::byte* now = first_change(range, snapshot_.get() + (range.begin - input.begin));
    if (now != range.end) return fmt::format("changed element {} of its input", element(now, call.input));
  }
  return std::nullopt;
}

std::optional<std::string> InFlight::find_output_write(const Call& call) const {
  const std::byte value = poison(call);
  for (const Bytes& range : poisoned(call)) {
    const std::byte* written = first_other(range, value);
    if (written != range.end) return fmt::format("wrote element {} of its output", element(written, call.output));
  }
  return std::nullopt;
}

std::string Rendezvous::title(int64_t part) const {
  return fmt::format("{}, call {} on '{}'", describe(parts[part].call), sequence, group);
}

namespace {

bool same_signature(const Part& one, const Part& other) {
  const Call &a = one.call, &b = other.call;
  const bool transfer = a.op == Op::send || a.op == Op::recv;  // a send and its receive
  if (numel(a) != numel(b)) return false;
  if (a.op != Op::barrier && dtype(a) != dtype(b)) return false;
  return transfer || (a.op == b.op && a.reduce == b.reduce && a.finish.factor == b.finish.factor && a.peer == b.peer &&
                      one.purpose == other.purpose);
}

bool same_sizes(const Call& a, int64_t a_part, const Call& b, int64_t b_part) {
  if (a.op != Op::all_to_all) return true;
  return a.input_sizes[b_part] == b.output_sizes[a_part] && b.input_sizes[a_part] == a.output_sizes[b_part];
}

}  // namespace

std::optional<std::string> find_mismatch(const Rendezvous& rendezvous, int64_t part) {
  const Part& mine = rendezvous.parts[part];
  for (int64_t p = 0; p < static_cast<int64_t>(rendezvous.parts.size()); ++p) {
    const Part& other = rendezvous.parts[p];
    if (p == part || !other.arrived) continue;
    if (same_signature(mine, other) && same_sizes(mine.call, part, other.call, p)) {
      if (mine.call.op == Op::all_to_all) continue;
      break;  // the others were compared with that one
    }
    return disagreement(rendezvous.sequence, rendezvous.group, {other.rank, describe(other.call), other.purpose},
                        {mine.rank, describe(mine.call), mine.purpose});
  }
  return std::nullopt;
}

Stream::Stream(std::string group, std::vector<int64_t> ranks)
    : group_(std::move(group)), ranks_(std::move(ranks)), next_(ranks_.size(), 0) {}

std::shared_ptr<Rendezvous> Stream::join(int64_t part) {
  // Every rank calls in order, so rendezvous fill in order and full ones lie in front.
  while (!open_.empty() && open_.front()->complete()) {
    open_.pop_front();
    ++first_;
  }
  const int64_t sequence = next_[part]++;
  if (sequence - first_ == static_cast<int64_t>(open_.size())) {
    auto made = std::make_shared<Rendezvous>();
    made->group = group_;
    made->sequence = sequence;
    made->parts.resize(ranks_.size());
    for (size_t p = 0; p < ranks_.size(); ++p) made->parts[p].rank = ranks_[p];
    open_.push_back(std::move(made));
  }
  return open_[sequence - first_];
}

Group::Group(uint64_t id, std::string name, std::vector<int64_t> ranks)
    : id(id), name(name), ranks(ranks), collectives(std::move(name), std::move(ranks)) {}

}  // namespace shardproof::threads
