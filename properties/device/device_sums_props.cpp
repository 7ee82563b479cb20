// Flat buffers and exact sums on a device: against a loop written here, of the operation that device_math.h states.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <array>
#include <bit>
#include <cmath>

#include "golden/norm.h"
#include "properties/kit/device_subject.h"
#include "properties/kit/harness_env.h"
#include "shardproof/base/dtypes.h"
#include "internal/device/exact_sum.h"

using namespace shardproof;
using namespace device_testing;

namespace {

struct Draw {
  int64_t count, offset;
  std::mt19937_64 random;
};

Draw draw() {
  const bool large = *rc::gen::inRange(0, 10) == 0;
  const int64_t count = large ? *rc::gen::inRange(3000, 90000) : *rc::gen::inRange(0, 70);
  return {count, *rc::gen::element(0, 0, 1, 3, 8), std::mt19937_64(*rc::gen::arbitrary<uint64_t>())};
}

template <class T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

void check(const std::string& what, const std::function<void()>& property) {
  EXPECT_TRUE(rc::check(what, property));
}

// What counters of one exponent stand for.
using Wide = __int128;
std::array<Wide, 256> meaning(const at::Tensor& given) {
  const auto* counters = given.const_data_ptr<int64_t>();
  std::array<Wide, 256> sums{};
  for (size_t e = 0; e < sums.size(); ++e) sums[e] = counters[2 * e] + (static_cast<Wide>(counters[2 * e + 1]) << 24);
  return sums;
}

std::array<Wide, 256> exact_terms(const at::Tensor& values, bool squares) {
  std::array<Wide, 256> sums{};
  for (int64_t i = 0; i < values.numel(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(values.const_data_ptr<float>()[i]);
    const uint32_t exponent = bits >> 23 & 0xff;
    const Wide integer = (bits & 0x7fffff) + (exponent ? 0x800000 : 0);
    sums[exponent] += squares ? integer * integer : integer;
  }
  return sums;
}

}  // namespace

TEST_F(Kernels, store_and_add_in_float32) {
  check("store", [] {
    Draw d = draw();
    const at::ScalarType dtype = *rc::gen::element(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
    const at::Tensor source = random_values(dtype, d.count, d.offset, d.random);
    const at::Tensor target = random_values(at::kFloat, d.count, d.offset, d.random);
    const bool add = *rc::gen::arbitrary<bool>();
    const at::Tensor expected = add ? target + source.to(at::kFloat) : source.to(at::kFloat);
    const Subject subject(drawn_walk());
    const at::Tensor from = moved(source, subject), to = moved(target, subject);
    subject.math().store(data<float>(to), element_type(dtype), bytes_of(from), d.count, add);
    RC_ASSERT(same_but_for_nans(expected, to));
  });
}

TEST_F(Kernels, divide_and_scale_each_element_once) {
  check("divide and scale", [] {
    Draw d = draw();
    const at::Tensor values = random_values(at::kFloat, d.count, d.offset, d.random);
    const float by = *rc::gen::element(3.0f, 0.1f, 4096.0f);
    at::Tensor divided = values.clone(), scaled = values.clone();
    for (int64_t i = 0; i < d.count; ++i) data<float>(divided)[i] /= by;
    for (int64_t i = 0; i < d.count; ++i) data<float>(scaled)[i] *= by;
    const Subject subject(drawn_walk());
    const at::Tensor a = moved(values, subject), b = moved(values, subject);
    subject.math().divide(data<float>(a), d.count, by);
    subject.math().scale(data<float>(b), d.count, by);
    RC_ASSERT(same_but_for_nans(divided, a));
    RC_ASSERT(same_but_for_nans(scaled, b));
  });
}

TEST_F(Kernels, turn_gradients_into_fixed_point_and_back) {
  constexpr double kUnit = 0x1p-44, kLimit = 0x1p18;
  check("store_fixed", [] {
    Draw d = draw();
    const bool tame = *rc::gen::arbitrary<bool>(), add = *rc::gen::arbitrary<bool>();
    const at::ScalarType dtype = *rc::gen::element(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
    const at::Tensor source = random_values(dtype, d.count, d.offset, d.random, tame);
    at::Tensor target = at::zeros({d.count}, at::kLong);
    for (int64_t i = 0; i < d.count; ++i) data<int64_t>(target)[i] = static_cast<int64_t>(d.random()) >> 3;
    at::Tensor expected = target.clone();
    const at::Tensor wide = source.to(at::kDouble).contiguous();
    bool fine = true;
    for (int64_t i = 0; i < d.count; ++i) {
      const double value = data<double>(wide)[i];
      if (!(std::abs(value) < kLimit)) {
        fine = false;
        if (!add) data<int64_t>(expected)[i] = 0;
        continue;
      }
      int64_t& sum = data<int64_t>(expected)[i];
      sum = std::llrint(value / kUnit) + (add ? sum : 0);
      fine &= std::abs(static_cast<double>(sum)) < kLimit / kUnit;
    }
    const Subject subject(drawn_walk());
    const at::Tensor from = moved(source, subject), to = moved(target, subject);
    RC_ASSERT(subject.math().store_fixed(data<int64_t>(to), element_type(dtype), bytes_of(from), d.count, add, kUnit, kLimit,
                                         kLimit) == fine);
    RC_ASSERT(same_but_for_nans(expected, to));
    const at::Tensor back = at::empty({d.count}, to.options().dtype(at::kFloat));
    subject.math().fixed_to_float(data<float>(back), data<int64_t>(to), d.count, static_cast<float>(kUnit));
    at::Tensor floats = at::empty({d.count}, at::kFloat);
    for (int64_t i = 0; i < d.count; ++i)
      data<float>(floats)[i] = static_cast<float>(data<int64_t>(expected)[i]) * static_cast<float>(kUnit);
    RC_ASSERT(same_but_for_nans(floats, back));
  });
}

// In pieces of any size at any place, the sum is the same integer.
TEST_F(Kernels, sum_squares_and_magnitudes_exactly) {
  check("exact_sum", [] {
    Draw d = draw();
    const bool squares = *rc::gen::arbitrary<bool>();
    const at::Tensor values = random_values(at::kFloat, d.count, d.offset, d.random, *rc::gen::arbitrary<bool>());
    const Subject subject(drawn_walk());
    const at::Tensor there = moved(values, subject);
    std::vector<FlatSpan> spans;
    for (int64_t begin = 0; begin < d.count || spans.empty();) {
      const auto size = std::min<int64_t>(d.count - begin, 1 + static_cast<int64_t>(d.random() % 20000));
      spans.push_back({data<float>(there) + begin, size});
      begin += size;
    }
    const at::Tensor counters = moved(at::full({512}, 7, at::kLong), subject);
    subject.math().exact_sum(spans, squares, data<int64_t>(counters));
    RC_ASSERT(meaning(counters.to(at::kCPU) - 7) == exact_terms(values.contiguous(), squares));
  });
}

// Counters of 32 bits are emptied before they overflow.
TEST_F(Kernels, sum_many_equal_terms_exactly) {
  const at::Tensor values = at::full({300'000}, std::bit_cast<float>(0x3fffffffu), at::kFloat);
  for (const Walk walk : {Walk::elements, Walk::packs}) {
    const Subject subject(walk);
    const at::Tensor there = moved(values, subject);
    const FlatSpan span{data<float>(there), values.numel()};
    const at::Tensor counters = moved(at::zeros({512}, at::kLong), subject);
    subject.math().exact_sum({&span, 1}, /*squares=*/true, data<int64_t>(counters));
    EXPECT_EQ(meaning(counters.to(at::kCPU)), exact_terms(values, true));
  }
}

// Floats of every size, or finite ones and one that is not.
TEST_F(Kernels, round_an_exact_sum_once_and_to_nan_where_a_term_is_not_finite) {
  check("ExactSum", [] {
    Draw d = draw();
    const bool squares = *rc::gen::arbitrary<bool>(), finite = *rc::gen::arbitrary<bool>();
    at::Tensor values = random_values(at::kFloat, d.count, d.offset, d.random).contiguous().nan_to_num(0.5, 3e38, -1e-44);
    if (!finite && d.count > 0)
      values[static_cast<int64_t>(d.random() % static_cast<uint64_t>(d.count))] = *rc::gen::element(NAN, INFINITY, -INFINITY);
    golden::ExactSum expected;
    for (int64_t i = 0; i < d.count; ++i) {
      const double value = values.const_data_ptr<float>()[i];
      if (std::isfinite(value)) expected.add(squares ? value * value : std::abs(value));
    }
    const Subject subject(drawn_walk());
    const at::Tensor there = moved(values, subject);
    const FlatSpan span{data<float>(there), d.count};
    ExactSum sum(squares ? ExactSum::Term::square : ExactSum::Term::magnitude, subject.device());
    sum.add({&span, 1});
    if (finite || d.count == 0)
      RC_ASSERT(sum.total() == expected.rounded());
    else
      RC_ASSERT(std::isnan(sum.total()));
  });
}

namespace {

// In a process of its own, since CUDA looks once. Where there is a driver it sees no GPU.
[[noreturn]] void ask_for_gpus_that_are_hidden() {
  setenv("CUDA_VISIBLE_DEVICES", "", /*overwrite=*/1);
  fprintf(stderr, "says: %s.\n", shardproof::why_no_cuda().c_str());
  _exit(0);
}

}  // namespace

TEST(CudaDeathTest, where_all_gpus_are_hidden_there_is_none) {
  if (!cuda_built()) GTEST_SKIP() << "this build has no CUDA";
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  EXPECT_EXIT(ask_for_gpus_that_are_hidden(), testing::ExitedWithCode(0), "says: no (GPU|driver)\\.");
}
