// The store through which the processes of a job exchange what NCCL does not carry: NCCL's unique id, how each rank's body
// ended, and signs of life.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace shardproof {

// Texts by name, which all processes share. Several threads may use it at the same time. Every function throws Error when the
// store cannot be reached.
class NcclStore {
 public:
  virtual ~NcclStore() = default;
  virtual void set(const std::string& name, const std::string& text) = 0;
  // Returns at once, and empty when no process has set the name.
  virtual std::optional<std::string> get(const std::string& name) = 0;
  // Adds one to a counter and returns the sum. The first caller gets 1.
  virtual int64_t count(const std::string& name) = 0;
  virtual void erase(const std::string& name) = 0;
};

// How to reach c10d's TCP store, which torchrun uses too. With `serves` this process serves the store; a port of 0 then means
// any free port. Without it this process connects to the store.
struct TcpStoreOptions {
  std::string host = "127.0.0.1";
  int64_t port = 0;
  bool serves = false;
  double timeout_seconds = 300;
  // Names of one attempt are unseen by another, for a store that outlives them.
  std::string attempt = {};
  // When it is not empty, this is rank `rank` of the job, which rank 0 says. A process of another job is refused before it has
  // changed anything, and one of a rank that is there already leaves nothing but that it has come.
  std::string job = {};
  int64_t rank = 0;
};

class TcpStore final : public NcclStore {
 public:
  // Throws Error when the store, or rank 0 of the job, is not there in time.
  explicit TcpStore(const TcpStoreOptions& options);
  // Where this rank of a job serves the store, it first waits some seconds for the others to leave, who may still read in it.
  ~TcpStore() override;
  int64_t port() const;  // the port at which the store is served

  void set(const std::string& name, const std::string& text) override;
  std::optional<std::string> get(const std::string& name) override;
  int64_t count(const std::string& name) override;
  void erase(const std::string& name) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Ends the world of all processes that share the store and tells each of them why. A launcher calls it when it sees one of its
// processes die.
void end_world(std::shared_ptr<NcclStore> store, const std::string& why);
// What ended it; nothing while nobody did.
std::optional<std::string> world_end(NcclStore& store);

}  // namespace shardproof
