#include "harness/run/reproducible.h"

#include <ATen/Context.h>

#include <cstdlib>

namespace harness {
namespace {

// MKL also chooses its kernels by where memory begins, on processors of AMD at least: the rows of one expert, which lie behind
// those of another, would have other last bits than alone. It reads this at its first call, and who loads this library has
// made none.
[[gnu::constructor]] void let_mkl_choose_by_shapes() { ::setenv("MKL_CBWR", "AUTO", /*overwrite=*/0); }

}  // namespace

void compute_reproducibly() {
  // Several streams share workspaces otherwise, and which product gets which depends on their timing:
  // https://docs.nvidia.com/cuda/cublas/#results-reproducibility
  ::setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8", /*overwrite=*/0);
  // cuBLASLt chooses its kernels by the addresses' alignment, which is another in a bucket.
  ::setenv("DISABLE_ADDMM_CUDA_LT", "1", /*overwrite=*/0);
  at::Context& context = at::globalContext();
  context.setDeterministicAlgorithms(true, /*warn_only=*/false);
  context.setDeterministicFillUninitializedMemory(false);
  context.setDeterministicCuDNN(true);
  context.setBenchmarkCuDNN(false);
  context.setAllowTF32CuDNN(false);
  context.setAllowTF32CuBLAS(false);
  // Backwards of the fused kernels add in the order in which blocks end.
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
}

}  // namespace harness
