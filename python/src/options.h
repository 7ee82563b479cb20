// The options of fully_shard out of what Python passes by name.
#pragma once

#include <optional>

#include "held.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof::python {

// None, or the attributes main, compute, gradient, reduce, output, cast_inputs and float32_sums.
std::optional<Precision> precision_of(const py::handle& object);
// True, False, or a number of ranks.
Reshard reshard_of(const py::handle& object);
// Throws Error that names an option that there is not, or a value that it cannot have.
ShardOptions options_of(const py::dict& given);

// Of each option that a number or a word says (named_options.h) a tuple of its name, its default, the words that it may be
// (none: it is no word), the values that random cases have, and what it means.
py::list list_of_options();

}  // namespace shardproof::python
