#include "options.h"

#include <fmt/ranges.h>

#include <functional>
#include <map>
#include <set>

#include "shardproof/base/check.h"
#include "shardproof/sharding/named_options.h"

namespace shardproof::python {
namespace {

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

// A function of Python, called as shard_dim(name, parameter) or granule(name, part).
std::function<int64_t(const std::string&, const at::Tensor&)> number_of(const py::handle& value, const char* option,
                                                                       const char* number) {
  const Held function(py::reinterpret_borrow<py::object>(value));
  return [function, option, number](const std::string& name, const at::Tensor& parameter) {
    const py::gil_scoped_acquire locked;
    const py::object said = function.get()(name, parameter);
    SHARD_REQUIRE(py::isinstance<py::int_>(said), "fully_shard", "{} returned {} for parameter {}. Let it return {}", option,
                  py::repr(said).cast<std::string>(), name, number);
    return said.cast<int64_t>();
  };
}

using Setter = std::function<void(ShardOptions&, const py::handle&)>;

// The value that Python gives an option that a number or a word is.
double value_of(const NamedOption& option, const py::handle& value) {
  switch (option.kind) {
    case NamedOption::Kind::flag:
      return value.cast<bool>() ? 1 : 0;
    case NamedOption::Kind::whole:
      return static_cast<double>(value.cast<int64_t>());
    case NamedOption::Kind::number:
      return value.cast<double>();
    case NamedOption::Kind::word:
      return option.value(value.cast<std::string>());
  }
  throw py::cast_error();
}

// And back.
py::object object_of(const NamedOption& option, double value) {
  switch (option.kind) {
    case NamedOption::Kind::flag:
      return py::bool_(value != 0);
    case NamedOption::Kind::whole:
      return py::int_(static_cast<int64_t>(value));
    case NamedOption::Kind::number:
      return py::float_(value);
    case NamedOption::Kind::word:
      return py::str(option.text(value));
  }
  return py::none();
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
      {"shard_dim",
       [](ShardOptions& o, const py::handle& v) {
         if (PyCallable_Check(v.ptr())) o.shard_dim_of = number_of(v, "shard_dim", "a dim");
         else named_option("shard_dim").set(o, static_cast<double>(v.cast<int64_t>()));
       }},
      {"granule",
       [](ShardOptions& o, const py::handle& v) {
         if (PyCallable_Check(v.ptr())) o.granule_of = number_of(v, "granule", "a number of elements");
         else named_option("granule").set(o, static_cast<double>(v.cast<int64_t>()));
       }},
      {"recompute_modules", [](ShardOptions& o, const py::handle& v) { o.recompute_modules = modules_named(v); }},
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
    try {
      if (found != setters().end()) {
        found->second(options, value);
      } else {
        const NamedOption& option = named_option(name);
        option.set(options, value_of(option, value));
      }
    } catch (const py::cast_error&) {
      throw Error(fmt::format("[fully_shard] {} cannot be {}", name, py::repr(value).cast<std::string>()));
    }
  }
  return options;
}

py::list list_of_options() {
  py::list all;
  for (const NamedOption& option : named_options()) {
    if (option.name == "delayed_gradient_bytes_max") continue;  // of layers of the library's own, which those of Python are not
    py::list drawn;
    for (const double value : option.drawn) drawn.append(object_of(option, value));
    all.append(py::make_tuple(option.name, object_of(option, option.standard()), option.words, drawn, option.about));
  }
  return all;
}

}  // namespace shardproof::python
