#include "shardproof/sharding/shard_options.h"

#include "shardproof/base/name_pattern.h"

namespace shardproof {

UnitSelector by_name(std::string pattern) {
  return
      [pattern = std::move(pattern)](const std::string& name, const torch::nn::Module&) { return name_matches(pattern, name); };
}

}  // namespace shardproof
