// The mesh axes that strategies, tensor and context parallelism know by name. Users write the names; code says these.
#pragma once

namespace shardproof::axes {

inline constexpr char dp_replicate[] = "dp_replicate";  // ranks with the same parameters and other samples
inline constexpr char dp_shard[] = "dp_shard";          // ranks that share parameters, gradients or state, with other samples
inline constexpr char cp[] = "cp";                      // ranks that share the sequences of one microbatch
inline constexpr char tp[] = "tp";                      // ranks that share the layers of one model
inline constexpr char ep[] = "ep";                      // ranks with other experts, on the view of the ranks that experts see

}  // namespace shardproof::axes
