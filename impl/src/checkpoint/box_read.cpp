#include "shardproof/checkpoint/box_read.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "checkpoint/format/dcp_validate.h"
#include "checkpoint/format/row_walk.h"
#include "shardproof/base/check.h"
#include "internal/checkpoint/format/crc32.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kPieceBytes = uint64_t{4} << 20;  // of a long row, summed while it lies in the cache
constexpr size_t kRunsMax = 65536;                   // that are kept of an entry

// The sums of what was read of a payload.
class Runs {
 public:
  void add(uint64_t begin, const void* data, uint64_t bytes) {
    if (are_too_many_) return;
    if (runs_.empty() || runs_.back().end() != begin) runs_.push_back({begin, 0, 0});
    runs_.back().crc = crc32(runs_.back().crc, data, bytes);
    runs_.back().bytes += bytes;
    if (runs_.size() <= kRunsMax) return;
    runs_.clear();
    are_too_many_ = true;
  }
  uint64_t end() const { return runs_.empty() ? 0 : runs_.back().end(); }
  const std::vector<SummedRun>& all() const { return runs_; }
  bool is_whole(uint64_t bytes) const { return runs_.size() == 1 && runs_[0].begin == 0 && runs_[0].bytes == bytes; }

 private:
  std::vector<SummedRun> runs_;
  bool are_too_many_ = false;
};

// Reads rows in the order of the file, neighbours together, and sums what it reads. Where there are gaps between rows, it also
// reads a gap before the first and behind the last one: so what is read of rows that are cut is often all of the payload.
class RowReader {
 public:
  RowReader(const ByteSource& source, uint64_t base, uint64_t payload, char* to, const ReadOptions& options, ReadCounts& counts,
            Runs& runs)
      : source_(source), base_(base), payload_bytes_(payload), to_(to), options_(options), counts_(counts), runs_(runs) {}

  void add(uint64_t from, uint64_t to, uint64_t bytes) {
    const bool joins =
        !rows_.empty() && from >= end_ && from - end_ <= options_.gap_max && from + bytes - begin_ <= options_.bytes_max;
    if (!joins) {
      flush();
      begin_ = is_near(runs_.end(), from) && from + bytes - runs_.end() <= options_.bytes_max ? runs_.end() : from;
    } else {
      has_gaps_ |= from > end_;
    }
    rows_.push_back({from, to, bytes});
    end_ = from + bytes;
  }

  void finish() {
    if (has_gaps_ && is_near(end_, payload_bytes_) && payload_bytes_ - begin_ <= options_.bytes_max) end_ = payload_bytes_;
    flush();
  }

 private:
  struct Row {
    uint64_t from, to, bytes;
  };
  bool is_near(uint64_t end, uint64_t begin) const { return options_.check && begin >= end && begin - end <= options_.gap_max; }

  void flush() {
    if (rows_.size() == 1) {
      read_straight(rows_[0]);
    } else if (!rows_.empty()) {
      const uint64_t begin = has_gaps_ ? begin_ : rows_[0].from;
      buffer_.resize(end_ - begin);
      counts_.buffer_bytes = std::max<uint64_t>(counts_.buffer_bytes, buffer_.size());
      read(begin, buffer_.data(), buffer_.size());
      for (const Row& row : rows_) std::memcpy(to_ + row.to, buffer_.data() + (row.from - begin), row.bytes);
    }
    for (const Row& row : rows_) counts_.bytes_used += row.bytes;
    rows_.clear();
    has_gaps_ = false;
  }
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
    if (options_.check) runs_.add(from, to, bytes);
  }

  const ByteSource& source_;
  uint64_t base_, payload_bytes_;
  char* to_;
  const ReadOptions& options_;
  ReadCounts& counts_;
  Runs& runs_;
  std::vector<Row> rows_;
  std::string buffer_;
  uint64_t begin_ = 0, end_ = 0;  // of what is read for `rows_`
  bool has_gaps_ = false;         // between `rows_`
};

}  // namespace

struct BoxReader::Entry {
  std::unique_ptr<SliceSource> slice;  // of an entry that was read when it was opened
  const ByteSource* source = nullptr;  // the slice, or else the file
  std::string name;
  TensorEntry entry;  // payload_offset is in the source
  Extent extent;
  // Of the whole entry, and of what comes before the payload and behind it; where a sidecar has the first.
  std::optional<uint32_t> expected;
  uint32_t head_crc = 0, tail_crc = 0;
  uint64_t tail_bytes = 0;
  Runs runs;
  bool checked = false;
};

BoxReader::BoxReader(FileSystem& files, std::string folder, const Checkpoint& checkpoint, ReadOptions options,
                     const Checksums* sums)
    : files_(files), folder_(std::move(folder)), checkpoint_(checkpoint), options_(options), sums_(sums) {}

BoxReader::~BoxReader() = default;

const FileSource& BoxReader::source(const std::string& file) {
  std::unique_ptr<FileSource>& source = sources_[file];
  if (!source) source = std::make_unique<FileSource>(files_, folder_ + "/" + file);
  return *source;
}

BoxReader::Entry& BoxReader::entry(const std::string& name, const StoredTensor& tensor, size_t index) {
  const Chunk& chunk = tensor.chunks[index];
  std::unique_ptr<Entry>& known = entries_[{chunk.extent.file, chunk.extent.offset}];
  const FileSource& file = source(chunk.extent.file);
  const std::string who = fmt::format("{} (tensor {}, {})", file.name(), name, box_text(chunk.offsets, chunk.sizes));
  const auto require_agrees = [&](const TensorEntry& found) {
    SHARD_REQUIRE(found.dtype == tensor.dtype && found.sizes == chunk.sizes, "checkpoint",
                  "{}: holds {} of sizes [{}], but .metadata says {} of [{}]. Do these files belong together?", who,
                  dtype_info(found.dtype).name, fmt::join(found.sizes, ", "), dtype_info(tensor.dtype).name,
                  fmt::join(chunk.sizes, ", "));
  };
  if (known) {
    require_agrees(known->entry);  // two tensors may name the same bytes, as tied ones do
    return *known;
  }
  auto slice = std::make_unique<SliceSource>(file, chunk.extent.offset, chunk.extent.length, who);
  TensorEntry parsed = parse_tensor_entry(*slice);
  require_agrees(parsed);
  auto made = std::make_unique<Entry>();
  made->source = &file;
  made->name = who;
  made->entry = std::move(parsed);
  made->extent = chunk.extent;
  if (options_.check_around) check_surroundings(*made, chunk.extent, *slice);
  const TensorEntry& found = made->entry;
  if (slice->is_kept()) {
    if (options_.check) compare(*made, crc_of(*slice, found.payload_offset, found.payload_offset + found.payload_bytes));
    made->checked = options_.check;
    made->slice = std::move(slice);
    made->source = made->slice.get();
  } else {
    made->entry.payload_offset += chunk.extent.offset;
  }
  known = std::move(made);
  return *known;
}

// What the sidecar has a sum of can be compared only together with the payload.
void BoxReader::check_surroundings(Entry& entry, const Extent& extent, const SliceSource& slice) {
  const uint64_t begin = entry.entry.payload_offset, end = begin + entry.entry.payload_bytes;
  if (!sums_) {
    for (const ZipRecord& record : read_zip(slice))
      if (record.offset != begin || record.bytes != entry.entry.payload_bytes) check_record(slice, record);
    return;
  }
  const auto sum = sums_->entries.find({extent.file, extent.offset});
  SHARD_REQUIRE(sum != sums_->entries.end(), "checkpoint", "{}: has no checksum in the sidecar", entry.name);
  entry.expected = sum->second;
  entry.head_crc = crc_of(slice, 0, begin);
  entry.tail_bytes = slice.size() - end;
  entry.tail_crc = crc_of(slice, end, slice.size());
}

void BoxReader::compare(const Entry& held, uint32_t payload_crc) {
  uint32_t crc = payload_crc, expected = held.entry.payload_crc;
  if (held.expected) {
    crc = crc32_join(held.head_crc, crc, held.entry.payload_bytes);
    crc = crc32_join(crc, held.tail_crc, held.tail_bytes);
    expected = *held.expected;
  }
  SHARD_REQUIRE(crc == expected, "checkpoint",
                "{}: its bytes are damaged, the CRC does not agree. Load an older checkpoint, or see `checkpoint verify`.",
                held.name);
}

void BoxReader::compare(const Extent& extent, uint32_t payload_crc) {
  const auto found = entries_.find({extent.file, extent.offset});
  if (found == entries_.end() || found->second->checked) return;
  compare(*found->second, payload_crc);
  found->second->checked = true;
}

void BoxReader::check_without_elements(const std::string& name) {
  const StoredTensor& tensor = checkpoint_.tensors.at(name);
  for (size_t i = 0; i < tensor.chunks.size(); ++i)
    if (numel(tensor.chunks[i].sizes) == 0) entry(name, tensor, i);
}

std::vector<PartlyRead> BoxReader::partly_read() const {
  std::vector<PartlyRead> parts;
  for (const auto& [place, held] : entries_)
    if (!held->checked) parts.push_back({held->extent, held->entry.payload_bytes, held->runs.all()});
  return parts;
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
  ReadOptions how = options_;
  how.check &= !held.checked;
  RowReader rows(*held.source, stored.payload_offset, stored.payload_bytes, destination, how, counts_, held.runs);
  const RowWalk walk(sizes, stored.strides, strides);
  walk.each([&](int64_t row_from, int64_t row_to) {
    rows.add(static_cast<uint64_t>(from + row_from) * item, static_cast<uint64_t>(to + row_to) * item,
             static_cast<uint64_t>(walk.row_elements) * item);
  });
  rows.finish();
  if (!how.check) return;
  if (held.runs.is_whole(stored.payload_bytes)) {
    compare(held, held.runs.all().front().crc);
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
  at::Tensor whole = at::empty(tensor.sizes, tensor.dtype);
  read(name, whole_box(tensor.sizes), whole);
  return whole;
}

}  // namespace shardproof::checkpoint
