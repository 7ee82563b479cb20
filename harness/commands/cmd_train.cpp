// `shardproof train`: a language model on any text or tokens, sharded, and with --check the golden run beside it.
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <optional>

#include "harness/case/case.h"
#include "harness/commands/commands.h"
#include "harness/commands/config_file.h"
#include "harness/commands/train_arguments.h"
#include "harness/run/verbosity.h"
#include "harness/train/stop_request.h"
#include "harness/train/train.h"
#include "harness/train/train_checkpoint.h"
#include "harness/train/train_progress.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/comm/agree.h"
#include "shardproof/comm/require_same.h"

namespace harness {
namespace {

std::string describe(const TrainArguments& arguments, const TrainOptions& options) {
  int64_t parameters = 0;
  for (const auto& [name, shape] : golden::parameter_shapes(options.model)) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    parameters += elements;
  }
  const std::string how = std::string(options.bf16 ? ", bf16" : "") +
                          (options.recompute.empty() ? "" : ", recomputing " + options.recompute) +
                          (options.offload_activations ? ", activations on the host" : "") +
                          (options.sharding.empty() ? "" : fmt::format(", {}", fmt::join(options.sharding, ", ")));
  return fmt::format("{} ({} parameters), {} on {}{}, {} lr={}{} clip={} seed={}", str(options.model), grouped(parameters),
                     options.strategy, options.mesh.str(), how, arguments.optimizer, arguments.lr,
                     options.schedule.kind == "constant" ? "" : " " + options.schedule.kind, options.clip_norm, options.seed);
}

std::string describe(const TrainingData& data, const TrainOptions& options) {
  const TokenFiles& files = data.files();
  const std::string held_out =
      data.validation_sequences() > 0 ? fmt::format(", {} to validate with", grouped(data.validation_sequences())) : "";
  return fmt::format("{} {} in {} files, {} sequences of {}{}{}; {} a step in microbatches of {}", grouped(files.tokens()),
                     files.type() == TokenType::uint8 ? "bytes" : "tokens", grouped(static_cast<int64_t>(files.files().size())),
                     grouped(data.sequences()), data.sequence_length(), data.options().shuffle ? ", shuffled" : "", held_out,
                     options.global_batch, options.microbatch);
}

void print_stopped(std::FILE* out, const TrainOptions& options, int64_t done) {
  const std::string& directory = options.checkpoints.directory;
  if (done == 0)
    fmt::print(out, "stopped before the first step, and nothing was saved\n");
  else if (directory.empty())
    fmt::print(out, "stopped after {} of {} steps; without --checkpoint-dir nothing was saved\n", done, options.steps);
  else
    fmt::print(out, "stopped after {} of {} steps; --resume goes on from {}\n", done, options.steps,
               shardproof::checkpoint::step_folder(directory, done));
}

void print_end(std::FILE* out, const TrainOptions& options, const TrainResult& result, double loss_first, double loss_last) {
  if (result.difference)
    fmt::print(out, "NOT EQUAL to the golden run at step {}: {}\n", result.first_step + result.steps, result.difference->str());
  else if (options.check && result.steps > 0)
    fmt::print(out,
               "EQUAL in every bit to the golden run, after each of {} steps: losses, gradient norm, gradients, "
               "parameters, optimizer state ({} values). Loss {:.4f} -> {:.4f}\n",
               result.steps, grouped(result.values_compared), loss_first, loss_last);
  else if (result.steps == 0 && !result.stopped)
    fmt::print(out, "nothing is left to train\n");
  else if (result.steps > 0)
    fmt::print(out, "trained {} step{}, loss {:.4f} -> {:.4f}{}\n", result.steps, result.steps == 1 ? "" : "s", loss_first,
               loss_last, options.fingerprint ? "; the check of replicas found nothing wrong after any of them" : "");
  if (result.stopped) print_stopped(out, options, result.first_step + result.steps);
}

void print_begin(std::FILE* out, const TrainOptions& options, int64_t first) {
  const std::string& directory = options.checkpoints.directory;
  if (first > 0)
    fmt::print(out, "resume from {} after {} of {} steps\n", shardproof::checkpoint::step_folder(directory, first), first,
               options.steps);
  else if (options.checkpoints.resume)
    fmt::print(out, "resume no checkpoint in {}: starting with step 1\n", directory);
  if (!options.weights.empty())
    fmt::print(out, "begin  {} the weights in {}{}\n", first > 0 ? "without" : "with", options.weights,
               first > 0 ? ": the checkpoint has what they became" : "");
  if (!directory.empty() && first < options.steps)
    fmt::print(out, "save   into {}, {}after the last step\n", directory,
               options.checkpoints.save_every ? fmt::format("every {} steps and ", options.checkpoints.save_every) : "");
}

// Each process reads files of its own host.
void require_same_data(shardproof::Comm& comm, const TrainingData& data) {
  const TokenFiles* const validation = data.validation_files();
  shardproof::require_same(
      comm, {{"fingerprint of --data", fmt::format("{:016x}", data.files().fingerprint())},
             {"fingerprint of --validation-data", fmt::format("{:016x}", validation ? validation->fingerprint() : 0)}});
}

// The last checkpoint, by the sight of rank 0: other hosts may see a folder later.
int64_t agreed_latest(shardproof::ProcessWorld* processes, const std::string& directory) {
  const auto look = [&] { return std::to_string(shardproof::checkpoint::latest_step(directory).value_or(-1)); };
  if (!processes) return std::stoll(look());
  std::string text;
  processes->run([&](std::shared_ptr<shardproof::Comm> comm) { text = shardproof::from_rank_0(*comm, look); });
  return std::stoll(text);
}

// Rank 0's, on every process.
int agreed_exit_code(shardproof::ProcessWorld& processes, int exit_code) {
  std::string text = fmt::format("{}", exit_code);
  processes.run([&](std::shared_ptr<shardproof::Comm> comm) { text = shardproof::broadcast_text(*comm, text, 0); });
  return std::stoi(text);
}

// Where a run's reports go: what a person reads, JSON lines and event files. On processes other than rank 0: nowhere.
class TrainReports {
 public:
  // Of a run whose next step is `first`.
  TrainReports(const TrainArguments& arguments, bool speaks, int64_t first)
      : silence_(speaks ? nullptr : std::fopen("/dev/null", "w"), std::fclose),
        json(speaks ? arguments.json : "", first),
        events(speaks ? arguments.tensorboard : "", first),
        out(silence_ ? silence_.get() : arguments.json == "-" ? stderr : stdout) {}

 private:
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> silence_;

 public:
  TrainJson json;
  TrainEvents events;
  std::FILE* const out;
};

// Trains and reports. Returns the exit code, which means something on rank 0.
int train_and_report(const TrainOptions& options, const TrainingData& data, int64_t first, TrainReports& reports,
                     shardproof::ProcessWorld* processes) {
  if (verbosity() != Verbosity::quiet) print_begin(reports.out, options, first);
  const StopRequests stops;
  TrainProgress progress(reports.out, first, options.steps);
  double loss_first = 0, loss_last = 0;
  bool is_validated = true;
  const auto report = [&](const TrainStep& step) {
    is_validated = step.validation_loss || step.step + 1 < options.steps || data.validation_sequences() == 0;
    if (step.step == first) loss_first = step.loss;
    loss_last = step.loss;
    progress.show(step);
    progress.name_slow_ranks(step);
    reports.json.step(step);
    reports.events.step(step);
  };
  const TrainResult result = train(options, data, report, processes);
  if (processes && processes->rank() != 0) return 0;
  progress.end_line();
  print_end(reports.out, options, result, loss_first, loss_last);
  if (!is_validated) fmt::print(reports.out, "asked to stop: no loss was taken of what is validated with\n");
  reports.json.end(result, options.check);
  return result.difference ? 1 : result.stopped ? kStoppedAsAsked : 0;
}

int run_train(TrainArguments& arguments) {
  read_config(arguments);
  if (arguments.print_config) {
    fmt::print("{}", resolved_config(*arguments.command, /*descriptions=*/true));
    return 0;
  }
  const std::string settings = arguments.config.empty() ? "" : resolved_config(*arguments.command, /*descriptions=*/false);
  const std::unique_ptr<shardproof::ProcessWorld> processes =
      arguments.launched.start(arguments.given("--mesh") ? arguments.mesh : "", settings);
  if (processes && !arguments.given("--mesh")) arguments.mesh = fmt::format("dp_shard={}", processes->size());
  if (TrainCheckpoints& checkpoints = arguments.options.checkpoints; !checkpoints.directory.empty())
    checkpoints.latest = agreed_latest(processes.get(), checkpoints.directory);
  std::optional<TrainOptions> chosen;
  std::optional<TrainingData> read;
  int64_t first = 0;
  on_each(processes.get(), [&](shardproof::Comm* comm) {
    chosen = train_options(arguments, arguments.launched.device());
    read.emplace(data_options(arguments, chosen->model));
    if (comm) require_same_data(*comm, *read);
    validate(*chosen, *read);
    first = first_step(*chosen, *read);
  });
  const TrainOptions& options = *chosen;
  const TrainingData& data = *read;
  TrainReports reports(arguments, /*speaks=*/!processes || processes->rank() == 0, first);
  const std::string description = describe(arguments, options);
  if (verbosity() != Verbosity::quiet)
    fmt::print(reports.out, "train  {}\ndata   {}\n", description, describe(data, options));
  std::fflush(reports.out);
  reports.json.run(description, data, options);
  const int exit_code = train_and_report(options, data, first, reports, processes.get());
  return processes ? agreed_exit_code(*processes, exit_code) : exit_code;
}

}  // namespace

void add_train_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("train",
                                         "train a language model on text or tokens, sharded; --check compares every bit "
                                         "with the unsharded golden run");
  auto arguments = std::make_shared<TrainArguments>();
  arguments->add_to(*command);
  command->footer(fmt::format(
      "Exit codes: 0 trained; 1 --check failed, or NaN; 2 wrong usage or environment; {} stopped by Ctrl-C, SIGTERM or\n"
      "SIGUSR1 before the last step, after a checkpoint where there is a --checkpoint-dir. --resume goes on.\n\n",
      kStoppedAsAsked));
  command->callback([arguments, &exit_code] { exit_code = run_train(*arguments); });
}

}  // namespace harness
