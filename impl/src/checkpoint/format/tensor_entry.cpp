#include "shardproof/checkpoint/format/tensor_entry.h"

#include <fmt/ranges.h>

#include "checkpoint/format/torch_pickles.h"
#include "shardproof/base/check.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kPickleBytesMax = uint64_t{64} << 20;

Shape shape_of(const Value& value, std::string_view what) {
  Shape shape;
  for (const Value& size : value.as_list(what)) shape.push_back(size.as_int(what));
  return shape;
}

// The bytes from storage element 0 that strides reach, so that nothing is read behind the payload.
void require_inside(const TensorEntry& entry, const std::string& name) {
  const auto item = static_cast<uint64_t>(dtype_info(entry.dtype).bytes);
  SHARD_REQUIRE(entry.sizes.size() == entry.strides.size() && entry.storage_offset >= 0, "checkpoint",
                "{}: sizes [{}] and strides [{}] from {} make no tensor", name, fmt::join(entry.sizes, ", "),
                fmt::join(entry.strides, ", "), entry.storage_offset);
  if (bytes_of(entry.dtype, entry.sizes, name) == 0) return;
  uint64_t last = static_cast<uint64_t>(entry.storage_offset);
  const uint64_t count = entry.payload_bytes / item;
  for (size_t d = 0; d < entry.sizes.size(); ++d) {
    const auto steps = static_cast<uint64_t>(entry.sizes[d] - 1);
    const auto stride = static_cast<uint64_t>(entry.strides[d]);
    SHARD_REQUIRE(entry.strides[d] >= 0 && (steps == 0 || stride <= count / steps) && last < count, "checkpoint",
                  "{}: strides [{}] leave the storage of {} elements", name, fmt::join(entry.strides, ", "), count);
    last += steps * stride;
  }
  SHARD_REQUIRE(last < count, "checkpoint", "{}: sizes [{}] with strides [{}] from {} leave the storage of {} elements", name,
                fmt::join(entry.sizes, ", "), fmt::join(entry.strides, ", "), entry.storage_offset, count);
}

struct StorageId {
  const DtypeInfo* dtype;
  std::string key;
  int64_t elements;
};

// ('storage', torch.FloatStorage, '0', 'cpu', 12)
StorageId storage_of(const Value& persistent, const std::string& name) {
  SHARD_REQUIRE(persistent.type_name() == "persistent id", "checkpoint", "{}: a tensor without a storage", name);
  const Value::Items& id = persistent.args().at(0).as_list("the id of a storage");
  SHARD_REQUIRE(id.size() >= 5 && id[0].as_string("the id of a storage") == "storage", "checkpoint",
                "{}: unknown persistent id {}", name, persistent.str());
  const std::string& type = id[1].as_global("the type of a storage");
  const DtypeInfo* dtype = find_storage(std::string_view(type).substr(type.rfind('.') + 1));
  SHARD_REQUIRE(dtype, "checkpoint", "{}: storages of type {} are not read", name, type);
  const int64_t elements = id[4].as_int("the length of a storage");
  SHARD_REQUIRE(elements >= 0, "checkpoint", "{}: a storage of {} elements", name, elements);
  return {dtype, id[2].as_string("the key of a storage"), elements};
}

void require_byte_order(const ByteSource& source, const std::vector<ZipRecord>& records) {
  const ZipRecord* order = find_record(records, "byteorder");
  if (!order) return;  // older than 2.0, always little
  const std::string text = read_record(source, *order, 16);
  SHARD_REQUIRE(text == "little", "checkpoint", "{}: byte order '{}'; only little is read", source.name(), text);
}

}  // namespace

uint64_t bytes_of(Dtype dtype, const Shape& sizes, const std::string& who) {
  int64_t bytes = 0;
  SHARD_REQUIRE(!__builtin_mul_overflow(numel(sizes), static_cast<int64_t>(dtype_info(dtype).bytes), &bytes), "checkpoint",
                "{}: {} of sizes [{}] has 2^63 bytes or more", who, dtype_info(dtype).name, fmt::join(sizes, ", "));
  return static_cast<uint64_t>(bytes);
}

TensorEntryLayout lay_out_tensor_entry(Dtype dtype, const Shape& sizes) {
  TensorEntryLayout layout;
  layout.dtype = dtype;
  layout.sizes = sizes;
  layout.payload_bytes = bytes_of(dtype, sizes);
  ZipWriter zip([&](const void* data, size_t bytes) { layout.head.append(static_cast<const char*>(data), bytes); });
  add_torch_records(zip, write_pickle(torch_tensor(dtype, sizes, "0")));
  zip.begin("archive/data/0", layout.payload_bytes);
  layout.length = layout.head.size() + layout.payload_bytes + layout.tail(0).size();
  return layout;
}

std::string TensorEntryLayout::tail(uint32_t payload_crc) const {
  std::string text;
  ZipWriter zip([&](const void* data, size_t bytes) { text.append(static_cast<const char*>(data), bytes); });
  add_torch_records(zip, write_pickle(torch_tensor(dtype, sizes, "0")));
  zip.begin("archive/data/0", payload_bytes);
  text.clear();
  zip.payload_elsewhere(payload_crc);
  zip.end();
  add_torch_version(zip);
  zip.finish();
  return text;
}

bool TensorEntry::contiguous() const {
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    if (sizes[d] != 1 && strides[d] != stride) return false;
    stride *= sizes[d];
  }
  return true;
}

Value read_torch_data(const ByteSource& source, const std::vector<ZipRecord>& records, const AllowedGlobals& allowed) {
  const ZipRecord* data = find_record(records, "data.pkl");
  SHARD_REQUIRE(data, "checkpoint", "{}: has no data.pkl, so it was not written by torch.save", source.name());
  require_byte_order(source, records);
  return read_pickle(read_record(source, *data, kPickleBytesMax), allowed, source.name());
}

bool is_torch_tensor(const Value& value) {
  return value.type_name() == "torch._utils._rebuild_parameter" || value.type_name() == "torch._utils._rebuild_tensor_v2";
}

TensorEntry read_torch_tensor(const Value& described, const std::vector<ZipRecord>& records, const std::string& name) {
  Value value = described;
  if (value.type_name() == "torch._utils._rebuild_parameter" && !value.args().empty()) value = Value(value.args()[0]);
  SHARD_REQUIRE(value.type_name() == "torch._utils._rebuild_tensor_v2" && value.args().size() >= 4, "checkpoint",
                "{}: holds no plain tensor but {}", name, value.str());
  const StorageId storage = storage_of(value.args()[0], name);
  TensorEntry entry;
  entry.dtype = storage.dtype->dtype;
  entry.storage_offset = value.args()[1].as_int("the offset in a storage");
  entry.sizes = shape_of(value.args()[2], "the sizes of a tensor");
  entry.strides = shape_of(value.args()[3], "the strides of a tensor");
  const ZipRecord* payload = find_record(records, "data/" + storage.key);
  SHARD_REQUIRE(payload, "checkpoint", "{}: its storage data/{} is missing", name, storage.key);
  SHARD_REQUIRE(payload->bytes / static_cast<uint64_t>(storage.dtype->bytes) == static_cast<uint64_t>(storage.elements) &&
                    payload->bytes % static_cast<uint64_t>(storage.dtype->bytes) == 0,
                "checkpoint", "{}: its storage of {} bytes does not hold {} elements of {}", name, payload->bytes,
                storage.elements, storage.dtype->name);
  entry.payload_offset = payload->offset;
  entry.payload_bytes = payload->bytes;
  entry.payload_crc = payload->crc;
  require_inside(entry, name);
  return entry;
}

TensorEntry parse_tensor_entry(const ByteSource& source) {
  const std::vector<ZipRecord> records = read_zip(source);
  return read_torch_tensor(read_torch_data(source, records, tensor_globals()), records, source.name());
}

std::string write_value_entry(const Value& value) {
  std::string text;
  ZipWriter zip([&](const void* data, size_t bytes) { text.append(static_cast<const char*>(data), bytes); });
  add_torch_records(zip, write_pickle(value));
  add_torch_version(zip);
  zip.finish();
  return text;
}

Value read_value_entry(const ByteSource& source, const AllowedGlobals& allowed) {
  return read_torch_data(source, read_zip(source), allowed);
}

}  // namespace shardproof::checkpoint
