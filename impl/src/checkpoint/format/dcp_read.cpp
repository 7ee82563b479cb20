#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "checkpoint/format/dcp_validate.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace shardproof::checkpoint {
namespace {

constexpr uint64_t kMetadataBytesMax = uint64_t{1} << 31;

// Where the chunks of a tensor lie.
struct Place {
  Shape offsets;
  Extent extent;
};

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
  // The message is made only where it is needed: a large checkpoint is asked tens of millions of questions.
  template <class... Values>
  void require(bool condition, fmt::format_string<Values...> what, Values&&... values) const {
    if (!condition) [[unlikely]]
      fail(what, std::forward<Values>(values)...);
  }
  template <class... Values>
  [[noreturn]] void fail(fmt::format_string<Values...> what, Values&&... values) const {
    throw Error(message("[checkpoint] {}: {}{} {}", name_, where_.empty() ? "" : "tensor ", where_.empty() ? "it" : where_,
                        fmt::format(what, std::forward<Values>(values)...)));
  }
  const Value& field(const Value& object, const char* name) const {
    const Value* found = object.find(name);
    require(found, "lacks the field {}", name);
    return *found;
  }

  // torch.Size((2, 3)), or a tuple or list in older files.
  Shape shape(const Value& value, const char* what) const {
    const bool wrapped = value.type_name() == "torch.Size";
    require(!wrapped || value.args().size() == 1, "has a torch.Size without sizes");
    Shape sizes;
    const Value::Items& items = (wrapped ? value.args()[0] : value).as_list(what);
    sizes.reserve(items.size());
    for (const Value& size : items) sizes.push_back(size.as_int(what));
    return sizes;
  }

  uint64_t natural(const Value& value, const char* what) const {
    const int64_t number = value.as_int(what);
    require(number >= 0, "has the {} {}", what, number);
    return static_cast<uint64_t>(number);
  }

  // storage_data: MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length).
  void read_places(const Value& storage) {
    require(!storage.is_none(), "has no storage_data: it was not written by a file system writer");
    for (const auto& [index, info] : storage.as_dict("storage_data")) {
      const std::string& name = field(index, "fqn").as_string("the name in a MetadataIndex");
      where_ = name;
      const Value* transforms = info.find("transform_descriptors");
      require(!transforms || transforms->is_none() || transforms->as_list("transform_descriptors").empty(),
              "is stored compressed or transformed, which is not read");
      Extent extent{field(info, "relative_path").as_string("relative_path"), natural(field(info, "offset"), "offset"),
                    natural(field(info, "length"), "length")};
      const Value* offsets = index.find("offset");
      if (!offsets || offsets->is_none()) {
        require(places_of_values_.emplace(where_, extent).second, "is stored twice");
      } else {
        places_[name].push_back({shape(*offsets, "the offsets in a MetadataIndex"), std::move(extent)});
      }
    }
    for (auto& [name, places] : places_) sort_places(name, places);
    where_.clear();
  }

  void sort_places(std::string_view name, std::vector<Place>& places) {
    std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.offsets < b.offsets; });
    const auto twice =
        std::adjacent_find(places.begin(), places.end(), [](const Place& a, const Place& b) { return a.offsets == b.offsets; });
    if (twice == places.end()) return;
    where_ = name;
    fail("is stored twice at [{}]", fmt::join(twice->offsets, ", "));
  }

  // Of a tensor's chunk. Most files list places and chunks in the same order, so it is looked for at the same number first.
  const Extent& place_of(const Shape& offsets, const std::vector<Place>& places, size_t chunk) const {
    if (chunk < places.size() && places[chunk].offsets == offsets) return places[chunk].extent;
    const auto found = std::lower_bound(places.begin(), places.end(), offsets,
                                        [](const Place& place, const Shape& wanted) { return place.offsets < wanted; });
    if (found == places.end() || found->offsets != offsets)
      fail("lies nowhere at [{}]: storage_data does not name that chunk", fmt::join(offsets, ", "));
    return found->extent;
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
    require(info, "has the dtype {}, which is not read", name);
    return info->dtype;
  }

  void read_tensor(const Value& value) {
    if (!value.type_name().ends_with(".TensorStorageMetadata")) fail("is of the unknown kind {}", value.str());
    StoredTensor tensor;
    tensor.dtype = dtype(field(value, "properties"));
    tensor.sizes = shape(field(value, "size"), "the sizes of a tensor");
    const Value::Items& items = field(value, "chunks").as_list("chunks");
    const auto known = places_.find(where_);
    static const std::vector<Place> none;
    const std::vector<Place>& places = known == places_.end() ? none : known->second;
    tensor.chunks.reserve(items.size());
    for (const Value& item : items) {
      Chunk chunk;
      chunk.offsets = shape(field(item, "offsets"), "the offsets of a chunk");
      chunk.sizes = shape(field(item, "sizes"), "the sizes of a chunk");
      chunk.extent = place_of(chunk.offsets, places, tensor.chunks.size());
      tensor.chunks.push_back(std::move(chunk));
    }
    const size_t before = checkpoint_.tensors.size();
    checkpoint_.tensors.emplace_hint(checkpoint_.tensors.end(), where_, std::move(tensor));  // most files ascend
    require(checkpoint_.tensors.size() > before, "is named twice");
  }

  void read_paths(const Value& paths) {
    for (const auto& [key, value] : paths.as_dict("planner_data")) {
      where_ = key.as_string("a name in planner_data");
      const Value::Items& elements = value.as_list("a path in planner_data");
      const bool is_own =
          elements.size() == 1 && elements[0].kind() == Value::Kind::kString && elements[0].as_string("a path") == where_;
      if (is_own) continue;
      Path path;
      for (const Value& element : elements) {
        if (element.kind() == Value::Kind::kInt)
          path.emplace_back(element.as_int("a path"));
        else
          path.emplace_back(element.as_string("a path"));
      }
      if (!checkpoint_.tensors.contains(where_) && !checkpoint_.values.contains(where_)) continue;  // of nothing that is stored
      checkpoint_.paths.emplace_hint(checkpoint_.paths.end(), where_, std::move(path));
    }
  }

  const std::string& name_;
  std::string where_;
  Checkpoint checkpoint_;
  std::unordered_map<std::string_view, std::vector<Place>> places_;  // by names in the tree; of a tensor, by offsets
  std::map<std::string, Extent> places_of_values_;
};

}  // namespace

Box Chunk::box() const {
  Box box;
  for (size_t d = 0; d < sizes.size(); ++d) box.push_back({offsets[d], offsets[d] + sizes[d]});
  return box;
}

Checkpoint read_metadata(std::string_view bytes, const std::string& name) {
  // A box takes less than this many values for each byte of its description, however many boxes there are.
  constexpr int64_t kNodesPerByte = 4;
  PickleLimits limits;
  limits.nodes_max = std::max(limits.nodes_max, kNodesPerByte * std::ssize(bytes));
  const Value root = read_pickle(bytes, metadata_globals(), name, limits);
  return MetadataReader(name).read(root);
}

Checkpoint open_checkpoint(FileSystem& files, const std::string& folder) {
  const std::string path = folder + "/" + kMetadataFile;
  Checkpoint checkpoint = read_metadata(read_file(files, path, kMetadataBytesMax), path);
  validate(checkpoint, path);
  validate_files(files, checkpoint, folder);
  return checkpoint;
}

Value read_value(FileSystem& files, const std::string& folder, const std::string& name, const Extent& extent) {
  return read_value(FileSource(files, folder + "/" + extent.file), name, extent);
}

Value read_value(const ByteSource& file, const std::string& name, const Extent& extent) {
  const SliceSource entry(file, extent.offset, extent.length,
                          fmt::format("{} ({} at {})", file.name(), escaped(name), extent.offset));
  return read_value_entry(entry);
}

}  // namespace shardproof::checkpoint
