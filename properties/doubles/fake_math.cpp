#include "properties/doubles/fake_math.h"

#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "properties/doubles/fake_device.h"
#include "properties/doubles/fake_parts.h"
#include "shardproof/device/device.h"
#include "shardproof/device/model_math.h"

namespace fake_device {
namespace {

using namespace shardproof;

std::atomic<bool> hesitates = false;

// Launches, as of kernels that somebody has built for one device, or for -1 for the current one.
class Launcher {
 public:
  explicit Launcher(c10::DeviceIndex device) : device_(device) {}

 protected:
  template <class T>
  T* here(T* device_memory) const {
    const c10::DeviceIndex mine = device_ < 0 ? current_device() : device_;
    T* const host = static_cast<T*>(on_host(device_memory));
    TORCH_CHECK(host == device_memory || device_of(device_memory).index() == mine,
                "fake device: an illegal access: a kernel on device ", static_cast<int>(mine), " uses memory of ",
                device_of(device_memory).str());
    return host;
  }
  UpdateArrays here(UpdateArrays arrays) const {
    arrays.parameter = here(arrays.parameter);
    arrays.gradient = here(arrays.gradient);
    arrays.first = here(arrays.first);
    arrays.second = here(arrays.second);
    arrays.low = here(arrays.low);
    return arrays;
  }
  RowNorm here(RowNorm norm) const {
    norm.x = here(norm.x);
    norm.weight = here(norm.weight);
    return norm;
  }
  std::vector<const std::byte*> here(std::span<const std::byte* const> terms) const {
    std::vector<const std::byte*> found;
    for (const std::byte* term : terms) found.push_back(here(term));
    return found;
  }
  void queue(std::function<void()> work) const {
    const c10::DeviceGuard on({device().type(), device_});
    fake_device::queue(std::move(work));
  }
  // For the value that the host asked for.
  void wait(const char* what) const {
    const c10::DeviceGuard on({device().type(), device_});
    count_wait(what);
    synchronize();
  }

 private:
  const c10::DeviceIndex device_;
};

// What returns nothing is queued; what returns a value waits for the stream first.
class QueuedMath final : public ModelMath, Launcher {
 public:
  using Launcher::Launcher;
  void reduce(Element type, Reduce op, std::span<const std::byte* const> terms, int64_t count,
              std::byte* target) const override {
    for (int k = 0; hesitates && k < 5; ++k) std::this_thread::yield();
    queue([=, &cpu = cpu_, kept = here(terms), to = here(target)] { cpu.reduce(type, op, kept, count, to); });
  }
  void sum_wide(Element type, std::span<const std::byte* const> terms, int64_t count, Element target_type,
                std::byte* target) const override {
    queue([=, &cpu = cpu_, kept = here(terms), to = here(target)] { cpu.sum_wide(type, kept, count, target_type, to); });
  }
  void sgd(const SgdScalars& scalars, const UpdateArrays& arrays) const override {
    queue([&cpu = cpu_, scalars, all = here(arrays)] { cpu.sgd(scalars, all); });
  }
  void adam(const AdamScalars& scalars, const UpdateArrays& arrays) const override {
    queue([&cpu = cpu_, scalars, all = here(arrays)] { cpu.adam(scalars, all); });
  }
  void lion(const LionScalars& scalars, const UpdateArrays& arrays) const override {
    queue([&cpu = cpu_, scalars, all = here(arrays)] { cpu.lion(scalars, all); });
  }
  void dropout_mask(Element type, const MaskScalars& scalars, const int64_t* rows, const int64_t* columns,
                    int64_t column_count, int64_t count, std::byte* target) const override {
    queue([=, &cpu = cpu_, across = here(rows), down = here(columns), to = here(target)] {
      cpu.dropout_mask(type, scalars, across, down, column_count, count, to);
    });
  }
  void store(float* target, Element source_type, const std::byte* source, int64_t count, bool add) const override {
    queue([=, &cpu = cpu_, to = here(target), from = here(source)] { cpu.store(to, source_type, from, count, add); });
  }
  bool store_fixed(int64_t* target, Element source_type, const std::byte* source, int64_t count, bool add, double unit,
                   double limit, double limit_of_sums) const override {
    wait("store_fixed");
    return cpu_.store_fixed(here(target), source_type, here(source), count, add, unit, limit, limit_of_sums);
  }
  void fixed_to_float(float* target, const int64_t* source, int64_t count, float unit) const override {
    queue([=, &cpu = cpu_, to = here(target), from = here(source)] { cpu.fixed_to_float(to, from, count, unit); });
  }
  void divide(float* values, int64_t count, float divisor) const override {
    queue([=, &cpu = cpu_, all = here(values)] { cpu.divide(all, count, divisor); });
  }
  void scale(float* values, int64_t count, float factor) const override {
    queue([=, &cpu = cpu_, all = here(values)] { cpu.scale(all, count, factor); });
  }
  double largest_magnitude(const double* x, int64_t count) const override {
    wait("largest_magnitude");
    return cpu_.largest_magnitude(here(x), count);
  }
  bool exact_product(const ExactProduct& product) const override {
    ExactProduct all = product;
    all.a = here(product.a), all.b = here(product.b), all.out = here(product.out);
    all.units = here(product.units), all.seen = here(product.seen);
    all.first_term = here(product.first_term), all.end_term = here(product.end_term);
    if (!(product.largest_term < 127)) {  // the host gets an answer
      wait("exact_product");
      return cpu_.exact_product(all);
    }
    queue([all, &cpu = cpu_] { cpu.exact_product(all); });
    return true;
  }
  void row_norm(const RowNorm& norm, const double* bias, double* y) const override {
    queue([all = here(norm), offset = here(bias), to = here(y), &cpu = cpu_] { cpu.row_norm(all, offset, to); });
  }
  void row_norm_backward(const RowNorm& norm, const double* dy, double* dx, double* of_weight) const override {
    queue([all = here(norm), above = here(dy), to = here(dx), terms = here(of_weight), &cpu = cpu_] {
      cpu.row_norm_backward(all, above, to, terms);
    });
  }
  void row_powers(const double* x, const double* most, const double* divisor, SeenOfRows seen, int64_t rows, int64_t width,
                  double* y) const override {
    seen.count = here(seen.count);
    queue([=, from = here(x), top = here(most), over = here(divisor), to = here(y), &cpu = cpu_] {
      cpu.row_powers(from, top, over, seen, rows, width, to);
    });
  }
  void row_slopes(const double* dy, const double* mask, const double* along, const double* shares, double scale,
                  SeenOfRows seen, int64_t rows, int64_t width, double* y) const override {
    seen.count = here(seen.count);
    queue([=, above = here(dy), kept = here(mask), means = here(along), parts = here(shares), to = here(y), &cpu = cpu_] {
      cpu.row_slopes(above, kept, means, parts, scale, seen, rows, width, to);
    });
  }
  void log(const double* x, int64_t count, double* y) const override {
    queue([count, from = here(x), to = here(y), &cpu = cpu_] { cpu.log(from, count, to); });
  }
  void grid(const double* x, int64_t count, double* y) const override {
    queue([count, from = here(x), to = here(y), &cpu = cpu_] { cpu.grid(from, count, to); });
  }
  void activate(Activation activation, const double* x, int64_t count, double* y) const override {
    queue([=, from = here(x), to = here(y), &cpu = cpu_] { cpu.activate(activation, from, count, to); });
  }
  void activate_backward(Activation activation, const double* x, const double* dy, int64_t count, double* dx) const override {
    queue([=, from = here(x), above = here(dy), to = here(dx), &cpu = cpu_] {
      cpu.activate_backward(activation, from, above, count, to);
    });
  }
  void row_dots(const double* a, const double* b, int64_t rows, int64_t width, double* out) const override {
    queue([=, left = here(a), right = here(b), to = here(out), &cpu = cpu_] { cpu.row_dots(left, right, rows, width, to); });
  }
  int64_t first_beyond(Element type, const std::byte* values, int64_t count, double limit) const override {
    wait("first_beyond");
    return cpu_.first_beyond(type, here(values), count, limit);
  }
  void note_beyond(Element type, const std::byte* values, int64_t count, double limit, int64_t offset,
                   int64_t* least) const override {
    queue([=, from = here(values), to = here(least), &cpu = cpu_] { cpu.note_beyond(type, from, count, limit, offset, to); });
  }
  void zero(void* target, int64_t bytes) const override {
    queue([bytes, to = here(target)] { std::memset(to, 0, static_cast<size_t>(bytes)); });
  }
  void copy(void* target, const void* source, int64_t bytes) const override {
    queue([bytes, to = here(target), from = here(source)] { std::memmove(to, from, static_cast<size_t>(bytes)); });
  }
  void exact_sum(std::span<const FlatSpan> spans, bool squares, int64_t* counters) const override {
    std::vector<FlatSpan> found;
    for (const FlatSpan& span : spans) found.push_back({here(span.data), span.count});
    queue([found, squares, to = here(counters), &cpu = cpu_] { cpu.exact_sum(found, squares, to); });
  }

 private:
  const ModelMath& cpu_ = model_math(device_math(at::kCPU));
};

}  // namespace

void hesitate(bool on) { hesitates = on; }

std::shared_ptr<const DeviceMath> queued_math(c10::DeviceIndex device) { return std::make_shared<QueuedMath>(device); }

}  // namespace fake_device
