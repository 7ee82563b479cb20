#include "comm/nccl/nccl_operation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"
#include "internal/base/call_label.h"

namespace shardproof::nccl {
namespace {

// Up to here every rank adds up all of an all-reduce; above, a slice, which the others get.
constexpr int64_t kWholeBytesMax = 1 << 15;

std::byte* bytes_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(const_cast<void*>(tensor.const_data_ptr()));
}

// Between its beginning and `end` calls are only collected; one that is left by an exception is closed all the same.
class OpenGroup {
 public:
  explicit OpenGroup(NcclApi& api) : api_(api), result_(api.group_start()) {}
  ~OpenGroup() {
    if (open_) api_.group_end();
  }
  OpenGroup(const OpenGroup&) = delete;
  OpenGroup& operator=(const OpenGroup&) = delete;
  NcclResult result() const { return result_; }
  NcclResult end() {
    open_ = false;
    return api_.group_end();
  }

 private:
  NcclApi& api_;
  NcclResult result_;
  bool open_ = true;
};

}  // namespace

Operation::Operation(std::shared_ptr<NcclApi> api, std::shared_ptr<Group> group, std::shared_ptr<const FlightGroup> flight,
                     Call call)
    : process::Operation(std::move(flight), std::move(call)),
      group(std::move(group)),
      done(api),
      begun(std::chrono::steady_clock::now()) {
  for (const at::Tensor* tensor : {&this->call.input, &this->call.output})
    if (tensor->defined() && !api->is_on_device(*tensor)) blocks = true;
  // What a rank did before a barrier, on files too, lies before what others do after it; colors are read by the host.
  if (this->call.op == Op::barrier || this->call.op == Op::split) blocks = true;
}

// Until the operation is over.
LaneMemory::Block Issue::take(Operation& operation, int64_t bytes, NcclApi::Memory kind) {
  operation.blocks_taken.push_back(operation.lane().memory.take(api_, bytes, kind));
  return operation.blocks_taken.back();
}

// By memory of the host that is pinned: a copy from or to any other lets the host wait for the stream.
std::byte* Issue::device_input(Operation& operation, const at::Tensor& tensor) {
  if (api_.is_on_device(tensor)) return bytes_of(tensor);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  std::byte* const staged = take(operation, bytes, NcclApi::Memory::pinned).memory;
  std::byte* const memory = take(operation, bytes, NcclApi::Memory::plain).memory;
  std::memcpy(staged, tensor.const_data_ptr(), tensor.nbytes());
  api_.copy(memory, staged, bytes, operation.lane().stream);
  return memory;
}

std::byte* Issue::device_output(Operation& operation, const at::Tensor& tensor) {
  if (api_.is_on_device(tensor)) return bytes_of(tensor);
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  operation.landings.push_back({bytes_of(tensor), take(operation, bytes, NcclApi::Memory::plain),
                                take(operation, bytes, NcclApi::Memory::pinned), bytes});
  return operation.landings.back().device.memory;
}

void Issue::collective(Operation& operation) {
  const Call& call = operation.call;
  Lane& lane = operation.lane();
  const bool sums = call.op == Op::reduce_scatter || call.op == Op::all_reduce;
  SHARD_REQUIRE(!sums || can_reduce(dtype(call)), "nccl", "{}: {} cannot be reduced; convert it first", operation.title(),
                dtype_name(dtype(call)));
  if (call.op == Op::barrier) return barrier(operation);
  if (call.op == Op::all_to_all) return all_to_all(operation);
  if (numel(call) == 0) return;
  if (sums && options_.sum == NcclOptions::Sum::native) return reduce_natively(operation);
  if (sums) return reduce_in_order(operation);
  if (call.op == Op::broadcast) {
    const bool is_root = call.peer == operation.group->rank;
    const at::Tensor& tensor = is_root ? call.input : call.output;
    std::byte* const data = is_root ? device_input(operation, tensor) : device_output(operation, tensor);
    return finish_(lane.communicator,
                   api_.broadcast(data, static_cast<int64_t>(tensor.nbytes()), call.peer, lane.communicator, lane.stream));
  }
  std::byte* const input = device_input(operation, call.input);
  std::byte* const output = device_output(operation, call.output);
  finish_(lane.communicator,
          api_.all_gather(input, output, static_cast<int64_t>(call.input.nbytes()), lane.communicator, lane.stream));
}

Issue::Part Issue::part_of(std::byte* tensor, ElementRange range, int64_t element_bytes) {
  return {tensor + range.begin * element_bytes, range.length * element_bytes};
}

void Issue::exchange(Operation& operation, const std::vector<Part>& sends, const std::vector<Part>& recvs) {
  Lane& lane = operation.lane();
  const int64_t own = operation.group->rank, size = operation.group->size();
  OpenGroup together(api_);
  finish_(nullptr, together.result());
  for (int64_t k = 1; k < size; ++k) {
    const Part& send = sends[static_cast<size_t>((own + k) % size)];
    const Part& recv = recvs[static_cast<size_t>((own + size - k) % size)];
    if (send.bytes > 0) finish_(nullptr, api_.send(send.data, send.bytes, (own + k) % size, lane.communicator, lane.stream));
    if (recv.bytes > 0)
      finish_(nullptr, api_.recv(recv.data, recv.bytes, (own + size - k) % size, lane.communicator, lane.stream));
  }
  finish_(lane.communicator, together.end());
  const Part &send = sends[static_cast<size_t>(own)], &recv = recvs[static_cast<size_t>(own)];
  if (recv.bytes > 0 && recv.data != send.data) api_.copy(recv.data, send.data, recv.bytes, lane.stream);
}

void Issue::all_to_all(Operation& operation) {
  const Call& call = operation.call;
  const CollectivePlan plan(call, operation.group->rank, operation.group->size());
  std::byte* const input = call.input.numel() > 0 ? device_input(operation, call.input) : nullptr;
  std::byte* const output = call.output.numel() > 0 ? device_output(operation, call.output) : nullptr;
  const auto element = static_cast<int64_t>(call.input.element_size());
  std::vector<Part> sends, recvs;
  for (int64_t peer = 0; peer < operation.group->size(); ++peer) {
    sends.push_back(part_of(input, plan.send_range(peer), element));
    recvs.push_back(part_of(output, plan.recv_range(peer), element));
  }
  exchange(operation, sends, recvs);
}

std::byte* Issue::scratch(Lane& lane, int64_t bytes) {
  return lane.memory.scratch(api_, lane.communicator, bytes, options_.buffers, finish_);
}

// NCCL's symmetric kernels take sums of these dtypes without a factor, and only from window to window. The input of a
// reduce-scatter is in one where it was lent; the output is not, because the caller may keep it. So the sum arrives in the
// lane's own memory, and is copied from there.
bool Issue::wants_window(const Call& call, const Lane& lane, const std::byte* input, const std::byte* output) const {
  const at::ScalarType type = dtype(call);
  const bool has_kernel = call.reduce == Reduce::sum && call.factor == 1 &&
                          (type == at::kFloat || type == at::kHalf || type == at::kBFloat16);
  return has_kernel && call.op == Op::reduce_scatter && options_.buffers == NcclApi::Memory::symmetric &&
         lane.buffers.holds(input) && !lane.buffers.holds(output);
}

void Issue::reduce_natively(Operation& operation) {
  const Call& call = operation.call;
  Lane& lane = operation.lane();
  std::byte* const input = device_input(operation, call.input);
  std::byte* const output = device_output(operation, call.output);
  const auto output_bytes = static_cast<int64_t>(call.output.nbytes());
  const bool stages = wants_window(call, lane, input, output);
  std::byte* const target = stages ? scratch(lane, output_bytes) : output;
  NcclApi::Operator op = NcclApi::operator_of(call.reduce);
  const bool is_own = call.factor != 1;
  if (is_own) finish_(nullptr, api_.create_premultiplied_sum(op, call.factor, dtype(call), lane.communicator));
  const auto reduces = call.op == Op::all_reduce ? &NcclApi::all_reduce : &NcclApi::reduce_scatter;
  const NcclResult result = (api_.*reduces)(input, target, numel(call), dtype(call), op, lane.communicator, lane.stream);
  // NCCL needs it no longer once the call has returned.
  if (is_own) finish_(nullptr, api_.destroy_operator(op, lane.communicator));
  finish_(lane.communicator, result);
  if (stages) api_.copy(output, target, output_bytes, lane.stream);
}

// Everybody's terms of what this rank adds up come together in one exchange, and are added in rank order.
void Issue::sum_in_order(Operation& operation, const CollectivePlan& plan, std::byte* input, std::byte* output) {
  const Call& call = operation.call;
  Lane& lane = operation.lane();
  const int64_t size = operation.group->size(), own = operation.group->rank;
  const auto element = static_cast<int64_t>(call.input.element_size());
  const int64_t longest = plan.send_range(0).length * element;  // no rank adds up more than the first
  std::byte* const arriving = scratch(lane, size * longest);
  std::vector<Part> sends, recvs;
  for (int64_t peer = 0; peer < size; ++peer) {
    sends.push_back(part_of(input, plan.send_range(peer), element));
    const Part term = part_of(input, plan.recv_range(peer), element);  // where it lies at the peer's
    recvs.push_back(peer == own ? term : Part{arriving + peer * longest, term.bytes});
  }
  exchange(operation, sends, recvs);
  std::vector<const std::byte*> terms;
  for (const int64_t rank : order_of_terms(size)) terms.push_back(recvs[static_cast<size_t>(rank)].data);
  std::byte* const result = part_of(output, plan.result(), element).data;
  const int64_t count = plan.summed().length;
  if (count > 0) api_.reduce(dtype(call), call.reduce, terms, count, result, lane.stream);
}

void Issue::reduce_in_order(Operation& operation) {
  const Call& call = operation.call;
  Lane& lane = operation.lane();
  const int64_t size = operation.group->size();
  const auto bytes = static_cast<int64_t>(call.input.nbytes());
  std::byte* const input = device_input(operation, call.input);
  std::byte* const output = device_output(operation, call.output);
  const bool gathers = call.op == Op::all_reduce && bytes <= kWholeBytesMax;
  const CollectivePlan plan(call, operation.group->rank, size, gathers ? AllReduceBy::whole : AllReduceBy::slices);
  if (!gathers) {
    sum_in_order(operation, plan, input, output);
    if (call.op == Op::all_reduce) share_sums(operation, plan, output);
    return;
  }
  std::byte* const all = scratch(lane, size * bytes);
  finish_(lane.communicator, api_.all_gather(input, all, bytes, lane.communicator, lane.stream));
  std::vector<const std::byte*> terms;
  for (const int64_t rank : order_of_terms(size)) terms.push_back(all + rank * bytes);
  api_.reduce(dtype(call), call.reduce, terms, plan.summed().length, output, lane.stream);
}

// The second half of an all-reduce in slices: the sums, from everybody to everybody.
void Issue::share_sums(Operation& operation, const CollectivePlan& plan, std::byte* output) {
  const auto element = static_cast<int64_t>(operation.call.input.element_size());
  const std::vector<Part> sends(static_cast<size_t>(operation.group->size()), part_of(output, plan.result(), element));
  std::vector<Part> recvs;
  for (int64_t peer = 0; peer < operation.group->size(); ++peer)
    recvs.push_back(part_of(output, plan.recv_sum_range(peer), element));
  exchange(operation, sends, recvs);
}

// One byte from everybody to everybody: nobody has all of them before everybody was there.
void Issue::barrier(Operation& operation) {
  Lane& lane = operation.lane();
  std::byte* const memory = take(operation, operation.group->size(), NcclApi::Memory::plain).memory;
  finish_(lane.communicator, api_.all_gather(memory + operation.group->rank, memory, 1, lane.communicator, lane.stream));
}

// Both ends of NCCL's first group of messages between two ranks must send and receive alike, and calls may be grouped in many
// ways. So in the first one each end has a byte for the other.
void Issue::meet(Lane& lane, const std::set<int64_t>& peers) {
  // Not given back: replays of a step in which they met write there.
  std::byte* memory = lane.memory.take(api_, 2 * std::ssize(peers), NcclApi::Memory::plain).memory;
  OpenGroup together(api_);
  finish_(nullptr, together.result());
  for (const int64_t peer : peers) {
    finish_(nullptr, api_.send(memory++, 1, peer, lane.communicator, lane.stream));
    finish_(nullptr, api_.recv(memory++, 1, peer, lane.communicator, lane.stream));
  }
  finish_(lane.communicator, together.end());
}

void Issue::messages(std::vector<std::shared_ptr<Operation>> operations) {
  std::stable_sort(operations.begin(), operations.end(),
                   [](const auto& a, const auto& b) { return a->call.tag < b->call.tag; });
  Lane& lane = operations.front()->lane();
  // Copies of host memory come before all of them: a group launches nothing until it ends.
  std::vector<Part> parts;
  std::set<int64_t> strangers;
  for (const auto& operation : operations) {
    const bool sends = operation->call.op == Op::send;
    const at::Tensor& tensor = sends ? operation->call.input : operation->call.output;
    if (tensor.numel() == 0)
      parts.push_back({nullptr, 0});
    else
      parts.push_back({sends ? device_input(*operation, tensor) : device_output(*operation, tensor),
                       static_cast<int64_t>(tensor.nbytes())});
    Group& group = *operation->group;
    const int64_t peer = operation->call.peer;
    if (tensor.numel() > 0 && peer != group.rank && group.met.insert(peer).second) strangers.insert(peer);
  }
  if (!strangers.empty()) meet(lane, strangers);
  OpenGroup together(api_);
  finish_(nullptr, together.result());
  for (size_t i = 0; i < operations.size(); ++i) {
    const Call& call = operations[i]->call;
    const auto [data, bytes] = parts[i];
    if (bytes == 0) continue;
    finish_(nullptr, call.op == Op::send ? api_.send(data, bytes, call.peer, lane.communicator, lane.stream)
                                         : api_.recv(data, bytes, call.peer, lane.communicator, lane.stream));
  }
  finish_(lane.communicator, together.end());
}

}  // namespace shardproof::nccl
