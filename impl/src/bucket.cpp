#include "bucket.h"

#include <ATen/ATen.h>

#include "flat_math.h"
#include "shardproof/check.h"
#include "storage.h"
#include "transition.h"

namespace shardproof {
namespace {

// What a whole bucket is summed over: the axes along which gradients are partial.
const std::vector<std::string>& sum_axes(const ShardOptions& options) { return options.strategy.produced.partial; }

double default_divide(const ShardOptions& options, const Mesh& mesh) {
  if (options.gradient_divide != 0) return options.gradient_divide;
  double ranks = 1;
  for (const std::string& axis : sum_axes(options)) ranks *= static_cast<double>(mesh.size(axis));
  return ranks;
}

float* floats(const at::Tensor& tensor) { return tensor.mutable_data_ptr<float>(); }

}  // namespace

Bucket::Bucket(std::vector<at::Tensor> parameters, BucketLayout layout, std::shared_ptr<MeshComm> comms,
               const ShardOptions& options)
    : layout_(std::move(layout)),
      comms_(std::move(comms)),
      divide_(default_divide(options, comms_->mesh())),
      trainable_(parameters.at(0).requires_grad()),
      views_(std::move(parameters)),
      arrived_(views_.size(), false) {
  compute_ = allocate(layout_.numel());
  compute_.zero_();
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < views_.size(); ++i) {
    const Slot& slot = layout_.slots()[i];
    readable_.push_back(compute_.narrow(0, slot.offset, slot.numel).view(slot.shape));
    readable_.back().copy_(views_[i]);
  }
  point_parameters_at(readable_);
  if (options.broadcast_initial_values) comms_->along(sum_axes(options)).broadcast(compute_, 0).wait();
  parameter_ = compute_.narrow(0, layout_.parameter().interval.begin, layout_.parameter().size());
  if (frees_compute()) {
    parameter_ = parameter_.clone();
    for (const Slot& slot : layout_.slots())
      unreadable_.push_back(unreadable(
          slot.shape, compute_.scalar_type(),
          fmt::format("[bucket] parameter {} is sharded and has no data here. It is whole only while its unit runs: use "
                      "Sharded::parameters or gather_parameters",
                      slot.name)));
    reshard();
  }
}

void Bucket::point_parameters_at(const std::vector<at::Tensor>& data) {
  for (size_t i = 0; i < views_.size(); ++i) views_[i].set_data(data[i]);
}

at::Tensor Bucket::allocate(int64_t numel) const { return at::empty({numel}, at::kFloat); }

void Bucket::start_unshard() {
  if (!frees_compute()) return;
  restore_storage(compute_);
  unshard_work_ = start_transition(*comms_, layout_.unshard(), compute_, parameter_);
}

void Bucket::finish_unshard() {
  if (!frees_compute()) return;
  unshard_work_.wait();
  point_parameters_at(readable_);
}

void Bucket::reshard() {
  if (!frees_compute()) return;
  point_parameters_at(unreadable_);
  release_storage(compute_);
}

void Bucket::add_gradient(int64_t index, const at::Tensor& gradient) {
  const Slot& slot = layout_.slots()[index];
  SHARD_REQUIRE(!final(), "bucket",
                "parameter {} got a gradient after the last backward of this step. Call set_last_microbatch(false) before "
                "every backward but the last, then Optimizer::step or zero_gradients",
                slot.name);
  SHARD_REQUIRE(!reducing_ && !arrived_[index], "bucket",
                "parameter {} got a second gradient in one backward after its bucket was taken", slot.name);
  if (!produced_.defined()) {
    produced_ = allocate(layout_.numel());
    for (const Interval& padding : layout_.produced().padding)
      std::fill_n(floats(produced_) + padding.begin, padding.size(), 0.0f);
    produced_has_values_ = false;
  }
  const at::Tensor source = gradient.contiguous();
  SHARD_CHECK(source.numel() == slot.numel && source.scalar_type() == produced_.scalar_type(), "bucket",
              "gradient of {}: {} elements of {}, expected {} of {}", slot.name, source.numel(),
              c10::toString(source.scalar_type()), slot.numel, c10::toString(produced_.scalar_type()));
  // The first term is copied, not added to zero, which would turn -0.0 into +0.0.
  float* target = floats(produced_) + slot.offset;
  if (produced_has_values_) {
    add_to(target, source.const_data_ptr<float>(), slot.numel);
  } else {
    std::copy_n(source.const_data_ptr<float>(), slot.numel, target);
  }
  arrived_[index] = true;
  ++arrived_count_;
}

void Bucket::fill_missing() {
  for (size_t i = 0; i < views_.size(); ++i)
    if (!arrived_[i]) add_gradient(static_cast<int64_t>(i), at::zeros({layout_.slots()[i].numel}, compute_.options()));
}

void Bucket::start_reduce(bool last, const std::string& where) {
  SHARD_CHECK(complete() && !reducing_, "bucket", "a reduce needs every gradient, {} of {} are there", arrived_count_,
              arrived_.size());
  check_finite(where);
  reducing_ = true;
  reducing_last_ = last;
  arrived_.assign(arrived_.size(), false);
  arrived_count_ = 0;
  if (layout_.reduce().step == Step::none) {
    reduced_ = produced_;
    produced_has_values_ = true;
  } else {
    reduced_ = allocate(layout_.accumulated().size());
    reduce_work_ = start_transition(*comms_, layout_.reduce(), reduced_, produced_);
  }
}

void Bucket::finish_reduce() {
  if (!reducing_) return;
  reduce_work_.wait();
  reducing_ = false;
  check_padding(layout_.accumulated(), reduced_, "reduced gradient");
  if (layout_.reduce().step == Step::none) {
    accumulated_ = reduced_;
  } else {
    produced_.reset();
    if (accumulated_.defined()) {
      add_to(floats(accumulated_), reduced_.const_data_ptr<float>(), reduced_.numel());
    } else {
      accumulated_ = reduced_;
    }
  }
  reduced_.reset();
  if (reducing_last_) finalize();
}

void Bucket::finalize() {
  const Lowered& step = layout_.reduce_last();
  gradient_ = step.step == Step::reduce_scatter ? allocate(layout_.state().size()) : accumulated_;
  start_transition(*comms_, step, gradient_, accumulated_).wait();
  accumulated_.reset();
  produced_.reset();
  check_padding(layout_.state(), gradient_, "gradient");
  if (divide_ != 1) divide_by(floats(gradient_), static_cast<float>(divide_), gradient_.numel());
}

at::Tensor Bucket::state_parameter() const {
  const int64_t begin = layout_.state().interval.begin - layout_.parameter().interval.begin;
  return parameter_.narrow(0, begin, layout_.state().size());
}

void Bucket::zero_gradients() {
  SHARD_REQUIRE(!reducing_, "bucket", "gradients of {} are still being reduced", layout_.slots()[0].name);
  produced_.reset();
  accumulated_.reset();
  gradient_.reset();
  arrived_.assign(arrived_.size(), false);
  arrived_count_ = 0;
}

void Bucket::publish() {
  const at::Tensor updated = state_parameter();
  check_padding(layout_.state(), updated, "parameter");
  start_transition(*comms_, layout_.publish(), parameter_, updated).wait();
  // Raw writes are invisible to autograd: say that the values changed, so that a graph from before the step is refused.
  for (const at::Tensor& view : views_) view.unsafeGetTensorImpl()->bump_version();
}

void Bucket::check_padding(const LocalView& view, const at::Tensor& local, const char* what) const {
  const float* data = local.const_data_ptr<float>();
  for (const Interval& padding : view.padding)
    for (int64_t i = padding.begin; i < padding.end; ++i)
      SHARD_CHECK(data[i] == 0, "bucket", "padding of the {} after {} holds {} at bucket offset {}", what,
                  layout_.slots().front().name, data[i], view.interval.begin + i);
}

void Bucket::check_finite(const std::string& where) const {
  for (const Slot& slot : layout_.slots()) {
    const float* data = produced_.const_data_ptr<float>() + slot.offset;
    const int64_t bad = first_nonfinite(data, slot.numel);
    if (bad < slot.numel)
      throw NonFiniteError(fmt::format("[gradient] {}: the gradient of {} is {} at element {} of {}, before any communication. "
                                       "Look at the loss and the data of this rank, or lower the learning rate",
                                       where, slot.name, data[bad], bad, slot.numel));
  }
}

}  // namespace shardproof
