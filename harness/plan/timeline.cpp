#include "harness/plan/timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Op;

const char* name_of(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? "bf16" : dtype == at::kHalf ? "fp16" : "float32";
}

// How many ranks take turns on a core.
double crowd_of(const Machine& machine, int64_t ranks_on_host) {
  const bool shares = machine.ranks_at_once > 0 && ranks_on_host > machine.ranks_at_once;
  return shares ? static_cast<double>(ranks_on_host) / static_cast<double>(machine.ranks_at_once) : 1;
}

double steps_between(int64_t hosts) {
  return std::ceil(std::log2(static_cast<double>(hosts)));
}

}  // namespace

double operator_seconds(const Operator& what, const Machine& machine, int64_t ranks_on_host) {
  double products = 0;
  if (what.flops > 0) {
    const auto rate = machine.flops.find(name_of(what.dtype));
    SHARD_REQUIRE(rate != machine.flops.end(), "plan", "machine '{}' does not say how fast it multiplies in {}", machine.name,
                  name_of(what.dtype));
    products = what.flops / (rate->second * machine.efficiency);
  }
  return crowd_of(machine, ranks_on_host) *
         std::max({machine.operator_seconds, products, what.bytes / machine.memory_bytes_per_second});
}

Spread spread_of(const RankGroup& group, const Machine& machine) {
  std::map<int64_t, int64_t> of_host;
  for (const int64_t rank : group.ranks) ++of_host[rank / machine.ranks_per_host];
  Spread spread{std::ssize(group.ranks), std::ssize(of_host), 1};
  for (const auto& [host, ranks] : of_host) spread.on_a_host = std::max(spread.on_a_host, ranks);
  return spread;
}

double collective_seconds(const Collective& what, const Spread& spread, const Machine& machine) {
  if (spread.ranks <= 1) return 0;
  const double ranks = static_cast<double>(spread.ranks), on_a_host = static_cast<double>(spread.on_a_host);
  const double passes = what.op == Op::all_reduce ? 2 : 1;
  if (what.to_one && spread.hosts > 1)  // the slowest of the messages goes to another host
    return machine.between.seconds + static_cast<double>(what.bytes) / machine.between.bytes_per_second;
  double latency = (what.to_one ? 1 : on_a_host - 1) * machine.inside.seconds;
  double rate = machine.inside.bytes_per_second;
  if (spread.hosts > 1) {
    latency += steps_between(spread.hosts) * machine.between.seconds;
    const double through = on_a_host * machine.between.bytes_per_second;
    rate = on_a_host > 1 ? std::min(rate, through) : through;
  }
  const bool is_one_message = what.op == Op::send || what.op == Op::recv || what.op == Op::broadcast || what.to_one;
  const double part = is_one_message ? 1 : (ranks - 1) / ranks;
  // Of an all_to_all each rank sends for itself, and nobody passes it on.
  if (what.op == Op::all_to_all && spread.hosts > 1)
    rate = machine.between.bytes_per_second * ranks / (ranks - on_a_host) * part;
  return passes * (latency + part * static_cast<double>(what.bytes) / rate);
}

StepTime walk(const StepRecord& record, const Machine& machine) {
  StepTime time;
  std::vector<Spread> spreads;
  int64_t ranks_on_host = 1;
  for (const RankGroup& group : record.groups) {
    spreads.push_back(spread_of(group, machine));
    ranks_on_host = std::max(ranks_on_host, spreads.back().on_a_host);
  }
  // Where the ranks' own threads carry what is sent, they take turns with that, too.
  const double carrying = machine.overlaps ? 1 : crowd_of(machine, ranks_on_host);
  std::vector<bool> is_carried(record.collectives.size(), false);
  std::vector<double> ends(record.collectives.size(), 0);
  std::array<double, 2> free_at{};  // the links inside a host, and between hosts
  double now = 0;
  const auto carry_out = [&](size_t index, double earliest) {
    const Collective& what = record.collectives[index];
    double& free = free_at[spreads[what.group].hosts > 1 ? 1 : 0];
    const double seconds = carrying * collective_seconds(what, spreads[what.group], machine), begin = std::max(earliest, free);
    time.communicating += seconds;
    time.communicating_by_group[record.groups[what.group].name] += seconds;
    ends[index] = free = begin + seconds;
    is_carried[index] = true;
  };
  const auto wait_until = [&](double end) {
    time.waiting += std::max(0.0, end - now);
    now = std::max(now, end);
  };
  for (const StepEvent& event : record.events) {
    switch (event.kind) {
      case StepEvent::Kind::compute: {
        const double seconds = operator_seconds(record.operators[event.index], machine, ranks_on_host);
        time.computing += seconds;
        now += seconds;
        break;
      }
      case StepEvent::Kind::start:
        if (machine.overlaps) carry_out(event.index, now);
        break;
      case StepEvent::Kind::wait:
        if (!is_carried[event.index]) carry_out(event.index, now);
        wait_until(ends[event.index]);
        break;
    }
  }
  // What nobody awaited is over at the end of the step, too.
  for (size_t i = 0; i < is_carried.size(); ++i) {
    if (!is_carried[i]) carry_out(i, now);
    wait_until(ends[i]);
  }
  time.seconds = now;
  return time;
}

double efficiency_of(const StepRecord& record, Machine machine, double seconds) {
  // A higher efficiency never makes a step longer, so halving an interval finds it.
  double low = 0.05, high = 1;
  for (int i = 0; i < 40; ++i) {
    machine.efficiency = (low + high) / 2;
    (walk(record, machine).seconds > seconds ? low : high) = machine.efficiency;
  }
  return high;
}

std::string seconds_text(double seconds) {
  if (seconds >= 100) return fmt::format("{:.0f} s", seconds);
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} us", seconds * 1e6);
}

}  // namespace harness
