#include "comm/mpi/mpi_comm.h"

#include <ATen/ATen.h>

#include "comm/process/engine.h"
#include "comm/split_group.h"
#include "shardproof/comm/comparing.h"

namespace shardproof::mpi {
namespace {

class MpiComm final : public Comm, public ComparingComm {
 public:
  MpiComm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group)
      : engine_(std::move(engine)), group_(std::move(group)) {}

  int64_t rank() const override { return group_->rank(); }
  int64_t size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name(); }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override;
  at::Tensor shared_memory(int64_t bytes) override;
  bool finishes_sums() const override { return true; }

 private:
  Work start(Call call) override { return process::work_of(engine_, engine_->start(group_, std::move(call))); }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
};

// Colors are told first: after that everybody is there, so that MPI's own split cannot wait for one who never comes.
std::shared_ptr<Comm> MpiComm::split(int64_t color, int64_t key, std::string name) {
  const std::vector<int64_t> colors_and_keys = tell_colors(*this, color, key);
  SplitGroup made = split_group(colors_and_keys, rank(), group_->world_ranks(), group_->id(), group_->next_split());
  auto group = engine_->split(*group_, made.color, made.rank, name, made.id, std::move(made.world_ranks));
  return group ? make_comm(engine_, std::move(group)) : nullptr;
}

at::Tensor MpiComm::shared_memory(int64_t bytes) {
  if (size() == 1) return at::zeros({bytes}, at::kByte);
  barrier().wait();
  std::byte* const memory = engine_->share(*group_, bytes);
  barrier().wait();
  if (!memory) return {};
  return at::from_blob(memory, {bytes}, at::TensorOptions(at::kByte));
}

}  // namespace

std::shared_ptr<Comm> make_comm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group) {
  return std::make_shared<MpiComm>(std::move(engine), std::move(group));
}

}  // namespace shardproof::mpi
