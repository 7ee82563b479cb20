// The parts of the module, each in a file of its own.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace shardproof::python {

void bind_comm(pybind11::module_& module);
void bind_mirror(pybind11::module_& module);
void bind_units(pybind11::module_& module);
void bind_sharded(pybind11::module_& module);
void bind_optimizers(pybind11::module_& module);
void bind_updates(pybind11::module_& module);
void bind_foreign_optimizer(pybind11::module_& module);
void bind_checkpoints(pybind11::module_& module);
void bind_parallel(pybind11::module_& module);
void bind_users(pybind11::module_& module);

}  // namespace shardproof::python
