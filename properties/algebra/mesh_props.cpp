// Laws of the mesh: numbering, peers, text.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <set>

#include "properties/kit/expect_error.h"
#include "properties/kit/gen_layout.h"
#include "properties/kit/spec_layout.h"

namespace shardproof {
namespace {

RC_GTEST_PROP(Mesh, prints_and_parses_back, ()) {
  const Mesh mesh = *gen::mesh();
  RC_ASSERT(Mesh::parse(mesh.str()) == mesh);
}

RC_GTEST_PROP(Mesh, numbers_its_ranks_as_an_odometer_counts, ()) {
  const Mesh mesh = *gen::mesh();
  int64_t product = 1;
  for (const Axis& axis : mesh.axes()) product *= axis.size;
  RC_ASSERT(mesh.size() == product);
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const std::vector<int64_t> at = mesh.coordinates(rank);
    RC_ASSERT(at == spec::coordinates(mesh, rank));
    RC_ASSERT(mesh.rank(at) == rank);
    for (size_t i = 0; i < at.size(); ++i) {
      RC_ASSERT(mesh.coordinate(rank, mesh.axes()[i].name) == at[i]);
      RC_ASSERT(mesh.index(mesh.axes()[i].name) == static_cast<int64_t>(i));
      RC_ASSERT(mesh.size(mesh.axes()[i].name) == mesh.axes()[i].size);
    }
  }
}

RC_GTEST_PROP(Mesh, peers_are_those_that_differ_along_the_axes_alone, ()) {
  const Mesh mesh = *gen::mesh();
  std::vector<std::string> axes;
  for (const Axis& axis : mesh.axes())
    if (*rc::gen::arbitrary<bool>())
      axes.insert(axes.begin() + *rc::gen::inRange<size_t>(0, axes.size() + 1), axis.name);
  for (int64_t rank = 0; rank < mesh.size(); ++rank)
    RC_ASSERT(mesh.peers(rank, axes) == spec::group(mesh, rank, axes));
}

RC_GTEST_PROP(Mesh, peer_lists_partition_the_world, ()) {
  const Mesh mesh = *gen::mesh();
  std::vector<std::string> axes;
  for (const Axis& axis : mesh.axes())
    if (*rc::gen::arbitrary<bool>()) axes.push_back(axis.name);
  std::set<std::vector<int64_t>> lists;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const std::vector<int64_t> peers = mesh.peers(rank, axes);
    RC_ASSERT(std::count(peers.begin(), peers.end(), rank) == 1);
    lists.insert(peers);
  }
  int64_t members = 0;
  for (const auto& list : lists) members += list.size();
  RC_ASSERT(members == mesh.size());
}

TEST(Mesh, of_no_axes_has_one_rank) {
  EXPECT_EQ(Mesh().size(), 1);
  EXPECT_EQ(Mesh::parse(""), Mesh());
  EXPECT_TRUE(Mesh().coordinates(0).empty());
  EXPECT_EQ(Mesh().peers(0, {}), std::vector<int64_t>{0});
  EXPECT_EQ(Mesh().str(), "");
}

TEST(Mesh, numbers_ranks_with_the_last_axis_fastest) {
  const Mesh mesh = Mesh::parse("dp_shard=2,tp=3");
  EXPECT_EQ(mesh.coordinates(4), (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(mesh.peers(4, {"tp"}), (std::vector<int64_t>{3, 4, 5}));
  EXPECT_EQ(mesh.peers(4, {"dp_shard"}), (std::vector<int64_t>{1, 4}));
  EXPECT_EQ(mesh.peers(4, {"tp", "dp_shard"}), (std::vector<int64_t>{0, 3, 1, 4, 2, 5}));
  EXPECT_TRUE(mesh.has("tp"));
  EXPECT_FALSE(mesh.has("cp"));
}

struct Malformed {
  const char* text;
  int column;
  const char* expectation;
};

TEST(Mesh, text_that_is_malformed_is_refused_with_its_column) {
  const Malformed cases[] = {
      {"dp", 3, "expected '=' after axis `dp`"},
      {"dp=", 4, "expected the size of axis `dp` in digits, got the end;"},
      {"dp=x", 4, "expected the size of axis `dp` in digits, got 'x';"},
      {"dp=-1", 4, "expected the size of axis `dp`"},
      {"dp=0", 4, "must be between 1 and 2147483647"},
      {"dp=2147483648", 4, "must be between 1 and 2147483647"},
      {"dp=99999999999999999999", 4, "must be between 1 and 2147483647"},
      {"=2", 1, "expected an axis name"},
      {"Dp=2", 1, "expected an axis name"},
      {"2dp=2", 1, "expected an axis name"},
      {" dp=2", 1, "expected an axis name"},
      {"dp=2,", 6, "expected an axis name"},
      {"dp=2,,tp=2", 6, "expected an axis name"},
      {"dp=2 tp=2", 5, "expected ','"},
      {"dp=2;tp=2", 5, "expected ','"},
      {"dp-shard=2", 3, "expected '=' after axis `dp`"},
      {"dp=2,tp=3,dp=4", 11, "axis `dp` is named twice"},
      {"dp=65536,tp=32768", 13, "the product of the sizes may be at most 2147483647"},
  };
  for (const Malformed& malformed : cases)
    expect_error([&] { Mesh::parse(malformed.text); },
                 {fmt::format("[mesh] column {} of \"{}\"", malformed.column, malformed.text),
                  malformed.expectation, "write axis=size,axis=size"});
}

TEST(Mesh, as_large_as_a_rank_can_count_is_accepted) {
  EXPECT_EQ(Mesh::parse("dp=2147483647").size(), 2147483647);
  EXPECT_EQ(Mesh::parse("dp=65536,tp=32767").size(), 65536LL * 32767);
}

TEST(Mesh, axes_that_make_no_mesh_are_refused) {
  expect_error([] { Mesh({{"", 2}}); }, {"[mesh]", "\"\"", "[a-z_][a-z0-9_]*"});
  expect_error([] { Mesh({{"a b", 2}}); }, {"[mesh]", "\"a b\""});
  expect_error([] { Mesh({{"dp", 0}}); }, {"[mesh]", "`dp`", "at least 1", "got 0"});
  expect_error([] { Mesh({{"dp", 2}, {"dp", 2}}); }, {"[mesh]", "`dp`", "twice"});
  expect_error([] { Mesh({{"dp", 1 << 20}, {"tp", 1 << 11}}); }, {"[mesh]", "2147483647", "`tp`", "2048"});
}

TEST(Mesh, questions_about_what_it_lacks_are_refused) {
  const Mesh mesh = Mesh::parse("dp=2,tp=3");
  expect_error([&] { mesh.index("cp"); }, {"[mesh]", "`cp`", "dp, tp"});
  expect_error([&] { Mesh().size("cp"); }, {"[mesh]", "`cp`", "no axes"});
  expect_error([&] { mesh.coordinates(6); }, {"[mesh]", "rank 6", "dp=2,tp=3", "6 ranks"});
  expect_error([&] { mesh.coordinates(-1); }, {"[mesh]", "rank -1"});
  expect_error([&] { mesh.rank({0, 3}); }, {"[mesh]", "coordinate 3", "`tp`", "size 3"});
  expect_error([&] { mesh.rank({0}); }, {"[mesh]", "2 axes", "1 coordinates"});
  expect_error([&] { mesh.peers(0, {"tp", "tp"}); }, {"[mesh]", "`tp` twice"});
  expect_error([&] { mesh.peers(0, {"cp"}); }, {"[mesh]", "`cp`"});
}

}  // namespace
}  // namespace shardproof
