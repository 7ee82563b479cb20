#include "shardproof/sharding/named_options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <map>

#include "shardproof/base/check.h"
#include "shardproof/base/nearest.h"

namespace shardproof {
namespace {

using Kind = NamedOption::Kind;

// With a `set` that refuses what is no value. Whether a number is large enough is for fully_shard, which says it on all ranks.
NamedOption checked(NamedOption option) {
  option.set = [option, set = option.set](ShardOptions& options, double value) {
    const bool is_word = option.kind == Kind::word, is_flag = option.kind == Kind::flag;
    const double most = is_word ? static_cast<double>(option.words.size() - 1) : 1;
    SHARD_REQUIRE(!(is_word || is_flag) || (value >= 0 && value <= most), "fully_shard", "{} must be {}, got {:g}", option.name,
                  is_flag ? "0 or 1" : fmt::format("one of {}", fmt::join(option.words, ", ")), value);
    SHARD_REQUIRE(option.kind == Kind::number || value == std::floor(value), "fully_shard",
                  "{} must be a whole number, got {:g}", option.name, value);
    set(options, value);
  };
  return option;
}

// A row for a member, whose type says what its values are.
class Row {
 public:
  template <class Value>
  Row(const char* name, Value ShardOptions::*member, const char* about) : option_{.name = name, .about = about} {
    if constexpr (std::is_same_v<Value, bool>) option_.kind = Kind::flag;
    if constexpr (std::is_same_v<Value, double>) option_.kind = Kind::number;
    if constexpr (std::is_enum_v<Value>) option_.kind = Kind::word;
    option_.get = [member](const ShardOptions& options) { return static_cast<double>(options.*member); };
    // A number that 64 bits do not hold is as good as the largest.
    option_.set = [member](ShardOptions& options, double value) {
      if constexpr (std::is_same_v<Value, int64_t>)
        options.*member = value >= 0x1p63 ? std::numeric_limits<int64_t>::max() : static_cast<int64_t>(value);
      else
        options.*member = static_cast<Value>(value);
    };
  }
  Row&& words(std::vector<std::string> words) && { return option_.words = std::move(words), std::move(*this); }
  Row&& least(double least) && { return option_.least = least, std::move(*this); }
  Row&& drawn(std::vector<double> values, double often = 0.15) && {
    option_.drawn = std::move(values);
    option_.often = often;
    return std::move(*this);
  }
  operator NamedOption() const { return checked(option_); }

 private:
  NamedOption option_;
};

std::vector<NamedOption> all_options() {
  using O = ShardOptions;
  return {
      Row("bucket_bytes_max", &O::bucket_bytes_max,
          "A unit's parameters go into several buckets of at most so many bytes. 0: into one.")
          .drawn({64, 256, 1000, 4096}, 0.2),
      Row("bucket_count", &O::bucket_count, "A unit's parameters go into so many buckets. 0: into one.").drawn({2, 3}, 0.1),
      Row("alignment_bytes", &O::alignment_bytes, "Every parameter starts at a multiple of this in its bucket: a power of two.")
          .least(64)
          .drawn({64, 128}, 0.7),
      Row("bucket_multiple", &O::bucket_multiple,
          "The number of elements of every bucket is a multiple of this. Megatron-LM pads to 65,536 for the bandwidth of NCCL.")
          .least(1)
          .drawn({3, 64, 1000, 4096}),
      Row("granularity", &O::granularity,
          "Where shards are cut: anywhere; nowhere, so that a parameter lies whole on one rank, as Muon needs it; or between "
          "rows "
          "of each parameter, as FSDP2 cuts.")
          .words({"element", "tensor", "row"})
          .drawn({1, 2, 2}, 0.2),
      Row("shard_dim", &O::shard_dim,
          "Along which dim granularity row cuts: 1 is between columns. Parameters of fewer dims are cut along their last one.")
          .drawn({1, 1, 2}, 0.5),
      Row("granule", &O::granule,
          "Granularity element cuts each parameter only at multiples of so many elements, so that blocks of them stay whole.")
          .least(1)
          .drawn({2, 3, 5, 32, 32, 64, 100}, 0.2),
      Row("keep_whole_numel_max", &O::keep_whole_numel_max,
          "Parameters of at most so many elements stay whole on every rank, where the strategy shards parameters.")
          .drawn({1, 8, 40, 300}),
      Row("reshard_after_backward", &O::reshard_after_backward, "Whether parameters are freed after the backward.")
          .drawn({0}, 0.2),
      Row("buffers", &O::buffers, "Whether memory of gathered parameters goes back to the allocator, or to a pool.")
          .words({"freed", "pooled"})
          .drawn({1}, 0.2),
      Row("gather", &O::gather,
          "Whether a gather copies, or ranks look into memory that they share (threads, MPI on one host).")
          .words({"copied", "side_by_side"})
          .drawn({1}),
      Row("offload", &O::offload, "Whether the optimizer's memory is the host's.")
          .words({"none", "pinned", "pageable"})
          .drawn({1, 1, 2}, 0.25),
      Row("publish", &O::publish,
          "Whether the optimizer's step waits until updated parameters have arrived everywhere, or whoever uses them first "
          "does. The model's own parameters cannot be read in between.")
          .words({"in_step", "at_first_use"})
          .drawn({1}, 0.3),
      Row("prefetch_forward", &O::prefetch_forward, "How many units ahead are gathered in a forward.").drawn({1, 2, 3}, 0.5),
      Row("prefetch_backward", &O::prefetch_backward, "How many units ahead are gathered in a backward.").drawn({1, 2, 3}, 0.5),
      Row("bytes_in_flight_max", &O::bytes_in_flight_max,
          "No gather ahead and no further reduction starts while more bytes than this are in flight. 0: gathers have no limit, "
          "and reductions that of two of the largest buckets.")
          .drawn({1, 700, 5000}),
      Row("delayed_gradient_bytes_max", &O::delayed_gradient_bytes_max,
          "Gradients of weights are made when the next unit's gather has started, and so many bytes are kept for it. 0: they "
          "are made at once.")
          .drawn({200, 1e9, 1e9}, 0.3),
      Row("numerics", &O::numerics, "How sums are taken. Ordered sums are taken in rank order.")
          .words({"ordered", "canonical", "fast"}),
      Row("gradient_divide", &O::gradient_divide,
          "The summed gradient is divided by this. 0: by the number of ranks, which averages the ranks' losses."),
      Row("divide", &O::divide, "Where the division happens.").words({"after", "before", "split", "in_collective"}),
      Row("divide_by_tokens", &O::divide_by_tokens,
          "Divide by the tokens that all ranks reported with add_tokens instead. For losses that are sums."),
      Row("reduce_replicas_every_microbatch", &O::reduce_replicas_every_microbatch,
          "Sum over dp_replicate after every microbatch instead of once after the last.")
          .drawn({1}),
      Row("check_gradients", &O::check_gradients,
          "Whether a NaN or an infinity in a gradient is an error that names rank, step and parameter."),
      Row("gradient_magnitude_max", &O::gradient_magnitude_max,
          "A larger magnitude in a gradient is such an error, too. It is above 0."),
      Row("broadcast_initial_values", &O::broadcast_initial_values, "Whether rank 0's values become everybody's."),
  };
}

// 1, 1024, ... of "KiB", ...; 0 of what is no unit.
double unit_of(const std::string& text) {
  static const std::map<std::string, double> units = {{"", 1}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}};
  const auto found = units.find(text);
  return found == units.end() ? 0 : found->second;
}

}  // namespace

std::string NamedOption::text(double value) const {
  if (kind == Kind::word) return words.at(static_cast<size_t>(value));
  if (kind == Kind::flag) return value != 0 ? "true" : "false";
  return kind == Kind::whole ? fmt::format("{:.0f}", value) : fmt::format("{}", value);
}

double NamedOption::value(const std::string& text) const {
  if (kind == Kind::word || kind == Kind::flag) {
    const std::vector<std::string> known = kind == Kind::word ? words : std::vector<std::string>{"false", "true"};
    const auto found = std::ranges::find(known, text);
    SHARD_REQUIRE(found != known.end(), "fully_shard", "{} must be one of {}, got '{}'", name, fmt::join(known, ", "), text);
    return static_cast<double>(found - known.begin());
  }
  double number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  const bool has_bytes = name.find("bytes") != std::string::npos;
  const double unit = has_bytes || rest == end ? unit_of({rest, end}) : 0;
  SHARD_REQUIRE(error == std::errc() && unit > 0, "fully_shard", "{} must be a number{}, got '{}'", name,
                has_bytes ? ", as 4096 or 64MiB" : "", text);
  SHARD_REQUIRE(number * unit >= least, "fully_shard", "{} must be at least {:g}, got {}", name, least, text);
  return number * unit;
}

const std::vector<NamedOption>& named_options() {
  static const std::vector<NamedOption> all = all_options();
  return all;
}

const NamedOption& named_option(const std::string& name) {
  std::vector<std::string> names;
  for (const NamedOption& option : named_options()) {
    if (option.name == name) return option;
    names.push_back(option.name);
  }
  throw Error(message("[fully_shard] there is no option '{}'.{}", name, did_you_mean(name, names)));
}

void set_options(ShardOptions& options, const std::vector<std::string>& texts) {
  for (const std::string& text : texts) {
    const size_t equals = text.find('=');
    SHARD_REQUIRE(equals != std::string::npos, "fully_shard", "an option is written name=value, got '{}'", text);
    const NamedOption& option = named_option(text.substr(0, equals));
    option.set(options, option.value(text.substr(equals + 1)));
  }
}

}  // namespace shardproof
