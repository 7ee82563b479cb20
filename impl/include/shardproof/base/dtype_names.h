// What the formats call a dtype. Sees c10's enumeration only.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace shardproof::checkpoint {

using Dtype = c10::ScalarType;

struct DtypeNames {
  Dtype dtype;
  std::string_view torch;        // "float32"
  std::string_view storage;      // "FloatStorage"
  std::string_view safetensors;  // "F32"; "" when that format has none
  int64_t bytes;                 // of an element
};

// All dtypes that checkpoints here can hold.
const std::vector<DtypeNames>& dtype_table();
// Throws Error naming the dtype when it is not in the table.
const DtypeNames& names_of(Dtype dtype);
// Null when unknown.
const DtypeNames* find_torch_dtype(std::string_view torch);
const DtypeNames* find_storage(std::string_view storage);
const DtypeNames* find_safetensors_dtype(std::string_view safetensors);

}  // namespace shardproof::checkpoint
