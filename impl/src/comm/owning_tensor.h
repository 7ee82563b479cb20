// Numbers of the host as a tensor for a call.
#pragma once

#include <ATen/ops/from_blob.h>
#include <c10/core/ScalarType.h>

#include <memory>
#include <utility>
#include <vector>

namespace shardproof {

// The tensor owns them. When another rank fails, this one leaves the call by an exception, and others may still be writing into
// its memory. It lies in the host's memory under a MetaInit, too.
template <class Number>
at::Tensor owning_tensor(std::vector<Number> numbers) {
  auto held = std::make_shared<std::vector<Number>>(std::move(numbers));
  return at::from_blob(held->data(), {static_cast<int64_t>(held->size())}, [held](void*) {},
                       at::TensorOptions(c10::CppTypeToScalarType<Number>::value));
}

}  // namespace shardproof
