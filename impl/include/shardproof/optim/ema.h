// Averages of the parameters over the steps of a run: exponential moving averages, as torch.optim.swa_utils keeps them. Each
// rank averages its own shards, so an average takes the memory of the main parameters once more and no communication.
//
//   Ema ema(sharded, {.decay = 0.999});
//   for (...) { ...; optimizer.step(); ema.update(); }
//   ema.with_averages([&] { evaluate(model); });       // the parameters are back afterwards, also after an exception
//
// Law: two runs whose main parameters have the same bits after every step have averages of the same bits, whatever their
// strategies and meshes are.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct EmaOptions {
  double decay = 0.999;
  // The averages are called so in messages, and their names in checkpoints begin with it: "ema.<parameter>". Two Emas of one
  // model have different names.
  std::string name = "ema";
};

class Ema {
 public:
  // The averages begin as the main parameters are now. The Sharded may be moved. Once it is destroyed, every call here throws
  // Error. Throws Error when the decay is not in [0, 1), or when the name is empty, taken, or one that checkpoints use already
  // ("model", "optim", "trainer", "shardproof"). Every rank makes it alike; it does not communicate.
  //
  // As long as it lives, checkpoints of the Sharded (checkpoint/saved_state.h) contain the averages, and loads put them back,
  // whatever mesh and strategy saved them.
  explicit Ema(Sharded& sharded, EmaOptions options = {});
  // Puts the parameters back when the averages are in their place.
  ~Ema();
  Ema(Ema&&) noexcept;
  Ema& operator=(Ema&&) = delete;

  // After a step of the optimizer:  average = decay * average + (1 - decay) * parameter  for each element of each parameter
  // that requires a gradient, one operation at a time, each rounded to the main dtype. Call it on every rank after the same
  // steps. It does not communicate. Throws Error inside a backward, and while averages are in the place of the parameters.
  void update();
  // Takes effect from the next update on. Throws Error unless it is in [0, 1).
  void set_decay(double decay);

  // What this rank holds of the averages: in the strategy's `state` layout and the main dtype, as Sharded::main_parameters.
  // While averages are in the place of the parameters, these are the parameters.
  std::vector<Piece> pieces() const;
  // Every whole average, or one of them, on every rank, as Sharded::gather_main_parameters. Collective over the mesh.
  std::map<std::string, at::Tensor> gather() const;
  at::Tensor gather(const std::string& parameter) const;
  // Writes whole values into the averages, as Sharded::write_parameters. Collective over the mesh.
  void write(const std::map<std::string, at::Tensor>& values);

  // Puts the averages in the place of the parameters, and the parameters in theirs. The module then computes with the averages,
  // and gather_parameters gives them. Meanwhile steps, updates, writes, saves and loads throw Error. Where ranks hold more of
  // the parameters than the optimizer updates, as under ZeRO-1 and ZeRO-2, a copy of that is kept. Throws Error inside a
  // backward, or when averages are in already. Collective over the mesh.
  void swap_in();
  // Puts the parameters back, bit for bit. It communicates only with Gather::side_by_side, where it waits for ranks that still
  // read the averages.
  void swap_out();
  // The same without any communication, for a rank that alone failed. It does nothing when averages are not in place.
  void put_back() noexcept;
  bool is_swapped_in() const;

  // Runs the body with the averages in the place of the parameters, and returns what it returns. When the body throws, the
  // parameters are put back without communication, so that a rank which alone failed waits for nobody, and the exception goes
  // on. With Gather::side_by_side, ranks that still compute with the averages then read mixed values, until they fail as well.
  // Collective over the mesh.
  template <class Body>
  auto with_averages(Body&& body) {
    swap_in();
    try {
      if constexpr (std::is_void_v<std::invoke_result_t<Body&>>) {
        body();
        swap_out();
      } else {
        auto result = body();
        swap_out();
        return result;
      }
    } catch (...) {
      put_back();
      throw;
    }
  }

 private:
  struct State;

  std::shared_ptr<State> state_;
};

}  // namespace shardproof
