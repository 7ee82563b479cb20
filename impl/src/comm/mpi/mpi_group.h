// One MPI communicator and the streams of messages between its ranks. Everything here is called under the engine's lock.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "comm/mpi/mpi_wire.h"
#include "internal/comm/flight_record.h"

namespace shardproof::mpi {

class Group {
 public:
  // Takes the communicator over. `world_ranks`: of its ranks, in order. `id`: the same on all of them, and of no other group.
  Group(MPI_Comm comm, std::string name, std::vector<int64_t> world_ranks, uint64_t id);

  MPI_Comm comm() const { return comm_; }
  int64_t rank() const { return rank_; }
  int64_t size() const { return static_cast<int64_t>(world_ranks_.size()); }
  const std::string& name() const { return name_; }
  const std::vector<int64_t>& world_ranks() const { return world_ranks_; }
  uint64_t id() const { return flight_->id; }
  const std::shared_ptr<const FlightGroup>& flight() const { return flight_; }

  // Sends a message to the peer. Returns at once.
  void post(int64_t peer, Header header, const std::byte* body = nullptr);
  // Sorts the messages that have arrived into queues.
  void poll();

  // The next message of the peer that matches, if it has arrived. It leaves its queue.
  std::optional<Message> match_collective(int64_t peer, int64_t sequence);
  std::optional<Message> match_send(int64_t peer, int64_t tag);
  // An answer to something that this rank has sent: accept or finite.
  std::optional<Header> match_answer(int64_t peer, Kind kind, int64_t sequence);
  // The message by which the peer gave up its calls; null before it has come.
  const Message* abandoned(int64_t peer) const { return peers_[peer].abandoned ? &*peers_[peer].abandoned : nullptr; }
  bool drained(int64_t peer) const { return peers_[peer].drained; }
  // This rank makes no more calls in this group.
  void abandon() { has_abandoned_ = true; }
  bool has_abandoned() const { return has_abandoned_; }

  int64_t next_sequence() { return next_sequence_++; }
  int64_t next_send(int64_t peer) { return peers_[peer].next_send++; }
  uint64_t next_split() { return splits_++; }

  bool all_posts_sent() const { return outgoing_.empty(); }
  void add_window(MPI_Win window) { windows_.push_back(window); }
  // Frees communicator and windows. Collective, when nothing is on its way.
  void close();

 private:
  struct Peer {
    std::vector<std::byte> buffer;  // for the message whose receive is posted
    std::deque<Message> collectives;
    std::map<int64_t, std::deque<Message>> sends;  // by tag
    std::map<std::pair<Kind, int64_t>, Header> answers;  // by the number of what they answer
    std::optional<Message> abandoned;
    bool drained = false;
    int64_t next_send = 0;
  };
  struct Outgoing {
    std::vector<std::byte> bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };

  void post_recv(int64_t peer);
  void enqueue(int64_t peer, Message message);

  MPI_Comm comm_;
  std::string name_;
  std::vector<int64_t> world_ranks_;
  std::shared_ptr<const FlightGroup> flight_;
  int64_t rank_ = 0;
  std::vector<Peer> peers_;
  std::vector<MPI_Request> posted_recvs_;  // by peer
  std::vector<int> completed_;
  std::list<Outgoing> outgoing_;
  std::vector<MPI_Win> windows_;
  int64_t next_sequence_ = 0;
  uint64_t splits_ = 0;
  bool has_abandoned_ = false;
};

}  // namespace shardproof::mpi
