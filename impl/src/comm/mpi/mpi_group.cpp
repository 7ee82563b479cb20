#include "comm/mpi/mpi_group.h"

#include <cstring>

#include "shardproof/base/check.h"

namespace shardproof::mpi {

Group::Group(MPI_Comm comm, std::string name, std::vector<int64_t> world_ranks, uint64_t id)
    : comm_(comm),
      name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      flight_(std::make_shared<FlightGroup>(FlightGroup{id, name_, world_ranks_})),
      peers_(world_ranks_.size()),
      listening_(world_ranks_.size(), MPI_REQUEST_NULL),
      heard_(world_ranks_.size()) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(comm_, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  rank_ = rank;
  for (int64_t peer = 0; peer < size(); ++peer)
    if (peer != rank_) start_listening(peer);
}

void Group::start_listening(int64_t peer) {
  std::vector<std::byte>& buffer = peers_[peer].buffer;
  buffer.resize(kMessageBytesMax);
  check_mpi(MPI_Irecv(buffer.data(), static_cast<int>(buffer.size()), MPI_BYTE, static_cast<int>(peer), kWordTag, comm_,
                      &listening_[peer]),
            "MPI_Irecv");
}

void Group::tell(int64_t peer, Header header, const std::byte* body) {
  if (peer == rank_) {
    Message message{header, {}};
    if (header.body_bytes > 0) message.body.assign(body, body + header.body_bytes);
    return take_in(peer, std::move(message));
  }
  Outgoing& word = outgoing_.emplace_back();
  word.bytes.resize(sizeof(Header) + static_cast<size_t>(header.body_bytes));
  std::memcpy(word.bytes.data(), &header, sizeof(Header));
  if (header.body_bytes > 0) std::memcpy(word.bytes.data() + sizeof(Header), body, static_cast<size_t>(header.body_bytes));
  check_mpi(MPI_Isend(word.bytes.data(), static_cast<int>(word.bytes.size()), MPI_BYTE, static_cast<int>(peer), kWordTag, comm_,
                      &word.request),
            "MPI_Isend");
}

void Group::listen() {
  std::erase_if(outgoing_, [](Outgoing& word) {
    int left = 0;
    check_mpi(MPI_Test(&word.request, &left, MPI_STATUS_IGNORE), "MPI_Test");
    return left != 0;
  });
  // Several words of one peer may be there: until none is.
  for (int count = 1; count > 0;) {
    check_mpi(MPI_Testsome(static_cast<int>(listening_.size()), listening_.data(), &count, heard_.data(), MPI_STATUSES_IGNORE),
              "MPI_Testsome");
    if (count == MPI_UNDEFINED) return;
    for (int i = 0; i < count; ++i) {
      const int64_t peer = heard_[static_cast<size_t>(i)];
      Message message;
      const std::vector<std::byte>& buffer = peers_[peer].buffer;
      std::memcpy(&message.header, buffer.data(), sizeof(Header));
      const int64_t bytes = message.header.body_bytes;
      SHARD_CHECK(bytes >= 0 && bytes <= kBodyBytesMax, "mpi", "a word of rank {} of '{}' has {} bytes", peer, name_, bytes);
      message.body.assign(buffer.begin() + sizeof(Header), buffer.begin() + static_cast<int64_t>(sizeof(Header)) + bytes);
      take_in(peer, std::move(message));
      start_listening(peer);
    }
  }
}

void Group::take_in(int64_t peer, Message message) {
  Peer& from = peers_[peer];
  switch (message.header.kind) {
    case Kind::collective:
      from.collectives.push_back(std::move(message));
      break;
    case Kind::send:
      from.sends[message.header.tag].push_back(std::move(message));
      break;
    case Kind::accept:
      from.accepts.emplace(message.header.sequence, message.header);
      break;
    case Kind::abandon:
      from.abandoned = std::move(message);
      break;
    case Kind::settled:
      from.settled = true;
      break;
  }
}

std::optional<Message> Group::take_collective(int64_t peer, int64_t sequence) {
  auto& words = peers_[peer].collectives;
  if (words.empty() || words.front().header.sequence != sequence) return std::nullopt;
  Message message = std::move(words.front());
  words.pop_front();
  return message;
}

std::optional<Message> Group::take_send(int64_t peer, int64_t tag) {
  const auto found = peers_[peer].sends.find(tag);
  if (found == peers_[peer].sends.end()) return std::nullopt;
  Message message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) peers_[peer].sends.erase(found);
  return message;
}

std::optional<Header> Group::take_accept(int64_t peer, int64_t sequence) {
  const auto found = peers_[peer].accepts.find(sequence);
  if (found == peers_[peer].accepts.end()) return std::nullopt;
  const Header header = found->second;
  peers_[peer].accepts.erase(found);
  return header;
}

void Group::close() {
  // All have arrived; the requests need not know it yet.
  for (Outgoing& word : outgoing_) check_mpi(MPI_Wait(&word.request, MPI_STATUS_IGNORE), "MPI_Wait");
  outgoing_.clear();
  for (MPI_Request& request : listening_)
    if (request != MPI_REQUEST_NULL) {
      MPI_Cancel(&request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
  for (MPI_Win& window : windows_) check_mpi(MPI_Win_free(&window), "MPI_Win_free");
  windows_.clear();
  check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free");
}

}  // namespace shardproof::mpi
