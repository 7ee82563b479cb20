// The ways in which this machine can compute an exact product, for tests that compare them.
#pragma once

#include <vector>

#include "shardproof/device/model_math.h"

namespace shardproof::cpu_product {

// One set of instructions. All have the same bits.
struct Variant {
  const char* name;
  // The rows [begin, end), in one thread; like ModelMath::exact_product.
  bool (*rows)(const ExactProduct& product, int64_t begin, int64_t end);
};

// Those that this processor has, the fastest first. The last one needs nothing.
std::vector<Variant> variants();

}  // namespace shardproof::cpu_product
