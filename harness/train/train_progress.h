// What a person sees of a training run, and the JSON lines that a program reads.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>

#include "harness/train/event_file.h"
#include "harness/train/train.h"

namespace harness {

// 1234567 as "1,234,567".
std::string grouped(int64_t number);

// 1572864 as "1.50 MiB".
std::string size_text(int64_t bytes);

// 81.4 as "1 min 21 s".
std::string duration_text(double seconds);

// The numbers of each step for TensorBoard, by the number of steps done; "" writes nothing.
class TrainEvents {
 public:
  // Of a run whose next step is `first`.
  TrainEvents(const std::string& directory, int64_t first);
  void step(const TrainStep& step);

 private:
  EventFile file_;
};

// One line that is rewritten on a terminal; elsewhere a line every tenth of the run or five seconds.
class TrainProgress {
 public:
  // Of steps [first, steps).
  TrainProgress(std::FILE* out, int64_t first, int64_t steps);
  ~TrainProgress() { end_line(); }

  void show(const TrainStep& step);
  // Names each rank that begins to hold up the others.
  void name_slow_ranks(const TrainStep& step);
  // Ends the line that is being rewritten, if there is one.
  void end_line();

 private:
  using Clock = std::chrono::steady_clock;

  std::FILE* out_;
  int64_t first_, steps_;
  bool terminal_;
  bool open_line_ = false;
  Clock::time_point start_ = Clock::now(), shown_at_ = start_;
  int64_t tenth_shown_ = -1;
};

// One JSON object a line, flushed as it is written. Numbers have 17 significant digits, so they read back
// exactly.
class TrainJson {
 public:
  // "" writes nothing, "-" is standard output. The file of a run that goes on (`first` > 0) is appended to, after what it has
  // of steps from `first` on was taken away; that of a run that begins is emptied. Throws Error when it cannot be written.
  TrainJson(const std::string& path, int64_t first);

  void run(const std::string& description, const TrainingData& data, const TrainOptions& options);
  void step(const TrainStep& step);
  void end(const TrainResult& result, bool checked);

 private:
  void line(const std::string& text);

  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace harness
