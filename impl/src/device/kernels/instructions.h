// Sets of instructions that a function may be compiled for, beside those that every processor has.
#pragma once

#if defined(__x86_64__)
#  define SHARD_X86
#  define SHARD_AVX2 gnu::target("avx2,fma")
#  define SHARD_AVX512 gnu::target("avx512f,avx512dq,avx512vl,fma")
#endif

namespace shardproof {

// From the poorest to the richest.
enum class Instructions { anywhere, avx2, avx512 };

inline Instructions richest_instructions() {
#ifdef SHARD_X86
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return Instructions::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return Instructions::avx2;
#endif
  return Instructions::anywhere;
}

}  // namespace shardproof
