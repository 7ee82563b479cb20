// Elementwise work on flat buffers: one IEEE operation an element each, vectorised, never reassociated, so results do not
// depend on where a buffer is cut. All tensors are 1-D, contiguous and without a graph.
//
// An int64 buffer holds fixed-point numbers, multiples of 2^-44: their sums are exact, so they do not depend on any order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardproof {

constexpr double kFixedPointUnit = 0x1p-44;
// The magnitude that a fixed-point number, and each sum of them, must stay below.
constexpr double kFixedPointMax = 0x1p18;

// target = source, or target += source, each element converted to the target's dtype first. Returns whether every element of
// the result is finite and its magnitude at most the limit (of a fixed-point one: below kFixedPointMax, too). False is certain
// of fixed-point targets only: on a device floating-point ones may be false unseen, so that nobody waits; see first_beyond.
bool copy_to(const at::Tensor& target, const at::Tensor& source, double magnitude_max);
bool add_to(const at::Tensor& target, const at::Tensor& source, double magnitude_max);
void divide_by(const at::Tensor& values, double divisor);  // rounded to the dtype first
void scale_by(const at::Tensor& values, double factor);
// Index of the first element that is NaN, infinite or of a magnitude above the limit; numel when there is none.
int64_t first_beyond(const at::Tensor& values, double magnitude_max);
// The same, without a wait: lowers the one int64 of `least`, which lies where the values do, to `offset` + the index, where
// there is one.
void note_beyond(const at::Tensor& values, double magnitude_max, int64_t offset, const at::Tensor& least);
bool all_zero(const at::Tensor& values);
// An element as text.
std::string element_of(const at::Tensor& values, int64_t index);

// Of fixed-point values, each rounded once.
void fixed_to_float(const at::Tensor& target, const at::Tensor& fixed);

}  // namespace shardproof
