// The binding to NCCL on a double of a library from before windows.
#include <gtest/gtest.h>

#include "properties/doubles/gpu_libraries.h"
#include "shardproof/comm/nccl/nccl_api.h"

using namespace shardproof;

TEST(NcclApi, an_nccl_without_windows_loads_and_says_its_version) {
  gpu_libraries::answers().version = 22605;
  EXPECT_EQ(nccl_api(0)->why_no_windows(), "NCCL 2.26 has no windows, which came with 2.27");
}
