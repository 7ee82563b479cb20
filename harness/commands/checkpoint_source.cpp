#include "harness/commands/checkpoint_source.h"

#include <cstring>
#include <filesystem>

#include "shardproof/base/check.h"

namespace harness {

using namespace shardproof::checkpoint;
using shardproof::dtype_info;
using shardproof::Box;
using shardproof::Shape;

namespace {

Box whole(const Shape& sizes) {
  Box box;
  for (const int64_t size : sizes) box.push_back({0, size});
  return box;
}

// Of the matrix [rows, columns], the other way round.
std::string turned(const std::string& bytes, size_t rows, size_t columns, size_t item) {
  std::string result(bytes.size(), '\0');
  for (size_t r = 0; r < rows; ++r)
    for (size_t c = 0; c < columns; ++c)
      std::memcpy(result.data() + (c * rows + r) * item, bytes.data() + (r * columns + c) * item, item);
  return result;
}

}  // namespace

CheckpointSource::CheckpointSource(std::string path, const Rename& rename) : path_(std::move(path)) {
  open();
  if (rename) this->rename(rename);
}

void CheckpointSource::rename(const Rename& rename) {
  std::map<std::string, SafeTensorSpec> renamed;
  Checkpoint checkpoint;
  for (const auto& [name, spec] : tensors_) {
    const auto other = rename(name);
    if (!other) {
      ++left_out_;
      continue;
    }
    SHARD_REQUIRE(!renamed.contains(other->name), "checkpoint", "{}: two tensors would be called {}", path_, other->name);
    SHARD_REQUIRE(!other->turned || spec.sizes.size() == 2, "checkpoint", "{}: {} has {} dims, expected a matrix", path_, name,
                  spec.sizes.size());
    SafeTensorSpec& its = renamed[other->name] = spec;
    if (other->turned) std::swap(its.sizes[0], its.sizes[1]);
    stored_as_[other->name] = {name, other->turned};
    checkpoint.tensors[other->name] = {its.dtype, its.sizes, checkpoint_.tensors.at(name).chunks};
  }
  SHARD_REQUIRE(!renamed.empty(), "checkpoint", "{}: has no tensor with a name of this family", path_);
  left_out_ += checkpoint_.values.size();
  tensors_ = std::move(renamed);
  kept_ = std::move(checkpoint_);
  checkpoint_ = std::move(checkpoint);
  if (reader_) reader_ = make_reader(kept_);
}

std::unique_ptr<BoxReader> CheckpointSource::make_reader(const Checkpoint& checkpoint) const {
  return std::make_unique<BoxReader>(system_files(), path_, checkpoint, ReadOptions{.check_parts = true});
}

void CheckpointSource::open() {
  if (std::filesystem::exists(path_ + "/" + kMetadataFile)) {
    checkpoint_ = open_checkpoint(system_files(), path_);
    for (const auto& [name, tensor] : checkpoint_.tensors) tensors_[name] = {tensor.dtype, tensor.sizes};
    reader_ = make_reader(checkpoint_);
    return;
  }
  SHARD_REQUIRE(std::filesystem::exists(path_), "checkpoint", "there is no {}", path_);
  safe_ = open_safetensors(system_files(), path_);
  for (const auto& [name, tensor] : safe_.tensors) {
    tensors_[name] = {tensor.dtype, tensor.sizes};
    Chunk chunk{Shape(tensor.sizes.size(), 0), tensor.sizes, {tensor.file, tensor.offset, tensor.bytes}};
    checkpoint_.tensors[name] = {tensor.dtype, tensor.sizes, {chunk}};
  }
}

uint64_t CheckpointSource::bytes() const {
  uint64_t all = 0;
  for (const auto& [name, tensor] : tensors_) all += bytes_of(tensor.dtype, tensor.sizes);
  return all;
}

std::string CheckpointSource::read(const std::string& name) {
  return read(name, whole(tensors_.at(name).sizes));
}

std::string CheckpointSource::read(const std::string& name, const Box& box) {
  const auto found = stored_as_.find(name);
  if (found == stored_as_.end()) return read_stored(name, tensors_.at(name), box);
  const auto& [stored, is_turned] = found->second;
  SafeTensorSpec spec = tensors_.at(name);
  if (!is_turned) return read_stored(stored, spec, box);
  std::swap(spec.sizes[0], spec.sizes[1]);
  // Of a turned matrix rows are columns, so all of it is read.
  const auto rows = static_cast<size_t>(spec.sizes[0]), columns = static_cast<size_t>(spec.sizes[1]);
  const auto item = static_cast<size_t>(dtype_info(spec.dtype).bytes);
  const std::string all = turned(read_stored(stored, spec, whole(spec.sizes)), rows, columns, item);
  SHARD_CHECK(box[1].size() == spec.sizes[0], "checkpoint", "a box of {} that cuts more than dim 0", name);
  return all.substr(static_cast<size_t>(box[0].begin) * rows * item, static_cast<size_t>(box[0].size()) * rows * item);
}

std::string CheckpointSource::read_stored(const std::string& name, const SafeTensorSpec& spec, const Box& box) {
  Shape sizes, strides(box.size());
  for (const auto& interval : box) sizes.push_back(interval.size());
  int64_t stride = 1;
  for (size_t d = box.size(); d-- > 0; stride *= sizes[d]) strides[d] = stride;
  std::string bytes(bytes_of(spec.dtype, sizes), '\0');
  if (reader_) {
    reader_->read(name, box, bytes.data(), strides);
    return bytes;
  }
  // Only dim 0 is ever cut here, so a box is one run.
  const SafeTensor& tensor = safe_.tensors.at(name);
  const uint64_t rows = spec.sizes.empty() || spec.sizes[0] == 0 ? 1 : static_cast<uint64_t>(spec.sizes[0]);
  const uint64_t begin = box.empty() ? 0 : static_cast<uint64_t>(box[0].begin);
  SHARD_CHECK(box.empty() || Box(box.begin() + 1, box.end()) == Box(whole(Shape(spec.sizes.begin() + 1, spec.sizes.end()))),
              "checkpoint", "a box of {} that cuts more than dim 0", name);
  FileSource(system_files(), tensor.file).read(tensor.offset + begin * (tensor.bytes / rows), bytes.data(), bytes.size());
  return bytes;
}

Value CheckpointSource::value(const std::string& name) {
  return read_value(system_files(), path_, name, checkpoint_.values.at(name));
}

}  // namespace harness
