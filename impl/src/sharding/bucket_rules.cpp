#include "sharding/bucket_rules.h"

#include <cmath>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

void require_float(const char* what, at::ScalarType dtype) {
  SHARD_REQUIRE(dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16 || dtype == at::kHalf, "precision",
                "{} must be float32, float64, bfloat16 or float16, got {}", what, c10::toString(dtype));
}

// A power of two near the root of the whole, so that neither terms nor sums leave the range of float16.
double near_root(double divisor) { return std::exp2(std::round(std::log2(std::sqrt(divisor)))); }

}  // namespace

BucketRules resolve(const ShardOptions& options, const Strategy& strategy, const Mesh& mesh, int64_t batches,
                    at::ScalarType stored) {
  const Precision& precision = options.precision;
  BucketRules rules;
  rules.main = precision.main.value_or(stored);
  rules.compute = precision.compute.value_or(stored);
  rules.reduction.gradient = precision.gradient.value_or(rules.main);
  rules.reduction.reduce = precision.reduce.value_or(rules.reduction.gradient);
  require_float("main", rules.main);
  require_float("compute", rules.compute);
  require_float("gradient", rules.reduction.gradient);
  require_float("reduce", rules.reduction.reduce);
  rules.reduction.float32_sums = precision.float32_sums;
  rules.check_gradients = options.check_gradients;
  rules.gradient_magnitude_max = options.gradient_magnitude_max;
  rules.broadcast = options.broadcast_initial_values;
  rules.gather = options.gather;
  rules.offload = options.offload != Offload::none;
  rules.publish = options.publish;
  rules.sum_axes = strategy.produced.partial;

  const auto of_a_term = static_cast<double>(batches);
  double ranks = of_a_term;
  for (const std::string& axis : rules.sum_axes) ranks *= static_cast<double>(mesh.size(axis));
  const double total = options.divide_by_tokens ? 1 : options.gradient_divide != 0 ? options.gradient_divide : ranks;
  switch (options.divide) {
    case Divide::after: break;
    case Divide::before: rules.divide_before = total; break;
    case Divide::split: rules.divide_before = near_root(total); break;
    case Divide::in_collective:
      SHARD_REQUIRE(total == ranks, "fully_shard",
                    "Divide::in_collective averages over the {} ranks; it cannot divide by {}. Use Divide::after", ranks,
                    total);
      rules.reduction.average = true;
      rules.divide_after = of_a_term;
      return rules;
  }
  rules.divide_after = total / rules.divide_before;
  if (options.numerics == Numerics::canonical) {
    SHARD_REQUIRE(
        options.divide == Divide::after && !precision.reduce && !precision.gradient && options.check_gradients, "fully_shard",
        "canonical sums are fixed-point: leave the gradient and reduce dtypes open, use Divide::after and check_gradients");
    rules.reduction = {.gradient = at::kLong, .reduce = at::kLong};
  }
  return rules;
}

}  // namespace shardproof
