#include "shardproof/comm/require_same.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>
#include <fstream>
#include <set>

#include "comm/owning_tensor.h"
#include "shardproof/base/check.h"
#include "testing/base/call_label.h"

namespace shardproof {
namespace {

uint64_t hash_of(const std::string& bytes, uint64_t hash = 0xcbf29ce484222325) {
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return hash;
}

// A value's hash and its beginning, so that long ones differ as well.
struct Fact {
  uint64_t hash = 0;
  char text[184] = {};
};

std::string shown(const Fact& fact) {
  const std::string text(fact.text, ::strnlen(fact.text, sizeof fact.text));
  return fmt::format("'{}'{}", text, text.size() + 1 == sizeof fact.text ? fmt::format("... ({:016x})", fact.hash) : "");
}

}  // namespace

void require_same(Comm& comm, const std::vector<std::pair<std::string, std::string>>& facts) {
  const auto bytes = static_cast<int64_t>(facts.size() * sizeof(Fact));
  const at::Tensor own = owning_tensor(std::vector<uint8_t>(static_cast<size_t>(bytes))),
                   gathered = owning_tensor(std::vector<uint8_t>(static_cast<size_t>(comm.size() * bytes)));
  auto* const mine = static_cast<Fact*>(own.mutable_data_ptr());
  const auto* const all = static_cast<const Fact*>(gathered.const_data_ptr());
  for (size_t i = 0; i < facts.size(); ++i) {
    mine[i].hash = hash_of(facts[i].second);
    facts[i].second.copy(mine[i].text, sizeof mine[i].text - 1);
  }
  const CallLabel label("the check that all ranks are of one job");
  comm.all_gather(gathered, own).wait();
  for (size_t i = 0; i < facts.size(); ++i)
    for (int64_t rank = 1; rank < comm.size(); ++rank) {
      const Fact& first = all[i];
      const Fact& other = all[static_cast<size_t>(rank) * facts.size() + i];
      SHARD_REQUIRE(first.hash == other.hash, "launch",
                    "ranks 0 and {} do not run the same: the {} is {} on rank 0 and {} on rank {}. Start all ranks alike", rank,
                    facts[i].first, shown(first), shown(other), rank);
    }
}

std::string program_hash() {
  std::set<std::string> files = {"/proc/self/exe"};
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find('/');
    if (path != std::string::npos && line.find("libshardproof") != std::string::npos) files.insert(line.substr(path));
  }
  uint64_t hash = hash_of("");
  std::string block(1 << 16, '\0');
  for (const std::string& path : files) {
    std::ifstream file(path, std::ios::binary);
    while (file) {
      file.read(block.data(), static_cast<std::streamsize>(block.size()));
      hash = hash_of(block.substr(0, static_cast<size_t>(file.gcount())), hash);
    }
  }
  return fmt::format("{:016x}", hash);
}

}  // namespace shardproof
