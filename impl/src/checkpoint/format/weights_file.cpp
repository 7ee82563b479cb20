#include "shardproof/checkpoint/format/weights_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

#include "checkpoint/format/cause.h"
#include "checkpoint/format/lfs_pointer.h"
#include "checkpoint/format/row_walk.h"
#include "checkpoint/format/torch_pickles.h"
#include "checkpoint/format/weights_index.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/format/tensor_entry.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {
namespace {

StoredWeights of_safetensors(const SafeTensors& stored) {
  StoredWeights weights;
  for (const auto& [name, tensor] : stored.tensors)
    weights[name] = {tensor.dtype, tensor.sizes, contiguous_strides(tensor.sizes), tensor.file, tensor.offset};
  return weights;
}

// One file of torch.save.
class TorchWeights {
 public:
  explicit TorchWeights(const ByteSource& source) : name_(source.name()), records_(read_zip(source)) {
    root_ = read_torch_data(source, records_, tensor_globals());
  }

  StoredWeights weights(const std::string& entry) {
    const Value* dict = &root_;
    if (!entry.empty()) {
      dict = root_.kind() == Value::Kind::kDict ? root_.find(entry) : nullptr;
      SHARD_REQUIRE(dict, "checkpoint", "{}: there is no '{}' in its dict, which has {}", name_, entry, root_.str());
    }
    SHARD_REQUIRE(dict->kind() == Value::Kind::kDict, "checkpoint", "{}: expected a dict of tensors, got {}", name_,
                  dict->str());
    add("", *dict);
    return std::move(weights_);
  }

 private:
  void add(const std::string& prefix, const Value& dict) {
    for (const auto& [key, value] : dict.as_dict("a dict of tensors")) {
      SHARD_REQUIRE(key.kind() == Value::Kind::kString, "checkpoint", "{}: a tensor has the key {}, which is no text", name_,
                    key.str());
      const std::string name = prefix + key.as_string("the name of a tensor");
      if (value.kind() == Value::Kind::kDict)
        add(name + ".", value);
      else
        add_tensor(name, value);
    }
  }

  void add_tensor(const std::string& name, const Value& value) {
    SHARD_REQUIRE(is_torch_tensor(value), "checkpoint",
                  "{}: expected tensors only, and '{}' is {}. If the weights are in a dict of their own, name its key (entry)",
                  name_, name, value.str());
    const TensorEntry tensor = read_torch_tensor(value, records_, message("{}: {}", name_, name));
    const auto item = static_cast<uint64_t>(dtype_info(tensor.dtype).bytes);
    const StoredWeight weight{tensor.dtype, tensor.sizes, tensor.strides, name_,
                              tensor.payload_offset + static_cast<uint64_t>(tensor.storage_offset) * item};
    SHARD_REQUIRE(weights_.emplace(name, weight).second, "checkpoint", "{}: two tensors are called {}", name_, name);
  }

  std::string name_;
  std::vector<ZipRecord> records_;
  Value root_;
  StoredWeights weights_;
};

// Files of torch.save are zips; before PyTorch 1.6 they were pickles, which protocol 2 begins like this.
StoredWeights open_file(FileSystem& files, const std::string& path, const std::string& entry) {
  const FileSource source(files, path);
  const std::string begin = source.size() < 4 ? "" : source.read_string(0, 4, 4);
  require_no_lfs_pointer(source, begin);
  SHARD_REQUIRE(!begin.starts_with("\x80\x02"), "checkpoint",
                "{}: is a file of torch.save as PyTorch wrote them before 1.6. Load it there and save it again", path);
  if (begin.starts_with("PK")) return TorchWeights(source).weights(entry);
  SHARD_REQUIRE(entry.empty(), "checkpoint", "{}: is no file of torch.save, so there is no entry '{}' to take", path, entry);
  return of_safetensors(read_safetensors_header(source));
}

StoredWeights open_torch_index(FileSystem& files, const std::string& path, const std::string& entry) {
  const WeightsIndex index = read_weights_index(files, path);
  std::map<std::string, StoredWeights> opened;
  StoredWeights all;
  for (const auto& [tensor, file] : index.files) {
    if (!opened.contains(file)) opened[file] = open_file(files, index.folder + "/" + file, entry);
    const auto found = opened[file].find(tensor);
    SHARD_REQUIRE(found != opened[file].end(), "checkpoint", "{}: {} is not in {}", path, tensor, file);
    all.insert(*found);
  }
  return all;
}

StoredWeights open_index(FileSystem& files, const std::string& path, const std::string& entry) {
  const WeightsIndex index = read_weights_index(files, path);
  const bool safe = std::any_of(index.files.begin(), index.files.end(),
                                [](const auto& item) { return item.second.ends_with(".safetensors"); });
  return safe ? of_safetensors(open_safetensors(files, path)) : open_torch_index(files, path, entry);
}

}  // namespace

StoredWeight StoredWeight::turned(const std::string& name) const {
  SHARD_REQUIRE(sizes.size() == 2, "checkpoint", "{}: {} has the shape [{}], expected a matrix", file, name,
                fmt::join(sizes, ", "));
  StoredWeight result = *this;
  std::swap(result.sizes[0], result.sizes[1]);
  std::swap(result.strides[0], result.strides[1]);
  return result;
}

StoredWeight StoredWeight::rows(int64_t begin, int64_t count) const {
  SHARD_CHECK(!sizes.empty() && begin >= 0 && begin + count <= sizes[0], "checkpoint", "rows {} to {} of a tensor of [{}]",
              begin, begin + count, fmt::join(sizes, ", "));
  StoredWeight result = *this;
  result.sizes[0] = count;
  result.offset += static_cast<uint64_t>(begin * strides[0] * dtype_info(dtype).bytes);
  return result;
}

StoredWeights open_weights(FileSystem& files, const std::string& path, const std::string& entry) {
  if (!is_folder(files, path)) return path.ends_with(".json") ? open_index(files, path, entry) : open_file(files, path, entry);
  static const std::vector<std::string> known = {"model.safetensors.index.json", "model.safetensors",
                                                 "pytorch_model.bin.index.json", "pytorch_model.bin"};
  for (const std::string& file : known)
    if (exists(files, path + "/" + file)) return open_weights(files, path + "/" + file, entry);
  throw Error(message("[checkpoint] {}: there are no weights in this folder; looked for {}", path, fmt::join(known, ", ")));
}

const FileSource& WeightReader::source(const std::string& file) {
  std::unique_ptr<FileSource>& source = sources_[file];
  if (!source) source = std::make_unique<FileSource>(files_, file);
  return *source;
}

namespace {

// A dim of a box: how many elements, and how far apart they lie in the file and in memory.
struct BoxDim {
  int64_t size, stored, own;
};

// A box as runs of the file. The dims of a run are those whose elements follow each other there; the outer dims count runs.
struct BoxRuns {
  std::vector<BoxDim> outer, inner;  // those that lie farthest apart in the file first
  int64_t length = 1;                // of a run, in elements
  bool in_order = true;              // whether a run of the file is a run of the memory

  BoxRuns(const StoredWeight& weight, const Box& box) {
    int64_t own = 1;
    for (size_t d = box.size(); d-- > 0; own *= box[d].size())
      if (box[d].size() != 1) outer.push_back({box[d].size(), weight.strides[d], own});
    std::stable_sort(outer.begin(), outer.end(), [](const BoxDim& a, const BoxDim& b) { return a.stored > b.stored; });
    for (; !outer.empty() && outer.back().stored == length; outer.pop_back()) {
      in_order &= outer.back().own == length;
      length *= outer.back().size;
      inner.insert(inner.begin(), outer.back());
    }
  }
};

// Elements of `item` bytes, which follow each other in `from`, to where the dims say. Returns what follows them.
const char* scatter(const char* from, const std::vector<BoxDim>& dims, size_t d, int64_t item, char* to) {
  if (d == dims.size()) {
    std::memcpy(to, from, static_cast<size_t>(item));
    return from + item;
  }
  for (int64_t i = 0; i < dims[d].size; ++i) from = scatter(from, dims, d + 1, item, to + i * dims[d].own * item);
  return from;
}

}  // namespace

void WeightReader::read(const StoredWeight& weight, const Box& box, void* destination) {
  if (numel(box) == 0) return;
  const int64_t item = dtype_info(weight.dtype).bytes;
  const BoxRuns runs(weight, box);
  const auto bytes = static_cast<size_t>(runs.length * item);
  std::string buffer(runs.in_order ? 0 : bytes, '\0');
  int64_t first = 0;
  for (size_t d = 0; d < box.size(); ++d) first += box[d].begin * weight.strides[d];
  const FileSource& from = source(weight.file);
  const auto read_run = [&](int64_t stored, char* to) {
    from.read(weight.offset + static_cast<uint64_t>(stored * item), runs.in_order ? to : buffer.data(), bytes);
    bytes_read_ += bytes;
    if (!runs.in_order) scatter(buffer.data(), runs.inner, 0, item, to);
  };
  const std::function<void(size_t, int64_t, char*)> read_from = [&](size_t d, int64_t stored, char* to) {
    if (d == runs.outer.size()) return read_run(stored, to);
    const BoxDim& dim = runs.outer[d];
    for (int64_t i = 0; i < dim.size; ++i) read_from(d + 1, stored + i * dim.stored, to + i * dim.own * item);
  };
  read_from(0, first, static_cast<char*>(destination));
}

}  // namespace shardproof::checkpoint
