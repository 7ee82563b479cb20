#include <algorithm>

#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/tensor_entry.h"
#include "internal/checkpoint/format/crc32.h"

namespace shardproof::checkpoint {

// Summed and copied while it lies in the cache.
constexpr size_t kPieceBytes = size_t{128} << 10;

std::string entry_file_name(int64_t rank, int64_t index) {
  return fmt::format("__{}_{}.distcp", rank, index);
}

EntryFile::EntryFile(FileSystem& files, const std::string& folder, std::string file)
    : file_(std::move(file)), output_(files, folder + "/" + file_) {}

EntryFile::Written EntryFile::add_value(const Value& value) {
  return add_entry(write_value_entry(value));
}

EntryFile::Written EntryFile::add_entry(std::string_view entry) {
  const Extent extent{file_, output_.position(), entry.size()};
  output_.write(entry);
  return {extent, crc32(0, entry.data(), entry.size())};
}

EntryFile::Written EntryFile::add_tensor(Dtype dtype, const Shape& sizes, const void* data) {
  const TensorEntryLayout layout = lay_out_tensor_entry(dtype, sizes);
  const Extent extent{file_, output_.position(), layout.length};
  output_.write(layout.head);
  uint32_t crc = 0;
  const auto* from = static_cast<const char*>(data);
  for (uint64_t done = 0; done < layout.payload_bytes;) {
    const size_t bytes = std::min<uint64_t>(kPieceBytes, layout.payload_bytes - done);
    crc = crc32(crc, from + done, bytes);
    output_.write(from + done, bytes);
    done += bytes;
  }
  const std::string tail = layout.tail(crc);
  output_.write(tail);
  const uint32_t head_crc = crc32(0, layout.head.data(), layout.head.size());
  const uint32_t front_crc = crc32_join(head_crc, crc, layout.payload_bytes);
  return {extent, crc32(front_crc, tail.data(), tail.size())};
}

void EntryFile::finish() {
  output_.finish();
}

}  // namespace shardproof::checkpoint
