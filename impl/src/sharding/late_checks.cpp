#include "sharding/late_checks.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "internal/device/flat_math.h"
#include "sharding/memory_ledger.h"
#include "shardproof/base/check.h"
#include "internal/base/call_label.h"

namespace shardproof {
namespace {

// The bits of a slot: 16 of the rank, 7 of the reduction, 40 of the place. Later reductions count as the last that fits.
constexpr int kPlaceBits = 40, kReductionBits = 7, kRankBits = 16;
constexpr int64_t kReductionMax = (int64_t{1} << kReductionBits) - 1;

}  // namespace

LateChecks::LateChecks(c10::Device device, int64_t rank, std::shared_ptr<HostTransfers> transfers)
    : device_(device), rank_(rank), transfers_(std::move(transfers)) {
  SHARD_CHECK(rank < int64_t{1} << kRankBits, "gradient", "a mesh of more than {} ranks, got rank {}", 1 << kRankBits, rank);
}

size_t LateChecks::add(Throw error) {
  errors_.push_back(std::move(error));
  return errors_.size() - 1;
}

void LateChecks::begin() {
  if (device_.is_cpu() || device_.is_meta()) return;
  slots_ = at::full({std::ssize(errors_)}, kNone, at::TensorOptions(device_).dtype(at::kLong));
}

void LateChecks::ask(size_t slot, const at::Tensor& values, double limit, int64_t offset, int64_t reduction) {
  if (!slots_.defined()) return;
  SHARD_CHECK(offset + values.numel() <= int64_t{1} << kPlaceBits, "gradient", "a bucket of more than 2^{} elements",
              kPlaceBits);
  const int64_t begin = ((rank_ << kReductionBits | std::min(reduction, kReductionMax)) << kPlaceBits) + offset;
  note_beyond(values, limit, begin, part_of(slots_, static_cast<int64_t>(slot), {1}));
}

void LateChecks::forget() {
  if (std::exchange(is_expected_, false)) slots_.fill_(kNone);
}

std::vector<at::Tensor> LateChecks::read(Comm* world, std::vector<at::Tensor> wanted) {
  if (is_expected_ && world) {
    const CallLabel label("whether gradients are finite");
    world->all_reduce(slots_, Reduce::min).wait();
  }
  if (is_expected_) wanted.push_back(slots_);
  copy_to_host(wanted);
  if (!is_expected_) return wanted;
  throw_least(wanted.back());
  wanted.pop_back();
  if (world) is_expected_ = false;
  return wanted;
}

// By way of memory that a device writes to at full speed.
void LateChecks::copy_to_host(std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> there;
  int64_t numel = 0;
  for (const at::Tensor& tensor : tensors)
    if (!tensor.is_cpu()) {
      there.push_back(tensor.view(at::kLong));
      numel += tensor.numel();
    }
  if (numel == 0) return;
  if (!host_.defined() || host_.numel() < numel)
    host_ = at::zeros({numel}, at::TensorOptions(at::kLong).pinned_memory(device_.is_cuda()));
  const at::Tensor host = host_.narrow(0, 0, numel);
  transfers_->download_all({{host, at::cat(there)}}).wait();
  int64_t begin = 0;
  for (at::Tensor& tensor : tensors) {
    if (tensor.is_cpu()) continue;
    const int64_t end = begin + tensor.numel();
    tensor = host.slice(0, begin, end).view(tensor.scalar_type()).clone();
    begin = end;
  }
}

void LateChecks::throw_least(const at::Tensor& answers) const {
  const auto* first = answers.const_data_ptr<int64_t>();
  const auto* least = std::min_element(first, first + answers.numel());
  if (least == first + answers.numel() || *least == kNone) return;
  const int64_t from = *least >> kPlaceBits;
  errors_[static_cast<size_t>(least - first)](
      {from >> kReductionBits, from & kReductionMax, *least & ((int64_t{1} << kPlaceBits) - 1)});
}

}  // namespace shardproof
