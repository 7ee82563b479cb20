// One model fills another one on other ranks: the same bits, without a whole parameter on any rank.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>
#include <map>
#include <numeric>
#include <optional>
#include <random>

#include "properties/kit/bits.h"
#include "properties/kit/drawn_sharding.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/nn/state_buffers.h"
#include "shardproof/optim/ema.h"
#include "shardproof/sharding/transfer.h"

using namespace shardproof;
using Values = std::map<std::string, at::Tensor>;

namespace {

// Ranks of the world that are those of a mesh, in the order of the mesh.
using Seats = std::vector<int64_t>;

Seats drawn_seats(int64_t ranks, int64_t world) {
  Seats all(static_cast<size_t>(world));
  std::iota(all.begin(), all.end(), 0);
  std::shuffle(all.begin(), all.end(), std::mt19937(*rc::gen::arbitrary<uint32_t>()));
  all.resize(static_cast<size_t>(ranks));
  return all;
}

// A table that is no state, beside a buffer that is.
struct TableImpl : torch::nn::Module, HasTransientBuffers {
  TableImpl() {
    register_buffer("table", at::zeros({3}));
    register_buffer("count", at::zeros({}, at::kLong));
  }
  bool is_transient(const std::string& buffer) const override { return buffer == "table"; }
};

struct DrawnBuffers {
  std::vector<std::pair<Shape, at::ScalarType>> buffers;

  void add_to(torch::nn::Module& module) const {
    for (size_t i = 0; i < buffers.size(); ++i)
      module.register_buffer(fmt::format("buffer{}", i), at::zeros(buffers[i].first, buffers[i].second));
    module.register_module("inner", std::make_shared<TableImpl>());
  }
};

DrawnBuffers drawn_buffers() {
  DrawnBuffers drawn;
  for (int64_t i = *rc::gen::inRange<int64_t>(1, 4); i > 0; --i) {
    Shape shape(*rc::gen::inRange<size_t>(0, 4));
    for (int64_t& size : shape) size = *rc::gen::inRange<int64_t>(0, 5);
    drawn.buffers.emplace_back(
        shape, *rc::gen::element(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte, at::kBool));
  }
  return drawn;
}

// A function of the buffer's name and of a number.
at::Tensor values_of(const std::string& name, const at::Tensor& like, int64_t number) {
  const auto first = static_cast<int64_t>(std::hash<std::string>()(name) % 7);
  const at::Tensor all = (at::arange(like.numel(), at::kLong) * 3 + first + number).remainder(5) - 1;
  return all.clamp_min(0).to(like.scalar_type()).view(like.sizes());
}

void fill_buffers(const torch::nn::Module& module, int64_t number) {
  for (const auto& buffer : module.named_buffers()) buffer.value().copy_(values_of(buffer.key(), buffer.value(), number));
}

// A model on those seats; nothing on other ranks.
struct Seated {
  Seated(Comm& world, const kit::DrawnSharding& d, const Seats& seats, double fill, const DrawnBuffers& buffers = {}) {
    const auto number = std::find(seats.begin(), seats.end(), world.rank()) - seats.begin();
    const bool is_there = number < std::ssize(seats);
    const std::shared_ptr<Comm> own = world.split(is_there ? 0 : -1, number, "seated");
    if (!is_there) return;
    comms = std::make_shared<MeshComm>(own, d.mesh);
    model = d.make();
    {
      const at::NoGradGuard no_grad;
      for (const at::Tensor& parameter : model.module->parameters()) parameter.add_(fill);
    }
    buffers.add_to(*model.module);
    parallel = d.cut(model, comms);
    ShardOptions options = d.options();
    options.initialize = {};
    sharded.emplace(fully_shard(model.module, comms, options));
  }
  Sharded* get() { return sharded ? &*sharded : nullptr; }
  std::vector<at::Tensor> held() const {
    std::vector<at::Tensor> all;
    if (sharded)
      for (const auto& pieces : {sharded->main_parameters(), sharded->parameters()})
        for (const Piece& piece : pieces) all.push_back(piece.data.clone());
    return all;
  }
  std::shared_ptr<MeshComm> comms;
  kit::DrawnModel model;
  std::optional<TensorParallel> parallel;
  std::optional<Sharded> sharded;
};

void expect_same(const std::vector<at::Tensor>& found, const std::vector<at::Tensor>& wanted, const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size()) << where;
  for (size_t i = 0; i < found.size(); ++i) EXPECT_TRUE(kit::same_bits(found[i], wanted[i])) << where << ": piece " << i;
}

// A linear layer on all ranks of the world, cut by rows.
Sharded sharded_linear(torch::nn::Linear& linear, const std::shared_ptr<Comm>& world, const char* row = "zero3",
                       uint64_t seed = 7) {
  initialize_parameters(*linear, seed, 0.3);
  return fully_shard(linear.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", world->size()}})), toy::options(row));
}

}  // namespace

// What arrives is what one rank would fill in by whole values, and on the way back nothing is lost.
RC_GTEST_PROP(Transfer, there_and_back_changes_no_bit_on_any_two_meshes, ()) {
  const kit::DrawnSharding d = kit::drawn_sharding(), e = kit::drawn_elsewhere(d);
  const int64_t ranks = std::max(d.mesh.size(), e.mesh.size()) + *rc::gen::inRange<int64_t>(0, 3);
  const Seats from = drawn_seats(d.mesh.size(), ranks), to = drawn_seats(e.mesh.size(), ranks);
  const TransferOptions options{.bytes_at_once = *rc::gen::element<int64_t>(1, 100, 1 << 20)};
  const std::string where = d.str() + " -> " + e.str();
  Values given, got;
  run_threads(ranks, [&](std::shared_ptr<Comm> world) {
    Seated one(*world, d, from, 0), other(*world, e, to, 0.25), back(*world, d, from, 0.5);
    const std::vector<at::Tensor> before = one.held();
    transfer(*world, one.get(), other.get(), options);
    expect_same(one.held(), before, where + ": the source");
    if (one.get())
      if (Values whole = one.sharded->gather_main_parameters(); one.comms->rank() == 0) given = std::move(whole);
    if (other.get())
      if (Values whole = other.sharded->gather_main_parameters(); other.comms->rank() == 0) got = std::move(whole);
    transfer(*world, other.get(), back.get(), options);
    expect_same(back.held(), before, where + " and back");
  });
  for (const auto& [name, value] : given)
    if (const auto found = got.find(name); found == got.end() || !kit::same_bits(found->second, value))
      RC_FAIL(where + ": " + name);
  if (::testing::Test::HasFailure()) RC_FAIL(where);
}

// Ranks of the source may have different ones, as running means of data-parallel ranks do. Those of rank 0 count, as when a
// model is sharded.
RC_GTEST_PROP(Transfer, every_rank_gets_the_buffers_of_rank_0_of_the_source, ()) {
  const kit::DrawnSharding d = kit::drawn_sharding(), e = kit::drawn_elsewhere(d);
  const int64_t ranks = std::max(d.mesh.size(), e.mesh.size()) + *rc::gen::inRange<int64_t>(0, 3);
  const Seats from = drawn_seats(d.mesh.size(), ranks), to = drawn_seats(e.mesh.size(), ranks);
  const TransferOptions options{.bytes_at_once = *rc::gen::element<int64_t>(1, 10, 1 << 20)};
  const DrawnBuffers drawn = drawn_buffers();
  const std::string where = d.str() + " -> " + e.str();
  run_threads(ranks, [&](std::shared_ptr<Comm> world) {
    Seated one(*world, d, from, 0, drawn), other(*world, e, to, 0.25, drawn);
    constexpr int64_t kOfTarget = 90;
    if (one.get()) fill_buffers(*one.model.module, one.comms->rank());
    if (other.get()) fill_buffers(*other.model.module, kOfTarget);
    transfer(*world, one.get(), other.get(), options);
    const auto expect = [&](const Seated& model, const std::string& side, int64_t state, int64_t transient) {
      if (!model.sharded) return;
      for (const auto& buffer : model.model.module->named_buffers()) {
        const int64_t number = buffer.key() == "inner.table" ? transient : state;
        EXPECT_TRUE(kit::same_bits(buffer.value(), values_of(buffer.key(), buffer.value(), number)))
            << where << ": " << buffer.key() << " of the " << side << ", rank " << model.comms->rank();
      }
    };
    if (one.get()) expect(one, "source", one.comms->rank(), one.comms->rank());
    expect(other, "target", 0, kOfTarget);
  });
  if (::testing::Test::HasFailure()) RC_FAIL(where);
}

TEST(Transfer, holds_no_more_than_it_says_besides_both_models) {
  const int64_t at_once = 4096;
  std::atomic<int64_t> largest = 0;
  run_threads(4, [&](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(64, 256), other(64, 256);
    const Sharded from = sharded_linear(linear, world);
    const auto mesh = std::make_shared<MeshComm>(world, Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}));
    initialize_parameters(*other, 3, 0.3);
    Sharded to = fully_shard(other.ptr(), mesh, toy::options("hsdp"));
    to.reset_peak_memory();
    transfer(*world, &from, &to, {.bytes_at_once = at_once});
    const int64_t peak = to.memory().peak(MemoryKind::communication);
    EXPECT_LE(peak, 2 * at_once);
    EXPECT_EQ(to.memory().peak(MemoryKind::gathered), 0) << "a whole parameter was gathered";
    largest = std::max<int64_t>(largest, peak);
  });
  EXPECT_GT(largest, at_once / 2) << "nothing was counted";
}

TEST(Transfer, rounds_to_the_dtype_of_the_model_that_is_filled) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(5, 3), other(5, 3);
    const at::Tensor mean = linear->register_buffer("mean", at::full({}, 1.0 / 3));
    other->register_buffer("mean", at::zeros({}));
    other->to(at::kBFloat16);
    const Sharded from = sharded_linear(linear, world);
    Sharded to = fully_shard(other.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", 2}})), toy::options("ddp"));
    transfer(*world, &from, &to);
    EXPECT_TRUE(kit::same_bits(other->named_buffers()["mean"], mean.to(at::kBFloat16)));
    const Values given = from.gather_main_parameters();
    for (const auto& [name, value] : to.gather_parameters())
      EXPECT_TRUE(kit::same_bits(value, given.at(name).to(at::kBFloat16))) << name;
  });
}

TEST(Transfer, takes_averages_that_stand_in_for_the_parameters) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(5, 3), other(5, 3);
    Sharded from = sharded_linear(linear, world), to = sharded_linear(other, world, "ddp", 9);
    Ema ema(from);
    from.write_parameters({{"bias", at::ones({3})}});
    ema.with_averages([&] { transfer(*world, &from, &to); });
    EXPECT_TRUE(kit::same_bits(to.gather_main_parameter("bias"), ema.gather("bias")));
    EXPECT_FALSE(kit::same_bits(to.gather_main_parameter("bias"), from.gather_main_parameter("bias")));
  });
}

// Every rank of the world throws the same, and nothing is written.
TEST(Transfer, between_models_that_differ_is_refused_on_every_rank) {
  run_threads(3, [](std::shared_ptr<Comm> world) {
    const std::shared_ptr<Comm> two = world->split(world->rank() < 2 ? 0 : -1, 0, "two");
    torch::nn::Linear linear(5, 3), other(5, 4), third(torch::nn::LinearOptions(5, 3).bias(false));
    std::optional<Sharded> from, wider, without;
    if (two) {
      from.emplace(sharded_linear(linear, two));
      wider.emplace(sharded_linear(other, two));
      without.emplace(sharded_linear(third, two));
    }
    const auto get = [](std::optional<Sharded>& model) { return model ? &*model : nullptr; };
    expect_error([&] { transfer(*world, get(from), get(wider)); },
                 {"weight has shape [3,5] in the model to transfer from and [4,5] in the other"});
    expect_error([&] { transfer(*world, get(from), get(without)); }, {"the model to transfer to has no parameter 'bias'"});
    expect_error([&] { transfer(*world, get(without), get(from)); }, {"the model to transfer from has no parameter 'bias'"});
    std::optional<Sharded> counting, longer;
    torch::nn::Linear fourth(5, 3), fifth(5, 3);
    fourth->register_buffer("count", at::zeros({2}));
    fifth->register_buffer("count", at::zeros({3}));
    if (two) {
      counting.emplace(sharded_linear(fourth, two));
      longer.emplace(sharded_linear(fifth, two));
    }
    expect_error([&] { transfer(*world, get(counting), get(from)); },
                 {"the model to transfer to has no buffer or plain parameter 'count'"});
    expect_error([&] { transfer(*world, get(from), get(counting)); },
                 {"the model to transfer from has no buffer or plain parameter 'count'"});
    expect_error([&] { transfer(*world, get(counting), get(longer)); },
                 {"buffer or plain parameter count has shape [2] in the model to transfer from and [3] in the other"});
    expect_error([&] { transfer(*world, nullptr, get(from)); }, {"no rank of 'world' has a model to transfer from"});
    expect_error([&] { transfer(*world, world->rank() == 0 ? get(from) : nullptr, get(from)); },
                 {"rank 1 of the 2 that have the model to transfer from is not in 'world'"});
    expect_error([&] { transfer(*world, get(from), get(wider), {.bytes_at_once = 0}); }, {"bytes_at_once must be above 0"});
    if (two)
      for (const auto& [name, value] : wider->gather_main_parameters()) EXPECT_EQ(value.size(0), 4) << name;
  });
}
