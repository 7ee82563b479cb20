#include "reduction.h"

#include <ATen/ATen.h>

#include "flat_math.h"
#include "shardproof/check.h"
#include "shardproof/device.h"

namespace shardproof {

Reduction::Reduction(MeshComm& comms, MemoryLedger& memory, const std::vector<Hop>& path, const ReductionDtypes& dtypes,
                     at::Tensor local)
    : comms_(comms), memory_(memory), path_(path), dtypes_(dtypes), value_(std::move(local)) {
  SHARD_CHECK(!path_.empty(), "reduction", "an empty path has nothing to start");
  start_hop();
}

at::Tensor Reduction::cast(const at::Tensor& values, at::ScalarType dtype, MemoryKind kind) {
  if (values.scalar_type() == dtype) return values;
  at::Tensor converted = memory_.allocate(kind, values.numel(), dtype);
  converted.copy_(values);
  return converted;
}

void Reduction::start_hop() {
  wire_ = cast(value_, dtypes_.reduce, MemoryKind::communication);
  value_.reset();
  if (dtypes_.float32_sums && dtypes_.reduce != at::kFloat) return start_wide_sum();
  if (hop().lowered.step == Step::all_reduce) {
    received_ = wire_;
    work_ = group().all_reduce(wire_, Reduce::sum);
  } else {
    received_ = memory_.allocate(MemoryKind::gradient, hop().to.size(), dtypes_.reduce);
    work_ = group().reduce_scatter(received_, wire_, Reduce::sum);
  }
}

// Everybody's terms of this rank's slice, side by side, still as they were on the wire.
void Reduction::start_wide_sum() {
  const int64_t slice = wire_.numel() / group().size();
  SHARD_CHECK(slice * group().size() == wire_.numel(), "reduction", "{} elements over {} ranks", wire_.numel(), group().size());
  received_ = memory_.allocate(MemoryKind::communication, wire_.numel(), dtypes_.reduce);
  const std::vector<int64_t> sizes(static_cast<size_t>(group().size()), slice);
  work_ = group().all_to_all(received_, wire_, sizes, sizes);
}

// In float32, in rank order, rounded once to the wire's dtype.
at::Tensor Reduction::sum_wide() {
  const int64_t ranks = group().size(), slice = wire_.numel() / ranks;
  const DeviceMath* math = device_math(received_);
  if (math && c10::elementSize(dtypes_.reduce) == 2) {
    SHARD_REQUIRE(ranks <= DeviceMath::kTermsMax, "reduction", "a sum of {} terms on a device; it adds at most {}", ranks,
                  DeviceMath::kTermsMax);
    std::vector<const std::byte*> terms;
    for (int64_t rank = 0; rank < ranks; ++rank)
      terms.push_back(static_cast<const std::byte*>(received_.const_data_ptr()) + rank * slice * received_.element_size());
    at::Tensor sum = memory_.allocate(MemoryKind::gradient, slice, dtypes_.reduce);
    const Element type = element_type(dtypes_.reduce);
    if (slice > 0) math->sum_wide(type, terms, slice, type, static_cast<std::byte*>(sum.mutable_data_ptr()));
    return sum;
  }
  at::Tensor wide = memory_.allocate(MemoryKind::communication, slice, at::kFloat);
  wide.copy_(received_.narrow(0, 0, slice));
  for (int64_t rank = 1; rank < ranks; ++rank) wide.add_(received_.narrow(0, rank * slice, slice).to(at::kFloat));
  return cast(wide, dtypes_.reduce, MemoryKind::gradient);
}

void Reduction::finish_hop() {
  work_.wait();
  at::Tensor sum = received_;
  if (dtypes_.float32_sums && dtypes_.reduce != at::kFloat) {
    sum = sum_wide();
    if (hop().lowered.step == Step::all_reduce) {
      group().all_gather(wire_, sum).wait();
      sum = wire_;
    }
  }
  if (dtypes_.average) divide_by(sum, static_cast<double>(group().size()));
  received_.reset();
  wire_.reset();
  value_ = cast(sum, dtypes_.gradient, MemoryKind::gradient);
}

at::Tensor Reduction::finish() {
  finish_hop();
  for (++next_; next_ < path_.size(); ++next_) {
    start_hop();
    finish_hop();
  }
  return std::move(value_);
}

int64_t Reduction::bytes_in_flight() const {
  return static_cast<int64_t>(wire_.nbytes() + (received_.is_same(wire_) ? 0 : received_.nbytes()));
}

}  // namespace shardproof
