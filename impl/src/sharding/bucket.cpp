#include "sharding/bucket.h"

#include <ATen/ATen.h>

#include "device/flat_math.h"
#include "sharding/storage.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/meta_init.h"
#include "testing/base/call_label.h"

namespace shardproof {

Bucket::Bucket(std::vector<at::Tensor> parameters, BucketLayout layout, std::shared_ptr<MeshComm> comms,
               std::shared_ptr<MemoryLedger> memory, std::shared_ptr<HostTransfers> transfers, BucketRules rules,
               const Initializer& initialize)
    : layout_(std::move(layout)),
      comms_(std::move(comms)),
      memory_(std::move(memory)),
      transfers_(std::move(transfers)),
      rules_(std::move(rules)),
      views_(std::move(parameters)),
      arrived_(views_.size(), false),
      holds_(views_.size(), false),
      parts_(views_.size()) {
  at::NoGradGuard no_grad;
  allocate_parameters();
  allocate_main();
  if (views_.at(0).is_meta()) {
    fill_from_initializer(initialize);
  } else {
    fill_from_values();
  }
  if (rules_.offload) rounded_.copy_(own_part());  // padding and all
  if (frees_compute())
    for (const Slot& slot : layout_.slots())
      unreadable_.push_back(unreadable(
          slot.shape, rules_.compute, memory_->device(),
          fmt::format(
              "[bucket] parameter {} is sharded and has no data here. It is whole only while its unit runs: enter the unit "
              "through `call`, or use Sharded::unit(...).unshard, parameters or gather_parameters",
              slot.name)));
  point_parameters_at(frees_compute() ? unreadable_ : readable_);
}

at::TensorOptions Bucket::options(at::ScalarType dtype) const { return at::TensorOptions(dtype).device(memory_->device()); }

void Bucket::allocate_parameters() {
  const LocalView& own = layout_.parameter();
  if (side_by_side()) {
    Comm& group = comms_->along(layout_.unshard().axes);
    SHARD_REQUIRE(memory_->device().is_cpu(), "fully_shard",
                  "Gather::side_by_side: memory that ranks share is the CPU's, and parameters are on {}. Use Gather::copied",
                  memory_->device().str());
    const at::Tensor memory = group.shared_memory(compute_bytes());
    SHARD_REQUIRE(memory.defined(), "fully_shard",
                  "Gather::side_by_side: the ranks of '{}' have no memory in common. Use Gather::copied", group.name());
    const int64_t bytes = own.size() * static_cast<int64_t>(c10::elementSize(rules_.compute));
    compute_ = memory_->adopt(MemoryKind::parameter, memory.view(rules_.compute), bytes);
    parameter_ = compute_.narrow(0, own.interval.begin, own.size());
  } else {
    compute_ = without_memory(layout_.numel(), rules_.compute, memory_->device());
  }
  for (const Slot& slot : layout_.slots()) readable_.push_back(compute_.narrow(0, slot.offset, slot.numel).view(slot.shape));
  if (side_by_side()) return;
  release_storage(compute_);
  if (!frees_compute()) {
    restore_storage(compute_, *memory_, MemoryKind::parameter);
    parameter_ = compute_;
    return;
  }
  // What is gathered from and what is gathered into are registered together, or both are not.
  Comm& group = comms_->along(layout_.unshard().axes);
  parameter_ = memory_->allocate_of(group, Op::all_gather, MemoryKind::parameter, own.size(), rules_.compute);
  if (!parameter_.defined()) parameter_ = memory_->allocate(MemoryKind::parameter, own.size(), rules_.compute);
}

void Bucket::allocate_main() {
  const int64_t size = layout_.state().size();
  const bool rounds = rules_.main != rules_.compute;
  const auto allocate = [&](at::ScalarType dtype) { return memory_->allocate(MemoryKind::parameter, size, dtype, place()); };
  main_ = rounds || rules_.offload ? allocate(rules_.main) : own_part();
  rounded_ = !rules_.offload ? own_part() : rounds ? allocate(rules_.compute) : main_;
}

// In the main dtype, whole for a moment.
void Bucket::fill_from_values() {
  at::Tensor whole = at::zeros({layout_.numel()}, options(rules_.main));
  for (size_t i = 0; i < views_.size(); ++i) {
    const Slot& slot = layout_.slots()[i];
    whole.narrow(0, slot.offset, slot.numel).view(slot.shape).copy_(views_[i]);
  }
  if (rules_.broadcast)
    for (const std::string& axis : rules_.sum_axes) comms_->along({axis}).broadcast(whole, 0).wait();
  const auto part = [&](const LocalView& view) { return whole.narrow(0, view.interval.begin, view.size()); };
  parameter_.copy_(part(layout_.parameter()));
  main_.copy_(part(layout_.state()));
}

void Bucket::fill_from_initializer(const Initializer& initialize) {
  SHARD_REQUIRE(initialize != nullptr, "fully_shard",
                "parameter {} is on the meta device, so it has no values. Set ShardOptions::initialize",
                layout_.slots()[0].name);
  const auto fill = [&](const LocalView& view, const at::Tensor& local) {
    local.zero_();
    for (const Segment& segment : view.segments) {
      const Slot& slot = layout_.slots()[segment.slot];
      at::Tensor values = at::empty({segment.run.size()}, rules_.main);
      initialize(slot.name, slot.shape, segment.run, values);
      local.narrow(0, segment.local, segment.run.size()).copy_(values);
    }
  };
  fill(layout_.parameter(), parameter_);
  if (rules_.main != rules_.compute || rules_.offload) fill(layout_.state(), main_);
  for (const at::Tensor& view : views_) materialize(view, memory_->device());
}

void Bucket::point_parameters_at(const std::vector<at::Tensor>& data) {
  for (size_t i = 0; i < views_.size(); ++i) views_[i].set_data(data[i]);
}

at::Tensor Bucket::own_part() const {
  const int64_t begin = layout_.state().interval.begin - layout_.parameter().interval.begin;
  return parameter_.narrow(0, begin, layout_.state().size());
}

int64_t Bucket::compute_bytes() const { return layout_.numel() * static_cast<int64_t>(c10::elementSize(rules_.compute)); }

void Bucket::begin_update() {
  const CallLabel label(label_);
  if (side_by_side()) comms_->along(layout_.unshard().axes).barrier().wait();
}

void Bucket::start_unshard() {
  const CallLabel label(label_);
  if (side_by_side() && std::exchange(neighbours_write_, false))
    unshard_work_ = comms_->along(layout_.unshard().axes).barrier();
  if (!frees_compute()) return;
  Comm& group = kept_.defined() ? comms_->within("dp_shard", kept_ranks_) : comms_->along(layout_.unshard().axes);
  restore_storage(compute_, *memory_, MemoryKind::gathered, kept_.defined() ? nullptr : &group);
  unshard_work_ = group.all_gather(compute_, kept_.defined() ? kept_ : parameter_);
}

void Bucket::finish_unshard() {
  unshard_work_.wait();
  if (!frees_compute()) return;
  kept_.reset();
  point_parameters_at(readable_);
}

void Bucket::reshard() {
  kept_.reset();
  if (!frees_compute() || storage_is_released(compute_)) return;
  point_parameters_at(unreadable_);
  release_storage(compute_);
}

void Bucket::reshard_within(int64_t ranks) {
  if (!frees_compute()) return;
  Comm& group = comms_->within("dp_shard", ranks);
  const int64_t part = layout_.numel() / group.size();
  at::Tensor kept = memory_->allocate(MemoryKind::gathered, part, rules_.compute);
  kept.copy_(compute_.narrow(0, group.rank() * part, part));
  reshard();
  kept_ = kept;
  kept_ranks_ = ranks;
}

bool Bucket::trainable() const {
  for (const at::Tensor& view : views_)
    if (view.requires_grad()) return true;
  return false;
}

bool Bucket::all_train() const {
  for (const at::Tensor& view : views_)
    if (!view.requires_grad()) return false;
  return true;
}

void Bucket::begin_backward(bool reduces) {
  reduces_ = reduces;
  missing_ = 0;
  for (size_t i = 0; i < views_.size(); ++i) {
    arrived_[i] = !trains(static_cast<int64_t>(i));
    missing_ += !arrived_[i];
  }
}

// Local sums are taken in the gradient dtype. A microbatch that is reduced at once can be kept as it will be on the wire, where
// that is the same value: float32 holds what any lower precision produced.
at::ScalarType Bucket::produced_dtype(bool reduces) const {
  const ReductionDtypes& dtypes = rules_.reduction;
  const bool goes_on_the_wire = reduces && !layout_.reduce().empty() && rules_.divide_before == 1;
  return goes_on_the_wire && dtypes.gradient == at::kFloat ? dtypes.reduce : dtypes.gradient;
}

void Bucket::add_gradient(int64_t index, const at::Tensor& gradient, bool may_be_part) {
  const Slot& slot = layout_.slots()[index];
  SHARD_REQUIRE(!final(), "bucket",
                "parameter {} got a gradient after the last backward of this step. Call set_last_microbatch(false) before "
                "every backward but the last, then Optimizer::step or zero_gradients",
                slot.name);
  SHARD_REQUIRE(!reducing() && (!arrived_[index] || may_be_part), "bucket",
                "parameter {} got a second gradient in one backward after its bucket was taken", slot.name);
  SHARD_CHECK(gradient.numel() == slot.numel, "bucket", "gradient of {}: {} elements, expected {}", slot.name, gradient.numel(),
              slot.numel);
  missing_ -= !arrived_[index];
  arrived_[index] = true;
  if (!may_be_part) return take(index, gradient);
  at::NoGradGuard no_grad;
  at::Tensor& sum = parts_[index];
  sum = sum.defined() ? sum + gradient : gradient;
}

void Bucket::settle() {
  for (size_t i = 0; i < parts_.size(); ++i)
    if (parts_[i].defined()) take(static_cast<int64_t>(i), std::exchange(parts_[i], at::Tensor()));
}

void Bucket::take(int64_t index, const at::Tensor& gradient) {
  const Slot& slot = layout_.slots()[index];
  if (!produced_.defined()) {
    produced_ = memory_->allocate(MemoryKind::gradient, layout_.numel(), produced_dtype(reduces_));
    for (const Interval& padding : layout_.whole().padding) produced_.narrow(0, padding.begin, padding.size()).zero_();
    holds_.assign(holds_.size(), false);
    suspicious_ = false;
  }
  at::NoGradGuard no_grad;
  const at::Tensor source = gradient.contiguous().view({-1});
  const at::Tensor target = produced_.narrow(0, slot.offset, slot.numel);
  // The first term is copied, not added to zero, which would turn -0.0 into +0.0.
  const bool fine = holds_[index] ? add_to(target, source, rules_.gradient_magnitude_max)
                                  : copy_to(target, source, rules_.gradient_magnitude_max);
  suspicious_ |= !fine;
  if (!fine && produced_.scalar_type() == at::kLong) unrepresentable_ = slot.name;
  holds_[index] = true;
}

void Bucket::fill_missing() {
  for (size_t i = 0; i < views_.size(); ++i)
    if (!arrived_[i])
      add_gradient(static_cast<int64_t>(i), at::zeros({layout_.slots()[i].numel}, options(rules_.compute)), false);
}

void Bucket::start_reduce(bool last, const std::string& where) {
  const CallLabel label(label_);
  SHARD_CHECK(complete() && !reducing() && produced_.defined(), "bucket", "a reduce needs every gradient, {} are missing",
              missing_);
  for (size_t i = 0; i < views_.size(); ++i)  // frozen ones beside trained ones
    if (!holds_[i]) produced_.narrow(0, layout_.slots()[i].offset, layout_.slots()[i].numel).zero_();
  if (suspicious_ && rules_.check_gradients) check_produced(where);
  last_ = last;
  const std::vector<Hop>& path = layout_.reduce().empty() && last ? layout_.reduce_last() : layout_.reduce();
  if (layout_.reduce().empty() && !last) {
    holds_.assign(holds_.size(), true);
    return;
  }
  local_ = path.empty();
  if (local_ && rules_.divide_before != 1) divide_by(produced_, rules_.divide_before);
  if (!local_)
    reduction_.emplace(*comms_, *memory_, path, rules_.reduction, std::move(produced_), rules_.divide_before);
}

void Bucket::finish_reduce() {
  const CallLabel label(label_);
  if (!reducing()) return;
  at::Tensor sum = local_ ? std::move(produced_) : reduction_->finish();
  produced_.reset();
  local_ = false;
  reduction_.reset();
  if (!layout_.reduce().empty()) {
    check_padding(layout_.accumulated(), sum, "reduced gradient");
    if (accumulated_.defined()) {
      const bool fine = add_to(accumulated_, sum, std::numeric_limits<double>::infinity());
      SHARD_REQUIRE(fine || sum.scalar_type() != at::kLong, "canonical",
                    "the sum of gradients of {} and its neighbours leaves the "
                    "range of fixed-point numbers, {}. Scale the loss down",
                    layout_.slots()[0].name, kFixedPointMax);
    } else {
      accumulated_ = std::move(sum);
    }
    if (!last_) return;
    sum = std::move(accumulated_);
    if (!layout_.reduce_last().empty())
      sum = Reduction(*comms_, *memory_, layout_.reduce_last(), rules_.reduction, std::move(sum)).finish();
  }
  finalize(std::move(sum));
}

void Bucket::finalize(at::Tensor sum) {
  check_padding(layout_.state(), sum, "gradient");
  at::NoGradGuard no_grad;
  if (sum.scalar_type() == rules_.main) {
    gradient_ = std::move(sum);
  } else {
    gradient_ = memory_->allocate(MemoryKind::gradient, layout_.state().size(), rules_.main);
    if (sum.scalar_type() == at::kLong && rules_.parallel_terms > 1) fixed_ = sum;
    if (sum.scalar_type() == at::kLong) fixed_to_float(gradient_, sum);
    else gradient_.copy_(sum);
  }
  accumulated_.reset();
  divide_final(rules_.divide_after);
  if (rules_.parallel_terms == 1) start_offload();
}

// As soon as the gradient is final, while the backward goes on.
void Bucket::start_offload() {
  if (!rules_.offload) return;
  const at::Tensor host = memory_->allocate(MemoryKind::gradient, gradient_.numel(), gradient_.scalar_type(), Place::host);
  download_ = transfers_->download(host, std::exchange(gradient_, host));
}

const at::Tensor& Bucket::gradient() const {
  download_.wait();
  return gradient_;
}

const at::Tensor& Bucket::main() const {
  upload_.wait();
  return main_;
}

at::Tensor Bucket::allocate_state(int64_t numel) const {
  return memory_->allocate(MemoryKind::optimizer, numel, rules_.main, place());
}

void Bucket::sum_terms(Comm& group) {
  if (fixed_.defined()) {
    group.all_reduce(fixed_).wait();
    fixed_to_float(gradient_, std::exchange(fixed_, at::Tensor()));
    divide_final(rules_.divide_after);
  } else {
    group.all_reduce(gradient_).wait();
  }
  start_offload();
}

void Bucket::divide_final(double divisor) {
  if (divisor != 1) divide_by(gradient(), divisor);
}

void Bucket::zero_gradients() {
  SHARD_REQUIRE(!reducing(), "bucket", "gradients of {} are still being reduced", layout_.slots()[0].name);
  produced_.reset();
  accumulated_.reset();
  gradient_.reset();
  download_ = {};
  fixed_.reset();
  parts_.assign(parts_.size(), at::Tensor());
}

void Bucket::publish(bool is_rounded) {
  const CallLabel label(label_);
  at::NoGradGuard no_grad;
  if (rules_.main != rules_.compute && !is_rounded) rounded_.copy_(main());
  check_padding(layout_.state(), rounded_, "parameter");
  const at::Tensor updated = own_part();
  if (rules_.offload) upload_ = transfers_->upload(updated, rounded_);
  if (layout_.publish().step == Step::all_gather) comms_->along(layout_.publish().axes).all_gather(parameter_, updated).wait();
  // Raw writes are invisible to autograd: say that the values changed, so that a graph from before the step is refused.
  for (const at::Tensor& view : views_) view.unsafeGetTensorImpl()->bump_version();
  neighbours_write_ = true;
}

void Bucket::check_padding(const LocalView& view, const at::Tensor& local, const char* what) const {
  for (const Interval& padding : view.padding)
    SHARD_CHECK(all_zero(local.narrow(0, padding.begin, padding.size())), "bucket",
                "padding of the {} after {} is not zero, at bucket offset {} to {}", what, layout_.slots().front().name,
                view.interval.begin + padding.begin, view.interval.begin + padding.end);
}

void Bucket::check_produced(const std::string& where) const {
  SHARD_REQUIRE(unrepresentable_.empty(), "gradient",
                "{}: the gradient of {} has an element that is NaN, infinite or above {}, before any communication. "
                "Fixed-point sums cannot "
                "hold it: look at the loss and the data of this rank, or scale the loss down",
                where, unrepresentable_, kFixedPointMax);
  for (const Slot& slot : layout_.slots()) {
    const at::Tensor values = produced_.narrow(0, slot.offset, slot.numel);
    const int64_t bad = first_beyond(values, rules_.gradient_magnitude_max);
    if (bad < slot.numel)
      throw NonFiniteError(fmt::format("[gradient] {}: the gradient of {} is {} at element {} of {}, before any communication. "
                                       "Look at the loss and the data of this rank, or lower the learning rate",
                                       where, slot.name, element_of(values, bad), bad, slot.numel));
  }
}

}  // namespace shardproof
