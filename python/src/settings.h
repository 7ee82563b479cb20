// Settings of a group of an optimizer's parameters, as a dict of Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "shardproof/optim/optimizer_state.h"

namespace shardproof::python {

pybind11::dict dict_of(const std::vector<Setting>& settings);
// Throws Error, which names the setting, when a value is no None, bool, int, float, text or tuple of floats.
std::vector<Setting> settings_of(const pybind11::dict& given);

}  // namespace shardproof::python
