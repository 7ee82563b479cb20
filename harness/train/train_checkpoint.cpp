#include "harness/train/train_checkpoint.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>

#include "harness/case/case.h"
#include "harness/train/train_weights.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/durable.h"

namespace harness {
namespace {

using shardproof::checkpoint::Value;

constexpr const char* kRun = "run";
constexpr const char* kHistory = "history";
constexpr const char* kWeights = "weights";
constexpr const char* kConfig = "config";  // the texts of the files that the weights came with
constexpr const char* kGeneration = "generation_config";
// Options whose names in a checkpoint are not those of the command line.
constexpr const char* kBytes = "--data (bytes)";
constexpr const char* kContents = "--data (contents)";
constexpr const char* kValidation = "--validation-data (contents)";
constexpr const char* kShuffle = "--shuffle with --data-seed";

// What must not change, with the options that say it.
Value describe_run(const TrainOptions& options, const TrainingData& data) {
  const golden::Optimizer& o = options.optimizer;
  const DataOptions& d = data.options();
  Value::Pairs run = {
      {Value::string("--model"), Value::string(str(options.model))},
      {Value::string(kBytes), Value::integer(data.files().bytes())},
      {Value::string("--seq"), Value::integer(data.sequence_length())},
      {Value::string("--global-batch"), Value::integer(options.global_batch)},
      {Value::string("--seed"), Value::integer(static_cast<int64_t>(options.seed))},
      {Value::string("--optimizer"), Value::string(to_string(o.kind))},
      {Value::string("--lr"), Value::real(o.lr)},
      {Value::string("--momentum"), Value::real(o.momentum)},
      {Value::string("--weight-decay"), Value::real(o.weight_decay)},
      {Value::string("--clip"), Value::real(options.clip_norm)},
      {Value::string("--arithmetic"), Value::string(options.model.canonical ? "canonical" : "native")},
  };
  // Checkpoints are older than these options: what is not there is the default.
  const auto add = [&](bool given, const char* option, Value value) {
    if (given) run.emplace_back(Value::string(option), std::move(value));
  };
  add(options.bf16, "--precision", Value::string("bf16"));
  add(d.type != TokenType::uint8, "--token-type", Value::string(to_string(d.type)));
  add(d.shuffle.has_value(), kShuffle, Value::integer(static_cast<int64_t>(d.shuffle.value_or(0))));
  const TrainSchedule& s = options.schedule;
  add(s.kind != "constant", "--schedule", Value::string(s.kind));
  add(s.warmup > 0, "--warmup", Value::integer(s.warmup));
  add(s.ends(), "--schedule-steps", Value::integer(s.total));
  add(s.ends(), "--lr-last", Value::real(s.last));
  add(s.kind == "wsd", "--decay-steps", Value::integer(s.decay));
  add(d.validation_part > 0, "--validation-part", Value::real(d.validation_part));
  const auto contents = [](const TokenFiles& files) { return Value::string(fmt::format("{:016x}", files.fingerprint())); };
  add(true, kContents, contents(data.files()));
  if (const TokenFiles* const validation = data.validation_files()) add(true, kValidation, contents(*validation));
  return Value::dict(std::move(run));
}

Value value_of(const Stretch& stretch) {
  return Value::tuple({Value::integer(stretch.end), Value::string(stretch.mesh.str()), Value::string(stretch.strategy),
                       Value::integer(stretch.microbatch), Value::boolean(stretch.canonical)});
}

Stretch stretch_of(const Value& value) {
  const Value::Items& fields = value.as_list(kHistory);
  SHARD_REQUIRE(fields.size() == 5, "train", "the history in the checkpoint is not one that this program wrote");
  return {fields[0].as_int("steps"), shardproof::Mesh::parse(fields[1].as_string("mesh")), fields[2].as_string("strategy"),
          fields[3].as_int("microbatch"), fields[4].as_bool("canonical")};
}

// As it is given on a command line.
std::string in_words(const std::string& option, const Value& value) {
  if (option == kBytes) return fmt::format("--data of {} bytes", value.str());
  if (option == kContents || option == kValidation)
    return fmt::format("{} with the fingerprint {}", option.substr(0, option.find(' ')), value.as_string(option));
  return fmt::format("{} {}", option == kShuffle ? "--shuffle --data-seed" : option, value.str());
}

std::string without(const std::string& option) {
  return "no " + option.substr(0, option.find(' '));
}

// What is compared only where both runs say it: older checkpoints do not know contents, and validating is no part of training,
// so that a run may begin or cease to.
bool may_be_missing(const std::string& option) {
  return option == kContents || option == kValidation;
}

void require_same_run(const Value& saved, const Value& here, const std::string& folder) {
  std::vector<std::string> before, now, give, leave_out;
  for (const auto& [name, value] : saved.as_dict(kRun)) {
    const std::string& option = name.as_string(kRun);
    const Value* found = here.find(option);
    if (found ? *found == value : may_be_missing(option)) continue;
    before.push_back(in_words(option, value));
    now.push_back(found ? in_words(option, *found) : without(option));
    give.push_back(before.back());
  }
  for (const auto& [name, value] : here.as_dict(kRun)) {
    const std::string& option = name.as_string(kRun);
    if (saved.find(option) || may_be_missing(option)) continue;
    before.push_back(without(option));
    now.push_back(in_words(option, value));
    leave_out.push_back(now.back());
  }
  std::vector<std::string> advice;
  if (!give.empty()) advice.push_back(fmt::format("give {}", fmt::join(give, " ")));
  if (!leave_out.empty()) advice.push_back(fmt::format("leave out {}", fmt::join(leave_out, " ")));
  SHARD_REQUIRE(before.empty(), "train",
                "{} cannot be resumed with these options: it was saved with {}, and this run has {}. To go on, {}. Or begin "
                "another run, in another --checkpoint-dir",
                folder, fmt::join(before, ", "), fmt::join(now, ", "), fmt::join(advice, ", and "));
}

void require_valid(const TrainCheckpoints& checkpoints) {
  SHARD_REQUIRE(checkpoints.save_every >= 0, "train", "--save-every must be at least 1, or 0 for the last step only, got {}",
                checkpoints.save_every);
  SHARD_REQUIRE(checkpoints.keep >= 0, "train", "--keep must be at least 1, or 0 to keep all, got {}", checkpoints.keep);
  const char* needs = checkpoints.resume       ? "--resume"
                      : checkpoints.save_every ? "--save-every"
                      : checkpoints.keep       ? "--keep"
                      : checkpoints.async      ? "--async-save"
                                               : nullptr;
  SHARD_REQUIRE(!needs || !checkpoints.directory.empty(), "train", "{} needs --checkpoint-dir", needs);
}

std::string value_name(const char* name) { return fmt::format("trainer.values.{}", name); }

// One of the values that `trainer_state` adds to a checkpoint, if it is there.
std::optional<Value> value_if_saved(const std::string& folder, const char* name) {
  auto& files = shardproof::checkpoint::system_files();
  try {
    // The load looks at the files, on one rank for all.
    const auto checkpoint = shardproof::checkpoint::open_checked(files, folder, {.sums = false, .files = false}).checkpoint;
    const auto found = checkpoint.values.find(value_name(name));
    if (found == checkpoint.values.end()) return std::nullopt;
    return shardproof::checkpoint::read_value(files, folder, found->first, found->second);
  } catch (const shardproof::Error& error) {
    throw shardproof::Error(error.what() + shardproof::checkpoint::before_it(folder));
  }
}

std::string text_if_saved(const std::string& folder, const char* name) {
  const std::optional<Value> value = value_if_saved(folder, name);
  return value ? value->as_string(name) : "";
}

shardproof::checkpoint::HuggingFaceModel described_in(const std::string& folder) {
  const std::string config = text_if_saved(folder, kConfig);
  if (config.empty()) return {};
  auto model = shardproof::checkpoint::parse_hugging_face_config(config, folder + ": " + kConfig);
  model.generation = text_if_saved(folder, kGeneration);
  return model;
}

Value saved_value(const std::string& folder, const char* name) {
  std::optional<Value> value = value_if_saved(folder, name);
  SHARD_REQUIRE(value, "train", "{} was not written by `train`: it has no {}", folder, name);
  return std::move(*value);
}

// Rank 0 has looked, or else this process does.
std::optional<int64_t> latest_of(const TrainCheckpoints& checkpoints) {
  if (!checkpoints.latest) return shardproof::checkpoint::latest_step(checkpoints.directory);
  return *checkpoints.latest >= 0 ? checkpoints.latest : std::nullopt;
}

}  // namespace

const Stretch& TrainHistory::of(int64_t step) const {
  for (const Stretch& stretch : stretches)
    if (step < stretch.end) return stretch;
  return stretches.back();
}

TrainHistory read_history(const TrainOptions& options, const TrainingData& data) {
  const TrainCheckpoints& checkpoints = options.checkpoints;
  require_valid(checkpoints);
  TrainHistory history;
  if (!options.weights.empty()) history.weights = std::filesystem::absolute(options.weights).lexically_normal().string();
  std::optional<int64_t> latest;
  Value here;
  if (!checkpoints.directory.empty()) {
    latest = latest_of(checkpoints);
    here = describe_run(options, data);  // reads the data, which a save after a signal has no time for
  }
  if (latest) {
    const std::string folder = shardproof::checkpoint::step_folder(checkpoints.directory, *latest);
    SHARD_REQUIRE(checkpoints.resume, "train",
                  "there is {} already; go on from it with --resume, or choose another --checkpoint-dir", folder);
    require_same_run(saved_value(folder, kRun), here, folder);
    history.weights = text_if_saved(folder, kWeights);
    SHARD_REQUIRE(!history.weights.empty() || options.weights.empty(), "train",
                  "{} is of a run that did not start from --weights, and this one has {}: leave them out, or begin another run",
                  folder, options.weights);
    history.described = described_in(folder);
    const Value saved = saved_value(folder, kHistory);
    for (const Value& stretch : saved.as_list(kHistory)) history.stretches.push_back(stretch_of(stretch));
    history.first_step = *latest;
    SHARD_REQUIRE(!history.stretches.empty() && history.stretches.back().end == *latest, "train",
                  "the history in {} does not end with its step", folder);
    SHARD_REQUIRE(options.steps >= *latest, "train",
                  "{} is after {} steps, and --steps {} counts from the beginning of the run; give at least {}", folder,
                  *latest, options.steps, *latest);
  }
  if (!latest && !options.weights.empty())
    history.described = shardproof::checkpoint::read_hugging_face_config(options.weights);
  history.stretches.push_back({options.steps, options.mesh, options.strategy, options.microbatch, options.canonical});
  return history;
}

int64_t first_step(const TrainOptions& options, const TrainingData& data) {
  return read_history(options, data).first_step;
}

SavedModel saved_model(const std::string& path) {
  SavedModel saved{.folder = path, .model = {}, .described = {}};
  const std::optional<int64_t> latest = shardproof::checkpoint::latest_step(path);
  if (latest) saved.folder = shardproof::checkpoint::step_folder(path, *latest);
  const Value run = saved_value(saved.folder, kRun);
  const auto text = [&](const char* option) {
    const Value* found = run.find(option);
    return found ? found->as_string(option) : "";
  };
  saved.model = parse_model(text("--model"));
  saved.described = described_in(saved.folder);
  if (const std::string type = text("--token-type"); !type.empty()) saved.type = token_type(type);
  return saved;
}

std::optional<SavedModel> model_to_resume(const TrainCheckpoints& checkpoints) {
  if (!checkpoints.resume || checkpoints.directory.empty()) return std::nullopt;
  const std::optional<int64_t> latest = latest_of(checkpoints);
  if (!latest) return std::nullopt;
  return saved_model(shardproof::checkpoint::step_folder(checkpoints.directory, *latest));
}

SavedModel model_in_weights(const std::string& folder) {
  SavedModel saved{.folder = folder, .are_weights = true, .model = model_of_weights(folder), .described = {}};
  if (saved.model.vocab() > 256) saved.type = TokenType::uint32;
  return saved;
}

std::optional<SavedModel> model_if_trained(const std::string& folder) {
  if (!std::filesystem::exists(folder + "/" + shardproof::checkpoint::kMetadataFile)) return std::nullopt;
  const auto checkpoint = shardproof::checkpoint::open_checkpoint(shardproof::checkpoint::system_files(), folder);
  if (!checkpoint.values.contains(value_name(kRun))) return std::nullopt;
  return saved_model(folder);
}

shardproof::checkpoint::TrainerState trainer_state(const TrainOptions& options, const TrainingData& data,
                                                   const TrainHistory& history, int64_t step) {
  Value::Items stretches;
  for (Stretch stretch : history.stretches) {
    stretch.end = std::min(stretch.end, step);
    stretches.push_back(value_of(stretch));
  }
  shardproof::checkpoint::TrainerState state{.step = step, .schedule_step = step, .data_position = step * options.global_batch};
  state.values[kRun] = describe_run(options, data);
  state.values[kHistory] = Value::list(std::move(stretches));
  const auto keep = [&](const char* name, const std::string& text) {
    if (!text.empty()) state.values[name] = Value::string(text);
  };
  keep(kWeights, history.weights);
  keep(kConfig, history.described.source);
  keep(kGeneration, history.described.generation);
  return state;
}

}  // namespace harness
