#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <numeric>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/split_group.h"
#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/comm/c10d/c10d.h"
#include "shardproof/device/device.h"
#include "internal/comm/collective_plan.h"
#include "internal/device/streams.h"

// Newer torch has new names for some collectives. The old ones, which torch 2.11 has, do the same there.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace shardproof {
namespace {

using Pending = c10::intrusive_ptr<c10d::Work>;

// A tag on the wire is the group's number, and behind it the caller's tag, or none for what a collective sends.
constexpr int64_t kGroupsMax = 1 << 12, kTagsMax = (int64_t{1} << 31) / kGroupsMax - 1;

// No autograd, no versions, and nothing that a backend could know of the dtype.
at::Tensor plain(const at::Tensor& tensor) {
  return tensor.variable_data().view({-1});
}
at::Tensor bytes_of(const at::Tensor& tensor) {
  return plain(tensor).view(at::kByte);
}

// A collective under way: the group's, and what is left to do with what it brings.
class C10dWork : public Work::State {
 public:
  C10dWork(std::vector<Pending> pending, std::string where, std::function<void()> finish, std::vector<at::Tensor> alive)
      : pending_(std::move(pending)), where_(std::move(where)), finish_(std::move(finish)), alive_(std::move(alive)) {}

  void wait() override {
    if (done_) return;
    if (!failed_.empty()) throw Error(failed_);
    try {
      for (const Pending& part : pending_) part->wait();
    } catch (const std::exception& error) {
      failed_ = fmt::format("[c10d] {} failed: {}. Did another rank die, or come later than the group's timeout?", where_,
                            error.what());
      throw Error(failed_);
    }
    done_ = true;
    if (finish_) finish_();
    alive_.clear();
  }

 private:
  std::vector<Pending> pending_;
  std::string where_;
  std::function<void()> finish_;
  std::vector<at::Tensor> alive_;
  bool done_ = false;
  std::string failed_;  // why; a wait that comes again must not find it done
};

// A collective over a backend that only orders streams. A stream beside the caller's was given all of its steps, so the host
// waits for none of them.
class BesideWork : public Work::State {
 public:
  BesideWork(c10::Stream stream, Call call) : stream_(stream), done_(stream.device_type()), call_(std::move(call)) {
    done_.record(stream);
  }
  // Its tensors live until a stream of the caller's is behind the call, also where nobody has waited.
  ~BesideWork() override {
    try {
      if (!waited_) wait();
    } catch (const c10::Error&) {  // the device failed, which its next call reports
    }
  }
  void wait() override {
    waited_ = true;
    done_.block(current_stream(stream_.device()));
    for (const at::Tensor* tensor : {&call_.input, &call_.output})
      if (tensor->defined()) use_here(tensor->storage().data_ptr());
  }

 private:
  const c10::Stream stream_;
  c10::Event done_;
  Call call_;
  bool waited_ = false;
};

// Whether a backend of the group only orders streams, as NCCL's: it knows no tags, and a message that is sent before the peer
// receives may stop the host.
bool orders_streams(c10d::ProcessGroup& group) {
  const auto devices = group.getDeviceTypes();
  return std::any_of(devices.begin(), devices.end(), [&](c10::Device device) {
    const std::string name = group.getBackend(device.type())->getBackendName();
    return !device.is_cpu() && name != "gloo" && name != "mpi";
  });
}

// Messages of a rank to itself, which process groups refuse. A receive may come before its send.
class OwnMessages {
 public:
  void send(int64_t tag, const at::Tensor& tensor) {
    Queue& queue = queues_[tag];
    if (queue.receives.empty()) return queue.sends.push_back(tensor.clone());
    *queue.receives.front() = tensor.clone();
    queue.receives.pop_front();
  }
  std::shared_ptr<at::Tensor> receive(int64_t tag) {
    Queue& queue = queues_[tag];
    auto place = std::make_shared<at::Tensor>();
    if (queue.sends.empty()) {
      queue.receives.push_back(place);
    } else {
      *place = queue.sends.front();
      queue.sends.pop_front();
    }
    return place;
  }

 private:
  struct Queue {
    std::deque<at::Tensor> sends;
    std::deque<std::shared_ptr<at::Tensor>> receives;
  };
  std::map<int64_t, Queue> queues_;
};

class C10dComm : public Comm {
 public:
  // `members`: of this group in `group`, which is all of it when `whole`.
  C10dComm(C10dGroup group, std::vector<int> members, bool whole, int64_t number, C10dOptions options, std::string name)
      : group_(std::move(group)),
        members_(std::move(members)),
        whole_(whole),
        number_(number),
        options_(std::move(options)),
        name_(std::move(name)),
        orders_streams_(orders_streams(*group_)),
        rank_(std::find(members_.begin(), members_.end(), group_->getRank()) - members_.begin()) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return std::ssize(members_); }
  const std::string& name() const override { return name_; }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override;

 private:
  Work start(Call call) override;
  Work begin(const Call& call);
  Work gather(const Call& call);
  Work all_to_all_bytes(const Call& call);
  Work broadcast_bytes(const Call& call);
  Work reduce_natively(const Call& call);
  Work reduce_in_rank_order(const Call& call);
  Work all_reduce_by_slices(const Call& call);
  Work message(const Call& call);
  // `target`: the call's output, or of a sum memory for the terms of all ranks, one after the other.
  Work exchange(const Call& call, const at::Tensor& target, std::function<void()> finish = {});

  std::string where(const Call& call) const {
    return fmt::format("{} on '{}' (rank {} of {})", describe(call), name_, rank(), size());
  }
  Work work(const Call& call, std::vector<Pending> pending, std::function<void()> finish = {},
            std::vector<at::Tensor> alive = {}) {
    alive.insert(alive.end(), {call.input, call.output});
    return Work(std::make_shared<C10dWork>(std::move(pending), where(call), std::move(finish), std::move(alive)));
  }
  bool native() const { return options_.sum == C10dOptions::Sum::native; }

  C10dGroup group_;
  std::vector<int> members_;
  bool whole_;
  int64_t number_;
  C10dOptions options_;
  std::string name_;
  const bool orders_streams_;  // the group's backend for a device
  int64_t rank_;
  OwnMessages own_;
  std::optional<c10::Stream> beside_;  // where collectives on a device run
};

Work C10dComm::start(Call call) {
  const at::Tensor& any = call.output.defined() ? call.output : call.input;
  const bool message = call.op == Op::send || call.op == Op::recv;
  try {
    if (!any.defined() || any.is_cpu() || message || !orders_streams_) return begin(call);
    if (!beside_ || beside_->device() != any.device())
      beside_ = c10::impl::VirtualGuardImpl(any.device().type()).getStreamFromGlobalPool(any.device());
    order_streams(current_stream(any.device()), *beside_);
    const c10::StreamGuard on(*beside_);
    begin(call).wait();
    return Work(std::make_shared<BesideWork>(*beside_, std::move(call)));
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(fmt::format("[c10d] {} could not be started: {}", where(call), error.what()));
  }
}

Work C10dComm::begin(const Call& call) {
  const bool empty = call.op != Op::barrier && call.op != Op::all_to_all && numel(call) == 0;
  if (empty && call.op != Op::send && call.op != Op::recv) return Work();
  switch (call.op) {
    case Op::all_gather:
    case Op::split:
      return gather(call);
    case Op::all_to_all:
      return all_to_all_bytes(call);
    case Op::reduce_scatter:
    case Op::all_reduce:
      return whole_ && native() ? reduce_natively(call) : reduce_in_rank_order(call);
    case Op::broadcast:
      return broadcast_bytes(call);
    case Op::send:
    case Op::recv:
      return message(call);
    case Op::barrier: {
      const at::Tensor all = at::zeros({size()}, at::kByte), own = at::zeros({1}, at::kByte);
      return gather({.op = Op::all_gather, .output = all, .input = own});
    }
  }
  SHARD_CHECK(false, "c10d", "{} is no call of a backend", to_string(call.op));
  return Work();
}

// Everything to and from everybody is under way when this returns; the part for itself is copied.
Work C10dComm::exchange(const Call& call, const at::Tensor& target, std::function<void()> finish) {
  const CollectivePlan plan(call, rank(), size());
  const auto given = [&](int64_t peer) {
    const ElementRange range = plan.send_range(peer);
    return range.length > 0 ? bytes_of(plain(call.input).narrow(0, range.begin, range.length)) : at::Tensor();
  };
  const auto place = [&](int64_t peer) {
    const ElementRange range = plan.recv_range(peer);
    const int64_t begin = plan.sums() ? peer * range.length : range.begin;
    return range.length > 0 ? bytes_of(plain(target).narrow(0, begin, range.length)) : at::Tensor();
  };
  std::vector<Pending> pending;
  std::vector<at::Tensor> alive;
  for (const bool receives : {true, false})
    for (int64_t r = 0; r < size(); ++r) {
      const at::Tensor part = receives ? place(r) : given(r);
      if (r == rank_ || !part.defined()) continue;
      std::vector<at::Tensor> tensors = {part};
      const int peer = members_[static_cast<size_t>(r)], tag = static_cast<int>(number_);
      pending.push_back(receives ? group_->recv(tensors, peer, tag) : group_->send(tensors, peer, tag));
      alive.push_back(part);
    }
  const at::Tensor own = given(rank_), own_place = place(rank_);
  if (own.defined() && own.const_data_ptr() != own_place.const_data_ptr()) own_place.copy_(own);
  return work(call, std::move(pending), std::move(finish), std::move(alive));
}

Work C10dComm::gather(const Call& call) {
  if (!whole_) return exchange(call, call.output);
  at::Tensor output = bytes_of(call.output), input = bytes_of(call.input);
  if (output.const_data_ptr() == static_cast<const std::byte*>(input.const_data_ptr()) - rank() * input.numel())
    input = orders_streams_ && !input.is_cpu() ? input : input.clone();  // NCCL gathers in place, others do not promise it
  return work(call, {group_->_allgather_base(output, input)}, {}, {output, input});
}

Work C10dComm::all_to_all_bytes(const Call& call) {
  if (!whole_) return exchange(call, call.output);
  at::Tensor output = bytes_of(call.output), input = bytes_of(call.input);
  std::vector<int64_t> outputs = call.output_sizes, inputs = call.input_sizes;
  for (std::vector<int64_t>* sizes : {&outputs, &inputs})
    for (int64_t& size : *sizes) size *= call.input.element_size();
  return work(call, {group_->alltoall_base(output, input, outputs, inputs)}, {}, {output, input});
}

Work C10dComm::broadcast_bytes(const Call& call) {
  if (!whole_) return exchange(call, call.output);
  std::vector<at::Tensor> tensors = {bytes_of(call.peer == rank() ? call.input : call.output)};
  c10d::BroadcastOptions options;
  options.rootRank = call.peer;
  return work(call, {group_->broadcast(tensors, options)}, {}, tensors);
}

c10d::ReduceOp native_op(Reduce op) {
  if (op == Reduce::max) return c10d::ReduceOp::MAX;
  return op == Reduce::min ? c10d::ReduceOp::MIN : c10d::ReduceOp::SUM;
}

Work C10dComm::reduce_natively(const Call& call) {
  if (call.op == Op::all_reduce) {
    std::vector<at::Tensor> tensors = {plain(call.output)};
    c10d::AllreduceOptions options;
    options.reduceOp = native_op(call.reduce);
    return work(call, {group_->allreduce(tensors, options)}, {}, tensors);
  }
  at::Tensor output = plain(call.output), input = plain(call.input);
  c10d::ReduceScatterOptions options;
  options.reduceOp = native_op(call.reduce);
  at::Tensor apart = at::empty_like(output);  // the output may be a part of the input
  return work(call, {group_->_reduce_scatter_base(apart, input, options)}, [output, apart] { output.copy_(apart); }, {input});
}

// Each rank sums a slice and tells it to all, so that there is memory for one or two more tensors, and not for one of each
// rank. The second exchange begins once the first has ended, which the host need not wait for on a device.
Work C10dComm::all_reduce_by_slices(const Call& call) {
  const at::Tensor output = plain(call.output);
  const int64_t slice = (output.numel() + size() - 1) / size();
  const at::Tensor sum = at::empty({slice}, output.options());
  at::Tensor given = plain(call.input), all = output;
  if (slice * size() > output.numel()) all = given = at::constant_pad_nd(given, {0, slice * size() - output.numel()});
  reduce_in_rank_order({.op = Op::reduce_scatter, .output = sum, .input = given, .reduce = call.reduce}).wait();
  gather({.op = Op::all_gather, .output = all, .input = sum}).wait();
  if (!all.is_same(output)) at::Tensor(output).copy_(all.narrow(0, 0, output.numel()));
  return Work();
}

// Everybody's terms of what this rank needs come together in one exchange, and are summed here.
Work C10dComm::reduce_in_rank_order(const Call& call) {
  SHARD_REQUIRE(can_reduce(dtype(call)), "c10d", "{}: {} cannot be reduced", where(call), c10::toString(dtype(call)));
  if (call.op == Op::all_reduce && !call.output.is_cpu() && orders_streams_) return all_reduce_by_slices(call);
  const at::Tensor output = plain(call.output);
  at::Tensor terms = at::empty({size() * output.numel()}, output.options());
  const auto finish = [output, terms, op = call.reduce] {
    std::vector<const std::byte*> places;
    const auto* data = static_cast<const std::byte*>(terms.const_data_ptr());
    for (const int64_t r : order_of_terms(terms.numel() / output.numel()))
      places.push_back(data + r * static_cast<int64_t>(output.nbytes()));
    device_math(output).reduce(element_type(output.scalar_type()), op, places, output.numel(),
                               static_cast<std::byte*>(output.mutable_data_ptr()));
  };
  if (!whole_) return exchange(call, terms, finish);
  at::Tensor received = bytes_of(terms), given = bytes_of(call.input);
  const bool scatters = call.op == Op::reduce_scatter;
  std::vector<int64_t> equal;
  if (scatters) equal.assign(members_.size(), static_cast<int64_t>(output.nbytes()));
  Pending pending = scatters ? group_->alltoall_base(received, given, equal, equal) : group_->_allgather_base(received, given);
  return work(call, {std::move(pending)}, finish, {received, given});
}

Work C10dComm::message(const Call& call) {
  const bool sends = call.op == Op::send;
  SHARD_REQUIRE(call.tag >= 0 && call.tag < kTagsMax, "c10d", "{}: a tag must lie between 0 and {}", where(call), kTagsMax - 1);
  const at::Tensor tensor = bytes_of(sends ? call.input : call.output);
  if (call.peer == rank()) {
    if (sends) {
      own_.send(call.tag, tensor);
      return Work();
    }
    const auto finish = [place = own_.receive(call.tag), tensor, text = where(call)] {
      SHARD_REQUIRE(place->defined() && place->numel() == tensor.numel(), "c10d",
                    "{}: the rank waits for a message of {} bytes of its own, {}", text, tensor.numel(),
                    place->defined() ? fmt::format("and sent {}", place->numel()) : "which it has not sent");
      tensor.copy_(*place);
    };
    return work(call, {}, finish);
  }
  std::vector<at::Tensor> tensors = {tensor};
  const int peer = members_[static_cast<size_t>(call.peer)];
  const int tag = static_cast<int>((call.tag + 1) * kGroupsMax + number_);
  return work(call, {sends ? group_->send(tensors, peer, tag) : group_->recv(tensors, peer, tag)}, {}, tensors);
}

// The highest number of a group that this process has been in. No two groups that share a rank may have one number, so ranks
// that split a group take the next that none of them has used.
std::atomic<int64_t> groups{0};
// The same of groups that C10dOptions::make_group made. They have tags of their own, and share them only where it gave one
// process group twice. So their numbers may begin again.
std::atomic<int64_t> groups_made{0};

std::shared_ptr<Comm> C10dComm::split(int64_t color, int64_t key, std::string name) {
  const std::vector<int64_t> colors_and_keys = tell_colors(*this, color, key);
  std::atomic<int64_t>& last = options_.make_group ? groups_made : groups;
  at::Tensor next = at::full({1}, last.load() + 1, at::kLong);
  all_reduce(next, Reduce::max).wait();
  const int64_t number = next.item<int64_t>();
  const std::vector<int64_t> mine(members_.begin(), members_.end());
  const SplitGroup made = split_group(colors_and_keys, rank(), mine, 0, static_cast<uint64_t>(number));
  if (made.color < 0) return nullptr;
  const std::vector<int> members(made.world_ranks.begin(), made.world_ranks.end());
  if (members.size() > 1) last = number;
  SHARD_REQUIRE(options_.make_group || members.size() == 1 || number < kGroupsMax, "c10d",
                "split of '{}': at most {} groups in the life of a process share the tags of a process group; reuse them, or "
                "give C10dOptions::make_group (in Python make_groups=True)",
                name_, kGroupsMax);
  SHARD_REQUIRE(size() == 1 || options_.make_group || !orders_streams_, "c10d",
                "split of '{}': the process group has a backend without tags ({}), so ranks along '{}' cannot send messages "
                "through it. Give C10dOptions::make_group; in Python leave make_groups out, or give make_groups=True",
                name_, group_->getBackendName(), name);
  if (members.size() == 1 || !options_.make_group)  // a rank alone sends nothing
    return std::make_shared<C10dComm>(group_, members, false, number, options_, std::move(name));
  C10dOptions options = options_;
  const C10dGroup group = options.make_group(members, fmt::format("{}.{}", name, number));
  SHARD_REQUIRE(group && group->getSize() == std::ssize(members) && group->getRank() == made.rank, "c10d",
                "C10dOptions::make_group made a group for '{}' in which this rank is {} of {}; it was asked for [{}], in this "
                "order, of which it is {}",
                name, group ? group->getRank() : -1, group ? group->getSize() : 0, fmt::join(members, ","), made.rank);
  std::vector<int> inside(members.size());
  std::iota(inside.begin(), inside.end(), 0);
  // Groups of this one are numbered by ranks of its own.
  options.make_group = [make = options_.make_group, members](const std::vector<int>& ranks, const std::string& of) {
    std::vector<int> outside;
    for (const int r : ranks) outside.push_back(members[static_cast<size_t>(r)]);
    return make(outside, of);
  };
  return std::make_shared<C10dComm>(group, std::move(inside), true, number % kGroupsMax, std::move(options), std::move(name));
}

}  // namespace

std::shared_ptr<Comm> comm_of(C10dGroup group, C10dOptions options, std::string name) {
  SHARD_REQUIRE(group, "c10d", "comm_of: the process group is null; call init_process_group first");
  std::vector<int> members(static_cast<size_t>(group->getSize()));
  std::iota(members.begin(), members.end(), 0);
  return std::make_shared<C10dComm>(std::move(group), std::move(members), true, 0, std::move(options), std::move(name));
}

}  // namespace shardproof
