// Same bits every time on a GPU, so that a sharded run can be held against an unsharded one.
#pragma once

namespace harness {

// From now on LibTorch uses deterministic operators only, and an operator that has no such form throws; attention is computed
// by products and a softmax, products and convolutions never in TF32. Before the first use of a GPU: cuBLAS reads its
// workspaces' size from the environment. Nothing changes on the CPU, where operators are deterministic.
void compute_reproducibly();

}  // namespace harness
