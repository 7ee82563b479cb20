// Python objects in the hands of C++ code, which copies and drops them without Python's lock.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <utility>

namespace shardproof::python {

namespace py = pybind11;

// A reference that may be copied and dropped by any thread. `get` needs the lock.
class Held {
 public:
  explicit Held(py::object object)
      : object_(new py::object(std::move(object)), [](py::object* held) {
          // After the interpreter has ended there is no count to lower.
          if (!Py_IsInitialized()) return;
          const py::gil_scoped_acquire locked;
          delete held;
        }) {}
  py::object& get() const { return *object_; }

 private:
  std::shared_ptr<py::object> object_;
};

// "Linear" of a torch.nn.Linear.
inline std::string type_name(const py::handle& object) {
  return py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>();
}

// Of every function that may wait for another rank: it holds no lock that the other one needs. An `__init__` releases the lock
// inside of its function instead: around it, pybind11 would enter the new object in its list of all objects without the lock.
using Unlocked = py::call_guard<py::gil_scoped_release>;

// The same of a destructor: what it waits for are values that are still on their way from other ranks.
struct DeleteUnlocked {
  template <class Object>
  void operator()(Object* object) const {
    const py::gil_scoped_release unlocked;
    delete object;
  }
};
template <class Object>
using UnlockedPtr = std::unique_ptr<Object, DeleteUnlocked>;

}  // namespace shardproof::python
