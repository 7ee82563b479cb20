#include "shardproof/comm/require_same.h"

#include <ATen/ATen.h>
#include <ATen/Version.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "comm/owning_tensor.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/agree.h"
#include "internal/base/call_label.h"

namespace shardproof {
namespace {

uint64_t hash_of(const std::string& bytes, uint64_t hash = 0xcbf29ce484222325) {
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  return hash;
}

// Separators of ASCII, which no name or value has.
constexpr char kNameEnd = '\x1f', kFactEnd = '\x1e';

std::string text_of(const Facts& facts) {
  std::string text;
  for (const auto& [name, value] : facts) text += name + kNameEnd + value + kFactEnd;
  return text;
}

Facts facts_in(const std::string& text) {
  Facts facts;
  for (size_t at = 0; at < text.size();) {
    const size_t name_end = text.find(kNameEnd, at), end = text.find(kFactEnd, name_end);
    facts.emplace_back(text.substr(at, name_end - at), text.substr(name_end + 1, end - name_end - 1));
    at = end + 1;
  }
  return facts;
}

// Long values are shown by where they begin to differ.
std::string shown(const std::string* value, const std::string* other) {
  constexpr size_t kShown = 240;
  if (!value) return "not there";
  if (value->size() <= kShown || !other) return "'" + value->substr(0, kShown) + "'";
  const auto differs = std::ranges::mismatch(*value, *other).in1 - value->begin();
  const size_t begin = static_cast<size_t>(differs) < kShown / 2 ? 0 : static_cast<size_t>(differs) - kShown / 2;
  return fmt::format("'{}{}...'", begin == 0 ? "" : "...", value->substr(begin, kShown));
}

const std::string* find(const Facts& facts, const std::string& name) {
  const auto found = std::ranges::find(facts, name, &std::pair<std::string, std::string>::first);
  return found == facts.end() ? nullptr : &found->second;
}

bool differ(const Facts& a, const Facts& b, const std::string& name) {
  const std::string *one = find(a, name), *other = find(b, name);
  return one && other ? *one != *other : one != other;
}

}  // namespace

void require_same(Comm& comm, const Facts& facts, const std::string& where, const std::string& advice) {
  const at::Tensor hashes = hashes_of(facts);
  const CallLabel label("the check that all ranks run the same");
  comm.all_reduce(hashes, Reduce::max).wait();
  if (differ(hashes)) throw_difference(comm, facts, where, advice);
}

at::Tensor hashes_of(const Facts& facts) {
  const auto hash = static_cast<int64_t>(hash_of(text_of(facts)));
  return owning_tensor(std::vector<int64_t>{hash, ~hash});
}

bool differ(const at::Tensor& hashes) {
  const auto* const largest = hashes.const_data_ptr<int64_t>();
  return largest[0] != ~largest[1];
}

void throw_difference(Comm& comm, const Facts& facts, const std::string& where, const std::string& advice) {
  std::vector<Facts> all;
  for (const std::string& text : gather_texts(comm, text_of(facts))) all.push_back(facts_in(text));
  const auto other = std::ranges::find_if(all, [&](const Facts& theirs) { return theirs != all[0]; });
  SHARD_CHECK(other != all.end(), "comm", "facts have other hashes and are the same on all {} ranks", all.size());
  const auto differs = [&](const auto& each) { return differ(all[0], *other, each.first); };
  const auto mine = std::ranges::find_if(all[0], differs), theirs = std::ranges::find_if(*other, differs);
  const bool is_mine = mine != all[0].end() && mine - all[0].begin() <= theirs - other->begin();  // the first says most
  const auto fact = is_mine ? mine : theirs;
  SHARD_CHECK(is_mine || theirs != other->end(), "comm", "rank {} has the facts of rank 0 in another order",
              other - all.begin());
  std::vector<size_t> ranks;
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (differ(all[0], all[rank], fact->first)) ranks.push_back(rank);
  const std::string *first = find(all[0], fact->first), *second = find(*other, fact->first);
  throw Error(fmt::format("[{}] ranks 0 and {} do not run the same: the {} is {} on rank 0 and {} on rank {}. {}", where,
                          fmt::join(ranks, ", "), fact->first, shown(first, second), shown(second, first), other - all.begin(),
                          advice));
}

Facts torch_facts() {
  return {{"CPU capability, which ATEN_CPU_CAPABILITY sets,", at::get_cpu_capability()},
          {"build of PyTorch", at::show_config()}};
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
