#include "harness/checkpoint_source.h"

#include <filesystem>

#include "shardproof/check.h"

namespace harness {

using namespace shardproof::checkpoint;
using shardproof::Box;
using shardproof::Shape;

namespace {

Box whole(const Shape& sizes) {
  Box box;
  for (const int64_t size : sizes) box.push_back({0, size});
  return box;
}

}  // namespace

CheckpointSource::CheckpointSource(std::string path) : path_(std::move(path)) {
  if (std::filesystem::exists(path_ + "/" + kMetadataFile)) {
    checkpoint_ = open_checkpoint(system_files(), path_);
    for (const auto& [name, tensor] : checkpoint_.tensors) tensors_[name] = {tensor.dtype, tensor.sizes};
    reader_ = std::make_unique<BoxReader>(system_files(), path_, checkpoint_, ReadOptions{.check_parts = true});
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
  const SafeTensorSpec& spec = tensors_.at(name);
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
