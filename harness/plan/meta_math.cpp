#include "harness/plan/meta_math.h"

#include <algorithm>

#include "shardproof/base/dtypes.h"

namespace harness {
namespace {

using namespace shardproof;

thread_local StepRecorder* current_recorder = nullptr;

double size_of(Element type) {
  for (const DtypeInfo& row : dtype_table())
    if (row.element == type) return static_cast<double>(row.bytes);
  return 0;
}

void moved(double bytes) {
  record_operator({.bytes = bytes});
}

class MetaMath final : public ModelMath {
 public:
  void reduce(Element type, Reduce, std::span<const std::byte* const> terms, int64_t count, std::byte*) const override {
    moved(static_cast<double>(count) * size_of(type) * static_cast<double>(terms.size() + 1));
  }
  void sum_wide(Element type, std::span<const std::byte* const> terms, int64_t count, Element target_type,
                std::byte*) const override {
    moved(static_cast<double>(count) * (size_of(type) * static_cast<double>(terms.size()) + size_of(target_type)));
  }
  void sgd(const SgdScalars&, const UpdateArrays& arrays) const override { update(arrays); }
  void adam(const AdamScalars&, const UpdateArrays& arrays) const override { update(arrays); }
  void lion(const LionScalars&, const UpdateArrays& arrays) const override { update(arrays); }
  void store(float*, Element source_type, const std::byte*, int64_t count, bool add) const override {
    moved(static_cast<double>(count) * (size_of(source_type) + (add ? 8 : 4)));
  }
  bool store_fixed(int64_t*, Element source_type, const std::byte*, int64_t count, bool add, double, double,
                   double) const override {
    moved(static_cast<double>(count) * (size_of(source_type) + (add ? 16 : 8)));
    return true;
  }
  void fixed_to_float(float*, const int64_t*, int64_t count, float) const override { moved(12.0 * static_cast<double>(count)); }
  void divide(float*, int64_t count, float) const override { moved(8.0 * static_cast<double>(count)); }
  void scale(float*, int64_t count, float) const override { moved(8.0 * static_cast<double>(count)); }
  int64_t first_beyond(Element type, const std::byte*, int64_t count, double) const override {
    moved(static_cast<double>(count) * size_of(type));
    return count;
  }
  void note_beyond(Element type, const std::byte*, int64_t count, double, int64_t, int64_t*) const override {
    moved(static_cast<double>(count) * size_of(type));
  }
  void zero(void*, int64_t bytes) const override { moved(static_cast<double>(bytes)); }
  void copy(void*, const void*, int64_t bytes) const override { moved(2.0 * static_cast<double>(bytes)); }
  void exact_sum(std::span<const FlatSpan> spans, bool, int64_t*) const override {
    int64_t count = 0;
    for (const FlatSpan& span : spans) count += span.count;
    moved(4.0 * static_cast<double>(count));
  }
  void dropout_mask(Element type, const MaskScalars&, const int64_t*, const int64_t*, int64_t, int64_t count,
                    std::byte*) const override {
    moved(static_cast<double>(count) * size_of(type));
  }
  double largest_magnitude(const double*, int64_t count) const override {
    moved(8.0 * static_cast<double>(count));
    return 0;
  }
  bool exact_product(const ExactProduct& product) const override {
    record_operator({.flops = 2.0 * static_cast<double>(product.rows) * static_cast<double>(product.inner) *
                              static_cast<double>(product.columns),
                     .dtype = at::kDouble});
    return true;
  }
  void row_norm(const RowNorm& norm, const double*, double*) const override { rows(norm, 2); }
  void row_norm_backward(const RowNorm& norm, const double*, double*, double*) const override { rows(norm, 4); }
  void row_powers(const double*, const double*, const double*, SeenOfRows, int64_t rows, int64_t width,
                  double*) const override {
    moved(16.0 * static_cast<double>(rows * width));
  }
  void row_slopes(const double*, const double* mask, const double*, const double*, double, SeenOfRows, int64_t rows,
                  int64_t width, double*) const override {
    moved((mask ? 32.0 : 24.0) * static_cast<double>(rows * width));
  }
  void log(const double*, int64_t count, double*) const override { moved(16.0 * static_cast<double>(count)); }
  void grid(const double*, int64_t count, double*) const override { moved(16.0 * static_cast<double>(count)); }
  void activate(Activation, const double*, int64_t count, double*) const override { moved(16.0 * static_cast<double>(count)); }
  void activate_backward(Activation, const double*, const double*, int64_t count, double*) const override {
    moved(24.0 * static_cast<double>(count));
  }
  void row_dots(const double*, const double*, int64_t rows, int64_t width, double*) const override {
    moved(8.0 * static_cast<double>(rows) * static_cast<double>(2 * width + 1));
  }

 private:
  // Parameter, gradient and state are read; all but the gradient are written.
  static void update(const UpdateArrays& arrays) {
    const int states = (arrays.first != nullptr) + (arrays.second != nullptr);
    const double low = arrays.low ? size_of(arrays.low_type) : 0;
    moved(static_cast<double>(arrays.count) * (size_of(arrays.type) * (3 + 2 * states) + low));
  }
  static void rows(const RowNorm& norm, int times) {
    moved(8.0 * times * static_cast<double>(norm.rows) * static_cast<double>(norm.width));
  }
};

}  // namespace

std::shared_ptr<const ModelMath> meta_math() {
  return std::make_shared<MetaMath>();
}

void record_operators_in(StepRecorder* recorder) {
  current_recorder = recorder;
}

void record_operator(const Operator& what) {
  if (current_recorder) current_recorder->compute(what);
}

}  // namespace harness
