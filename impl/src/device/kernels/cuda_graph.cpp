// Graphs of CUDA, by LibTorch's. In a library of its own, which use_cuda() loads once LibTorch's CUDA libraries are there: what
// links to those loads them.
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "shardproof/device/device_graph.h"

namespace shardproof {
namespace {

class CudaGraph final : public DeviceGraph {
 public:
  void replay() override { graph.replay(); }
  at::cuda::CUDAGraph graph;
};

// After an exception: the capture ends, whatever CUDA says of it. Where that is an error, LibTorch leaves the pool as it is,
// and memory would go on coming from there.
void end_broken(at::cuda::CUDAGraph& graph, c10::DeviceIndex device, at::cuda::MempoolId_t pool) {
  try {
    graph.capture_end();
  } catch (const std::exception&) {
    try {
      c10::cuda::CUDACachingAllocator::endAllocateToPool(device, pool);
      c10::cuda::CUDACachingAllocator::releasePool(device, pool);
    } catch (const c10::Error&) {  // it has ended
    }
  }
}

class CudaGraphs final : public DeviceGraphs {
 public:
  // Other threads go on meanwhile: those that ask whether NCCL's calls are over, and LibTorch's, which run the backward.
  std::shared_ptr<DeviceGraph> capture(const std::function<void()>& work) const override {
    auto captured = std::make_shared<CudaGraph>();
    c10::cuda::device_synchronize();
    const c10::cuda::CUDAStreamGuard guard(c10::cuda::getStreamFromPool());
    const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
    captured->graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
    try {
      work();
    } catch (...) {
      end_broken(captured->graph, guard.original_stream().device_index(), pool);
      throw;
    }
    captured->graph.capture_end();
    return captured;
  }
};

const bool registered = (use_device_graphs(c10::DeviceType::CUDA, std::make_shared<CudaGraphs>()), true);

}  // namespace
}  // namespace shardproof
