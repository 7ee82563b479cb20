#include "comm/nccl/nccl_comm.h"

#include "comm/process/engine.h"
#include "comm/split_group.h"
#include "shardproof/comm/capturable.h"

namespace shardproof::nccl {
namespace {

class NcclComm final : public Comm, public CapturableComm {
 public:
  NcclComm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, std::string name)
      : engine_(std::move(engine)), group_(std::move(group)), name_(std::move(name)) {
    flight_ = std::make_shared<FlightGroup>(FlightGroup{group_->id, name_, group_->world_ranks});
  }

  int64_t rank() const override { return group_->rank; }
  int64_t size() const override { return group_->size(); }
  const std::string& name() const override { return name_; }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override;
  std::vector<std::string> open_calls() const override { return engine_->calls().open(); }
  bool premultiplies() const override { return engine_->premultiplies(); }
  c10::DataPtr allocate(Op op, int64_t bytes, c10::Device device) override {
    return engine_->allocate(*group_, op, bytes, device);
  }

 private:
  Work start(Call call) override { return process::work_of(engine_, engine_->start(group_, flight_, std::move(call))); }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
  std::string name_;
  std::shared_ptr<const FlightGroup> flight_;
};

std::shared_ptr<Comm> NcclComm::split(int64_t color, int64_t key, std::string name) {
  auto group = engine_->split(*group_, tell_colors(*this, color, key));
  return group ? make_comm(engine_, std::move(group), std::move(name)) : nullptr;
}

}  // namespace

std::shared_ptr<Comm> make_comm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, std::string name) {
  return std::make_shared<NcclComm>(std::move(engine), std::move(group), std::move(name));
}

}  // namespace shardproof::nccl
