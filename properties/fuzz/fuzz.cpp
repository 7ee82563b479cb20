// What reads files that anybody may have written, under libFuzzer: the result of any bytes is data or an Error. SHARDPROOF_FUZZ
// says which reader: metadata, entry or safetensors.
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "properties/kit/shown.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/checksums.h"
#include "shardproof/checkpoint/format/dcp.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/format/tensor_entry.h"

namespace {

using namespace shardproof::checkpoint;
using shardproof::dtype_info;

void expect(bool condition) {
  if (!condition) std::abort();
}

void metadata(const std::string& bytes) {
  const Checkpoint checkpoint = read_metadata(bytes, "fuzz");
  validate(checkpoint, "fuzz");
  expect(read_metadata(write_metadata(checkpoint), "again") == checkpoint);
}

// What a tensor entry says of itself must hold: every element that it names can be read.
void entry(const std::string& bytes) {
  const MemorySource source(bytes, "fuzz");
  try {
    read_value_entry(source);
  } catch (const shardproof::Error&) {
  }
  const TensorEntry tensor = parse_tensor_entry(source);
  expect(tensor.payload_offset <= bytes.size() && tensor.payload_bytes <= bytes.size() - tensor.payload_offset);
  if (shardproof::numel(tensor.sizes) == 0) return;
  int64_t last = tensor.storage_offset;
  for (size_t d = 0; d < tensor.sizes.size(); ++d) last += (tensor.sizes[d] - 1) * tensor.strides[d];
  expect(last >= 0 && (static_cast<uint64_t>(last) + 1) * static_cast<uint64_t>(dtype_info(tensor.dtype).bytes) <=
                          tensor.payload_bytes);
}

void safetensors(const std::string& bytes) {
  const SafeTensors file = read_safetensors_header(MemorySource(bytes, "fuzz"));
  for (const auto& [name, tensor] : file.tensors)
    expect(tensor.offset <= bytes.size() && tensor.bytes <= bytes.size() - tensor.offset);
}

using Reader = void (*)(const std::string&);
Reader reader() {
  const char* name = std::getenv("SHARDPROOF_FUZZ");
  const std::string which = name ? name : "";
  if (which == "metadata") return metadata;
  if (which == "entry") return entry;
  if (which == "safetensors") return safetensors;
  std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  static const Reader read = reader();
  try {
    read(std::string(reinterpret_cast<const char*>(data), bytes));
  } catch (const shardproof::Error& error) {
    if (can_be_shown(error.what(), /*lines=*/true)) return 0;  // names in the file included
    std::fprintf(stderr, "cannot be shown: %s\n", error.what());
    std::abort();
  }
  return 0;
}
