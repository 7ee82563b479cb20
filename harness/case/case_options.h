// What a case chooses about sharding, as a table: an option that is a row here is printed, parsed, drawn, shrunk and counted.
// Rows are the options of fully_shard by name (shardproof/sharding/named_options.h), and what the golden run or the harness
// has to know of besides.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/sharding/named_options.h"

namespace harness {

enum Units : int64_t { units_root, units_block, units_leaf, units_some, units_listed };
enum Loss : int64_t { loss_mean, loss_sum, loss_tokens };
enum Dividing : int64_t { divide_after, divide_before, divide_split, divide_collective };
enum Dtype : int64_t { fp32, bf16, fp16 };
enum Passes : int64_t { passes_apart, passes_in_order, passes_reversed, passes_alternating, passes_split };
enum Schedule : int64_t { schedule_constant, schedule_cosine, schedule_linear };

// The defaults of those of named_options() that random cases draw, and 0 for the others, which no case has.
std::vector<int64_t> standard_sharding();

struct CaseOptions {
  int64_t units = units_block;    // which modules are units besides the root; listed: named one by one, two a unit
  int64_t reshard = 1;            // after forward: 1 yes, 0 no, n: within n ranks
  int64_t recompute = 0;          // 1: every unit, 2: some
  int64_t meta = 0;               // built without memory
  // Losses are means over each rank's samples and gradients the mean over ranks; or losses are shares of one global mean and
  // gradients their sum; or losses are sums, divided by the number of tokens of the step.
  int64_t loss = loss_mean;
  int64_t divide = divide_after;
  int64_t compute = fp32, gradient = fp32, reduce = fp32;
  int64_t float32_sums = 0;
  int64_t loss_scale = 0;          // 0: none; else its first value
  int64_t scale_min = 0;           // below which it does not fall; 0: the library's default
  int64_t arithmetic = 0;          // 1: canonical inside of the model, too
  int64_t sequence_parallel = 0;   // between parallel blocks activations are split along the sequence
  int64_t overlap_pieces = 1;      // of the products of layers that are cut over tp
  int64_t context_attention = 0;   // in a ring, gathered or by heads: a number of shardproof::ContextAttention
  int64_t context_contiguous = 0;  // and cuts sequences into one run a rank; else it balances a causal mask's work
  int64_t schedule = schedule_constant;  // of the learning rate over the steps of the history
  int64_t unchecked = 0;           // loads read without a check before
  // Chosen units have a strategy of their own (0: none, else a row of the table), or see the ranks of dp_shard along two axes.
  int64_t unit_strategy = 0;
  int64_t unit_mesh = 0;
  int64_t ep = 1;                  // so many ranks share the experts of a layer; fewer where the mesh has not as many
  int64_t etp = 0;                 // ranks along tp hold slices of experts
  int64_t strided = 0;             // the model's input, and the gradient of its output, are dense and not contiguous
  int64_t fingerprint = 0;         // ranks compare fingerprints after each step
  // Whether forwards of a step's microbatches come before their backwards; alternating: two are open at a time (1F1B); split:
  // a backward for the input follows each forward, and those for the weights come behind them all.
  int64_t passes = passes_apart;
  int64_t within = 0;              // within units are recomputed 1: cores of attention, 2: some modules
  int64_t activations = 0;         // lie in the host's memory between forward and backward 1: of every unit, 2: of some
  // Adapters of low rank beside linear layers, which alone are trained. 0: none, else their rank.
  int64_t lora = 0;
  int64_t lora_alpha = 0;          // 0: twice the rank
  int64_t lora_layers = 0;         // 0: beside all linear layers, else beside those that this number chooses
  int64_t lora_dropout = 0;        // in percent
  int64_t dims = 0;                // with granularity=row each parameter is cut along a dim that the seed chooses
  // Parameters have granules of their own: 1: rows, 2: all of the parameter, 3: what the seed chooses for each.
  int64_t granules = 0;
  int64_t ema = 0;                 // averages of parameters are kept, with a decay of so many percent; 0: none
  std::vector<int64_t> sharding = standard_sharding();  // the values of named_options()

  // Of an option of fully_shard that cases have. They throw Error where there is none of this name, or no such value.
  int64_t of(const std::string& name) const;
  bool has(const std::string& name, const std::string& value) const;
  void set(const std::string& name, const std::string& value);
  bool operator==(const CaseOptions&) const = default;
};

struct OptionRow {
  std::string key;
  int64_t CaseOptions::*member;     // null: an option of fully_shard
  std::vector<std::string> names;   // of the values 0, 1, ...; empty: the value is a number
  std::vector<int64_t> others;      // values that the generator draws instead of the default
  double probability;               // of one of those
  int64_t simplest;                 // where the least happens: what shrinking tries
  bool draws_apart = false;         // from numbers of its own, so that cases are what they were before there was this option
  size_t number = 0;                // among named_options()

  int64_t of(const CaseOptions& options) const { return member ? options.*member : options.sharding.at(number); }
  int64_t& of(CaseOptions& options) const { return member ? options.*member : options.sharding.at(number); }
};

// In the order of the text.
const std::vector<OptionRow>& option_rows();

// Gives fully_shard the options that are its own.
void apply(const CaseOptions& options, shardproof::ShardOptions& to);

// A value as text: its name, or the number.
std::string value_text(const OptionRow& row, int64_t value);

}  // namespace harness
