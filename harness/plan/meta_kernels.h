// Operators that LibTorch has for real devices only, as far as the models here need them: they make results of the right sizes.
#pragma once

#include <torch/library.h>

#include <memory>

#include "harness/plan/step_record.h"

namespace harness {

// They are registered as long as the result lives.
std::unique_ptr<torch::Library> meta_kernels();
// Attention, which keeps what a fused kernel keeps: its inputs, its output and the logarithm of each row's sum.
std::unique_ptr<torch::Library> meta_autograd_kernels();

// Records an operator that runs inside another one, which then has no cost of its own.
void record_inside(const Operator& what);

}  // namespace harness
