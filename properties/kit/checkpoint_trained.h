// Small models in training on some mesh, and all that a run is, bit by bit.
#pragma once

#include <rapidcheck.h>

#include <atomic>
#include <functional>

#include "properties/kit/checkpoint_scratch.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/shardproof.h"

namespace shardproof::checkpoint {

struct Place {
  std::string mesh, strategy;
  c10::Device device = at::kCPU;
  Offload offload = Offload::none;
};
inline const std::vector<Place> kPlaces = {{"dp_shard=1", "zero3"},
                                           {"dp_shard=2", "zero3"},
                                           {"dp_shard=4", "zero3"},
                                           {"dp_shard=3", "zero2"},
                                           {"dp_shard=2", "ddp"},
                                           {"dp_shard=4", "zero1"},
                                           {"dp_replicate=2,dp_shard=2", "hsdp"},
                                           {"dp_replicate=2,dp_shard=3", "hfsdp"},
                                           {"dp_shard=3", "zero3", at::kCPU, Offload::pinned},
                                           {"dp_replicate=2,dp_shard=2", "hfsdp", at::kCPU, Offload::pageable},
                                           {"dp_shard=2", "zero1", at::kCPU, Offload::pinned}};

struct Recipe {
  std::vector<int64_t> widths{3, 5, 2};
  bool tied = false;  // a small Gpt with a tied head instead
  std::string optimizer = "adamw";
  void (*move)(torch::nn::Module&, c10::Device) = nullptr;  // to the device of the place, where that is not the CPU
};

// One rank's model in training.
struct Trained {
  Trained(const Recipe& setup, const Place& place, std::shared_ptr<Comm> world, double fill = 0.125)
      : setup_(setup), device_(place.device) {
    if (setup.tied)
      gpt_ = Gpt(GptOptions{.layers = 1, .hidden = 8, .heads = 2, .vocab = 11, .positions = 4, .tied = true});
    else
      mlp_ = Mlp(MlpOptions{.widths = setup.widths});
    module = setup.tied ? std::static_pointer_cast<torch::nn::Module>(gpt_.ptr()) : mlp_.ptr();
    {
      at::NoGradGuard no_grad;
      double start = fill;
      for (const at::Tensor& p : module->parameters())
        p.copy_(at::sin(at::arange(p.numel(), at::kFloat) * 0.37 + (start += fill)).view(p.sizes()) * 0.5);
    }
    if (!device_.is_cpu()) setup.move(*module, device_);
    comms = std::make_shared<MeshComm>(world, Mesh::parse(place.mesh));
    sharded.emplace(fully_shard(module, comms,
                                {.strategy = strategy(place.strategy),
                                 .offload = place.offload,
                                 .numerics = Numerics::canonical,
                                 .gradient_divide = 1}));
    if (setup.optimizer == "adamw") optimizer.emplace(adamw(*sharded, {.lr = 0.01}));
    if (setup.optimizer == "sgd") optimizer.emplace(sgd(*sharded, {.lr = 0.1, .momentum = 0.9}));
    if (setup.optimizer == "lion") optimizer.emplace(lion(*sharded, {.lr = 0.01}));
  }

  // Twelve samples a step, one at a time, dealt to the ranks.
  void train(int64_t begin, int64_t end) {
    for (int64_t step = begin; step < end; ++step) {
      backward(step);
      optimizer->step();
    }
  }
  void backward(int64_t step) {
    const int64_t ranks = comms->mesh().size(), rounds = 12 / ranks;
    for (int64_t round = 0; round < rounds; ++round) {
      sharded->set_last_microbatch(round + 1 == rounds);
      const int64_t sample = step * 12 + round * ranks + comms->rank();
      if (setup_.tied) {
        const at::Tensor tokens = (at::arange(4, at::kLong) * 3 + sample).remainder(11).view({1, 4});
        call(gpt_, tokens.to(device_)).square().sum().mul(0.01).backward();
      } else {
        const at::Tensor x = at::cos(at::arange(setup_.widths.front(), at::kFloat) + static_cast<double>(sample));
        call(mlp_, x.view({1, -1}).to(device_)).square().sum().mul(0.1).backward();
      }
    }
  }

  // All bits of all that a run is, by name.
  std::map<std::string, std::string> bits() {
    std::map<std::string, std::string> all;
    for (const auto& [name, value] : sharded->gather_parameters()) all[name] = bytes_in(value.to(at::kCPU));
    for (const std::string& state_name : optimizer->state_names())
      for (const auto& [name, value] : optimizer->gather_state(state_name))
        all[state_name + " of " + name] = bytes_in(value.to(at::kCPU));
    for (const auto& group : optimizer->groups())
      for (const std::string& name : group.parameters) all["updates of " + name] = std::to_string(optimizer->updates(name));
    return all;
  }

  std::shared_ptr<torch::nn::Module> module;
  std::shared_ptr<MeshComm> comms;
  std::optional<Sharded> sharded;
  std::optional<Optimizer> optimizer;

 private:
  Recipe setup_;
  c10::Device device_;
  Gpt gpt_{nullptr};
  Mlp mlp_{nullptr};
};

inline void on(const Place& place, const std::function<void(std::shared_ptr<Comm>)>& body) {
  run_threads(Mesh::parse(place.mesh).size(), body, {.device = place.device});
}

using Bits = std::map<std::string, std::string>;

inline Place any_place() {
  return *rc::gen::elementOf(kPlaces);
}
inline Recipe any_setup() {
  Recipe setup;
  setup.widths = *rc::gen::container<std::vector<int64_t>>(3, rc::gen::inRange<int64_t>(1, 8));
  setup.tied = *rc::gen::inRange(0, 3) == 0;
  setup.optimizer = *rc::gen::element<std::string>("adamw", "sgd", "lion");
  return setup;
}

// Trains from the start; saves at the end unless `directory` is empty.
inline Bits trained(const Recipe& setup, const Place& place, int64_t steps, const std::string& directory) {
  Bits bits;
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, place, comm);
    run.train(0, steps);
    TrainerState trainer{
        .step = steps, .schedule_step = 2 * steps, .data_position = 12 * steps, .scaler = LossScaler::State{1024, 3}};
    trainer.values["note"] = Value::string("hello");
    trainer.random = RandomStream{~uint64_t{0} - static_cast<uint64_t>(comm->rank()), 7};
    trainer.of_rank["mine"] = Value::integer(comm->rank() * 10);
    if (!directory.empty()) save(directory, *run.sharded, &*run.optimizer, trainer);
    Bits own = run.bits();
    if (comm->rank() == 0) bits = std::move(own);
  });
  return bits;
}

// How many ranks refused to load, and how many have what they had before.
struct Refusals {
  int64_t errors = 0, kept = 0;
  bool operator==(const Refusals&) const = default;
};

// Loads into other values than the checkpoint has. `look` gets each rank's error.
inline Refusals refused_on(const Place& place, const Recipe& setup, const std::string& folder, const LoadOptions& options = {},
                           const std::function<void(const Error&)>& look = {}) {
  std::atomic<int64_t> errors = 0, kept = 0;
  on(place, [&](std::shared_ptr<Comm> comm) {
    Trained run(setup, place, comm, 0.75);
    run.train(0, 1);
    const Bits before = run.bits();
    try {
      load(folder, *run.sharded, &*run.optimizer, options);
    } catch (const Error& error) {
      ++errors;
      if (look) look(error);
    }
    kept += run.bits() == before;
  });
  return {errors, kept};
}

}  // namespace shardproof::checkpoint
