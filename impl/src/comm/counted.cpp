#include "shardproof/comm/counted.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "shardproof/base/check.h"
#include "shardproof/comm/comparing.h"

namespace shardproof {
namespace {

// Nobody is there to disagree.
class Counted final : public Comm, public ComparingComm {
 public:
  Counted(int64_t rank, int64_t size, std::string name) : rank_(rank), size_(size), name_(std::move(name)) {}

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  const std::string& name() const override { return name_; }

  std::shared_ptr<Comm> split(int64_t, int64_t, std::string name) override {
    throw Error(
        fmt::format("[comm] '{}' has one rank that cannot know who else joins group '{}'. Use split_ranks", name_, name));
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    const auto own = std::find(ranks.begin(), ranks.end(), rank_);
    SHARD_REQUIRE(own != ranks.end(), "comm", "rank {} of '{}' is not among the ranks of its group '{}'", rank_, name_, name);
    return std::make_shared<Counted>(own - ranks.begin(), std::ssize(ranks), std::move(name));
  }

 private:
  Work start(Call call) override {
    if (call.output.defined() && call.op != Op::all_reduce) fill(call);
    return Work();
  }

  // The part that a rank gets from itself; zero elsewhere.
  void fill(const Call& call) const {
    at::Tensor output = flat(call.output);
    if (call.op == Op::reduce_scatter) {
      const at::Tensor own = flat(call.input).narrow(0, rank_ * output.numel(), output.numel());
      if (own.const_data_ptr() != output.const_data_ptr()) output.copy_(own);
      return;
    }
    int64_t begin = 0, own_begin = 0, numel = 0;  // in the output, in the input
    if (call.op == Op::all_gather) begin = rank_ * call.input.numel(), numel = call.input.numel();
    if (call.op == Op::all_to_all) {
      for (int64_t r = 0; r < rank_; ++r)
        begin += call.output_sizes[static_cast<size_t>(r)], own_begin += call.input_sizes[static_cast<size_t>(r)];
      numel = std::min(call.output_sizes[static_cast<size_t>(rank_)], call.input_sizes[static_cast<size_t>(rank_)]);
    }
    output.narrow(0, 0, begin).zero_();
    output.narrow(0, begin + numel, output.numel() - begin - numel).zero_();
    if (numel == 0) return;
    at::Tensor place = output.narrow(0, begin, numel);
    const at::Tensor own = flat(call.input).narrow(0, own_begin, numel);
    if (own.const_data_ptr() != place.const_data_ptr()) place.copy_(own);
  }

  static at::Tensor flat(const at::Tensor& tensor) { return tensor.variable_data().view({-1}); }

  int64_t rank_, size_;
  std::string name_;
};

}  // namespace

std::shared_ptr<Comm> counted(int64_t world, int64_t rank) {
  SHARD_REQUIRE(world >= 1 && rank >= 0 && rank < world, "comm", "there is no rank {} in a world of {}", rank, world);
  return std::make_shared<Counted>(rank, world, "world");
}

}  // namespace shardproof
