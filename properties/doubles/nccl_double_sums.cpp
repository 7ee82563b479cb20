// Native sums, their operators, and registered memory, of the double.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>
#include <stdexcept>

#include "properties/doubles/nccl_double.h"
#include "properties/doubles/nccl_double_member.h"

namespace nccl_double {

// From the last rank to the first: NCCL promises no order.
void Api::add_backwards(const std::vector<Bytes>& inputs, int64_t offset, int64_t count, at::ScalarType dtype, Adding adding,
                        std::byte* place) {
  const auto term = [&](size_t rank) {
    const at::Tensor given = at::from_blob(const_cast<std::byte*>(inputs[rank].data()) + offset, {count}, dtype);
    return adding.factor == 1 ? given : given.mul(adding.factor);
  };
  at::Tensor sum = term(inputs.size() - 1).clone();
  for (size_t rank = inputs.size() - 1; rank-- > 0;)
    sum = adding.op == Reduce::sum   ? at::add(sum, term(rank))
          : adding.op == Reduce::max ? at::maximum(sum, term(rank))
                                     : at::minimum(sum, term(rank));
  std::memcpy(place, sum.const_data_ptr(), sum.nbytes());
}

NcclResult Api::create_premultiplied_sum(Operator& op, double factor, at::ScalarType dtype, Communicator communicator) {
  if (member(communicator)->aborted) return NcclResult::invalid_argument;
  const std::lock_guard lock(mutex_);
  op = 5 + static_cast<Operator>(operators_made_++);
  operators_[op] = {factor, dtype, communicator};
  return NcclResult::success;
}

NcclResult Api::destroy_operator(Operator op, Communicator communicator) {
  const std::lock_guard lock(mutex_);
  const auto found = operators_.find(op);
  if (found == operators_.end() || found->second.communicator != communicator) return NcclResult::invalid_argument;
  operators_.erase(found);
  return NcclResult::success;
}

Api::Adding Api::adding(Operator op, at::ScalarType dtype, Communicator communicator) {
  for (const Reduce reduce : {Reduce::sum, Reduce::max, Reduce::min})
    if (op == operator_of(reduce)) return {reduce, 1};
  const std::lock_guard lock(mutex_);
  const auto found = operators_.find(op);
  if (found == operators_.end() || found->second.dtype != dtype || found->second.communicator != communicator)
    throw std::logic_error("an operator was used that is not there, or of another dtype or communicator");
  ++premultiplied_calls_;
  return {Reduce::sum, found->second.factor};
}

// As NCCL 2.28 chooses (ncclSymkImplemented in src/sym_kernels.cc, and src/scheduler/symmetric_sched.cc).
void Api::count_symmetric_sum(const void* input, const void* output, at::ScalarType dtype, Operator op,
                              Communicator communicator) {
  const bool has_kernel = dtype == at::kFloat || dtype == at::kHalf || dtype == at::kBFloat16;
  symmetric_sums_ += has_kernel && op == operator_of(Reduce::sum) && place_of(communicator, input) != kNoWindow &&
                     place_of(communicator, output) != kNoWindow;
}

NcclResult Api::all_reduce(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                           Communicator communicator, NcclApi::Stream stream) {
  const auto bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
  const Adding how = adding(op, dtype, communicator);
  count_symmetric_sum(input, output, dtype, op, communicator);
  return collective(
      communicator, stream, fmt::format("all_reduce of {}, times {}", bytes, how.factor), input, bytes, output, bytes,
      [=](const std::vector<Bytes>& inputs, std::byte* place) { add_backwards(inputs, 0, count, dtype, how, place); });
}

NcclResult Api::reduce_scatter(const void* input, void* output, int64_t count, at::ScalarType dtype, Operator op,
                               Communicator communicator, NcclApi::Stream stream) {
  const auto of = member(communicator);
  const auto bytes = count * static_cast<int64_t>(c10::elementSize(dtype));
  const Adding how = adding(op, dtype, communicator);
  count_symmetric_sum(input, output, dtype, op, communicator);
  return collective(communicator, stream, fmt::format("reduce_scatter of {}, times {}", bytes, how.factor), input,
                    bytes * of->clique->size, output, bytes,
                    [=, rank = of->rank](const std::vector<Bytes>& inputs, std::byte* place) {
                      add_backwards(inputs, rank * bytes, count, dtype, how, place);
                    });
}

// Windows are made by all ranks together, and are in progress until all have called.
NcclResult Api::register_memory(Communicator communicator, void* memory, int64_t bytes, Memory kind, void*& handle) {
  const auto of = member(communicator);
  if (of->aborted) return NcclResult::invalid_argument;
  if (kind == Memory::symmetric && cluster_->plan.no_windows) throw std::logic_error("a window was made where there are none");
  const std::scoped_lock lock(of->clique->mutex, mutex_);
  const auto found = memory_.find(memory);
  if (found == memory_.end() || kind == Memory::plain || kind == Memory::pinned || found->second.kind != kind ||
      bytes % 4096 != 0 || registered_.count(memory) > 0)
    return NcclResult::invalid_argument;
  ++registrations_;
  registered_[memory] = {communicator, bytes, kind == Memory::symmetric ? of->windows : -1};
  if (kind == Memory::registered) {
    handle = memory;
    return NcclResult::success;
  }
  Clique::Window& window = of->clique->windows.try_emplace(of->windows++, Clique::Window{bytes}).first->second;
  if (window.bytes != bytes) of->clique->error = fmt::format("windows of {} and {} bytes", window.bytes, bytes);
  ++window.arrived;
  of->window_handle = &handle;
  of->window_memory = memory;
  return returned();
}

NcclResult Api::deregister_memory(Communicator communicator, void* handle, Memory) {
  if (member(communicator)->aborted) return NcclResult::invalid_argument;
  const std::lock_guard lock(mutex_);
  return registered_.erase(handle) == 1 ? NcclResult::success : NcclResult::invalid_argument;
}

std::string Api::place_of(Communicator communicator, const void* data) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [memory, registration] : registered_) {
    const std::ptrdiff_t offset = static_cast<const std::byte*>(data) - static_cast<const std::byte*>(memory);
    if (registration.communicator == communicator && registration.window >= 0 && offset >= 0 && offset < registration.bytes)
      return fmt::format("window {} + {}", registration.window, offset);
  }
  return kNoWindow;
}

}  // namespace nccl_double
