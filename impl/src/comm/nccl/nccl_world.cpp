#include <fmt/format.h>

#include <cstring>
#include <exception>
#include <thread>

#include "comm/nccl/nccl_comm.h"
#include "comm/process/engine.h"
#include "shardproof/comm/nccl/nccl.h"

namespace shardproof {
namespace {

constexpr auto kLookForEndings = std::chrono::microseconds(200);

NcclOptions as_possible(NcclOptions options, NcclApi& api) {
  if (options.buffers == NcclApi::Memory::symmetric && !api.why_no_windows().empty())
    options.buffers = NcclApi::Memory::registered;
  return options;
}

}  // namespace

class NcclWorld::Impl final : public process::Runner {
 public:
  Impl(int64_t rank, int64_t size, std::shared_ptr<NcclStore> store, std::shared_ptr<NcclApi> api, const NcclOptions& options)
      : engine_(std::make_shared<nccl::Engine>(rank, size, std::move(store), std::move(api), options)) {}

  int64_t rank() const { return engine_->rank(); }
  int64_t size() const override { return engine_->size(); }

 private:
  const char* part() const override { return "nccl"; }
  const process::Calls& calls() const override { return engine_->calls(); }
  void abandon(const std::string& why) override { engine_->abandon(why); }

  // What a rank throws here, all are told. NCCL lets some go on while others are still being connected.
  std::shared_ptr<Comm> enter(int64_t ranks) override {
    engine_->begin(++body_);
    std::shared_ptr<Comm> comm = nccl::make_comm(engine_, engine_->world(), "world");
    return ranks > 0 && ranks < size() ? comm->split(rank() < ranks ? 0 : -1, 0, "world") : comm;
  }
  // Another rank may have failed before it made them all.
  void leave() override { engine_->drain(); }
  void require_nothing_left() override {
    SHARD_REQUIRE(engine_->lent_buffers() == 0, "nccl",
                  "the body returned and holds {} registered buffers; what was made from its communicator must end with it",
                  engine_->lent_buffers());
  }
  void close(bool failed) override {
    if (failed) engine_->abort_groups();
  }

  std::string ending_name(int64_t body, int64_t rank) const { return fmt::format("ending/{}/{}", body, rank); }

  // Beside NCCL, whose communicators may be aborted by now.
  std::vector<Ending> exchange(const Ending& mine) override {
    NcclStore& store = engine_->store();
    store.set(ending_name(body_, rank()), {reinterpret_cast<const char*>(&mine), sizeof mine});
    std::vector<Ending> endings(static_cast<size_t>(size()));
    nccl::Pulse pulse;
    for (int64_t rank = 0; rank < size(); ++rank) {
      std::optional<std::string> text;
      while (!(text = store.get(ending_name(body_, rank)))) {
        engine_->require_world("the end of the body");
        engine_->require_sign_of_life(rank, pulse, "the end of the body");
        std::this_thread::sleep_for(kLookForEndings);
      }
      SHARD_CHECK(text->size() == sizeof(Ending), "nccl", "the ending of rank {} has {} bytes", rank, text->size());
      std::memcpy(&endings[static_cast<size_t>(rank)], text->data(), sizeof(Ending));
    }
    // Whoever is here has read all endings of the body before.
    store.erase(ending_name(body_ - 1, rank()));
    return endings;
  }

  std::shared_ptr<nccl::Engine> engine_;
  int64_t body_ = 0;
};

NcclWorld::NcclWorld(int64_t rank, int64_t size, std::shared_ptr<NcclStore> store, std::shared_ptr<NcclApi> api,
                     const NcclOptions& options) {
  SHARD_REQUIRE(size > 0 && rank >= 0 && rank < size, "nccl", "there is no rank {} of {}", rank, size);
  SHARD_REQUIRE(options.timeout_seconds > 0, "nccl", "the time-out must be above 0 s, got {}", options.timeout_seconds);
  if (options.sum == NcclOptions::Sum::rank_order)
    if (const std::string why = api->why_no_sums(); !why.empty()) throw Error("[nccl] " + why);
  const NcclOptions possible = as_possible(options, *api);
  impl_ = std::make_unique<Impl>(rank, size, std::move(store), std::move(api), possible);
}
NcclWorld::~NcclWorld() = default;
int64_t NcclWorld::rank() const {
  return impl_->rank();
}
int64_t NcclWorld::size() const {
  return impl_->size();
}
void NcclWorld::run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks) {
  impl_->run(body, ranks);
}

}  // namespace shardproof
