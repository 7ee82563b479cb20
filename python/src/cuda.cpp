// The extension module shardproof._cuda, apart from _C because it needs CUDA's runtime library to be opened.
#include "shardproof/device/kernels/cuda.h"

#include <torch/csrc/utils/pybind.h>

PYBIND11_MODULE(_cuda, module) {
  module.def("use_cuda", &shardproof::use_cuda);
  module.def("why_no_cuda", &shardproof::why_no_cuda);
}
