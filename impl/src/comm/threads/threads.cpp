#include "shardproof/comm/threads/threads.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/sin_cpu_dispatch.h>
#include <ATen/ops/tanh_cpu_dispatch.h>

#include <cstring>

#include "comm/split_group.h"
#include "comm/threads/threads_pool.h"
#include "comm/threads/threads_world.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/comparing.h"

namespace shardproof {
namespace threads {
namespace {

class Ticket final : public Work::State {
 public:
  Ticket(std::shared_ptr<World> world, World::Arrival arrival) : world_(std::move(world)), arrival_(std::move(arrival)) {}
  void wait() override { world_->wait(*arrival_.rendezvous, arrival_.part); }

 private:
  std::shared_ptr<World> world_;
  World::Arrival arrival_;
};

class ThreadComm final : public Comm, public ComparingComm {
 public:
  ThreadComm(std::shared_ptr<World> world, std::shared_ptr<Group> group, int64_t rank)
      : world_(std::move(world)), group_(std::move(group)), rank_(rank) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return static_cast<int64_t>(group_->ranks.size()); }
  const std::string& name() const override { return group_->name; }
  bool finishes_sums() const override { return world_->finishes_sums(); }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override;
  at::Tensor shared_memory(int64_t bytes) override;

 private:
  Work start(Call call) override {
    return Work(std::make_shared<Ticket>(world_, world_->arrive(*group_, rank_, std::move(call))));
  }

  std::shared_ptr<World> world_;
  std::shared_ptr<Group> group_;
  int64_t rank_;
  uint64_t splits_ = 0;
};

std::shared_ptr<Comm> ThreadComm::split(int64_t color, int64_t key, std::string name) {
  const std::vector<int64_t> colors_and_keys = tell_colors(*this, color, key);
  const SplitGroup made = split_group(colors_and_keys, rank_, group_->ranks, group_->id, splits_++);
  if (made.color < 0) return nullptr;
  return std::make_shared<ThreadComm>(world_, world_->join_group(made.id, name, made.world_ranks), made.rank);
}

// The first rank's allocation, left with the group until the others, too, have a tensor of their own that keeps it alive.
at::Tensor ThreadComm::shared_memory(int64_t bytes) {
  if (rank_ == 0) group_->shared = at::zeros({bytes}, at::kByte);
  barrier().wait();
  const at::Tensor& memory = group_->shared;
  const at::Tensor mine =
      at::from_blob(memory.data_ptr(), {bytes}, [storage = memory.storage()](void*) {}, at::TensorOptions(at::kByte));
  barrier().wait();
  if (rank_ == 0) group_->shared.reset();
  return mine;
}

// Threads from the pool, back to it whatever happens.
class Loan {
 public:
  explicit Loan(int64_t count) : threads_(Pool::instance().acquire(count)) {}
  ~Loan() { Pool::instance().release(threads_); }
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  const std::vector<PoolThread*>& threads() const { return threads_; }
  std::vector<Parker*> parkers() const {
    std::vector<Parker*> parkers;
    for (PoolThread* thread : threads_) parkers.push_back(&thread->parker());
    return parkers;
  }

 private:
  std::vector<PoolThread*> threads_;
};

// MKL chooses the kernels of functions such as tanh and sin at the first of them in a process. When several threads call one
// for the first time, now and then one of them gets results with some 14 bits of precision (seen on a Xeon: 1 of 6,000
// processes with four threads). So one thread calls them first, and makes a product, too. None of these calls goes by
// LibTorch's dispatcher, where a program may count or record operators.
void let_mkl_choose() {
  static const bool chosen = [] {
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
      const at::Tensor x = at::detail::empty_cpu({4, 4}, at::TensorOptions(dtype));
      memset(x.mutable_data_ptr(), 0, x.nbytes());
      at::cpu::mm(x, x);
      at::cpu::tanh(x);
      at::cpu::sin(x);
    }
    return true;
  }();
  static_cast<void>(chosen);
}

}  // namespace
}  // namespace threads

void run_threads(int64_t world_size, const std::function<void(std::shared_ptr<Comm>)>& body,
                 const ThreadsOptions& options) {
  SHARD_REQUIRE(world_size >= 1 && world_size <= kThreadsWorldMax, "threads",
                "a world of {} ranks cannot be run as threads; use 1 to {} ranks, or another backend", world_size,
                kThreadsWorldMax);
  threads::let_mkl_choose();
  const threads::Loan loan(world_size);
  const auto world = std::make_shared<threads::World>(loan.parkers(), options);
  // The number of threads that LibTorch uses within an operator is a setting of each thread; a kept one has an old one.
  const int torch_threads = at::get_num_threads();
  for (int64_t rank = 0; rank < world_size; ++rank) {
    loan.threads()[rank]->assign([world, &body, rank, torch_threads] {
      if (at::get_num_threads() != torch_threads) at::set_num_threads(torch_threads);
      world->run(rank, [&] { body(std::make_shared<threads::ThreadComm>(world, world->everyone(), rank)); });
    });
  }
  world->start();
  world->join();
}

}  // namespace shardproof
