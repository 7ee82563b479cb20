#include "shardproof/base/dtypes.h"

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

const DtypeInfo* find(Dtype dtype) {
  for (const DtypeInfo& info : dtype_table())
    if (info.dtype == dtype) return &info;
  return nullptr;
}

const DtypeInfo* find(std::string_view DtypeInfo::*name, std::string_view wanted) {
  if (wanted.empty()) return nullptr;
  for (const DtypeInfo& info : dtype_table())
    if (info.*name == wanted) return &info;
  return nullptr;
}

}  // namespace

const std::vector<DtypeInfo>& dtype_table() {
  static const std::vector<DtypeInfo> table = {
      {Dtype::Float, "float32", "FloatStorage", "F32", 4, Element::f32},
      {Dtype::Double, "float64", "DoubleStorage", "F64", 8, Element::f64},
      {Dtype::BFloat16, "bfloat16", "BFloat16Storage", "BF16", 2, Element::bf16},
      {Dtype::Half, "float16", "HalfStorage", "F16", 2, Element::f16},
      {Dtype::Long, "int64", "LongStorage", "I64", 8, Element::i64},
      {Dtype::Int, "int32", "IntStorage", "I32", 4, Element::i32},
      {Dtype::Short, "int16", "ShortStorage", "I16", 2, {}},
      {Dtype::Char, "int8", "CharStorage", "I8", 1, {}},
      {Dtype::Byte, "uint8", "ByteStorage", "U8", 1, Element::u8},
      {Dtype::Bool, "bool", "BoolStorage", "BOOL", 1, {}},
      {Dtype::ComplexFloat, "complex64", "ComplexFloatStorage", "C64", 8, {}},
      {Dtype::ComplexDouble, "complex128", "ComplexDoubleStorage", "", 16, {}},
  };
  return table;
}

const DtypeInfo& dtype_info(Dtype dtype) {
  const DtypeInfo* info = find(dtype);
  SHARD_REQUIRE(info != nullptr, "checkpoint", "dtype {} has no place in a checkpoint; convert the tensor first",
                c10::toString(dtype));
  return *info;
}

const DtypeInfo* find_dtype(std::string_view name) {
  return find(&DtypeInfo::name, name);
}
const DtypeInfo* find_storage(std::string_view storage) {
  return find(&DtypeInfo::storage, storage);
}
const DtypeInfo* find_safetensors_dtype(std::string_view safetensors) {
  return find(&DtypeInfo::safetensors, safetensors);
}

std::string_view dtype_name(Dtype dtype) {
  const DtypeInfo* info = find(dtype);
  return info ? info->name : c10::toString(dtype);
}

bool can_reduce(Dtype dtype) {
  const DtypeInfo* info = find(dtype);
  return info && info->element;
}

Element element_type(Dtype dtype) {
  SHARD_REQUIRE(can_reduce(dtype), "dtypes",
                "no arithmetic works on {}; convert the tensor to float32, float64, bfloat16, float16, int32, int64 or uint8",
                dtype_name(dtype));
  return *find(dtype)->element;
}

}  // namespace shardproof
