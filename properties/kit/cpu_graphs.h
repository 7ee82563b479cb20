// Graphs of the CPU, which there are none of: whoever asks is told that somebody captures, and the work is done at once.
#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <memory>

#include "shardproof/device/device_graph.h"

namespace kit {

// While it lives the CPU has them.
class CpuGraphs {
 public:
  CpuGraphs() { shardproof::use_device_graphs(at::kCPU, std::make_shared<None>()); }
  ~CpuGraphs() { shardproof::use_device_graphs(at::kCPU, nullptr); }
  CpuGraphs(const CpuGraphs&) = delete;

 private:
  struct None final : shardproof::DeviceGraphs {
    std::shared_ptr<shardproof::DeviceGraph> capture(const std::function<void()>& work) const override {
      work();
      return nullptr;
    }
  };
};

}  // namespace kit
