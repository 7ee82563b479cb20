// DeviceMath over a runner: types and rules are chosen here, once, for the CPU and for a GPU. A runner has
//   Terms<T>                         a list of arrays to sum, made of their addresses
//   void each(count, rule)           rule.pack<W>(i) for packs that cover [0, count)
//   int64_t first(count, rule)       the first place that a rule found, count where there is none; of a rule that writes it may
//                                    be any place below count
//   void note(count, rule, offset, least)  lowers *least to offset + the place, of a rule that does not write
//   void exact(spans, squares, counters)
//   int64_t largest_magnitude_bits(doubles, count)
//   bool product(exact product)
//   void zero(target, bytes), void copy(target, source, bytes)
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "device/kernels/canonical_rules.h"
#include "device/kernels/curve_rules.h"
#include "device/kernels/element_rules.h"
#include "device/kernels/search_rules.h"

namespace shardproof::SHARD_KERNELS {

// Calls `run` with a null pointer of the element's type.
template <class Run>
auto with_type(Element type, const Run& run) {
  switch (type) {
    case Element::f32:
      return run(static_cast<float*>(nullptr));
    case Element::f64:
      return run(static_cast<double*>(nullptr));
    case Element::bf16:
      return run(static_cast<Bf16*>(nullptr));
    case Element::f16:
      return run(static_cast<Fp16*>(nullptr));
    case Element::i32:
      return run(static_cast<int32_t*>(nullptr));
    case Element::i64:
      return run(static_cast<int64_t*>(nullptr));
    case Element::u8:
      return run(static_cast<uint8_t*>(nullptr));
  }
  throw std::logic_error("[device_math] an element of no type");
}

template <class Run>
void with_float(const char* what, Element type, const Run& run) {
  switch (type) {
    case Element::f32:
      return run(static_cast<float*>(nullptr));
    case Element::f64:
      return run(static_cast<double*>(nullptr));
    case Element::bf16:
      return run(static_cast<Bf16*>(nullptr));
    case Element::f16:
      return run(static_cast<Fp16*>(nullptr));
    default:
      throw std::logic_error(std::string("[device_math] ") + what + ": expected a floating-point type");
  }
}

template <class Runner>
class KernelMath final : public ModelMath {
 public:
  explicit KernelMath(Runner runner) : run_(std::move(runner)) {}

  void reduce(Element type, Reduce op, std::span<const std::byte* const> terms, int64_t count,
              std::byte* target) const override {
    require_terms(terms);
    with_type(type, [&]<class T>(T*) {
      using Terms = typename Runner::template Terms<T>;
      const Terms given(terms);
      T* to = reinterpret_cast<T*>(target);
      if (op == Reduce::sum) run_.each(count, ReduceRule<T, Sum, Terms>{given, to});
      if (op == Reduce::max) run_.each(count, ReduceRule<T, Extreme<true>, Terms>{given, to});
      if (op == Reduce::min) run_.each(count, ReduceRule<T, Extreme<false>, Terms>{given, to});
    });
  }

  void sum_wide(Element type, std::span<const std::byte* const> terms, int64_t count, Element target_type,
                std::byte* target) const override {
    require_terms(terms);
    with_float("sum_wide", type, [&]<class T>(T*) {
      using Terms = typename Runner::template Terms<T>;
      with_float("sum_wide", target_type, [&]<class To>(To*) {
        run_.each(count, SumWideRule<T, To, Terms>{Terms(terms), reinterpret_cast<To*>(target)});
      });
    });
  }

  void sgd(const SgdScalars& scalars, const UpdateArrays& arrays) const override {
    with_real(arrays.type, [&]<class Real>(Real*) {
      if (arrays.first) update<Real>(Sgd<Real, true>(scalars), arrays);
      else update<Real>(Sgd<Real, false>(scalars), arrays);
    });
  }
  void adam(const AdamScalars& scalars, const UpdateArrays& arrays) const override {
    with_real(arrays.type, [&]<class Real>(Real*) { update<Real>(Adam<Real>(scalars), arrays); });
  }
  void lion(const LionScalars& scalars, const UpdateArrays& arrays) const override {
    with_real(arrays.type, [&]<class Real>(Real*) { update<Real>(Lion<Real>(scalars), arrays); });
  }

  void store(float* target, Element source_type, const std::byte* source, int64_t count, bool add) const override {
    with_float("store", source_type,
               [&]<class T>(T*) { run_.each(count, StoreRule<T>{target, reinterpret_cast<const T*>(source), add}); });
  }

  bool store_fixed(int64_t* target, Element source_type, const std::byte* source, int64_t count, bool add, double unit,
                   double limit, double limit_of_sums) const override {
    return with_type(source_type, [&]<class T>(T*) {
      return run_.first(count, StoreFixedRule<T>{target, reinterpret_cast<const T*>(source), add, 1 / unit, limit,
                                                 limit_of_sums}) == count;
    });
  }

  void fixed_to_float(float* target, const int64_t* source, int64_t count, float unit) const override {
    run_.each(count, FixedToFloatRule{target, source, unit});
  }
  void dropout_mask(Element type, const MaskScalars& scalars, const int64_t* rows, const int64_t* columns,
                    int64_t column_count, int64_t count, std::byte* target) const override {
    with_float("dropout_mask", type, [&]<class T>(T*) {
      run_.each(count, MaskRule<T>{reinterpret_cast<T*>(target), rows, columns, column_count, scalars.length, scalars.key,
                                   scalars.dropped_below, Narrow<T>::of(0), Narrow<T>::of(scalars.kept)});
    });
  }
  void divide(float* values, int64_t count, float divisor) const override {
    run_.each(count, ScaleRule<true>{values, divisor});
  }
  void scale(float* values, int64_t count, float factor) const override { run_.each(count, ScaleRule<false>{values, factor}); }

  double largest_magnitude(const double* x, int64_t count) const override {
    return bits_of<double>(run_.largest_magnitude_bits(x, count));
  }
  bool exact_product(const ExactProduct& product) const override { return run_.product(product); }
  void row_norm(const RowNorm& norm, const double* bias, double* y) const override {
    run_.each(norm.rows, NormRule{norm, bias, y});
  }
  void row_norm_backward(const RowNorm& norm, const double* dy, double* dx, double* of_weight) const override {
    run_.each(norm.rows, NormBackwardRule{norm, dy, dx, of_weight});
  }
  void row_powers(const double* x, const double* most, const double* divisor, SeenOfRows seen, int64_t rows, int64_t width,
                  double* y) const override {
    if (divisor)
      run_.each(rows * width, InRows<PowersRule<true>>{{x, most, divisor, y}, seen, width});
    else
      run_.each(rows * width, InRows<PowersRule<false>>{{x, most, divisor, y}, seen, width});
  }
  void row_slopes(const double* dy, const double* mask, const double* along, const double* shares, double scale,
                  SeenOfRows seen, int64_t rows, int64_t width, double* y) const override {
    run_.each(rows * width, InRows<SlopesRule>{{dy, mask, along, shares, scale, y}, seen, width});
  }
  void log(const double* x, int64_t count, double* y) const override { run_.each(count, CurveRule<Log>{x, y}); }
  void grid(const double* x, int64_t count, double* y) const override { run_.each(count, CurveRule<Grid>{x, y}); }
  void activate(Activation activation, const double* x, int64_t count, double* y) const override {
    with_curve(activation, [&]<class Curve>(Curve) { run_.each(count, CurveRule<Curve>{x, y}); });
  }
  void activate_backward(Activation activation, const double* x, const double* dy, int64_t count, double* dx) const override {
    with_curve(activation, [&]<class Curve>(Curve) { run_.each(count, CurveBackwardRule<Curve>{x, dy, dx}); });
  }
  void row_dots(const double* a, const double* b, int64_t rows, int64_t width, double* out) const override {
    run_.each(rows, RowDotRule{a, b, out, width});
  }

  int64_t first_beyond(Element type, const std::byte* values, int64_t count, double limit) const override {
    return with_type(type, [&]<class T>(T*) { return run_.first(count, beyond<T>(values, limit)); });
  }
  void note_beyond(Element type, const std::byte* values, int64_t count, double limit, int64_t offset,
                   int64_t* least) const override {
    with_type(type, [&]<class T>(T*) { run_.note(count, beyond<T>(values, limit), offset, least); });
  }
  void zero(void* target, int64_t bytes) const override { run_.zero(target, bytes); }
  void copy(void* target, const void* source, int64_t bytes) const override { run_.copy(target, source, bytes); }

  void exact_sum(std::span<const FlatSpan> spans, bool squares, int64_t* counters) const override {
    run_.exact(spans, squares, counters);
  }

 private:
  template <class T>
  static BeyondRule<T> beyond(const std::byte* values, double limit) {
    return {reinterpret_cast<const T*>(values), std::min(limit, std::numeric_limits<double>::max())};
  }
  template <class Run>
  static void with_real(Element type, const Run& run) {
    if (type == Element::f32) return run(static_cast<float*>(nullptr));
    if (type == Element::f64) return run(static_cast<double*>(nullptr));
    throw std::logic_error("[device_math] an update: expected float32 or float64");
  }
  template <class Run>
  static void with_curve(Activation activation, const Run& run) {
    switch (activation) {
      case Activation::tanh:
        return run(Tanh());
      case Activation::gelu:
        return run(Gelu());
      case Activation::silu:
        return run(Silu());
    }
    throw std::logic_error("[device_math] an activation of no kind");
  }
  static void require_terms(std::span<const std::byte* const> terms) {
    if (terms.empty()) throw std::logic_error("[device_math] a sum of no terms");
  }

  template <class Real, class Update>
  void update(const Update& rule, const UpdateArrays& arrays) const {
    if (!arrays.low) return run_.each(arrays.count, UpdateRule<Real, Update, Nothing>(rule, arrays));
    if constexpr (std::is_same_v<Real, float>)
      return with_float("update", arrays.low_type,
                        [&]<class Low>(Low*) { run_.each(arrays.count, UpdateRule<Real, Update, Low>(rule, arrays)); });
    throw std::logic_error("[device_math] an update in float64 rounds no copy");
  }

  Runner run_;
};

}  // namespace shardproof::SHARD_KERNELS
