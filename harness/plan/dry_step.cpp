#include "harness/plan/dry_step.h"

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <tuple>
#include <utility>

#include "harness/plan/meta_device.h"
#include "harness/plan/stopwatch.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/comm/counted.h"

namespace harness {
namespace {

using namespace shardproof;

std::vector<Traffic> traffic_of(const StepRecord& record) {
  std::map<std::tuple<std::string, std::string, int64_t>, Traffic> sums;  // experts see other groups of the same name
  for (const Collective& call : record.collectives) {
    const RankGroup& group = record.groups[call.group];
    const int64_t ranks = std::ssize(group.ranks);
    Traffic& sum = sums[{group.name, to_string(call.op), ranks}];
    sum.op = to_string(call.op), sum.group = group.name, sum.ranks = ranks;
    ++sum.calls;
    sum.bytes += call.bytes;
    sum.worst_bytes += call.bytes;
  }
  std::vector<Traffic> traffic;
  for (auto& [key, sum] : sums) traffic.push_back(std::move(sum));
  return traffic;
}

// A save that ends before it has written anything.
double seconds_of_save(Sharded& sharded, const Optimizer& optimizer, checkpoint::KeptPlan& plan) {
  const std::string parent =
      (std::filesystem::temp_directory_path() / fmt::format("shardproof_dry_run_{}", ::getpid())).string();
  std::filesystem::create_directory(parent);
  const std::shared_ptr<void> removed(nullptr, [&](void*) { std::filesystem::remove_all(parent); });
  Stopwatch watch;
  checkpoint::SaveJob(parent + "/step", sharded, &optimizer, {}, {.plan = &plan}, nullptr);
  return watch.lap();
}

}  // namespace

DryRunResult dry_step(const DryStep& step, const std::function<DryTraining(const std::shared_ptr<MeshComm>&)>& make) {
  const auto show = [&](double fraction, const char* what) {
    if (step.shown) step.shown(fraction, what);
  };
  show(0.05, "building the model and sharding it");
  Stopwatch watch;
  StepRecorder recorder;
  MetaDevice device(recorder);
  auto comms = std::make_shared<MeshComm>(recorded(counted(step.mesh.size(), step.rank), recorder), step.mesh);
  DryTraining training = make(comms);
  Sharded& sharded = training.sharded;
  DryRunResult result;
  result.cost.shard = watch.lap();
  for (const Piece& piece : sharded.parameters()) {
    result.own_parameters += piece.run.size();
    result.pieces.push_back({piece.name, piece.shape, piece.run, {}});
  }
  result.built = sharded.memory();
  // The ledger counts those activations that leave, too.
  const auto beside_ledger = [&] {
    const MemoryUse use = sharded.memory();
    return device.bytes() - use.now_total() + use.now(MemoryKind::activation);
  };
  // The first step makes groups and state that are there from then on.
  for (int64_t number = 0; number < 2; ++number) {
    show(number == 0 ? 0.4 : 0.7, number == 0 ? "the first step" : "the second step");
    watch.lap();
    recorder.clear();
    sharded.reset_peak_memory();
    device.reset_peak();
    for (int64_t round = 0; round < step.rounds; ++round) {
      sharded.set_last_microbatch(round + 1 == step.rounds);
      const int64_t before = beside_ledger();
      const at::Tensor loss = training.loss();
      result.activation_bytes = beside_ledger() - before;
      loss.backward();
    }
    training.optimizer.step();
    if (training.stepped) training.stepped();
  }
  result.cost.step = watch.lap();
  result.stepped = sharded.memory();
  result.peak_bytes = device.peak_bytes() - recorder.neighbours_bytes();
  result.record = recorder.record();
  result.traffic = traffic_of(result.record);
  watch.lap();
  result.placements = sharded.placements();
  result.cost.placements = watch.lap();
  if (step.saves) {
    checkpoint::KeptPlan plan;
    result.cost.save_plan = seconds_of_save(sharded, training.optimizer, plan);
    result.cost.next_save_plan = seconds_of_save(sharded, training.optimizer, plan);
  }
  return result;
}

}  // namespace harness
