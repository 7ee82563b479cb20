// The one table of dtypes. It says what people and file formats call each dtype, how large an element is, and which Element
// (element.h) stands for it in arithmetic. Of Torch it includes c10's enumeration of dtypes only.
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
  std::string_view storage;        // what files of PyTorch call it: "FloatStorage"
  std::string_view safetensors;    // what safetensors files call it: "F32"; "" when that format does not have the dtype
  int64_t bytes;                   // the size of an element
  std::optional<Element> element;  // empty: the arithmetic here does not work on it, so collectives cannot reduce it
};

// Every dtype that a checkpoint of this library can hold.
const std::vector<DtypeInfo>& dtype_table();
// Throws Error, which names the dtype, when the table does not have it.
const DtypeInfo& dtype_info(Dtype dtype);
// Look a dtype up by one of its names. They return null when no dtype has that name.
const DtypeInfo* find_dtype(std::string_view name);
const DtypeInfo* find_storage(std::string_view storage);
const DtypeInfo* find_safetensors_dtype(std::string_view safetensors);

// The name for messages. For a dtype that is not in the table it is c10's name.
std::string_view dtype_name(Dtype dtype);
bool can_reduce(Dtype dtype);
// Throws Error when the arithmetic here does not work on the dtype.
Element element_type(Dtype dtype);

}  // namespace shardproof
