#include "sharding/bucket_gradient.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "internal/device/flat_math.h"
#include "shardproof/base/check.h"
#include "internal/base/call_label.h"
#include "internal/device/streams.h"

namespace shardproof {

const char* to_string(GradientState state) {
  switch (state) {
    case GradientState::empty:
      return "empty";
    case GradientState::produced:
      return "produced";
    case GradientState::reducing:
      return "being reduced";
    case GradientState::accumulated:
      return "accumulated";
    case GradientState::final:
      return "final";
  }
  return "unknown";
}

namespace {

bool may_follow(GradientState now, GradientState next) {
  using enum GradientState;
  switch (next) {
    case empty:
      return now != reducing;
    case produced:
      return now == empty || now == accumulated;
    case reducing:
      return now == produced || now == accumulated;
    case accumulated:
      return now == reducing;
    case final:
      return now == accumulated;
  }
  return false;
}

// What a fixed-point number must stay below when the terms of so many ranks are added to it: sums of integers wrap around, and
// nobody would see it.
double room_of_terms(std::initializer_list<const std::vector<Stage>*> paths, const Mesh& mesh, int64_t ranks) {
  for (const std::vector<Stage>* path : paths)
    for (const Stage& stage : *path)
      for (const std::string& axis : stage.collective.axes) ranks *= mesh.size(axis);
  return kFixedPointMax / static_cast<double>(ranks);
}

// The largest magnitude that a rank may produce.
double produced_max(const BucketRules& rules, const BucketLayout& layout, const Mesh& mesh) {
  if (rules.reduction.gradient != at::kLong) return rules.gradient_magnitude_max;
  return std::min(rules.gradient_magnitude_max,
                  room_of_terms({&layout.reduce(), &layout.reduce_last()}, mesh, rules.grad_partial_ranks));
}

}  // namespace

BucketGradient::BucketGradient(const BucketContext& context)
    : BucketPart(context, "gradient"),
      terms_(checks_->add([this](const LateChecks::Bad& bad) { throw_nonfinite(bad); })),
      coming_(views_.size(), Coming::expected),
      holds_(views_.size(), false),
      reached_(views_.size(), false) {
  // Where the whole gradient stays on the rank until the last microbatch, all buckets' are there at once. So each has memory of
  // its own, which every rank asks for here, in one order. Elsewhere gradients come and go, in an order of each rank's own.
  // A bucket that is frozen now has none, even if it is thawed later.
  if (layout_.reduce().empty() && views_.front().requires_grad()) {
    // All ranks of the mesh make the groups, though along tp one rank's part may be interleaved and another's not.
    for (const Stage& stage : layout_.reduce_last()) comms_->along(stage.collective.axes);
    if (!layout_.is_interleaved())
      own_ = Reduction::own_memory(*comms_, *memory_, layout_.reduce_last(), rules_.reduction, layout_.numel());
  }
}

// Collective, as the groups of the sums are made here.
BucketGradient::Ending BucketGradient::ending_of_reduced() const {
  const bool finds = rules_.check_gradients && std::isinf(rules_.gradient_magnitude_max) &&
                     Reduction::finds_bad_terms(*comms_, layout_.reduce(), rules_.reduction, views_.front().device());
  return finds ? Ending::unread : Ending::reduced;
}

void BucketGradient::enter(GradientState next) {
  SHARD_REQUIRE(
      may_follow(state_, next), "bucket",
      "the gradient of {} of {} is {} and cannot become {}. After an error in a backward call zero_gradients on every "
      "rank",
      first_name(), label_, to_string(state_), to_string(next));
  state_ = next;
}

void BucketGradient::begin_backward(bool reduces) {
  ending_ = reduces ? when_it_reduces_ : Ending::kept;
  for (size_t i = 0; i < views_.size(); ++i) coming_[i] = views_[i].requires_grad() ? Coming::expected : Coming::arrived;
}

int64_t BucketGradient::missing() const { return std::ssize(coming_) - std::ranges::count(coming_, Coming::arrived); }

at::ScalarType BucketGradient::produced_dtype() const {
  const ReductionDtypes& dtypes = rules_.reduction;
  const bool goes_on_the_wire = ending_ != Ending::kept && !layout_.reduce().empty() && rules_.divide_before == 1;
  return goes_on_the_wire && dtypes.gradient == at::kFloat ? dtypes.reduce : dtypes.gradient;
}

void BucketGradient::add_gradient(int64_t index, const at::Tensor& given) {
  const BucketParameter& member = layout_.members()[index];
  const at::Tensor gradient = given.is_sparse() ? given.detach().to_dense() : given;  // of an embedding
  SHARD_REQUIRE(
      !final(), "bucket",
      "parameter {} of {} got a gradient after the last backward of this step. Call set_last_microbatch(false) (in Python "
      "set_last_microbatch(False), or with the names of FSDP2 set_is_last_backward(False)) before every backward but the "
      "last, then the optimizer's step or zero_gradients",
      member.name, label_);
  SHARD_REQUIRE(!reducing(), "bucket",
                "parameter {} of {} got a second gradient in one backward after its bucket was taken", member.name, label_);
  SHARD_CHECK(gradient.numel() == member.numel, "bucket", "gradient of {}: {} elements, expected {}", member.name,
              gradient.numel(), member.numel);
  reached_[index] = true;
  take(index, gradient, std::exchange(coming_[index], Coming::arrived));
}

void BucketGradient::begin_producing() {
  if (state_ == GradientState::produced) return;
  enter(GradientState::produced);
  produced_ = own_.defined() ? own_ : memory_->allocate(MemoryKind::gradient, layout_.numel(), produced_dtype());
  stream_ = current_stream(produced_.device());
  if (!layout_.is_interleaved())  // otherwise the sum gets a bucket that was zero before it was packed
    for (const Interval& padding : layout_.whole().padding) part_of(produced_, padding.begin, {padding.size()}).zero_();
  holds_.assign(holds_.size(), false);
  suspect_.reset();
}

at::Tensor BucketGradient::produced(int64_t index) const {
  const BucketParameter& member = layout_.members()[index];
  return part_of(produced_, member.offset, {member.numel});
}

at::Tensor BucketGradient::place(int64_t index) {
  const bool begins = state_ == GradientState::empty || state_ == GradientState::accumulated;
  const at::ScalarType dtype = begins ? produced_dtype() : produced_.defined() ? produced_.scalar_type() : at::kLong;
  const bool is_first = begins || (state_ == GradientState::produced && !holds_[index]);
  if (!is_first || coming_[index] != Coming::expected || dtype != rules_.compute) return {};
  begin_producing();
  order_streams(*stream_, current_stream(produced_.device()));
  coming_[index] = Coming::placed;
  return part_of(produced_, layout_.members()[index].offset, layout_.members()[index].shape);
}

void BucketGradient::take(int64_t index, const at::Tensor& gradient, Coming before) {
  begin_producing();
  const OnStream on(*stream_);
  at::NoGradGuard no_grad;
  const at::Tensor source = part_of(gradient.contiguous(), 0, {gradient.numel()});
  const at::Tensor target = produced(index);
  const double limit = produced_max(rules_, layout_, comms_->mesh());
  bool fine = false;
  // It may have been made in its place; then a device is not asked, as in copy_to. Two tensors of no elements have one address.
  if (before == Coming::placed && source.const_data_ptr() == target.const_data_ptr())
    fine = ending_ != Ending::unread && target.is_cpu() && first_beyond(target, limit) == target.numel();
  else  // the first term is copied, not added to zero, which would turn -0.0 into +0.0
    fine = holds_[index] ? add_to(target, source, limit) : copy_to(target, source, limit);
  if (!fine && !suspect_) suspect_ = index;
  holds_[index] = true;
}

void BucketGradient::fill_missing() {
  const std::vector<bool> reached = reached_;
  for (size_t i = 0; i < views_.size(); ++i)
    if (coming_[i] != Coming::arrived)
      add_gradient(static_cast<int64_t>(i), at::zeros({layout_.members()[i].numel}, options(rules_.compute)));
  reached_ = reached;
}

void BucketGradient::start_reduce(bool last, const std::string& where) {
  SHARD_CHECK(complete() && produced_.defined(), "bucket", "{}: a reduce of {} needs every gradient, {} are missing", label_,
              first_name(), missing());
  const OnStream on(*stream_);
  std::string frozen;
  for (size_t i = 0; i < views_.size(); ++i) {
    if (!holds_[i]) produced(static_cast<int64_t>(i)).zero_();  // frozen ones beside trained ones
    if (!views_[i].requires_grad()) frozen += (frozen.empty() ? " without " : " and ") + layout_.members()[i].name;
  }
  where_ = where;
  if (rules_.check_gradients) checks_->expect();
  const bool look_in_sum = suspect_ && ending_ == Ending::unread;
  if (suspect_ && rules_.check_gradients && !look_in_sum) check_terms(produced_, /*in_bucket=*/false);
  aim_ = layout_.reduce().empty() ? Aim::finish : last ? Aim::complete : Aim::accumulate;
  const std::vector<Stage>& path = aim_ == Aim::finish ? layout_.reduce_last() : layout_.reduce();
  if (aim_ == Aim::finish && !last) {
    holds_.assign(holds_.size(), true);
    return;
  }
  produced_ = packed(produced_, MemoryKind::gradient);
  occasion_ = occasion(fmt::format("reduction {}{}{}", ++reductions_, last ? ", the last," : "", frozen));
  const CallLabel label(label_, occasion_);
  if (path.empty() && rules_.divide_before != 1) divide_by(produced_, rules_.divide_before);
  // Whether the last sum is the final gradient, to which nothing is added.
  const bool is_result = last && !accumulated_.defined() && (layout_.reduce().empty() || layout_.reduce_last().empty());
  if (!path.empty())
    reduction_.emplace(*comms_, *memory_, path, rules_.reduction, std::move(produced_),
                       Reduction::Options{.divide_terms = rules_.divide_before,
                                          .divide_result = is_result ? divide_in_sum() : 1,
                                          .find_bad_terms = look_in_sum,
                                          .is_registered = own_.defined()});
  enter(GradientState::reducing);
}

bool BucketGradient::advance_reduce(bool checks) {
  const CallLabel label(label_, occasion_);
  if (!reducing()) return false;
  const OnStream on(*stream_);
  if (reduction_) end_sum(checks);
  if (reduction_ && reduction_->start_next()) return true;
  at::Tensor sum = reduction_ ? reduction_->take() : std::move(produced_);
  const bool is_divided = reduction_ && reduction_->is_divided();
  produced_.reset();
  reduction_.reset();
  enter(GradientState::accumulated);
  if (aim_ != Aim::finish) {
    accumulate(std::move(sum));
    if (aim_ == Aim::accumulate) return false;
    sum = std::move(accumulated_);
    if (!layout_.reduce_last().empty()) {
      reduction_.emplace(*comms_, *memory_, layout_.reduce_last(), rules_.reduction, std::move(sum),
                         Reduction::Options{.divide_result = divide_in_sum()});
      aim_ = Aim::finish;
      enter(GradientState::reducing);
      return true;
    }
  }
  finalize(std::move(sum), is_divided);
  return false;
}

// An error leaves the bucket as a sum does that is complete, so that zero_gradients can forget it.
void BucketGradient::end_sum(bool checks) {
  reduction_->await_sum();
  const at::Tensor suspects = reduction_->take_suspects();
  if (!suspects.defined() || !checks) return;
  try {
    check_terms(suspects, /*in_bucket=*/true);
  } catch (...) {
    reduction_.reset();
    enter(GradientState::accumulated);
    throw;
  }
}

// What sums may divide by on their way: they have the dtype of the result then.
double BucketGradient::divide_in_sum() const {
  return rules_.main == rules_.reduction.gradient ? rules_.divide_after : 1;
}

void BucketGradient::accumulate(at::Tensor sum) {
  check_padding(layout_.accumulated(), sum, "reduced gradient");
  if (!accumulated_.defined()) {
    accumulated_ = std::move(sum);
    return;
  }
  const double limit = room_of_terms({&layout_.reduce_last()}, comms_->mesh(), rules_.grad_partial_ranks);
  const bool fine = add_to(accumulated_, sum, sum.scalar_type() == at::kLong ? limit : INFINITY);
  SHARD_REQUIRE(
      fine || sum.scalar_type() != at::kLong, "canonical",
      "the sum of gradients of {} and its neighbours leaves the range of fixed-point numbers. Here that is {}, as the "
      "sums of other ranks are added to it. Scale the loss down",
      layout_.members()[0].name, limit);
}

void BucketGradient::finalize(at::Tensor sum, bool is_divided) {
  check_padding(layout_.state(), sum, "gradient");
  at::NoGradGuard no_grad;
  if (sum.scalar_type() == rules_.main) {
    gradient_ = std::move(sum);
  } else {
    gradient_ = memory_->allocate(MemoryKind::gradient, layout_.state().size(), rules_.main);
    if (sum.scalar_type() == at::kLong && rules_.grad_partial_ranks > 1) fixed_ = sum;
    if (sum.scalar_type() == at::kLong)
      fixed_to_float(gradient_, sum);
    else
      gradient_.copy_(sum);
  }
  accumulated_.reset();
  enter(GradientState::final);
  if (!is_divided) divide_final(rules_.divide_after);
  if (rules_.grad_partial_ranks == 1) start_offload();
}

void BucketGradient::start_offload() {
  if (!rules_.offload) return;
  const at::Tensor host = memory_->allocate(MemoryKind::gradient, gradient_.numel(), gradient_.scalar_type(), Place::host);
  download_ = transfers_->download(host, std::exchange(gradient_, host));
}

void BucketGradient::await_values() {
  download_.wait();
}

const at::Tensor& BucketGradient::values() const {
  SHARD_CHECK(download_.is_over(), "bucket", "{}: the gradient of {} is used on its way to the host", label_, first_name());
  return gradient_;
}

void BucketGradient::sum_terms(Comm& group) {
  if (fixed_.defined()) {
    group.all_reduce(fixed_).wait();
    fixed_to_float(gradient_, std::exchange(fixed_, at::Tensor()));
    divide_final(rules_.divide_after);
  } else {
    group.all_reduce(gradient_).wait();
  }
  start_offload();
}

void BucketGradient::divide_final(double divisor) {
  if (divisor == 1) return;
  await_values();
  divide_by(values(), divisor);
}

void BucketGradient::adopt(at::Tensor gradient) {
  SHARD_CHECK(state_ == GradientState::empty, "bucket", "{}: the gradient of {} is {}, and a replay made another", label_,
              first_name(), to_string(state_));
  state_ = GradientState::final;
  gradient_ = std::move(gradient);
  if (rules_.check_gradients) checks_->expect();
}

void BucketGradient::zero_gradients() {
  enter(GradientState::empty);
  reductions_ = 0;
  reached_.assign(reached_.size(), false);
  produced_.reset();
  accumulated_.reset();
  gradient_.reset();
  download_ = {};
  fixed_.reset();
}

void BucketGradient::check_terms(const at::Tensor& terms, bool in_bucket) const {
  SHARD_REQUIRE(terms.scalar_type() != at::kLong, "gradient",
                "{}: the gradient of {} has an element that is NaN, infinite or not below {}, as this rank alone computed it. "
                "Fixed-point sums over the ranks cannot hold it: look at the loss and the data of this rank, or scale the loss "
                "down",
                where_, layout_.members()[*suspect_].name, produced_max(rules_, layout_, comms_->mesh()));
  if (!terms.is_cpu()) return ask_about(terms);
  if (first_beyond(terms, rules_.gradient_magnitude_max) == terms.numel()) return;
  std::vector<Segment> parts = layout_.whole().segments;
  if (!in_bucket) {  // where each parameter lies in one piece
    parts.clear();
    for (const BucketParameter& member : layout_.members())
      parts.push_back({std::ssize(parts), {0, member.numel}, member.offset});
  }
  for (const Segment& segment : parts) {
    const BucketParameter& member = layout_.members()[static_cast<size_t>(segment.member)];
    const at::Tensor values = terms.narrow(0, segment.local, segment.size());
    const int64_t bad = first_beyond(values, rules_.gradient_magnitude_max);
    if (bad < values.numel())
      throw NonFiniteError(
          fmt::format("[gradient] {}: the gradient of {} is {} at element {} of {}, as this rank alone computed it. "
                      "Look at the loss and the data of this rank, or lower the learning rate",
                      where_, member.name, element_of(values, bad), segment.element(bad), member.numel));
  }
}

// The padding of an interleaved bucket is not zero yet.
void BucketGradient::ask_about(const at::Tensor& terms) const {
  const auto ask = [&](int64_t begin, int64_t numel) {
    checks_->ask(terms_, part_of(terms, begin, {numel}), rules_.gradient_magnitude_max, begin, reductions_ + 1);
  };
  if (!layout_.is_interleaved()) return ask(0, terms.numel());
  for (const BucketParameter& member : layout_.members()) ask(member.offset, member.numel);
}

// The terms lay as units compute, where each parameter is in one piece. They are gone.
void BucketGradient::throw_nonfinite(const LateChecks::Bad& bad) const {
  const auto& members = layout_.members();
  const auto found = std::ranges::find_if(members, [&](const BucketParameter& member) {
    return member.offset <= bad.place && bad.place < member.offset + member.numel;
  });
  SHARD_CHECK(found != members.end(), "gradient", "{}: place {} of the bucket of {} is no parameter's", label_, bad.place,
              first_name());
  const BucketParameter& member = *found;
  const std::string beyond =
      std::isinf(rules_.gradient_magnitude_max) ? "" : fmt::format(", or above {},", rules_.gradient_magnitude_max);
  throw NonFiniteError(
      fmt::format("[gradient] rank {}, step {}, reduction {}: the gradient of {} is NaN or infinite{} at element {} of {}, as "
                  "that rank alone computed it. Look at the loss and the data of that rank, or lower the learning rate",
                  bad.rank, progress_->steps + 1, bad.reduction, member.name, beyond, bad.place - member.offset, member.numel));
}

}  // namespace shardproof
