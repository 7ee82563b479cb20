#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <map>
#include <optional>
#include <utility>

#include "sharding/saved_tensors.h"
#include "sharding/unit.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/auxiliary_losses.h"
#include "shardproof/nn/random.h"
#include "shardproof/nn/sequence_lengths.h"

namespace shardproof {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;
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

// Another value in a place, until it goes.
template <class Value>
class Instead {
 public:
  Instead(Value& place, Value value) : place_(place), before_(std::exchange(place, std::move(value))) {}
  ~Instead() { place_ = std::move(before_); }
  Instead(const Instead&) = delete;

 private:
  Value& place_;
  Value before_;
};

class Counted {
 public:
  explicit Counted(int64_t& count) : count_(count) { ++count_; }
  ~Counted() { --count_; }
  Counted(const Counted&) = delete;

 private:
  int64_t& count_;
};

class KeptBy {
 public:
  explicit KeptBy(const std::shared_ptr<SavedTensorKeeper>& keeper) : before_(std::exchange(saved_tensor_keeper(), keeper)) {}
  ~KeptBy() { saved_tensor_keeper() = std::move(before_); }
  KeptBy(const KeptBy&) = delete;

 private:
  std::weak_ptr<SavedTensorKeeper> before_;
};

// Buffers in other memory, with the values that they had, until it goes: a forward that runs again reads those, and writes
// nothing that stays.
class BuffersAsBefore {
 public:
  BuffersAsBefore(const variable_list& buffers, const variable_list& before) : buffers_(buffers) {
    for (size_t i = 0; i < buffers_.size(); ++i) {
      now_.push_back(buffers_[i].tensor_data());
      buffers_[i].set_data(before[i].clone());
    }
  }
  ~BuffersAsBefore() {
    for (size_t i = buffers_.size(); i-- > 0;) buffers_[i].set_data(now_[i]);  // one may be there twice
  }
  BuffersAsBefore(const BuffersAsBefore&) = delete;

 private:
  const variable_list& buffers_;
  variable_list now_;
};

// A parameter, or another leaf. It stays where it is, and autograd finds it by its accumulator of gradients.
bool stays(const at::Tensor& tensor) { return tensor.is_leaf() && tensor.requires_grad(); }

// Without those of subclasses, whose sizes may be symbols.
std::vector<int64_t> sizes_of(const at::Tensor& tensor) {
  if (tensor.unsafeGetTensorImpl()->is_python_dispatch() || tensor.is_nested()) return {};
  return tensor.sizes().vec();
}

// Keeps what the forward saves that runs again, in its order.
class Recorder final : public SavedTensorKeeper, public std::enable_shared_from_this<Recorder> {
 public:
  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(shared_from_this()); }

  std::vector<SavedTensor> saved;

 private:
  class Hooks final : public SavedVariableHooks {
   public:
    explicit Hooks(std::shared_ptr<Recorder> recorder) : recorder_(std::move(recorder)) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      saved_.emplace(tensor);
      if (!stays(tensor)) recorder_->saved.push_back(*saved_);
      recorder_.reset();
    }
    at::Tensor call_unpack_hook() override { return saved_->source; }

   private:
    std::shared_ptr<Recorder> recorder_;
    std::optional<SavedTensor> saved_;
  };
};

}  // namespace

// What one forward of a unit has saved: nothing but its inputs, and how to have it again. Those that are asked for first in a
// backward run the forward once more, with a graph that nobody uses, and what that saves is what they get.
class Recomputation final : public SavedTensorKeeper, public std::enable_shared_from_this<Recomputation> {
 public:
  Recomputation(std::shared_ptr<Unit> unit, UnitHooks::Again again, const variable_list& inputs, variable_list buffers)
      : unit_(unit),
        name_(unit->label()),
        again_(std::move(again)),
        random_(random_stream()),
        lengths_(sequence_lengths()),
        losses_(auxiliary_scope().record),
        buffers_(std::move(buffers)) {
    for (const at::Tensor& input : inputs) inputs_.emplace_back(input, /*is_output=*/false);
    for (const at::Tensor& buffer : buffers_) before_.push_back(buffer.detach().clone());
  }

  std::unique_ptr<SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(shared_from_this()); }

  // In a backward: runs the forward again unless this backward has.
  void make() {
    const int task = torch::autograd::get_current_graph_task_id();
    SHARD_REQUIRE(task >= 0, "unit", "{} is recomputed, so what its forward saved is there in a backward only", name_);
    if (waiting_ == 0 || task == made_in_) return;
    const std::shared_ptr<Unit> unit = unit_.lock();
    SHARD_REQUIRE(unit, "unit", "a backward reached a unit whose Sharded was destroyed; keep it until the backward is over");
    unit->prepare_backward();
    const auto recorder = std::make_shared<Recorder>();
    run(unit->schedule(), recorder);
    take(recorder->saved);
    made_in_ = task;
    torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this()] {
      if (const auto held = self.lock()) held->forget();
    });
  }

 private:
  struct Slot {
    at::ScalarType dtype;
    std::vector<int64_t> sizes;
    bool is_waiting = true;  // autograd may ask for it
    std::optional<SavedTensor> value = {};
  };

  class Hooks final : public SavedVariableHooks {
   public:
    explicit Hooks(std::shared_ptr<Recomputation> owner) : owner_(std::move(owner)) {}
    ~Hooks() override {
      if (number_) owner_->release(*number_);
    }
    void call_pack_hook(const at::Tensor& tensor) override {
      if (stays(tensor)) stays_.emplace(tensor);
      else number_ = owner_->add(tensor);
    }
    at::Tensor call_unpack_hook() override {
      if (number_) return owner_->get(*number_);
      require_unchanged(stays_->is_changed(), owner_->name_);
      return stays_->source;
    }

   private:
    const std::shared_ptr<Recomputation> owner_;
    std::optional<size_t> number_;
    std::optional<SavedTensor> stays_;
  };

  size_t add(const at::Tensor& tensor) {
    ++waiting_;
    slots_.push_back({tensor.scalar_type(), sizes_of(tensor)});
    return slots_.size() - 1;
  }

  void take(std::vector<SavedTensor>& saved) {
    SHARD_REQUIRE(saved.size() == slots_.size(), "unit",
                  "{} saved {} tensors when it was recomputed, and {} in its forward. A forward that is recomputed must do the "
                  "same when it runs again on the same inputs",
                  name_, saved.size(), slots_.size());
    for (size_t i = 0; i < slots_.size(); ++i) {
      const at::Tensor& again = saved[i].source;
      SHARD_REQUIRE(again.scalar_type() == slots_[i].dtype && sizes_of(again) == slots_[i].sizes, "unit",
                    "{} saved other tensors when it was recomputed than in its forward: number {} has other sizes or another "
                    "dtype. A forward that is recomputed must do the same when it runs again on the same inputs",
                    name_, i + 1);
      if (slots_[i].is_waiting) slots_[i].value.emplace(std::move(saved[i]));
    }
  }

  at::Tensor get(size_t number) {
    make();
    const SavedTensor& saved = slots_[number].value.value();
    require_unchanged(saved.is_changed(), name_);
    return saved.source;
  }

  // Nobody will ask for it. What the last one needed goes: it may hold whatever the model's arguments hold.
  void release(size_t number) {
    slots_[number].is_waiting = false;
    slots_[number].value.reset();
    if (--waiting_ > 0) return;
    inputs_.clear();
    again_ = nullptr;
  }

  // A graph that is kept has another backward.
  void forget() {
    made_in_ = -1;
    for (Slot& slot : slots_) slot.value.reset();
  }

  void run(UnitEvents& schedule, const std::shared_ptr<Recorder>& recorder) {
    variable_list inputs;
    for (const SavedVariable& input : inputs_) inputs.push_back(input.unpack());
    const at::AutoGradMode with_graph(true);
    const Instead random(random_stream(), random_);
    const Instead lengths(sequence_lengths(), lengths_);
    const Instead losses(auxiliary_scope(), AuxiliaryScope{losses_, /*runs_again=*/true});
    const BuffersAsBefore buffers(buffers_, before_);
    const Counted counted(schedule.recomputing_forwards);
    // The unit around a recomputed part may have been freed, since the part's own nodes do not tell that it is needed.
    const auto unit = unit_.lock();
    if (unit && unit->settings.around) unit->settings.around->finish_unshard();
    ask_saved_tensor_keepers();  // Python may have been imported since the forward
    const KeptBy kept(recorder);
    again_(inputs);
  }

  const std::weak_ptr<Unit> unit_;
  const std::string name_;
  UnitHooks::Again again_;
  const RandomStream random_;
  const std::map<int64_t, int64_t> lengths_;
  const std::shared_ptr<AuxiliaryRecord> losses_;
  std::vector<SavedVariable> inputs_;
  const variable_list buffers_;
  variable_list before_;  // copies of them
  std::vector<Slot> slots_;
  size_t waiting_ = 0;
  int made_in_ = -1;  // the backward that has the values, as the engine counts
};

void Unit::make_again(Recomputation& recomputation) { recomputation.make(); }

std::shared_ptr<void> Unit::forget_saved(Again again, const std::vector<at::Tensor>& inputs,
                                         const std::vector<at::Tensor>& buffers) {
  struct Forgetting {
    KeptBy kept;
    Counted counted;
    ReplayableOnly replayable;
  };
  ask_saved_tensor_keepers();
  UnitCall& call = *calls_.back();
  call.recomputation = std::make_shared<Recomputation>(shared_from_this(), std::move(again), inputs, buffers);
  for (const at::Tensor& input : inputs) call.inputs.emplace_back(input);
  return std::shared_ptr<void>(new Forgetting{KeptBy(call.recomputation), Counted(schedule_.forgetting_forwards), {}},
                               [](void* forgetting) { delete static_cast<Forgetting*>(forgetting); });
}

}  // namespace shardproof
