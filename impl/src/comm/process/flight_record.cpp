#include "internal/comm/flight_record.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "shardproof/base/escape.h"

namespace shardproof {
namespace {

double clock_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : is_utf8(text) ? text : escaped(text)) {
    if (c == '"' || c == '\\') out += '\\';
    if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      out += c;
  }
  return out + '"';
}

const char* to_string(FlightCall::State state) {
  switch (state) {
    case FlightCall::State::started:
      return "started";
    case FlightCall::State::done:
      return "done";
    case FlightCall::State::failed:
      return "failed";
  }
  return "?";
}

std::string line_of(const FlightCall& c) {
  return fmt::format(
      "{{\"group\":\"{:016x}\",\"name\":{},\"ranks\":[{}],\"sequence\":{},\"op\":\"{}\",\"reduce\":\"{}\",\"dtype\":\"{}\","
      "\"numel\":{},\"peer\":{},\"bytes\":{},\"for\":{},\"state\":\"{}\",\"start_s\":{:.6f},\"end_s\":{:.6f}}}\n",
      c.group->id, quoted(c.group->name), fmt::join(c.group->ranks, ","), c.sequence, c.op, c.reduce, c.dtype, c.numel, c.peer,
      c.bytes, quoted(c.label), to_string(c.state), c.start_s, c.end_s);
}

}  // namespace

FlightRecord::FlightRecord(int64_t rank, int64_t world, int64_t calls_max)
    : rank_(rank), world_(world), calls_max_(std::max<int64_t>(1, calls_max)), begin_s_(clock_s()) {}

double FlightRecord::now_s() const {
  return clock_s() - begin_s_;
}

int64_t FlightRecord::add(FlightCall call) {
  call.start_s = now_s();
  const std::lock_guard lock(mutex_);
  if (next_ < calls_max_)
    calls_.push_back(std::move(call));
  else
    calls_[static_cast<size_t>(next_ % calls_max_)] = std::move(call);
  return next_++;
}

void FlightRecord::mark(int64_t number, FlightCall::State state) {
  const std::lock_guard lock(mutex_);
  if (number < 0 || number + calls_max_ < next_) return;  // overwritten meanwhile
  FlightCall& call = calls_[static_cast<size_t>(number % calls_max_)];
  call.state = state;
  call.end_s = now_s();
}

std::string FlightRecord::last() const {
  const std::lock_guard lock(mutex_);
  if (next_ == 0) return "";
  const FlightCall& c = calls_[static_cast<size_t>((next_ - 1) % calls_max_)];
  std::string what = c.op;
  if (c.numel > 0) what += fmt::format("({}{}{} x {})", c.reduce, *c.reduce ? ", " : "", c.dtype, c.numel);
  return fmt::format("{}, call {} on '{}'{}", what, c.sequence, c.group->name, c.label.empty() ? "" : ", for " + c.label);
}

std::string FlightRecord::write(const std::string& directory, const std::string& why) const {
  std::error_code made;
  std::filesystem::create_directories(directory, made);
  const std::string path = fmt::format("{}/rank_{}.jsonl", directory, rank_);
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (!file) return fmt::format("cannot write the flight record {}: {}", path, std::strerror(errno));
  const std::lock_guard lock(mutex_);
  fmt::print(file, "{{\"rank\":{},\"world\":{},\"calls\":{},\"why\":{}}}\n", rank_, world_, next_, quoted(why));
  for (int64_t number = std::max<int64_t>(0, next_ - calls_max_); number < next_; ++number)
    fmt::print(file, "{}", line_of(calls_[static_cast<size_t>(number % calls_max_)]));
  const bool written = std::fflush(file) == 0;
  std::fclose(file);
  return written ? "" : fmt::format("cannot write the flight record {}: {}", path, std::strerror(errno));
}

}  // namespace shardproof
