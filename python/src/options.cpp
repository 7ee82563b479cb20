#include "options.h"

#include <fmt/ranges.h>

#include <functional>
#include <map>
#include <set>

#include "shardproof/base/check.h"

namespace shardproof::python {
namespace {

template <class Choice>
Choice choice_of(const std::string& option, const py::handle& value, const std::map<std::string, Choice>& choices) {
  std::vector<std::string> names;
  for (const auto& [name, choice] : choices) names.push_back("'" + name + "'");
  const auto found = py::isinstance<py::str>(value) ? choices.find(value.cast<std::string>()) : choices.end();
  SHARD_REQUIRE(found != choices.end(), "fully_shard", "{} must be one of {}, got {}", option, fmt::join(names, ", "),
                py::repr(value).cast<std::string>());
  return found->second;
}

std::optional<c10::ScalarType> dtype_of(const py::handle& value) {
  return value.cast<std::optional<c10::ScalarType>>();
}

// Chooses parameters by identity, which needs no lock.
ParameterSelector one_of(const py::handle& parameters) {
  std::set<const c10::TensorImpl*> chosen;
  for (const py::handle& parameter : parameters) chosen.insert(parameter.cast<at::Tensor>().unsafeGetTensorImpl());
  return [chosen](const std::string&, const at::Tensor& parameter) { return chosen.contains(parameter.unsafeGetTensorImpl()); };
}

UnitSelector modules_named(const py::handle& given) {
  const auto all = given.cast<std::vector<std::string>>();
  const std::set<std::string> names(all.begin(), all.end());
  if (names.empty()) return {};
  return [names](const std::string& name, const torch::nn::Module&) { return names.contains(name); };
}

// A function of Python, called as initialize(name, shape, begin, end, values), which fills `values`.
Initializer initializer_of(const py::handle& value) {
  if (value.is_none()) return {};
  if (py::isinstance<py::tuple>(value)) {
    const auto [seed, deviation] = value.cast<std::pair<uint64_t, double>>();
    return normal_initializer(seed, deviation);
  }
  const Held function(py::reinterpret_borrow<py::object>(value));
  return [function](const std::string& name, const Shape& shape, Interval run, at::Tensor values) {
    const py::gil_scoped_acquire locked;
    function.get()(name, shape, run.begin, run.end, values);
  };
}

using Setter = std::function<void(ShardOptions&, const py::handle&)>;

template <class Value>
Setter set(Value ShardOptions::*member) {
  return [member](ShardOptions& options, const py::handle& value) { options.*member = value.cast<Value>(); };
}

template <class Choice>
std::pair<const std::string, Setter> choose(const std::string& name, Choice ShardOptions::*member,
                                            std::map<std::string, Choice> choices) {
  return {name, [name, member, choices = std::move(choices)](ShardOptions& options, const py::handle& value) {
            options.*member = choice_of(name, value, choices);
          }};
}

const std::map<std::string, Setter>& setters() {
  static const std::map<std::string, Setter> all = {
      {"strategy", [](ShardOptions& o, const py::handle& v) { o.strategy = shardproof::strategy(v.cast<std::string>()); }},
      {"ignored", [](ShardOptions& o, const py::handle& v) { o.ignored = one_of(v); }},
      {"precision", [](ShardOptions& o, const py::handle& v) { o.precision = precision_of(v).value_or(Precision{}); }},
      {"reshard_after_forward",
       [](ShardOptions& o, const py::handle& v) {
         if (!v.is_none()) o.reshard_after_forward = reshard_of(v);
       }},
      {"device", [](ShardOptions& o, const py::handle& v) { o.device = v.cast<at::Device>(); }},
      {"initialize", [](ShardOptions& o, const py::handle& v) { o.initialize = initializer_of(v); }},
      {"recompute_modules", [](ShardOptions& o, const py::handle& v) { o.recompute_modules = modules_named(v); }},
      {"bucket_bytes_max", set(&ShardOptions::bucket_bytes_max)},
      {"bucket_count", set(&ShardOptions::bucket_count)},
      {"alignment_bytes", set(&ShardOptions::alignment_bytes)},
      {"keep_whole_numel_max", set(&ShardOptions::keep_whole_numel_max)},
      {"bucket_multiple", set(&ShardOptions::bucket_multiple)},
      {"reshard_after_backward", set(&ShardOptions::reshard_after_backward)},
      {"prefetch_forward", set(&ShardOptions::prefetch_forward)},
      {"prefetch_backward", set(&ShardOptions::prefetch_backward)},
      {"bytes_in_flight_max", set(&ShardOptions::bytes_in_flight_max)},
      {"gradient_divide", set(&ShardOptions::gradient_divide)},
      {"divide_by_tokens", set(&ShardOptions::divide_by_tokens)},
      {"reduce_replicas_every_microbatch", set(&ShardOptions::reduce_replicas_every_microbatch)},
      {"check_gradients", set(&ShardOptions::check_gradients)},
      {"gradient_magnitude_max", set(&ShardOptions::gradient_magnitude_max)},
      {"broadcast_initial_values", set(&ShardOptions::broadcast_initial_values)},
      choose<Granularity>("granularity", &ShardOptions::granularity,
                          {{"element", Granularity::element}, {"tensor", Granularity::tensor}}),
      choose<Buffers>("buffers", &ShardOptions::buffers, {{"freed", Buffers::freed}, {"pooled", Buffers::pooled}}),
      choose<Publish>("publish", &ShardOptions::publish,
                      {{"in_step", Publish::in_step}, {"at_first_use", Publish::at_first_use}}),
      choose<Gather>("gather", &ShardOptions::gather, {{"copied", Gather::copied}, {"side_by_side", Gather::side_by_side}}),
      choose<Offload>("offload", &ShardOptions::offload,
                      {{"none", Offload::none}, {"pinned", Offload::pinned}, {"pageable", Offload::pageable}}),
      choose<Numerics>("numerics", &ShardOptions::numerics,
                       {{"ordered", Numerics::ordered}, {"canonical", Numerics::canonical}, {"fast", Numerics::fast}}),
      choose<Divide>("divide", &ShardOptions::divide,
                     {{"after", Divide::after},
                      {"before", Divide::before},
                      {"split", Divide::split},
                      {"in_collective", Divide::in_collective}}),
  };
  return all;
}

}  // namespace

std::optional<Precision> precision_of(const py::handle& object) {
  if (object.is_none()) return {};
  Precision precision;
  precision.main = dtype_of(object.attr("main"));
  precision.compute = dtype_of(object.attr("compute"));
  precision.gradient = dtype_of(object.attr("gradient"));
  precision.reduce = dtype_of(object.attr("reduce"));
  precision.output = dtype_of(object.attr("output"));
  precision.cast_inputs = object.attr("cast_inputs").cast<bool>();
  precision.float32_sums = object.attr("float32_sums").cast<bool>();
  return precision;
}

Reshard reshard_of(const py::handle& object) {
  if (py::isinstance<py::bool_>(object)) return Reshard(object.cast<bool>());
  return Reshard::within(object.cast<int64_t>());
}

ShardOptions options_of(const py::dict& given) {
  ShardOptions options;
  for (const auto& [key, value] : given) {
    const auto name = key.cast<std::string>();
    const auto found = setters().find(name);
    SHARD_REQUIRE(found != setters().end(), "fully_shard", "there is no option '{}'", name);
    try {
      found->second(options, value);
    } catch (const py::cast_error&) {
      throw Error(fmt::format("[fully_shard] {} cannot be {}", name, py::repr(value).cast<std::string>()));
    }
  }
  return options;
}

}  // namespace shardproof::python
