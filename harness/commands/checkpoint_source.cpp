#include "harness/commands/checkpoint_source.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <cstring>
#include <filesystem>
#include <set>

#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/durable.h"
#include "shardproof/checkpoint/weights.h"

namespace harness {

using namespace shardproof::checkpoint;
using shardproof::dtype_info;
using shardproof::DtypeInfo;
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

std::string rounded(const std::string& name, const std::string& bytes, shardproof::Dtype from, shardproof::Dtype to) {
  if (from == to) return bytes;
  const at::Tensor values = at::empty({static_cast<int64_t>(bytes.size()) / dtype_info(from).bytes}, from);
  std::memcpy(values.mutable_data_ptr(), bytes.data(), bytes.size());
  const at::Tensor result = shardproof::rounded_weight(name, values, to);
  return {static_cast<const char*>(result.const_data_ptr()), result.nbytes()};
}

}  // namespace

void require_no_run(const std::string& path) {
  if (std::filesystem::exists(path + "/" + kMetadataFile) || !std::filesystem::is_directory(path)) return;
  const std::optional<int64_t> latest = latest_step(path);
  SHARD_REQUIRE(!latest, "checkpoint", "{} is a folder of checkpoints, and no checkpoint. The newest one in it is {}", path,
                step_folder(path, *latest));
}

CheckpointSource::CheckpointSource(std::string path, const MakeRecipes& recipes, const std::string& entry,
                                   const DtypeInfo* dtype)
    : path_(std::move(path)), weight_reader_(system_files()) {
  open(entry);
  stored_ = tensors_;
  if (recipes) make(recipes(*this));
  if (!dtype) return;
  for (auto& [name, spec] : tensors_)
    if (at::isFloatingType(spec.dtype) && !shardproof::checkpoint::is_router_bias(name))
      spec.dtype = checkpoint_.tensors[name].dtype = dtype->dtype;
}

void CheckpointSource::make(const Recipes& recipes) {
  SHARD_REQUIRE(!recipes.empty(), "checkpoint", "{}: has no tensor with a name of this family", path_);
  recipes_ = recipes;
  std::set<std::string> used;
  tensors_.clear();
  kept_ = std::move(checkpoint_);
  checkpoint_ = {};
  for (const auto& [name, recipe] : recipes_) {
    const SafeTensorSpec made = tensors_[name] = made_by(name, recipe);
    checkpoint_.tensors[name] = {made.dtype, made.sizes, kept_.tensors.at(recipe.parts[0].name).chunks};
    for (const WeightPart& part : recipe.parts) used.insert(part.name);
  }
  left_out_ = stored_.size() - used.size() + kept_.values.size();
  if (reader_) reader_ = make_reader(kept_);
}

SafeTensorSpec CheckpointSource::made_by(const std::string& name, const WeightRecipe& recipe) const {
  SafeTensorSpec made;
  int64_t rows = 0;  // of the first part
  for (const WeightPart& part : recipe.parts) {
    SafeTensorSpec spec = stored_.at(part.name);
    SHARD_REQUIRE((!recipe.turned && recipe.matrices == 0) || spec.sizes.size() == 2, "checkpoint",
                  "{}: {} has {} dims, expected a matrix", path_, part.name, spec.sizes.size());
    spec.sizes = part.shape(spec.sizes);
    if (&part == &recipe.parts[0]) {
      made = spec;
      if (recipe.matrices > 0) rows = spec.sizes[0];
      continue;
    }
    const bool fits = spec.dtype == made.dtype && !spec.sizes.empty() && spec.sizes.size() == made.sizes.size() &&
                      Shape(spec.sizes.begin() + 1, spec.sizes.end()) == Shape(made.sizes.begin() + 1, made.sizes.end()) &&
                      (recipe.matrices == 0 || spec.sizes[0] == rows);
    SHARD_REQUIRE(fits, "checkpoint", "{}: {} [{}] and {} [{}] make no tensor {}", path_, recipe.parts[0].name,
                  fmt::join(made.sizes, ", "), part.name, fmt::join(spec.sizes, ", "), name);
    made.sizes[0] += spec.sizes[0];
  }
  if (recipe.turned) std::swap(made.sizes[0], made.sizes[1]);
  if (recipe.matrices > 0) made.sizes = {recipe.matrices, made.sizes[0] / recipe.matrices, made.sizes[1]};
  return made;
}

std::unique_ptr<BoxReader> CheckpointSource::make_reader(const Checkpoint& checkpoint) const {
  return std::make_unique<BoxReader>(system_files(), path_, checkpoint, ReadOptions{.check_parts = true});
}

void CheckpointSource::open(const std::string& entry) {
  if (std::filesystem::exists(path_ + "/" + kMetadataFile)) {
    SHARD_REQUIRE(entry.empty(), "checkpoint", "{}: is no file of torch.save, so there is no entry '{}' to take", path_, entry);
    checkpoint_ = open_checkpoint(system_files(), path_);
    for (const auto& [name, tensor] : checkpoint_.tensors) tensors_[name] = {tensor.dtype, tensor.sizes};
    reader_ = make_reader(checkpoint_);
    return;
  }
  SHARD_REQUIRE(std::filesystem::exists(path_), "checkpoint", "there is no {}", path_);
  require_no_run(path_);
  weights_ = open_weights(system_files(), path_, entry);
  for (const auto& [name, tensor] : weights_) {
    tensors_[name] = {tensor.dtype, tensor.sizes};
    const uint64_t bytes = shardproof::checkpoint::bytes_of(tensor.dtype, tensor.sizes);
    Chunk chunk{Shape(tensor.sizes.size(), 0), tensor.sizes, {tensor.file, tensor.offset, bytes}};
    checkpoint_.tensors[name] = {tensor.dtype, tensor.sizes, {chunk}};
  }
}

uint64_t CheckpointSource::bytes() const {
  uint64_t all = 0;
  for (const auto& [name, tensor] : tensors_) all += shardproof::checkpoint::bytes_of(tensor.dtype, tensor.sizes);
  return all;
}

std::string CheckpointSource::read(const std::string& name) {
  return read(name, whole(tensors_.at(name).sizes));
}

std::string CheckpointSource::read(const std::string& name, const Box& box) {
  const auto recipe = recipes_.find(name);
  const std::string& stored = recipe == recipes_.end() ? name : recipe->second.parts[0].name;
  const std::string bytes = recipe == recipes_.end() ? read_stored(name, box) : read_made(name, box);
  return rounded(path_ + ": " + name, bytes, stored_.at(stored).dtype, tensors_.at(name).dtype);
}

// Rows of what a recipe makes, which may be anywhere in the parts, so that all of them are read.
std::string CheckpointSource::read_made(const std::string& name, const Box& box) {
  const WeightRecipe& recipe = recipes_.at(name);
  const Shape& sizes = tensors_.at(name).sizes;
  const auto item = static_cast<size_t>(dtype_info(stored_.at(recipe.parts[0].name).dtype).bytes);
  std::string all;
  for (const WeightPart& part : recipe.parts) all += read_part(part);
  if (sizes.empty()) return all;
  if (recipe.turned) all = turned(all, static_cast<size_t>(sizes[1]), static_cast<size_t>(sizes[0]), item);
  SHARD_CHECK(Box(box.begin() + 1, box.end()) == whole(Shape(sizes.begin() + 1, sizes.end())), "checkpoint",
              "a box of {} that cuts more than dim 0", name);
  const size_t row = sizes[0] == 0 ? 0 : all.size() / static_cast<size_t>(sizes[0]);
  return all.substr(static_cast<size_t>(box[0].begin) * row, static_cast<size_t>(box[0].size()) * row);
}

std::string CheckpointSource::read_part(const WeightPart& part) {
  Box box = whole(stored_.at(part.name).sizes);
  if (part.rows) box.at(part.matrix ? 1 : 0) = *part.rows;
  if (part.matrix) box.at(0) = {*part.matrix, *part.matrix + 1};
  return read_stored(part.name, box);
}

std::string CheckpointSource::read_stored(const std::string& name, const Box& box) {
  Shape sizes;
  for (const auto& interval : box) sizes.push_back(interval.size());
  std::string bytes(shardproof::checkpoint::bytes_of(stored_.at(name).dtype, sizes, path_ + ": " + name), '\0');
  if (reader_)
    reader_->read(name, box, at::from_blob(bytes.data(), sizes, stored_.at(name).dtype));
  else
    weight_reader_.read(weights_.at(name), box, bytes.data());
  return bytes;
}

Value CheckpointSource::value(const std::string& name) {
  return read_value(system_files(), path_, name, checkpoint_.values.at(name));
}

}  // namespace harness
