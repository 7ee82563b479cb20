// The one table of dtypes: what people and formats call each, how large it is, and what arithmetic calls it. Sees c10's
// enumeration only.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "shardproof/base/element.h"

namespace shardproof {

using Dtype = c10::ScalarType;

struct DtypeInfo {
  Dtype dtype;
  std::string_view name;           // "float32"
  std::string_view storage;        // "FloatStorage", in files of PyTorch
  std::string_view safetensors;    // "F32"; "" when that format has none
  int64_t bytes;                   // of an element
  std::optional<Element> element;  // none: no arithmetic here works on it, so collectives cannot reduce it
};

// All dtypes that checkpoints here can hold.
const std::vector<DtypeInfo>& dtype_table();
// Throws Error naming the dtype when it is not in the table.
const DtypeInfo& dtype_info(Dtype dtype);
// Null when unknown.
const DtypeInfo* find_dtype(std::string_view name);
const DtypeInfo* find_storage(std::string_view storage);
const DtypeInfo* find_safetensors_dtype(std::string_view safetensors);

// For messages: of a dtype that is not in the table, what c10 calls it.
std::string_view dtype_name(Dtype dtype);
bool can_reduce(Dtype dtype);
// Throws Error for a dtype that arithmetic does not work on.
Element element_type(Dtype dtype);

}  // namespace shardproof
