#include <ATen/ATen.h>
#include <fmt/format.h>

#include <exception>

#include "comm/mpi/mpi_comm.h"
#include "comm/process/engine.h"
#include "shardproof/comm/mpi/mpi.h"
#include "internal/base/call_label.h"

namespace shardproof {
bool mpi_available() {
  return true;
}

class MpiWorld::Impl final : public process::Runner {
 public:
  explicit Impl(const MpiOptions& options)
      : engine_(std::make_shared<mpi::Engine>(options)), world_(mpi::make_comm(engine_, engine_->world())) {}

  // An exception that the others do not know of leaves them without this process; one that all have agreed on does not.
  ~Impl() override { engine_->shut_down(std::uncaught_exceptions() == 0 || agreed_); }

  Comm& world() { return *world_; }

 private:
  const char* part() const override { return "mpi"; }
  int64_t size() const override { return world_->size(); }
  void begin() override { agreed_ = false; }
  const process::Calls& calls() const override { return engine_->calls(); }
  void abandon(const std::string& why) override { engine_->abandon(why); }

  std::shared_ptr<Comm> enter(int64_t ranks) override {
    const bool takes_part = ranks == 0 || world_->rank() < ranks;
    return world_->split(takes_part ? 0 : -1, 0, "world");
  }

  std::vector<Ending> exchange(const Ending& mine) override {
    if (!any_failed(mine)) return {};
    engine_->write_record(mine.failed ? mine.text : "another rank failed");
    engine_->abandon("another rank's body failed");
    engine_->drain();
    std::vector<Ending> endings(static_cast<size_t>(world_->size()));
    const auto bytes = static_cast<int64_t>(sizeof(Ending));
    Ending own = mine;
    world_
        ->all_gather(at::from_blob(endings.data(), {world_->size() * bytes}, at::kByte),
                     at::from_blob(&own, {bytes}, at::kByte))
        .wait();
    return endings;
  }

  void close(bool failed) override {
    engine_->close_groups();
    agreed_ = failed;
  }

  bool any_failed(const Ending& mine) {
    const CallLabel label("the end of the body");
    at::Tensor failed = at::full({1}, mine.failed, at::kLong);
    world_->all_reduce(failed, Reduce::max).wait();
    return failed.item<int64_t>() != 0;
  }

  std::shared_ptr<mpi::Engine> engine_;
  std::shared_ptr<Comm> world_;
  bool agreed_ = false;
};

MpiWorld::MpiWorld(const MpiOptions& options) : impl_(std::make_unique<Impl>(options)) {}
MpiWorld::~MpiWorld() = default;
int64_t MpiWorld::rank() const {
  return impl_->world().rank();
}
int64_t MpiWorld::size() const {
  return impl_->world().size();
}
void MpiWorld::run(const std::function<void(std::shared_ptr<Comm>)>& body, int64_t ranks) {
  impl_->run(body, ranks);
}

}  // namespace shardproof
