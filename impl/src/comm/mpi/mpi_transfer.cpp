#include "comm/mpi/mpi_transfer.h"

#include <fmt/format.h>

#include <cstring>
#include <utility>

#include "shardproof/base/dtypes.h"

namespace shardproof::mpi {
namespace {

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
}

// The send that matched a recv, as text.
std::string describe_send(const Header& sent) {
  return fmt::format("send({} x {}, tag {})", dtype_name(static_cast<at::ScalarType>(sent.dtype)), sent.numel, sent.tag);
}

}  // namespace

Send::Send(std::shared_ptr<Group> group, Call given) : Operation(std::move(group), std::move(given)) {
  sequence = group_->next_send(call.peer);
  Header announced = header(Kind::send);
  announced.send_bytes = static_cast<int64_t>(call.input.nbytes());
  travels_ = is_eager(announced.send_bytes) || call.peer == group_->rank();
  if (travels_) announced.body_bytes = announced.send_bytes;
  group_->post(call.peer, announced, bytes_of(call.input));
}

bool Send::advance() {
  if (!accepted_ && error_.empty()) {
    if (const auto answer = group_->match_answer(call.peer, Kind::accept, sequence)) {
      accepted_ = true;
      if (!travels_)
        flow_ = Flow(group_->comm(), call.peer, send_data_tag(sequence), Flow::Way::out, bytes_of(call.input),
                     static_cast<int64_t>(call.input.nbytes()), kChunkBytes);
      if (answer->numel != numel(call) || answer->dtype != header(Kind::send).dtype)
        fail(fmt::format("ranks disagree: {} meets a recv of {} x {} on rank {}", title(),
                         dtype_name(static_cast<at::ScalarType>(answer->dtype)), answer->numel,
                         group_->world_ranks()[static_cast<size_t>(call.peer)]),
             false);
    } else if (call.peer == group_->rank() && group_->has_abandoned()) {
      fail(fmt::format("{} was under way when this rank failed", title()), true);
    } else if (const Message* last = group_->abandoned(call.peer)) {
      fail_abandoned(call.peer, *last);
    }
  }
  if (!accepted_) return !error_.empty();
  if (!flow_.advance()) return false;
  done_ = error_.empty();
  return true;
}

std::vector<int64_t> Send::missing() const {
  return {group_->world_ranks()[static_cast<size_t>(call.peer)]};
}

Recv::Recv(std::shared_ptr<Group> group, Call given) : Operation(std::move(group), std::move(given)) {
  sequence = -1;  // known once its send has matched
}

void Recv::match_header(const Message& sent) {
  matched_ = true;
  sequence = sent.header.sequence;
  std::byte* target = bytes_of(call.output);
  const int64_t bytes = sent.header.send_bytes;
  const bool fits = sent.header.numel == numel(call) && sent.header.dtype == header(Kind::accept).dtype;
  if (!fits) {
    fail(fmt::format("ranks disagree: {} meets a {} of rank {}", title(), describe_send(sent.header),
                     group_->world_ranks()[static_cast<size_t>(call.peer)]),
         false);
    discarded_.resize(static_cast<size_t>(bytes));
    target = discarded_.data();
  }
  group_->post(call.peer, header(Kind::accept));
  if (sent.header.body_bytes > 0)
    std::memcpy(target, sent.body.data(), sent.body.size());
  else
    flow_ = Flow(group_->comm(), call.peer, send_data_tag(sequence), Flow::Way::in, target, bytes, kChunkBytes);
}

bool Recv::advance() {
  if (!matched_ && error_.empty()) {
    // A rank whose body threw takes nothing more: the sender may have ended its send because of that.
    if (group_->has_abandoned())
      fail(fmt::format("{} was under way when this rank failed", title()), true);
    else if (const auto sent = group_->match_send(call.peer, call.tag))
      match_header(*sent);
    else if (const Message* last = group_->abandoned(call.peer))
      fail_abandoned(call.peer, *last);
  }
  if (!matched_) return !error_.empty();
  if (!flow_.advance()) return false;
  done_ = error_.empty();
  return true;
}

std::vector<int64_t> Recv::missing() const {
  return {group_->world_ranks()[static_cast<size_t>(call.peer)]};
}

}  // namespace shardproof::mpi
