// What stands in the place of parts that a build leaves out says what is missing, what to do, and what to use instead.
#include <gtest/gtest.h>

#include "properties/kit/expect_error.h"
#include "shardproof/comm/mpi/mpi.h"
#include "shardproof/comm/nccl/nccl.h"
#include "shardproof/device/kernels/cuda.h"

using namespace shardproof;

TEST(Absent, a_build_without_mpi_says_so) {
  EXPECT_FALSE(mpi_available());
  expect_error([] { MpiWorld(); }, {"[mpi] this build has no MPI", "rebuild", "--backend threads"});
}

TEST(Absent, a_build_without_nccl_says_so) {
  EXPECT_FALSE(nccl_available());
  EXPECT_EQ(nccl_devices(), 0);
  EXPECT_EQ(nccl_version(), 0);
  EXPECT_EQ(nccl_compute_capability(0), 0);
  EXPECT_EQ(nccl_device_id(0), "");
  expect_error([] { nccl_api(0); }, {"[nccl] this build has no NCCL", "rebuild", "--backend mpi"});
}

TEST(Absent, a_build_without_kernels_says_so) {
  EXPECT_FALSE(cuda_built());
  EXPECT_EQ(kernels_on(nullptr), nullptr);
  expect_error([] { use_cuda(); }, {"[cuda] this build has no CUDA kernels", "ci/setup"});
}
