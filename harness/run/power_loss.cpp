#include "harness/run/power_loss.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "shardproof/base/check.h"

namespace harness {
namespace {

// The record, as far as it has come when power fails.
class Crash {
 public:
  Crash(const DiskRecord& record, Choices& choices, const PowerLoss& how) : record_(record), choices_(choices), how_(how) {}

  DiskState state() {
    state_.calls = choices_.choose(record_.calls.size() + 1);
    for (size_t i = 0; i < state_.calls; ++i) {
      const DiskCall& call = record_.calls[i];
      if (call.kind == DiskCall::Kind::flush) flushed_[call.node] = i;
      if (call.kind == DiskCall::Kind::mark) state_.mark = call.mark;
    }
    names_ = record_.names;
    for (size_t i = 0; i < state_.calls; ++i)
      if (record_.calls[i].kind == DiskCall::Kind::names) change_names(record_.calls[i], i);
    list(0, "");
    return std::move(state_);
  }

 private:
  bool lasts(Node node, size_t call) const {
    const auto found = flushed_.find(node);
    return found != flushed_.end() && found->second > call;
  }

  void change_names(const DiskCall& call, size_t index) {
    // A flush of either folder of a rename makes it last, because it is never there in part.
    const bool lasts_already = std::any_of(call.names.begin(), call.names.end(),
                                           [&](const auto& change) { return lasts(change.first.folder, index); });
    const bool after_a_lost_one =
        std::any_of(call.names.begin(), call.names.end(), [&](const auto& change) { return lost_.contains(change.first); });
    if (!lasts_already && (after_a_lost_one || choices_.choose(2) == 0)) {
      for (const auto& change : call.names) lost_.insert(change.first);
      return;
    }
    rename_in(names_, call);
  }

  void list(Node folder, const std::string& prefix) {
    for (auto at = names_.lower_bound({folder, ""}); at != names_.end() && at->first.folder == folder; ++at) {
      const std::string path = prefix + at->first.name;
      if (!record_.folders.contains(at->second)) {
        state_.paths[path] = bytes_of(at->second);
        continue;
      }
      state_.paths[path] = std::nullopt;
      list(at->second, path + "/");
    }
  }

  struct Piece {
    uint64_t begin, end;
    const char* bytes;
  };

  std::string bytes_of(Node file) {
    const auto found = record_.files.find(file);
    std::string bytes = found == record_.files.end() ? "" : found->second;
    std::vector<Piece> pieces;  // not flushed
    for (size_t i = 0; i < state_.calls; ++i) {
      const DiskCall& call = record_.calls[i];
      if (call.kind != DiskCall::Kind::bytes || call.node != file) continue;
      const uint64_t end = call.offset + call.bytes.size();
      if (lasts(file, i)) {
        bytes.resize(std::max<uint64_t>(bytes.size(), end), how_.fill);
        bytes.replace(call.offset, call.bytes.size(), call.bytes);
        continue;
      }
      for (uint64_t begin = call.offset; begin < end;) {
        const uint64_t piece_end = std::min(end, (begin / how_.block + 1) * how_.block);
        pieces.push_back({begin, piece_end, call.bytes.data() + (begin - call.offset)});
        begin = piece_end;
      }
    }
    if (pieces.empty()) return bytes;
    const size_t long_enough_for = choices_.choose(pieces.size() + 1);
    for (size_t i = 0; i < long_enough_for; ++i) {
      const Piece& piece = pieces[i];
      bytes.resize(std::max<uint64_t>(bytes.size(), piece.end), how_.fill);
      if (choices_.choose(2) == 1) bytes.replace(piece.begin, piece.end - piece.begin, piece.bytes, piece.end - piece.begin);
    }
    return bytes;
  }

  const DiskRecord& record_;
  Choices& choices_;
  PowerLoss how_;
  DiskState state_;
  std::map<Node, size_t> flushed_;  // by the last call that did
  std::map<NodeName, Node> names_;
  std::set<NodeName> lost_;  // whose later changes are lost as well
};

}  // namespace

RandomChoice::RandomChoice(uint64_t seed) : random_(seed) {
  constexpr double kShares[] = {0.1, 0.5, 0.9};
  kept_ = kShares[random_() % 3];
}

size_t RandomChoice::choose(size_t count) {
  const uint64_t bits = random_();
  if (count == 2) return static_cast<double>(bits >> 11) * 0x1p-53 < kept_ ? 1 : 0;
  return bits % count;
}

std::string DiskState::str() const {
  std::string text;
  for (const auto& [path, bytes] : paths) text += bytes ? fmt::format("{} {}\n", path, bytes->size()) : path + "/\n";
  return text;
}

DiskState lose_power(const DiskRecord& record, Choices& choices, const PowerLoss& how) {
  return Crash(record, choices, how).state();
}

void restore(const DiskState& state, const std::string& root) {
  for (const auto& entry : std::filesystem::directory_iterator(root)) std::filesystem::remove_all(entry.path());
  for (const auto& [path, bytes] : state.paths) {  // a folder comes before what is in it
    if (!bytes) {
      std::filesystem::create_directory(root + "/" + path);
      continue;
    }
    std::ofstream file(root + "/" + path, std::ios::binary);
    file.write(bytes->data(), static_cast<std::streamsize>(bytes->size()));
    SHARD_REQUIRE(file.good(), "harness", "cannot write {}/{}", root, path);
  }
}

}  // namespace harness
