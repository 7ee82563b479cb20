// Random bits as a function of a counter.
#pragma once

#include <cstdint>

#include "internal/base/on_device.h"

namespace shardproof {

SHARD_ON_DEVICE inline uint64_t counter_mix(uint64_t x) {  // the finaliser of splitmix64 (Steele, Lea, Flood 2014)
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace shardproof
