#include "properties/doubles/unkind_groups.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "properties/doubles/fake_device.h"
#include "shardproof/comm/c10d/c10d.h"
#include "shardproof/comm/decorated.h"
#include "internal/device/streams.h"

namespace unkind {
namespace {

using shardproof::C10dGroup;
using shardproof::Comm;
using shardproof::Reduce;
using Pending = c10::intrusive_ptr<c10d::Work>;

class Ordered final : public c10d::Work {
 public:
  explicit Ordered(c10::Stream stream) : stream_(stream), done_(stream.device_type()) { done_.record(stream); }
  bool isCompleted() override { return false; }
  bool wait(std::chrono::milliseconds) override {
    done_.block(shardproof::current_stream(stream_.device()));
    return true;
  }

 private:
  const c10::Stream stream_;
  c10::Event done_;
};

class OnHost final : public c10d::Work {
 public:
  explicit OnHost(shardproof::Work work) : work_(std::move(work)) {}
  bool wait(std::chrono::milliseconds) override {
    work_.wait();
    return true;
  }

 private:
  shardproof::Work work_;
};

class Backend final : public c10d::Backend {
 public:
  Backend(std::shared_ptr<Comm> ranks, c10::Device device)
      : c10d::Backend(static_cast<int>(ranks->rank()), static_cast<int>(ranks->size())),
        ranks_(std::move(ranks)),
        device_(device) {}

  const std::string getBackendName() const override { return device_.is_cpu() ? "gloo" : "unkind"; }

  Pending _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions&) override {
    return collective({output, input}, [&] { return ranks_->all_gather(output, input); });
  }
  Pending alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& outputs, std::vector<int64_t>& inputs,
                        const c10d::AllToAllOptions&) override {
    const auto sizes = [this](const std::vector<int64_t>& given, const at::Tensor& tensor) {
      const std::vector<int64_t> equal(static_cast<size_t>(getSize()), tensor.numel() / getSize());
      return given.empty() ? equal : given;
    };
    return collective({output, input}, [&] {
      return ranks_->all_to_all(output, input, sizes(outputs, output), sizes(inputs, input));
    });
  }
  Pending broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return collective(tensors, [&] { return ranks_->broadcast(tensors[0], options.rootRank); });
  }
  Pending allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return collective(tensors, [&] { return ranks_->all_reduce(tensors[0], reduce_of(options.reduceOp)); });
  }
  Pending _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return collective({output, input}, [&] { return ranks_->reduce_scatter(output, input, reduce_of(options.reduceOp)); });
  }
  Pending send(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return message(tensors, peer, [&](int64_t on_the_wire) { return ranks_->send(tensors[0], peer, on_the_wire); }, tag);
  }
  Pending recv(std::vector<at::Tensor>& tensors, int peer, int tag) override {
    return message(tensors, peer, [&](int64_t on_the_wire) { return ranks_->recv(tensors[0], peer, on_the_wire); }, tag);
  }

 private:
  static Reduce reduce_of(const c10d::ReduceOp& op) {
    if (op == c10d::ReduceOp::MAX) return Reduce::max;
    return op == c10d::ReduceOp::MIN ? Reduce::min : Reduce::sum;
  }

  // The call's work is on `stream`, behind what the caller's was given; the caller's waits for nothing.
  template <class Issue>
  Pending on(c10::Stream stream, const Issue& issue) {
    shardproof::order_streams(shardproof::current_stream(device_), stream);
    const c10::StreamGuard on(stream);
    issue().wait();
    return c10::make_intrusive<Ordered>(stream);
  }

  void require_own(const std::vector<at::Tensor>& tensors) const {
    for (const at::Tensor& tensor : tensors)
      TORCH_CHECK(tensor.device().type() == device_.type(), getBackendName(), " takes no tensor of ", tensor.device());
  }

  template <class Issue>
  Pending collective(const std::vector<at::Tensor>& tensors, const Issue& issue) {
    require_own(tensors);
    if (device_.is_cpu()) return c10::make_intrusive<OnHost>(issue());
    return on(stream(-1), issue);
  }

  template <class Issue>
  Pending message(const std::vector<at::Tensor>& tensors, int64_t peer, const Issue& issue, int64_t tag) {
    require_own(tensors);
    if (device_.is_cpu()) return c10::make_intrusive<OnHost>(issue(tag));
    if (met_.insert(peer).second) {  // a communicator of two is made, for which both have to be there
      at::Tensor mine = at::zeros({1}), theirs = at::empty({1});
      shardproof::Work leaves = ranks_->send(mine, peer, 1), arrives = ranks_->recv(theirs, peer, 1);
      leaves.wait();
      arrives.wait();
    }
    return on(stream(peer), [&] { return issue(0); });
  }

  c10::Stream stream(int64_t of) {
    const auto known = streams_.find(of);
    if (known != streams_.end()) return known->second;
    return streams_.emplace(of, c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_)).first->second;
  }

  const std::shared_ptr<Comm> ranks_;
  const c10::Device device_;
  std::set<int64_t> met_;
  std::map<int64_t, c10::Stream> streams_;  // of collectives: -1; of messages: by peer
};

C10dGroup group_over(std::shared_ptr<Comm> ranks) {
  const int rank = static_cast<int>(ranks->rank()), size = static_cast<int>(ranks->size());
  C10dGroup group = c10::make_intrusive<c10d::ProcessGroup>(c10::make_intrusive<c10d::HashStore>(), rank, size);
  const auto add = [&](c10::Device device, c10d::ProcessGroup::BackendType type, const char* name) {
    group->setBackend(device.type(), type, c10::make_intrusive<Backend>(ranks->split(0, rank, name), device));
  };
  add(c10::kCPU, c10d::ProcessGroup::GLOO, "host");
  add(fake_device::device(), c10d::ProcessGroup::CUSTOM, "unkind");
  group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
  return group;
}

// Rank-threads split with all ranks of a group, and a process group is made by its members alone. So ranks that are in no
// process group, or in one by themselves, take part in the split here.
class Split final : public shardproof::DecoratedComm {
 public:
  // What make_group is to split, and what it has made.
  struct Making {
    std::shared_ptr<Comm> ranks;
    std::vector<int> members;  // in the world, by rank
    std::shared_ptr<Comm> made;
  };
  Split(std::shared_ptr<Comm> inner, std::shared_ptr<Comm> ranks, std::vector<int> members, std::shared_ptr<Making> making)
      : DecoratedComm(std::move(inner)), ranks_(std::move(ranks)), members_(std::move(members)), making_(std::move(making)) {}

  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    *making_ = {ranks_, members_, nullptr};
    const std::vector<int> own = {members_[static_cast<size_t>(rank())]};
    std::shared_ptr<Comm> group = inner().split(color, key, name);
    if (!group) return ranks_->split(-1, 0, name);
    if (group->size() == 1) *making_ = {nullptr, own, ranks_->split_ranks({rank()}, name)};
    return std::make_shared<Split>(std::move(group), making_->made, making_->members, making_);
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    return Comm::split_ranks(ranks, std::move(name));  // which calls `split` of this class
  }

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm>) override { return nullptr; }  // of `split`, which is above

  const std::shared_ptr<Comm> ranks_;
  const std::vector<int> members_;
  const std::shared_ptr<Making> making_;
};

}  // namespace

std::shared_ptr<Comm> world_over(std::shared_ptr<Comm> ranks, bool makes_groups) {
  shardproof::C10dOptions options;
  const auto making = std::make_shared<Split::Making>();
  if (makes_groups)
    options.make_group = [making](const std::vector<int>& members, const std::string& name) {
      std::vector<int64_t> within;
      for (const int rank : members) within.push_back(std::ranges::find(making->members, rank) - making->members.begin());
      *making = {nullptr, members, making->ranks->split_ranks(within, name)};
      return group_over(making->made);
    };
  std::vector<int> all(static_cast<size_t>(ranks->size()));
  std::iota(all.begin(), all.end(), 0);
  return std::make_shared<Split>(shardproof::comm_of(group_over(ranks), options), ranks, all, making);
}

std::unique_ptr<harness::Ranks> ranks() {
  fake_device::install();
  return harness::thread_ranks_on(fake_device::device(),
                                  [](std::shared_ptr<Comm> comm) { return world_over(std::move(comm)); });
}

}  // namespace unkind
