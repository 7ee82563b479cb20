// What processes of a job tell each other beside NCCL: the unique id, how their bodies ended, and that they are alive.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace shardproof {

// Texts by name, shared by all processes. Safe to use from several threads. Throws Error when it cannot be reached.
class NcclStore {
 public:
  virtual ~NcclStore() = default;
  virtual void set(const std::string& name, const std::string& text) = 0;
  // At once; nothing when nobody has set it.
  virtual std::optional<std::string> get(const std::string& name) = 0;
  // Adds one, and returns the sum: 1 to who comes first.
  virtual int64_t count(const std::string& name) = 0;
  virtual void erase(const std::string& name) = 0;
};

// c10d's TCP store, as torchrun's: connects to it, or serves it from this process (`serves`; a port of 0 is any free one).
struct TcpStoreOptions {
  std::string host = "127.0.0.1";
  int64_t port = 0;
  bool serves = false;
  double timeout_seconds = 300;
};

class TcpStore final : public NcclStore {
 public:
  explicit TcpStore(const TcpStoreOptions& options);
  ~TcpStore() override;
  int64_t port() const;  // where it is served

  void set(const std::string& name, const std::string& text) override;
  std::optional<std::string> get(const std::string& name) override;
  int64_t count(const std::string& name) override;
  void erase(const std::string& name) override;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Ends the world of all processes that share the store, and tells each of them why: for whoever started them and saw one die.
void end_world(std::shared_ptr<NcclStore> store, const std::string& why);

}  // namespace shardproof
