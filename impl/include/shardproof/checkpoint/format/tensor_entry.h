// One torch.save zip for one tensor or one plain value: what an item of a `.distcp` file is. No Torch.
#pragma once

#include <cstdint>
#include <string>

#include "shardproof/algebra/layout.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/file_system.h"
#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {

// Bytes of a contiguous tensor. Throws Error when a size is negative or the product exceeds 2^62.
uint64_t bytes_of(Dtype dtype, const Shape& sizes);

// An entry known before its payload: head, payload_bytes of contiguous elements, tail.
struct TensorEntryLayout {
  std::string head;
  uint64_t payload_bytes = 0;
  uint64_t length = 0;  // of all three
  Dtype dtype = Dtype::Float;
  Shape sizes;
  // `payload_crc`: crc32 of the payload.
  std::string tail(uint32_t payload_crc) const;
};
// torch.load(weights_only=True) reads what this lays out.
TensorEntryLayout lay_out_tensor_entry(Dtype dtype, const Shape& sizes);

// What an entry says of itself. Elements lie at payload_offset + (storage_offset + sum of index * stride) * element size.
struct TensorEntry {
  Dtype dtype = Dtype::Float;
  Shape sizes, strides;
  int64_t storage_offset = 0;
  uint64_t payload_offset = 0;  // in the source
  uint64_t payload_bytes = 0;   // of the storage
  uint32_t payload_crc = 0;
  bool contiguous() const;
};
// Reads the description, not the payload. Throws Error naming the source when it is torn, is not a tensor, or its elements do
// not lie inside its storage.
TensorEntry parse_tensor_entry(const ByteSource& source);

// A number, string, list, dict...
std::string write_value_entry(const Value& value);
// Throws Error naming the source. `allowed`: globals besides plain values.
Value read_value_entry(const ByteSource& source, const AllowedGlobals& allowed = tensor_globals());

}  // namespace shardproof::checkpoint
