#include <fmt/ranges.h>

#include "checkpoint/format/dcp_validate.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kMetadataBytesMax = uint64_t{1} << 31;

// Reads the tree of one `.metadata`; `where_` is the name it is busy with, for messages.
class MetadataReader {
 public:
  explicit MetadataReader(const std::string& name) : name_(name) {}

  Checkpoint read(const Value& root) {
    require(root.type_name().ends_with(".Metadata"), "is no checkpoint metadata");
    read_places(field(root, "storage_data"));
    for (const auto& [key, value] : field(root, "state_dict_metadata").as_dict("state_dict_metadata")) {
      where_ = key.as_string("a name in state_dict_metadata");
      if (value.type_name().ends_with(".BytesStorageMetadata"))
        read_value();
      else
        read_tensor(value);
    }
    where_.clear();
    if (const Value* paths = root.find("planner_data"); paths && !paths->is_none()) read_paths(*paths);
    const Value* meta = root.find("storage_meta");
    const Value* mark = meta ? meta->find("checkpoint_id") : nullptr;
    checkpoint_.has_checksums =
        mark && mark->kind() == Value::Kind::kString && mark->as_string("checkpoint_id") == kChecksumsMark;
    return std::move(checkpoint_);
  }

 private:
  void require(bool condition, const std::string& what) const {
    SHARD_REQUIRE(condition, "checkpoint", "{}: {}{} {}", name_, where_.empty() ? "" : "tensor ",
                  where_.empty() ? "it" : where_, what);
  }
  const Value& field(const Value& object, const char* name) const {
    const Value* found = object.find(name);
    require(found, fmt::format("lacks the field {}", name));
    return *found;
  }

  // torch.Size((2, 3)), or a tuple or list in older files.
  Shape shape(const Value& value, const char* what) const {
    const bool wrapped = value.type_name() == "torch.Size";
    require(!wrapped || value.args().size() == 1, "has a torch.Size without sizes");
    Shape sizes;
    for (const Value& size : (wrapped ? value.args()[0] : value).as_list(what)) sizes.push_back(size.as_int(what));
    return sizes;
  }

  uint64_t natural(const Value& value, const char* what) const {
    const int64_t number = value.as_int(what);
    require(number >= 0, fmt::format("has the {} {}", what, number));
    return static_cast<uint64_t>(number);
  }

  // storage_data: MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length).
  void read_places(const Value& storage) {
    require(!storage.is_none(), "has no storage_data: it was not written by a file system writer");
    for (const auto& [index, info] : storage.as_dict("storage_data")) {
      where_ = field(index, "fqn").as_string("the name in a MetadataIndex");
      const Value* transforms = info.find("transform_descriptors");
      require(!transforms || transforms->is_none() || transforms->as_list("transform_descriptors").empty(),
              "is stored compressed or transformed, which is not read");
      Extent extent{field(info, "relative_path").as_string("relative_path"), natural(field(info, "offset"), "offset"),
                    natural(field(info, "length"), "length")};
      const Value* offsets = index.find("offset");
      if (!offsets || offsets->is_none()) {
        require(places_of_values_.emplace(where_, extent).second, "is stored twice");
      } else {
        const auto key = std::make_pair(where_, shape(*offsets, "the offsets in a MetadataIndex"));
        require(places_.emplace(key, extent).second, fmt::format("is stored twice at [{}]", fmt::join(key.second, ", ")));
      }
    }
    where_.clear();
  }

  void read_value() {
    const auto found = places_of_values_.find(where_);
    require(found != places_of_values_.end(), "lies nowhere: storage_data does not name it");
    require(checkpoint_.values.emplace(where_, found->second).second, "is named twice");
  }

  // A dataclass' dict, or the tuple of a __getstate__, whose first element is the dtype.
  Dtype dtype(const Value& properties) const {
    const Value& state = properties.state();
    const Value* value = state.kind() == Value::Kind::kTuple && !state.as_list("properties").empty()
                             ? &state.as_list("properties")[0]
                             : properties.find("dtype");
    require(value, "has no dtype");
    const std::string& name = value->as_global("a dtype");
    const DtypeInfo* info = find_dtype(std::string_view(name).substr(name.find('.') + 1));
    require(info, fmt::format("has the dtype {}, which is not read", name));
    return info->dtype;
  }

  void read_tensor(const Value& value) {
    require(value.type_name().ends_with(".TensorStorageMetadata"), fmt::format("is of the unknown kind {}", value.str()));
    StoredTensor tensor;
    tensor.dtype = dtype(field(value, "properties"));
    tensor.sizes = shape(field(value, "size"), "the sizes of a tensor");
    for (const Value& item : field(value, "chunks").as_list("chunks")) {
      Chunk chunk;
      chunk.offsets = shape(field(item, "offsets"), "the offsets of a chunk");
      chunk.sizes = shape(field(item, "sizes"), "the sizes of a chunk");
      const auto found = places_.find({where_, chunk.offsets});
      require(found != places_.end(),
              fmt::format("lies nowhere at [{}]: storage_data does not name that chunk", fmt::join(chunk.offsets, ", ")));
      chunk.extent = found->second;
      tensor.chunks.push_back(std::move(chunk));
    }
    require(checkpoint_.tensors.emplace(where_, std::move(tensor)).second, "is named twice");
  }

  void read_paths(const Value& paths) {
    for (const auto& [key, value] : paths.as_dict("planner_data")) {
      where_ = key.as_string("a name in planner_data");
      Path path;
      for (const Value& element : value.as_list("a path in planner_data")) {
        if (element.kind() == Value::Kind::kInt)
          path.emplace_back(element.as_int("a path"));
        else
          path.emplace_back(element.as_string("a path"));
      }
      if (!checkpoint_.tensors.contains(where_) && !checkpoint_.values.contains(where_)) continue;  // of nothing that is stored
      if (path != Path{where_}) checkpoint_.paths.emplace(where_, std::move(path));
    }
  }

  const std::string& name_;
  std::string where_;
  Checkpoint checkpoint_;
  std::map<std::pair<std::string, Shape>, Extent> places_;
  std::map<std::string, Extent> places_of_values_;
};

}  // namespace

Box Chunk::box() const {
  Box box;
  for (size_t d = 0; d < sizes.size(); ++d) box.push_back({offsets[d], offsets[d] + sizes[d]});
  return box;
}

Checkpoint read_metadata(std::string_view bytes, const std::string& name) {
  return MetadataReader(name).read(read_pickle(bytes, metadata_globals(), name));
}

Checkpoint open_checkpoint(FileSystem& files, const std::string& folder) {
  const std::string path = folder + "/" + kMetadataFile;
  Checkpoint checkpoint = read_metadata(read_file(files, path, kMetadataBytesMax), path);
  validate(checkpoint, path);
  validate_files(checkpoint, folder);
  return checkpoint;
}

Value read_value(FileSystem& files, const std::string& folder, const std::string& name, const Extent& extent) {
  const FileSource file(files, folder + "/" + extent.file);
  const SliceSource entry(file, extent.offset, extent.length,
                          fmt::format("{} ({} at {})", file.name(), escaped(name), extent.offset));
  return read_value_entry(entry);
}

}  // namespace shardproof::checkpoint
