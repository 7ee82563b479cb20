#include "harness/train/train_progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fmt/ranges.h>
#include <fstream>
#include <nlohmann/json.hpp>

#include "harness/run/verbosity.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

constexpr std::chrono::seconds kBetweenLines{5};

// A longer line could not be rewritten.
size_t columns_of(std::FILE* terminal) {
  struct winsize size {};
  return ::ioctl(::fileno(terminal), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

// Steps from `first` on come again, so the file ends before the first of them, and before a line that a kill has cut off.
void cut_before_step(const std::string& path, int64_t first) {
  std::error_code none;
  if (!std::filesystem::is_regular_file(path, none)) return;
  std::ifstream lines(path, std::ios::binary);
  uintmax_t kept = 0;
  for (std::string line; std::getline(lines, line) && !lines.eof(); kept += line.size() + 1) {
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_object() && json.contains("type") && json["type"] == "step" && json.value("step", first) >= first) break;
  }
  std::filesystem::resize_file(path, kept, none);
}

std::unique_ptr<std::FILE, int (*)(std::FILE*)> open_report(const std::string& path, int64_t first) {
  const auto leave_open = [](std::FILE*) { return 0; };
  if (path.empty()) return {nullptr, leave_open};
  if (path == "-") return {stdout, leave_open};
  if (first > 0) cut_before_step(path, first);
  std::FILE* file = std::fopen(path.c_str(), first > 0 ? "a" : "w");
  SHARD_REQUIRE(file, "train", "cannot write {}: {}; name another file with --json", path,
                std::strerror(errno));
  return {file, std::fclose};
}

// JSON has no other numbers.
std::string json_number(double value) { return std::isfinite(value) ? fmt::format("{:.17g}", value) : "null"; }

std::string quoted(const std::string& text) {
  return nlohmann::json(text).dump();
}

}  // namespace

std::string grouped(int64_t number) {
  std::string digits = std::to_string(number);
  for (auto at = static_cast<int64_t>(digits.size()) - 3; at > (number < 0 ? 1 : 0); at -= 3)
    digits.insert(digits.begin() + at, ',');
  return digits;
}

std::string size_text(int64_t bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto size = static_cast<double>(bytes);
  int unit = 0;
  for (; size >= 1024 && unit < 4; ++unit) size /= 1024;
  return fmt::format("{:.{}f} {}", size, unit == 0 ? 0 : 2, units[unit]);
}

std::string duration_text(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {:02} s", whole / 60, whole % 60);
  return fmt::format("{} h {:02} min", whole / 3600, whole / 60 % 60);
}

TrainEvents::TrainEvents(const std::string& directory, int64_t first) : file_(directory, first + 1) {}

void TrainEvents::step(const TrainStep& step) {
  std::vector<std::pair<std::string, double>> values = {{"loss/train", step.loss},
                                                        {"learning_rate", step.learning_rate},
                                                        {"norm/gradient", step.gradient_norm},
                                                        {"norm/parameters", step.parameter_norm},
                                                        {"zero_gradients", static_cast<double>(step.zero_gradients)},
                                                        {"tokens_per_s", step.tokens_per_s},
                                                        {"held_bytes", static_cast<double>(step.held_bytes)}};
  if (step.validation_loss) values.emplace_back("loss/validation", *step.validation_loss);
  file_.scalars(step.step + 1, values);
}

TrainProgress::TrainProgress(std::FILE* out, int64_t first, int64_t steps)
    : out_(out), first_(first), steps_(steps), terminal_(::isatty(::fileno(out)) == 1 && verbosity() != Verbosity::verbose) {}

void TrainProgress::show(const TrainStep& step) {
  const int64_t done = step.step + 1, tenth = done * 10 / steps_;
  const auto now = Clock::now();
  // What was validated stays on a terminal too.
  if (verbosity() == Verbosity::quiet) return;
  const bool shown = verbosity() == Verbosity::verbose || step.validation_loss || done == first_ + 1 ||
                     tenth != tenth_shown_ || now - shown_at_ >= kBetweenLines;
  if (!terminal_ && !shown) return;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const std::string left = done == steps_
                               ? ""
                               : fmt::format("  {} left", duration_text(elapsed / static_cast<double>(done - first_) *
                                                                        static_cast<double>(steps_ - done)));
  std::string line = fmt::format("step {:>{}}/{}  loss {:.4f}", done, std::to_string(steps_).size(), steps_, step.loss);
  if (step.validation_loss) line += fmt::format("  validation loss {:.4f}", *step.validation_loss);
  line += fmt::format("  gradient norm {:.4f}  {:>7} tokens/s{}  parameter norm {:.2f}  lr {:.2e}  {}", step.gradient_norm,
                      grouped(static_cast<int64_t>(step.tokens_per_s)), left, step.parameter_norm, step.learning_rate,
                      size_text(step.held_bytes));
  if (terminal_) line.resize(std::min(line.size(), columns_of(out_) - 1));
  fmt::print(out_, "{}{}{}", terminal_ ? "\r\033[K" : "", line, terminal_ && !step.validation_loss ? "" : "\n");
  std::fflush(out_);
  open_line_ = terminal_ && !step.validation_loss;
  shown_at_ = now;
  tenth_shown_ = tenth;
}

void TrainProgress::name_slow_ranks(const TrainStep& step) {
  for (const SlowRank& slow : step.slow_ranks) {
    if (slow.steps != kSlowSteps) continue;
    end_line();
    fmt::print(out_, "slow   rank {} computed {:.3g} s in step {}, and the median of the ranks {:.3g} s; so for {} steps\n",
               slow.rank, slow.seconds, step.step + 1, slow.median, slow.steps);
    std::fflush(out_);
  }
}

void TrainProgress::end_line() {
  if (open_line_) fmt::print(out_, "\n");
  open_line_ = false;
}

TrainJson::TrainJson(const std::string& path, int64_t first) : file_(open_report(path, first)) {}

void TrainJson::line(const std::string& text) {
  if (!file_) return;
  const bool written = std::fputs((text + '\n').c_str(), file_.get()) >= 0 && std::fflush(file_.get()) == 0;
  SHARD_REQUIRE(written, "json", "writing a line of --json failed: {}", std::strerror(errno));
}

void TrainJson::run(const std::string& description, const TrainingData& data, const TrainOptions& options) {
  line(fmt::format(
      R"({{"type":"run","run":{},"mesh":{},"strategy":{},"seed":{},"files":{},"bytes":{},"sequences":{},)"
      R"("sequence_length":{},"global_batch":{},"microbatch":{},"steps":{},"token_type":"{}","shuffle":{},)"
      R"("validation_sequences":{}}})",
      quoted(description), quoted(options.mesh.str()), quoted(options.strategy), options.seed,
      data.files().files().size(), data.files().bytes(), data.sequences(), data.sequence_length(), options.global_batch,
      options.microbatch, options.steps, to_string(data.files().type()),
      data.options().shuffle ? std::to_string(*data.options().shuffle) : "null", data.validation_sequences()));
}

void TrainJson::step(const TrainStep& step) {
  std::vector<int64_t> slow;
  for (const SlowRank& rank : step.slow_ranks) slow.push_back(rank.rank);
  line(fmt::format(
      R"({{"type":"step","step":{},"loss":{:.17g},"gradient_norm":{:.17g},"tokens":{},"tokens_per_s":{:.17g},)"
      R"("data_fnv1a":"{:016x}","validation_loss":{},"lr":{:.17g},"parameter_norm":{},"zero_gradients":{},"held_bytes":{},)"
      R"("slow_ranks":[{}]}})",
      step.step, step.loss, step.gradient_norm, step.tokens, step.tokens_per_s, step.data_checksum,
      json_number(step.validation_loss.value_or(NAN)), step.learning_rate, json_number(step.parameter_norm),
      step.zero_gradients, step.held_bytes, fmt::join(slow, ",")));
}

void TrainJson::end(const TrainResult& result, bool checked) {
  line(fmt::format(R"({{"type":"end","first_step":{},"steps":{},"checked":{},"equal":{},"values_compared":{},"difference":{},)"
                   R"("stopped":{}}})",
                   result.first_step, result.steps, checked, checked ? (result.difference ? "false" : "true") : "null",
                   result.values_compared, result.difference ? quoted(result.difference->str()) : "null", result.stopped));
}

}  // namespace harness
