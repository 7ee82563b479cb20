#include "shardproof/checkpoint/format/safetensors.h"

#include <algorithm>

#include "checkpoint/format/cause.h"
#include "checkpoint/format/json_text.h"
#include "checkpoint/format/lfs_pointer.h"
#include "checkpoint/format/weights_index.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {
namespace {

using nlohmann::json;

constexpr uint64_t kHeaderBytesMax = 100'000'000;
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr const char* kSingleFile = "model.safetensors";

uint64_t little(const char* bytes) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[i]);
  return value;
}

SafeTensor read_tensor(const json& entry, const std::string& tensor, const std::string& name, uint64_t data_begin,
                       uint64_t data_bytes) {
  SHARD_REQUIRE(entry.is_object() && entry.size() == 3, "safetensors", "{}: {} should have dtype, shape and data_offsets", name,
                tensor);
  const std::string dtype = entry.at("dtype").get<std::string>();
  const DtypeInfo* info = find_safetensors_dtype(dtype);
  SHARD_REQUIRE(info, "safetensors", "{}: {} has the dtype {}, which is not read", name, tensor, dtype);
  SafeTensor found;
  found.dtype = info->dtype;
  for (const json& size : entry.at("shape")) {
    SHARD_REQUIRE(size.is_number_unsigned() && size.get<uint64_t>() <= uint64_t{1} << 62, "safetensors",
                  "{}: {} has the size {}", name, tensor, size.dump());
    found.sizes.push_back(size.get<int64_t>());
  }
  const json& offsets = entry.at("data_offsets");
  SHARD_REQUIRE(offsets.is_array() && offsets.size() == 2 && offsets[0].is_number_unsigned() && offsets[1].is_number_unsigned(),
                "safetensors", "{}: {} has data_offsets {}", name, tensor, offsets.dump());
  const auto begin = offsets[0].get<uint64_t>(), end = offsets[1].get<uint64_t>();
  SHARD_REQUIRE(begin <= end && end <= data_bytes, "safetensors",
                "{}: {} lies at {} to {}, but there are {} bytes of data. Was the file cut off?", name, tensor, begin, end,
                data_bytes);
  found.file = name;
  found.offset = data_begin + begin;
  found.bytes = end - begin;
  const uint64_t expected = bytes_of(found.dtype, found.sizes, name + ": " + tensor);
  SHARD_REQUIRE(found.bytes == expected, "safetensors", "{}: {} has {} bytes, its shape asks for {}", name, tensor, found.bytes,
                expected);
  return found;
}

void require_tiled(const SafeTensors& file, const std::string& name, uint64_t data_begin, uint64_t end) {
  std::vector<const SafeTensor*> order;
  for (const auto& entry : file.tensors) order.push_back(&entry.second);
  std::sort(order.begin(), order.end(),
            [](auto* a, auto* b) { return std::make_pair(a->offset, a->bytes) < std::make_pair(b->offset, b->bytes); });
  uint64_t at = data_begin;
  for (const SafeTensor* tensor : order) {
    SHARD_REQUIRE(tensor->offset == at, "safetensors", "{}: its tensors overlap or leave a gap at byte {}", name, at);
    at += tensor->bytes;
  }
  SHARD_REQUIRE(at == end, "safetensors", "{}: {} bytes at its end belong to no tensor", name, end - at);
}

SafeTensors open_index(FileSystem& files, const std::string& path) {
  const WeightsIndex index = read_weights_index(files, path);
  SafeTensors all;
  std::map<std::string, SafeTensors> opened;
  for (const auto& [tensor, name] : index.files) {
    if (!opened.contains(name)) opened[name] = read_safetensors_header(FileSource(files, index.folder + "/" + name));
    const auto found = opened[name].tensors.find(tensor);
    SHARD_REQUIRE(found != opened[name].tensors.end(), "safetensors", "{}: {} is not in {}", path, tensor, name);
    all.tensors.insert(*found);
  }
  for (const auto& [name, file] : opened) {
    for (const auto& [tensor, entry] : file.tensors)
      SHARD_REQUIRE(all.tensors.contains(tensor) && all.tensors[tensor].file == entry.file, "safetensors",
                    "{}: {} holds {}, which the index does not name there", path, name, tensor);
    all.metadata.insert(file.metadata.begin(), file.metadata.end());
  }
  return all;
}

}  // namespace

SafeTensors read_safetensors_header(const ByteSource& source) {
  const std::string name = source.name();
  SHARD_REQUIRE(source.size() >= 8, "safetensors", "{}: {} bytes are too few", name, source.size());
  char prefix[8];
  source.read(0, prefix, sizeof prefix);
  require_no_lfs_pointer(source, {prefix, sizeof prefix});
  const uint64_t header_bytes = little(prefix);
  SHARD_REQUIRE(header_bytes <= kHeaderBytesMax && header_bytes <= source.size() - 8, "safetensors",
                "{}: a header of {} bytes does not fit; is it a safetensors file, and whole?", name, header_bytes);
  const std::string text = source.read_string(8, header_bytes, kHeaderBytesMax);
  SHARD_REQUIRE(!text.empty() && text[0] == '{', "safetensors", "{}: its header does not begin with {{", name);
  const json header = parse_json(text, name);
  SafeTensors file;
  try {
    for (const auto& [tensor, entry] : header.items()) {
      if (tensor == "__metadata__")
        file.metadata = entry.get<std::map<std::string, std::string>>();
      else
        file.tensors[tensor] = read_tensor(entry, tensor, name, 8 + header_bytes, source.size() - 8 - header_bytes);
    }
  } catch (const json::exception& error) {
    throw Error(message("[safetensors] {}: {}", name, error.what()));
  }
  require_tiled(file, name, 8 + header_bytes, source.size());
  return file;
}

SafeTensors open_safetensors(FileSystem& files, const std::string& path) {
  if (path.ends_with(".json")) return open_index(files, path);
  if (is_folder(files, path)) {
    if (exists(files, path + "/" + kIndexFile)) return open_index(files, path + "/" + kIndexFile);
    return open_safetensors(files, path + "/" + kSingleFile);
  }
  return read_safetensors_header(FileSource(files, path));
}

}  // namespace shardproof::checkpoint
