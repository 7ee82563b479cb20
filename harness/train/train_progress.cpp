#include "harness/train/train_progress.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "shardproof/base/check.h"

namespace harness {
namespace {

constexpr std::chrono::seconds kBetweenLines{5};

std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  return whole < 60 ? fmt::format("{} s", whole) : fmt::format("{} min {:02} s", whole / 60, whole % 60);
}

std::unique_ptr<std::FILE, int (*)(std::FILE*)> open_report(const std::string& path) {
  const auto leave_open = [](std::FILE*) { return 0; };
  if (path.empty()) return {nullptr, leave_open};
  if (path == "-") return {stdout, leave_open};
  std::FILE* file = std::fopen(path.c_str(), "w");
  SHARD_REQUIRE(file, "train", "cannot write {}: {}; name another file with --json", path,
                std::strerror(errno));
  return {file, std::fclose};
}

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

TrainProgress::TrainProgress(std::FILE* out, int64_t first, int64_t steps)
    : out_(out), first_(first), steps_(steps), terminal_(::isatty(::fileno(out)) == 1) {}

void TrainProgress::show(const TrainStep& step) {
  const int64_t done = step.step + 1, tenth = done * 10 / steps_;
  const auto now = Clock::now();
  if (!terminal_ && done > first_ + 1 && tenth == tenth_shown_ && now - shown_at_ < kBetweenLines) return;
  const double elapsed = std::chrono::duration<double>(now - start_).count();
  const std::string left = done == steps_
                               ? ""
                               : fmt::format("  {} left", duration(elapsed / static_cast<double>(done - first_) *
                                                                   static_cast<double>(steps_ - done)));
  fmt::print(out_, "{}step {:>{}}/{}  loss {:.4f}  gradient norm {:.4f}  {:>7} tokens/s{}{}",
             terminal_ ? "\r\033[K" : "", done, std::to_string(steps_).size(), steps_, step.loss,
             step.gradient_norm, grouped(static_cast<int64_t>(step.tokens_per_s)), left,
             terminal_ ? "" : "\n");
  std::fflush(out_);
  open_line_ = terminal_;
  shown_at_ = now;
  tenth_shown_ = tenth;
}

void TrainProgress::end_line() {
  if (open_line_) fmt::print(out_, "\n");
  open_line_ = false;
}

TrainJson::TrainJson(const std::string& path) : file_(open_report(path)) {}

void TrainJson::line(const std::string& text) {
  if (!file_) return;
  fmt::print(file_.get(), "{}\n", text);
  std::fflush(file_.get());
}

void TrainJson::run(const std::string& description, const TrainingData& data, const TrainOptions& options) {
  line(fmt::format(
      R"({{"type":"run","run":{},"mesh":{},"strategy":{},"seed":{},"files":{},"bytes":{},"sequences":{},)"
      R"("sequence_length":{},"global_batch":{},"microbatch":{},"steps":{},"token_type":"{}","shuffle":{}}})",
      quoted(description), quoted(options.mesh.str()), quoted(options.strategy), options.seed,
      data.files().files().size(), data.files().bytes(), data.sequences(), data.sequence_length(), options.global_batch,
      options.microbatch, options.steps, to_string(data.files().type()),
      data.options().shuffle ? std::to_string(*data.options().shuffle) : "null"));
}

void TrainJson::step(const TrainStep& step) {
  line(fmt::format(
      R"({{"type":"step","step":{},"loss":{:.17g},"gradient_norm":{:.17g},"tokens":{},"tokens_per_s":{:.17g},)"
      R"("data_fnv1a":"{:016x}"}})",
      step.step, step.loss, step.gradient_norm, step.tokens, step.tokens_per_s, step.data_checksum));
}

void TrainJson::end(const TrainResult& result, bool checked) {
  line(fmt::format(
      R"({{"type":"end","first_step":{},"steps":{},"checked":{},"equal":{},"values_compared":{},"difference":{}}})",
      result.first_step, result.steps, checked, checked ? (result.difference ? "false" : "true") : "null",
      result.values_compared, result.difference ? quoted(*result.difference) : "null"));
}

}  // namespace harness
