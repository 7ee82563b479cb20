// One call on its way. Advanced under the engine's lock, by whoever waits and by the progress thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/mpi/mpi_flow.h"
#include "comm/mpi/mpi_group.h"
#include "shardproof/comm/comm.h"

namespace shardproof::mpi {

// "reduce_scatter(sum, float32 x 128), call 17 on 'dp_shard', for unit 'h.3'"
std::string title_of(const Call& call, int64_t sequence, const Group& group, std::string_view label);

class Operation {
 public:
  Operation(std::shared_ptr<Group> group, Call call);
  virtual ~Operation() = default;

  // True when nothing of it is on its way any more, done or failed.
  virtual bool advance() = 0;
  // Ranks of the world that have not made this call, or not yet sent all that it needs of them.
  virtual std::vector<int64_t> missing() const = 0;

  std::string title() const { return title_of(call_, sequence_, *group_, label_); }
  bool done() const { return done_; }
  // Why it will never be done; empty as long as it may. `relayed`: because of what happened on another rank.
  const std::string& error() const { return error_; }
  bool relayed() const { return relayed_; }
  Group& group() { return *group_; }
  const Call& call() const { return call_; }
  int64_t sequence() const { return sequence_; }
  const std::string& label() const { return label_; }

  bool waited = false;
  int64_t record = -1;  // of the flight record

 protected:
  Header header(Kind kind) const;
  void fail(std::string error, bool relayed);
  // The peer's body threw.
  void fail_abandoned(int64_t peer, const Message& last);

  std::shared_ptr<Group> group_;
  Call call_;
  int64_t sequence_ = 0;
  std::string label_;
  bool done_ = false, relayed_ = false;
  std::string error_;
};

}  // namespace shardproof::mpi
