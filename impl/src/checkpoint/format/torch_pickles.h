// What torch.save puts into its zips besides payloads.
#pragma once

#include <string>
#include <vector>

#include "shardproof/algebra/layout.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/pickle.h"
#include "internal/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {

// A contiguous tensor whose storage is the record "data/KEY".
Value torch_tensor(Dtype dtype, const Shape& sizes, const std::string& key);
// data.pkl and byteorder, before the payloads; version, after them.
void add_torch_records(ZipWriter& zip, const std::string& pickle);
void add_torch_version(ZipWriter& zip);

struct TensorEntry;  // tensor_entry.h

// data.pkl of such a zip. Throws Error, which names the source, when there is none.
Value read_torch_data(const ByteSource& source, const std::vector<ZipRecord>& records, const AllowedGlobals& allowed);
bool is_torch_tensor(const Value& value);
// Where a tensor of data.pkl lies. Throws Error, which begins with `name`, when it is not a tensor or leaves its storage.
TensorEntry read_torch_tensor(const Value& value, const std::vector<ZipRecord>& records, const std::string& name);

}  // namespace shardproof::checkpoint
