#include "shardproof/comm/comm.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "internal/base/call_label.h"

namespace shardproof {
namespace {

// "all_gather on 'dp_shard' (rank 2 of 4)": who, in every message below.
std::string where(const Call& call, const Comm& comm) {
  return fmt::format("{} on '{}' (rank {} of {})", to_string(call.op), comm.name(), comm.rank(), comm.size());
}

bool needs_input(const Call& call, const Comm& comm) {
  if (call.op == Op::broadcast) return call.peer == comm.rank();
  return call.op != Op::barrier && call.op != Op::recv;
}

bool needs_output(const Call& call, const Comm& comm) {
  if (call.op == Op::broadcast) return call.peer != comm.rank();
  return call.op != Op::barrier && call.op != Op::send;
}

void validate_tensor(const at::Tensor& tensor, const char* role, const Call& call, const Comm& comm) {
  SHARD_REQUIRE(tensor.defined(), "comm", "{}: the {} is undefined; pass a tensor", where(call, comm), role);
  SHARD_REQUIRE(tensor.is_contiguous(), "comm",
                "{}: the {} of sizes [{}] is not contiguous; pass a contiguous tensor, so that results do not land in "
                "a temporary copy",
                where(call, comm), role, fmt::join(tensor.sizes(), ","));
  SHARD_REQUIRE(tensor.numel() == 0 || tensor.const_data_ptr() != nullptr, "comm",
                "{}: the {} of {} elements has no storage; it was released, fill it first", where(call, comm), role,
                tensor.numel());
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  auto* a_begin = static_cast<const std::byte*>(a.const_data_ptr());
  auto* b_begin = static_cast<const std::byte*>(b.const_data_ptr());
  return a_begin < b_begin + b.nbytes() && b_begin < a_begin + a.nbytes();
}

// The smaller tensor may be this rank's slice of the larger, and nothing else of it.
void validate_slice(const at::Tensor& whole, const at::Tensor& slice, const char* role, const Call& call,
                    const Comm& comm) {
  SHARD_REQUIRE(whole.numel() == comm.size() * slice.numel(), "comm",
                "{}: the other tensor must be {} times as large as the {}, got input {} and output {} elements",
                where(call, comm), comm.size(), role, call.input.numel(), call.output.numel());
  if (!overlap(whole, slice)) return;
  auto* own = static_cast<const std::byte*>(whole.const_data_ptr()) + comm.rank() * slice.nbytes();
  SHARD_REQUIRE(slice.const_data_ptr() == own, "comm",
                "{}: input and output overlap, but the {} is not slice {} of the other; use separate tensors",
                where(call, comm), role, comm.rank());
}

void validate_sizes(const std::vector<int64_t>& sizes, const at::Tensor& tensor, const char* role, const Call& call,
                    const Comm& comm) {
  bool ok = static_cast<int64_t>(sizes.size()) == comm.size() &&
            std::accumulate(sizes.begin(), sizes.end(), int64_t{0}) == tensor.numel();
  for (int64_t size : sizes) ok = ok && size >= 0;
  SHARD_REQUIRE(ok, "comm", "{}: {}_sizes must be {} counts that sum to the tensor's {} elements, got [{}]",
                where(call, comm), role, comm.size(), tensor.numel(), fmt::join(sizes, ","));
}

bool sums(const Call& call) {
  return (call.op == Op::reduce_scatter || call.op == Op::all_reduce) && call.reduce == Reduce::sum;
}

void require_exact(double factor, const Call& call, const Comm& comm) {
  int exponent = 0;
  SHARD_REQUIRE(std::frexp(factor, &exponent) == 0.5 && exponent >= -14 && exponent <= 1, "comm",
                "{}: the factor must be a power of two from 2^-15 to 1, got {}", where(call, comm), factor);
}

void validate_factor(const Call& call, const Comm& comm) {
  SHARD_REQUIRE(comm.premultiplies() && sums(call) && c10::isFloatingType(dtype(call)), "comm",
                "{}: a factor of {} is for sums of floats where Comm::premultiplies says so; multiply the terms first",
                where(call, comm), call.factor);
  require_exact(call.factor, call, comm);
}

void validate_finish(const Call& call, const Comm& comm) {
  const bool fits = sums(call) && dtype(call) == at::kFloat && call.output.is_cpu();
  SHARD_REQUIRE(fits && comm.finishes_sums(), "comm",
                "{}: only a sum of float32 on the CPU can be multiplied, or searched for NaN and infinity, in the same call, "
                "and only where Comm::finishes_sums is true; do it after {}",
                where(call, comm), describe(call));
  require_exact(call.finish.factor, call, comm);
}

void validate(const Call& call, const Comm& comm) {
  if (call.op == Op::broadcast || call.op == Op::send || call.op == Op::recv)
    SHARD_REQUIRE(call.peer >= 0 && call.peer < comm.size(), "comm", "{}: there is no rank {}; ranks are 0 to {}",
                  where(call, comm), call.peer, comm.size() - 1);
  const bool sends = needs_input(call, comm), receives = needs_output(call, comm);
  if (sends) validate_tensor(call.input, "input", call, comm);
  if (receives) validate_tensor(call.output, "output", call, comm);
  if (call.factor != 1) validate_factor(call, comm);
  if (call.finish.factor != 1 || call.finish.all_finite) validate_finish(call, comm);
  if (!sends || !receives) return;
  SHARD_REQUIRE(call.input.scalar_type() == call.output.scalar_type(), "comm", "{}: the input is {} but the output {}",
                where(call, comm), dtype_name(call.input.scalar_type()), dtype_name(call.output.scalar_type()));
  if (call.op == Op::all_gather || call.op == Op::split)
    validate_slice(call.output, call.input, "input", call, comm);
  if (call.op == Op::reduce_scatter) validate_slice(call.input, call.output, "output", call, comm);
  if (call.op == Op::all_to_all) {
    validate_sizes(call.input_sizes, call.input, "input", call, comm);
    validate_sizes(call.output_sizes, call.output, "output", call, comm);
    SHARD_REQUIRE(!overlap(call.input, call.output), "comm", "{}: input and output overlap; use separate tensors",
                  where(call, comm));
  }
}

// What every collective of a group of one does.
void copy_alone(const Call& call) {
  // Of a sum without elements, too.
  if (call.finish.all_finite) *call.finish.all_finite = at::isfinite(call.input).all().item<bool>();
  if (!call.input.defined() || !call.output.defined() || call.input.numel() == 0) return;
  // variable_data: no autograd, and no bump of the version that saved tensors are checked against.
  at::Tensor output = call.output.variable_data().view({-1});
  if (call.input.const_data_ptr() != call.output.const_data_ptr()) output.copy_(call.input.variable_data().view({-1}));
  if (call.factor != 1) output.mul_(call.factor);
  if (call.finish.factor != 1) output.mul_(call.finish.factor);
}

thread_local std::string_view label, occasion;

}  // namespace

CallLabel::CallLabel(std::string_view text, std::string_view which)
    : outer_(std::exchange(label, text)), outer_occasion_(std::exchange(occasion, which)) {}
CallLabel::~CallLabel() {
  label = outer_;
  occasion = outer_occasion_;
}
std::string_view CallLabel::current() {
  return label;
}
std::string CallLabel::purpose() {
  std::string text(occasion);
  return text.append(text.empty() ? "" : ", ").append(label);
}

const char* to_string(Reduce op) {
  switch (op) {
    case Reduce::sum: return "sum";
    case Reduce::max: return "max";
    case Reduce::min: return "min";
  }
  return "?";
}

const char* to_string(Op op) {
  switch (op) {
    case Op::all_gather: return "all_gather";
    case Op::reduce_scatter: return "reduce_scatter";
    case Op::all_reduce: return "all_reduce";
    case Op::all_to_all: return "all_to_all";
    case Op::broadcast: return "broadcast";
    case Op::send: return "send";
    case Op::recv: return "recv";
    case Op::barrier: return "barrier";
    case Op::split: return "split";
  }
  return "?";
}

int64_t numel(const Call& call) {
  if (call.op == Op::barrier || call.op == Op::all_to_all) return 0;
  if (call.op == Op::reduce_scatter) return call.output.numel();
  return call.input.defined() ? call.input.numel() : call.output.numel();
}

at::ScalarType dtype(const Call& call) {
  if (call.input.defined()) return call.input.scalar_type();
  return call.output.defined() ? call.output.scalar_type() : at::kByte;
}

std::string describe(const Call& call) {
  const auto elements = [&] { return fmt::format("{} x {}", dtype_name(dtype(call)), numel(call)); };
  switch (call.op) {
    case Op::barrier: return "barrier()";
    case Op::split: return "split()";
    case Op::all_gather: return fmt::format("all_gather({})", elements());
    case Op::reduce_scatter:
    case Op::all_reduce:
      return fmt::format("{}({}{}{}, {})", to_string(call.op), to_string(call.reduce),
                         call.factor == 1 ? "" : fmt::format(" times {}", call.factor),
                         call.finish.factor == 1 ? "" : fmt::format(" then times {}", call.finish.factor), elements());
    case Op::all_to_all:
      return fmt::format("all_to_all({}, sends {}, receives {})", dtype_name(dtype(call)),
                         fmt::join(call.input_sizes, "+"), fmt::join(call.output_sizes, "+"));
    case Op::broadcast: return fmt::format("broadcast({}, root {})", elements(), call.peer);
    case Op::send: return fmt::format("send({}, to {}, tag {})", elements(), call.peer, call.tag);
    case Op::recv: return fmt::format("recv({}, from {}, tag {})", elements(), call.peer, call.tag);
  }
  return "?";
}

at::Tensor Comm::shared_memory(int64_t bytes) { return size() == 1 ? at::zeros({bytes}, at::kByte) : at::Tensor(); }

c10::DataPtr Comm::allocate(Op, int64_t, c10::Device) {
  return {};
}

std::shared_ptr<Comm> Comm::split_ranks(const std::vector<int64_t>& ranks, std::string name) {
  const auto own = std::find(ranks.begin(), ranks.end(), rank());
  SHARD_REQUIRE(own != ranks.end(), "comm", "split_ranks on '{}': rank {} is not among its own group's ranks [{}]",
                this->name(), rank(), fmt::join(ranks, ","));
  return split(*std::min_element(ranks.begin(), ranks.end()), own - ranks.begin(), std::move(name));
}

Work Comm::issue(Call call) {
  validate(call, *this);
  const bool point_to_point = call.op == Op::send || call.op == Op::recv;
  if (size() > 1 || point_to_point) return start(std::move(call));
  copy_alone(call);
  return Work();
}

std::shared_ptr<Comm> Comm::shared() {
  std::shared_ptr<Comm> owned = weak_from_this().lock();
  SHARD_REQUIRE(owned != nullptr, "comm",
                "group '{}' on rank {} belongs to no shared_ptr, and a graph is to keep it; make it one", name(), rank());
  return owned;
}

Work Comm::all_gather(at::Tensor output, at::Tensor input) {
  return issue({.op = Op::all_gather, .output = std::move(output), .input = std::move(input)});
}

Work Comm::reduce_scatter(at::Tensor output, at::Tensor input, Reduce op) {
  return issue({.op = Op::reduce_scatter, .output = std::move(output), .input = std::move(input), .reduce = op});
}

Work Comm::all_reduce(at::Tensor tensor, Reduce op) {
  return issue({.op = Op::all_reduce, .output = tensor, .input = tensor, .reduce = op});
}

Work Comm::scaled_reduce_scatter(at::Tensor output, at::Tensor input, double factor) {
  return issue({.op = Op::reduce_scatter, .output = std::move(output), .input = std::move(input), .factor = factor});
}

Work Comm::scaled_all_reduce(at::Tensor tensor, double factor) {
  return issue({.op = Op::all_reduce, .output = tensor, .input = tensor, .factor = factor});
}

Work Comm::finished_reduce_scatter(at::Tensor output, at::Tensor input, Finish finish) {
  return issue({.op = Op::reduce_scatter, .output = std::move(output), .input = std::move(input), .finish = std::move(finish)});
}

Work Comm::finished_all_reduce(at::Tensor tensor, Finish finish) {
  return issue({.op = Op::all_reduce, .output = tensor, .input = tensor, .finish = std::move(finish)});
}

Work Comm::all_to_all(at::Tensor output, at::Tensor input, std::vector<int64_t> output_sizes,
                      std::vector<int64_t> input_sizes) {
  return issue({.op = Op::all_to_all,
                .output = std::move(output),
                .input = std::move(input),
                .output_sizes = std::move(output_sizes),
                .input_sizes = std::move(input_sizes)});
}

Work Comm::broadcast(at::Tensor tensor, int64_t root) {
  Call call{.op = Op::broadcast, .output = {}, .input = {}, .peer = root};
  (root == rank() ? call.input : call.output) = std::move(tensor);
  return issue(std::move(call));
}

Work Comm::send(at::Tensor tensor, int64_t target, int64_t tag) {
  return issue({.op = Op::send, .output = {}, .input = std::move(tensor), .peer = target, .tag = tag});
}

Work Comm::recv(at::Tensor tensor, int64_t source, int64_t tag) {
  return issue({.op = Op::recv, .output = std::move(tensor), .input = {}, .peer = source, .tag = tag});
}

Work Comm::barrier() { return issue({.op = Op::barrier, .output = {}, .input = {}}); }

}  // namespace shardproof
