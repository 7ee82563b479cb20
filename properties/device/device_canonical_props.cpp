// Masks of dropout and canonical arithmetic on flat memory, against plain loops written here, bit for bit.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <functional>

#include "properties/kit/device_subject.h"
#include "properties/kit/harness_env.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/model_math.h"

using namespace shardproof;
using namespace device_testing;

namespace {

void check(const std::string& what, const std::function<void()>& property) {
  EXPECT_TRUE(rc::check(what, property));
}

std::mt19937_64 drawn_numbers() {
  return std::mt19937_64(*rc::gen::arbitrary<uint64_t>());
}

}  // namespace

TEST_F(Kernels, make_masks_of_dropout_by_their_definition) {
  const auto mix = [](uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
  };
  check("dropout_mask", [&] {
    std::mt19937_64 random = drawn_numbers();
    const int64_t columns = *rc::gen::inRange(1, 40), rows = *rc::gen::inRange(0, 60);
    const int64_t offset = *rc::gen::element(0, 0, 1, 3, 8);
    const MaskScalars scalars{.key = random(), .dropped_below = random() >> 32, .length = columns + 5, .kept = 1.4f};
    const at::ScalarType dtype = *rc::gen::element(at::kBFloat16, at::kHalf, at::kFloat, at::kDouble);
    at::Tensor row = at::empty({rows}, at::kLong), column = at::empty({columns}, at::kLong);
    // Rows of a long tensor, too.
    for (int64_t r = 0; r < rows; ++r) row.mutable_data_ptr<int64_t>()[r] = static_cast<int64_t>(random() >> 24);
    for (int64_t c = 0; c < columns; ++c) column.mutable_data_ptr<int64_t>()[c] = static_cast<int64_t>(random() % 45);
    at::Tensor expected = at::empty({rows * columns}, at::kFloat);
    for (int64_t i = 0; i < rows * columns; ++i) {
      const int64_t index =
          row.const_data_ptr<int64_t>()[i / columns] * scalars.length + column.const_data_ptr<int64_t>()[i % columns];
      const bool dropped = mix(scalars.key ^ static_cast<uint64_t>(index)) >> 32 < scalars.dropped_below;
      expected.mutable_data_ptr<float>()[i] = dropped ? 0.0f : scalars.kept;
    }
    const Subject subject(drawn_walk());
    const at::Tensor all = at::empty({offset + rows * columns}, at::TensorOptions(dtype).device(subject.device()));
    const at::Tensor target = all.narrow(0, offset, rows * columns);
    const at::Tensor rows_there = moved(row, subject), columns_there = moved(column, subject);
    model_math(subject.math()).dropout_mask(element_type(dtype), scalars, rows_there.const_data_ptr<int64_t>(),
                                columns_there.const_data_ptr<int64_t>(), columns, rows * columns, bytes_of(target));
    RC_ASSERT(same_but_for_nans(expected.to(dtype), target));
  });
}

namespace {

double rounded(double value) {
  return std::nearbyint(value * 0x1p40) * 0x1p-40 + 0.0;
}

// Of a magnitude at which most terms and sums need more digits than there are; now and then one that is far too large.
at::Tensor doubles(int64_t count, std::mt19937_64& random, bool large) {
  at::Tensor values = at::empty({count}, at::kDouble);
  for (int64_t i = 0; i < count; ++i)
    values.mutable_data_ptr<double>()[i] = std::ldexp(static_cast<double>(static_cast<int64_t>(random())), -62);
  if (large && count > 0)
    values.mutable_data_ptr<double>()[random() % static_cast<uint64_t>(count)] = random() % 2 ? 1e4 : double{NAN};
  return values;
}
const double* data(const at::Tensor& x) {
  return x.const_data_ptr<double>();
}

}  // namespace

TEST_F(Kernels, round_to_the_nearest_multiples_and_never_to_negative_zero) {
  check("grid", [] {
    std::mt19937_64 random = drawn_numbers();
    const at::Tensor x = doubles(*rc::gen::inRange<int64_t>(0, 200), random, /*large=*/true);
    at::Tensor expected = at::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i) {
      double& value = x.mutable_data_ptr<double>()[i];
      if (i % 3 == 0) value = std::ldexp(static_cast<double>(random() % 16) - 8, -42);  // ties, and what rounds to zero
      expected.mutable_data_ptr<double>()[i] = rounded(value);
    }
    const Subject subject(drawn_walk());
    const at::Tensor there = moved(x, subject), found = at::empty_like(there);
    model_math(subject.math()).grid(there.const_data_ptr<double>(), x.numel(), found.mutable_data_ptr<double>());
    RC_ASSERT(same_but_for_nans(expected, found));
  });
}

TEST_F(Kernels, take_norms_of_rows_in_the_order_of_indices) {
  check("row_norm", [] {
    std::mt19937_64 random = drawn_numbers();
    const int64_t rows = *rc::gen::inRange(0, 300), width = *rc::gen::inRange(1, 40);
    const bool centred = *rc::gen::arbitrary<bool>();
    const at::Tensor x = doubles(rows * width, random, false), dy = doubles(rows * width, random, false);
    const at::Tensor weight = doubles(width, random, false), bias = doubles(width, random, false);
    at::Tensor y = at::empty({rows * width}, at::kDouble), dx = at::empty_like(y), of_weight = at::empty_like(y);
    const auto count = static_cast<double>(width);
    for (int64_t i = 0; i < rows; ++i) {
      double mean = 0, squares = 0, sum = 0, weighted = 0;
      for (int64_t j = 0; j < width; ++j) mean += data(x)[i * width + j];
      mean = centred ? mean / count : 0;
      for (int64_t j = 0; j < width; ++j) squares += (data(x)[i * width + j] - mean) * (data(x)[i * width + j] - mean);
      const double scale = 1 / std::sqrt(squares / count + 0.01);
      const auto normal = [&](int64_t j) { return (data(x)[i * width + j] - mean) * scale; };
      for (int64_t j = 0; j < width; ++j) {
        const double above = data(dy)[i * width + j];
        sum += above * data(weight)[j];
        weighted += above * data(weight)[j] * normal(j);
        of_weight.mutable_data_ptr<double>()[i * width + j] = above * normal(j);
        y.mutable_data_ptr<double>()[i * width + j] = rounded(normal(j) * data(weight)[j] + (centred ? data(bias)[j] : 0));
      }
      for (int64_t j = 0; j < width; ++j)
        dx.mutable_data_ptr<double>()[i * width + j] =
            rounded((data(dy)[i * width + j] * data(weight)[j] - (centred ? sum / count : 0) - normal(j) * (weighted / count)) *
                    scale);
    }
    const Subject subject(drawn_walk());
    const at::Tensor x_there = moved(x, subject), dy_there = moved(dy, subject), weight_there = moved(weight, subject);
    const at::Tensor bias_there = moved(bias, subject), found = at::empty_like(x_there);
    const at::Tensor dx_there = at::empty_like(found), of_weight_there = at::empty_like(found);
    const RowNorm norm{data(x_there), data(weight_there), rows, width, 0.01, centred};
    model_math(subject.math()).row_norm(norm, centred ? data(bias_there) : nullptr, found.mutable_data_ptr<double>());
    RC_ASSERT(same_but_for_nans(y, found));
    model_math(subject.math()).row_norm_backward(norm, data(dy_there), dx_there.mutable_data_ptr<double>(),
                                     of_weight_there.mutable_data_ptr<double>());
    RC_ASSERT(same_but_for_nans(dx, dx_there));
    RC_ASSERT(same_but_for_nans(of_weight, of_weight_there));
  });
}

// Places where vectors end, and any bits. No element is above infinity, and any NaN is.
TEST_F(Kernels, find_the_largest_magnitude_and_nan_where_there_is_one) {
  check("largest_magnitude", [] {
    std::mt19937_64 random = drawn_numbers();
    const bool many = *rc::gen::inRange(0, 8) == 0;  // more than a GPU starts threads for
    const int64_t count = many ? 70000 : *rc::gen::inRange<int64_t>(0, 600);
    const at::Tensor x = random_values(at::kDouble, count, random() % 8, random, /*tame=*/many || *rc::gen::arbitrary<bool>());
    if (many) x.mutable_data_ptr<double>()[count - 1 - static_cast<int64_t>(random() % 1000)] = -1e9;
    double most = 0;
    for (int64_t i = 0; i < count && !std::isnan(most); ++i)
      if (!(std::abs(data(x)[i]) <= most)) most = std::abs(data(x)[i]);
    const Subject subject(drawn_walk());
    const double found = model_math(subject.math()).largest_magnitude(data(moved(x, subject)), count);
    RC_ASSERT(std::isnan(most) == std::isnan(found));
    if (!std::isnan(most)) RC_ASSERT(found == most);
  });
}

// What rows see, in turn for so many rows; nothing where they see all.
at::Tensor drawn_seen(std::mt19937_64& random, int64_t rows, int64_t width) {
  const int64_t count = *rc::gen::inRange<int64_t>(0, rows + 1);
  at::Tensor seen = at::empty({count}, at::kLong);
  for (int64_t i = 0; i < count; ++i)
    seen.mutable_data_ptr<int64_t>()[i] = static_cast<int64_t>(random() % static_cast<uint64_t>(width + 1));
  return seen;
}
SeenOfRows of_rows(const at::Tensor& seen) {
  if (seen.numel() == 0) return {};
  return {seen.const_data_ptr<int64_t>(), seen.numel()};
}
bool sees(const at::Tensor& seen, int64_t i, int64_t width) {
  return seen.numel() == 0 || i % width < seen.const_data_ptr<int64_t>()[i / width % seen.numel()];
}

// The curve itself is compared in device_curves_props.cpp, and so it is taken here, element by element.
TEST_F(Kernels, raise_rows_over_their_largest_number) {
  check("row_powers", [] {
    std::mt19937_64 random = drawn_numbers();
    const int64_t rows = *rc::gen::inRange(0, 20), width = *rc::gen::inRange(1, 40);
    const bool divides = *rc::gen::arbitrary<bool>();
    const at::Tensor x = doubles(rows * width, random, true), most = doubles(rows, random, false),
                     divisor = doubles(rows, random, false), seen = drawn_seen(random, rows, width);
    for (int64_t r = 0; r < rows; ++r)
      if (random() % 4 == 0) most.mutable_data_ptr<double>()[r] = -INFINITY;  // counts as 0
    for (int64_t i = 0; i < rows * width; ++i)
      if (random() % 8 == 0) x.mutable_data_ptr<double>()[i] = -INFINITY;
    const ModelMath& host = model_math(device_math(at::kCPU));
    at::Tensor expected = at::empty_like(x);
    for (int64_t i = 0; i < rows * width; ++i) {
      const double of_row = data(most)[i / width], over = data(x)[i] - (of_row == -INFINITY ? 0 : of_row), zero = 0;
      double power = 0;
      host.row_powers(&over, &zero, nullptr, {}, 1, 1, &power);
      expected.mutable_data_ptr<double>()[i] = divides ? power / data(divisor)[i / width] : power;
      if (!sees(seen, i, width)) expected.mutable_data_ptr<double>()[i] = 0;
    }
    const Subject subject(drawn_walk());
    const at::Tensor there = moved(x, subject), most_there = moved(most, subject), divisor_there = moved(divisor, subject),
                     seen_there = moved(seen, subject);
    const at::Tensor found = *rc::gen::arbitrary<bool>() ? there : at::empty_like(there);
    model_math(subject.math())
        .row_powers(data(there), data(most_there), divides ? data(divisor_there) : nullptr, of_rows(seen_there), rows, width,
                    found.mutable_data_ptr<double>());
    RC_ASSERT(same_but_for_nans(expected, found));
  });
}

TEST_F(Kernels, take_gradients_of_rows_of_a_softmax) {
  check("row_slopes", [] {
    std::mt19937_64 random = drawn_numbers();
    const int64_t rows = *rc::gen::inRange(0, 20), width = *rc::gen::inRange(1, 40), count = rows * width;
    const bool masked = *rc::gen::arbitrary<bool>();
    const at::Tensor dy = doubles(count, random, false), mask = doubles(count, random, false),
                     shares = doubles(count, random, false), along = doubles(rows, random, false),
                     seen = drawn_seen(random, rows, width);
    at::Tensor expected = at::empty_like(dy);
    for (int64_t i = 0; i < count; ++i) {
      const double above = masked ? data(dy)[i] * data(mask)[i] : data(dy)[i];
      expected.mutable_data_ptr<double>()[i] = (above - data(along)[i / width]) * data(shares)[i] * 0.3;
      if (!sees(seen, i, width)) expected.mutable_data_ptr<double>()[i] = 0;
    }
    const Subject subject(drawn_walk());
    const at::Tensor there = moved(dy, subject), mask_there = moved(mask, subject), shares_there = moved(shares, subject),
                     along_there = moved(along, subject), seen_there = moved(seen, subject);
    const at::Tensor found = *rc::gen::arbitrary<bool>() ? there : at::empty_like(there);
    model_math(subject.math())
        .row_slopes(data(there), masked ? data(mask_there) : nullptr, data(along_there), data(shares_there), 0.3,
                    of_rows(seen_there), rows, width, found.mutable_data_ptr<double>());
    RC_ASSERT(same_but_for_nans(expected, found));
  });
}
