#include "shardproof/comm/data_group.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <cstring>
#include <vector>

#include "internal/base/counter_random.h"
#include "shardproof/base/check.h"

namespace shardproof {

uint64_t digest_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.detach().to(at::kCPU).contiguous();
  const auto* bytes = static_cast<const std::byte*>(values.const_data_ptr());
  const size_t count = values.nbytes();
  uint64_t digest = counter_mix(count);
  for (size_t at = 0; at < count; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + at, std::min(sizeof(word), count - at));
    digest = counter_mix(digest ^ word);
  }
  return digest;
}

namespace {

constexpr int64_t kDimsMax = 16;

// dtype, dims and sizes.
at::Tensor description_of(const at::Tensor& tensor) {
  SHARD_REQUIRE(!tensor.defined() || tensor.dim() <= kDimsMax, "data_group", "tensors of at most {} dims, got {}", kDimsMax,
                tensor.dim());
  at::Tensor description = at::full({2 + kDimsMax}, -1, at::kLong);
  if (!tensor.defined()) return description;
  auto* fields = description.mutable_data_ptr<int64_t>();
  fields[0] = static_cast<int64_t>(tensor.scalar_type());
  fields[1] = tensor.dim();
  for (int64_t d = 0; d < tensor.dim(); ++d) fields[2 + d] = tensor.size(d);
  return description;
}

}  // namespace

void check_same_data(const at::Tensor& tensor, Comm& group) {
  SHARD_REQUIRE(tensor.defined(), "check_same_data", "rank {} of '{}' gave no tensor", group.rank(), group.name());
  const auto digest = static_cast<int64_t>(digest_of(tensor));
  const at::Tensor mine = at::cat({description_of(tensor), at::full({1}, digest, at::kLong)});
  at::Tensor all = at::empty({group.size(), mine.numel()}, at::kLong);
  group.all_gather(all, mine).wait();
  std::vector<int64_t> shapes, values;
  for (int64_t rank = 1; rank < group.size(); ++rank) {
    if (!at::equal(all[rank].slice(0, 0, -1), all[0].slice(0, 0, -1)))
      shapes.push_back(rank);
    else if (!at::equal(all[rank], all[0]))
      values.push_back(rank);
  }
  SHARD_REQUIRE(shapes.empty() && values.empty(), "check_same_data",
                "ranks of '{}' were given different data, where all must have the same (seen by rank {}, which has {} {}): "
                "[{}] another shape or dtype, [{}] other values than rank 0. Give them one batch, or use broadcast_data",
                group.name(), group.rank(), c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), "x"),
                fmt::join(shapes, ", "), fmt::join(values, ", "));
}

at::Tensor broadcast_data(const at::Tensor& tensor, Comm& group, int64_t root) {
  SHARD_REQUIRE(root >= 0 && root < group.size(), "broadcast_data", "'{}' has {} ranks, and no rank {}", group.name(),
                group.size(), root);
  SHARD_REQUIRE(group.rank() != root || tensor.defined(), "broadcast_data", "rank {} of '{}', the root, gave no tensor", root,
                group.name());
  if (group.size() == 1) return tensor;
  const bool is_root = group.rank() == root;
  at::Tensor description = description_of(is_root ? tensor : at::Tensor());
  group.broadcast(description, root).wait();
  const auto* fields = description.const_data_ptr<int64_t>();
  const std::vector<int64_t> sizes(fields + 2, fields + 2 + fields[1]);
  // By the host's memory, since the others do not know where the root's tensor lies.
  at::Tensor values = is_root ? tensor.detach().to(at::kCPU).contiguous()
                              : at::empty(sizes, at::TensorOptions(static_cast<at::ScalarType>(fields[0])));
  group.broadcast(values, root).wait();
  return is_root ? tensor.detach().contiguous() : values;
}

}  // namespace shardproof
