// Operators of the fake device: those of the CPU, on tensors that lie in the same memory. They are queued, and read when their
// stream gets there, as a GPU's do. Where the host has to know values, as for the size of the result, an operator waits for
// what its stream has queued, and for nothing else; what it writes is queued there.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>

#include "properties/doubles/fake_device.h"
#include "properties/doubles/fake_parts.h"

namespace fake_device {
namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

std::atomic<int64_t> copied_from_host = 0;  // in bytes

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == device().type(); }

// How many elements a tensor reaches over, from its first one.
int64_t extent(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return last + 1;
}

at::Tensor over(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like, int64_t offset) {
  at::Tensor tensor =
      at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return tensor;
}

// New memory of the device.
at::Tensor fresh(const at::Tensor& like) {
  const size_t bytes = static_cast<size_t>(extent(like)) * like.element_size();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, memory().allocate(bytes), &memory(), /*resizable=*/true);
  return over(storage, kKey, like, 0);
}

// With the values of a tensor of the CPU, as soon as the stream gets there.
at::Tensor sent(const at::Tensor& values) {
  const at::Tensor tensor = fresh(values);
  queue([to = on_host(tensor.const_data_ptr()), values, bytes = tensor.storage().nbytes()] {
    if (bytes > 0) std::memcpy(to, values.const_data_ptr(), bytes);
  });
  return tensor;
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  const c10::OptionalDeviceGuard there(where);
  const at::Tensor shape = at::empty_strided(sizes, strides, at::TensorOptions(dtype.value_or(at::kFloat)).device(at::kMeta));
  return fresh(shape);
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<at::Device> where, std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  const auto on_meta = at::TensorOptions(dtype.value_or(at::kFloat)).device(at::kMeta);
  return empty_strided(sizes, at::empty(sizes, on_meta, format).strides(), dtype, layout, where, pinned);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  if (strides.empty() && !sizes.empty())
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes), self.unsafeGetTensorImpl()->set_storage_offset(offset);
  else
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

void record_stream(at::Tensor& self, at::Stream stream) { used_on(self.storage().data_ptr(), stream.id()); }

// One call of an operator.
class HostCall {
 public:
  explicit HostCall(const c10::OperatorHandle& op) : op_(op), schema_(op.schema()) {
    const auto& returns = schema_.returns();
    is_view_ = !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  }

  // On the stream of its tensors' device, as LibTorch's own do.
  void run(torch::jit::Stack* stack) {
    const size_t count = schema_.arguments().size(), first = stack->size() - count;
    for (size_t i = 0; i < count; ++i) visit((*stack)[first + i], [&](const at::Tensor& tensor) { return note(i, tensor); });
    for (size_t i = 0; i < count; ++i)
      if ((*stack)[first + i].isDevice() && !device_) device_ = (*stack)[first + i].toDevice();
    if (device_ && device_->type() != device().type()) device_.reset();
    const c10::OptionalDeviceGuard there(device_);
    if (captures() && !is_view_) return capture_and_run(stack);
    if (!may_be_late(*stack, first) || !run_late(stack, first)) run_now(stack);
  }

 private:
  struct Shared {
    c10::Storage ours, cpu;
  };
  struct Written {
    at::Tensor ours, cpu;
    std::vector<int64_t> sizes, strides;  // before the call
  };

  // Whether nothing of the call depends on values: neither what the host gets, nor the sizes of the result. What draws numbers
  // runs in the order of the host.
  bool may_be_late(const torch::jit::Stack& stack, size_t first) const {
    static const std::set<std::string> some = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::bincount",
                                               "aten::repeat_interleave"};
    if (is_view_ || !reads_ours_ || has_cpu_ || picks_ || answers_the_host() || some.contains(schema_.name())) return false;
    if (schema_.name().starts_with("aten::unique") || schema_.name().starts_with("aten::_unique")) return false;
    const bool draws = std::ranges::any_of(op_.getTags(), [](at::Tag tag) { return tag == at::Tag::nondeterministic_seeded; });
    return !draws && !(schema_.name() == "aten::copy_" && stack[first + 1].toTensor().is_cpu());
  }

  // False where zeros are refused in the place of the values, of which only the result's sizes are asked.
  bool run_late(torch::jit::Stack* stack, size_t first) {
    require_one_device();
    const size_t count = schema_.arguments().size();
    torch::jit::Stack inputs, zeros;
    const auto at_address = [](const at::Tensor& tensor) -> at::Tensor {
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
      return is_ours(tensor) ? mirror(tensor, /*may_be_unreadable=*/tensor.numel() == 0) : tensor.clone();
    };
    for (size_t i = 0; i < count; ++i) {
      c10::IValue value = (*stack)[first + i], zero = (*stack)[first + i];
      if (value.isDevice()) value = zero = c10::Device(at::kCPU);
      visit(value, at_address);  // also where it is written: what has no data is refused before
      visit(zero, [&](const at::Tensor& tensor) { return zeros_like(tensor, is_written(i)); });
      inputs.push_back(std::move(value)), zeros.push_back(std::move(zero));
    }
    try {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(&zeros);
    } catch (const std::exception&) {
      shared_.clear(), written_.clear();
      return false;
    }
    for (Written& written : written_) take_sizes(written);
    for (size_t i = 0; i < count; ++i)
      if (is_written(i)) visit(inputs[i] = (*stack)[first + i], at_address);
    stack->resize(first);
    std::vector<at::Tensor> made;  // as of `capture_and_run`
    for (c10::IValue& value : zeros) {
      visit(value, [&](const at::Tensor& shape) {
        const auto [tensor, is_new] = place_of(shape);
        made.push_back(is_new ? mirror(tensor) : at::Tensor());
        return tensor;
      });
      stack->push_back(std::move(value));
    }
    queue([op = op_, inputs, made] { run_again(op, inputs, made); });
    return true;
  }

  // A tensor of the host in the place of this one, that shares memory with those of others that do.
  at::Tensor zeros_like(const at::Tensor& tensor, bool written) {
    if (!is_ours(tensor)) return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
    const auto found = std::ranges::find_if(shared_, [&](const Shared& shared) {
      return shared.ours.unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
    });
    const size_t bytes = tensor.storage().nbytes();
    const c10::Storage storage = found != shared_.end() ? found->cpu
                                                        : c10::Storage(c10::Storage::use_byte_size_t(), bytes, zeros_of(bytes),
                                                                       c10::GetCPUAllocator(), /*resizable=*/true);
    if (found == shared_.end()) shared_.push_back({tensor.storage(), storage});
    const at::Tensor cpu = over(storage, c10::DispatchKey::CPU, tensor, tensor.storage_offset());
    if (written) written_.push_back({tensor, cpu, tensor.sizes().vec(), tensor.strides().vec()});
    return cpu;
  }
  static c10::DataPtr zeros_of(size_t bytes) {
    void* memory = std::calloc(std::max<size_t>(bytes, 1), 1);
    return {memory, memory, &std::free, at::kCPU};
  }

  // What has other sizes after the call has memory of its own where it has grown.
  static void take_sizes(const Written& written) {
    const bool same = written.cpu.sizes() == at::IntArrayRef(written.sizes);
    if (same && written.cpu.strides() == at::IntArrayRef(written.strides)) return;
    c10::TensorImpl* impl = written.ours.unsafeGetTensorImpl();
    const bool grown = !same && extent(written.cpu) > extent(written.ours);
    if (grown) impl->set_storage_keep_dtype(fresh(written.cpu).storage());
    impl->set_sizes_and_strides(written.cpu.sizes(), written.cpu.strides(), grown ? 0 : written.cpu.storage_offset());
  }

  // Of a tensor that the call returned for zeros, and whether that is its own.
  std::pair<at::Tensor, bool> place_of(const at::Tensor& shape) const {
    if (!shape.defined()) return {shape, false};
    for (const Written& written : written_)
      if (shape.is_same(written.cpu)) return {written.ours, false};
    for (const Shared& shared : shared_)
      if (shape.storage().unsafeGetStorageImpl() == shared.cpu.unsafeGetStorageImpl())
        return {over(shared.ours, kKey, shape, shape.storage_offset()), false};
    return {fresh(shape), true};
  }
  // A graph has the addresses and numbers of this call, and its replays run the operator on whatever lies there then.
  void capture_and_run(torch::jit::Stack* stack) {
    const size_t count = schema_.arguments().size(), first = stack->size() - count;
    const torch::jit::Stack given(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
    torch::jit::Stack inputs;  // on the CPU, over the device's memory
    std::string what = schema_.name();
    const auto baked = [&](const at::Tensor& tensor) -> at::Tensor {
      if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
      if (is_ours(tensor) && tensor.numel() > 0) what += " " + address_text(tensor.const_data_ptr());
      return is_ours(tensor) ? mirror(tensor, /*may_be_unreadable=*/tensor.numel() == 0) : tensor.clone();
    };
    for (size_t i = 0; i < count; ++i) {
      c10::IValue value = given[i];
      if (!is_written(i)) visit(value, baked);
      if (value.isDevice() && value.toDevice().type() == device().type()) value = c10::Device(at::kCPU);
      inputs.push_back(std::move(value));
    }
    {
      const bool later = schema_.name() == "aten::copy_" && given[2].toBool() &&
                         is_ours(given[0].toTensor()) != is_ours(given[1].toTensor());  // it queues what replays do
      std::optional<NotCaptured> paused;
      if (!later) paused.emplace();
      run_now(stack);
      if (later) return;
    }
    for (size_t i = 0; i < count; ++i)
      if (is_written(i)) visit(inputs[i], baked);
    std::vector<at::Tensor> made;  // undefined where it is an argument that was written, or shares its memory
    for (size_t i = stack->size() - schema_.returns().size(); i < stack->size(); ++i) {
      c10::IValue value = (*stack)[i];
      visit(value, [&](const at::Tensor& tensor) {
        made.push_back(is_ours(tensor) && !aliases_any(given, tensor) ? baked(tensor) : at::Tensor());
        return tensor;
      });
    }
    capture(what, [op = op_, inputs, made] { run_again(op, inputs, made); });
  }

  static void run_again(const c10::OperatorHandle& op, torch::jit::Stack stack, const std::vector<at::Tensor>& made) {
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op.callBoxed(stack);
    }
    size_t next = 0;
    for (c10::IValue& value : stack)
      visit(value, [&](const at::Tensor& tensor) {
        const at::Tensor& place = made[next++];
        if (!place.defined() || place.numel() == 0) return tensor;
        TORCH_CHECK(tensor.sizes() == place.sizes() && tensor.strides() == place.strides() && tensor.dtype() == place.dtype(),
                    "fake device: a replay of ", op.schema().name(), " gives another shape or dtype than its capture");
        std::memcpy(place.mutable_data_ptr(), tensor.const_data_ptr(),
                    static_cast<size_t>(extent(tensor)) * tensor.element_size());
        return tensor;
      });
  }

  bool is_written(size_t argument) const {
    const auto* alias = schema_.arguments()[argument].alias_info();
    return alias && alias->isWrite();
  }

  static bool aliases_any(const torch::jit::Stack& given, const at::Tensor& tensor) {
    bool any = false;
    for (c10::IValue value : given)
      visit(value, [&](const at::Tensor& other) {
        any |= other.has_storage() && other.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl();
        return other;
      });
    return any;
  }

  void run_now(torch::jit::Stack* stack) {
    const size_t count = schema_.arguments().size(), first = stack->size() - count;
    if (reads_ours_) require_one_device();
    if (schema_.name() == "aten::copy_")
      count_copy((*stack)[first].toTensor(), (*stack)[first + 1].toTensor(), (*stack)[first + 2]);
    if (reads_ours_ && answers_the_host()) count_wait(schema_.name());
    if (sends_later(stack, first)) return;
    if (!is_view_) synchronize();
    for (size_t i = 0; i < count; ++i) {
      c10::IValue& value = (*stack)[first + i];
      visit(value, [&](const at::Tensor& tensor) { return to_cpu(tensor, is_written(i)); });
      if (value.isDevice() && value.toDevice().type() == device().type()) value = c10::Device(at::kCPU);
    }
    {
      const at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(stack);
    }
    for (size_t i = stack->size() - schema_.returns().size(); i < stack->size(); ++i)
      visit((*stack)[i], [&](const at::Tensor& tensor) { return from_cpu(tensor); });
    for (Written& written : written_) write_back(written);
  }

  template <class F>
  static void visit(c10::IValue& value, const F& f) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = f(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list = value.toTensorList().copy();
      for (size_t i = 0; i < list.size(); ++i) list.set(i, f(list.get(i)));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list = value.toOptionalTensorList().copy();
      for (size_t i = 0; i < list.size(); ++i)
        if (list.get(i).has_value() && list.get(i)->defined()) list.set(i, f(*list.get(i)));
      value = list;
    }
  }

  at::Tensor note(size_t argument, const at::Tensor& tensor) {
    reads_ours_ |= is_ours(tensor);
    const std::string& name = schema_.arguments()[argument].name();
    if (is_ours(tensor)) {
      if (!device_) device_ = tensor.device();
      const bool may = schema_.name() == "aten::copy_" || schema_.name() == "aten::_to_copy";
      TORCH_CHECK(may || tensor.device() == *device_, "fake device: argument '", name, "' of ", schema_.name(), " is on ",
                  tensor.device().str(), ", others are on ", device_->str());
    }
    has_cpu_ |= tensor.is_cpu() && (tensor.dim() > 0 || is_written(argument));
    picks_ |= name == "indices" && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    if (tensor.is_cpu() && tensor.dim() > 0 && stranger_.empty()) {
      const bool may = name == "indices" || schema_.name() == "aten::copy_" || schema_.name() == "aten::_to_copy";
      if (!may) stranger_ = name;
    }
    return tensor;
  }

  void require_one_device() const {
    TORCH_CHECK(stranger_.empty(), "fake device: argument '", stranger_, "' of ", schema_.name(),
                " is on the CPU, others are on ", device().str(), "; move it there");
  }

  // Of a copy from or to the host that may not happen later.
  static void count_copy(const at::Tensor& to, const at::Tensor& from, const c10::IValue& non_blocking) {
    if (is_ours(to) && from.is_cpu()) copied_from_host += static_cast<int64_t>(from.nbytes());
    if (is_ours(to) != is_ours(from) && !non_blocking.toBool()) count_wait("aten::copy_");
  }

  // Operators that return a number, or a tensor whose size depends on values.
  bool answers_the_host() const {
    static const std::set<std::string> some = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero",
                                               "aten::masked_select"};
    return some.contains(schema_.name());
  }

  // A copy to or from the host that nobody waits for: as from page-locked memory, which is read when the stream gets there.
  bool sends_later(torch::jit::Stack* stack, size_t first) const {
    if (schema_.name() != "aten::copy_" || !(*stack)[first + 2].toBool()) return false;
    const at::Tensor to = (*stack)[first].toTensor(), from = (*stack)[first + 1].toTensor();
    const bool to_host = to.is_cpu() && is_ours(from), from_host = is_ours(to) && from.is_cpu();
    if (!to_host && !from_host) return false;
    // By address: the copy keeps neither end alive.
    const auto bare = [](const at::Tensor& tensor) {
      const c10::Storage cpu(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                             c10::DataPtr(tensor.storage().mutable_data(), at::kCPU), nullptr, /*resizable=*/false);
      return over(cpu, c10::DispatchKey::CPU, tensor, tensor.storage_offset());
    };
    queue([cpu_to = to_host ? bare(to) : mirror(to), cpu_from = from_host ? bare(from) : mirror(from)] {
      const at::AutoDispatchBelowADInplaceOrView below;
      at::Tensor(cpu_to).copy_(cpu_from);
    });
    stack->resize(first);
    stack->emplace_back(to);
    return true;
  }

  // The same memory, as a tensor of the CPU. Views can be taken of what must not be read, or has no memory now.
  static at::Tensor mirror(const at::Tensor& tensor, bool may_be_unreadable = false) {
    const c10::Storage& storage = tensor.storage();
    const void* data = may_be_unreadable ? storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get() : storage.data();
    const c10::Storage cpu(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(on_host(data), at::kCPU), nullptr,
                           /*resizable=*/false);
    return over(cpu, c10::DispatchKey::CPU, tensor, tensor.storage_offset());
  }

  at::Tensor to_cpu(const at::Tensor& tensor, bool written) {
    if (!is_ours(tensor)) return tensor;
    if (!written) {
      const at::Tensor cpu = mirror(tensor, is_view_);
      shared_.push_back({tensor.storage(), cpu.storage()});
      return cpu;
    }
    const at::Tensor memory = at::empty({extent(tensor)}, tensor.options().device(at::kCPU));
    if (memory.numel() > 0)
      std::memcpy(memory.mutable_data_ptr(), on_host(tensor.const_data_ptr()), memory.nbytes());
    const at::Tensor cpu = over(memory.storage(), c10::DispatchKey::CPU, tensor, 0);
    written_.push_back({tensor, cpu, tensor.sizes().vec(), tensor.strides().vec()});
    return cpu;
  }

  at::Tensor from_cpu(const at::Tensor& cpu) {
    if (!cpu.defined()) return cpu;
    for (const Written& written : written_)
      if (cpu.is_same(written.cpu)) return written.ours;
    for (const Shared& shared : shared_)
      if (cpu.storage().unsafeGetStorageImpl() == shared.cpu.unsafeGetStorageImpl())
        return over(shared.ours, kKey, cpu, cpu.storage_offset());
    return schema_.name() == "aten::copy_" ? cpu : sent(cpu);  // a copy to the CPU returns what it was given
  }

  static void write_back(Written& written) {
    c10::TensorImpl* impl = written.ours.unsafeGetTensorImpl();
    const bool grown = written.cpu.sizes() != at::IntArrayRef(written.sizes) && extent(written.cpu) > extent(written.ours);
    if (grown) {
      const at::Tensor bigger = sent(written.cpu);
      impl->set_storage_keep_dtype(bigger.storage());
      impl->set_sizes_and_strides(bigger.sizes(), bigger.strides(), 0);
      return;
    }
    if (written.cpu.sizes() != at::IntArrayRef(written.sizes) || written.cpu.strides() != at::IntArrayRef(written.strides))
      impl->set_sizes_and_strides(written.cpu.sizes(), written.cpu.strides(),
                                  written.ours.storage_offset() + written.cpu.storage_offset());
    const size_t bytes = static_cast<size_t>(extent(written.cpu)) * written.cpu.element_size();
    if (bytes == 0) return;
    queue([to = on_host(written.ours.const_data_ptr()), cpu = written.cpu, bytes] {
      std::memcpy(to, cpu.const_data_ptr(), bytes);
    });
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  std::optional<c10::Device> device_;  // of the tensors, or of the result
  bool is_view_ = false, reads_ours_ = false, has_cpu_ = false;
  bool picks_ = false;  // the elements for which a mask is true
  std::string stranger_;  // the first argument that must not be on the CPU
  std::vector<Shared> shared_;
  std::vector<Written> written_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { HostCall(op).run(stack); }

// Attention chooses its algorithm by the device: here the CPU's, so that bits can be compared.
int64_t choose_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped) {
  const auto shape = [](const at::Tensor& x) {
    return at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kCPU));
  };
  std::optional<at::Tensor> cpu_mask;
  if (mask && mask->defined()) cpu_mask = shape(*mask);
  return at::_fused_sdp_choice(shape(q), shape(k), shape(v), cpu_mask, dropout, causal, scale, grouped);
}

}  // namespace

int64_t bytes_from_host() { return copied_from_host; }

void register_operators() {
  static torch::Library library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("record_stream", &record_stream);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  // Those that are made of others, too, where the CPU's choice of them is what is wanted.
  const std::set<std::string> composed = {"aten::convolution", "aten::convolution_backward", "aten::copy_"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = dispatcher.findOp(name);
    if (!op || op->hasKernelForDispatchKey(kKey)) continue;
    if (!op->hasKernelForDispatchKey(c10::DispatchKey::CPU) && !composed.contains(name.name)) continue;
    const std::string called = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library.impl(called.c_str(), torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
}

}  // namespace fake_device
