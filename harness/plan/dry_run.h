// The dry step (dry_step.h) of a model and of options as a case has them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "harness/case/case.h"
#include "harness/plan/dry_step.h"

namespace harness {

struct DryRun {
  Case what;  // model, mesh, strategy and parallel options
  int64_t rank = 0;
  int64_t rounds = 1;             // microbatches of the step
  int64_t samples = 1;            // of a microbatch
  int64_t length = 0;             // of a sequence; 0: as long as the model takes
  std::string dtype = "float32";  // to compute and reduce gradients in; main parameters stay float32
  bool recompute = false;         // blocks of a gpt or a llama keep no activations
  bool offload_activations = false;  // those of units lie in the host's memory between forward and backward
  std::vector<std::string> sharding = {};  // options of fully_shard (shardproof/sharding/named_options.h), "name=value"
  bool saves = false;             // plan a checkpoint, too
  std::function<void(double fraction, const std::string& what)> shown = {};  // hears how far a long run is
};

// Which tokens choose which experts is not known here. Choices are even (even_counts of parallel/experts/experts.h), nothing is
// dropped, and every rank has as many tokens as this one; memory, bytes and times are those of such routing. The worst that can
// come to this rank is computed from sizes.
//
// Along tp a gpt and a llama have the library's plan, an mlp the styles that its case draws. One rank runs the library's step
// on a device without memory (meta_device.h), so it takes neither this rank's memory nor its time. Where that cannot be (see
// below), it computes on the CPU, in memory for the whole rank; activation_bytes, peak_bytes and the operators of the record
// are then 0 and none. Throws Error when something does not fit, as the library does.
DryRunResult dry_run(const DryRun& options);

// What that run trains, on a device and with communicators of one's choice. With `computes` parameters have initial values, so
// that a real step can be measured.
DryTraining training_of(const DryRun& options, const std::shared_ptr<shardproof::MeshComm>& comms, c10::Device device,
                        bool computes);

// Whether the optimizer's memory is the host's.
bool offloads(const DryRun& options);
// Whether the run takes no memory: all do but those of a `conv` and those that offload the optimizer.
bool runs_without_memory(const DryRun& options);

}  // namespace harness
