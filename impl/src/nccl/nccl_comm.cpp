#include "nccl_comm.h"

#include <ATen/ATen.h>

#include "shardproof/check.h"

namespace shardproof::nccl {
namespace {

class Ticket final : public Work::State {
 public:
  Ticket(std::shared_ptr<Engine> engine, std::shared_ptr<Operation> operation)
      : engine_(std::move(engine)), operation_(std::move(operation)) {}
  void wait() override { engine_->wait(*operation_); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Operation> operation_;
};

class NcclComm final : public Comm {
 public:
  NcclComm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, std::string name)
      : engine_(std::move(engine)), group_(std::move(group)), name_(std::move(name)) {
    flight_ = std::make_shared<FlightGroup>(FlightGroup{group_->id, name_, group_->world_ranks});
  }

  int64_t rank() const override { return group_->rank; }
  int64_t size() const override { return group_->size(); }
  const std::string& name() const override { return name_; }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override;

 private:
  Work start(Call call) override {
    return Work(std::make_shared<Ticket>(engine_, engine_->start(group_, flight_, std::move(call))));
  }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
  std::string name_;
  std::shared_ptr<const FlightGroup> flight_;
};

std::shared_ptr<Comm> NcclComm::split(int64_t color, int64_t key, std::string name) {
  at::Tensor mine = at::empty({2}, at::kLong), all = at::empty({2 * size()}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = color;
  mine.mutable_data_ptr<int64_t>()[1] = key;
  issue({.op = Op::split, .output = all, .input = mine}).wait();
  const int64_t* told = all.const_data_ptr<int64_t>();
  auto group = engine_->split(*group_, {told, told + all.numel()});
  return group ? make_comm(engine_, std::move(group), std::move(name)) : nullptr;
}

}  // namespace

std::shared_ptr<Comm> make_comm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, std::string name) {
  return std::make_shared<NcclComm>(std::move(engine), std::move(group), std::move(name));
}

}  // namespace shardproof::nccl
