// What a Value points to. Each kind has a struct that holds no more than it needs, because a large checkpoint's description
// has tens of millions of values.
#pragma once

#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {

struct Value::Node {
  explicit Node(Kind what, bool is_final = false) : kind(what), sealed(is_final) {}
  Kind kind;
  bool sealed;  // while reading: has a parent, so it cannot change any more
  // Of the finished tree below.
  int32_t depth = 1;
  int64_t nodes = 1;
};

struct NumberNode : Value::Node {  // bools, ints and floats
  NumberNode(Value::Kind what, int64_t value, bool is_final = false) : Node(what, is_final), bits(value) {}
  int64_t bits;  // of a float: those of the double
};

struct TextNode : Value::Node {  // strings, bytes and globals
  TextNode(Value::Kind what, std::string value, size_t module_chars_of_global = 0)
      : Node(what), text(std::move(value)), module_chars(module_chars_of_global) {}
  std::string text;  // "module.name" of a global
  size_t module_chars;
};

struct ItemsNode : Value::Node {  // lists and tuples
  using Node::Node;
  Value::Items items;
};

struct PairsNode : Value::Node {  // dicts
  using Node::Node;
  Value::Pairs pairs;
};

struct ObjectNode : Value::Node {
  explicit ObjectNode(std::shared_ptr<const TextNode> what) : Node(Value::Kind::kObject), type(std::move(what)) {}
  std::shared_ptr<const TextNode> type;  // the global, which all objects of a type share in what was read
  bool instance = false;                 // made by NEWOBJ rather than REDUCE
  Value::Items items;                    // the arguments
  Value state{nullptr};                  // null pointer: none
};

// The node as that of its kind.
template <class Kind>
const Kind& as(const Value::Node& node) {
  return static_cast<const Kind&>(node);
}

// Values that occur often exist once, for all pickles and threads. They are sealed, so nothing writes to them.
std::shared_ptr<Value::Node> none_node();
std::shared_ptr<Value::Node> empty_tuple_node();
std::shared_ptr<Value::Node> number_node(Value::Kind kind, int64_t bits);  // a new one for larger numbers

inline constexpr std::string_view kPersistentId = "persistent id";
const std::shared_ptr<const TextNode>& persistent_type();

}  // namespace shardproof::checkpoint
