#include <bit>

#include "checkpoint/format/pickle_node.h"
#include "checkpoint/format/pickle_writer.h"
#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {
namespace {

using Kind = Value::Kind;

void write(PickleWriter& out, const Value& value);

void write_global(PickleWriter& out, const TextNode& node) {
  out.global(node.text, node.module_chars);
}

void write_tuple(PickleWriter& out, const Value::Items& items) {
  out.begin_tuple(items.size());
  for (const Value& item : items) write(out, item);
  out.end_tuple(items.size());
}
void write_list(PickleWriter& out, const Value::Items& items) {
  out.begin_list(items.size());
  for (const Value& item : items) write(out, item);
  out.end_list(items.size());
}
void write_dict(PickleWriter& out, const Value::Pairs& pairs) {
  out.begin_dict(pairs.size());
  for (const auto& [key, value] : pairs) {
    write(out, key);
    write(out, value);
  }
  out.end_dict(pairs.size());
}

void write_object(PickleWriter& out, const ObjectNode& node) {
  if (node.type->text == kPersistentId) {
    write(out, node.items.at(0));
    out.as_persistent_id();
    return;
  }
  write_global(out, *node.type);
  write_tuple(out, node.items);
  node.instance ? out.make_object() : out.call();
  if (!node.state.pointer()) return;
  write(out, node.state);
  out.set_state();
}

void write(PickleWriter& out, const Value& value) {
  const Value::Node& node = value.node();
  switch (node.kind) {
    case Kind::kNone:
      return out.none();
    case Kind::kBool:
      return out.boolean(as<NumberNode>(node).bits != 0);
    case Kind::kInt:
      return out.integer(as<NumberNode>(node).bits);
    case Kind::kFloat:
      return out.real(std::bit_cast<double>(as<NumberNode>(node).bits));
    case Kind::kString:
      return out.string(as<TextNode>(node).text);
    case Kind::kBytes:
      return out.bytes(as<TextNode>(node).text);
    case Kind::kList:
      return write_list(out, as<ItemsNode>(node).items);
    case Kind::kTuple:
      return write_tuple(out, as<ItemsNode>(node).items);
    case Kind::kDict:
      return write_dict(out, as<PairsNode>(node).pairs);
    case Kind::kGlobal:
      return write_global(out, as<TextNode>(node));
    case Kind::kObject:
      return write_object(out, as<ObjectNode>(node));
  }
}

}  // namespace

std::string write_pickle(const Value& value, int protocol) {
  PickleWriter out(protocol);
  write(out, value);
  return out.finish();
}

}  // namespace shardproof::checkpoint
