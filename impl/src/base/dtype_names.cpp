#include "shardproof/base/dtype_names.h"

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {

const std::vector<DtypeNames>& dtype_table() {
  static const std::vector<DtypeNames> table = {
      {Dtype::Float, "float32", "FloatStorage", "F32", 4},
      {Dtype::Double, "float64", "DoubleStorage", "F64", 8},
      {Dtype::BFloat16, "bfloat16", "BFloat16Storage", "BF16", 2},
      {Dtype::Half, "float16", "HalfStorage", "F16", 2},
      {Dtype::Long, "int64", "LongStorage", "I64", 8},
      {Dtype::Int, "int32", "IntStorage", "I32", 4},
      {Dtype::Short, "int16", "ShortStorage", "I16", 2},
      {Dtype::Char, "int8", "CharStorage", "I8", 1},
      {Dtype::Byte, "uint8", "ByteStorage", "U8", 1},
      {Dtype::Bool, "bool", "BoolStorage", "BOOL", 1},
      {Dtype::ComplexFloat, "complex64", "ComplexFloatStorage", "C64", 8},
      {Dtype::ComplexDouble, "complex128", "ComplexDoubleStorage", "", 16},
  };
  return table;
}

const DtypeNames& names_of(Dtype dtype) {
  for (const DtypeNames& names : dtype_table())
    if (names.dtype == dtype) return names;
  throw Error(
      fmt::format("[checkpoint] dtype {} has no place in a checkpoint; convert the tensor first", c10::toString(dtype)));
}

namespace {
const DtypeNames* find(std::string_view DtypeNames::*name, std::string_view wanted) {
  if (wanted.empty()) return nullptr;
  for (const DtypeNames& names : dtype_table())
    if (names.*name == wanted) return &names;
  return nullptr;
}
}  // namespace

const DtypeNames* find_torch_dtype(std::string_view torch) {
  return find(&DtypeNames::torch, torch);
}
const DtypeNames* find_storage(std::string_view storage) {
  return find(&DtypeNames::storage, storage);
}
const DtypeNames* find_safetensors_dtype(std::string_view name) {
  return find(&DtypeNames::safetensors, name);
}

}  // namespace shardproof::checkpoint
