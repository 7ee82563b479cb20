// The types of numbers that arithmetic here works on. Free of Torch, for the kernels.
#pragma once

namespace shardproof {

enum class Element { f32, f64, bf16, f16, i32, i64, u8 };

}  // namespace shardproof
