#include "harness/plan/machine.h"

#include <fmt/ranges.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "shardproof/base/check.h"

namespace harness {
namespace {

using nlohmann::json;

constexpr double kTera = 1e12, kGiga = 1e9, kMicrosecond = 1e-6, kGibibyte = 1073741824.0;
constexpr double kBytesMax = 0x1p62;  // fits into 64 bits as a whole number of bytes

// Rates of products are those of dense matrices in NVIDIA's data sheets; float32 is computed in TF32 there, which a program has
// to allow. `efficiency` is a guess for large products, and the bandwidths are 80% of what the data sheets say, which NCCL's
// tests reach. Latencies are the steps of NCCL's rings inside a host and between hosts (its src/graph/tuning.cc, protocol
// Simple).
std::vector<Machine> make_known_machines() {
  constexpr const char* kNetwork =
      "; eight GPUs and eight InfiniBand adapters a host; NCCL's src/graph/tuning.cc for latencies";
  const auto gpus = [&](const char* name, std::string sheet, double products, double tf32, double memory_gib,
                        double memory_rate, double nvlink, double network_bits) {
    return Machine{.name = name,
                   .source = std::move(sheet) + kNetwork,
                   .flops = {{"float32", tf32 * kTera}, {"bf16", products * kTera}, {"fp16", products * kTera}},
                   .efficiency = 0.7,
                   .memory_bytes = memory_gib * kGibibyte,
                   .memory_bytes_per_second = 0.8 * memory_rate * kGiga,
                   .operator_seconds = 4 * kMicrosecond,
                   .ranks_per_host = 8,
                   .inside = {3.4 * kMicrosecond, 0.8 * nvlink * kGiga},
                   .between = {9.6 * kMicrosecond, 0.8 * network_bits / 8 * kGiga}};
  };
  return {gpus("a100", "NVIDIA A100 80GB SXM data sheet", 312, 156, 80, 2039, 300, 200),
          gpus("h100", "NVIDIA H100 SXM data sheet", 989, 494, 80, 3350, 450, 400),
          gpus("h200", "NVIDIA H200 SXM data sheet", 989, 494, 141, 4800, 450, 400)};
}

json link_json(const Link& link) {
  return {{"seconds", link.seconds}, {"bytes_per_second", link.bytes_per_second}};
}

Link link_from(const json& object) {
  return {object.at("seconds"), object.at("bytes_per_second")};
}

int64_t ranks_from(const char* field, const json& value) {
  const bool fits = value.is_number_unsigned() ? value.get<uint64_t>() <= INT64_MAX : value.is_number_integer();
  SHARD_REQUIRE(fits, "plan", "{} is {}, and ranks are counted in whole numbers of 63 bits", field, value.dump());
  return value;
}

Machine machine_from(const json& object) {
  Machine machine;
  machine.name = object.at("name");
  machine.source = object.value("source", "");
  machine.flops = object.at("flops").get<std::map<std::string, double>>();
  machine.efficiency = object.value("efficiency", 1.0);
  machine.memory_bytes = object.at("memory_bytes");
  machine.memory_bytes_per_second = object.at("memory_bytes_per_second");
  machine.operator_seconds = object.value("operator_seconds", 0.0);
  machine.ranks_per_host = ranks_from("ranks_per_host", object.at("ranks_per_host"));
  machine.ranks_at_once = ranks_from("ranks_at_once", object.value("ranks_at_once", json(0)));
  machine.overlaps = object.value("overlaps", true);
  machine.inside = link_from(object.at("inside"));
  machine.between = link_from(object.at("between"));
  return machine;
}

}  // namespace

const std::vector<Machine>& known_machines() {
  static const std::vector<Machine> all = make_known_machines();
  return all;
}

Machine read_machine(const std::string& path) {
  std::ifstream file(path);
  SHARD_REQUIRE(file.good(), "plan", "cannot read the machine's file {}", path);
  try {
    Machine machine = machine_from(json::parse(file));
    validate(machine);
    return machine;
  } catch (const json::exception& error) {
    throw shardproof::Error(shardproof::message(
        "[plan] {} does not describe a machine: {}. `plan --calibrate FILE` writes such a file", path, error.what()));
  } catch (const shardproof::Error& error) {
    throw shardproof::Error(shardproof::message("{}, in {}", error.what(), path));
  }
}

void write_machine(const Machine& machine, const std::string& path) {
  const json object = {{"name", machine.name},
                       {"source", machine.source},
                       {"flops", machine.flops},
                       {"efficiency", machine.efficiency},
                       {"memory_bytes", machine.memory_bytes},
                       {"memory_bytes_per_second", machine.memory_bytes_per_second},
                       {"operator_seconds", machine.operator_seconds},
                       {"ranks_per_host", machine.ranks_per_host},
                       {"ranks_at_once", machine.ranks_at_once},
                       {"overlaps", machine.overlaps},
                       {"inside", link_json(machine.inside)},
                       {"between", link_json(machine.between)}};
  std::ofstream file(path);
  file << object.dump(2) << "\n";
  file.close();
  SHARD_REQUIRE(file.good(), "plan", "cannot write the machine's file {}", path);
}

void validate(const Machine& machine) {
  const auto require = [&](bool holds, const char* field, double value) {
    SHARD_REQUIRE(holds, "plan", "machine '{}': {} is {}, which no machine has", machine.name, field, value);
  };
  SHARD_REQUIRE(!machine.flops.empty(), "plan", "machine '{}': flops has no dtype", machine.name);
  for (const auto& [dtype, rate] : machine.flops) {
    SHARD_REQUIRE(dtype == "float32" || dtype == "bf16" || dtype == "fp16", "plan",
                  "machine '{}': flops has the dtype '{}'; there are float32, bf16 and fp16", machine.name, dtype);
    require(rate > 0, "flops", rate);
  }
  require(machine.efficiency > 0 && machine.efficiency <= 1, "efficiency", machine.efficiency);
  require(machine.memory_bytes > 0 && machine.memory_bytes <= kBytesMax, "memory_bytes", machine.memory_bytes);
  require(machine.memory_bytes_per_second > 0, "memory_bytes_per_second", machine.memory_bytes_per_second);
  require(machine.operator_seconds >= 0, "operator_seconds", machine.operator_seconds);
  require(machine.ranks_per_host >= 1, "ranks_per_host", static_cast<double>(machine.ranks_per_host));
  require(machine.ranks_at_once >= 0, "ranks_at_once", static_cast<double>(machine.ranks_at_once));
  for (const Link& link : {machine.inside, machine.between}) {
    require(link.seconds >= 0, "seconds", link.seconds);
    require(link.bytes_per_second > 0, "bytes_per_second", link.bytes_per_second);
  }
}

}  // namespace harness
