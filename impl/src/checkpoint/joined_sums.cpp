#include "checkpoint/joined_sums.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

// An entry of more runs than this is told with its runs only if they are long. So what is told stays far below what is read.
constexpr size_t kRunsAlways = 8;
constexpr uint64_t kRunBytesMin = 16 << 10;

template <typename Number>
void put(std::string& text, Number number) {
  text.append(reinterpret_cast<const char*>(&number), sizeof number);
}

class Told {
 public:
  explicit Told(const std::string& text) : text_(text) {}
  bool is_over() const { return next_ == text_.size(); }
  template <typename Number>
  Number number() {
    Number number;
    std::memcpy(&number, take(sizeof number), sizeof number);
    return number;
  }
  std::string string(size_t bytes) { return {take(bytes), bytes}; }

 private:
  const char* take(size_t bytes) {
    SHARD_CHECK(bytes <= text_.size() - next_, "checkpoint", "a text of {} bytes ends at {}", text_.size(), next_);
    next_ += bytes;
    return text_.data() + (next_ - bytes);
  }
  const std::string& text_;
  size_t next_ = 0;
};

bool are_told(const std::vector<SummedRun>& runs) {
  uint64_t bytes = 0;
  for (const SummedRun& run : runs) bytes += run.bytes;
  return runs.size() <= kRunsAlways || bytes / runs.size() >= kRunBytesMin;
}

// Of all ranks.
struct Read {
  uint64_t payload_bytes = 0;
  std::vector<SummedRun> runs;
};

}  // namespace

std::string text_of(const std::vector<PartlyRead>& parts) {
  std::string text;
  for (const PartlyRead& part : parts) {
    put(text, static_cast<uint64_t>(part.entry.file.size()));
    text += part.entry.file;
    put(text, part.entry.offset);
    put(text, part.payload_bytes);
    const std::vector<SummedRun> none, &runs = are_told(part.runs) ? part.runs : none;
    put(text, static_cast<uint64_t>(runs.size()));
    for (const SummedRun& run : runs) put(text, run.begin), put(text, run.bytes), put(text, run.crc);
  }
  return text;
}

std::set<EntryPlace> compare_joined(const std::vector<std::string>& told, BoxReader& reader) {
  std::map<EntryPlace, Read> all;
  for (const std::string& text : told)
    for (Told parts(text); !parts.is_over();) {
      std::string file = parts.string(parts.number<uint64_t>());
      const auto offset = parts.number<uint64_t>();
      Read& read = all[{std::move(file), offset}];
      read.payload_bytes = std::max(read.payload_bytes, parts.number<uint64_t>());
      for (auto count = parts.number<uint64_t>(); count > 0; --count) {
        const auto begin = parts.number<uint64_t>(), bytes = parts.number<uint64_t>();
        read.runs.push_back({begin, bytes, parts.number<uint32_t>()});
      }
    }
  std::set<EntryPlace> missing;
  for (auto& [place, read] : all) {
    const std::string name = fmt::format("{} at {}", place.first, place.second);
    const std::optional<uint32_t> crc = joined_crc(read.payload_bytes, std::move(read.runs), name);
    if (crc)
      reader.compare({place.first, place.second, 0}, *crc);
    else
      missing.insert(place);
  }
  return missing;
}

}  // namespace shardproof::checkpoint
