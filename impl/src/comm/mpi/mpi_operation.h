// One call on its way. Advanced under the engine's lock, by whoever waits and by the progress thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/mpi/mpi_flow.h"
#include "comm/mpi/mpi_group.h"
#include "comm/process/engine.h"
#include "shardproof/comm/comm.h"

namespace shardproof::mpi {

class Operation : public process::Operation {
 public:
  Operation(std::shared_ptr<Group> group, Call call);
  virtual ~Operation() = default;

  // True when nothing of it is on its way any more, done or failed.
  virtual bool advance() = 0;
  // Ranks of the world that have not made this call, or not yet sent all that it needs of them.
  virtual std::vector<int64_t> missing() const = 0;

  bool done() const { return done_; }
  // Why it will never be done; empty as long as it may. `relayed`: because of what happened on another rank.
  const std::string& error() const { return error_; }
  bool relayed() const { return relayed_; }
  Group& group() { return *group_; }

 protected:
  Header header(Kind kind) const;
  void fail(std::string error, bool relayed);
  // The peer's body threw.
  void fail_abandoned(int64_t peer, const Message& last);

  std::shared_ptr<Group> group_;
  bool done_ = false, relayed_ = false;
  std::string error_;
};

}  // namespace shardproof::mpi
