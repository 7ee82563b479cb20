// Random models on random meshes: cut unevenly by tensor parallelism, with blocks under another strategy or on another mesh
// than the rest.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "shardproof/shardproof.h"

namespace kit {

struct DrawnModel {
  std::shared_ptr<torch::nn::Module> module;
  shardproof::ParallelPlan plan;
  std::function<at::Tensor(at::Tensor)> forward;  // of tokens below 13, at most 8 a sample
};

struct DrawnSharding {
  shardproof::Mesh mesh;
  bool llama = false;
  int64_t heads = 1, kv_heads = 1;
  bool tied = false, sequence = false;
  shardproof::Strategy row, row_of_blocks;
  bool blocks_on_one_axis = false;  // see dp_replicate and dp_shard as one axis
  int64_t alignment = 64, bucket_bytes_max = 0;
  shardproof::Granularity granularity = shardproof::Granularity::element;
  int64_t shard_dim = 0;
  int64_t granule = 1;  // of elements; 0: rows of each parameter

  std::string str() const;
  // With equal values on every rank.
  DrawnModel make() const;
  // Cuts a model along tp, where the mesh has more than one rank along it.
  std::optional<shardproof::TensorParallel> cut(const DrawnModel& model,
                                                const std::shared_ptr<shardproof::MeshComm>& comms) const;
  // For fully_shard: bfloat16, with main parameters of float32.
  shardproof::ShardOptions options() const;
  // How many elements stay together of what a rank along tp holds of a parameter, in this shape.
  int64_t granule_of(const shardproof::Shape& part) const;
};

// Inside of a RapidCheck property.
DrawnSharding drawn_sharding();
// The same model on another mesh, under other strategies.
DrawnSharding drawn_elsewhere(const DrawnSharding& d);

}  // namespace kit
