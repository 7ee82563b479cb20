// Training runs that meet what random cases draw seldom: low precision that the update rounds at once, sums in float32, exact
// norms. Against the golden runs.
#include <gtest/gtest.h>

#include "properties/kit/harness_env.h"
#include "properties/kit/held_cases.h"

using namespace harness;

TEST(DeviceTraining, each_kernel_is_met_by_a_run) {
  const std::string model = "gpt(layers=2,hidden=16,heads=2,vocab=29,positions=7) mesh(dp_shard=3) ";
  const std::string run = " seed=7 : accumulate(2) step*2 accumulate(1) step";
  expect_held(model + "zero3(compute=bf16,reduce=bf16,float32_sums=1) adamw(lr=0.01,decay=0.1,clip=0.5) ordered" + run);
  expect_held(model + "zero3(compute=bf16,offload=pinned) adamw(lr=0.01,decay=0.1,clip=0.5) ordered" + run);
  expect_held(model + "zero2(compute=fp16) adam(lr=0.01,decay=0.1) ordered" + run);
  expect_held(model + "zero1 lion(lr=0.01,clip=0.1) ordered" + run);
}
