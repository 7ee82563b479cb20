#include "harness/commands/progress.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "harness/run/verbosity.h"
#include "harness/train/train_progress.h"

namespace harness {
namespace {

using std::chrono::steady_clock;

std::string bar(double fraction) {
  constexpr size_t kWidth = 24;
  const auto full = static_cast<size_t>(std::clamp(fraction, 0.0, 1.0) * kWidth);
  return "[" + std::string(full, '#') + std::string(kWidth - full, '.') + "]";
}

}  // namespace

Progress::Progress() : terminal_(isatty(STDERR_FILENO) == 1), start_(steady_clock::now()), next_(start_) {}

double Progress::seconds() const { return std::chrono::duration<double>(steady_clock::now() - start_).count(); }

void Progress::show(double fraction, const std::string& text) {
  const auto now = steady_clock::now();
  if (now < next_ || verbosity() == Verbosity::quiet) return;
  next_ = now + (terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(5000));
  const std::string left = fraction > 0 ? fmt::format("  {} left", duration_text(seconds() * (1 - fraction) / fraction)) : "";
  const std::string line = fmt::format("{} {:3.0f}%  {}{}", bar(fraction), fraction * 100, text, left);
  fmt::print(stderr, "{}{}{}", terminal_ ? "\r\033[K" : "", line, terminal_ ? "" : "\n");
  std::fflush(stderr);
}

void Progress::clear() {
  if (!terminal_ || verbosity() == Verbosity::quiet) return;
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
}

}  // namespace harness
