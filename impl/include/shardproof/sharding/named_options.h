// The options of fully_shard that a number or a word says, by name. Cases of `verify`, command lines and Python set them
// through this table, and docs/options.md lists it. A new option is a member of ShardOptions and a row here.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "shardproof/sharding/shard_options.h"

namespace shardproof {

struct NamedOption {
  enum class Kind { flag, whole, number, word };  // what its values are; a flag is 0 or 1

  std::string name;  // of the member of ShardOptions
  Kind kind = Kind::whole;
  std::string about;                    // in a sentence or two
  std::vector<std::string> words = {};  // what the values 0, 1, ... are called, where they are words
  double least = 0;                     // of numbers
  // Values that random cases have instead of the default, and how often they have one; none: no case has another.
  std::vector<double> drawn = {};
  double often = 0.15;
  std::function<double(const ShardOptions&)> get = {};
  // Throws Error for what is no value of this option. What only fully_shard can know, it refuses itself.
  std::function<void(ShardOptions&, double)> set = {};

  double standard() const { return get(ShardOptions()); }
  // "2", "pooled", "true"
  std::string text(double value) const;
  // The value that a text says; numbers of bytes may have a unit, as in 64MiB. Throws Error.
  double value(const std::string& text) const;
};

const std::vector<NamedOption>& named_options();
// Throws Error where there is none; it says which are alike.
const NamedOption& named_option(const std::string& name);
// Each text is "name=value".
void set_options(ShardOptions& options, const std::vector<std::string>& texts);

}  // namespace shardproof
