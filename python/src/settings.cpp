#include "settings.h"

#include "held.h"
#include "shardproof/base/check.h"

namespace shardproof::python {

py::dict dict_of(const std::vector<Setting>& settings) {
  py::dict dict;
  for (const auto& [name, value] : settings)
    dict[name.c_str()] = std::visit(
        [](const auto& setting) -> py::object {
          if constexpr (std::is_same_v<std::decay_t<decltype(setting)>, std::monostate>)
            return py::none();
          else
            return py::cast(setting);
        },
        value);
  return dict;
}

std::vector<Setting> settings_of(const py::dict& given) {
  std::vector<Setting> settings;
  for (const auto& [key, value] : given) {
    Setting& setting = settings.emplace_back(key.cast<std::string>(), std::monostate());
    if (py::isinstance<py::bool_>(value)) {
      setting.second = value.cast<bool>();
    } else if (py::isinstance<py::int_>(value)) {
      setting.second = value.cast<int64_t>();
    } else if (py::isinstance<py::float_>(value)) {
      setting.second = value.cast<double>();
    } else if (py::isinstance<py::str>(value)) {
      setting.second = value.cast<std::string>();
    } else if (py::isinstance<py::tuple>(value)) {
      setting.second = value.cast<std::vector<double>>();
    } else {
      SHARD_REQUIRE(
          value.is_none(), "checkpoint",
          "the optimizer's setting '{}' is a {}, and only None, bool, int, float, str and tuples of floats can be saved",
          setting.first, type_name(value));
    }
  }
  return settings;
}

}  // namespace shardproof::python
