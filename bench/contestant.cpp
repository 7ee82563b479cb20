#include "bench/contestant.h"

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <malloc.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <mutex>
#include <optional>

#include "bench/profile.h"
#include "bench/stopwatch.h"
#include "bench/tensor_bytes.h"
#include "shardproof/comm/checked.h"
#include "shardproof/comm/timeline.h"
#include "shardproof/sharding/named_options.h"
#include "shardproof/shardproof.h"

namespace bench {
namespace {

using namespace shardproof;
constexpr uint64_t kSeed = 1234;

double memory_mib(const std::string& key, const char* file = "/proc/self/status") {
  std::ifstream status(file);
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key)) return std::stod(line.substr(key.size() + 1)) / 1024;
  return 0;
}

// A page that several processes map belongs to each of them in equal parts, and to this one as a whole in its peak. 0 where the
// kernel does not say.
double shared_mib_of_others() {
  const double own = memory_mib("Pss_Shmem:", "/proc/self/smaps_rollup");
  return own > 0 ? memory_mib("RssShmem:") - own : 0;
}

void reset_peak() {
  std::ofstream("/proc/self/clear_refs") << "5";
}

double device_peak_mib(c10::Device device) {
  const auto stats = at::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return static_cast<double>(stats.allocated_bytes[0].peak) / 1048576;  // [0]: of all pools
}

// While one lives, products and attention of this thread are in bfloat16.
class Autocast {
 public:
  Autocast(c10::DeviceType type, bool on) : type_(type), on_(on) {
    if (!on) return;
    at::autocast::set_autocast_dtype(type, at::kBFloat16);
    at::autocast::set_autocast_enabled(type, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (!on_) return;
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(type_, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

 private:
  c10::DeviceType type_;
  bool on_;
};

// `cut`: the ranks among which the logits are cut, of a vocabulary of `vocab` entries; null where they are whole.
at::Tensor loss_of(const Model& model, const at::Tensor& tokens, Comm* cut = nullptr, int64_t vocab = 0) {
  const at::Tensor logits = call(model, tokens.narrow(1, 0, tokens.size(1) - 1).contiguous());
  const at::Tensor targets = tokens.narrow(1, 1, tokens.size(1) - 1).reshape({-1});
  const at::Tensor flat = logits.flatten(0, 1).to(at::kFloat);
  if (cut) return vocab_parallel_cross_entropy(flat, targets, vocab, *cut);
  return at::cross_entropy_loss(flat, targets, {}, at::Reduction::Mean);
}

// AdamW as PyTorch fuses it, on whole tensors.
class FusedAdamW {
 public:
  FusedAdamW(Model& model, double lr) : lr_(lr), parameters_(model->parameters()) {
    for (const at::Tensor& p : parameters_) {
      m_.push_back(at::zeros_like(p));
      v_.push_back(at::zeros_like(p));
      steps_.push_back(at::zeros({}, p.options()));
    }
  }
  void step() {
    const at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      gradients.push_back(parameters_[i].grad());
      steps_[i].add_(1);
    }
    at::_fused_adamw_(parameters_, gradients, m_, v_, {}, steps_, lr_, 0.9, 0.999, 0.01, 1e-8, /*amsgrad=*/false,
                      /*maximize=*/false);
    for (at::Tensor& p : parameters_) p.mutable_grad().reset();
  }

 private:
  double lr_;
  std::vector<at::Tensor> parameters_, m_, v_, steps_;
};

Model model_of(const Task& task) {
  if (task.device.is_meta()) {
    const MetaInit meta;
    return Model(task.size);
  }
  Model model(task.size);
  initialize_parameters(*model, kSeed);
  model->to(task.device);
  return model;
}

nlohmann::json run_single(const Task& task) {
  at::set_num_threads(2);
  Model model = model_of(task);
  FusedAdamW optimizer(model, task.lr);
  std::vector<double> times, losses;
  reset_peak();
  for (int64_t step = 0; step < task.warmup + task.steps; ++step) {
    const at::Tensor tokens = tokens_of(task.size, step).to(task.device);
    finish(task.device);
    const auto start = Clock::now();
    const at::Tensor loss = [&] {
      const Autocast autocast(task.device.type(), task.bf16);
      return loss_of(model, tokens);
    }();
    loss.backward();
    optimizer.step();
    finish(task.device);
    times.push_back(milliseconds_since(start));
    losses.push_back(loss.item<double>());
  }
  int64_t bytes = 0;
  for (const at::Tensor& parameter : model->parameters()) bytes += 4 * static_cast<int64_t>(parameter.nbytes());
  // Of the parameters, their gradients and two moments.
  const double live_mib = static_cast<double>(bytes) / 1048576;
  return {{"step_ms", times}, {"losses", losses}, {"calls", 0}, {"bytes", 0}, {"live_mib", live_mib}};
}

// What the ranks of this process find out.
struct Measured {
  std::vector<double> times, losses;  // of rank 0; losses are means over all ranks
  std::vector<double> check_percent;  // of the processor time of the step without its check
  size_t calls_before_last = 0;
  int64_t live_bytes = 0;
  double shared_mib_of_others = 0;
  std::mutex mutex;
  std::vector<double> processor_ms;       // of all steps of all ranks of this process
  std::atomic<int64_t> tensor_bytes = 0;  // of the tensors of each rank at most, all ranks of this process together
};

ShardOptions options_of(const Task& task) {
  ShardOptions options{.strategy = strategy(task.strategy),
                       .units = by_type<BlockImpl>(),
                       .buffers = Buffers::pooled,
                       .numerics = Numerics::fast,
                       .broadcast_initial_values = false};
  set_options(options, task.sharding);
  options.gather = task.contestant == "side_by_side" ? Gather::side_by_side : Gather::copied;
  if (task.device.is_meta()) {
    options.device = task.device;
    options.initialize = [](const std::string&, const Shape&, Interval, at::Tensor) {};
    options.check_gradients = false;  // of what nobody gathered
  }
  if (task.bf16)
    options.precision = {.main = at::kFloat, .compute = at::kBFloat16, .gradient = at::kFloat, .reduce = at::kFloat};
  return options;
}

void in_span(Timeline* timeline, int64_t rank, const char* name, const std::function<void()>& body) {
  const TimedSpan span(timeline, rank, name);
  body();
}

// What the ranks of this process write down. Without a timeline nothing but calls.
struct Records {
  std::shared_ptr<Trace> trace = std::make_shared<Trace>();
  std::shared_ptr<Timeline> timeline = nullptr;
};

// What the signatures of so many collectives take, with a barrier each, because a call without its signature cannot be had.
double signatures_milliseconds(Comm& checked, int64_t calls) {
  const double begun = processor_milliseconds();
  for (int64_t i = 0; i < calls; ++i) checked.barrier().wait();
  return processor_milliseconds() - begun;
}

// The most of these calls that a rank has made since; sends and receives have no signature.
int64_t signed_calls(Comm& comm, const std::vector<TraceRecord>& calls, size_t since) {
  const auto is_signed = [](const TraceRecord& call) { return call.op != "send" && call.op != "recv"; };
  at::Tensor most = at::zeros({1}, at::kDouble);
  most.fill_(static_cast<double>(std::count_if(calls.begin() + static_cast<std::ptrdiff_t>(since), calls.end(), is_signed)));
  comm.all_reduce(most, Reduce::max).wait();
  return static_cast<int64_t>(most.item<double>());
}

void train_rank(const Task& task, const std::shared_ptr<Comm>& comm, const Records& records, Measured& measured) {
  const int64_t rank = comm->rank();
  const bool checks = task.contestant == "fingerprint";
  const std::shared_ptr<Comm> used = checks ? checked(comm) : comm;
  const auto comms = std::make_shared<MeshComm>(traced(used, records.trace, records.timeline), task.mesh);
  Training training(task, comms);
  Optimizer& optimizer = training.optimizer;
  std::optional<FingerprintCheck> check;
  if (checks) check.emplace(training.sharded, optimizer);
  at::Tensor losses = at::zeros({task.warmup + task.steps}, at::kDouble);
  for (int64_t step = 0; step < task.warmup + task.steps; ++step) {
    if (step == 1) reset_peak_tensor_bytes();  // the first step, and what was before it, are not like the others
    const at::Tensor tokens = own_tokens(task, step, rank);
    finish(task.device);
    comm->barrier().wait();
    // Copies the records of all steps before, so not in each step.
    const size_t calls_before = check || step == task.warmup + task.steps - 1 ? records.trace->of_rank(rank).size() : 0;
    if (rank == 0) measured.calls_before_last = calls_before;
    const auto start = Clock::now();
    const double begun = processor_milliseconds();
    double trained = begun, fingerprinted = begun;
    std::vector<TraceRecord> calls;
    at::Tensor loss;
    {
      std::optional<Profile> profile;
      if (rank == 0 && !task.profile.empty() && step == task.warmup + task.steps - 1)
        profile.emplace(task.profile, task.device);
      Timeline* const timeline = records.timeline.get();
      const TimedSpan whole(timeline, rank, fmt::format("step {}", step));
      in_span(timeline, rank, "forward", [&] { loss = training.loss(tokens); });
      in_span(timeline, rank, "backward", [&] { loss.backward(); });
      in_span(timeline, rank, "optimizer", [&] { optimizer.step(); });
      if (profile) finish(task.device);
      if (check) {
        trained = processor_milliseconds();
        calls = records.trace->of_rank(rank);
        in_span(timeline, rank, "fingerprint", [&] { check->step(); });
        fingerprinted = processor_milliseconds();
      }
    }
    finish(task.device);
    const double taken = processor_milliseconds() - begun;
    comm->barrier().wait();
    if (rank == 0) measured.times.push_back(milliseconds_since(start));
    if (const std::lock_guard lock(measured.mutex); step >= task.warmup) measured.processor_ms.push_back(taken);
    if (check) {
      const double signatures = signatures_milliseconds(*used, signed_calls(*comm, calls, calls_before));
      const double checks_take = fingerprinted - trained + signatures, rest = trained - begun - signatures;
      if (rank == 0) measured.check_percent.push_back(100 * checks_take / rest);
    }
    losses.mutable_data_ptr<double>()[step] = loss.item<double>() / static_cast<double>(task.mesh.size());
  }
  measured.tensor_bytes += peak_tensor_bytes();
  const double of_others = shared_mib_of_others();  // while all ranks are there
  comm->all_reduce(losses).wait();
  if (rank != 0) return;
  measured.shared_mib_of_others = of_others;
  measured.live_bytes = training.sharded.memory().peak_total_bytes;
  measured.losses.assign(losses.const_data_ptr<double>(), losses.const_data_ptr<double>() + losses.numel());
}

nlohmann::json run_ours(const Task& task, ProcessWorld* processes, std::shared_ptr<Timeline> timeline) {
  at::set_num_threads(1);
  const Records own{.timeline = std::move(timeline)};
  Measured measured;
  if (task.counts_tensors) count_tensors();
  reset_peak();
  const auto body = [&](std::shared_ptr<Comm> comm) { train_rank(task, comm, own, measured); };
  if (processes)
    processes->run(body, task.mesh.size());
  else
    run_threads(task.mesh.size(), body, {.device = task.device});
  int64_t calls = 0, bytes = 0;
  const auto records = own.trace->of_rank(0);
  for (size_t i = measured.calls_before_last; i < records.size(); ++i) {
    if (records[i].op == "barrier") continue;
    ++calls;
    bytes += records[i].bytes;
  }
  return {{"step_ms", measured.times},
          {"losses", measured.losses},
          {"calls", calls},
          {"bytes", bytes},
          {"check_percent", measured.check_percent},
          {"processor_ms", measured.processor_ms},
          {"shared_mib_of_others", measured.shared_mib_of_others},
          {"tensor_mib", static_cast<double>(measured.tensor_bytes) / 1048576 / (processes ? 1.0 : double(task.mesh.size()))},
          {"live_mib", static_cast<double>(measured.live_bytes) / 1048576}};
}

std::optional<TensorParallel> cut_model(const Task& task, Model& model, const std::shared_ptr<MeshComm>& comms) {
  if (task.expert_ranks > 1) return parallelize(model.ptr(), comms, expert_plan(task.expert_ranks));
  if (!task.mesh.has("tp")) return {};
  ParallelPlan plan = parallel_plan(task.sequence_parallel, task.overlap_pieces);
  plan.compare_replicas = false;  // few steps have this traffic, and the one whose calls are counted is as most are
  return parallelize(model.ptr(), comms, std::move(plan));
}

}  // namespace

Training::Training(const Task& task, const std::shared_ptr<MeshComm>& comms)
    : model(model_of(task)),
      parallel(cut_model(task, model, comms)),
      cut(task.mesh.has("tp") ? &comms->along({"tp"}) : nullptr),
      vocab(task.size.vocab),
      sharded(fully_shard(model.ptr(), comms, options_of(task))),
      optimizer(adamw(sharded, {.lr = task.lr})) {}

at::Tensor Training::loss(const at::Tensor& tokens) const {
  return loss_of(model, tokens, cut, vocab);
}

at::Tensor own_tokens(const Task& task, int64_t step, int64_t rank) {
  int64_t part = 0;
  for (const Axis& axis : task.mesh.axes())
    if (axis.name != "tp") part = part * axis.size + task.mesh.coordinate(rank, axis.name);
  const int64_t per_rank = task.size.batch / task.data_ranks();
  return tokens_of(task.size, step).narrow(0, part * per_rank, per_rank).to(task.device);
}

nlohmann::json run(const Task& task, ProcessWorld* processes, std::shared_ptr<Timeline> timeline) {
  if (!task.profile.empty()) prepare_profile(task.device);
  at::mm(at::ones({256, 256}), at::ones({256, 256}));  // brings up what the products need
  const double base = memory_mib("VmRSS:") - shared_mib_of_others();
  nlohmann::json result = task.contestant == "single" ? run_single(task) : run_ours(task, processes, std::move(timeline));
  const auto ranks = static_cast<double>(task.contestant == "single" || processes ? 1 : task.mesh.size());
  const double own_peak = memory_mib("VmHWM:") - result.value("shared_mib_of_others", 0.0) - base;
  result["peak_mib"] = (task.device.is_cpu() ? own_peak : device_peak_mib(task.device)) / ranks;
  if (!task.device.is_cpu()) result["tensor_mib"] = result["peak_mib"];
  const bool single = task.contestant == "single";
  const int64_t tokens = task.size.batch * task.size.seq / (single ? 1 : task.data_ranks());
  const int64_t tp = single ? 1 : task.mesh.size() / task.data_ranks();
  if (!task.bf16 && task.size.experts == 0) {
    const int64_t activations = activation_bytes(task.size, tokens, tp, task.sequence_parallel && !single);
    result["formula_mib"] = result["live_mib"].get<double>() + static_cast<double>(activations) / 1048576;
  }
  for (const char* of_steps : {"step_ms", "check_percent"})  // rank 0's
    if (auto& values = result[of_steps]; !values.empty()) values.erase(values.begin(), values.begin() + task.warmup);
  return result;
}

void write_data(const Task& task, const std::string& path) {
  Model model(task.size);
  initialize_parameters(*model, kSeed);
  std::ofstream file(path, std::ios::binary);
  const auto write = [&](const at::Tensor& values) {
    file.write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  };
  for (const at::Tensor& parameter : model->parameters()) write(parameter.detach().contiguous());
  for (int64_t step = 0; step < task.warmup + task.steps; ++step) write(tokens_of(task.size, step));
  file.flush();
  SHARD_REQUIRE(file.good(), "bench", "cannot write {}", path);
}

}  // namespace bench
