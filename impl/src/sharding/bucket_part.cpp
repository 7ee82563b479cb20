#include "sharding/bucket_part.h"

#include <ATen/ATen.h>

#include "device/flat_math.h"
#include "shardproof/base/check.h"

namespace shardproof {

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
  if (!rules_.check_gradients && !local.is_cpu()) return;  // the host would wait for the device's answer
  for (const Interval& padding : view.padding)
    SHARD_CHECK(all_zero(part_of(local, padding.begin, {padding.size()})), "bucket",
                "padding of the {} after {} is not zero, at bucket offset {} to {}", what, layout_.members().front().name,
                view.interval.begin + padding.begin, view.interval.begin + padding.end);
}

}  // namespace shardproof
