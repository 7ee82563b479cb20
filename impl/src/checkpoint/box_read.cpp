#include "shardproof/checkpoint/box_read.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>

#include "checkpoint/format/dcp_validate.h"
#include "checkpoint/format/row_walk.h"
#include "shardproof/base/check.h"
#include "testing/checkpoint/format/crc32.h"
#include "testing/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{4} << 20;  // of a long row, checked while it lies in the cache

Shape sizes_of(const Box& box) {
  Shape sizes;
  for (const Interval& interval : box) sizes.push_back(interval.size());
  return sizes;
}

// Reads rows in the order of the file, neighbours together, and sums what it reads without a gap.
class RowReader {
 public:
  RowReader(const FileSource& source, uint64_t base, uint64_t payload, char* to, const ReadOptions& options, ReadCounts& counts)
      : source_(source), base_(base), payload_bytes_(payload), to_(to), options_(options), counts_(counts) {}

  void add(uint64_t from, uint64_t to, uint64_t bytes) {
    const bool joins =
        !rows_.empty() && from >= end_ && from - end_ <= options_.gap_max && from + bytes - rows_[0].from <= options_.bytes_max;
    if (!joins) flush();
    rows_.push_back({from, to, bytes});
    end_ = from + bytes;
  }

  void flush() {
    if (rows_.size() == 1) {
      read_straight(rows_[0]);
    } else if (!rows_.empty()) {
      buffer_.resize(end_ - rows_[0].from);
      counts_.buffer_bytes = std::max<uint64_t>(counts_.buffer_bytes, buffer_.size());
      read(rows_[0].from, buffer_.data(), buffer_.size());
      for (const Row& row : rows_) std::memcpy(to_ + row.to, buffer_.data() + (row.from - rows_[0].from), row.bytes);
    }
    for (const Row& row : rows_) counts_.bytes_used += row.bytes;
    rows_.clear();
  }

  // The CRC of the payload when all of it came by.
  bool complete() const { return in_order_ && summed_ == payload_bytes_; }
  uint32_t crc() const { return crc_; }

 private:
  struct Row {
    uint64_t from, to, bytes;
  };
  void read_straight(const Row& row) {
    for (uint64_t done = 0; done < row.bytes;) {
      const uint64_t bytes = std::min(kPieceBytes, row.bytes - done);
      read(row.from + done, to_ + row.to + done, bytes);
      done += bytes;
    }
  }
  void read(uint64_t from, char* to, uint64_t bytes) {
    source_.read(base_ + from, to, bytes);
    ++counts_.reads;
    counts_.bytes_read += bytes;
    in_order_ &= options_.check && from == summed_;
    if (!in_order_) return;
    crc_ = crc32(crc_, to, bytes);
    summed_ += bytes;
  }

  const FileSource& source_;
  uint64_t base_, payload_bytes_;
  char* to_;
  const ReadOptions& options_;
  ReadCounts& counts_;
  std::vector<Row> rows_;
  std::string buffer_;
  uint64_t end_ = 0, summed_ = 0;
  uint32_t crc_ = 0;
  bool in_order_ = true;
};

}  // namespace

struct BoxReader::Entry {
  const FileSource* source;
  std::string name;
  TensorEntry entry;  // payload_offset is in the file
  bool checked = false;
};

BoxReader::BoxReader(FileSystem& files, std::string folder, const Checkpoint& checkpoint, ReadOptions options)
    : files_(files), folder_(std::move(folder)), checkpoint_(checkpoint), options_(options) {}

BoxReader::~BoxReader() = default;

const FileSource& BoxReader::source(const std::string& file) {
  std::unique_ptr<FileSource>& source = sources_[file];
  if (!source) source = std::make_unique<FileSource>(files_, folder_ + "/" + file);
  return *source;
}

BoxReader::Entry& BoxReader::entry(const std::string& name, const StoredTensor& tensor, size_t index) {
  const Chunk& chunk = tensor.chunks[index];
  std::unique_ptr<Entry>& entry = entries_[{chunk.extent.file, chunk.extent.offset}];
  if (entry) return *entry;
  const FileSource& file = source(chunk.extent.file);
  const std::string who = fmt::format("{} (tensor {}, {})", file.name(), name, box_text(chunk.offsets, chunk.sizes));
  const SliceSource slice(file, chunk.extent.offset, chunk.extent.length, who);
  TensorEntry parsed = parse_tensor_entry(slice);
  SHARD_REQUIRE(parsed.dtype == tensor.dtype && parsed.sizes == chunk.sizes, "checkpoint",
                "{}: holds {} of sizes [{}], but .metadata says {} of [{}]. Do these files belong together?", who,
                dtype_info(parsed.dtype).name, fmt::join(parsed.sizes, ", "), dtype_info(tensor.dtype).name,
                fmt::join(chunk.sizes, ", "));
  parsed.payload_offset += chunk.extent.offset;
  entry = std::make_unique<Entry>(Entry{&file, who, std::move(parsed)});
  return *entry;
}

void BoxReader::read_part(const std::string& name, const StoredTensor& tensor, size_t index, const Box& box, char* destination,
                          const Shape& strides) {
  const Chunk& chunk = tensor.chunks[index];
  Shape sizes(box.size());
  int64_t to = 0;
  Shape begins(box.size());
  for (size_t d = 0; d < box.size(); ++d) {
    begins[d] = std::max(box[d].begin, chunk.offsets[d]);
    sizes[d] = std::min(box[d].end, chunk.offsets[d] + chunk.sizes[d]) - begins[d];
    if (sizes[d] <= 0) return;
    to += (begins[d] - box[d].begin) * strides[d];
  }
  Entry& held = entry(name, tensor, index);
  const TensorEntry& stored = held.entry;
  int64_t from = stored.storage_offset;
  for (size_t d = 0; d < box.size(); ++d) from += (begins[d] - chunk.offsets[d]) * stored.strides[d];
  const auto item = static_cast<uint64_t>(dtype_info(tensor.dtype).bytes);
  RowReader rows(*held.source, stored.payload_offset, stored.payload_bytes, destination, options_, counts_);
  const RowWalk walk(sizes, stored.strides, strides);
  walk.each([&](int64_t row_from, int64_t row_to) {
    rows.add(static_cast<uint64_t>(from + row_from) * item, static_cast<uint64_t>(to + row_to) * item,
             static_cast<uint64_t>(walk.row_elements) * item);
  });
  rows.flush();
  if (held.checked || !options_.check) return;
  if (rows.complete()) {
    SHARD_REQUIRE(rows.crc() == stored.payload_crc, "checkpoint",
                  "{}: its bytes are damaged, the CRC does not agree. Load an older checkpoint, or see `checkpoint verify`.",
                  held.name);
    held.checked = true;
  } else if (options_.check_parts) {
    check_record(*held.source, {held.name, stored.payload_offset, stored.payload_bytes, stored.payload_crc});
    held.checked = true;
  }
}

void BoxReader::read(const std::string& name, const Box& box, void* destination, const Shape& strides) {
  const auto found = checkpoint_.tensors.find(name);
  SHARD_REQUIRE(found != checkpoint_.tensors.end(), "checkpoint", "{} holds no tensor {}", folder_, name);
  const StoredTensor& tensor = found->second;
  bool inside = box.size() == tensor.sizes.size() && strides.size() == box.size();
  for (size_t d = 0; inside && d < box.size(); ++d)
    inside = box[d].begin >= 0 && box[d].begin <= box[d].end && box[d].end <= tensor.sizes[d];
  SHARD_REQUIRE(inside, "checkpoint", "a box of {} dims is not inside tensor {} of [{}] in {}", box.size(), name,
                fmt::join(tensor.sizes, ", "), folder_);
  if (numel(box) == 0) return;
  for (size_t i = 0; i < tensor.chunks.size(); ++i) read_part(name, tensor, i, box, static_cast<char*>(destination), strides);
}

void BoxReader::read(const std::string& name, const Box& box, const at::Tensor& destination) {
  const auto found = checkpoint_.tensors.find(name);
  SHARD_REQUIRE(found != checkpoint_.tensors.end(), "checkpoint", "{} holds no tensor {}", folder_, name);
  SHARD_REQUIRE(destination.scalar_type() == found->second.dtype, "checkpoint", "tensor {} in {} is {}; it was asked for as {}",
                name, folder_, dtype_info(found->second.dtype).name, c10::toString(destination.scalar_type()));
  SHARD_REQUIRE(destination.sizes() == at::IntArrayRef(sizes_of(box)), "checkpoint",
                "a box of [{}] of tensor {} was asked for in a tensor of [{}]", fmt::join(sizes_of(box), ", "), name,
                fmt::join(destination.sizes(), ", "));
  if (destination.device().is_cpu()) return read(name, box, destination.data_ptr(), destination.strides().vec());
  const at::Tensor here = at::empty(destination.sizes(), found->second.dtype);
  read(name, box, here.data_ptr(), here.strides().vec());
  at::Tensor(destination).copy_(here);
}

at::Tensor BoxReader::read(const std::string& name) {
  const auto found = checkpoint_.tensors.find(name);
  SHARD_REQUIRE(found != checkpoint_.tensors.end(), "checkpoint", "{} holds no tensor {}", folder_, name);
  const StoredTensor& tensor = found->second;
  Box box;
  for (const int64_t size : tensor.sizes) box.push_back({0, size});
  at::Tensor whole = at::empty(tensor.sizes, tensor.dtype);
  read(name, box, whole);
  return whole;
}

}  // namespace shardproof::checkpoint
