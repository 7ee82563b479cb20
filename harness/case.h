// A case: one experiment as a value that prints, parses, shrinks and replays on one line.
//
//   gpt(layers=2,hidden=24,heads=3,vocab=37,positions=7,tied) mesh(dp_shard=4) zero3(units=block,bucket=4096)
//   adamw(lr=0.01,clip=1) ordered seed=7 : step*2 accumulate(3) step
//
// Model, mesh, strategy with its options, optimizer, mode, seed, and after the colon the history. Data, initial values,
// microbatch sizes and the schedule of ranks follow from the seed.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "golden/golden.h"
#include "shardproof/mesh.h"

namespace harness {

// How the sharded run is compared with the golden one.
enum class Mode {
  exact,    // data whose sums are exact in any order: bit for bit, whatever order the backend adds in
  ordered,  // bit for bit, both told the order of sums
  fast      // backend order and plain norms, within a tolerance derived from a float64 run
};

// Which modules are units besides the root.
enum class Units { root, block, leaf, some };

struct Case {
  golden::Model model;
  shardproof::Mesh mesh;

  std::string strategy = "zero3";
  Units units = Units::block;
  int64_t bucket_bytes_max = 0;    // 0: a bucket a unit
  bool reshard_after_forward = true;
  int64_t alignment_bytes = 512;
  // Losses are means over each rank's samples and gradients the mean over ranks; or losses are shares of one global mean
  // and gradients their sum.
  bool mean_over_ranks = true;

  golden::Optimizer optimizer;
  double clip_norm = 0;  // 0: no clipping
  Mode mode = Mode::ordered;
  uint64_t seed = 0;
  std::vector<int64_t> rounds = {1};  // accumulation rounds of each step

  bool operator==(const Case& other) const { return str() == other.str(); }

  // Law: parse(str()).str() == str().
  std::string str() const;
  // Throws Error that shows the text with a mark under the column, and what was expected there.
  static Case parse(std::string_view text);
};

const char* to_string(Mode mode);
const char* to_string(Units units);

// Reads "gpt(...)" or "mlp(...)" alone.
golden::Model parse_model(std::string_view text);

// Throws Error, naming what does not fit and what would, unless the case can be run.
void validate(const Case& c);
void validate(const golden::Model& model);

}  // namespace harness
