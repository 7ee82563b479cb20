#include "shardproof/sharding/step_graph.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <fmt/ranges.h>

#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/agree.h"
#include "shardproof/comm/capturable.h"
#include "shardproof/device/device_graph.h"

namespace shardproof {
namespace {

// Sums of terms along tp are collectives; what else runs at the end of a backward does so on the host.
constexpr const char* kCapturedStep = "parallel terms";

// What a graph takes for granted, as numbers: it works on these addresses, and for these parameters. `see(name, number)`; the
// name is only made when somebody asks for it.
template <class F>
void each_fact(const Sharded::Impl& sharded, const F& see) {
  const auto address = [](const at::Tensor& tensor) {
    return tensor.has_storage() ? reinterpret_cast<uintptr_t>(tensor.storage().unsafeGetStorageImpl()->data_ptr().get()) : 0;
  };
  for (const Bucket* bucket : sharded.schedule.buckets()) {
    const auto& members = bucket->layout().members();
    const auto place = [&](const char* what) { return fmt::format("where {} of {} lie", what, members.front().name); };
    see([&] { return place("the parameters"); }, address(bucket->parameters.parameter()));
    see([&] { return place("the main parameters"); }, address(bucket->parameters.main()));
    for (size_t i = 0; i < members.size(); ++i)
      see([&] { return fmt::format("whether {} trains", members[i].name); }, bucket->trains(static_cast<int64_t>(i)));
  }
  for (const auto& buffer : sharded.module->named_buffers())
    see([&] { return fmt::format("where the buffer {} lies", buffer.key()); }, address(buffer.value()));
  for (const auto& module : sharded.module->named_modules("", /*include_self=*/true))
    see([&] { return fmt::format("whether module '{}' is in training", module.key()); }, module.value()->is_training());
  for (const auto& unit : sharded.schedule.units())
    see([&] { return fmt::format("whether gradients of unit '{}' are synchronized", unit->name()); },
        unit->settings.gradient_sync && sharded.schedule.gradient_sync());
}

std::vector<uintptr_t> facts_of(const Sharded::Impl& sharded) {
  std::vector<uintptr_t> facts;
  each_fact(sharded, [&](const auto&, uintptr_t fact) { facts.push_back(fact); });
  return facts;
}

// The first thing that is not as it was; "" for none.
std::string changed_since(const std::vector<uintptr_t>& before, const Sharded::Impl& sharded) {
  size_t index = 0;
  std::string changed;
  each_fact(sharded, [&](const auto& name, uintptr_t fact) {
    if (changed.empty() && (index >= before.size() || before[index] != fact)) changed = name();
    ++index;
  });
  return changed.empty() && index < before.size() ? "the number of buffers and modules" : changed;
}

std::vector<at::Tensor> detached(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.defined() ? tensor.detach() : tensor);
  return result;
}

}  // namespace

std::vector<std::string> obstacles_to_step_graph(Sharded& given) {
  Sharded::Impl& sharded = given.impl();
  const ShardOptions& options = sharded.options;
  std::vector<std::string> found;
  const auto refuse = [&](bool is_there, std::string why) {
    if (is_there) found.push_back(std::move(why));
  };
  refuse(!has_device_graphs(sharded.device()),
         fmt::format("{} has no graphs in this process: train on a GPU, after use_cuda()", sharded.device().str()));
  Comm& world = sharded.comms->world();
  refuse(!can_be_captured(world), fmt::format("the backend of '{}' communicates by the host's hands, or watches each call: use "
                                              "NCCL, without decorators",
                                              world.name()));
  refuse(options.offload != Offload::none, "ShardOptions::offload moves gradients by the host");
  refuse(options.numerics == Numerics::canonical, "Numerics::canonical asks the device whether each gradient fits");
  refuse(options.divide_by_tokens, "ShardOptions::divide_by_tokens divides by a number that the host counts");
  refuse(options.publish == Publish::at_first_use,
         "Publish::at_first_use leaves the step's first forward to wait for gathers that began outside of the graph");
  refuse(options.gather == Gather::side_by_side, "Gather::side_by_side lets the host wait for other ranks");
  for (const auto& unit : sharded.schedule.units()) {
    refuse(unit->settings.activations != nullptr, fmt::format("unit '{}' has its activations offloaded", unit->name()));
    refuse(unit->settings.timeline != nullptr, fmt::format("unit '{}' is measured on a timeline", unit->name()));
  }
  for (const Sharded::Impl::FinishingStep& step : sharded.finishing)
    refuse(step.name != kCapturedStep, fmt::format("the finishing step '{}' runs on the host", step.name));
  return found;
}

struct StepGraph::Impl {
  Sharded& sharded;
  Body body;
  StepGraphOptions options;
  int64_t steps = 0;                                   // that ran without a graph
  std::vector<at::Tensor> inputs = {}, outputs = {};
  std::vector<at::Tensor> gradients = {};  // by bucket; undefined of those that do not train
  std::shared_ptr<DeviceGraph> graph = nullptr;
  std::vector<uintptr_t> facts = {};

  Sharded::Impl& state() const { return sharded.impl(); }
  Schedule& schedule() const { return state().schedule; }
  std::string where() const { return fmt::format("rank {}, step {}", schedule().rank(), schedule().current_step()); }

  void require_beginning() const {
    schedule().require_no_backward("StepGraph::run");
    for (const Bucket* bucket : schedule().buckets())
      SHARD_REQUIRE(bucket->gradient.state() == GradientState::empty, "step graph",
                    "{}: the gradient of {} is {} before the step begins. Call Optimizer::step, skip_step or zero_gradients "
                    "first",
                    where(), bucket->layout().members().front().name, to_string(bucket->gradient.state()));
  }

  // The graph reads the inputs where the first ones were put.
  void take_inputs(const std::vector<at::Tensor>& given) {
    const at::NoGradGuard no_grad;
    if (inputs.empty()) {
      std::vector<at::Tensor> places;
      for (const at::Tensor& input : given) {
        SHARD_REQUIRE(input.defined() && !input.requires_grad(), "step graph",
                      "{}: input {} is undefined or requires a gradient; give data only", where(), places.size());
        places.push_back(at::empty(input.sizes(), input.options().device(state().device())));
      }
      inputs = std::move(places);
    }
    SHARD_REQUIRE(given.size() == inputs.size(), "step graph", "{}: {} inputs were expected, as at first, got {}", where(),
                  inputs.size(), given.size());
    for (size_t i = 0; i < given.size(); ++i) {
      SHARD_REQUIRE(
          given[i].defined() && given[i].sizes() == inputs[i].sizes() && given[i].scalar_type() == inputs[i].scalar_type(),
          "step graph", "{}: input {} is {} [{}], and was {} [{}] at first. A graph has one size: pad, or call forget()",
          where(), i, given[i].defined() ? c10::toString(given[i].scalar_type()) : "undefined",
          given[i].defined() ? fmt::format("{}", fmt::join(given[i].sizes(), ",")) : "", c10::toString(inputs[i].scalar_type()),
          fmt::join(inputs[i].sizes(), ","));
      at::Tensor(inputs[i]).copy_(given[i]);
    }
  }

  std::vector<at::Tensor> run_body() {
    const at::AutoGradMode grad(true);
    std::vector<at::Tensor> results = detached(body(inputs));
    schedule().require_final("the end of a StepGraph's body");
    return results;
  }

  void drop_buffers() {
    for (const auto& unit : schedule().units()) unit->drop();
    state().memory->drop_free();
  }

  // Nothing runs meanwhile. Buffers that were kept from before go back, so that those of the graph are its own, and those of
  // the graph stay with it: nobody has written to them yet, and each replay does.
  void capture() {
    drop_buffers();
    facts = facts_of(state());
    const std::string error = error_of([&] {
      graph = capture_graph(state().device(), [&] { outputs = run_body(); });
      for (const Bucket* bucket : schedule().buckets())
        gradients.push_back(bucket->gradient.final() ? bucket->gradient.values() : at::Tensor());
      const std::string changed = changed_since(facts, state());
      SHARD_REQUIRE(changed.empty(), "step graph", "the body changed {}", changed);
    });
    const std::string left = error_of([&] {
      schedule().zero_gradients();
      drop_buffers();
    });
    const std::string& first = error.empty() ? left : error;
    try {
      agree(state().comms->world(),
            first.empty() ? "" : fmt::format("[step graph] {}: cannot be captured: {}", where(), first));
    } catch (...) {
      forget();
      throw;
    }
  }

  void replay() {
    const std::string changed = changed_since(facts, state());
    SHARD_REQUIRE(changed.empty(), "step graph",
                  "{}: {} is not as it was when the step was captured. Call forget() on every rank to capture it anew", where(),
                  changed);
    // It uses what lies beside the backend's streams without asking who does.
    if (const auto* backend = dynamic_cast<const CapturableComm*>(&state().comms->world())) {
      const std::vector<std::string> open = backend->open_calls();
      SHARD_REQUIRE(open.empty(), "step graph",
                    "{}: {} has not been waited for, and a replay uses the memory through which it passes. Call wait() of what "
                    "it returned on every rank first",
                    where(), open.front());
    }
    graph->replay();
    const std::vector<Bucket*>& buckets = schedule().buckets();
    for (size_t i = 0; i < buckets.size(); ++i)
      if (gradients[i].defined()) buckets[i]->gradient.adopt(gradients[i]);
  }

  void forget() {
    graph.reset();
    inputs.clear(), outputs.clear(), gradients.clear(), facts.clear();
    steps = 0;
  }
};

StepGraph::StepGraph(Sharded& sharded, Body body, StepGraphOptions options)
    : impl_(new Impl{.sharded = sharded, .body = std::move(body), .options = options}) {
  SHARD_REQUIRE(impl_->body != nullptr && options.warm_up_steps >= 1, "step graph",
                "needs a body and at least one step of warm-up, got {}", options.warm_up_steps);
  const std::vector<std::string> obstacles = obstacles_to_step_graph(sharded);
  SHARD_REQUIRE(obstacles.empty(), "step graph", "a step of this model cannot be captured (rank {}): {}", sharded.rank(),
                fmt::join(obstacles, "; "));
}

StepGraph::~StepGraph() = default;

std::vector<at::Tensor> StepGraph::run(const std::vector<at::Tensor>& inputs) {
  impl_->require_beginning();
  impl_->take_inputs(inputs);
  if (!impl_->graph) {
    if (impl_->steps++ < impl_->options.warm_up_steps) return impl_->run_body();
    impl_->capture();
  }
  impl_->replay();
  return impl_->outputs;
}

bool StepGraph::is_captured() const {
  return impl_->graph != nullptr;
}

void StepGraph::forget() {
  impl_->forget();
}

}  // namespace shardproof
