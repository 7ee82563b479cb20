// What torch.save puts into its zips besides payloads.
#pragma once

#include "shardproof/algebra/layout.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/pickle.h"
#include "testing/checkpoint/format/zip_file.h"

namespace shardproof::checkpoint {

// A contiguous tensor whose storage is the record "data/KEY".
Value torch_tensor(Dtype dtype, const Shape& sizes, const std::string& key);
// data.pkl and byteorder, before the payloads; version, after them.
void add_torch_records(ZipWriter& zip, const std::string& pickle);
void add_torch_version(ZipWriter& zip);

}  // namespace shardproof::checkpoint
