#include "sharding/gradient_norm.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "parallel/tensor/parallel_state.h"
#include "sharding/sharded_impl.h"
#include "shardproof/base/check.h"
#include "internal/device/exact_sum.h"

namespace shardproof {
namespace {

// Runs `visit` on every run of gradient elements of trained parameters that no lower rank holds as well, as float or double;
// never on padding. Over the ranks that train one model each element of each parameter comes once. The runs may be used as long
// as the tensors returned live. They are in the CPU's memory, those of a device after a copy; or, where they `stay`, in its
// own.
struct Visited {
  bool stay = false;
  bool floats = true;  // all but float64
  bool doubles = true;
};
template <class Visit>
std::vector<at::Tensor> visit_gradients(const std::vector<Bucket*>& buckets, const Visited& what, Visit&& visit) {
  std::vector<at::Tensor> visited;
  for (const Bucket* bucket : buckets) {
    if (!bucket->gradient.final()) continue;
    at::Tensor gradient = bucket->gradient.values();
    if (gradient.scalar_type() == at::kDouble ? !what.doubles : !what.floats) continue;
    if (gradient.scalar_type() != at::kDouble) gradient = gradient.to(at::kFloat);  // exact
    if (!what.stay) gradient = gradient.to(at::kCPU);
    visited.push_back(gradient);
    for (const OwnPart& part : bucket->parts()) {
      if (!bucket->trains(part.member)) continue;
      for (const Interval& run : part.first_copies) {
        const auto span = [&](const auto* values) { return std::span(values + run.begin, static_cast<size_t>(run.size())); };
        if (gradient.scalar_type() == at::kDouble) visit(*part.parameter, span(gradient.const_data_ptr<double>()));
        else visit(*part.parameter, span(gradient.const_data_ptr<float>()));
      }
    }
  }
  return visited;
}

void reduce_over_ranks(Sharded::Impl& state, const at::Tensor& values, Reduce op) {
  for (const std::string& axis : state.strategy.produced.partial) state.comms->along({axis}).all_reduce(values, op).wait();
  if (state.parallel && state.parallel->parts() > 1) state.comms->along({state.parallel->axis()}).all_reduce(values, op).wait();
}

at::Tensor on_host(double number) {
  return at::full({1}, number, at::kDouble);
}

// What ranks have added up, with the answers of checks: on a device the host waits here, once.
at::Tensor read(Sharded::Impl& state, const at::Tensor& values) {
  return state.checks->read(&state.comms->world(), {values}).front();
}

// The terms that are float32; all of them in one call, for which a device's kernel is started once.
void add_floats(Sharded::Impl& state, ExactSum& sum) {
  std::vector<FlatSpan> spans;
  const auto alive =
      visit_gradients(state.schedule.buckets(), {.stay = true, .doubles = false}, [&](const BucketParameter&, auto values) {
        if constexpr (std::is_same_v<decltype(values), std::span<const float>>)
          spans.push_back({values.data(), std::ssize(values)});
      });
  sum.add(spans);
}

// That of what this rank adds.
double plain_sum(Sharded::Impl& state, ExactSum::Term term, bool floats) {
  double sum = 0;
  visit_gradients(state.schedule.buckets(), {.floats = floats}, [&](const BucketParameter&, auto values) {
    for (const auto value : values)
      sum += term == ExactSum::Term::square ? static_cast<double>(value) * value : std::abs(static_cast<double>(value));
  });
  return sum;
}

double sum_over_ranks(Sharded::Impl& state, ExactSum::Term term, bool exact) {
  const auto is_double = [](const Bucket* bucket) { return bucket->rules().main == at::kDouble; };
  double others = 0;
  if (!exact || std::ranges::any_of(state.schedule.buckets(), is_double)) {
    const at::Tensor sum = on_host(plain_sum(state, term, /*floats=*/!exact));
    reduce_over_ranks(state, sum, Reduce::sum);
    others = sum.item<double>();
  }
  ExactSum floats(term, state.state_device());
  if (exact) {
    add_floats(state, floats);
    reduce_over_ranks(state, floats.counters(), Reduce::sum);
  }
  return ExactSum(term, read(state, floats.counters())).total() + others;
}

// NaN if there is one. Each run has its largest on the device, and so has the gradient.
at::Tensor largest_on_device(Sharded::Impl& state) {
  const c10::Device device = state.state_device();
  std::vector<at::Tensor> found;
  const auto alive = visit_gradients(state.schedule.buckets(), {.stay = true}, [&](const BucketParameter&, auto values) {
    using Value = std::remove_const_t<typename decltype(values)::element_type>;
    const auto options = at::TensorOptions(c10::CppTypeToScalarType<Value>::value).device(device);
    const at::Tensor run = at::from_blob(const_cast<Value*>(values.data()), {std::ssize(values)}, options);
    found.push_back(run.abs().amax().to(at::kDouble));
  });
  if (found.empty()) return at::zeros({1}, at::TensorOptions(device).dtype(at::kDouble));
  return at::stack(found).amax(0, /*keepdim=*/true);
}

double largest_on_host(Sharded::Impl& state) {
  double most = 0;
  bool nan = false;
  visit_gradients(state.schedule.buckets(), {}, [&](const BucketParameter&, auto values) {
    for (const auto value : values) {
      nan |= std::isnan(value);
      most = std::max(most, std::abs(static_cast<double>(value)));
    }
  });
  return nan ? std::numeric_limits<double>::quiet_NaN() : most;
}

double largest_magnitude(Sharded::Impl& state) {
  const at::Tensor most = state.state_device().is_cpu() ? on_host(largest_on_host(state)) : largest_on_device(state);
  reduce_over_ranks(state, most, Reduce::max);
  return read(state, most).item<double>();
}

double norm_of_order(Sharded::Impl& state, double order) {
  if (order == std::numeric_limits<double>::infinity()) return largest_magnitude(state);
  const ExactSum::Term term = order == 1 ? ExactSum::Term::magnitude : ExactSum::Term::square;
  const bool exact = state.options.numerics != Numerics::fast || !state.state_device().is_cpu();  // there it costs no more
  const double sum = sum_over_ranks(state, term, exact);
  return order == 1 ? sum : std::sqrt(sum);
}

// All ranks agree on the first parameter whose reduced gradient is not finite, so that each of them can name it.
[[noreturn]] void throw_nonfinite(Sharded::Impl& state, double norm) {
  std::vector<const BucketParameter*> members;
  for (const Bucket* bucket : state.schedule.buckets())
    for (const BucketParameter& member : bucket->layout().members()) members.push_back(&member);
  int64_t first = static_cast<int64_t>(members.size());
  visit_gradients(state.schedule.buckets(), {}, [&](const BucketParameter& member, auto values) {
    if (std::all_of(values.begin(), values.end(), [](auto value) { return std::isfinite(value); })) return;
    first = std::min<int64_t>(first, std::find(members.begin(), members.end(), &member) - members.begin());
  });
  const at::Tensor least = at::full({1}, first, at::kLong);
  reduce_over_ranks(state, least, Reduce::min);
  first = least.item<int64_t>();
  const std::string name = first < static_cast<int64_t>(members.size()) ? members[first]->name : "no single parameter";
  const char* const why = state.options.check_gradients
                              ? "Every rank's own gradient was finite, so a sum overflowed: scale the loss down"
                              : "A sum overflowed, or a rank's own gradient was not finite: check_gradients tells";
  throw NonFiniteError(fmt::format("[gradient_norm] rank {}, step {}: the norm of the reduced gradient is {}, through {}. {}",
                                   state.comms->rank(), state.schedule.current_step(), norm, name, why));
}

}  // namespace

double gradient_norm(Sharded::Impl& state, double order) {
  SHARD_REQUIRE(order == 1 || order == 2 || order == std::numeric_limits<double>::infinity(), "gradient_norm",
                "the order must be 1, 2 or infinity, got {}", order);
  const double norm = norm_of_order(state, order);
  if (!std::isfinite(norm)) throw_nonfinite(state, norm);
  return norm;
}

}  // namespace shardproof
