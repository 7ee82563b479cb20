// Same bits every time, so that a sharded run can be held against an unsharded one. On the CPU, where operators are
// deterministic, loading the library is enough: it sets MKL_CBWR=AUTO, unless the variable is set.
#pragma once

namespace harness {

// From now on LibTorch uses deterministic operators only, and an operator that has no such form throws; attention is computed
// by products and a softmax, products and convolutions never in TF32. Before the first use of a GPU: cuBLAS reads its
// workspaces' size from the environment.
void compute_reproducibly();

}  // namespace harness
