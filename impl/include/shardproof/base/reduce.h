// How a reduction combines its terms, in a collective and in the arithmetic on one device. Kernels include this header, so it
// does not include Torch.
#pragma once

namespace shardproof {

enum class Reduce { sum, max, min };

}  // namespace shardproof
