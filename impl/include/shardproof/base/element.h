// The types of numbers that the arithmetic of this library works on. Kernels include this header, so it does not include Torch.
#pragma once

namespace shardproof {

enum class Element { f32, f64, bf16, f16, i32, i64, u8 };

}  // namespace shardproof
