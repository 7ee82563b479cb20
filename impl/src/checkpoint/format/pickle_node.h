// What a Value points to.
#pragma once

#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {

struct Value::Node {
  Kind kind = Kind::kNone;
  bool instance = false;  // made by NEWOBJ rather than REDUCE
  int64_t integer = 0;    // a bool too
  double real = 0;
  std::string text;  // of strings and bytes; "module.name" of globals and objects
  size_t module_chars = 0;
  Items items;  // of lists and tuples; arguments of objects
  Pairs pairs;
  Value state{nullptr};  // null pointer: none
  bool sealed = false;   // while reading: has a parent, so it cannot change any more
  // Of the finished tree below.
  int64_t depth = 1, nodes = 1;
};

inline constexpr std::string_view kPersistentId = "persistent id";

}  // namespace shardproof::checkpoint
