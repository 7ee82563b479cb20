#include <random>

#include "checkpoint/format/dcp_validate.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/dcp.h"

namespace shardproof::checkpoint {
namespace {

constexpr const char* kMetadata = "torch.distributed.checkpoint.metadata";

Value size_value(const Shape& sizes) {
  Value::Items items;
  for (const int64_t size : sizes) items.push_back(Value::integer(size));
  return Value::reduced("torch", "Size", {Value::tuple(std::move(items))});
}

Value field(const char* name) {
  return Value::string(name);
}

Value properties(Dtype dtype) {
  // Its state is a tuple: dtype, layout, requires_grad, memory format (0: contiguous), pin_memory.
  const Value state = Value::tuple(
      {Value::global("torch", std::string(dtype_info(dtype).name)),
       Value::reduced("torch.serialization", "_get_layout", {Value::string("torch.strided")}), Value::boolean(false),
       Value::reduced(kMetadata, "_MEM_FORMAT_ENCODING", {Value::integer(0)}), Value::boolean(false)});
  return Value::instance(kMetadata, "TensorProperties", state);
}

Value tensor_value(const StoredTensor& tensor) {
  Value::Items chunks;
  for (const Chunk& chunk : tensor.chunks)
    chunks.push_back(Value::instance(
        kMetadata, "ChunkStorageMetadata",
        Value::Pairs{{field("offsets"), size_value(chunk.offsets)}, {field("sizes"), size_value(chunk.sizes)}}));
  return Value::instance(kMetadata, "TensorStorageMetadata",
                         Value::Pairs{{field("properties"), properties(tensor.dtype)},
                                      {field("size"), size_value(tensor.sizes)},
                                      {field("chunks"), Value::list(std::move(chunks))}});
}

Value extent_value(const Extent& extent) {
  return Value::instance("torch.distributed.checkpoint.filesystem", "_StorageInfo",
                         Value::Pairs{{field("relative_path"), Value::string(extent.file)},
                                      {field("offset"), Value::integer(static_cast<int64_t>(extent.offset))},
                                      {field("length"), Value::integer(static_cast<int64_t>(extent.length))}});
}

Value path_value(const std::string& name, const Checkpoint& checkpoint) {
  const auto found = checkpoint.paths.find(name);
  if (found == checkpoint.paths.end()) return Value::tuple({Value::string(name)});
  Value::Items items;
  for (const PathElement& element : found->second) {
    const auto* index = std::get_if<int64_t>(&element);
    items.push_back(index ? Value::integer(*index) : Value::string(std::get<std::string>(element)));
  }
  return Value::tuple(std::move(items));
}

Value places(const Checkpoint& checkpoint) {
  Value::Pairs pairs;
  for (const auto& [name, extent] : checkpoint.values) {
    Value::Pairs index = {{field("fqn"), Value::string(name)}, {field("index"), Value()}};
    pairs.emplace_back(Value::instance(kMetadata, "MetadataIndex", std::move(index)), extent_value(extent));
  }
  for (const auto& [name, tensor] : checkpoint.tensors)
    for (size_t i = 0; i < tensor.chunks.size(); ++i) {
      Value::Pairs index = {{field("fqn"), Value::string(name)},
                            {field("index"), Value::integer(static_cast<int64_t>(i))},
                            {field("offset"), size_value(tensor.chunks[i].offsets)}};
      pairs.emplace_back(Value::instance(kMetadata, "MetadataIndex", std::move(index)), extent_value(tensor.chunks[i].extent));
    }
  return Value::dict(std::move(pairs));
}

// A random UUID, as PyTorch names a save.
std::string save_id() {
  std::random_device random;
  std::string id;
  for (int i = 0; i < 4; ++i) id += fmt::format("{:08x}", random());
  id[12] = '4';
  id[16] = 'a';
  for (const size_t dash : {20, 16, 12, 8}) id.insert(dash, "-");
  return id;
}

}  // namespace

std::string write_metadata(const Checkpoint& checkpoint) {
  Value::Pairs names, paths;
  for (const auto& [name, extent] : checkpoint.values)
    names.emplace_back(Value::string(name), Value::instance(kMetadata, "BytesStorageMetadata", Value::Pairs{}));
  for (const auto& [name, tensor] : checkpoint.tensors) names.emplace_back(Value::string(name), tensor_value(tensor));
  for (const auto& entry : names) {
    const std::string& name = entry.first.as_string("a name");
    paths.emplace_back(entry.first, path_value(name, checkpoint));
  }
  const Value storage_meta =
      Value::instance(kMetadata, "StorageMeta",
                      Value::Pairs{{field("checkpoint_id"), checkpoint.has_checksums ? Value::string(kChecksumsMark) : Value()},
                                   {field("save_id"), Value::string(save_id())},
                                   {field("load_id"), Value()},
                                   {field("modules"), Value::list({})}});
  return write_pickle(Value::instance(kMetadata, "Metadata",
                                      Value::Pairs{{field("state_dict_metadata"), Value::dict(std::move(names))},
                                                   {field("planner_data"), Value::dict(std::move(paths))},
                                                   {field("storage_data"), places(checkpoint)},
                                                   {field("storage_meta"), storage_meta},
                                                   {field("version"), Value::string("1.0.0")}}),
                      4);
}

}  // namespace shardproof::checkpoint
