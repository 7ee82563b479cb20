// What every backend of processes has: calls on their way, a list of those that nobody has waited for, a record of the last of
// them, and the order of things around a body.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "comm/process/body_ending.h"
#include "shardproof/comm/comm.h"
#include "internal/comm/flight_record.h"

namespace shardproof::process {

// "reduce_scatter(sum, float32 x 128), call 17 on 'dp_shard', for unit 'h.3'"
std::string title_of(const Call& call, int64_t sequence, const std::string& group, std::string_view label);

// One call on its way. Backends derive from it.
struct Operation {
  // Takes the label that is in force on this thread.
  Operation(std::shared_ptr<const FlightGroup> group, Call call);

  std::string title() const { return title_of(call, sequence, flight->name, label); }

  const std::shared_ptr<const FlightGroup> flight;
  Call call;
  const std::string label;
  int64_t sequence = 0;  // among the group's calls of its kind
  int64_t record = -1;   // its number in the flight record
  bool waited = false;
};

// The calls of this rank: the last of them, and those that nobody has waited for. Any thread may ask.
class Calls {
 public:
  Calls(int64_t rank, int64_t world, int64_t flight_calls_max) : record_(rank, world, flight_calls_max) {}

  void begin(std::shared_ptr<Operation> operation);
  void mark(const Operation& operation, FlightCall::State state) { record_.mark(operation.record, state); }
  // Somebody has waited for it, with or without success.
  void end(Operation& operation);
  // After a failure nobody will wait any more.
  void forget();

  // Titles of the calls that nobody has waited for.
  std::vector<std::string> open() const;
  // The title of the last call; "" when there was none.
  std::string last() const { return record_.last(); }
  // Writes the flight record into the directory, or nothing where that is "". Returns what went wrong, or "".
  std::string write(const std::string& directory, const std::string& why) const;

 private:
  FlightRecord record_;
  mutable std::mutex mutex_;  // open_
  std::list<std::shared_ptr<Operation>> open_;
};

// `engine->wait(*operation)` is what waiting for the work is; it keeps both.
template <class Engine, class Operation>
Work work_of(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation) {
  class State final : public Work::State {
   public:
    State(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation)
        : engine_(std::move(engine)), operation_(std::move(operation)) {}
    void wait() override { engine_->wait(*operation_); }

   private:
    std::shared_ptr<Engine> engine_;
    std::shared_ptr<Operation> operation_;
  };
  return Work(std::make_shared<State>(std::move(engine), std::move(operation)));
}

// How a backend runs a body on all ranks, and ends it on all of them alike.
class Runner {
 public:
  using Body = std::function<void(std::shared_ptr<Comm>)>;

  virtual ~Runner() = default;

  // Runs the body on the first `ranks` ranks, on all for 0. Where it failed on any rank, throws on all of them the error that
  // came first.
  void run(const Body& body, int64_t ranks);

 private:
  // The backend's name in messages.
  virtual const char* part() const = 0;
  virtual int64_t size() const = 0;
  virtual void begin() {}
  // Collective: the communicator of those ranks; null on all others.
  virtual std::shared_ptr<Comm> enter(int64_t ranks) = 0;
  // The body has returned on this rank. Throws when calls that it made have failed since.
  virtual void leave() {}
  // Throws when the body has left behind what it must not.
  virtual void require_nothing_left() {}
  virtual const Calls& calls() const = 0;
  // Tells all ranks that the body of this one failed, so that they do not wait for it.
  virtual void abandon(const std::string& why) = 0;
  // Collective: how the body ended on every rank, by rank; or nothing where it ended well on all.
  virtual std::vector<Ending> exchange(const Ending& mine) = 0;
  // Collective: frees what the body used.
  virtual void close(bool failed) = 0;
};

}  // namespace shardproof::process
