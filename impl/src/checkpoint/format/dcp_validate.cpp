#include "checkpoint/format/dcp_validate.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <tuple>

#include "checkpoint/format/cause.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/dcp.h"

namespace shardproof::checkpoint {

std::string box_text(const Shape& offsets, const Shape& sizes) {
  std::vector<std::string> intervals;
  for (size_t d = 0; d < sizes.size() && d < offsets.size(); ++d)
    intervals.push_back(fmt::format("{}:{}", offsets[d], offsets[d] + sizes[d]));
  return fmt::format("[{}]", fmt::join(intervals, ", "));
}

namespace {

bool inside(const StoredTensor& tensor, const Chunk& chunk) {
  if (chunk.offsets.size() != tensor.sizes.size() || chunk.sizes.size() != tensor.sizes.size()) return false;
  for (size_t d = 0; d < tensor.sizes.size(); ++d)
    if (chunk.offsets[d] < 0 || chunk.sizes[d] < 0 || chunk.offsets[d] > tensor.sizes[d] ||
        chunk.sizes[d] > tensor.sizes[d] - chunk.offsets[d])
      return false;
  return true;
}

bool meet(const Chunk& a, const Chunk& b) {
  for (size_t d = 0; d < a.sizes.size(); ++d)
    if (a.offsets[d] >= b.offsets[d] + b.sizes[d] || b.offsets[d] >= a.offsets[d] + a.sizes[d]) return false;
  return true;
}

// In a sweep along the dim in which chunks begin at most places, only neighbours are compared.
void require_apart(const std::string& name, const std::string& tensor_name, std::vector<const Chunk*> chunks) {
  if (chunks.size() < 2) return;
  size_t along = 0, most = 0;
  for (size_t d = 0; d < chunks[0]->sizes.size(); ++d) {
    std::set<int64_t> begins;
    for (const Chunk* chunk : chunks) begins.insert(chunk->offsets[d]);
    if (begins.size() > most) along = d, most = begins.size();
  }
  std::sort(chunks.begin(), chunks.end(), [&](auto* a, auto* b) { return a->offsets < b->offsets; });
  std::stable_sort(chunks.begin(), chunks.end(), [&](auto* a, auto* b) { return a->offsets[along] < b->offsets[along]; });
  std::vector<const Chunk*> open;
  for (const Chunk* chunk : chunks) {
    std::erase_if(open, [&](auto* other) { return other->offsets[along] + other->sizes[along] <= chunk->offsets[along]; });
    for (const Chunk* other : open)
      SHARD_REQUIRE(!meet(*chunk, *other), "checkpoint", "{}: tensor {}: chunks {} in {} and {} in {} overlap", name,
                    tensor_name, box_text(other->offsets, other->sizes), other->extent.file,
                    box_text(chunk->offsets, chunk->sizes), chunk->extent.file);
    open.push_back(chunk);
  }
}

void validate_tensor(const std::string& name, const std::string& tensor_name, const StoredTensor& tensor) {
  const int64_t whole = numel(tensor.sizes);
  int64_t held = 0;
  std::vector<const Chunk*> filled;
  for (const Chunk& chunk : tensor.chunks) {
    SHARD_REQUIRE(inside(tensor, chunk), "checkpoint", "{}: tensor {}: chunk {} in {} does not lie inside [{}]", name,
                  tensor_name, box_text(chunk.offsets, chunk.sizes), chunk.extent.file, fmt::join(tensor.sizes, ", "));
    const int64_t elements = numel(chunk.sizes);
    if (elements == 0) continue;
    filled.push_back(&chunk);
    held += std::min(elements, whole - std::min(held, whole) + 1);  // no overflow when there are many too many
  }
  require_apart(name, tensor_name, filled);
  SHARD_REQUIRE(held == whole, "checkpoint", "{}: tensor {}: its chunks hold {} of {} elements; the rest was never saved", name,
                tensor_name, held, whole);
}

void validate_extent(const std::string& name, const std::string& owner, const Extent& extent) {
  const std::string& file = extent.file;
  bool inside = !file.empty() && file[0] != '/' && file.find('\0') == std::string::npos;
  for (size_t begin = 0; inside && begin <= file.size();) {
    const size_t end = std::min(file.find('/', begin), file.size());
    inside = file.substr(begin, end - begin) != "..";
    begin = end + 1;
  }
  SHARD_REQUIRE(inside, "checkpoint", "{}: {} lies in '{}', outside the checkpoint's folder", name, owner, file);
  SHARD_REQUIRE(extent.length > 0 && extent.offset <= UINT64_MAX / 2 && extent.length <= UINT64_MAX / 2, "checkpoint",
                "{}: {} lies in {} at {} with {} bytes", name, owner, file, extent.offset, extent.length);
}

}  // namespace

std::vector<Owned> owned_extents(const Checkpoint& checkpoint) {
  std::vector<Owned> all;
  for (const auto& [name, extent] : checkpoint.values) all.push_back({&extent, nullptr, nullptr, &name});
  for (const auto& [name, tensor] : checkpoint.tensors)
    for (const Chunk& chunk : tensor.chunks) all.push_back({&chunk.extent, &tensor, &chunk, &name});
  std::sort(all.begin(), all.end(), [](const Owned& a, const Owned& b) {
    return std::tie(a.extent->file, a.extent->offset, a.extent->length) <
           std::tie(b.extent->file, b.extent->offset, b.extent->length);
  });
  return all;
}

void validate(const Checkpoint& checkpoint, const std::string& name) {
  for (const auto& [tensor_name, tensor] : checkpoint.tensors) validate_tensor(name, tensor_name, tensor);
  const std::vector<Owned> all = owned_extents(checkpoint);
  for (const Owned& owned : all) validate_extent(name, *owned.name, *owned.extent);
  for (size_t i = 1; i < all.size(); ++i) {
    const Extent& a = *all[i - 1].extent;
    const Extent& b = *all[i].extent;
    SHARD_REQUIRE(a == b || a.file != b.file || a.offset + a.length <= b.offset, "checkpoint",
                  "{}: the bytes of {} and of {} overlap in {} at {}", name, *all[i - 1].name, *all[i].name, b.file, b.offset);
  }
}

void validate_files(FileSystem& files, const Checkpoint& checkpoint, const std::string& folder) {
  std::map<std::string, uint64_t> sizes;
  for (const Owned& owned : owned_extents(checkpoint)) {
    const Extent& extent = *owned.extent;
    auto found = sizes.find(extent.file);
    if (found == sizes.end()) found = sizes.emplace(extent.file, file_bytes(files, folder + "/" + extent.file)).first;
    SHARD_REQUIRE(extent.offset + extent.length <= found->second, "checkpoint",
                  "{}/{}: has {} bytes, but {}{} lies at {} to {}. Was it cut off?", folder, extent.file, found->second,
                  *owned.name, owned.chunk ? " " + box_text(owned.chunk->offsets, owned.chunk->sizes) : "", extent.offset,
                  extent.offset + extent.length);
  }
}

}  // namespace shardproof::checkpoint
