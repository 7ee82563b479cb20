#include "properties/doubles/echo_comm.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "properties/doubles/fake_device.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/capturable.h"
#include "shardproof/device/device_graph.h"

using namespace shardproof;

namespace {

// Over memory that the host can touch when the work runs.
at::Tensor flat(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  void* data = const_cast<void*>(tensor.const_data_ptr());
  if (!tensor.is_cpu()) data = fake_device::on_host(data);
  return at::from_blob(data, {tensor.numel()}, tensor.options().device(at::kCPU));
}

at::Tensor summed(const at::Tensor& term, Reduce op, int64_t terms) {
  at::Tensor sum = term.clone();
  for (int64_t k = 1; op == Reduce::sum && k < terms; ++k) sum += term;
  return sum;
}

class StreamWork final : public Work::State {
 public:
  StreamWork(c10::Device device, std::shared_ptr<std::list<std::string>> open, std::string title)
      : done(device.type()), device_(device), open_(std::move(open)), title_(open_->insert(open_->end(), std::move(title))) {}
  // As NCCL's: what a capture left that failed, nobody waits for.
  void wait() override {
    if (!is_captured_ || is_capturing()) done.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
    open_->erase(title_);
  }
  c10::Event done;

 private:
  const c10::Device device_;
  const bool is_captured_ = is_capturing();
  const std::shared_ptr<std::list<std::string>> open_;
  const std::list<std::string>::iterator title_;
};

class EchoComm final : public Comm, public CapturableComm {
 public:
  using Open = std::shared_ptr<std::list<std::string>>;
  EchoComm(int64_t rank, int64_t size, std::string name, Open open)
      : rank_(rank), size_(size), name_(std::move(name)), open_(std::move(open)) {}
  std::vector<std::string> open_calls() const override { return {open_->begin(), open_->end()}; }
  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }
  std::shared_ptr<Comm> split(int64_t, int64_t, std::string name) override {
    throw BrokenInvariant("an echo does not know the other ranks' colors: " + name);
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    const auto own = std::ranges::find(ranks, rank_) - ranks.begin();
    return std::make_shared<EchoComm>(own, std::ssize(ranks), std::move(name), open_);
  }

 private:
  Work start(Call call) override {
    const bool on_host = (!call.input.defined() || call.input.is_cpu()) && (!call.output.defined() || call.output.is_cpu());
    // Without the tensors: their memory belongs to the caller.
    const auto run = [this, plain = Call{.op = call.op, .reduce = call.reduce, .output_sizes = call.output_sizes},
                      output = flat(call.output), input = flat(call.input)] { perform(plain, output, input); };
    if (on_host) {
      run();
      return {};
    }
    const c10::Device device = (call.output.defined() ? call.output : call.input).device();
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::DeviceGuard on_device(device);
    if (!lane_) lane_ = guard.getStreamFromGlobalPool(device);
    c10::Event given(device.type());
    given.record(guard.getStream(device));
    auto work = std::make_shared<StreamWork>(device, open_, describe(call) + " of " + name_);
    const c10::StreamGuard on_lane(*lane_);
    given.block(*lane_);
    fake_device::queue(run, describe(call) + " of " + name_);
    work->done.record(*lane_);
    return Work(work);
  }

  void perform(const Call& call, const at::Tensor& output, const at::Tensor& input) const {
    const at::NoGradGuard no_grad;
    switch (call.op) {
      case Op::all_gather: {
        const at::Tensor own = input.clone();
        for (int64_t r = 0; r < size_; ++r) at::Tensor(output.narrow(0, r * own.numel(), own.numel())).copy_(own);
        return;
      }
      case Op::reduce_scatter: {
        const at::Tensor sum = summed(input.narrow(0, rank_ * output.numel(), output.numel()), call.reduce, size_);
        at::Tensor(output).copy_(sum);
        return;
      }
      case Op::all_reduce:
        at::Tensor(output).copy_(summed(input, call.reduce, size_));
        return;
      case Op::all_to_all: {
        const int64_t part = call.output_sizes[0];
        const at::Tensor sent = input.narrow(0, rank_ * part, part).clone();
        for (int64_t r = 0; r < size_; ++r) at::Tensor(output.narrow(0, r * part, part)).copy_(sent);
        return;
      }
      case Op::broadcast:
      case Op::barrier:
        return;
      default:
        throw BrokenInvariant(std::string("an echo has no ") + to_string(call.op));
    }
  }

  const int64_t rank_, size_;
  const std::string name_;
  const Open open_;
  std::optional<c10::Stream> lane_;
};

}  // namespace

std::shared_ptr<Comm> echo_comm(int64_t rank, int64_t size) {
  return std::make_shared<EchoComm>(rank, size, "world", std::make_shared<std::list<std::string>>());
}
