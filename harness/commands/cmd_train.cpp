// `shardproof train`: a language model on any text or tokens, sharded, and with --check the golden run beside it.
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "harness/case/case.h"
#include "harness/commands/choices.h"
#include "harness/commands/commands.h"
#include "harness/commands/launch_options.h"
#include "harness/run/comm_texts.h"
#include "harness/train/train.h"
#include "harness/train/train_checkpoint.h"
#include "harness/train/train_progress.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/durable.h"

namespace harness {
namespace {

struct Arguments {
  std::string model = "gpt(layers=2,hidden=64,heads=4,vocab=256,positions=64,tied)";
  std::string mesh = "dp_shard=2";
  DataOptions data;
  std::string token_type;
  bool shuffle = false;
  uint64_t data_seed = 1;
  std::string optimizer = "adamw", arithmetic = "native", check;
  double lr = 1e-3, momentum = 0.9, weight_decay = 0.01;
  std::string json;
  TrainOptions options;
  Launched launched;
  bool mesh_given = false, data_seed_given = false;
};

golden::Optimizer optimizer_of(const Arguments& arguments) {
  SHARD_REQUIRE(arguments.optimizer == "adamw" || arguments.optimizer == "sgd", "train",
                "--optimizer must be adamw or sgd, got '{}'", arguments.optimizer);
  SHARD_REQUIRE(arguments.lr > 0, "train", "--lr must be above 0, got {}", arguments.lr);
  golden::Optimizer optimizer{.lr = arguments.lr, .weight_decay = arguments.weight_decay};
  if (arguments.optimizer == "adamw")
    optimizer.kind = golden::Optimizer::Kind::adamw;
  else
    optimizer.momentum = arguments.momentum;
  return optimizer;
}

DataOptions data_options(const Arguments& arguments, const golden::Model& model) {
  DataOptions data = arguments.data;
  if (data.paths.empty()) data.paths = {SHARDPROOF_DEFAULT_DATA};
  for (const std::string& path : data.paths)
    SHARD_REQUIRE(!arguments.token_type.empty() || !path.ends_with(".bin"), "train",
                  "{} may hold tokens or bytes: add --token-type uint16, uint32 or uint8", path);
  if (!arguments.token_type.empty()) data.type = token_type(arguments.token_type);
  SHARD_REQUIRE(arguments.shuffle || !arguments.data_seed_given, "train", "--data-seed needs --shuffle");
  if (arguments.shuffle) data.shuffle = arguments.data_seed;
  data.vocab = model.vocab();
  return data;
}

std::string describe(const Arguments& arguments, const TrainOptions& options) {
  int64_t parameters = 0;
  for (const auto& [name, shape] : golden::parameter_shapes(options.model)) {
    int64_t elements = 1;
    for (const int64_t size : shape) elements *= size;
    parameters += elements;
  }
  return fmt::format("{} ({} parameters), {} on {}, {} lr={} clip={} seed={}", arguments.model,
                     grouped(parameters), options.strategy, options.mesh.str(), arguments.optimizer,
                     arguments.lr, options.clip_norm, options.seed);
}

std::string describe(const TrainingData& data, const TrainOptions& options) {
  const TokenFiles& files = data.files();
  return fmt::format("{} {} in {} files, {} sequences of {}{}; {} a step in microbatches of {}", grouped(files.tokens()),
                     files.type() == TokenType::uint8 ? "bytes" : "tokens", grouped(static_cast<int64_t>(files.files().size())),
                     grouped(data.sequences()), data.sequence_length(), data.options().shuffle ? ", shuffled" : "",
                     options.global_batch, options.microbatch);
}

void print_end(std::FILE* out, const TrainOptions& options, const TrainResult& result, double loss_first,
               double loss_last) {
  if (result.difference)
    fmt::print(out, "NOT EQUAL to the golden run at step {}: {}\n", result.first_step + result.steps - 1, *result.difference);
  else if (options.check && result.steps > 0)
    fmt::print(
        out,
        "EQUAL in every bit to the golden run, after each of {} steps: losses, gradient norm, gradients, "
        "parameters, optimizer state ({} values). Loss {:.4f} -> {:.4f}\n",
        result.steps, grouped(result.values_compared), loss_first, loss_last);
  else if (result.steps == 0)
    fmt::print(out, "nothing is left to train\n");
  else
    fmt::print(out, "trained {} steps, loss {:.4f} -> {:.4f}{}\n", result.steps, loss_first, loss_last,
               options.fingerprint ? "; replicas were equal after each" : "");
}

void print_begin(std::FILE* out, const TrainOptions& options, int64_t first) {
  const std::string& directory = options.checkpoints.directory;
  if (first > 0)
    fmt::print(out, "resume from {} after {} of {} steps\n", shardproof::checkpoint::step_folder(directory, first), first,
               options.steps);
  else if (options.checkpoints.resume)
    fmt::print(out, "resume no checkpoint in {}: starting from step 0\n", directory);
  if (!directory.empty() && first < options.steps)
    fmt::print(out, "save   into {}, {}after the last step\n", directory,
               options.checkpoints.save_every ? fmt::format("every {} steps and ", options.checkpoints.save_every) : "");
}

// Rank 0's, on every process.
int agreed_exit_code(shardproof::ProcessWorld& processes, int exit_code) {
  std::string text = fmt::format("{}", exit_code);
  processes.run([&](std::shared_ptr<shardproof::Comm> comm) { text = share_text(*comm, comm->rank() == 0 ? text : ""); });
  return std::stoi(text);
}

int run_train(Arguments& arguments) {
  const std::unique_ptr<shardproof::ProcessWorld> processes =
      arguments.launched.start(arguments.mesh_given ? arguments.mesh : "");
  if (processes && !arguments.mesh_given) arguments.mesh = fmt::format("dp_shard={}", processes->size());
  const bool speaks = !processes || processes->rank() == 0;
  TrainOptions options = arguments.options;
  options.device = arguments.launched.device();
  options.mesh = chosen_mesh(arguments.mesh);
  options.strategy = chosen_strategy(options.strategy).name;
  options.model = parse_model(arguments.model);
  SHARD_REQUIRE(arguments.arithmetic == "native" || arguments.arithmetic == "canonical", "train",
                "--arithmetic must be native or canonical, got '{}'", arguments.arithmetic);
  options.model.canonical = arguments.arithmetic == "canonical";
  options.canonical |= options.model.canonical;
  options.optimizer = optimizer_of(arguments);
  SHARD_REQUIRE(arguments.check.empty() || arguments.check == "golden" || arguments.check == "fingerprint", "train",
                "--check must be golden (as without a value) or fingerprint, got '{}'", arguments.check);
  options.check = arguments.check == "golden";
  options.fingerprint = arguments.check == "fingerprint";
  const TrainingData data(data_options(arguments, options.model));
  validate(options, data);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> silence(speaks ? nullptr : std::fopen("/dev/null", "w"), std::fclose);
  std::FILE* out = silence ? silence.get() : arguments.json == "-" ? stderr : stdout;
  TrainJson json(speaks ? arguments.json : "");
  const std::string description = describe(arguments, options);
  fmt::print(out, "train  {}\ndata   {}\n", description, describe(data, options));
  std::fflush(out);
  json.run(description, data, options);

  const int64_t first = first_step(options, data);
  print_begin(out, options, first);
  TrainProgress progress(out, first, options.steps);
  double loss_first = 0, loss_last = 0;
  const TrainResult result = train(
      options, data,
      [&](const TrainStep& step) {
        if (step.step == first) loss_first = step.loss;
        loss_last = step.loss;
        progress.show(step);
        json.step(step);
      },
      processes.get());
  if (!speaks) return agreed_exit_code(*processes, 0);
  progress.end_line();
  print_end(out, options, result, loss_first, loss_last);
  json.end(result, options.check);
  const int exit_code = result.difference ? 1 : 0;
  return processes ? agreed_exit_code(*processes, exit_code) : exit_code;
}

}  // namespace

void add_train_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("train",
                                         "train a language model on text or tokens, sharded; --check compares every bit "
                                         "with the unsharded golden run");
  auto a = std::make_shared<Arguments>();
  TrainOptions& o = a->options;
  command
      ->add_option("--model", a->model,
                   "the model: gpt(layers=..,hidden=..,heads=..,vocab=..,positions=..[,tied]) or llama(...)")
      ->capture_default_str();
  command->add_option("--mesh", a->mesh, "the mesh as axis=RANKS,... with axes out of dp_replicate, dp_shard, cp and tp")
      ->capture_default_str();
  command->add_flag("--sequence-parallel", o.sequence_parallel, "cut activations between blocks by position along tp");
  command->add_option("--strategy", o.strategy, "the strategy: ddp, zero1, zero2, zero3, hsdp or hfsdp")->capture_default_str();
  command->add_option("--data", a->data.paths,
                      "text files and folders to train on; by default the sources of Python's standard library. With "
                      "--token-type files of tokens, and folders of .bin files");
  command->add_option("--token-type", a->token_type,
                      "what a token is in the files: uint8 (text, the default), uint16 or uint32, without a header");
  command->add_flag("--shuffle", a->shuffle, "take sequences in an order that is drawn anew for each epoch");
  CLI::Option* const data_seed =
      command->add_option("--data-seed", a->data_seed, "the seed of that order")->capture_default_str();
  command->add_option("--steps", o.steps, "how many optimizer steps to take")->capture_default_str();
  command->add_option("--global-batch", o.global_batch, "how many sequences a step takes")->capture_default_str();
  command->add_option("--microbatch", o.microbatch, "how many sequences a rank takes at once")->capture_default_str();
  command->add_option("--seq", a->data.sequence_length, "how many tokens a sequence has")->capture_default_str();
  command->add_option("--seed", o.seed, "the seed of the initial parameters")->capture_default_str();
  command->add_option("--optimizer", a->optimizer, "the optimizer: adamw or sgd")->capture_default_str();
  command->add_option("--lr", a->lr, "the learning rate")->capture_default_str();
  command->add_option("--momentum", a->momentum, "the momentum of sgd")->capture_default_str();
  command->add_option("--weight-decay", a->weight_decay, "the weight decay")->capture_default_str();
  command->add_option("--clip", o.clip_norm, "clip the gradient to this norm; 0: do not clip")->capture_default_str();
  command->add_flag("--check{golden}", a->check,
                    "also train the unsharded golden run and compare every bit; or --check=fingerprint: ranks compare "
                    "fingerprints of what they hold in copies, for long runs");
  command->add_flag("--canonical", o.canonical, "take sums of gradients that have the same bits on every mesh");
  command->add_flag("--offload", o.offload, "keep main parameters, optimizer state and final gradients in the host's memory");
  command
      ->add_option("--arithmetic", a->arithmetic, "canonical: take sums inside the model like this too; it implies --canonical")
      ->capture_default_str();
  TrainCheckpoints& c = o.checkpoints;
  command->add_option("--checkpoint-dir", c.directory, "the folder for checkpoints step_N");
  command->add_option("--save-every", c.save_every, "save after every so many steps; 0: only after the last")
      ->capture_default_str();
  command->add_option("--keep", c.keep, "keep so many checkpoints; 0: all")->capture_default_str();
  command->add_flag("--resume", c.resume, "go on from the last checkpoint, on any mesh and strategy");
  command->add_flag("--async-save", c.async, "write checkpoints in the background");
  command->add_option("--json", a->json, "write one JSON object for each step to this file; - is standard output");
  a->launched.add_to(*command);
  command->callback([a, command, data_seed, &exit_code] {
    a->mesh_given = command->count("--mesh") > 0;
    a->data_seed_given = data_seed->count() > 0;
    exit_code = run_train(*a);
  });
}

}  // namespace harness
