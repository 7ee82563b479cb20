#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <exception>
#include <thread>

#include "body_ending.h"
#include "nccl_comm.h"
#include "shardproof/nccl.h"

namespace shardproof {
namespace {

constexpr auto kLookForEndings = std::chrono::microseconds(200);

}  // namespace

class NcclWorld::Impl {
 public:
  Impl(int64_t rank, int64_t size, std::shared_ptr<NcclStore> store, std::shared_ptr<NcclApi> api, const NcclOptions& options)
      : engine_(std::make_shared<nccl::Engine>(rank, size, std::move(store), std::move(api), options)) {}

  int64_t rank() const { return engine_->rank(); }
  int64_t size() const { return engine_->size(); }

  void run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks) {
    SHARD_REQUIRE(ranks >= 0 && ranks <= size(), "nccl", "a body for {} ranks cannot run on {} processes", ranks, size());
    engine_->begin(++body_);
    std::exception_ptr thrown;
    try {
      run_body(body, ranks);
    } catch (const WorldLostError&) {
      throw;
    } catch (...) {
      thrown = std::current_exception();
    }
    const Ending mine = ending_of(thrown, engine_->last_call());
    if (mine.failed) engine_->abandon(mine.text);
    const std::vector<Ending> endings = tell_endings(mine);
    bool failed = false;
    for (const Ending& ending : endings) failed |= ending.failed != 0;
    if (!failed) return;
    engine_->abort_groups();
    const size_t first = culprit(endings);
    rethrow(endings[first], first, endings.size());
  }

 private:
  void run_body(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks) {
    std::shared_ptr<Comm> comm = nccl::make_comm(engine_, engine_->world(), "world");
    if (ranks > 0 && ranks < size()) comm = comm->split(rank() < ranks ? 0 : -1, 0, "world");
    if (!comm) return;
    body(comm);
    engine_->drain();  // another rank may have failed before it made them all
    const std::vector<std::string> open = engine_->open_calls();
    SHARD_REQUIRE(open.empty(), "nccl", "the body returned but never waited for {}; call Work::wait on every Work",
                  fmt::join(open, "; "));
  }

  std::string ending_name(int64_t body, int64_t rank) const { return fmt::format("ending/{}/{}", body, rank); }

  // Beside NCCL, whose communicators may be aborted by now.
  std::vector<Ending> tell_endings(const Ending& mine) {
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
  impl_ = std::make_unique<Impl>(rank, size, std::move(store), std::move(api), options);
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
