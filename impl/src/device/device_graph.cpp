#include "shardproof/device/device_graph.h"

#include <c10/core/DeviceGuard.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

constexpr size_t kGraphDevices = static_cast<size_t>(c10::DeviceType::COMPILE_TIME_MAX_DEVICE_TYPES);

struct GraphRegistry {
  std::mutex mutex;
  std::array<std::shared_ptr<const DeviceGraphs>, kGraphDevices> graphs;
};

GraphRegistry& graph_registry() {
  static GraphRegistry one;
  return one;
}

std::shared_ptr<const DeviceGraphs> graphs_of(c10::DeviceType device) {
  const std::lock_guard lock(graph_registry().mutex);
  return graph_registry().graphs[static_cast<size_t>(device)];
}

// Of the whole process: backwards run on threads of LibTorch.
std::atomic<int64_t> captures = 0;

}  // namespace

void use_device_graphs(c10::DeviceType device, std::shared_ptr<const DeviceGraphs> graphs) {
  const std::lock_guard lock(graph_registry().mutex);
  graph_registry().graphs[static_cast<size_t>(device)] = std::move(graphs);
}

bool has_device_graphs(c10::Device device) {
  return graphs_of(device.type()) != nullptr;
}

std::shared_ptr<DeviceGraph> capture_graph(c10::Device device, const std::function<void()>& work) {
  const std::shared_ptr<const DeviceGraphs> graphs = graphs_of(device.type());
  SHARD_REQUIRE(graphs != nullptr, "graph", "{} has no graphs in this process. Call shardproof::use_cuda() and train on a GPU",
                device.str());
  struct Count {
    Count() { ++captures; }
    ~Count() { --captures; }
  } const count;
  const c10::OptionalDeviceGuard on(device.has_index() ? std::optional(device) : std::nullopt);
  return graphs->capture(work);
}

bool is_capturing() {
  return captures > 0;
}

}  // namespace shardproof
