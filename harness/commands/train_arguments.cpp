#include "harness/commands/train_arguments.h"

#include <fmt/ranges.h>

#include <CLI/CLI.hpp>

#include "harness/case/case.h"
#include "harness/commands/choices.h"
#include "harness/commands/config_file.h"
#include "harness/commands/usage.h"
#include "harness/train/train_checkpoint.h"
#include "harness/train/train_weights.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/weight_names.h"

namespace harness {
namespace {

golden::Optimizer optimizer_of(const TrainArguments& arguments) {
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

TrainSchedule schedule_of(const TrainArguments& arguments) {
  TrainSchedule schedule = arguments.options.schedule;
  const auto require_ends = [&](const char* option) {
    SHARD_REQUIRE(!arguments.given(option) || schedule.ends(), "train", "{} is for --schedule cosine, linear or wsd", option);
  };
  for (const char* option : {"--schedule-steps", "--lr-last"}) require_ends(option);
  SHARD_REQUIRE(!arguments.given("--decay-steps") || schedule.kind == "wsd", "train", "--decay-steps is for --schedule wsd");
  schedule.total = arguments.schedule_steps > 0 ? arguments.schedule_steps : arguments.options.steps;
  if (!arguments.given("--decay-steps")) schedule.decay = schedule.total / 10;
  return schedule;
}

// A checkpoint that the run goes on from says which model it is, and so do weights that it starts from. --model may repeat it,
// and add to weights what keeps experts busy.
golden::Model named_model(const TrainArguments& arguments) {
  const std::string& weights = arguments.options.weights;
  const auto as_said = [&](const golden::Model& model, const std::string& source) {
    if (arguments.given("--model")) require_same_model(arguments.model, model, source);
    return model;
  };
  if (const auto resumed = model_to_resume(arguments.options.checkpoints)) return as_said(resumed->model, resumed->folder);
  if (weights.empty()) return parse_model(arguments.model);
  const golden::Model model = model_of_weights(weights);
  return as_said(arguments.given("--model") ? with_busy_experts(model, arguments.model) : model, weights + "/config.json");
}

// --document-end is said of the data, so weights of any llama may be trained with it.
golden::Model model_of(const TrainArguments& arguments) {
  golden::Model model = named_model(arguments);
  if (!arguments.given("--document-end")) return model;
  SHARD_REQUIRE(
      model.kind == golden::Model::Kind::llama && arguments.document_end >= 0 && arguments.document_end < model.llama.vocab,
      "train", "--document-end {} must be a token of a llama, and the model is a {} of {} tokens", arguments.document_end,
      to_string(model.kind), model.vocab());
  const bool is_known = model.llama.document_end >= 0 || model_to_resume(arguments.options.checkpoints).has_value();
  SHARD_REQUIRE(!is_known || model.llama.document_end == arguments.document_end, "train",
                "--document-end {}, and --model or the run that goes on has {} (-1: none). Leave it out",
                arguments.document_end, model.llama.document_end);
  model.llama.document_end = arguments.document_end;
  return model;
}

void add_model_options(CLI::App& app, TrainArguments& a) {
  TrainOptions& o = a.options;
  app.add_option("--weights", o.weights,
                 fmt::format("start from the weights in this folder of a Hugging Face model ({}), whose config.json says which "
                             "model it is; a run that is resumed does not read it again",
                             fmt::join(shardproof::checkpoint::weight_families(), ", ")));
  app.add_option("--model", a.model, "the model: gpt(layers=..,hidden=..,heads=..,vocab=..,positions=..[,tied]) or llama(...)")
      ->capture_default_str();
  app.add_option("--mesh", a.mesh, "the mesh as axis=RANKS,... with axes out of dp_replicate, dp_shard, cp and tp")
      ->capture_default_str();
  app.add_flag("--sequence-parallel", o.sequence_parallel, "cut activations between blocks by position along tp");
  app.add_option("--overlap-pieces", o.overlap_pieces,
                 "cut products of layers that tp cuts into so many pieces of the microbatch, each of which is sent while the "
                 "next one is multiplied")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_context_attention(app, o.context_attention);
  app.add_option("--expert-ranks", o.expert_ranks, "so many neighbours along dp_shard share the experts of a llama's layers")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_flag("--cut-experts", o.cut_experts, "cut the experts of a llama's layers inside, along tp");
  app.add_option("--strategy", o.strategy, strategy_help())->capture_default_str();
}

void add_data_options(CLI::App& app, TrainArguments& a) {
  app.add_option("--data", a.data.paths,
                 "text files and folders to train on; by default 1 MiB of sentences and sums that the program makes. With "
                 "--token-type files of tokens, and folders of .bin files");
  app.add_option("--token-type", a.token_type,
                 "what a token is in the files: uint8 (text, the default), uint16 or uint32, without a header");
  app.add_option("--document-end", a.document_end,
                 "the token that ends a document: the queries of a llama see keys of their own document only");
  app.add_flag("--shuffle", a.shuffle, "take sequences in an order that is drawn anew for each epoch");
  app.add_option("--data-seed", a.data_seed, "the seed of that order")->capture_default_str();
  app.add_option("--validation-part", a.data.validation_part,
                 "hold out the last sequences, this part of all, and take the loss of them")
      ->capture_default_str();
  app.add_option("--validation-data", a.data.validation_paths, "take the loss of these files and folders instead");
  app.add_option("--validate-every", a.options.validate_every, "after so many steps, and after the last; 0: only then")
      ->capture_default_str();
  app.add_option("--validation-sequences", a.options.validation_sequences_max, "of the first so many sequences only; 0: of all")
      ->capture_default_str();
}

void add_optimizer_options(CLI::App& app, TrainArguments& a) {
  TrainOptions& o = a.options;
  app.add_option("--steps", o.steps, "how many optimizer steps to take")->capture_default_str();
  app.add_option("--global-batch", o.global_batch, "how many sequences a step takes")->capture_default_str();
  app.add_option("--microbatch", o.microbatch, "how many sequences a rank takes at once")->capture_default_str();
  app.add_option("--seq", a.data.sequence_length, "how many tokens a sequence has")->capture_default_str();
  app.add_option("--seed", o.seed, "the seed of the initial parameters")->capture_default_str();
  app.add_option("--optimizer", a.optimizer, "the optimizer: adamw or sgd")->capture_default_str();
  app.add_option("--lr", a.lr, "the learning rate")->capture_default_str();
  app.add_option("--schedule", o.schedule.kind,
                 fmt::format("how it moves: {}; wsd is warm-up, stable, decay", fmt::join(schedule_kinds(), ", ")))
      ->capture_default_str();
  app.add_option("--warmup", o.schedule.warmup, "over how many steps it rises first")->capture_default_str();
  app.add_option("--schedule-steps", a.schedule_steps, "the step at which cosine, linear and wsd end; 0: the last one")
      ->capture_default_str();
  app.add_option("--decay-steps", o.schedule.decay, "over how many steps wsd falls at the end; by default a tenth of all");
  app.add_option("--lr-last", o.schedule.last, "where cosine, linear and wsd end, as a part of --lr")->capture_default_str();
  app.add_option("--momentum", a.momentum, "the momentum of sgd")->capture_default_str();
  app.add_option("--weight-decay", a.weight_decay, "the weight decay")->capture_default_str();
  app.add_option("--clip", o.clip_norm, "clip the gradient to this norm; 0: do not clip")->capture_default_str();
}

void add_run_options(CLI::App& app, TrainArguments& a) {
  TrainOptions& o = a.options;
  app.add_flag("--check{golden}", a.check,
               "also train the unsharded golden run and compare every bit; or --check=fingerprint: ranks compare "
               "fingerprints of what they hold in copies, for long runs");
  app.add_flag("--canonical", o.canonical, "take sums of gradients that have the same bits on every mesh");
  app.add_option("--precision", a.precision,
                 "what blocks compute in: float32, or bf16 with main parameters, gradients and optimizer state in float32")
      ->capture_default_str();
  app.add_flag("--recompute{blocks}", o.recompute,
               "keep no activations of blocks: compute them again in the backward; or --recompute=attention: those within "
               "attention only; or of the modules whose names fit a pattern");
  app.add_flag("--offload-activations", o.offload_activations,
               "keep activations of blocks in the host's memory between forward and backward");
  add_sharding_options(app, o.sharding);
  app.add_option("--arithmetic", a.arithmetic, "canonical: take sums inside the model like this too; it implies --canonical")
      ->capture_default_str();
  TrainCheckpoints& c = o.checkpoints;
  app.add_option("--checkpoint-dir", c.directory, "the folder for checkpoints step_N");
  app.add_option("--save-every", c.save_every, "save after every so many steps; 0: only after the last")->capture_default_str();
  app.add_option("--keep", c.keep, "keep so many checkpoints; 0: all")->capture_default_str();
  app.add_flag("--resume", c.resume, "go on from the last checkpoint, on any mesh and strategy");
  app.add_flag("--async-save", c.async, "write checkpoints in the background");
  app.add_option("--json,--jsonl", a.json, "write one JSON object for each step to this file; - is standard output");
  app.add_option("--tensorboard", a.tensorboard, "write the numbers of each step into an event file in this folder");
}

}  // namespace

void read_config(TrainArguments& arguments) {
  if (!arguments.config.empty()) read_config(*arguments.command, arguments.config);
}

bool TrainArguments::given(const std::string& option) const {
  return command->count(option) > 0;
}

TrainOptions train_options(const TrainArguments& arguments, c10::Device device) {
  TrainOptions options = arguments.options;
  options.device = device;
  options.mesh = chosen_mesh(arguments.mesh);
  options.strategy = chosen_strategy(options.strategy).name;
  options.model = model_of(arguments);
  SHARD_REQUIRE(!arguments.given("--context-attention") || options.mesh.has(axes::cp), "train",
                "--context-attention is for a mesh with cp, got --mesh {}", arguments.mesh);
  SHARD_REQUIRE(arguments.arithmetic == "native" || arguments.arithmetic == "canonical", "train",
                "--arithmetic must be native or canonical, got '{}'", arguments.arithmetic);
  options.model.canonical = arguments.arithmetic == "canonical";
  options.canonical |= options.model.canonical;
  SHARD_REQUIRE(arguments.precision == "float32" || arguments.precision == "bf16", "train",
                "--precision must be float32 or bf16, got '{}'.{}", arguments.precision,
                did_you_mean(arguments.precision, {"float32", "bf16"}));
  options.bf16 = arguments.precision == "bf16";
  options.optimizer = optimizer_of(arguments);
  options.schedule = schedule_of(arguments);
  SHARD_REQUIRE(arguments.check.empty() || arguments.check == "golden" || arguments.check == "fingerprint", "train",
                "--check must be golden (as without a value) or fingerprint, got '{}'", arguments.check);
  options.check = arguments.check == "golden";
  options.fingerprint = arguments.check == "fingerprint";
  return options;
}

DataOptions data_options(const TrainArguments& arguments, const golden::Model& model) {
  DataOptions data = arguments.data;
  SHARD_REQUIRE(!data.paths.empty() || arguments.token_type.empty() || arguments.token_type == "uint8", "train",
                "--token-type {} needs --data: the text that is made without it is bytes", arguments.token_type);
  for (const std::string& path : data.paths)
    SHARD_REQUIRE(!arguments.token_type.empty() || !path.ends_with(".bin"), "train",
                  "{} may hold tokens or bytes: add --token-type uint16, uint32 or uint8", path);
  if (!arguments.token_type.empty()) data.type = token_type(arguments.token_type);
  SHARD_REQUIRE(arguments.shuffle || !arguments.given("--data-seed"), "train", "--data-seed needs --shuffle");
  if (arguments.shuffle) data.shuffle = arguments.data_seed;
  data.vocab = model.vocab();
  return data;
}

void TrainArguments::add_to(CLI::App& app) {
  command = &app;
  app.add_option("--config", config, "read options from this file: TOML, `save-every = 50`; the command line has the last word")
      ->configurable(false);
  app.add_flag("--print-config", print_config, "print all options with their values as such a file, and train nothing")
      ->configurable(false);
  add_model_options(app, *this);
  add_data_options(app, *this);
  add_optimizer_options(app, *this);
  add_run_options(app, *this);
  launched.add_to(app);
  add_verbosity(app, "say nothing but how it ended, what went wrong, and which ranks are slow", "say a line for each step");
}

}  // namespace harness
