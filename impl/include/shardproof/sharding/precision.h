// Which dtype each kind of value has. What is not given follows from what is:
//
//   main      of the parameters that the optimizer updates, and of its state     as the module's parameter has it
//   compute   of gathered parameters, and so of a unit's gradients               as the module's parameter has it
//   gradient  in which gradients are added over microbatches                     main
//   reduce    of gradients on the wire, and of each addition there               gradient
//   output    of a unit's floating outputs                                       as they come
//
// The optimizer reads gradients in `main`. Where main and compute differ, both are kept: the main parameters in the strategy's
// `state` layout, those in `compute` in its `parameter` layout (as Megatron's model and main weights; FSDP2 keeps main shards
// and casts on every gather). A gradient passes compute -> gradient -> reduce -> gradient -> main, each arrow one rounding.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace shardproof {

struct Precision {
  std::optional<c10::ScalarType> main = {};      // float32 or float64, or as the module's
  std::optional<c10::ScalarType> compute = {};   // bfloat16, float16, float32, float64
  std::optional<c10::ScalarType> gradient = {};
  std::optional<c10::ScalarType> reduce = {};
  std::optional<c10::ScalarType> output = {};
  // Floating inputs of a unit are cast to `compute` where that is given.
  bool cast_inputs = true;
  // `reduce` on the wire, additions in float32 in rank order, rounded once (Megatron's reduce_scatter_with_fp32_accumulation).
  bool float32_sums = false;

  bool operator==(const Precision&) const = default;
};

}  // namespace shardproof
