// An entry of a `.distcp` file: one zip of torch.save with one tensor or one plain value. This header does not include Torch.
#pragma once

#include <cstdint>
#include <string>

#include "shardproof/algebra/layout.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/file_system.h"
#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {

// The number of bytes of a contiguous tensor. Throws Error when a size is negative, or when there are more than 2^62 elements
// or 2^63 - 1 bytes; then the message begins with `who`.
uint64_t bytes_of(Dtype dtype, const Shape& sizes, const std::string& who = "a tensor");

// The layout of a tensor's entry, which is known before its payload: the head, then `payload_bytes` of contiguous elements,
// then the tail.
struct TensorEntryLayout {
  std::string head;
  uint64_t payload_bytes = 0;
  uint64_t length = 0;  // the number of bytes of all three
  Dtype dtype = Dtype::Float;
  Shape sizes;
  // `payload_crc` is the CRC-32 of the payload.
  std::string tail(uint32_t payload_crc) const;
};
// Lays out an entry that torch.load(weights_only=True) can read.
TensorEntryLayout lay_out_tensor_entry(Dtype dtype, const Shape& sizes);

// What an entry says about itself. An element lies at payload_offset + (storage_offset + sum of index * stride) * element size.
struct TensorEntry {
  Dtype dtype = Dtype::Float;
  Shape sizes, strides;
  int64_t storage_offset = 0;
  uint64_t payload_offset = 0;  // where the storage begins in the source
  uint64_t payload_bytes = 0;   // the size of the storage
  uint32_t payload_crc = 0;
  bool contiguous() const;
};
// Reads the description, not the payload. Throws Error, which names the source, when the entry is damaged or is not a tensor,
// or when elements lie outside its storage.
TensorEntry parse_tensor_entry(const ByteSource& source);

// The entry of a plain value: a number, a string, a list, a dict and so on.
std::string write_value_entry(const Value& value);
// Reads such an entry. `allowed` are the globals that may occur besides plain values. Throws Error, which names the source,
// when it cannot.
Value read_value_entry(const ByteSource& source, const AllowedGlobals& allowed = tensor_globals());

}  // namespace shardproof::checkpoint
