#include "shardproof/nn/meta_init.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

// Every operator called while a MetaInit lives comes here first: those that choose a device are told the meta device.
void on_meta(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::DeferredInit);
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "device") continue;
    c10::IValue& device = (*stack)[first + i];
    if (device.isNone() || device.toDevice().is_cpu()) device = c10::Device(at::kMeta);
  }
  op.callBoxed(stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_meta>()); }

}  // namespace

MetaInit::MetaInit() : guard_(c10::DispatchKeySet(c10::DispatchKey::DeferredInit)) {}
MetaInit::~MetaInit() = default;

void materialize(const at::Tensor& tensor, c10::Device device) {
  if (!tensor.is_meta()) return;
  const at::Tensor memory = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->_change_backend_component_keys(device);
  impl->set_storage_keep_dtype(memory.storage());
}

}  // namespace shardproof
