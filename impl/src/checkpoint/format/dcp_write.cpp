#include <map>
#include <random>
#include <string_view>

#include "checkpoint/format/dcp_validate.h"
#include "checkpoint/format/pickle_writer.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/dcp.h"

namespace shardproof::checkpoint {
namespace {

// PyTorch's classes, as the globals of the pickle.
struct Class {
  std::string_view name;
  size_t module_chars = name.rfind('.');
};
constexpr Class kMetadata{"torch.distributed.checkpoint.metadata.Metadata"};
constexpr Class kTensor{"torch.distributed.checkpoint.metadata.TensorStorageMetadata"};
constexpr Class kBytes{"torch.distributed.checkpoint.metadata.BytesStorageMetadata"};
constexpr Class kProperties{"torch.distributed.checkpoint.metadata.TensorProperties"};
constexpr Class kMemoryFormat{"torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING"};
constexpr Class kChunk{"torch.distributed.checkpoint.metadata.ChunkStorageMetadata"};
constexpr Class kIndex{"torch.distributed.checkpoint.metadata.MetadataIndex"};
constexpr Class kStorageMeta{"torch.distributed.checkpoint.metadata.StorageMeta"};
constexpr Class kPlace{"torch.distributed.checkpoint.filesystem._StorageInfo"};
constexpr Class kSize{"torch.Size"};
constexpr Class kLayout{"torch.serialization._get_layout"};

// Writes the metadata's opcodes from front to back. Of a checkpoint with a million tensors, the tree of its values alone would
// take gigabytes.
class MetadataWriter {
 public:
  explicit MetadataWriter(const Checkpoint& checkpoint) : checkpoint_(checkpoint) {}

  std::string write(const std::string& save_id) {
    begin_instance(kMetadata, 5);
    out_.string("state_dict_metadata");
    write_names();
    out_.string("planner_data");
    write_paths();
    out_.string("storage_data");
    write_places();
    out_.string("storage_meta");
    write_storage_meta(save_id);
    out_.string("version");
    out_.string("1.0.0");
    end_instance(5);
    return out_.finish();
  }

 private:
  void global(const Class& type) { out_.global(type.name, type.module_chars); }

  // An instance of a dataclass: so many fields, each a name and a value, are written between the two calls.
  void begin_instance(const Class& type, size_t fields) {
    global(type);
    out_.end_tuple(0);
    out_.make_object();
    out_.begin_dict(fields);
  }
  void end_instance(size_t fields) {
    out_.end_dict(fields);
    out_.set_state();
  }
  // The call of a global with the argument that `write` writes.
  template <class Write>
  void write_call(const Class& function, const Write& write_argument) {
    global(function);
    out_.begin_tuple(1);
    write_argument();
    out_.end_tuple(1);
    out_.call();
  }

  // Layers of a kind have equal sizes and are cut at equal offsets, so most of these were written before.
  void write_size(const Shape& sizes) {
    if (const auto known = sizes_.find(sizes); known != sizes_.end()) return out_.recall(known->second);
    write_call(kSize, [&] {
      out_.begin_tuple(sizes.size());
      for (const int64_t size : sizes) out_.integer(size);
      out_.end_tuple(sizes.size());
    });
    sizes_.emplace(sizes, out_.remember());
  }
  void write_number(std::string_view field, uint64_t value) {
    out_.string(field);
    out_.integer(static_cast<int64_t>(value));
  }

  // Its state is a tuple: dtype, layout, requires_grad, memory format (0: contiguous), pin_memory.
  void write_properties(Dtype dtype) {
    global(kProperties);
    out_.end_tuple(0);
    out_.make_object();
    out_.begin_tuple(5);
    const std::string& name = dtypes_.try_emplace(dtype, fmt::format("torch.{}", dtype_info(dtype).name)).first->second;
    out_.global(name, name.find('.'));
    write_call(kLayout, [&] { out_.string("torch.strided"); });
    out_.boolean(false);
    write_call(kMemoryFormat, [&] { out_.integer(0); });
    out_.boolean(false);
    out_.end_tuple(5);
    out_.set_state();
  }

  void write_tensor(const StoredTensor& tensor) {
    begin_instance(kTensor, 3);
    out_.string("properties");
    write_properties(tensor.dtype);
    out_.string("size");
    write_size(tensor.sizes);
    out_.string("chunks");
    out_.begin_list(tensor.chunks.size());
    for (const Chunk& chunk : tensor.chunks) {
      begin_instance(kChunk, 2);
      out_.string("offsets");
      write_size(chunk.offsets);
      out_.string("sizes");
      write_size(chunk.sizes);
      end_instance(2);
    }
    out_.end_list(tensor.chunks.size());
    end_instance(3);
  }

  size_t names() const { return checkpoint_.values.size() + checkpoint_.tensors.size(); }

  void write_names() {
    out_.begin_dict(names());
    for (const auto& [name, extent] : checkpoint_.values) {
      out_.string(name);
      global(kBytes);  // without fields, which Python leaves out
      out_.end_tuple(0);
      out_.make_object();
    }
    for (const auto& [name, tensor] : checkpoint_.tensors) {
      out_.string(name);
      write_tensor(tensor);
    }
    out_.end_dict(names());
  }

  void write_path(const std::string& name) {
    out_.string(name);
    const auto found = checkpoint_.paths.find(name);
    if (found == checkpoint_.paths.end()) {
      out_.begin_tuple(1);
      out_.string(name);
      return out_.end_tuple(1);
    }
    const Path& path = found->second;
    out_.begin_tuple(path.size());
    for (const PathElement& element : path) {
      if (const auto* index = std::get_if<int64_t>(&element))
        out_.integer(*index);
      else
        out_.string(std::get<std::string>(element));
    }
    out_.end_tuple(path.size());
  }
  void write_paths() {
    out_.begin_dict(names());
    for (const auto& [name, extent] : checkpoint_.values) write_path(name);
    for (const auto& [name, tensor] : checkpoint_.tensors) write_path(name);
    out_.end_dict(names());
  }

  void write_extent(const Extent& extent) {
    begin_instance(kPlace, 3);
    out_.string("relative_path");
    out_.string(extent.file);
    write_number("offset", extent.offset);
    write_number("length", extent.length);
    end_instance(3);
  }
  void write_places() {
    size_t count = checkpoint_.values.size();
    for (const auto& [name, tensor] : checkpoint_.tensors) count += tensor.chunks.size();
    out_.begin_dict(count);
    for (const auto& [name, extent] : checkpoint_.values) {
      begin_instance(kIndex, 2);
      out_.string("fqn");
      out_.string(name);
      out_.string("index");
      out_.none();
      end_instance(2);
      write_extent(extent);
    }
    for (const auto& [name, tensor] : checkpoint_.tensors)
      for (size_t i = 0; i < tensor.chunks.size(); ++i) {
        begin_instance(kIndex, 3);
        out_.string("fqn");
        out_.string(name);
        write_number("index", i);
        out_.string("offset");
        write_size(tensor.chunks[i].offsets);
        end_instance(3);
        write_extent(tensor.chunks[i].extent);
      }
    out_.end_dict(count);
  }

  void write_storage_meta(const std::string& save_id) {
    begin_instance(kStorageMeta, 4);
    out_.string("checkpoint_id");
    if (checkpoint_.has_checksums)
      out_.string(kChecksumsMark);
    else
      out_.none();
    out_.string("save_id");
    out_.string(save_id);
    out_.string("load_id");
    out_.none();
    out_.string("modules");
    out_.begin_list(0);
    out_.end_list(0);
    end_instance(4);
  }

  const Checkpoint& checkpoint_;
  PickleWriter out_{4};
  std::map<Shape, size_t> sizes_;        // where the pickle's memo has those that were written
  std::map<Dtype, std::string> dtypes_;  // the globals of those that occur
};

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
  return MetadataWriter(checkpoint).write(save_id());
}

}  // namespace shardproof::checkpoint
