#include <algorithm>

#include "checkpoint/format/json_text.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {
namespace {

using nlohmann::json;

struct Item {
  const std::string* name;
  const SafeTensorSpec* spec;
  uint64_t bytes;
};

// Larger elements first, so that each lies on a multiple of its size.
std::vector<Item> in_order(const std::map<std::string, SafeTensorSpec>& tensors) {
  std::vector<Item> items;
  for (const auto& [name, spec] : tensors) {
    SHARD_REQUIRE(name != "__metadata__" && !dtype_info(spec.dtype).safetensors.empty(), "safetensors",
                  "{} of {} has no place in a safetensors file", name, dtype_info(spec.dtype).name);
    SHARD_REQUIRE(is_utf8(name), "safetensors", "the name {} is no UTF-8, and has no place in a safetensors file", name);
    items.push_back({&name, &spec, bytes_of(spec.dtype, spec.sizes, name)});
  }
  std::stable_sort(items.begin(), items.end(),
                   [](const Item& a, const Item& b) {
                     return dtype_info(a.spec->dtype).bytes > dtype_info(b.spec->dtype).bytes;
                   });
  return items;
}

void write_one(FileSystem& files, const std::string& path, const std::vector<Item>& items, const TensorBytes& data,
               const std::map<std::string, std::string>& metadata) {
  json header = json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t at = 0;
  for (const Item& item : items) {
    header[*item.name] = {{"dtype", dtype_info(item.spec->dtype).safetensors},
                          {"shape", item.spec->sizes},
                          {"data_offsets", {at, at + item.bytes}}};
    at += item.bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string prefix;
  for (int i = 0; i < 8; ++i) prefix += static_cast<char>(text.size() >> (8 * i));
  OutputFile file(files, path);
  file.write(prefix);
  file.write(text);
  for (const Item& item : items) {
    const std::string bytes = data(*item.name);
    SHARD_REQUIRE(bytes.size() == item.bytes, "safetensors", "{} has {} bytes, expected {}", *item.name, bytes.size(),
                  item.bytes);
    file.write(bytes);
  }
  file.finish();
}

}  // namespace

void write_safetensors(FileSystem& files, const std::string& folder, const std::map<std::string, SafeTensorSpec>& tensors,
                       const TensorBytes& data, uint64_t file_bytes_max, const std::map<std::string, std::string>& metadata) {
  std::vector<std::vector<Item>> parts(1);
  uint64_t part_bytes = 0, all_bytes = 0;
  for (const Item& item : in_order(tensors)) {
    if (!parts.back().empty() && part_bytes + item.bytes > file_bytes_max) {
      parts.emplace_back();
      part_bytes = 0;
    }
    parts.back().push_back(item);
    part_bytes += item.bytes;
    all_bytes += item.bytes;
  }
  if (parts.size() == 1) return write_one(files, folder + "/model.safetensors", parts[0], data, metadata);
  json map = json::object();
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, parts.size());
    for (const Item& item : parts[i]) map[*item.name] = name;
    write_one(files, folder + "/" + name, parts[i], data, metadata);
  }
  const json index = {{"metadata", {{"total_size", all_bytes}}}, {"weight_map", map}};
  write_file(files, folder + "/model.safetensors.index.json", index.dump(2) + "\n");
}

void write_safetensors_file(FileSystem& files, const std::string& path, const std::map<std::string, SafeTensorSpec>& tensors,
                            const TensorBytes& data, const std::map<std::string, std::string>& metadata) {
  write_one(files, path, in_order(tensors), data, metadata);
}

}  // namespace shardproof::checkpoint
