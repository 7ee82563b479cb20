// Work of a device that is kept, so that one call gives it to the device again. CUDA calls this a graph. CUDA has it after
// use_cuda() (kernels/cuda.h). StepGraph (sharding/step_graph.h) is what a training program uses.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>

namespace shardproof {

class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  // Gives the device what was captured, on the calling thread's current stream: the same work, on the same addresses, with the
  // same numbers. It returns at once.
  virtual void replay() = 0;
};

// How a device captures.
class DeviceGraphs {
 public:
  virtual ~DeviceGraphs() = default;
  // Runs `work`. What it gives the current stream, and streams that wait for that, is kept and not done. Memory of the device
  // that it allocates belongs to the graph, and nobody else gets it while the graph lives. Throws what `work` throws, and where
  // `work` lets the host wait for the device.
  virtual std::shared_ptr<DeviceGraph> capture(const std::function<void()>& work) const = 0;
};

// Sets how this device captures from now on. It must not be called while training steps run.
void use_device_graphs(c10::DeviceType device, std::shared_ptr<const DeviceGraphs> graphs);
bool has_device_graphs(c10::Device device);

// Throws Error where the device has no graphs, and what DeviceGraphs::capture throws.
std::shared_ptr<DeviceGraph> capture_graph(c10::Device device, const std::function<void()>& work);
// Whether some thread of this process captures now. What a graph cannot repeat then throws Error.
bool is_capturing();

}  // namespace shardproof
