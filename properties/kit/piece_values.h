// What pieces of a sharded model hold, on the host.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "shardproof/sharding/piece.h"

namespace kit {

inline std::vector<at::Tensor> values_of(const std::vector<shardproof::Piece>& pieces) {
  std::vector<at::Tensor> all;
  for (const shardproof::Piece& piece : pieces) all.push_back(piece.data.to(at::kCPU).clone());
  return all;
}

}  // namespace kit
