#include "checkpoint/format/weights_index.h"

#include "checkpoint/format/json_text.h"
#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kIndexBytesMax = 100'000'000;

}  // namespace

WeightsIndex read_weights_index(FileSystem& files, const std::string& path) {
  const nlohmann::json index = parse_json(read_file(files, path, kIndexBytesMax), path);
  SHARD_REQUIRE(index.is_object() && index.contains("weight_map") && index["weight_map"].is_object(), "safetensors",
                "{}: has no weight_map", path);
  WeightsIndex result;
  result.folder = path.find('/') == std::string::npos ? "." : path.substr(0, path.rfind('/'));
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    SHARD_REQUIRE(file.is_string(), "safetensors", "{}: {} lies in {}, which is no file name", path, tensor, file.dump());
    const auto name = file.get<std::string>();
    SHARD_REQUIRE(!name.empty() && name.find('/') == std::string::npos && name != "..", "safetensors",
                  "{}: {} lies in '{}', outside its folder", path, tensor, name);
    result.files[tensor] = name;
  }
  return result;
}

}  // namespace shardproof::checkpoint
