#include <algorithm>
#include <bit>
#include <limits>
#include <optional>

#include "checkpoint/format/pickle_bytes.h"
#include "checkpoint/format/pickle_node.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {
namespace {

using Kind = Value::Kind;
using Node = Value::Node;
using NodePtr = std::shared_ptr<Node>;

// A pickle machine whose only effect is a tree. A node that has a parent is sealed, for good: so no cycle can come about, and
// its depth and size are final.
class Machine : private PickleBytes {
 public:
  Machine(std::string_view bytes, const AllowedGlobals& allowed, const std::string& name, const PickleLimits& limits)
      : PickleBytes(bytes, name), allowed_(allowed), limits_(limits) {}

  Value run(size_t* consumed) {
    require(bytes_.size() <= limits_.bytes_max, "is longer than allowed");
    while (step()) {
    }
    require(stack_.size() == 1 && marks_.empty(), "ends with something left on its stack");
    require(consumed || at_ == bytes_.size(), "is followed by other bytes");
    if (consumed) *consumed = at_;
    return seal(stack_.back());
  }

 private:
  NodePtr make(Kind kind) {
    require(++made_ <= limits_.nodes_max, "holds too many values");
    auto node = std::make_shared<Node>();
    node->kind = kind;
    return node;
  }
  void push(NodePtr node) { stack_.push_back(std::move(node)); }
  void push_text(Kind kind, std::string_view text) {
    NodePtr node = make(kind);
    node->text = text;
    push(std::move(node));
  }
  void push_int(int64_t value, Kind kind = Kind::kInt) {
    NodePtr node = make(kind);
    node->integer = value;
    push(std::move(node));
  }

  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  NodePtr pop() {
    require(stack_.size() > floor(), "takes from an empty stack");
    NodePtr node = std::move(stack_.back());
    stack_.pop_back();
    return node;
  }
  Node& top() {
    require(stack_.size() > floor(), "takes from an empty stack");
    Node& node = *stack_.back();
    require(!node.sealed, "changes a value that is already part of another");
    return node;
  }
  std::vector<NodePtr> pop_mark() {
    require(!marks_.empty(), "has no mark to go back to");
    const auto from = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<NodePtr> nodes(std::make_move_iterator(from), std::make_move_iterator(stack_.end()));
    stack_.erase(from, stack_.end());
    marks_.pop_back();
    return nodes;
  }

  Value seal(const NodePtr& node) {
    node->sealed = true;
    return Value(node);
  }
  void grow(Node& node, const Value& child) {
    node.depth = std::max(node.depth, child.node().depth + 1);
    node.nodes += child.node().nodes;  // both are at most nodes_max
    require(node.depth <= limits_.depth_max, "is nested too deeply");
    require(node.nodes <= limits_.nodes_max, "holds too many values");
  }
  Value adopt(Node& parent, const NodePtr& child) {
    require(child.get() != &parent, "puts a value into itself");
    Value value = seal(child);
    grow(parent, value);
    return value;
  }
  void append(Node& to, const std::vector<NodePtr>& nodes) {
    for (const NodePtr& node : nodes) {
      to.items.push_back(adopt(to, node));
      require(!to.sealed, "puts a value into itself");
    }
  }
  void push_tuple(const std::vector<NodePtr>& nodes) {
    NodePtr tuple = make(Kind::kTuple);
    append(*tuple, nodes);
    push(std::move(tuple));
  }
  void push_top_tuple(size_t count) {
    std::vector<NodePtr> nodes(count);
    for (size_t i = count; i-- > 0;) nodes[i] = pop();
    push_tuple(nodes);
  }
  void set_items(Node& dict, const std::vector<NodePtr>& nodes) {
    require(dict.kind == Kind::kDict && nodes.size() % 2 == 0, "sets items of what is no dict");
    for (size_t i = 0; i < nodes.size(); i += 2) {
      Value key = adopt(dict, nodes[i]);
      dict.pairs.emplace_back(std::move(key), adopt(dict, nodes[i + 1]));
    }
    require(!dict.sealed, "puts a value into itself");
  }
  void append_items(Node& list, const std::vector<NodePtr>& nodes) {
    require(list.kind == Kind::kList, "appends to what is no list");
    append(list, nodes);
  }

  void push_global(const std::string& module, const std::string& name) {
    const std::string whole = module + "." + name;
    if (!allowed_.contains(whole))
      throw Error(message("[pickle] {}: refuses the global '{}' at byte {}; it is none of those that checkpoints need", name_,
                          whole.substr(0, 200), opcode_at_));
    NodePtr node = make(Kind::kGlobal);
    node->text = whole;
    node->module_chars = module.size();
    push(std::move(node));
  }
  void construct(bool instance) {
    const NodePtr args = pop(), callable = pop();
    require(callable->kind == Kind::kGlobal && args->kind == Kind::kTuple, "calls what is no global");
    if (callable->text == "collections.OrderedDict" && args->items.empty()) return push(make(Kind::kDict));
    if (callable->text == "_codecs.encode") return push_text(Kind::kBytes, latin1(args->items));
    NodePtr object = make(Kind::kObject);
    object->text = callable->text;
    object->module_chars = callable->module_chars;
    object->instance = instance;
    for (const Value& arg : args->items) {
      object->items.push_back(arg);
      grow(*object, arg);
    }
    push(std::move(object));
  }
  // How protocol 2 writes bytes: as the characters of the same numbers.
  std::string latin1(const std::vector<Value>& args) const {
    require(args.size() == 2 && args[0].kind() == Kind::kString && args[1].str() == "'latin1'", "encodes what is not latin1");
    const std::string& text = args[0].node().text;
    std::string bytes;
    for (size_t i = 0; i < text.size(); ++i) {
      const auto byte = static_cast<unsigned char>(text[i]);
      if (byte < 0x80) {
        bytes.push_back(text[i]);
        continue;
      }
      require((byte == 0xC2 || byte == 0xC3) && i + 1 < text.size(), "encodes what is not latin1");
      bytes.push_back(static_cast<char>((byte & 3) << 6 | (static_cast<unsigned char>(text[++i]) & 0x3F)));
    }
    return bytes;
  }
  void build() {
    const NodePtr state = pop();
    Node& object = top();
    if (object.kind == Kind::kDict) return;  // attributes of an OrderedDict, such as _metadata
    require(object.kind == Kind::kObject, "gives a state to what is no object");
    require(!object.state.pointer(), "gives a state twice");
    object.state = adopt(object, state);
    require(!object.sealed, "puts a value into itself");
  }
  void push_persistent() {
    const NodePtr id = pop();
    NodePtr object = make(Kind::kObject);
    object->text = kPersistentId;
    object->items.push_back(adopt(*object, id));
    push(std::move(object));
  }

  void put(uint64_t index) {
    // Picklers count memo entries up from 0, so a gap means damage and would cost memory.
    require(index <= memo_.size(), "leaves a gap in its memo");
    require(stack_.size() > floor(), "takes from an empty stack");
    if (index == memo_.size()) memo_.emplace_back();
    memo_[index] = stack_.back();
  }
  void get(uint64_t index) {
    require(index < memo_.size() && memo_[index], "asks its memo for what is not there");
    push(memo_[index]);
  }

  void push_long(uint64_t bytes) {
    require(bytes <= 8, "holds an integer of more than 64 bits");
    uint64_t value = number(bytes);
    if (bytes > 0 && bytes < 8 && value >> (8 * bytes - 1)) value |= ~uint64_t{0} << (8 * bytes);
    push_int(static_cast<int64_t>(value));
  }
  void push_real() {
    uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
    NodePtr node = make(Kind::kFloat);
    node->real = std::bit_cast<double>(bits);
    push(std::move(node));
  }

  bool step() {
    opcode_at_ = at_;
    const char opcode = take(1)[0];
    if (opcode == '.') return false;
    if (!push_plain(opcode) && !collect(opcode) && !structure(opcode))
      fail(fmt::format("has the opcode {:#04x}, which checkpoints do not use", static_cast<unsigned char>(opcode)));
    return true;
  }

  bool push_plain(char opcode) {
    switch (opcode) {
      case 'N':
        push(make(Kind::kNone));
        return true;
      case '\x88':
        push_int(1, Kind::kBool);
        return true;
      case '\x89':
        push_int(0, Kind::kBool);
        return true;
      case 'J':
        push_int(static_cast<int32_t>(number(4)));
        return true;
      case 'K':
        push_int(static_cast<int64_t>(number(1)));
        return true;
      case 'M':
        push_int(static_cast<int64_t>(number(2)));
        return true;
      case '\x8a':
        push_long(number(1));
        return true;
      case '\x8b':
        push_long(number(4));
        return true;
      case 'G':
        push_real();
        return true;
      case '\x8c':
        push_text(Kind::kString, take(number(1)));
        return true;
      case 'X':
        push_text(Kind::kString, take(number(4)));
        return true;
      case '\x8d':
        push_text(Kind::kString, take(number(8)));
        return true;
      case 'C':
        push_text(Kind::kBytes, take(number(1)));
        return true;
      case 'B':
        push_text(Kind::kBytes, take(number(4)));
        return true;
      case '\x8e':
        push_text(Kind::kBytes, take(number(8)));
        return true;
      case ']':
        push(make(Kind::kList));
        return true;
      case '}':
        push(make(Kind::kDict));
        return true;
      case ')':
        push(make(Kind::kTuple));
        return true;
      default:
        return false;
    }
  }

  bool collect(char opcode) {
    switch (opcode) {
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case 't':
        push_tuple(pop_mark());
        return true;
      case '\x85':
        push_top_tuple(1);
        return true;
      case '\x86':
        push_top_tuple(2);
        return true;
      case '\x87':
        push_top_tuple(3);
        return true;
      case 'a': {
        const NodePtr item = pop();
        append_items(top(), {item});
        return true;
      }
      case 'e': {
        const auto items = pop_mark();
        append_items(top(), items);
        return true;
      }
      case 's': {
        const NodePtr value = pop(), key = pop();
        set_items(top(), {key, value});
        return true;
      }
      case 'u': {
        const auto items = pop_mark();
        set_items(top(), items);
        return true;
      }
      default:
        return false;
    }
  }

  bool structure(char opcode) {
    switch (opcode) {
      case '\x80': {
        const uint64_t protocol = number(1);
        require(protocol >= 2 && protocol <= 5, fmt::format("has pickle protocol {}; 2 to 5 are read", protocol));
        return true;
      }
      case '\x95':
        require(number(8) <= bytes_.size() - at_, "is cut off");
        return true;
      case 'c': {
        const std::string module = line(), name = line();
        push_global(module, name);
        return true;
      }
      case '\x93': {
        const NodePtr name = pop(), module = pop();
        require(name->kind == Kind::kString && module->kind == Kind::kString, "names a global by what is no string");
        push_global(module->text, name->text);
        return true;
      }
      case 'R':
        construct(false);
        return true;
      case '\x81':
        construct(true);
        return true;
      case 'b':
        build();
        return true;
      case 'Q':
        push_persistent();
        return true;
      case 'q':
        put(number(1));
        return true;
      case 'r':
        put(number(4));
        return true;
      case '\x94':
        put(memo_.size());
        return true;
      case 'h':
        get(number(1));
        return true;
      case 'j':
        get(number(4));
        return true;
      case '0':
        pop();
        return true;
      default:
        return false;
    }
  }

  const AllowedGlobals& allowed_;
  const PickleLimits& limits_;
  std::vector<NodePtr> stack_;
  std::vector<size_t> marks_;
  std::vector<NodePtr> memo_;
  int64_t made_ = 0;
};

}  // namespace

Value read_pickle(std::string_view bytes, const AllowedGlobals& allowed, const std::string& name, const PickleLimits& limits,
                  size_t* consumed) {
  return Machine(bytes, allowed, name, limits).run(consumed);
}

}  // namespace shardproof::checkpoint
