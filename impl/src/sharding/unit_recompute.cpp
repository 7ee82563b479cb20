#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include "sharding/unit.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/random.h"

namespace shardproof {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// LibTorch's random operators draw from one generator that all ranks of a process share, so nobody can replay them. While a
// ReplayableOnly lives, those of this thread are errors.
void refuse_random(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::Fake);
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    bool draws = true;
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::IValue& value = (*stack)[stack->size() - arguments.size() + i];
      const std::string& name = arguments[i].name();
      if ((name == "p" || name == "dropout_p") && value.isDouble()) draws &= value.toDouble() > 0;
      if (name == "train" && value.isBool()) draws &= value.toBool();
    }
    SHARD_REQUIRE(
        !draws, "unit",
        "{} draws from LibTorch's generator, which ranks share and nobody can replay, in a unit that is recomputed in its "
        "backward. Use shardproof::dropout, or random_stream(), in it",
        op.schema().name());
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_random>()); }

class ReplayableOnly {
  c10::impl::IncludeDispatchKeyGuard guard_{c10::DispatchKeySet(c10::DispatchKey::Fake)};
};

class ReplayRandom {
 public:
  explicit ReplayRandom(RandomStream stream) : before_(random_stream()) { random_stream() = stream; }
  ~ReplayRandom() { random_stream() = before_; }

 private:
  RandomStream before_;
};

class CountedForward {
 public:
  explicit CountedForward(UnitEvents& schedule) : schedule_(schedule) { ++schedule_.recomputed_forwards; }
  ~CountedForward() { --schedule_.recomputed_forwards; }

 private:
  UnitEvents& schedule_;
};

// Where the gradient of an input arrives, as it is. A leaf in this place would give it the strides of the input, and sums over
// other strides add in another order.
class Arrival final : public torch::autograd::Node {
 public:
  variable_list apply(variable_list&& gradients) override {
    gradient = std::move(gradients[0]);
    return {};
  }
  std::string name() const override { return "ShardproofArrival"; }

  at::Tensor gradient;
};

// The backward of a forward that kept only its inputs: runs it again, with a graph, and goes back through that at once.
class Recompute final : public torch::autograd::Node {
 public:
  Recompute(std::shared_ptr<Unit> unit, UnitHooks::Body body, const variable_list& inputs, RandomStream random)
      : unit_(unit), body_(std::move(body)), random_(random) {
    for (const at::Tensor& input : inputs) {
      inputs_.emplace_back(input, /*is_output=*/false);
      needs_gradient_.push_back(input.requires_grad());
      add_next_edge(input.requires_grad() ? torch::autograd::impl::gradient_edge(input) : torch::autograd::Edge());
    }
  }

  variable_list apply(variable_list&& gradients) override {
    const std::shared_ptr<Unit> unit = unit_.lock();
    SHARD_REQUIRE(unit, "unit", "a backward reached a unit whose Sharded was destroyed; keep it until the backward is over");
    SHARD_REQUIRE(!inputs_.empty() || body_, "unit",
                  "unit '{}' was recomputed already; a second backward needs a second forward", unit->name());
    variable_list inputs, roots, root_gradients, input_gradients;
    std::vector<std::shared_ptr<Arrival>> arrivals;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      inputs.push_back(inputs_[i].unpack().detach());
      arrivals.push_back(std::make_shared<Arrival>());
      if (needs_gradient_[i]) torch::autograd::set_history(inputs.back(), arrivals.back());
    }
    {
      const at::AutoGradMode with_graph(true);
      const ReplayRandom replay(random_);
      const variable_list outputs = body_(inputs);
      for (size_t i = 0; i < outputs.size(); ++i) {
        if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
        roots.push_back(outputs[i]);
        root_gradients.push_back(gradients[i]);
      }
    }
    if (!roots.empty()) torch::autograd::backward(roots, root_gradients);
    for (const auto& arrival : arrivals) input_gradients.push_back(std::move(arrival->gradient));
    unit->end_recomputation();
    return input_gradients;
  }

  void release_variables() override {
    inputs_.clear();
    body_ = nullptr;
  }
  std::string name() const override { return "ShardproofRecompute"; }

 private:
  std::weak_ptr<Unit> unit_;
  UnitHooks::Body body_;
  std::vector<SavedVariable> inputs_;
  std::vector<bool> needs_gradient_;
  RandomStream random_;
};

}  // namespace

std::vector<at::Tensor> Unit::run_without_graph(Body body, std::vector<at::Tensor> inputs) {
  const RandomStream random = random_stream();
  auto node = std::make_shared<Recompute>(shared_from_this(), body, inputs, random);
  variable_list outputs;
  {
    const at::NoGradGuard no_graph;
    const CountedForward counted(schedule_);
    const ReplayableOnly replayable;
    for (at::Tensor& input : inputs) input = input.detach();
    outputs = body(inputs);
  }
  for (at::Tensor& output : outputs) {
    output = output.detach();
    if (output.is_floating_point()) torch::autograd::set_history(output, node);
    else node->add_input_metadata(torch::autograd::Node::undefined_input());
  }
  begin_recomputation();
  return outputs;
}

}  // namespace shardproof
