// Before a function that kernels of a GPU call, too.
#pragma once

#ifdef __CUDACC__
#  define SHARD_ON_DEVICE __host__ __device__
#else
#  define SHARD_ON_DEVICE
#endif
