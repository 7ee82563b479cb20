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
      posted_recvs_(world_ranks_.size(), MPI_REQUEST_NULL),
      completed_(world_ranks_.size()) {
  int rank = 0;
  check_mpi(MPI_Comm_rank(comm_, &rank), "MPI_Comm_rank");
  check_mpi(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  rank_ = rank;
  for (int64_t peer = 0; peer < size(); ++peer)
    if (peer != rank_) post_recv(peer);
}

void Group::post_recv(int64_t peer) {
  std::vector<std::byte>& buffer = peers_[peer].buffer;
  buffer.resize(kMessageBytesMax);
  check_mpi(MPI_Irecv(buffer.data(), static_cast<int>(buffer.size()), MPI_BYTE, static_cast<int>(peer), kHeaderTag, comm_,
                      &posted_recvs_[peer]),
            "MPI_Irecv");
}

void Group::post(int64_t peer, Header header, const std::byte* body) {
  if (peer == rank_) {
    Message message{header, {}};
    if (header.body_bytes > 0) message.body.assign(body, body + header.body_bytes);
    return enqueue(peer, std::move(message));
  }
  Outgoing& posted = outgoing_.emplace_back();
  posted.bytes.resize(sizeof(Header) + static_cast<size_t>(header.body_bytes));
  std::memcpy(posted.bytes.data(), &header, sizeof(Header));
  if (header.body_bytes > 0) std::memcpy(posted.bytes.data() + sizeof(Header), body, static_cast<size_t>(header.body_bytes));
  check_mpi(MPI_Isend(posted.bytes.data(), static_cast<int>(posted.bytes.size()), MPI_BYTE, static_cast<int>(peer), kHeaderTag,
                      comm_, &posted.request),
            "MPI_Isend");
}

void Group::poll() {
  std::erase_if(outgoing_, [](Outgoing& posted) {
    int left = 0;
    check_mpi(MPI_Test(&posted.request, &left, MPI_STATUS_IGNORE), "MPI_Test");
    return left != 0;
  });
  // Several messages of one peer may have arrived, so it repeats until none has.
  for (int count = 1; count > 0;) {
    check_mpi(MPI_Testsome(static_cast<int>(posted_recvs_.size()), posted_recvs_.data(), &count, completed_.data(),
                           MPI_STATUSES_IGNORE),
              "MPI_Testsome");
    if (count == MPI_UNDEFINED) return;
    for (int i = 0; i < count; ++i) {
      const int64_t peer = completed_[static_cast<size_t>(i)];
      Message message;
      const std::vector<std::byte>& buffer = peers_[peer].buffer;
      std::memcpy(&message.header, buffer.data(), sizeof(Header));
      const int64_t bytes = message.header.body_bytes;
      SHARD_CHECK(bytes >= 0 && bytes <= kBodyBytesMax, "mpi", "a message of rank {} of '{}' has {} bytes", peer, name_, bytes);
      message.body.assign(buffer.begin() + sizeof(Header), buffer.begin() + static_cast<int64_t>(sizeof(Header)) + bytes);
      enqueue(peer, std::move(message));
      post_recv(peer);
    }
  }
}

void Group::enqueue(int64_t peer, Message message) {
  Peer& from = peers_[peer];
  switch (message.header.kind) {
    case Kind::collective:
      from.collectives.push_back(std::move(message));
      break;
    case Kind::send:
      from.sends[message.header.tag].push_back(std::move(message));
      break;
    case Kind::accept:
    case Kind::finite:
      from.answers.emplace(std::pair(message.header.kind, message.header.sequence), message.header);
      break;
    case Kind::abandon:
      from.abandoned = std::move(message);
      break;
    case Kind::drained:
      from.drained = true;
      break;
  }
}

std::optional<Message> Group::match_collective(int64_t peer, int64_t sequence) {
  auto& headers = peers_[peer].collectives;
  if (headers.empty() || headers.front().header.sequence != sequence) return std::nullopt;
  Message message = std::move(headers.front());
  headers.pop_front();
  return message;
}

std::optional<Message> Group::match_send(int64_t peer, int64_t tag) {
  const auto found = peers_[peer].sends.find(tag);
  if (found == peers_[peer].sends.end()) return std::nullopt;
  Message message = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) peers_[peer].sends.erase(found);
  return message;
}

std::optional<Header> Group::match_answer(int64_t peer, Kind kind, int64_t sequence) {
  const auto found = peers_[peer].answers.extract({kind, sequence});
  if (found.empty()) return std::nullopt;
  return found.mapped();
}

void Group::close() {
  // All have arrived; the requests need not know it yet.
  for (Outgoing& posted : outgoing_) check_mpi(MPI_Wait(&posted.request, MPI_STATUS_IGNORE), "MPI_Wait");
  outgoing_.clear();
  for (MPI_Request& request : posted_recvs_)
    if (request != MPI_REQUEST_NULL) {
      MPI_Cancel(&request);
      MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
  for (MPI_Win& window : windows_) check_mpi(MPI_Win_free(&window), "MPI_Win_free");
  windows_.clear();
  check_mpi(MPI_Comm_free(&comm_), "MPI_Comm_free");
}

}  // namespace shardproof::mpi
