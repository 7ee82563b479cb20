#include "sharding/bucket_parameters.h"

#include <ATen/ATen.h>

#include <exception>
#include <numeric>

#include "sharding/storage.h"
#include "shardproof/algebra/axes.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device_graph.h"
#include "shardproof/nn/meta_init.h"
#include "internal/base/call_label.h"
#include "internal/device/streams.h"

namespace shardproof {

BucketParameters::BucketParameters(const BucketContext& context, const Initializer& initialize)
    : BucketPart(context, "parameter") {
  at::NoGradGuard no_grad;
  allocate_parameters();
  allocate_main();
  if (views_.at(0).is_meta()) {
    fill_from_initializer(initialize);
  } else {
    fill_from_values();
  }
  if (rounded_.defined()) round_main_into(rounded_);  // padding and all
  unpack_updated();
  if (frees_compute())
    unreadable_ = unreadable_parameters("is sharded and has no data here. It is whole only while its unit runs");
  else if (rules_.publish == Publish::at_first_use && layout_.all_gather_updated().step == Step::all_gather)
    unreadable_ = unreadable_parameters("was updated, and with Publish::at_first_use has not been waited for");
  point_parameters_at(frees_compute() ? unreadable_ : readable_);
  versions_ = versions();
}

// What is on its way is awaited, unless the ranks may not meet again.
BucketParameters::~BucketParameters() {
  if (std::uncaught_exceptions() > 0) return;
  try {
    await_updated();
  } catch (const std::exception&) {
    // Another rank failed, and says so itself.
  }
}

std::vector<at::Tensor> BucketParameters::unreadable_parameters(const std::string& why) const {
  std::vector<at::Tensor> result;
  for (const BucketParameter& member : layout_.members())
    result.push_back(unreadable(member.shape, rules_.compute, memory_->device(),
                                fmt::format("[bucket] parameter {} {}: enter {} (in Python call its module, in C++ go through "
                                            "`call`). Where a forward begins below it, call unit(...).unshard() of the sharded "
                                            "model with its name first, which is \"\" of the root. To read values, take "
                                            "parameters() or gather_parameters() (in Python gather()) of the sharded model",
                                            member.name, why, label_)));
  return result;
}

void BucketParameters::allocate_parameters() {
  const LocalView& own = layout_.parameter();
  if (side_by_side()) {
    Comm& group = comms_->along(layout_.unshard().axes);
    SHARD_REQUIRE(memory_->device().is_cpu() || memory_->device().is_meta(), "fully_shard",
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
  for (const BucketParameter& member : layout_.members())
    readable_.push_back(compute_.narrow(0, member.offset, member.numel).view(member.shape));
  if (side_by_side()) return;
  release_storage(compute_);
  gathered_ = compute_;
  if (layout_.is_interleaved()) {
    gathered_ = without_memory(layout_.numel(), rules_.compute, memory_->device());
    release_storage(gathered_);
  }
  if (!frees_compute()) {
    restore_storage(compute_, *memory_, MemoryKind::parameter);
    if (storage_is_released(gathered_)) restore_storage(gathered_, *memory_, MemoryKind::parameter);
    parameter_ = gathered_;
    return;
  }
  if (encoding_ == Encoding::when_sent) return;
  // What is gathered from and what is gathered into are registered together, or both are not.
  Comm& group = comms_->along(layout_.unshard().axes);
  parameter_ = memory_->allocate_of(group, Op::all_gather, MemoryKind::parameter, own.size(), rules_.compute);
  if (!parameter_.defined()) parameter_ = memory_->allocate(MemoryKind::parameter, own.size(), rules_.compute);
}

void BucketParameters::allocate_main() {
  const int64_t size = layout_.state().size();
  const auto allocate = [&](at::ScalarType dtype) { return memory_->allocate(MemoryKind::parameter, size, dtype, place()); };
  main_ = encoding_ == Encoding::plain ? own_part() : allocate(rules_.main);
  if (encoding_ == Encoding::beside && rules_.main != rules_.compute)
    rounded_ = rules_.offload ? allocate(rules_.compute) : own_part();
}

void BucketParameters::fill_from_values() {
  at::Tensor whole = at::zeros({layout_.numel()}, options(rules_.main));
  for (size_t i = 0; i < views_.size(); ++i) {
    const BucketParameter& member = layout_.members()[i];
    whole.narrow(0, member.offset, member.numel).view(member.shape).copy_(views_[i]);
  }
  if (rules_.broadcast)
    for (const std::string& axis : rules_.sum_axes) comms_->along({axis}).broadcast(whole, 0).wait();
  whole = packed(whole, MemoryKind::parameter);
  const auto part = [&](const LocalView& view) { return whole.narrow(0, view.interval.begin, view.size()); };
  if (encoding_ != Encoding::when_sent) parameter_.copy_(part(layout_.parameter()));
  main_.copy_(part(layout_.state()));
}

void BucketParameters::fill_from_initializer(const Initializer& initialize) {
  SHARD_REQUIRE(initialize != nullptr, "fully_shard",
                "parameter {} is on the meta device, so it has no values. Give fully_shard the option initialize",
                layout_.members()[0].name);
  const auto fill = [&](const LocalView& view, const at::Tensor& local) {
    local.zero_();
    std::vector<std::vector<Segment>> segments(layout_.members().size());
    for (const Segment& segment : view.segments) segments[static_cast<size_t>(segment.member)].push_back(segment);
    for (size_t m = 0; m < segments.size(); ++m) {
      if (segments[m].empty()) continue;
      const BucketParameter& member = layout_.members()[m];
      const Placement at = layout_.placement(member, view);
      const at::Tensor values = at::empty({owned_numel(member.whole, at.mesh, at.layout, layout_.rank())}, rules_.main);
      for (const OwnedRun& run : owned_runs(member.whole, at.mesh, at.layout, layout_.rank()))
        initialize(member.name, member.whole, run.whole, values.narrow(0, run.local, run.whole.size()));
      const Segment& first = segments[m][0];
      const at::Tensor rows = values.view({first.times, -1});
      for (const Segment& segment : segments[m])  // which lie beside each other in what the rank holds
        local.narrow(0, segment.local, segment.size())
            .view({segment.times, segment.run.size()})
            .copy_(rows.narrow(1, segment.run.begin - first.run.begin, segment.run.size()));
    }
  };
  if (encoding_ != Encoding::when_sent) fill(layout_.parameter(), parameter_);
  if (encoding_ != Encoding::plain) fill(layout_.state(), main_);
  for (const at::Tensor& view : views_) materialize(view, memory_->device());
}

void BucketParameters::point_parameters_at(const std::vector<at::Tensor>& data) const {
  for (size_t i = 0; i < views_.size(); ++i) point_at(views_[i], data[i]);
}

Encoding BucketParameters::choose_encoding() const {
  if (rules_.offload) return Encoding::beside;
  if (rules_.main == rules_.compute) return Encoding::plain;
  const bool is_own = frees_compute() && layout_.all_gather_updated().step == Step::none;
  return is_own ? Encoding::when_sent : Encoding::beside;
}

// The one place that rounds them, besides rules that do so as they update them.
at::Tensor BucketParameters::round_main_into(const at::Tensor& place) const {
  const at::NoGradGuard no_grad;
  return place.copy_(main());
}

// What this rank gives to a gather. `gathered` has its memory already.
at::Tensor BucketParameters::to_gather() const {
  if (kept_) return kept_->part;
  if (encoding_ != Encoding::when_sent) return parameter_;
  const LocalView& own = layout_.parameter();
  return round_main_into(part_of(gathered_, own.interval.begin, {own.size()}));
}

at::Tensor BucketParameters::own_part() const {
  const int64_t begin = layout_.state().interval.begin - layout_.parameter().interval.begin;
  return parameter_.narrow(0, begin, layout_.state().size());
}

int64_t BucketParameters::compute_bytes() const {
  return layout_.numel() * static_cast<int64_t>(c10::elementSize(rules_.compute));
}

int64_t BucketParameters::versions() const {
  int64_t sum = 0;
  for (const at::Tensor& view : views_)
    if (!view.is_inference()) sum += view._version();
  return sum;
}

void BucketParameters::require_own() const {
  const auto is_at = [](const at::Tensor& view, const std::vector<at::Tensor>& places, size_t i) {
    return i < places.size() && view.storage().unsafeGetStorageImpl() == places[i].storage().unsafeGetStorageImpl() &&
           view.storage_offset() == places[i].storage_offset() && view.sizes() == places[i].sizes() &&
           view.strides() == places[i].strides();
  };
  for (size_t i = 0; i < views_.size(); ++i)
    SHARD_REQUIRE(is_at(views_[i], readable_, i) || is_at(views_[i], unreadable_, i), "bucket",
                  "{} (rank {}): parameter {} was given other data after it was sharded, by `.data = ` or a cast or move of "
                  "the module, and training would not follow. Give it values by write_parameters or load_state_dict of the "
                  "sharded model, and cast or move a module before it is sharded",
                  label_, layout_.rank(), layout_.members()[i].name);
  const bool optimizer_sees = encoding_ == Encoding::plain && !frees_compute() && !layout_.is_interleaved();
  SHARD_REQUIRE(optimizer_sees || versions() == versions_, "bucket",
                "{} (rank {}): {} or a parameter beside it was changed in place after it was sharded, and the optimizer works "
                "on a copy that does not follow. Give it values by write_parameters or load_state_dict of the sharded model",
                label_, layout_.rank(), first_name());
}

bool BucketParameters::start_unshard() {
  if (residency_ != Residency::sharded && residency_ != Residency::kept) return false;
  require_own();
  const std::string which = frees_compute() || side_by_side() ? occasion("gather") : "";
  const CallLabel label(label_, which);
  if (frees_compute()) await_updated();
  residency_ = Residency::gathering;
  if (side_by_side() && updated_ != Updated::met) {
    await_updated();  // neighbours that pass the barrier read what this gather brings
    unshard_work_ = comms_->along(layout_.unshard().axes).barrier();
    updated_ = Updated::met;
  }
  if (!frees_compute()) return false;
  Comm& group = kept_ ? *kept_->group : comms_->along(layout_.unshard().axes);
  restore_storage(gathered_, *memory_, MemoryKind::gathered, kept_ ? nullptr : &group);
  unshard_work_ = group.all_gather(gathered_, to_gather());
  const Mesh& mesh = comms_->mesh();
  return group.size() > 1 && !(mesh.has(axes::dp_replicate) && mesh.size(axes::dp_replicate) > 1);
}

void BucketParameters::finish_unshard() {
  const Awaited now{current_stream(memory_->device()), is_capturing() ? Awaited::In::capture : Awaited::In::steps};
  // On another stream than the first, too, they are used once they are there. What was whole before a capture is there: the
  // capture has waited for the device.
  if (residency_ == Residency::whole) {
    if (awaited_->in == now.in) order_streams(awaited_->on, now.on);
    return;
  }
  SHARD_CHECK(residency_ == Residency::gathering, "bucket", "{}: a gather of {} is awaited that was not started", label_,
              first_name());
  unshard_work_.wait();
  await_updated();
  if (frees_compute() && layout_.is_interleaved()) {
    restore_storage(compute_, *memory_, MemoryKind::gathered);
    layout_.unpack(gathered_, compute_);
    release_storage(gathered_);
  }
  residency_ = Residency::whole;
  awaited_ = now;
  if (!frees_compute()) return;
  kept_.reset();
  point_parameters_at(readable_);
}

void BucketParameters::reshard() {
  SHARD_REQUIRE(residency_ != Residency::gathering, "unit",
                "{}, with parameter {}, is resharded while its gather is in flight; unshard() it first", label_, first_name());
  residency_ = Residency::sharded;
  kept_.reset();
  if (!frees_compute() || storage_is_released(compute_)) return;
  point_parameters_at(unreadable_);
  release_storage(compute_);
}

Comm& BucketParameters::neighbours(int64_t ranks) const {
  const std::vector<std::string>& axes = layout_.unshard().axes;
  SHARD_REQUIRE(axes.size() == 1, "bucket",
                "{}: Reshard::within({}) counts neighbours along one axis, and {} is gathered over {}. Use always or never",
                label_, ranks, first_name(), axes.size());
  // Experts are shared by fewer ranks, which `ranks` need not divide.
  return comms_->within(axes.front(), std::gcd(ranks, comms_->mesh().size(axes.front())));
}

void BucketParameters::reshard_within(int64_t ranks) {
  if (!frees_compute()) {
    residency_ = Residency::kept;
    return;
  }
  Comm& group = neighbours(ranks);
  const int64_t part = layout_.numel() / group.size();
  keep(group, {group.rank() * part, (group.rank() + 1) * part});
}

void BucketParameters::reshard_between() {
  const Stage* between = layout_.between();
  if (between == nullptr) return reshard();
  if (!frees_compute()) {
    residency_ = Residency::kept;
    return;
  }
  if (between->collective.step == Step::none) return;  // on this mesh it is the whole bucket, which stays
  keep(comms_->along(between->collective.axes), between->part.interval);
}

void BucketParameters::keep(Comm& group, Interval part) {
  SHARD_CHECK(residency_ == Residency::whole, "bucket", "{}: a part of {} is kept of what is not whole", label_, first_name());
  at::Tensor kept = memory_->allocate(MemoryKind::gathered, part.size(), rules_.compute);
  kept.copy_(packed(compute_, MemoryKind::gathered).narrow(0, part.begin, part.size()));
  reshard();
  residency_ = Residency::kept;
  kept_ = Kept{kept, &group};
}

void BucketParameters::await_updated() {
  if (!arrives()) return;
  const Updated before = std::exchange(updated_, Updated::written);
  update_work_.wait();
  unpack_updated();
  if (before == Updated::hidden) point_parameters_at(readable_);
}

void BucketParameters::await_main() {
  await_updated();
  upload_.wait();
}

void BucketParameters::unpack_updated() {
  if (layout_.is_interleaved() && !frees_compute()) layout_.unpack(gathered_, compute_);
}

void BucketParameters::end_update() {
  if (rules_.publish == Publish::in_step) return await_updated();
  if (!arrives() || unreadable_.empty() || frees_compute()) return;
  point_parameters_at(unreadable_);
  updated_ = Updated::hidden;
}

const at::Tensor& BucketParameters::parameter() const {
  SHARD_CHECK(!arrives(), "bucket", "{}: {} is read while its update is under way", label_, first_name());
  return parameter_;
}

int64_t BucketParameters::resting_bytes() const {
  return static_cast<int64_t>((encoding_ == Encoding::when_sent ? main_ : parameter_).nbytes());
}

std::vector<Shard> BucketParameters::shards() const {
  const at::Tensor& held = parameter();
  if (encoding_ == Encoding::when_sent)
    return layout_.shards(layout_.parameter(), round_main_into(at::empty_like(main_, rules_.compute)));
  if (!layout_.is_interleaved() || frees_compute()) return layout_.shards(layout_.parameter(), held);
  std::vector<Shard> shards;
  for (const BucketParameter& member : layout_.members())
    shards.push_back({member.name, member.whole, layout_.placement(member, layout_.parameter()),
                      compute_.narrow(0, member.offset, member.numel)});
  return shards;
}

const at::Tensor& BucketParameters::main() const {
  SHARD_CHECK(!arrives() && upload_.is_over(), "bucket", "{}: main parameters of {} are used while their update is under way",
              label_, first_name());
  return main_;
}

const at::Tensor& BucketParameters::rounded() const { return rounded_; }

at::Tensor BucketParameters::allocate_state(int64_t numel) const {
  return memory_->allocate(MemoryKind::optimizer, numel, rules_.main, place());
}

at::Tensor BucketParameters::adopt_state(const at::Tensor& values) const {
  return memory_->adopt(MemoryKind::optimizer, values, static_cast<int64_t>(values.nbytes()), place());
}

void BucketParameters::write_own_part(bool is_rounded) {
  if (rounded_.defined() && !is_rounded) round_main_into(rounded_);
  const at::Tensor& updated = rounded_.defined() ? rounded_ : main_;
  check_padding(layout_.state(), updated, "parameter");
  if (rules_.offload) upload_ = transfers_->upload(own_part(), updated);
}

void BucketParameters::mark_changed() {
  // Raw writes are invisible to autograd: say that the values changed, so that a graph from before the step is refused.
  for (const at::Tensor& view : views_) view.unsafeGetTensorImpl()->bump_version();
  versions_ += std::ssize(views_);
  updated_ = Updated::written;
}

void BucketParameters::all_gather_updated(bool is_rounded) {
  at::NoGradGuard no_grad;
  await_main();
  write_own_part(is_rounded);
  mark_changed();
  if (layout_.all_gather_updated().step != Step::all_gather) return;
  const std::string which = occasion("gather after the update");
  const CallLabel label(label_, which);
  update_work_ = comms_->along(layout_.all_gather_updated().axes).all_gather(parameter_, own_part());
  updated_ = Updated::arriving;
}

void BucketParameters::put_back(const at::Tensor& parameter) {
  at::NoGradGuard no_grad;
  write_own_part(/*is_rounded=*/false);
  if (parameter.defined()) at::Tensor(parameter_).copy_(parameter);
  unpack_updated();
  mark_changed();
}

}  // namespace shardproof
