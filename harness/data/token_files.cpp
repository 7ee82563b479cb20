#include "harness/data/token_files.h"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "harness/case/random.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

namespace fs = std::filesystem;

constexpr size_t kProbeBytes = 8000;
constexpr int64_t kBlockBytes = 1 << 20, kBlocksMax = 16 << 10;  // of fingerprints

bool is_text(const fs::path& path) {
  std::array<char, kProbeBytes> head;
  std::ifstream file(path, std::ios::binary);
  SHARD_REQUIRE(file.good(), "data", "cannot read {}; check its permissions", path.string());
  file.read(head.data(), head.size());
  return std::memchr(head.data(), 0, static_cast<size_t>(file.gcount())) == nullptr;
}

void add_folder(const fs::path& folder, TokenType type, std::set<std::string>& files) {
  std::error_code error;
  fs::recursive_directory_iterator entries(folder, error);
  SHARD_REQUIRE(!error, "data", "cannot list {}: {}", folder.string(), error.message());
  for (; entries != fs::recursive_directory_iterator(); entries.increment(error)) {
    const std::string name = entries->path().filename().string();
    const bool skipped = name.starts_with('.') || name == "__pycache__";
    if (skipped && entries->is_directory()) entries.disable_recursion_pending();
    std::error_code broken_link;
    if (skipped || !entries->is_regular_file(broken_link)) continue;
    if (type == TokenType::uint8 ? is_text(entries->path()) : name.ends_with(".bin")) files.insert(entries->path().string());
  }
  SHARD_REQUIRE(!error, "data", "cannot list all of {}: {}", folder.string(), error.message());
}

std::set<std::string> find_files(const std::vector<std::string>& paths, TokenType type) {
  std::set<std::string> files;  // std::string orders by bytes
  for (const std::string& path : paths) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    SHARD_REQUIRE(fs::exists(status), "data", "there is no {}; --data takes files and folders", path);
    if (!fs::is_directory(status)) {
      SHARD_REQUIRE(fs::is_regular_file(status), "data", "{} is neither a file nor a folder", path);
      const fs::path file = fs::absolute(path);
      files.insert(fs::canonical(file.parent_path()) / file.filename());
      continue;
    }
    const size_t before = files.size();
    add_folder(fs::canonical(path), type, files);
    SHARD_REQUIRE(files.size() > before, "data", "no {} files under {}; name another folder",
                  type == TokenType::uint8 ? "text" : ".bin", path);
  }
  return files;
}

}  // namespace

const char* to_string(TokenType type) {
  return type == TokenType::uint8 ? "uint8" : type == TokenType::uint16 ? "uint16" : "uint32";
}

TokenType token_type(const std::string& name) {
  for (const TokenType type : {TokenType::uint8, TokenType::uint16, TokenType::uint32})
    if (name == to_string(type)) return type;
  throw shardproof::Error(fmt::format("[data] --token-type must be uint8, uint16 or uint32, got '{}'", name));
}

int64_t bytes_of_token(TokenType type) {
  return type == TokenType::uint8 ? 1 : type == TokenType::uint16 ? 2 : 4;
}

// A file in memory, page by page as it is read.
class TokenFiles::Mapping {
 public:
  Mapping(std::string path, int64_t bytes)
      : path_(std::move(path)), bytes_(bytes), file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
    SHARD_REQUIRE(file_ >= 0, "data", "cannot read {}: {}", path_, std::strerror(errno));
    if (bytes == 0) return;
    void* const start = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, file_, 0);
    if (start == MAP_FAILED) {
      const std::string why = std::strerror(errno);
      ::close(file_);
      throw shardproof::Error(fmt::format("[data] cannot map {}: {}", path_, why));
    }
    start_ = static_cast<const unsigned char*>(start);
  }
  ~Mapping() {
    if (start_) ::munmap(const_cast<unsigned char*>(start_), static_cast<size_t>(bytes_));
    ::close(file_);
  }
  Mapping(const Mapping&) = delete;

  // A page beyond the end of a file that was cut would kill the process.
  const unsigned char* bytes(int64_t begin, int64_t count) const {
    struct stat now {};
    SHARD_REQUIRE(::fstat(file_, &now) == 0 && now.st_size >= begin + count, "data",
                  "{} became shorter or unreadable while it was read", path_);
    return start_ + begin;
  }

 private:
  std::string path_;
  int64_t bytes_;
  int file_;
  const unsigned char* start_ = nullptr;
};

TokenFiles::TokenFiles(const std::vector<std::string>& paths, TokenType type) : type_(type) {
  SHARD_REQUIRE(!paths.empty(), "data", "no path given; --data takes files and folders");
  const int64_t width = bytes_of_token(type);
  for (const std::string& path : find_files(paths, type)) {
    std::error_code error;
    const auto size = static_cast<int64_t>(fs::file_size(path, error));
    SHARD_REQUIRE(!error, "data", "cannot read {}: {}", path, error.message());
    SHARD_REQUIRE(size % width == 0, "data",
                  "{} has {} bytes, which is no multiple of the {} bytes of a {} token; is it of another --token-type?", path,
                  size, width, to_string(type));
    files_.push_back({path, tokens_, tokens_ + size / width, nullptr});
    if (type != TokenType::uint8) files_.back().mapping = std::make_shared<Mapping>(path, size);
    tokens_ += size / width;
  }
  SHARD_REQUIRE(tokens_ > 0, "data", "{} is empty; name a file with text or tokens in it", fmt::join(paths, " "));
}

TokenFiles::TokenFiles(std::string text)
    : type_(TokenType::uint8), text_(std::move(text)), tokens_(static_cast<int64_t>(text_.size())) {
  SHARD_REQUIRE(tokens_ > 0, "data", "the text is empty");
  files_.push_back({"the text in memory", 0, tokens_, nullptr});
}

std::vector<std::string> TokenFiles::files() const {
  std::vector<std::string> paths;
  for (const File& file : files_) paths.push_back(file.path);
  return paths;
}

const TokenFiles::File& TokenFiles::file_of(int64_t index) const {
  return *std::upper_bound(files_.begin(), files_.end(), index,
                           [](int64_t at, const File& candidate) { return at < candidate.end; });
}

std::string TokenFiles::place(int64_t index) const {
  const File& file = file_of(index);
  return fmt::format("token {} of {}", index - file.begin, file.path);
}

void TokenFiles::read_bytes(int64_t begin, int64_t count, unsigned char* to) const {
  const int64_t width = bytes_of_token(type_);
  for (const File* file = &file_of(begin); count > 0; ++file) {
    const int64_t some = std::min(count, file->end - begin), from = (begin - file->begin) * width;
    if (file->mapping) {
      std::memcpy(to, file->mapping->bytes(from, some * width), static_cast<size_t>(some * width));
    } else if (!text_.empty()) {
      std::memcpy(to, text_.data() + begin, static_cast<size_t>(some));
    } else if (some > 0) {
      std::ifstream stream(file->path, std::ios::binary);
      stream.seekg(from);
      stream.read(reinterpret_cast<char*>(to), some);
      SHARD_REQUIRE(stream.gcount() == some, "data", "{} became shorter or unreadable while it was read", file->path);
    }
    to += some * width;
    begin += some;
    count -= some;
  }
}

std::vector<uint32_t> TokenFiles::read(int64_t begin, int64_t count) const {
  const int64_t width = bytes_of_token(type_);
  std::vector<unsigned char> bytes(static_cast<size_t>(count * width));
  read_bytes(begin, count, bytes.data());
  std::vector<uint32_t> tokens(static_cast<size_t>(count));
  const unsigned char* next = bytes.data();
  for (uint32_t& token : tokens)
    for (int64_t byte = 0; byte < width; ++byte) token |= uint32_t{*next++} << (8 * byte);
  return tokens;
}

uint64_t TokenFiles::fingerprint() const {
  std::call_once(fingerprint_once_, [this] {
    const int64_t width = bytes_of_token(type_), block = kBlockBytes / width;
    const int64_t blocks = (tokens_ + block - 1) / block, every = (blocks + kBlocksMax - 1) / kBlocksMax;
    uint64_t hash = mix(static_cast<uint64_t>(bytes()));
    std::vector<uint64_t> words(kBlockBytes / sizeof(uint64_t));
    for (int64_t at = 0; at < blocks; at += every) {
      const int64_t begin = at * block, count = std::min(block, tokens_ - begin);
      const auto used = static_cast<size_t>((count * width + 7) / 8);
      words[used - 1] = 0;
      read_bytes(begin, count, reinterpret_cast<unsigned char*>(words.data()));
      // One to one in the hash and in the word, so that one word that differs is always seen.
      for (size_t i = 0; i < used; ++i) hash = std::rotl(hash ^ words[i], 27) * 0x9e3779b97f4a7c15;
    }
    fingerprint_ = mix(hash);
  });
  return fingerprint_;
}

}  // namespace harness
