#include "sharding/bucket_part.h"

#include <ATen/ATen.h>

#include "internal/device/flat_math.h"
#include "shardproof/base/check.h"

namespace shardproof {

BucketPart::BucketPart(const BucketContext& context, const char* holds)
    : label_(context.label),
      views_(context.views),
      layout_(context.layout),
      comms_(context.comms),
      memory_(context.memory),
      transfers_(context.transfers),
      rules_(context.rules),
      progress_(context.progress),
      checks_(context.checks),
      padding_(checks_->add([this, holds](const LateChecks::Bad& bad) {
        SHARD_CHECK(false, "bucket", "rank {}: padding of the {} after {} is not zero, at bucket offset {}", bad.rank, holds,
                    first_name(), bad.place);
      })) {}

at::TensorOptions BucketPart::options(at::ScalarType dtype) const {
  return at::TensorOptions(dtype).device(memory_->device());
}

std::string BucketPart::occasion(std::string_view what) const {
  return fmt::format("step {}, {} of {}{}", progress_->steps + 1, what, first_name(), progress_->last);
}

at::Tensor BucketPart::packed(const at::Tensor& compute, MemoryKind kind) const {
  if (!layout_.is_interleaved()) return compute;
  const at::Tensor bucket = memory_->allocate(kind, layout_.numel(), compute.scalar_type());
  layout_.pack(compute, bucket.zero_());
  return bucket;
}

void BucketPart::check_padding(const LocalView& view, const at::Tensor& local, const char* what) const {
  if (!rules_.check_gradients && !local.is_cpu()) return;
  for (const Interval& padding : view.padding) {
    const at::Tensor values = part_of(local, padding.begin, {padding.size()});
    const int64_t begin = view.interval.begin + padding.begin;
    if (!local.is_cpu())
      checks_->ask(padding_, values, /*limit=*/0, begin, /*reduction=*/0);
    else
      SHARD_CHECK(all_zero(values), "bucket", "padding of the {} after {} is not zero, at bucket offset {} to {}", what,
                  first_name(), begin, begin + padding.size());
  }
}

}  // namespace shardproof
