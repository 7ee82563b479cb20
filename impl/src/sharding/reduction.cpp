#include "sharding/reduction.h"

#include <ATen/ATen.h>

#include <cmath>
#include <optional>
#include <utility>

#include "internal/device/flat_math.h"
#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"

namespace shardproof {

namespace {

// 1 / divisor where the two are powers of two that float16 holds: then products and quotients are the same bits.
std::optional<double> exact_factor(double divisor) {
  int exponent = 0;
  if (std::frexp(divisor, &exponent) != 0.5 || exponent < 1 || exponent > 15) return {};
  return 1 / divisor;
}

bool is_float(const ReductionDtypes& dtypes) {
  return dtypes.gradient == at::kFloat && dtypes.reduce == at::kFloat;
}

}  // namespace

Reduction::Reduction(MeshComm& comms, MemoryLedger& memory, const std::vector<Stage>& path, const ReductionDtypes& dtypes,
                     at::Tensor local, const Options& options)
    : comms_(comms), memory_(memory), path_(path), dtypes_(dtypes), options_(options), value_(std::move(local)) {
  SHARD_CHECK(!path_.empty(), "reduction", "an empty path has nothing to start");
  start_hop();
}

bool Reduction::finds_bad_terms(MeshComm& comms, const std::vector<Stage>& path, const ReductionDtypes& dtypes,
                                c10::Device device) {
  if (path.empty() || path[0].collective.step == Step::all_reduce) return false;
  return is_float(dtypes) && device.is_cpu() && comms.along(path[0].collective.axes).finishes_sums();
}

at::Tensor Reduction::own_memory(MeshComm& comms, MemoryLedger& memory, const std::vector<Stage>& path,
                                 const ReductionDtypes& dtypes, int64_t numel) {
  if (path.empty() || dtypes.wide() || dtypes.gradient != dtypes.reduce) return {};
  const CollectiveStep& first = path[0].collective;
  const Op op = first.step == Step::all_reduce ? Op::all_reduce : Op::reduce_scatter;
  return memory.allocate_of(comms.along(first.axes), op, MemoryKind::gradient, numel, dtypes.gradient);
}

at::Tensor Reduction::cast(const at::Tensor& values, at::ScalarType dtype, MemoryKind kind) {
  if (values.scalar_type() == dtype) return values;
  at::Tensor converted = memory_.allocate(kind, values.numel(), dtype);
  converted.copy_(values);
  return converted;
}

// What the backend multiplies terms with, so that no kernel divides: powers of two, by which products and quotients are the
// same bits, and within what float16 holds. What is divided lest it overflow on the wire is not put there first.
double Reduction::take_factor() {
  const std::optional<double> exact = exact_factor(options_.divide_terms * divide_sum_);
  const bool fits = options_.divide_terms == 1 || value_.scalar_type() == dtypes_.reduce;
  if (!exact || !fits || wide() || !group().premultiplies() || !c10::isFloatingType(dtypes_.reduce)) return 1;
  options_.divide_terms = divide_sum_ = 1;
  return *exact;
}

// What the backend does during the sum, so that nobody goes over the result again.
Finish Reduction::choose_finish() {
  all_finite_.reset();
  if (!is_float(dtypes_) || !wire_.is_cpu() || !group().finishes_sums()) return {};
  if (is_first() && options_.find_bad_terms) all_finite_ = std::make_shared<bool>(true);
  const bool is_last = next_ + 1 == path_.size();
  const std::optional<double> exact = exact_factor(options_.divide_result);
  is_divided_ = is_last && divide_sum_ == 1 && options_.divide_result != 1 && exact;
  return {.factor = is_divided_ ? *exact : 1, .all_finite = all_finite_};
}

// Memory of the group's is lent in the order of these calls, the same on all ranks, in which gradients need not arrive: so what
// arrived is copied, unless it arrived in memory that was lent before (own_memory).
at::Tensor Reduction::on_the_wire(const at::Tensor& values) {
  if (std::exchange(options_.is_registered, false)) return values;
  if (stage().collective.step != Step::all_reduce && !wide()) {
    const at::Tensor lent =
        memory_.allocate_of(group(), Op::reduce_scatter, MemoryKind::communication, values.numel(), dtypes_.reduce);
    if (lent.defined()) return lent.copy_(values);
  }
  return cast(values, dtypes_.reduce, MemoryKind::communication);
}

void Reduction::start_hop() {
  divide_sum_ = dtypes_.average ? static_cast<double>(group().size()) : 1;
  const double factor = take_factor();
  if (options_.divide_terms != 1) divide_by(value_, std::exchange(options_.divide_terms, 1));
  wire_ = on_the_wire(value_);
  value_.reset();
  if (wide()) return start_wide_sum();
  start_sum(factor);
}

void Reduction::start_sum(double factor) {
  const bool everywhere = stage().collective.step == Step::all_reduce;
  received_ = everywhere ? wire_ : memory_.allocate(MemoryKind::gradient, stage().part.size(), dtypes_.reduce);
  work_ = group().issue({.op = everywhere ? Op::all_reduce : Op::reduce_scatter,
                         .output = received_,
                         .input = wire_,
                         .factor = factor,
                         .finish = choose_finish()});
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
  std::vector<const std::byte*> terms;
  for (int64_t rank = 0; rank < ranks; ++rank)
    terms.push_back(static_cast<const std::byte*>(received_.const_data_ptr()) + rank * slice * received_.element_size());
  at::Tensor sum = memory_.allocate(MemoryKind::gradient, slice, dtypes_.reduce);
  const Element type = element_type(dtypes_.reduce);
  device_math(received_).sum_wide(type, terms, slice, type, static_cast<std::byte*>(sum.mutable_data_ptr()));
  return sum;
}

void Reduction::await_sum() {
  work_.wait();
  if (all_finite_ && !*all_finite_) suspects_ = wire_;
  at::Tensor sum = received_;
  if (wide()) {
    sum = sum_wide();
    if (stage().collective.step == Step::all_reduce) {
      group().all_gather(wire_, sum).wait();
      sum = wire_;
    }
  }
  if (divide_sum_ != 1) divide_by(sum, divide_sum_);
  received_.reset();
  wire_.reset();
  value_ = cast(sum, dtypes_.gradient, MemoryKind::gradient);
}

bool Reduction::start_next() {
  if (++next_ == path_.size()) return false;
  start_hop();
  return true;
}

int64_t Reduction::bytes_in_flight() const {
  if (!wire_.defined()) return 0;
  return static_cast<int64_t>(wire_.nbytes() + (received_.is_same(wire_) ? 0 : received_.nbytes()));
}

}  // namespace shardproof
