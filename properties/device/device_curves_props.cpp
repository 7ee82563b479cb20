// The curves of canonical arithmetic beside the C library's in a wider type, and beside themselves wherever an element lies.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <limits>
#include <random>

#include "properties/kit/device_subject.h"
#include "properties/kit/harness_env.h"
#include "shardproof/device/model_math.h"

using namespace shardproof;
using namespace device_testing;

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// What a kernel gives for each of these, on the device that is tested.
template <class Kernel>
at::Tensor of_each(const at::Tensor& x, const Kernel& kernel) {
  const Subject subject(drawn_walk());
  const at::Tensor there = moved(x, subject), result = at::empty_like(there);
  kernel(model_math(subject.math()), there.const_data_ptr<double>(), there.numel(), result.template mutable_data_ptr<double>());
  return result.to(at::kCPU);
}

at::Tensor exp_of(const at::Tensor& x) {
  const at::Tensor zero = at::zeros({1}, x.options());
  return of_each(x, [&](const ModelMath& math, const double* from, int64_t n, double* to) {
    const at::Tensor most = on_cuda() ? zero.to(at::kCUDA) : zero;
    math.row_powers(from, most.const_data_ptr<double>(), nullptr, {}, 1, n, to);
  });
}
at::Tensor log_of(const at::Tensor& x) {
  return of_each(x, [](const ModelMath& math, const double* from, int64_t n, double* to) { math.log(from, n, to); });
}
at::Tensor activated(Activation activation, const at::Tensor& x) {
  return of_each(
      x, [=](const ModelMath& math, const double* from, int64_t n, double* to) { math.activate(activation, from, n, to); });
}
at::Tensor slope(Activation activation, const at::Tensor& x) {
  const at::Tensor ones = at::ones_like(x);
  return of_each(x, [&](const ModelMath& math, const double* from, int64_t n, double* to) {
    const at::Tensor above = on_cuda() ? ones.to(at::kCUDA) : ones;
    math.activate_backward(activation, from, above.const_data_ptr<double>(), n, to);
  });
}

// Of all sizes up to `most`, with either sign.
at::Tensor drawn_doubles(double most) {
  std::mt19937_64 random(*rc::gen::arbitrary<uint64_t>());
  at::Tensor x = at::empty({*rc::gen::inRange<int64_t>(1, 300)}, at::kDouble);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double size = std::exp2(-40 * static_cast<double>(random() >> 11) * 0x1p-53);
    x.mutable_data_ptr<double>()[i] = most * size * (random() % 2 ? 1 : -1);
  }
  return x;
}

using Real = long double;
using Function = Real (*)(Real);

Real normal_below(Real x) {
  return 0.5L * std::erfc(-x * std::sqrt(0.5L));
}
Real gelu(Real x) {
  return x * normal_below(x);
}
Real gelu_slope(Real x) {
  return normal_below(x) + x * std::exp(-0.5L * x * x) * 0.398942280401432677939946L;
}
Real share(Real x) {
  return 1 / (1 + std::exp(-x));
}
Real silu(Real x) {
  return x * share(x);
}
Real silu_slope(Real x) {
  return share(x) * (1 + x * (1 - share(x)));
}
Real tanh_slope(Real x) {
  return 1 - std::tanh(x) * std::tanh(x);
}

// How far a result at x may be from what it should be.
using Error = Real (*)(Real x, Real expected);

template <int exponent>
Real absolute(Real, Real) {
  return std::ldexp(Real(1), exponent);
}
template <int exponent>
Real relative(Real, Real expected) {
  return std::ldexp(std::abs(expected), exponent);
}

void expect_close(const at::Tensor& x, const at::Tensor& found, Function expected, Error error) {
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double at = x.const_data_ptr<double>()[i], got = found.const_data_ptr<double>()[i];
    const Real want = expected(at);
    if (!(std::abs(got - want) <= error(at, want))) RC_FAIL("at " + std::to_string(at) + ": " + std::to_string(got));
  }
}

void check(const std::string& what, const std::function<void()>& property) {
  EXPECT_TRUE(rc::check(what, property));
}

at::Tensor doubles(const std::vector<double>& values) {
  return at::tensor(values, at::kDouble);
}

}  // namespace

TEST_F(Kernels, compute_powers_and_logarithms_to_the_last_digits) {
  check("exp", [] {
    const at::Tensor x = drawn_doubles(700);
    expect_close(
        x, exp_of(x), [](Real at) { return std::exp(at); }, relative<-51>);
  });
  check("log", [] {
    const at::Tensor x = drawn_doubles(700).abs();
    expect_close(
        x, log_of(x), [](Real at) { return std::log(at); }, absolute<-46>);
    const at::Tensor near_one = 1 + drawn_doubles(0.5);
    expect_close(
        near_one, log_of(near_one), [](Real at) { return std::log(at); }, absolute<-51>);
  });
}

// Results are multiples of 2^-40, of which half a one is the error. Before that float64 rounds sigmoids and products, whose
// errors grow with x.
TEST_F(Kernels, compute_activations_and_their_slopes_to_the_nearest_multiple) {
  const auto allowed = [](Real at, Real) { return 0x1p-41L + (10 + std::abs(at)) * 0x1p-51L; };
  struct Row {
    Activation activation;
    Function value, slope;
  };
  for (const Row& row : {Row{Activation::tanh, [](Real x) { return std::tanh(x); }, tanh_slope},
                         Row{Activation::gelu, gelu, gelu_slope}, Row{Activation::silu, silu, silu_slope}})
    check("activation " + std::to_string(static_cast<int>(row.activation)), [&] {
      const at::Tensor x = drawn_doubles(*rc::gen::element(1.0, 20.0, 120.0));
      expect_close(x, activated(row.activation, x), row.value, allowed);
      expect_close(x, slope(row.activation, x), row.slope, allowed);
    });
}

TEST_F(Kernels, compute_curves_at_their_ends) {
  check("ends", [] {
    const at::Tensor powers = exp_of(doubles({0, -0.0, 709, -708, 709.1, -708.1, kInfinity, -kInfinity, NAN}));
    const double* e = powers.const_data_ptr<double>();
    RC_ASSERT(e[0] == 1 && e[1] == 1 && std::isfinite(e[2]) && e[3] > 0);
    RC_ASSERT(e[4] == kInfinity && e[5] == 0 && e[6] == kInfinity && e[7] == 0 && std::isnan(e[8]));
    RC_ASSERT(log_of(doubles({1})).item<double>() == 0);
    RC_ASSERT(
        activated(Activation::tanh, doubles({0, -0.0, 300, -300, kInfinity, -kInfinity})).equal(doubles({0, 0, 1, -1, 1, -1})));
    RC_ASSERT(activated(Activation::gelu, doubles({0, 40, -40})).equal(doubles({0, 40, 0})));
    RC_ASSERT(activated(Activation::silu, doubles({0, 800, -800})).equal(doubles({0, 800, 0})));
    for (const Activation activation : {Activation::tanh, Activation::gelu, Activation::silu}) {
      RC_ASSERT(std::isnan(activated(activation, doubles({NAN})).item<double>()));
      RC_ASSERT(std::isnan(slope(activation, doubles({NAN})).item<double>()));
    }
  });
}

TEST_F(Kernels, add_the_products_of_rows_in_the_order_of_indices) {
  check("row_dots", [] {
    const int64_t rows = *rc::gen::inRange(0, 20), width = *rc::gen::inRange(0, 30);
    const auto numbers = [&] {
      std::mt19937_64 random(*rc::gen::arbitrary<uint64_t>());
      at::Tensor x = at::empty({rows * width}, at::kDouble);
      for (int64_t i = 0; i < x.numel(); ++i)
        x.mutable_data_ptr<double>()[i] = std::ldexp(static_cast<double>(static_cast<int64_t>(random())), -62);
      return x;
    };
    const at::Tensor a = numbers(), b = numbers();
    at::Tensor expected = at::zeros({rows}, at::kDouble);
    for (int64_t i = 0; i < rows * width; ++i)
      expected.mutable_data_ptr<double>()[i / width] += a.const_data_ptr<double>()[i] * b.const_data_ptr<double>()[i];
    const Subject subject(drawn_walk());
    const at::Tensor a_there = moved(a, subject), b_there = moved(b, subject), out = at::empty({rows}, a_there.options());
    model_math(subject.math())
        .row_dots(a_there.const_data_ptr<double>(), b_there.const_data_ptr<double>(), rows, width,
                  out.mutable_data_ptr<double>());
    RC_ASSERT(expected.equal(out.to(at::kCPU)));
  });
}
