#include "shardproof/comm/checked.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>

#include "comm/owning_tensor.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/decorated.h"

namespace shardproof {
namespace {

// What must agree: fixed fields, then for all_to_all what goes to and comes from each rank.
enum Field : size_t { kOp, kSequence, kDtype, kNumel, kReduce, kFactor, kFinish, kPeer, kFields };
using Signature = std::vector<int64_t>;

class Checked final : public DecoratedComm {
 public:
  explicit Checked(std::shared_ptr<Comm> inner) : DecoratedComm(std::move(inner)) {}

  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    compare({.op = Op::split, .output = {}, .input = {}});
    return DecoratedComm::split(color, key, std::move(name));
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    return Comm::split_ranks(ranks, std::move(name));  // which calls `split` of this class, so the calls are compared
  }

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { return checked(std::move(group)); }

  Work start(Call call) override {
    if (call.op != Op::send && call.op != Op::recv) compare(call);
    return inner().issue(std::move(call));
  }

  size_t length() const { return kFields + 2 * static_cast<size_t>(size()); }

  Signature sign(const Call& call) {
    Signature signature(length(), 0);
    signature[kOp] = static_cast<int64_t>(call.op);
    signature[kSequence] = sequence_++;
    signature[kDtype] = static_cast<int64_t>(dtype(call));
    signature[kNumel] = numel(call);
    signature[kReduce] = static_cast<int64_t>(call.reduce);
    signature[kFactor] = std::bit_cast<int64_t>(call.factor);
    signature[kFinish] = std::bit_cast<int64_t>(call.finish.factor);
    signature[kPeer] = call.peer;
    std::copy(call.input_sizes.begin(), call.input_sizes.end(), signature.begin() + kFields);
    std::copy(call.output_sizes.begin(), call.output_sizes.end(), signature.begin() + kFields + size());
    return signature;
  }

  void compare(const Call& call) {
    const auto count = static_cast<int64_t>(length());
    const at::Tensor own = owning_tensor(sign(call)),
                     table = owning_tensor(Signature(static_cast<size_t>(size()) * length()));
    inner().all_gather(table, own).wait();
    // Every rank looks at the same table, so every rank throws the same message.
    const auto* all = table.const_data_ptr<int64_t>();
    const auto of = [&](int64_t rank) { return Signature(all + rank * count, all + (rank + 1) * count); };
    for (int64_t other = 1; other < size(); ++other)
      for (int64_t earlier = 0; earlier < other; ++earlier)
        if (!agree(of(earlier), earlier, of(other), other)) complain(of(earlier), earlier, of(other), other);
  }

  bool agree(const Signature& a, int64_t rank_a, const Signature& b, int64_t rank_b) const {
    if (!std::equal(a.begin(), a.begin() + kFields, b.begin())) return false;
    const auto sends = [&](const Signature& s, int64_t to) { return s[kFields + static_cast<size_t>(to)]; };
    const auto receives = [&](const Signature& s, int64_t from) { return s[kFields + static_cast<size_t>(size() + from)]; };
    return sends(a, rank_b) == receives(b, rank_a) && sends(b, rank_a) == receives(a, rank_b);
  }

  static std::string times(int64_t bits, const char* when = "") {
    const auto factor = std::bit_cast<double>(bits);
    return factor == 1 ? "" : fmt::format(" {}times {}", when, factor);
  }

  std::string str(const Signature& s) const {
    const auto op = static_cast<Op>(s[kOp]);
    std::string text =
        fmt::format("{}({} x {}", to_string(op), c10::toString(static_cast<at::ScalarType>(s[kDtype])), s[kNumel]);
    if (op == Op::reduce_scatter || op == Op::all_reduce)
      text +=
          fmt::format(", {}{}{}", to_string(static_cast<Reduce>(s[kReduce])), times(s[kFactor]), times(s[kFinish], "then "));
    if (op == Op::broadcast) text += fmt::format(", root {}", s[kPeer]);
    if (op == Op::all_to_all)
      text += fmt::format(", sends {}, receives {}", fmt::join(s.begin() + kFields, s.begin() + kFields + size(), "+"),
                          fmt::join(s.begin() + kFields + size(), s.end(), "+"));
    return text + fmt::format(") as call {}", s[kSequence]);
  }

  [[noreturn]] void complain(const Signature& a, int64_t rank_a, const Signature& b, int64_t rank_b) const {
    throw Error(
        fmt::format("[checked] ranks {} and {} of '{}' disagree: rank {} calls {}, rank {} calls {}. All ranks of a "
                    "group must make the same calls in the same order",
                    rank_a, rank_b, name(), rank_a, str(a), rank_b, str(b)));
  }

  int64_t sequence_ = 0;
};

}  // namespace

std::shared_ptr<Comm> checked(std::shared_ptr<Comm> inner) {
  return std::make_shared<Checked>(std::move(inner));
}

}  // namespace shardproof
