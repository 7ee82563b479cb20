// What updates by torch's kernels ask of a thousand objects of Python, and of the memory of small tensors (updates.py).
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <Python.h>
#include <structmember.h>  // after Python.h
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "bindings.h"
#include "shardproof/base/check.h"

namespace py = pybind11;

namespace shardproof::python {
namespace {

// To copy larger ones takes longer than a call of the kernel for each.
constexpr int64_t kSmallBytes = 512;
// Vectors have at most so many bytes. Torch's kernels round what is left behind the last whole one otherwise.
constexpr int64_t kVectorBytes = 64;

// Null of what is no tensor. Lists of a thousand are looked at within a step, so nothing is counted or converted.
const at::Tensor* tensor_at(const py::list& list, size_t i) {
  PyObject* item = PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
  return THPVariable_Check(item) ? &THPVariable_Unpack(item) : nullptr;
}

// Asks for memory ahead of its use, one kind of object after the other. To wait for each of them takes most of an update.
void fetch(const void* memory) {
  __builtin_prefetch(memory);
  __builtin_prefetch(static_cast<const char*>(memory) + 64);
}

void fetch(const py::list& tensors) {
  for (const py::handle tensor : tensors) fetch(tensor.ptr());
  for (size_t i = 0; i < tensors.size(); ++i)
    if (const at::Tensor* tensor = tensor_at(tensors, i)) fetch(tensor->unsafeGetTensorImpl());
}

// Values of an attribute, of those that have it.
py::list attributes_of(const py::object& given, const py::str& name) {
  const py::list tensors(given);  // which is a list but in an optimizer of somebody's own
  fetch(tensors);
  py::list found;
  for (const py::handle tensor : tensors) {
    const auto attributes = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(tensor.ptr(), nullptr));
    PyErr_Clear();
    if (!attributes) continue;
    if (PyObject* value = PyDict_GetItemWithError(attributes.ptr(), name.ptr())) found.append(py::handle(value));
  }
  return found;
}

// An attribute of DTensors, which plain tensors and parameters do not have. It is a slot, which is read without its name.
class Slot {
 public:
  explicit Slot(const char* name) : name_(PyUnicode_InternFromString(name)) {}

  // Null of what has none.
  PyObject* of(PyObject* tensor) {
    if (Py_TYPE(tensor) != type_) find(Py_TYPE(tensor));
    return offset_ == 0 ? nullptr : *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(tensor) + offset_);
  }

 private:
  void find(PyTypeObject* type) {
    type_ = type;
    offset_ = 0;
    const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_));
    PyErr_Clear();
    if (found && Py_IS_TYPE(found.ptr(), &PyMemberDescr_Type))
      offset_ = reinterpret_cast<PyMemberDescrObject*>(found.ptr())->d_member->offset;
  }

  PyObject* name_;
  PyTypeObject* type_ = nullptr;
  Py_ssize_t offset_ = 0;
};

// As torch_private.local_of.
py::handle local_of(py::handle tensor) {
  static Slot slot("_local_tensor");
  PyObject* found = slot.of(tensor.ptr());
  return found ? found : tensor;
}

PyObject* spec_of(py::handle tensor) {
  static Slot slot("_spec");
  return slot.of(tensor.ptr());
}

// Parameters that have gradients, what this rank has of them, and of the gradients. None where one is cut otherwise.
py::object with_gradients(const py::list& params, const py::function& are_cut_alike) {
  for (const py::handle p : params)
    SHARD_REQUIRE(THPVariable_Check(p.ptr()), "optimizer", "a group of parameters has a {}. Give it tensors",
                  Py_TYPE(p.ptr())->tp_name);
  fetch(params);
  for (const py::handle p : params) fetch(THPVariable_Unpack(p.ptr()).unsafeGetTensorImpl()->autograd_meta());
  for (const py::handle p : params)
    if (const auto* meta = THPVariable_Unpack(p.ptr()).unsafeGetTensorImpl()->autograd_meta())
      fetch(meta->grad().unsafeGetTensorImpl());
  py::list chosen, wholes, own, gradients;
  for (const py::handle p : params) {
    const at::Tensor& gradient = THPVariable_Unpack(p.ptr()).grad();
    if (!gradient.defined()) continue;
    chosen.append(p);
    wholes.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(gradient)));
  }
  for (size_t i = 0; i < chosen.size(); ++i) {
    const py::handle p = PyList_GET_ITEM(chosen.ptr(), i), gradient = PyList_GET_ITEM(wholes.ptr(), i);
    if (spec_of(p) != spec_of(gradient) && !are_cut_alike(p, gradient).cast<bool>()) return py::none();
    own.append(local_of(p));
    gradients.append(local_of(gradient));
  }
  return py::make_tuple(chosen, own, gradients);
}

PyObject* item_of(PyObject* dict, py::handle key) {
  PyObject* found = dict && PyDict_Check(dict) ? PyDict_GetItemWithError(dict, key.ptr()) : nullptr;
  if (PyErr_Occurred()) throw py::error_already_set();
  return found;
}

// What this rank has of each of these states of parameters. None where one is missing.
py::object state_of(const py::dict& states, const py::list& params, const std::vector<py::str>& names) {
  std::vector<PyObject*> of_each, values;
  for (const py::handle p : params) {
    of_each.push_back(item_of(states.ptr(), p));
    fetch(of_each.back());
  }
  for (const py::str& name : names)
    for (PyObject* state : of_each) {
      values.push_back(item_of(state, name));
      if (values.back() == nullptr || values.back() == Py_None) return py::none();
      fetch(values.back());
    }
  std::vector<py::list> found(names.size());
  for (size_t i = 0; i < values.size(); ++i) found[i / params.size()].append(local_of(values[i]));
  return py::cast(found);
}

// Whether tensors at the same place of all lists lie alike on the CPU. Torch's fused kernels there walk through their memory
// side by side, and look at neither dtypes nor strides.
bool lie_alike(const std::vector<py::list>& lists) {
  for (const py::list& list : lists) fetch(list);
  for (size_t i = 0; i < lists.front().size(); ++i) {
    const at::Tensor* first = tensor_at(lists.front(), i);
    for (const py::list& list : lists) {
      const at::Tensor* other = i < list.size() ? tensor_at(list, i) : nullptr;
      if (first == nullptr || other == nullptr || !other->is_cpu() || other->layout() != at::kStrided ||
          !at::isFloatingType(other->scalar_type()) || other->scalar_type() != first->scalar_type() ||
          other->sizes() != first->sizes() || other->strides() != first->strides() || !other->is_non_overlapping_and_dense() ||
          other->is_neg())  // whose memory is not its values
        return false;
      if (other->has_storage()) __builtin_prefetch(other->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
  }
  return true;
}

bool is_plain_number(const at::Tensor& number) {
  return number.is_cpu() && number.scalar_type() == at::kFloat && number.numel() == 1;
}

// An operator of torch for each number would take longer than the whole update.
void add_to_each(const py::list& numbers, double term) {
  for (size_t i = 0; i < numbers.size(); ++i) {
    const at::Tensor* number = tensor_at(numbers, i);
    SHARD_REQUIRE(number != nullptr, "optimizer", "number {} of a list is no tensor", i);
    if (is_plain_number(*number))
      *number->mutable_data_ptr<float>() += static_cast<float>(term);
    else
      at::Tensor(*number).add_(term);
  }
}

bool may_be_joined(const at::Tensor& tensor) {
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  return 0 < bytes && bytes <= kSmallBytes && bytes % kVectorBytes == 0 && !tensor.key_set().has(at::DispatchKey::Python);
}

using Members = std::vector<size_t>;

// Whether tensors have memory in common, which each of them is to find as the one before has left it.
bool overlap(const py::list& tensors, const Members& members) {
  std::vector<const char*> begins;
  for (const size_t i : members) begins.push_back(static_cast<const char*>(tensor_at(tensors, i)->const_data_ptr()));
  Members order(members.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  const auto before = [&](size_t a, size_t b) { return begins[a] < begins[b]; };
  if (!std::is_sorted(order.begin(), order.end(), before)) std::sort(order.begin(), order.end(), before);
  for (size_t i = 1; i < order.size(); ++i)
    if (begins[order[i - 1]] + tensor_at(tensors, members[order[i - 1]])->nbytes() > begins[order[i]]) return true;
  return false;
}

at::Tensor joined(const py::list& tensors, const Members& members) {
  for (const size_t i : members) fetch(tensor_at(tensors, i)->const_data_ptr());
  int64_t numel = 0;
  for (const size_t i : members) numel += tensor_at(tensors, i)->numel();
  at::Tensor whole = at::detail::empty_cpu({numel}, tensor_at(tensors, members.front())->options());
  char* to = static_cast<char*>(whole.mutable_data_ptr());
  for (const size_t i : members) {
    const at::Tensor& from = *tensor_at(tensors, i);
    std::memcpy(to, from.const_data_ptr(), from.nbytes());
    to += from.nbytes();
  }
  return whole;
}

void take_apart(const at::Tensor& whole, const py::list& tensors, const Members& members) {
  const char* from = static_cast<const char*>(whole.const_data_ptr());
  for (const size_t i : members) {
    const at::Tensor& to = *tensor_at(tensors, i);
    std::memcpy(to.mutable_data_ptr(), from, to.nbytes());
    to.unsafeGetTensorImpl()->bump_version();
    from += to.nbytes();
  }
}

py::list chosen(const py::list& from, const Members& members) {
  py::list parts;
  for (const size_t i : members)
    if (!from.empty()) parts.append(py::handle(PyList_GET_ITEM(from.ptr(), static_cast<Py_ssize_t>(i))));
  return parts;
}

// Calls an elementwise kernel with lists of tensors that lie alike: what it changes, what it reads, other lists of what it
// changes, and counts of steps. Small tensors with the same count are copied end to end, and back, since a kernel takes a
// microsecond for each tensor that it is given.
void update_together(const std::vector<py::list>& changed, const py::list& read, const py::list& steps,
                     const py::function& kernel) {
  std::map<std::pair<at::ScalarType, float>, Members> alike;
  Members alone, all;
  for (size_t i = 0; i < read.size(); ++i) {
    const at::Tensor& tensor = *tensor_at(read, i);
    const at::Tensor* step = steps.empty() ? nullptr : tensor_at(steps, i);
    bool joins = may_be_joined(tensor) && (step == nullptr || is_plain_number(*step));
    for (const py::list& list : changed) joins = joins && (list.empty() || may_be_joined(*tensor_at(list, i)));
    (joins ? alike[{tensor.scalar_type(), step ? *step->const_data_ptr<float>() : 0}] : alone).push_back(i);
    if (joins) all.push_back(i);
  }
  for (const py::list& list : changed)
    if (!list.empty() && overlap(list, all)) return void(kernel(changed, read, steps));
  for (const auto& [kind, members] : alike) {
    std::vector<std::vector<at::Tensor>> wholes;
    for (const py::list& list : changed)
      wholes.push_back(list.empty() ? std::vector<at::Tensor>{} : std::vector{joined(list, members)});
    kernel(wholes, std::vector{joined(read, members)}, chosen(steps, {members.front()}));
    for (size_t k = 0; k < changed.size(); ++k)
      if (!changed[k].empty()) take_apart(wholes[k].front(), changed[k], members);
  }
  if (alone.empty()) return;
  std::vector<py::list> rest;
  for (const py::list& list : changed) rest.push_back(chosen(list, alone));
  kernel(rest, chosen(read, alone), chosen(steps, alone));
}

}  // namespace

void bind_updates(py::module_& module) {
  module.def("attributes_of", &attributes_of, py::arg("tensors"), py::arg("name"));
  module.def("with_gradients", &with_gradients, py::arg("params"), py::arg("are_cut_alike"));
  module.def("state_of", &state_of, py::arg("states"), py::arg("params"), py::arg("names"));
  module.def("lie_alike", &lie_alike, py::arg("lists"));
  module.def("add_to_each", &add_to_each, py::arg("numbers"), py::arg("term"));
  module.def("update_together", &update_together, py::arg("changed"), py::arg("read"), py::arg("steps"), py::arg("kernel"));
}

}  // namespace shardproof::python
