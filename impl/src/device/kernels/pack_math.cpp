#include "testing/device/pack_math.h"

#include "device/kernels/cpu_runner.h"
#include "device/kernels/kernel_math.h"

namespace shardproof {
namespace {

// Cuts into packs where gpu_runner.cuh does.
struct PackRunner : kernels::CpuRunner {
  template <class Rule>
  void each(int64_t count, const Rule& rule) const {
    const int64_t whole = rule.fits() ? count / Rule::kWidth * Rule::kWidth : 0;
    for (int64_t i = 0; i < whole; i += Rule::kWidth) rule.template pack<Rule::kWidth>(i);
    for (int64_t i = whole; i < count; ++i) rule.template pack<1>(i);
  }
};

}  // namespace

std::shared_ptr<const DeviceMath> pack_math() {
  return std::make_shared<const kernels::KernelMath<PackRunner>>(PackRunner());
}

}  // namespace shardproof
