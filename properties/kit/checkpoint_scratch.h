// Folders and random checkpoints for the properties of checkpoints.
#pragma once

#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <string>

#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/dcp.h"

namespace shardproof::checkpoint {

// A folder of its own that is gone with this object.
class Scratch {
 public:
  Scratch() : path_((std::filesystem::temp_directory_path() / "shardproof_props_XXXXXX").string()) {
    if (!mkdtemp(path_.data())) throw Error("cannot make " + path_);
  }
  ~Scratch() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

using Random = std::mt19937_64;
inline int64_t draw(Random& random, int64_t end) {
  return std::uniform_int_distribution<int64_t>(0, end - 1)(random);
}

inline std::string slurp(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline void spill(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

inline std::string bytes_in(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.contiguous();
  return {static_cast<const char*>(flat.data_ptr()), flat.nbytes()};
}

// Tensors of all dtypes and of 0 to 4 dims, some of them empty, each cut into boxes along random dims; and plain values.
struct Sample {
  std::map<std::string, at::Tensor> tensors;
  std::map<std::string, Value> values;
};

inline at::Tensor random_tensor(Random& random, const Shape& sizes, Dtype dtype) {
  at::Tensor bytes = at::empty({numel(sizes) * dtype_info(dtype).bytes}, at::kByte);
  auto* data = bytes.data_ptr<uint8_t>();
  for (int64_t i = 0; i < bytes.numel(); ++i) data[i] = static_cast<uint8_t>(dtype == Dtype::Bool ? random() & 1 : random());
  return bytes.numel() == 0 ? at::empty(sizes, dtype) : bytes.view(dtype).view(sizes);
}

inline Sample random_sample(Random& random, int64_t tensors, int64_t size_max = 7) {
  Sample sample;
  for (int64_t i = 0; i < tensors; ++i) {
    Shape sizes(static_cast<size_t>(draw(random, 5)));
    for (int64_t& size : sizes) size = draw(random, 8) == 0 ? 0 : 1 + draw(random, size_max);
    const Dtype dtype = dtype_table()[static_cast<size_t>(draw(random, static_cast<int64_t>(dtype_table().size())))].dtype;
    sample.tensors[fmt::format("layers.{}.weight", i)] = random_tensor(random, sizes, dtype);
  }
  sample.values["step"] = Value::integer(draw(random, 1000) - 500);
  sample.values["lr"] = Value::real(0.25);
  sample.values["tag"] = Value::string("häßlich");
  return sample;
}

// The boxes of a random cut of `box` along each of its dims.
inline void cut(Random& random, Box box, size_t dim, std::vector<Box>& out) {
  if (dim == box.size()) return out.push_back(box);
  const Interval whole = box[dim];
  int64_t at = whole.begin;
  do {
    const int64_t end = draw(random, 3) == 0 ? whole.end : std::min(whole.end, at + 1 + draw(random, whole.size() + 1));
    box[dim] = {at, end};
    cut(random, box, dim + 1, out);
    at = end;
  } while (at < whole.end);
}

inline at::Tensor slice(at::Tensor tensor, const Box& box) {
  for (size_t d = 0; d < box.size(); ++d) tensor = tensor.slice(static_cast<int64_t>(d), box[d].begin, box[d].end);
  return tensor.contiguous();
}

inline Box whole_box(const Shape& sizes) {
  Box box;
  for (const int64_t size : sizes) box.push_back({0, size});
  return box;
}

// Writes the sample into the fresh folder as `files` ranks do.
inline Checkpoint write_sample(FileSystem& system, Random& random, const Sample& sample, const std::string& folder,
                               int64_t files, bool checksums = true) {
  std::vector<std::unique_ptr<EntryFile>> ranks;
  for (int64_t i = 0; i < files; ++i) ranks.push_back(std::make_unique<EntryFile>(system, folder, entry_file_name(i)));
  Checkpoint checkpoint;
  Checksums sums;
  for (const auto& [name, value] : sample.values) {
    const auto written = ranks[static_cast<size_t>(draw(random, files))]->add_value(value);
    checkpoint.values[name] = written.extent;
    checkpoint.paths[name] = {"extra", int64_t{3}, name};
    add(sums, written);
  }
  for (const auto& [name, tensor] : sample.tensors) {
    StoredTensor& stored = checkpoint.tensors[name];
    stored = {tensor.scalar_type(), tensor.sizes().vec(), {}};
    std::vector<Box> boxes;
    cut(random, whole_box(stored.sizes), 0, boxes);
    for (const Box& box : boxes) {
      const at::Tensor part = slice(tensor, box);
      Chunk chunk{{}, part.sizes().vec(), {}};
      for (const Interval& interval : box) chunk.offsets.push_back(interval.begin);
      const auto written =
          ranks[static_cast<size_t>(draw(random, files))]->add_tensor(stored.dtype, chunk.sizes, part.const_data_ptr());
      chunk.extent = written.extent;
      add(sums, written);
      stored.chunks.push_back(std::move(chunk));
    }
  }
  for (const auto& rank : ranks) rank->finish();
  if (checksums)
    write_metadata_files(system, folder, checkpoint, sums);
  else
    write_file(system, folder + "/" + kMetadataFile, write_metadata(checkpoint));
  return checkpoint;
}

}  // namespace shardproof::checkpoint
