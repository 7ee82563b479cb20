// What other ranks have to know of a sharded model in order to take its parameters, or to give it theirs, as bytes.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct TensorRecord {
  std::string name;
  Shape shape;
  at::ScalarType dtype = at::kFloat;
  Placement at = {};
};

struct ModelRecord {
  std::vector<TensorRecord> parameters;                      // main ones, in the order of the units
  std::vector<TensorRecord> plain;  // by name: buffers of state and parameters that are not sharded, whole on every rank
  std::vector<std::pair<std::string, std::string>> aliases;  // every name, and the one that the parameter is sharded under
  std::vector<std::pair<std::string, std::string>> extra;    // what modules keep beside tensors: the name, and bytes
};

ModelRecord record_of(const Sharded::Impl& sharded);

// Law: model_record(serialized(record)) is the record.
std::string serialized(const ModelRecord& record);
ModelRecord model_record(const std::string& bytes);

}  // namespace shardproof
