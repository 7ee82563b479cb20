// Units of one model that are sharded otherwise than the rest: a strategy, a mesh and a divisor of their own.
#include <gtest/gtest.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::expect_near;
using parity::expect_trains_like_plain;
using parity::grid;
using parity::on_mesh;
using parity::ranks;

namespace {

constexpr int64_t kUnits = 3, kWidth = 4;

parity::Trainee chain() { return parity::trainee(parity::blocks(kUnits, kWidth), {2, kWidth}); }

using OwnOptions = std::map<std::string, UnitOptions>;  // by the unit's name

ShardOptions with(const std::string& all, OwnOptions own) {
  ShardOptions options = toy::options(all);
  options.units = by_type<parity::BlockImpl>();
  options.unit_options = [own = std::move(own)](const std::string& unit) {
    const auto found = own.find(unit);
    return found == own.end() ? UnitOptions{} : found->second;
  };
  return options;
}

// The example of docs/strategies.md.
ShardOptions blocks_of_three_kinds() {
  ShardOptions options;
  options.units = by_name("*");
  options.unit_options = [](const std::string& unit) {
    UnitOptions own;
    if (unit == "0") own.strategy = strategy("zero1");                              // it stays whole
    if (unit == "2") own.mesh = Mesh({{"dp_replicate", 2}, {"dp_shard", 2}});       // gathered between two ranks
    return own;
  };
  return options;
}

// Of one backward on each rank's own data, whole and by name.
parity::Tensors gradients(const ShardOptions& options, const std::shared_ptr<MeshComm>& comms, double* norm = nullptr) {
  auto model = parity::blocks(kUnits, kWidth);
  Sharded sharded = fully_shard(model.ptr(), comms, options);
  call(model, toy::data({2, kWidth}, comms->rank())).square().sum().backward();
  if (norm) *norm = sharded.gradient_norm();
  parity::Tensors like;
  for (const auto& item : parity::blocks(kUnits, kWidth)->named_parameters()) like[item.key()] = item.value();
  return parity::whole(sharded.gradients(), like, *comms);
}

}  // namespace

TEST(UnitOptions, units_of_several_strategies_train_like_plain) {
  for (const Strategy& all : strategies())
    for (const Strategy& one : strategies())
      expect_trains_like_plain(chain, {.mesh = grid(2, 2), .options = with(all.name, {{"1", {.strategy = one}}})});
}

TEST(UnitOptions, units_that_accumulate_before_and_after_the_sum_train_together) {
  parity::Plan plan{.mesh = grid(2, 2),
                    .options = with("zero3", {{"0", {.strategy = strategy("ddp")}}, {"2", {.strategy = strategy("zero1")}}}),
                    .microbatches = 3};
  plan.tolerance = 1e-6;  // two orders of sums beside one plain run
  expect_trains_like_plain(chain, plan);
}

TEST(UnitOptions, a_unit_on_another_mesh_of_the_same_ranks_trains_like_plain) {
  for (const Strategy& row : strategies()) {
    parity::Plan plan{.mesh = ranks(4), .options = with("zero3", {{"1", {.strategy = row, .mesh = grid(2, 2)}}})};
    plan.tolerance = 1e-6;  // sums go axis by axis there
    expect_trains_like_plain(chain, plan);
  }
}

TEST(UnitOptions, the_example_of_the_documentation_trains_like_plain) {
  parity::Plan plan{.mesh = ranks(4), .options = blocks_of_three_kinds()};
  plan.options.alignment_bytes = 64;
  plan.tolerance = 1e-6;
  expect_trains_like_plain(chain, plan);
}

TEST(UnitOptions, a_unit_on_another_mesh_gathers_within_its_axes) {
  auto trace = std::make_shared<Trace>();
  on_mesh(
      ranks(4),
      [](std::shared_ptr<MeshComm> comms) {
        auto model = parity::blocks(kUnits, kWidth);
        Sharded sharded =
            fully_shard(model.ptr(), comms, with("zero3", {{"1", {.strategy = strategy("hsdp"), .mesh = grid(2, 2)}}}));
        call(model, toy::data({2, kWidth}, 1)).sum().backward();
      },
      {}, trace);
  auto calls = parity::calls_of(*trace, 0);
  EXPECT_EQ(calls["all_gather"], 2 * kUnits);
  EXPECT_EQ(calls["reduce_scatter"], kUnits);
  EXPECT_EQ(calls["all_reduce"], 1) << "over the replicas of the one unit";
}

TEST(UnitOptions, the_norm_counts_every_element_once_whatever_the_strategies) {
  for (const bool fast : {false, true})
    on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
      ShardOptions alike = with("zero3", {});
      ShardOptions mixed = with("zero3", {{"0", {.strategy = strategy("ddp")}}, {"1", {.strategy = strategy("hfsdp")}}});
      alike.numerics = mixed.numerics = fast ? Numerics::fast : Numerics::ordered;
      double wanted = 0, norm = 0;
      gradients(alike, comms, &wanted);
      gradients(mixed, comms, &norm);
      if (fast) EXPECT_NEAR(norm, wanted, 1e-6 * wanted);
      else EXPECT_EQ(norm, wanted);
    });
}

TEST(UnitOptions, a_unit_divides_by_a_number_of_its_own) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    const auto usual = gradients(with("zero3", {}), comms);
    const auto own = gradients(with("zero3", {{"1", {.gradient_divide = 8.0}}}), comms);
    for (const auto& [name, gradient] : usual)
      expect_near(own.at(name), name.starts_with("1.") ? gradient / 4 : gradient, 0, name);
  });
}

TEST(UnitOptions, options_given_to_a_unit_come_before_those_by_name) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = parity::blocks(kUnits, kWidth);
    const ShardOptions options = with("zero3", {{"0", {.gradient_divide = 8.0}}, {"1", {.gradient_divide = 8.0}}});
    Sharding sharding(comms, options);
    sharding.unit(model->children()[0], {.gradient_divide = 1.0});
    Sharded sharded = sharding.shard(model.ptr());
    call(model, toy::data({2, kWidth}, comms->rank())).square().sum().backward();
    const auto usual = gradients(with("zero3", {}), comms);
    parity::Tensors like;
    for (const auto& [name, gradient] : usual) like[name] = gradient;
    for (const auto& [name, gradient] : parity::whole(sharded.gradients(), like, *comms)) {
      const double factor = name.starts_with("0.") ? 2 : name.starts_with("1.") ? 0.25 : 1;
      expect_near(gradient, usual.at(name) * factor, 0, name);
    }
  });
}

TEST(UnitOptions, what_a_unit_cannot_have_is_refused_with_its_name) {
  const auto refuses = [](const Mesh& mesh, const UnitOptions& own, const std::string& says) {
    on_mesh(mesh, [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::blocks(kUnits, kWidth);
      expect_error([&] { fully_shard(model.ptr(), comms, with("zero3", {{"1", own}})); }, {says});
    });
  };
  refuses(ranks(2), {.strategy = strategy("hsdp")}, "dp_replicate");
  refuses(ranks(4), {.mesh = ranks(2)}, "4");
  refuses(ranks(4), {.mesh = Mesh({{"dp_shard", 2}, {"other", 2}})}, "unit '1' sums gradients of rank");
  refuses(ranks(2), {.gradient_divide = -1.0}, "gradient_divide");
}

// Rows that keep a part of the gathered bucket between forward and backward.

TEST(Between, the_gather_before_the_backward_is_over_the_axis_that_the_row_names) {
  auto trace = std::make_shared<Trace>();
  on_mesh(
      grid(2, 2),
      [](std::shared_ptr<MeshComm> comms) {
        auto model = parity::blocks(kUnits, kWidth);
        Sharded sharded = fully_shard(model.ptr(), comms, with("row_sr_t_sr_s", {}));
        call(model, toy::data({2, kWidth}, 1)).sum().backward();
      },
      {}, trace);
  std::map<std::string, int64_t> gathers;
  for (const TraceRecord& record : trace->of_rank(0))
    if (record.op == "all_gather") ++gathers[record.group];
  ASSERT_EQ(gathers.size(), 2U);
  for (const auto& [group, count] : gathers) EXPECT_EQ(count, kUnits) << group;
}

TEST(Between, every_row_that_keeps_a_part_trains_like_plain) {
  int64_t rows = 0;
  for (const Strategy& row : free_rows()) {
    if (!row.between) continue;
    ++rows;
    for (const bool recompute : {false, true})
      for (const Mesh& mesh : {grid(2, 2), grid(3, 1), grid(1, 3)}) {
        parity::Plan plan{.mesh = mesh, .options = with(row.name, {}), .microbatches = 2};
        if (recompute) plan.options.recompute = plan.options.units;
        expect_trains_like_plain(chain, plan);
      }
  }
  EXPECT_GE(rows, 4);
}

TEST(Between, the_options_of_a_module_come_before_the_row) {
  for (const Reshard& reshard : {Reshard::always(), Reshard::never()}) {
    auto trace = std::make_shared<Trace>();
    on_mesh(
        grid(2, 2),
        [&](std::shared_ptr<MeshComm> comms) {
          auto model = parity::blocks(kUnits, kWidth);
          ShardOptions options = with("row_sr_t_sr_s", {});
          options.reshard_after_forward = reshard;
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          call(model, toy::data({2, kWidth}, 1)).sum().backward();
        },
        {}, trace);
    EXPECT_EQ(parity::calls_of(*trace, 0)["all_gather"], reshard.keeps_everything() ? kUnits : 2 * kUnits);
  }
}

TEST(Between, a_row_whose_kept_part_cannot_be_gathered_is_refused) {
  Strategy row = strategy("row_sr_t_sr_s");
  row.name = "kept_terms";
  row.between = add_partial(replicated(), "dp_shard");
  expect_error([&] { register_strategy(row); }, {"kept_terms", "unshard before the backward"});
}
