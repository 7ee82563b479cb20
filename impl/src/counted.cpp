#include "shardproof/counted.h"

#include <numeric>

#include "shardproof/check.h"

namespace shardproof {
namespace {

class Counted final : public Comm {
 public:
  Counted(int64_t rank, int64_t size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

  std::shared_ptr<Comm> split(int64_t, int64_t, std::string name) override {
    throw Error(
        fmt::format("[comm] '{}' has one rank that cannot know who else joins group '{}'. Use split_ranks", name_, name));
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    SHARD_REQUIRE(own != ranks.end(), "comm", "rank {} of '{}' is not among the ranks of its group '{}'", rank_, name_, name);
    return std::make_shared<Counted>(own - ranks.begin(), std::ssize(ranks), std::move(name));
  }

 private:
  Work start(Call) override { return Work(); }

  int64_t rank_, size_;
  std::string name_;
};

}  // namespace

std::shared_ptr<Comm> counted(int64_t world, int64_t rank) {
  SHARD_REQUIRE(world >= 1 && rank >= 0 && rank < world, "comm", "there is no rank {} in a world of {}", rank, world);
  return std::make_shared<Counted>(rank, world, "world");
}

}  // namespace shardproof
