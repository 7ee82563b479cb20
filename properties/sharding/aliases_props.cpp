// Scenarios of docs/parity.md: one module, or one tensor, under several names.
#include <gtest/gtest.h>

#include <set>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::expect_trains_like_plain;

// Chosen by type, the module is found under both names.
TEST(Fsdp2Parity, a_module_registered_twice_is_one_unit) {
  for (const char* name : {"ddp", "zero3"}) {
    parity::Plan plan{.mesh = Mesh({{"dp_shard", 2}}), .options = toy::options(name)};
    plan.on_start = [](Sharded& sharded) {
      EXPECT_EQ(sharded.units().size(), 3u) << "the root, the shared module once, the other one";
      std::set<std::string> known;
      for (const auto& [key, value] : sharded.gather_parameters()) known.insert(key);
      EXPECT_TRUE(known.contains("a.weight") && known.contains("b.weight")) << "every name is known";
    };
    expect_trains_like_plain(parity::registered_twice, plan);
  }
}
