#include "shardproof/comm/decorated.h"

#include <utility>

#include "shardproof/base/check.h"
#include "shardproof/comm/comparing.h"

namespace shardproof {

DecoratedComm::DecoratedComm(std::shared_ptr<Comm> inner) : inner_(std::move(inner)) {
  SHARD_REQUIRE(inner_, "comm", "a decorator got no communicator; give it one to pass its calls on to");
}

bool compares_purposes(const Comm& comm) {
  const auto* const decorated = dynamic_cast<const DecoratedComm*>(&comm);
  if (decorated) return compares_purposes(decorated->inner());
  return comm.size() == 1 || dynamic_cast<const ComparingComm*>(&comm) != nullptr;
}

std::shared_ptr<Comm> DecoratedComm::split(int64_t color, int64_t key, std::string name) {
  auto group = inner_->split(color, key, std::move(name));
  return group ? decorate(std::move(group)) : nullptr;
}

std::shared_ptr<Comm> DecoratedComm::split_ranks(const std::vector<int64_t>& ranks, std::string name) {
  return decorate(inner_->split_ranks(ranks, std::move(name)));
}

}  // namespace shardproof
