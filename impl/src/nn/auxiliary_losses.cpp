#include "shardproof/nn/auxiliary_losses.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>

#include <utility>
#include <vector>

#include "shardproof/base/check.h"

namespace shardproof {

// What graphs and layers know of one AuxiliaryLosses. They may outlive it.
struct AuxiliaryRecord {
  at::Tensor sum;       // of the losses so far
  at::Tensor gradient;  // that of the sum, from when a backward has come to it to its end
  std::vector<std::function<void()>> counts;
  bool is_added = false, is_dropped = false;
};

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Keeps a record alive in a graph.
struct Held : torch::CustomClassHolder {
  explicit Held(std::shared_ptr<AuxiliaryRecord> r) : record(std::move(r)) {}
  std::shared_ptr<AuxiliaryRecord> record;
};

void keep(AutogradContext* ctx, const std::shared_ptr<AuxiliaryRecord>& record) {
  ctx->saved_data["record"] = c10::IValue::make_capsule(c10::make_intrusive<Held>(record));
}

AuxiliaryRecord& kept(AutogradContext* ctx) {
  return *c10::static_intrusive_pointer_cast<Held>(ctx->saved_data["record"].toCapsule())->record;
}

struct Carry : torch::autograd::Function<Carry> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const Variable& loss,
                          const std::shared_ptr<AuxiliaryRecord>& record) {
    keep(ctx, record);
    ctx->saved_data["dtype"] = loss.scalar_type();
    return x.view_as(x);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    SHARD_REQUIRE(
        !c10::GradMode::is_enabled(), "auxiliary_losses",
        "a backward with create_graph through losses of layers: they have no second gradient. Leave create_graph out");
    const at::Tensor& gradient = kept(ctx).gradient;
    SHARD_REQUIRE(gradient.defined(), "auxiliary_losses",
                  "a backward of a forward with losses of layers from a loss without them. Give the loss to "
                  "AuxiliaryLosses::add_to first");
    return {dy[0], gradient.to(ctx->saved_data["dtype"].toScalarType()), {}};
  }
};

struct Add : torch::autograd::Function<Add> {
  static Variable forward(AutogradContext* ctx, const Variable& loss, const std::shared_ptr<AuxiliaryRecord>& record) {
    keep(ctx, record);
    return loss + record->sum;
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    AuxiliaryRecord& record = kept(ctx);
    record.gradient = dy[0].detach();
    torch::autograd::Engine::get_default_engine().queue_callback([held = ctx->saved_data["record"], &record] {
      record.gradient = at::Tensor();  // another backward has another
    });
    return {dy[0], {}};
  }
};

// Where a layer adds to. Throws Error when nobody collects.
const std::shared_ptr<AuxiliaryRecord>& collecting() {
  const AuxiliaryScope& scope = auxiliary_scope();
  SHARD_REQUIRE(scope.record, "auxiliary_losses",
                "a layer has a loss of its own, or counts, and nobody collects it. Make an AuxiliaryLosses before the forward, "
                "and give the loss to its add_to");
  SHARD_REQUIRE(scope.runs_again || !scope.record->is_added, "auxiliary_losses",
                "a forward after add_to. Make an AuxiliaryLosses for each forward");
  return scope.record;
}

}  // namespace

AuxiliaryScope& auxiliary_scope() {
  thread_local AuxiliaryScope scope;
  return scope;
}

AuxiliaryLosses::AuxiliaryLosses()
    : record_(std::make_shared<AuxiliaryRecord>()), before_(std::exchange(auxiliary_scope().record, record_)) {}

bool is_dropped(const AuxiliaryRecord& record) {
  return record.is_dropped;
}

AuxiliaryLosses::~AuxiliaryLosses() {
  record_->is_dropped = !record_->is_added;
  record_->counts.clear();
  if (auxiliary_scope().record == record_) auxiliary_scope().record = std::move(before_);
}

at::Tensor AuxiliaryLosses::add_to(const at::Tensor& loss) {
  SHARD_REQUIRE(loss.dim() == 0, "auxiliary_losses", "add_to got a loss [{}]; give it their sum, of no dims",
                fmt::join(loss.sizes(), ", "));
  SHARD_REQUIRE(!std::exchange(record_->is_added, true), "auxiliary_losses",
                "add_to was called already. Make an AuxiliaryLosses for each forward");
  for (const std::function<void()>& count : std::exchange(record_->counts, {})) count();
  return record_->sum.defined() ? Add::apply(loss, record_) : loss;
}

at::Tensor carry_loss(const at::Tensor& x, const at::Tensor& loss) {
  const std::shared_ptr<AuxiliaryRecord>& record = collecting();
  if (!auxiliary_scope().runs_again) record->sum = record->sum.defined() ? record->sum + loss.detach() : loss.detach();
  return loss.requires_grad() ? Carry::apply(x, loss, record) : x;
}

void when_collected(std::function<void()> count) {
  const std::shared_ptr<AuxiliaryRecord>& record = collecting();
  if (!auxiliary_scope().runs_again) record->counts.push_back(std::move(count));
}

}  // namespace shardproof
