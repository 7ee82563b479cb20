// Products of cut layers in pieces of the batch: what they compute, and what runs beside what.
#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>

#include <functional>
#include <optional>
#include <string>

#include "properties/kit/autocast.h"
#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_models.h"
#include "properties/kit/parallel_pieces.h"
#include "shardproof/shardproof.h"

using namespace shardproof;
using pieces::integers;
using pieces::piece_of;

namespace {

// A column-parallel layer and a row-parallel one behind it, on a rank of `tp`.
struct Pair {
  at::Tensor x, w, b, v;
  at::Tensor y;

  Pair(const at::Tensor& whole, std::optional<int64_t> sequence_dim, int64_t overlap_pieces, Comm& comm) {
    const auto own = [&](const at::Tensor& tensor, std::optional<int64_t> dim) {
      const at::Tensor part = dim ? piece_of(tensor, *dim, comm.size(), comm.rank()) : tensor;
      return part.clone(at::MemoryFormat::Contiguous).set_requires_grad(true);
    };
    x = own(whole, sequence_dim), w = own(integers({4, 3}, 2), 0), b = own(integers({4}, 3), 0),
    v = own(integers({6, 4}, 4), 1);
    std::optional<SequenceSplit> split;
    if (sequence_dim) split = {*sequence_dim, whole.size(*sequence_dim)};
    const at::Tensor hidden = column_parallel_linear(x, w, b, comm, split, overlap_pieces);
    y = row_parallel_linear(hidden, v, {}, comm, sequence_dim, overlap_pieces);
  }
};

struct Sizes {
  std::vector<int64_t> x;
  std::optional<int64_t> sequence_dim;
};

}  // namespace

// Batches that the pieces divide and do not, and that are shorter than their number. Sequences that the ranks do not divide.
TEST(OverlapPieces, layers_in_pieces_compute_what_they_compute_whole) {
  const std::vector<Sizes> all = {{{5, 3}, {}},   {{5, 7, 3}, {}}, {{1, 7, 3}, 1}, {{2, 6, 3}, 1},    {{5, 7, 3}, 1},
                                  {{7, 5, 3}, 0}, {{6, 1, 3}, 0},  {{7, 3}, 0},    {{2, 3, 7, 3}, 2}, {{2, 7, 3, 3}, -3}};
  for (const Sizes& sizes : all) {
    std::optional<int64_t> dim = sizes.sequence_dim;
    if (dim && *dim < 0) *dim += std::ssize(sizes.x);
    const at::Tensor x = integers(sizes.x, 1);
    std::vector<int64_t> out = sizes.x;
    out.back() = 6;
    const at::Tensor dy = integers(out, 5);
    std::optional<Pair> plain;
    run_threads(1, [&](std::shared_ptr<Comm> comm) { plain.emplace(x, std::nullopt, 1, *comm); });
    plain->y.backward(dy);
    for (const int64_t tp : {2, 3})
      for (const int64_t overlap_pieces : {1, 2, 3, 7})
        run_threads(tp, [&](std::shared_ptr<Comm> comm) {
          const std::string where = fmt::format("{} pieces of {} on {} ranks", overlap_pieces, fmt::join(sizes.x, "x"), tp);
          const auto own = [&](const at::Tensor& whole, std::optional<int64_t> along) {
            return along ? piece_of(whole, *along, tp, comm->rank()) : whole;
          };
          const Pair cut(x, dim, overlap_pieces, *comm);
          EXPECT_TRUE(at::equal(cut.y, own(plain->y, dim))) << where;
          cut.y.backward(own(dy, dim));
          EXPECT_TRUE(at::equal(cut.x.grad(), own(plain->x.grad(), dim))) << where;
          EXPECT_TRUE(at::equal(cut.w.grad(), own(plain->w.grad(), 0))) << where;
          EXPECT_TRUE(at::equal(cut.b.grad(), own(plain->b.grad(), 0))) << where;
          EXPECT_TRUE(at::equal(cut.v.grad(), own(plain->v.grad(), 1))) << where;
        });
  }
}

namespace {

struct Canonical {
  at::Tensor y, dx;
  std::vector<at::Tensor> gradients;
};

Canonical canonical(Comm& comm, std::optional<int64_t> sequence_dim, int64_t overlap_pieces) {
  const auto numbers = [](std::vector<int64_t> sizes, double salt) {
    return at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble) * salt).view(sizes);
  };
  Linear first(torch::nn::LinearOptions(9, 12)), second(torch::nn::LinearOptions(12, 5).bias(false));
  torch::nn::Sequential model(first, second);
  model->to(at::kDouble);
  {
    const at::NoGradGuard no_grad;
    double salt = 0.7;
    for (at::Tensor& p : model->parameters()) p.copy_(numbers(p.sizes().vec(), salt += 0.9));
  }
  use_canonical_arithmetic(*model);
  const auto own = [&](const at::Tensor& whole) {
    return sequence_dim ? piece_of(whole, *sequence_dim, comm.size(), comm.rank()) : whole;
  };
  const auto comms = std::make_shared<MeshComm>(comm.shared(), Mesh({{"tp", comm.size()}}));
  const TensorParallel parallel = parallelize(model.ptr(), comms,
                                              {.styles = {{"0", ColumnParallel{}}, {"1", RowParallel{}}},
                                               .sequence_dim = sequence_dim,
                                               .overlap_pieces = overlap_pieces});
  const at::Tensor x = own(numbers({5, 6, 9}, 1.3)).clone().set_requires_grad(true);
  Canonical result;
  result.y = call(model, x);
  result.y.backward(own(numbers({5, 6, 5}, 2.1)));
  result.dx = x.grad();
  for (const at::Tensor& p : model->parameters()) result.gradients.push_back(p.grad());
  return result;
}

}  // namespace

TEST(OverlapPieces, canonical_layers_have_the_same_bits_in_any_number_of_pieces) {
  std::optional<Canonical> whole;
  run_threads(1, [&](std::shared_ptr<Comm> comm) { whole = canonical(*comm, {}, 1); });
  for (const auto dim : {std::optional<int64_t>(), std::optional<int64_t>(1)})
    for (const int64_t tp : {1, 2, 3})
      for (const int64_t overlap_pieces : {1, 2, 3, 4, 9})
        run_threads(tp, [&](std::shared_ptr<Comm> comm) {
          const auto own = [&](const at::Tensor& tensor, std::optional<int64_t> along) {
            return along ? piece_of(tensor, *along, tp, comm->rank()).contiguous() : tensor;
          };
          const std::string where = fmt::format("{} pieces on {} ranks", overlap_pieces, tp);
          const Canonical cut = canonical(*comm, dim, overlap_pieces);
          EXPECT_TRUE(kit::same_bits(cut.y, own(whole->y, dim))) << where;
          EXPECT_TRUE(kit::same_bits(cut.dx, own(whole->dx, dim))) << where;
          for (size_t i = 0; i < cut.gradients.size(); ++i)
            EXPECT_TRUE(kit::same_bits(cut.gradients[i], own(whole->gradients[i], i == 2 ? 1 : 0))) << where << " " << i;
        });
}

TEST(OverlapPieces, models_in_pieces_train_like_plain) {
  const std::vector<parallel_models::MeshSetting> settings = {
      {.tp = 2, .overlap_pieces = 2},
      {.tp = 3, .sequence_parallel = true, .strategy = "ddp", .overlap_pieces = 3},
      {.dp = 2, .tp = 2, .sequence_parallel = true, .overlap_pieces = 2},
      {.cp = 2, .tp = 2, .sequence_parallel = true, .recompute = true, .overlap_pieces = 2}};
  for (const auto& make : {parallel_models::gpt(true), parallel_models::llama(false, 1)})
    parallel_models::expect_equal_on_meshes(make, settings, {8, 7});
}

namespace {

// What a rank of a group of two starts, waits for and multiplies, in that order, and the memory of its last collective.
class Watching final : public Comm {
 public:
  Watching() {
    seen().clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& fn) {
      const auto op = fn.operator_name();
      if (op && (op->name == "aten::mm" || op->name == "aten::addmm")) seen().push_back("product");
      return std::unique_ptr<at::ObserverContext>();
    }));
  }
  ~Watching() override { at::removeCallback(handle_); }

  int64_t rank() const override { return 0; }
  int64_t size() const override { return 2; }
  const std::string& name() const override { return name_; }
  std::shared_ptr<Comm> split(int64_t, int64_t, std::string) override { return nullptr; }

  std::string since() {
    const std::string text = fmt::format("{}", fmt::join(seen(), " "));
    seen().clear();
    return text;
  }
  const void *input = nullptr, *output = nullptr;

 private:
  struct State final : Work::State {
    void wait() override { seen().push_back("wait"); }
  };
  static std::vector<std::string>& seen() {
    static thread_local std::vector<std::string> events;
    return events;
  }
  Work start(Call call) override {
    seen().push_back("start");
    if (call.input.defined()) input = call.input.const_data_ptr();
    output = call.output.const_data_ptr();
    return Work(std::make_shared<State>());
  }

  std::string name_ = "watching";
  at::CallbackHandle handle_ = 0;
};

}  // namespace

TEST(OverlapPieces, a_piece_is_gathered_or_summed_while_the_one_beside_it_is_multiplied) {
  const auto comm = std::make_shared<Watching>();
  const auto leaf = [](std::vector<int64_t> sizes) { return at::ones(sizes).set_requires_grad(true); };
  const std::string gathers = "start wait start product wait start product wait product";
  const std::string sums = "product start product start wait product start wait";

  const at::Tensor hidden =
      column_parallel_linear(leaf({3, 4, 5}), leaf({2, 5}), {}, *comm, SequenceSplit{.dim = 1, .length = 8}, 3);
  EXPECT_EQ(comm->since(), gathers);
  hidden.backward(at::ones_like(hidden));
  EXPECT_EQ(comm->since(), sums + " product wait") << "the last sum runs beside the gradient of the weight";

  const at::Tensor y = row_parallel_linear(leaf({3, 8, 2}), leaf({5, 2}), {}, *comm, 1, 3);
  EXPECT_EQ(comm->since(), sums + " wait");
  y.backward(at::ones_like(y));
  EXPECT_EQ(comm->since(), gathers + " product");

  const at::Tensor whole = row_parallel_linear(leaf({3, 8, 2}), leaf({5, 2}), {}, *comm, {}, 3);
  EXPECT_EQ(comm->since(), sums + " wait") << "without sequence parallelism";
}

TEST(OverlapPieces, a_collective_reads_and_writes_memory_in_place_where_it_lies_in_order) {
  const auto comm = std::make_shared<Watching>();
  const auto uses = [&](const at::Tensor& input, const at::Tensor& output) {
    return comm->input == input.const_data_ptr() && comm->output == output.const_data_ptr();
  };
  const at::Tensor one = at::ones({1, 4, 3}), all_of_one = at::ones({1, 8, 3});
  collective::start_all_gather(one, 1, 8, *comm, all_of_one).result();
  EXPECT_TRUE(uses(one, all_of_one));
  collective::start_reduce_scatter(all_of_one, 1, *comm, {}, one).result();
  EXPECT_TRUE(uses(all_of_one, one));
  collective::start_all_reduce(one, *comm, {}, one).result();
  EXPECT_EQ(comm->output, one.const_data_ptr());

  // Of several samples, what one rank has is in order, and what all have is not.
  const at::Tensor some = at::ones({2, 4, 3}), all_of_some = at::ones({2, 8, 3});
  collective::start_all_gather(some, 1, 8, *comm, all_of_some).result();
  EXPECT_EQ(comm->input, some.const_data_ptr());
  collective::start_reduce_scatter(all_of_some, 1, *comm, {}, some).result();
  EXPECT_EQ(comm->output, some.const_data_ptr());
}

// What a node of the graph returns may be changed in place, unless it is a view.
TEST(OverlapPieces, a_gathered_tensor_can_be_changed_in_place) {
  for (const int64_t length : {8, 7})
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      const at::Tensor own = piece_of(at::ones({1, length, 3}), 1, 2, comm->rank()).clone().set_requires_grad(true);
      at::Tensor whole = collective::all_gather(own, 1, length, *comm);
      whole.mul_(2).sum().backward();
      EXPECT_TRUE(at::equal(own.grad(), at::full_like(own, 4)));
      at::Tensor scattered = collective::reduce_scatter(at::ones({1, length, 3}).set_requires_grad(true), 1, *comm);
      EXPECT_NO_THROW(scattered.mul_(2).sum().backward());
    });
}

TEST(OverlapPieces, layers_under_autocast_compute_what_plain_ones_do) {
  // Sums of so small numbers are exact in bfloat16.
  const at::Tensor x = integers({3, 4, 3}, 1).clamp(-1, 1), dy = integers({3, 4, 6}, 5).clamp(-1, 1).to(at::kBFloat16);
  std::optional<Pair> plain;
  run_threads(1, [&](std::shared_ptr<Comm> comm) {
    const kit::Autocast on;
    plain.emplace(x, std::nullopt, 1, *comm);
  });
  plain->y.backward(dy);
  EXPECT_EQ(plain->y.scalar_type(), at::kBFloat16);
  for (const int64_t overlap_pieces : {1, 2})
    run_threads(2, [&](std::shared_ptr<Comm> comm) {
      std::optional<Pair> cut;
      {
        const kit::Autocast on;
        cut.emplace(x, std::nullopt, overlap_pieces, *comm);
      }
      EXPECT_TRUE(at::equal(cut->y, plain->y));
      cut->y.backward(dy);
      EXPECT_TRUE(at::equal(cut->x.grad(), plain->x.grad()));
      EXPECT_TRUE(at::equal(cut->w.grad(), piece_of(plain->w.grad(), 0, 2, comm->rank())));
    });
}

TEST(OverlapPieces, fewer_than_one_are_refused) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}}));
    const at::Tensor x = at::ones({2, 4}), weight = at::ones({3, 4});
    for (const int64_t given : {0, -1}) {
      const std::string says = fmt::format("overlap_pieces={}", given);
      expect_error(
          [&] {
            const auto parallel = parallelize(torch::nn::Linear(4, 6).ptr(), comms,
                                              {.styles = {{"", ColumnParallel{}}}, .overlap_pieces = given});
          },
          {"[tensor_parallel]", says, "at least 1"});
      expect_error([&] { column_parallel_linear(x, weight, {}, *comm, {}, given); }, {"[tensor_parallel]", says});
      expect_error([&] { row_parallel_linear(x, weight, {}, *comm, {}, given); }, {"[tensor_parallel]", says});
    }
  });
}
