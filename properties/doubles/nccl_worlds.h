// Worlds of rank-threads over the NCCL backend on its double.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "properties/doubles/nccl_double.h"
#include "shardproof/comm/nccl/nccl.h"

namespace nccl_worlds {

using Body = std::function<void(std::shared_ptr<shardproof::Comm>)>;

struct Arrangement {
  nccl_double::Plan plan = {};
  shardproof::NcclOptions options = {.timeout_seconds = 60};
  // Around each call on tensors of the double's device: until the call the caller's stream has not written its input yet, and
  // after `wait` the host waits for that stream, as who reads the output would.
  bool presses = false;
  // Whether `presses` has inputs written late; not where others than the call read them meanwhile.
  bool late_inputs = true;
};

// A world whose bodies can be run one after the other. When it goes nothing may be left of what it made.
class World {
 public:
  World(int64_t size, Arrangement arrangement);
  ~World();

  // Runs the body on all ranks (or the first `ranks`) and returns what each threw.
  std::vector<std::exception_ptr> run(const Body& body, int64_t ranks = 0);
  nccl_double::Api& api(int64_t rank) { return *apis_[static_cast<size_t>(rank)]; }
  nccl_double::MemoryStore& store() { return *store_; }

 private:
  const Arrangement arrangement_;
  std::shared_ptr<nccl_double::MemoryStore> store_;
  std::vector<std::shared_ptr<nccl_double::Api>> apis_;
  std::vector<std::unique_ptr<shardproof::NcclWorld>> worlds_;
};

// Throws the first rank's error; a failure of the test when only some ranks had one.
void run(int64_t size, const Arrangement& arrangement, const Body& body);
// What each rank threw, in words; "" for nothing.
std::vector<std::string> errors_of(int64_t size, const Arrangement& arrangement, const Body& body);
// Rank 0's; a failure of the test when it is none.
std::string error_of(int64_t size, const Arrangement& arrangement, const Body& body);

}  // namespace nccl_worlds
