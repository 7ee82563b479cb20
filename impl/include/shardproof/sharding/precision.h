// The dtypes of parameters, gradients and outputs. A dtype that is not given has the default of the last column.
//
//   dtype     what has it                                                        default
//   main      the parameters that the optimizer updates, and its state           that of the module's parameter
//   compute   gathered parameters, and so the gradients that a unit produces     that of the module's parameter
//   gradient  gradients while they are added over microbatches                   main
//   reduce    gradients in a reduction, and each addition in it                  gradient
//   output    a unit's floating outputs                                          they are not cast
//
// The optimizer reads gradients in `main`. Where main and compute differ, a rank keeps both: main parameters in the strategy's
// `state` layout and parameters in `compute` in its `parameter` layout, as Megatron-LM keeps main and model weights. (FSDP2
// keeps main shards only and casts at every gather.) A gradient is cast compute -> gradient -> reduce -> gradient -> main, and
// each arrow rounds once.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>

namespace shardproof {

struct Precision {
  std::optional<c10::ScalarType> main = {};      // float32, float64 or the module's own dtype
  std::optional<c10::ScalarType> compute = {};   // bfloat16, float16, float32 or float64
  std::optional<c10::ScalarType> gradient = {};
  std::optional<c10::ScalarType> reduce = {};
  std::optional<c10::ScalarType> output = {};
  // Whether floating inputs of a unit are cast to `compute`, where that is given.
  bool cast_inputs = true;
  // Whether gradients are sent in `reduce` and added in float32, in rank order, and rounded once at the end, as Megatron-LM's
  // reduce_scatter_with_fp32_accumulation does.
  bool float32_sums = false;

  bool operator==(const Precision&) const = default;
};

}  // namespace shardproof
