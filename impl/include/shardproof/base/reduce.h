// How terms are combined, by the collectives of ranks and by the arithmetic on one device. Free of Torch, for the kernels.
#pragma once

namespace shardproof {

enum class Reduce { sum, max, min };

}  // namespace shardproof
