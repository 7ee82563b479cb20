#include "mpi_comm.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "counter_random.h"
#include "shardproof/check.h"

namespace shardproof::mpi {
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

class MpiComm final : public Comm {
 public:
  MpiComm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group)
      : engine_(std::move(engine)), group_(std::move(group)) {}

  int64_t rank() const override { return group_->rank(); }
  int64_t size() const override { return group_->size(); }
  const std::string& name() const override { return group_->name(); }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override;
  at::Tensor shared_memory(int64_t bytes) override;

 private:
  Work start(Call call) override { return Work(std::make_shared<Ticket>(engine_, engine_->start(group_, std::move(call)))); }

  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Group> group_;
};

std::shared_ptr<Comm> MpiComm::split(int64_t color, int64_t key, std::string name) {
  at::Tensor mine = at::empty({2}, at::kLong), all = at::empty({2 * size()}, at::kLong);
  mine.mutable_data_ptr<int64_t>()[0] = color;
  mine.mutable_data_ptr<int64_t>()[1] = key;
  // After this everybody is there, so that MPI's own split cannot wait for one who never comes.
  issue({.op = Op::split, .output = all, .input = mine}).wait();
  const int64_t* colors_and_keys = all.const_data_ptr<int64_t>();
  std::vector<std::pair<int64_t, int64_t>> members;  // key, rank in this group
  for (int64_t r = 0; r < size(); ++r)
    if (colors_and_keys[2 * r] == color) members.emplace_back(colors_and_keys[2 * r + 1], r);
  std::sort(members.begin(), members.end());
  std::vector<int64_t> world_ranks;
  int64_t position = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i].second == rank()) position = static_cast<int64_t>(i);
    world_ranks.push_back(group_->world_ranks()[static_cast<size_t>(members[i].second)]);
  }
  // The same on every rank of the new group, and on no other: a chain of parent, number of the split, and first member.
  uint64_t id = group_->id();
  for (const uint64_t value : {group_->next_split() + 1, static_cast<uint64_t>(world_ranks.empty() ? 0 : world_ranks[0]) + 1})
    id = counter_mix(id ^ value);
  // MPI's colors and keys are ints: the first member and the new rank say the same.
  const int64_t mpi_color = color < 0 ? -1 : members[0].second;
  auto group = engine_->split(*group_, mpi_color, position, name, id, std::move(world_ranks));
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
