// `redistribute` gives what the definition of the target layout asks for, bit for bit, whichever collective it takes.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <atomic>

#include "properties/doubles/comm_worlds.h"
#include "properties/kit/bits.h"
#include "properties/kit/gen_layout.h"
#include "properties/kit/spec_layout.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/redistribute.h"

using namespace shardproof;

namespace {

// A number for a term of the specification; sums of a few depend on their order.
float value(int64_t term) {
  const auto mixed = static_cast<uint32_t>(term * 2654435761u + 12345u);
  return (static_cast<float>(mixed >> 8) / 8388608.f - 1.f) * static_cast<float>(1 << (mixed % 12));
}

at::Tensor tensor(const spec::Local& local) {
  at::Tensor result = at::zeros(local.shape);
  float* elements = result.mutable_data_ptr<float>();
  for (size_t i = 0; i < local.values.size(); ++i) {
    const spec::Terms& terms = local.values[i];
    for (size_t t = 0; t < terms.size(); ++t) elements[i] = t == 0 ? value(terms[t]) : elements[i] + value(terms[t]);
  }
  return result;
}

std::vector<int64_t> sizes(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  if (layout.flat.empty()) return local_shape(shape, mesh, layout, rank);
  const std::vector<Box> boxes = owned(shape, mesh, layout, rank);
  if (boxes.size() != 1) return {owned_numel(shape, mesh, layout, rank)};
  std::vector<int64_t> result;
  for (const Interval& interval : boxes[0]) result.push_back(interval.size());
  return result;
}

}  // namespace

RC_GTEST_PROP(Redistribute, every_rank_gets_what_the_target_layout_means, ()) {
  const gen::Move move = *gen::move_on_one_mesh();
  const Mesh& mesh = move.from.mesh;
  RC_TAG(std::string(to_string(lower(move.shape, mesh, move.from.layout, move.to.layout).step)));
  const spec::World before = spec::start(move.shape, move.from), after = spec::wanted(move.shape, move.from, move.to);
  ThreadsOptions options;
  options.schedule = ThreadsOptions::Schedule::serial;
  options.completion = ThreadsOptions::Completion::late;
  std::atomic<int64_t> wrong = 0;
  run_threads(
      mesh.size(),
      [&](std::shared_ptr<Comm> comm) {
        MeshComm comms(comm, mesh);
        const int64_t rank = comm->rank();
        const at::Tensor local = tensor(before[rank]).view(sizes(move.shape, mesh, move.from.layout, rank));
        const at::Tensor result = redistribute(local, move.shape, move.from.layout, move.to.layout, comms);
        wrong += !kit::same_bits(result.flatten(), tensor(after[rank]).flatten());
        wrong += result.sizes() != at::IntArrayRef(sizes(move.shape, mesh, move.to.layout, rank));
      },
      options);
  RC_ASSERT(wrong == 0);
}

TEST(Redistribute, every_kind_of_step_is_taken_by_some_move) {
  const Mesh mesh = Mesh::parse("dp_shard=2,tp=3");
  const Layout rows = split_dim(replicated(), 0, {"tp", {}}), columns = split_dim(replicated(), 1, {"tp", {}});
  const Layout terms = add_partial(replicated(), "tp"), flat = split_flat(replicated(), {"dp_shard", {}});
  const std::vector<std::tuple<Layout, Layout, Step>> moves = {
      {rows, rows, Step::none},
      {replicated(), columns, Step::slice},
      {columns, replicated(), Step::all_gather},
      {flat, replicated(), Step::all_gather},
      {terms, replicated(), Step::all_reduce},
      {terms, columns, Step::reduce_scatter},
      {rows, columns, Step::all_to_all},
      {rows, flat, Step::general},
  };
  for (const auto& [from, to, step] : moves)
    for (const Shape& shape : {Shape{6, 12}, Shape{6, 3}, Shape{5, 7}}) {  // equal pieces and unequal ones
      EXPECT_STREQ(to_string(lower(shape, mesh, from, to).step), to_string(step)) << from.str() << " -> " << to.str();
      const spec::World before = spec::start(shape, {mesh, from}), after = spec::wanted(shape, {mesh, from}, {mesh, to});
      run_threads(6, [&, from = from, to = to](std::shared_ptr<Comm> comm) {
        MeshComm comms(comm, mesh);
        const at::Tensor local = tensor(before[comm->rank()]).view(sizes(shape, mesh, from, comm->rank()));
        EXPECT_TRUE(kit::same_bits(redistribute(local, shape, from, to, comms).flatten(),
                                   tensor(after[comm->rank()]).flatten()))
            << from.str() << " -> " << to.str();
      });
    }
}

TEST(Redistribute, a_local_tensor_that_does_not_fit_is_refused) {
  const std::string message = worlds::error_of(2, [](std::shared_ptr<Comm> comm) {
    MeshComm comms(comm, Mesh::parse("dp_shard=2"));
    redistribute(at::ones({3, 4}), {4, 4}, split_dim(replicated(), 0, {"dp_shard", {}}), replicated(), comms);
  });
  EXPECT_NE(message.find("sizes [2,4]"), std::string::npos) << message;
  EXPECT_NE(message.find("got [3,4]"), std::string::npos) << message;
}
