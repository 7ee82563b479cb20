// Exact products on the CPU, for the runner of kernels.
#pragma once

#include "shardproof/device/model_math.h"

namespace shardproof::cpu_product {

// What ModelMath::exact_product promises, by the fastest instructions of this machine, with LibTorch's threads.
bool run(const ExactProduct& product);

}  // namespace shardproof::cpu_product
