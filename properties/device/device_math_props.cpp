// Arithmetic on flat memory against plain loops written here, of the operations that device_math.h states, bit for bit: on
// sizes from none, on misaligned memory, on any bits.
#include <gtest/gtest.h>
#include <rapidcheck.h>

#include <cmath>
#include <functional>
#include <type_traits>

#include "properties/kit/device_subject.h"
#include "properties/kit/harness_env.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/optim/optimizer.h"

using namespace shardproof;
using namespace device_testing;

namespace {

constexpr at::ScalarType kSummed[] = {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong, at::kByte};

struct Draw {
  int64_t count, offset, terms;
  std::mt19937_64 random;
};

Draw draw() {
  const bool large = *rc::gen::inRange(0, 10) == 0;
  const int64_t count = large ? *rc::gen::inRange(3000, 70000) : *rc::gen::inRange(0, 70);
  return {count, *rc::gen::element(0, 0, 1, 3, 8), *rc::gen::inRange(1, 7), std::mt19937_64(*rc::gen::arbitrary<uint64_t>())};
}

template <class T>
T folded(T a, T b, Reduce op) {
  if (op == Reduce::sum) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;  // wraps
      return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else {
      return static_cast<T>(a + b);
    }
  }
  if (a != a) return a;  // the first NaN
  if (b != b) return b;
  return (op == Reduce::max ? a < b : b < a) ? b : a;
}

template <class T>
at::Tensor folded(const std::vector<at::Tensor>& terms, Reduce op) {
  at::Tensor result = terms[0].clone();
  T* to = result.mutable_data_ptr<T>();
  for (size_t k = 1; k < terms.size(); ++k)
    for (int64_t i = 0; i < result.numel(); ++i) to[i] = folded<T>(to[i], terms[k].const_data_ptr<T>()[i], op);
  return result;
}

at::Tensor reduced(const std::vector<at::Tensor>& terms, Reduce op) {
  switch (terms[0].scalar_type()) {
    case at::kFloat: return folded<float>(terms, op);
    case at::kDouble: return folded<double>(terms, op);
    case at::kBFloat16: return folded<at::BFloat16>(terms, op);
    case at::kHalf: return folded<at::Half>(terms, op);
    case at::kInt: return folded<int32_t>(terms, op);
    case at::kLong: return folded<int64_t>(terms, op);
    default: return folded<uint8_t>(terms, op);
  }
}

std::vector<const std::byte*> places(const std::vector<at::Tensor>& terms) {
  std::vector<const std::byte*> result;
  for (const at::Tensor& term : terms) result.push_back(bytes_of(term));
  return result;
}

void check(const std::string& what, const std::function<void()>& property) {
  EXPECT_TRUE(rc::check(what, property));
}

}  // namespace

TEST_F(Kernels, add_in_the_order_of_ranks_each_sum_rounded_to_the_dtype) {
  check("reduce", [] {
    Draw d = draw();
    const at::ScalarType dtype = *rc::gen::elementOf(std::vector<at::ScalarType>(std::begin(kSummed), std::end(kSummed)));
    const Reduce op = *rc::gen::element(Reduce::sum, Reduce::max, Reduce::min);
    std::vector<at::Tensor> terms, there;
    for (int64_t k = 0; k < d.terms; ++k) terms.push_back(random_values(dtype, d.count, d.offset, d.random));
    const at::Tensor expected = reduced(terms, op);
    const Subject subject(drawn_walk());
    for (const at::Tensor& term : terms) there.push_back(moved(term, subject));
    const bool in_place = *rc::gen::arbitrary<bool>();
    const at::Tensor target = in_place ? there.back() : at::empty_like(there[0]);
    subject.math().reduce(element_type(dtype), op, places(there), d.count, bytes_of(target));
    RC_ASSERT(same_but_for_nans(expected, target));
  });
}

TEST_F(Kernels, add_low_precision_in_float32_and_round_once) {
  check("sum_wide", [] {
    Draw d = draw();
    const at::ScalarType dtype = *rc::gen::element(at::kBFloat16, at::kHalf, at::kFloat, at::kDouble);
    const at::ScalarType to = *rc::gen::element(at::kBFloat16, at::kHalf, at::kFloat, at::kDouble);
    std::vector<at::Tensor> terms, there;
    for (int64_t k = 0; k < d.terms; ++k) terms.push_back(random_values(dtype, d.count, d.offset, d.random));
    at::Tensor wide = terms[0].to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    for (size_t k = 1; k < terms.size(); ++k) wide.add_(terms[k].to(at::kFloat));
    const Subject subject(drawn_walk());
    for (const at::Tensor& term : terms) there.push_back(moved(term, subject));
    const at::Tensor target = at::empty({d.count}, there[0].options().dtype(to));
    subject.math().sum_wide(element_type(dtype), places(there), d.count, element_type(to), bytes_of(target));
    RC_ASSERT(same_but_for_nans(wide.to(to), target));
  });
}

TEST_F(Kernels, know_every_number_of_16_bits) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    at::Tensor all = at::empty({1 << 16}, dtype);
    auto* bits = static_cast<uint16_t*>(all.mutable_data_ptr());
    for (int64_t i = 0; i < all.numel(); ++i) bits[i] = static_cast<uint16_t>(i);
    const at::Tensor wide = all.to(at::kFloat);
    // Each number, and what lies halfway and a little beside the half to the next.
    const at::Tensor next = at::cat({wide.narrow(0, 1, wide.numel() - 1), wide.narrow(0, 0, 1)});
    const at::Tensor half = (wide.to(at::kDouble) + next.to(at::kDouble)).div(2).to(at::kFloat);
    const at::Tensor beside = half.mul(1 + 0x1p-20f), below = half.mul(1 - 0x1p-20f);
    for (const Walk walk : {Walk::elements, Walk::packs}) {
      const Subject subject(walk);
      const at::Tensor there = moved(all, subject), back = at::empty({1 << 16}, there.options().dtype(at::kFloat));
      subject.math().sum_wide(element_type(dtype), places({there}), there.numel(), Element::f32, bytes_of(back));
      EXPECT_TRUE(same_but_for_nans(wide, back));
      for (const at::Tensor& values : {wide, half, beside, below}) {
        const at::Tensor from = moved(values, subject), rounded = at::empty_like(there);
        subject.math().sum_wide(Element::f32, places({from}), from.numel(), element_type(dtype), bytes_of(rounded));
        EXPECT_TRUE(same_but_for_nans(values.to(dtype), rounded)) << c10::toString(dtype);
      }
    }
  }
}

namespace {

struct Arrays {
  at::Tensor parameter, gradient;
  std::vector<at::Tensor> state;
};

constexpr double kLrFactor = 0.7, kDecayFactor = 0.5;

// A rule, and what it does to one element: the parameter, the gradient and the states it has. Scalars are rounded to `Real`
// once.
struct Rule {
  std::shared_ptr<UpdateRule> ours;
  std::function<void(Arrays&, int64_t step)> plain;
};

template <class Real>
struct Cell {
  Real &p, g, &m, &v;
};

template <class Real, class One>
void each_of(Arrays& a, const One& one) {
  Real nothing = 0;
  const auto at = [&](size_t slot, int64_t i) -> Real& {
    return slot < a.state.size() ? a.state[slot].mutable_data_ptr<Real>()[i] : nothing;
  };
  for (int64_t i = 0; i < a.parameter.numel(); ++i)
    one(Cell<Real>{a.parameter.mutable_data_ptr<Real>()[i], a.gradient.const_data_ptr<Real>()[i], at(0, i), at(1, i)});
}

// `one(Real)` makes what is done to an element in float or double; low precision is computed in float and rounded.
template <class Make>
void each_element(Arrays& a, const Make& make) {
  if (a.parameter.scalar_type() == at::kDouble) return each_of<double>(a, make(double{}));
  Arrays wide{a.parameter.to(at::kFloat), a.gradient.to(at::kFloat), {}};
  for (const at::Tensor& state : a.state) wide.state.push_back(state.to(at::kFloat));
  each_of<float>(wide, make(float{}));
  a.parameter.copy_(wide.parameter);
  for (size_t i = 0; i < a.state.size(); ++i) a.state[i].copy_(wide.state[i]);
}

Rule sgd(double lr, double momentum, bool nesterov, double decay) {
  return {make_rule(SgdOptions{.lr = lr, .momentum = momentum, .nesterov = nesterov, .weight_decay = decay}),
          [=](Arrays& a, int64_t) {
            each_element(a, [=]<class Real>(Real) {
              return [=, r = Real(lr * kLrFactor), d = Real(decay * kDecayFactor), mu = Real(momentum)](Cell<Real> e) {
                Real way = e.g;
                if (d != 0) way = way + d * e.p;
                if (mu != 0) e.m = mu * e.m + way;
                if (mu != 0) way = nesterov ? way + mu * e.m : e.m;
                e.p = e.p - r * way;
              };
            });
          }};
}

Rule adam(bool decoupled, double decay) {
  constexpr double kLr = 0.01, kBeta1 = 0.8, kBeta2 = 0.9, kEps = 1e-8;
  auto ours = decoupled ? make_rule(AdamWOptions{kLr, kBeta1, kBeta2, kEps, decay})
                        : make_rule(AdamOptions{kLr, kBeta1, kBeta2, kEps, decay});
  return {std::move(ours), [=](Arrays& a, int64_t step) {
            each_element(a, [=]<class Real>(Real) {
              const double lr = kLr * kLrFactor, wd = decay * kDecayFactor, t = static_cast<double>(step);
              const Real rate(lr / (1 - std::pow(kBeta1, t))), root(std::sqrt(1 - std::pow(kBeta2, t)));
              return [=, shrink = Real(1 - lr * wd), l2 = Real(wd), b1 = Real(kBeta1), c1 = Real(1 - kBeta1),
                      b2 = Real(kBeta2), c2 = Real(1 - kBeta2), eps = Real(kEps)](Cell<Real> e) {
                const Real g = !decoupled && l2 != 0 ? e.g + l2 * e.p : e.g;
                if (decoupled) e.p = e.p * shrink;
                e.m = b1 * e.m + c1 * g;
                e.v = b2 * e.v + c2 * (g * g);
                const Real denominator = std::sqrt(e.v) / root + eps;
                e.p = e.p - rate * (e.m / denominator);
              };
            });
          }};
}

Rule lion(double decay) {
  constexpr double kLr = 0.01, kBeta1 = 0.9, kBeta2 = 0.99;
  return {make_rule(LionOptions{.lr = kLr, .beta1 = kBeta1, .beta2 = kBeta2, .weight_decay = decay}), [=](Arrays& a, int64_t) {
            each_element(a, [=]<class Real>(Real) {
              const double lr = kLr * kLrFactor;
              return [=, r = Real(lr), shrink = Real(1 - lr * decay * kDecayFactor), b1 = Real(kBeta1), c1 = Real(1 - kBeta1),
                      b2 = Real(kBeta2), c2 = Real(1 - kBeta2)](Cell<Real> e) {
                const Real blend = b1 * e.m + c1 * e.g;
                const Real sign = blend > 0 ? Real(1) : blend < 0 ? Real(-1) : blend;  // of NaN, itself
                e.m = b2 * e.m + c2 * e.g;
                e.p = e.p * shrink - r * sign;
              };
            });
          }};
}

Rule random_rule(std::mt19937_64& random) {
  const double decay = random() % 2 ? 0.1 : 0.0;
  switch (random() % 5) {
    case 0: return adam(/*decoupled=*/true, decay);
    case 1: return adam(/*decoupled=*/false, decay);
    case 2: return lion(decay);
    case 3: return sgd(0.1, 0, false, decay);
    default: return sgd(0.1, 0.9, random() % 2 == 0, decay);
  }
}

Arrays random_arrays(const UpdateRule& rule, at::ScalarType dtype, Draw& d, bool tame) {
  Arrays a{
      random_values(dtype, d.count, d.offset, d.random, tame), random_values(dtype, d.count, d.offset, d.random, tame), {}};
  for (size_t i = 0; i < rule.state_names().size(); ++i)
    a.state.push_back(random_values(dtype, d.count, d.offset, d.random, tame));
  if (a.state.size() > 1 && tame) a.state[1].abs_();
  return a;
}

Arrays moved(const Arrays& a, const Subject& subject) {
  Arrays b{device_testing::moved(a.parameter, subject), device_testing::moved(a.gradient, subject), {}};
  for (const at::Tensor& state : a.state) b.state.push_back(device_testing::moved(state, subject));
  return b;
}

Update update_of(const std::string& name, const Shape& shape, const Arrays& a, int64_t step) {
  return {.name = name,
          .shape = shape,
          .parameter = a.parameter,
          .gradient = a.gradient,
          .state = a.state,
          .step = step,
          .lr_factor = kLrFactor,
          .decay_factor = kDecayFactor};
}

void expect_same(const Arrays& expected, const Arrays& found) {
  RC_ASSERT(same_but_for_nans(expected.parameter, found.parameter));
  for (size_t i = 0; i < expected.state.size(); ++i) RC_ASSERT(same_but_for_nans(expected.state[i], found.state[i]));
}

}  // namespace

TEST_F(Kernels, update_each_element_as_its_rule_says) {
  check("update", [] {
    Draw d = draw();
    const Rule rule = random_rule(d.random);
    const at::ScalarType dtype = *rc::gen::element(at::kFloat, at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
    const Arrays given = random_arrays(*rule.ours, dtype, d, *rc::gen::arbitrary<bool>());
    const Shape shape{d.count};
    const int64_t step = *rc::gen::inRange(1, 2000);
    const std::string name = "w";
    Arrays expected{given.parameter.clone(), given.gradient, {}};
    for (const at::Tensor& state : given.state) expected.state.push_back(state.clone());
    rule.plain(expected, step);
    const Subject subject(drawn_walk());
    const Arrays found = moved(given, subject);
    rule.ours->update(update_of(name, shape, found, step));
    expect_same(expected, found);
  });
}

TEST_F(Kernels, round_the_new_parameter_once_while_they_update_it) {
  check("update_and_round", [] {
    Draw d = draw();
    const auto rule = make_rule(AdamWOptions{.lr = 0.01});
    const at::ScalarType low = *rc::gen::element(at::kBFloat16, at::kHalf);
    const Arrays given = random_arrays(*rule, at::kFloat, d, *rc::gen::arbitrary<bool>());
    const Shape shape{d.count};
    const std::string name = "w";
    const Subject subject(drawn_walk());
    const Arrays plain = moved(given, subject), both = moved(given, subject);
    rule->update(update_of(name, shape, plain, 3));
    const at::Tensor rounded =
        at::empty({d.offset + d.count}, plain.parameter.options().dtype(low)).narrow(0, d.offset, d.count);
    RC_ASSERT(rule->update_and_round(update_of(name, shape, both, 3), rounded));
    expect_same({plain.parameter.to(at::kCPU), {}, {plain.state[0].to(at::kCPU), plain.state[1].to(at::kCPU)}}, both);
    RC_ASSERT(same_but_for_nans(plain.parameter.to(at::kCPU).to(low), rounded));
  });
}

TEST_F(Kernels, find_the_first_number_that_is_too_large_or_none) {
  check("first_beyond", [] {
    Draw d = draw();
    const at::ScalarType dtype = *rc::gen::element(at::kFloat, at::kDouble, at::kBFloat16, at::kHalf);
    at::Tensor values = random_values(dtype, d.count, d.offset, d.random, /*tame=*/true);
    // The last two lie between numbers of a short type, the very last of all where rounding would make infinity of it.
    const double limit = *rc::gen::element(double{INFINITY}, 3.5, 0.25, 0.1, 65530.0);
    if (d.count > 0 && *rc::gen::arbitrary<bool>())
      values[static_cast<int64_t>(d.random() % static_cast<uint64_t>(d.count))] =
          *rc::gen::element(double{NAN}, -INFINITY, -4.0, 0.1, 65504.0);
    int64_t expected = 0;
    const at::Tensor wide = values.to(at::kDouble).contiguous();
    const auto fine = [&](double x) { return std::isfinite(x) && std::abs(x) <= limit; };
    while (expected < d.count && fine(wide.const_data_ptr<double>()[expected])) ++expected;
    const Subject subject(drawn_walk());
    const at::Tensor there = device_testing::moved(values, subject);
    RC_ASSERT(subject.math().first_beyond(element_type(dtype), bytes_of(there), d.count, limit) == expected);
    const int64_t before = static_cast<int64_t>(d.random() % 2000);  // of an earlier question
    const at::Tensor least = device_testing::moved(at::full({1}, 1000 + before, at::kLong), subject);
    subject.math().note_beyond(element_type(dtype), bytes_of(there), d.count, limit, 1000, least.mutable_data_ptr<int64_t>());
    RC_ASSERT(least.to(at::kCPU).item<int64_t>() == 1000 + (expected < d.count ? std::min(before, expected) : before));
  });
}

TEST_F(Kernels, find_what_is_not_zero_and_make_it_zero) {
  check("a limit of 0, and zero", [] {
    Draw d = draw();
    const at::ScalarType dtype = *rc::gen::elementOf(std::vector<at::ScalarType>(std::begin(kSummed), std::end(kSummed)));
    at::Tensor values = at::zeros({d.offset + d.count + 5}, dtype).narrow(0, d.offset, d.count);
    const Subject subject(drawn_walk());
    at::Tensor there = device_testing::moved(values, subject);
    const auto is_zero = [&] {
      return subject.math().first_beyond(element_type(dtype), bytes_of(there), d.count, /*limit=*/0) == d.count;
    };
    if (at::isFloatingType(dtype)) there.neg_();  // -0.0 is zero
    RC_ASSERT(is_zero());
    if (d.count == 0) return;
    there[static_cast<int64_t>(d.random() % static_cast<uint64_t>(d.count))] =
        at::isFloatingType(dtype) && d.random() % 2 ? NAN : 1;
    if (!at::isFloatingType(dtype)) there[0] = 1;
    RC_ASSERT(!is_zero());
    subject.math().zero(bytes_of(there), static_cast<int64_t>(there.nbytes()));
    RC_ASSERT(is_zero());
  });
}
