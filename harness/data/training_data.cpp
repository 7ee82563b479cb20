#include "harness/data/training_data.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "shardproof/base/check.h"

namespace harness {
namespace {

namespace fs = std::filesystem;

constexpr size_t kProbeBytes = 8000;

bool is_text(const fs::path& path) {
  std::array<char, kProbeBytes> head;
  std::ifstream file(path, std::ios::binary);
  SHARD_REQUIRE(file.good(), "data", "cannot read {}; check its permissions", path.string());
  file.read(head.data(), head.size());
  return std::memchr(head.data(), 0, static_cast<size_t>(file.gcount())) == nullptr;
}

void add_folder(const fs::path& folder, std::set<std::string>& files) {
  std::error_code error;
  fs::recursive_directory_iterator entries(folder, error);
  SHARD_REQUIRE(!error, "data", "cannot list {}: {}", folder.string(), error.message());
  for (; entries != fs::recursive_directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    const bool skipped = name.starts_with('.') || name == "__pycache__";
    if (skipped && entries->is_directory()) entries.disable_recursion_pending();
    std::error_code broken_link;
    if (!skipped && entries->is_regular_file(broken_link) && is_text(entries->path()))
      files.insert(entries->path().string());
  }
  SHARD_REQUIRE(!error, "data", "cannot list all of {}: {}", folder.string(), error.message());
}

std::set<std::string> find_files(const std::vector<std::string>& paths) {
  std::set<std::string> files;  // std::string orders by bytes
  for (const std::string& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    SHARD_REQUIRE(fs::exists(status), "data", "there is no {}; --data takes text files and folders", path);
    if (!fs::is_directory(status)) {
      SHARD_REQUIRE(fs::is_regular_file(status), "data", "{} is neither a file nor a folder", path);
      files.insert(path);
      continue;
    }
    const size_t before = files.size();
    add_folder(path, files);
    SHARD_REQUIRE(files.size() > before, "data", "no text files under {}; name another folder", path);
  }
  return files;
}

}  // namespace

TextData::TextData(const std::vector<std::string>& paths, int64_t sequence_length)
    : sequence_length_(sequence_length) {
  SHARD_REQUIRE(sequence_length >= 1, "data", "a sequence has at least 1 byte, got {}", sequence_length);
  SHARD_REQUIRE(!paths.empty(), "data", "no path given; --data takes text files and folders");
  for (const std::string& path : find_files(paths)) {
    std::error_code error;
    const auto size = static_cast<int64_t>(fs::file_size(path, error));
    SHARD_REQUIRE(!error, "data", "cannot read {}: {}", path, error.message());
    files_.push_back({path, bytes_, bytes_ + size});
    bytes_ += size;
  }
  SHARD_REQUIRE(bytes_ > 0, "data", "{} is empty; name a file with text in it", fmt::join(paths, " "));
  SHARD_REQUIRE(bytes_ > sequence_length, "data",
                "{} bytes in {} are too few for one sequence of {} inputs and targets, which takes {}; give "
                "more text or a "
                "smaller --seq",
                bytes_, fmt::join(paths, " "), sequence_length, sequence_length + 1);
}

std::vector<std::string> TextData::files() const {
  std::vector<std::string> paths;
  for (const File& file : files_) paths.push_back(file.path);
  return paths;
}

std::vector<uint8_t> TextData::sequence(int64_t index) const {
  const int64_t begin = index % sequences() * sequence_length_, end = begin + sequence_length_ + 1;
  std::vector<uint8_t> bytes(static_cast<size_t>(end - begin));
  auto file = std::upper_bound(files_.begin(), files_.end(), begin,
                               [](int64_t at, const File& candidate) { return at < candidate.end; });
  for (int64_t at = begin; at < end; ++file) {
    const int64_t until = std::min(end, file->end);
    std::ifstream stream(file->path, std::ios::binary);
    stream.seekg(at - file->begin);
    stream.read(reinterpret_cast<char*>(bytes.data() + (at - begin)), until - at);
    SHARD_REQUIRE(stream.gcount() == until - at, "data", "{} became shorter or unreadable while it was read",
                  file->path);
    at = until;
  }
  return bytes;
}

BatchRule::BatchRule(int64_t global_batch, int64_t microbatch, int64_t ranks)
    : global_batch_(global_batch), microbatch_(microbatch), ranks_(ranks) {
  SHARD_REQUIRE(global_batch >= 1 && microbatch >= 1 && ranks >= 1, "data",
                "global batch, microbatch and ranks are at least 1, got {}, {} and {}", global_batch,
                microbatch, ranks);
  SHARD_REQUIRE(global_batch % (microbatch * ranks) == 0, "data",
                "the global batch of {} sequences must be a multiple of microbatch {} x {} data-parallel "
                "ranks = {}; change "
                "--global-batch or --microbatch",
                global_batch, microbatch, ranks, microbatch * ranks);
}

SequenceRange BatchRule::sequences(int64_t step, int64_t round, int64_t rank) const {
  const int64_t begin = step * global_batch_ + (round * ranks_ + rank) * microbatch_;
  return {begin, begin + microbatch_};
}

}  // namespace harness
