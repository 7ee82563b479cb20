#include "properties/doubles/echo_comm.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "properties/doubles/fake_device.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/capturable.h"

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
  StreamWork() : done(fake_device::device().type()) {}
  void wait() override {
    done.block(c10::impl::VirtualGuardImpl(fake_device::device().type()).getStream(fake_device::device()));
  }
  c10::Event done;
};

class EchoComm final : public Comm, public CapturableComm {
 public:
  EchoComm(int64_t rank, int64_t size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}
  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }
  std::shared_ptr<Comm> split(int64_t, int64_t, std::string name) override {
    throw BrokenInvariant("an echo does not know the other ranks' colors: " + name);
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    const auto own = std::ranges::find(ranks, rank_) - ranks.begin();
    return std::make_shared<EchoComm>(own, std::ssize(ranks), std::move(name));
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
    const c10::impl::VirtualGuardImpl guard(fake_device::device().type());
    if (!lane_) lane_ = guard.getStreamFromGlobalPool(fake_device::device());
    c10::Event given(fake_device::device().type());
    given.record(guard.getStream(fake_device::device()));
    auto work = std::make_shared<StreamWork>();
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
  std::optional<c10::Stream> lane_;
};

}  // namespace

std::shared_ptr<Comm> echo_comm(int64_t rank, int64_t size) {
  return std::make_shared<EchoComm>(rank, size, "world");
}
