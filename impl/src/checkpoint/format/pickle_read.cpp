#include <algorithm>

#include "checkpoint/format/pickle_bytes.h"
#include "checkpoint/format/pickle_node.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {
namespace {

using Kind = Value::Kind;
using Node = Value::Node;
using Items = Value::Items;
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
  void count_one() { require(++made_ <= limits_.nodes_max, "holds too many values"); }
  template <class Made, class... Args>
  std::shared_ptr<Made> make(Args&&... args) {
    count_one();
    return std::make_shared<Made>(std::forward<Args>(args)...);
  }
  void push(NodePtr node) { stack_.push_back(std::move(node)); }
  void push_shared(NodePtr node) {
    count_one();
    push(std::move(node));
  }
  void push_text(Kind kind, std::string_view text) { push(make<TextNode>(kind, std::string(text))); }
  void push_number(int64_t bits, Kind kind = Kind::kInt) { push_shared(number_node(kind, bits)); }

  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  NodePtr pop() {
    require(stack_.size() > floor(), "takes from an empty stack");
    NodePtr node = std::move(stack_.back());
    stack_.pop_back();
    return node;
  }
  // Where the last so many values of the stack begin, or those above the last mark, which goes.
  size_t last(size_t count) const {
    require(stack_.size() >= floor() + count, "takes from an empty stack");
    return stack_.size() - count;
  }
  size_t pop_mark() {
    require(!marks_.empty(), "has no mark to go back to");
    const size_t from = marks_.back();
    marks_.pop_back();
    return from;
  }
  // The value below those from `from` on, which is to change.
  Node& below(size_t from, Kind kind, std::string_view otherwise) {
    require(from > floor(), "takes from an empty stack");
    Node& node = *stack_[from - 1];
    require(node.kind == kind, otherwise);
    require(!node.sealed, "changes a value that is already part of another");
    return node;
  }

  Value seal(NodePtr node) {
    if (!node->sealed) node->sealed = true;  // nothing writes to nodes that are shared by all pickles
    return Value(std::move(node));
  }
  void grow(Node& node, const Value& child) {
    node.depth = std::max(node.depth, child.node().depth + 1);
    node.nodes += child.node().nodes;  // both are at most nodes_max
    require(node.depth <= limits_.depth_max, "is nested too deeply");
    require(node.nodes <= limits_.nodes_max, "holds too many values");
  }
  Value adopt(Node& parent, NodePtr child) {
    require(child.get() != &parent, "puts a value into itself");
    Value value = seal(std::move(child));
    grow(parent, value);
    return value;
  }
  // Takes the values from `from` on off the stack and appends them.
  void append(Node& parent, Items& items, size_t from) {
    if (items.empty()) items.reserve(stack_.size() - from);
    for (size_t i = from; i < stack_.size(); ++i) items.push_back(adopt(parent, std::move(stack_[i])));
    stack_.resize(from);
    require(!parent.sealed, "puts a value into itself");
  }
  void push_tuple(size_t from) {
    auto tuple = make<ItemsNode>(Kind::kTuple);
    append(*tuple, tuple->items, from);
    push(std::move(tuple));
  }
  void append_items(size_t from) {
    auto& list = static_cast<ItemsNode&>(below(from, Kind::kList, "appends to what is no list"));
    append(list, list.items, from);
  }
  void set_items(size_t from) {
    constexpr std::string_view kWrong = "sets items of what is no dict";
    auto& dict = static_cast<PairsNode&>(below(from, Kind::kDict, kWrong));
    require((stack_.size() - from) % 2 == 0, kWrong);
    if (dict.pairs.empty()) dict.pairs.reserve((stack_.size() - from) / 2);
    for (size_t i = from; i < stack_.size(); i += 2) {
      Value key = adopt(dict, std::move(stack_[i]));
      dict.pairs.emplace_back(std::move(key), adopt(dict, std::move(stack_[i + 1])));
    }
    stack_.resize(from);
    require(!dict.sealed, "puts a value into itself");
  }

  void push_global(const std::string& module, const std::string& name) {
    const std::string whole = module + "." + name;
    if (!allowed_.contains(whole))
      throw Error(message("[pickle] {}: refuses the global '{}' at byte {}; it is none of those that checkpoints need", name_,
                          whole.substr(0, 200), opcode_at_));
    push(make<TextNode>(Kind::kGlobal, whole, module.size()));
  }
  void construct(bool instance) {
    const NodePtr args = pop();
    NodePtr callable = pop();
    require(callable->kind == Kind::kGlobal && args->kind == Kind::kTuple, "calls what is no global");
    auto type = std::static_pointer_cast<const TextNode>(std::move(callable));
    Items& given = static_cast<ItemsNode&>(*args).items;
    if (type->text == "collections.OrderedDict" && given.empty()) return push(make<PairsNode>(Kind::kDict));
    if (type->text == "_codecs.encode") return push_text(Kind::kBytes, latin1(given));
    auto object = make<ObjectNode>(std::move(type));
    object->instance = instance;
    for (const Value& arg : given) grow(*object, arg);
    if (args.use_count() == 1)
      object->items = std::move(given);
    else
      object->items = given;
    push(std::move(object));
  }
  // How protocol 2 writes bytes: as the characters of the same numbers.
  std::string latin1(const std::vector<Value>& args) const {
    require(args.size() == 2 && args[0].kind() == Kind::kString && args[1].str() == "'latin1'", "encodes what is not latin1");
    const std::string& text = args[0].as_string("encoded bytes");
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
    NodePtr state = pop();
    require(stack_.size() > floor(), "takes from an empty stack");
    const Kind kind = stack_.back()->kind;
    Node& node = below(stack_.size(), kind == Kind::kDict ? kind : Kind::kObject, "gives a state to what is no object");
    if (kind == Kind::kDict) return;  // attributes of an OrderedDict, such as _metadata
    auto& object = static_cast<ObjectNode&>(node);
    require(!object.state.pointer(), "gives a state twice");
    object.state = adopt(object, std::move(state));
    require(!object.sealed, "puts a value into itself");
  }
  void push_persistent() {
    NodePtr id = pop();
    auto object = make<ObjectNode>(persistent_type());
    object->items.push_back(adopt(*object, std::move(id)));
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
    push_number(static_cast<int64_t>(value));
  }
  void push_real() {
    uint64_t bits = 0;
    for (const char byte : take(8)) bits = bits << 8 | static_cast<unsigned char>(byte);
    push_number(static_cast<int64_t>(bits), Kind::kFloat);
  }

  bool step() {
    opcode_at_ = at_;
    const char opcode = take(1)[0];
    if (opcode == '.') return false;
    push_plain(opcode);
    return true;
  }

  // push_plain, collect and structure are asked in this order; structure fails by what none of them knows.
  void push_plain(char opcode) {
    switch (opcode) {
      case 'N':
        return push_shared(none_node());
      case '\x88':
        return push_number(1, Kind::kBool);
      case '\x89':
        return push_number(0, Kind::kBool);
      case 'J':
        return push_number(static_cast<int32_t>(number(4)));
      case 'K':
        return push_number(static_cast<int64_t>(number(1)));
      case 'M':
        return push_number(static_cast<int64_t>(number(2)));
      case '\x8a':
        return push_long(number(1));
      case '\x8b':
        return push_long(number(4));
      case 'G':
        return push_real();
      case '\x8c':
        return push_text(Kind::kString, take(number(1)));
      case 'X':
        return push_text(Kind::kString, take(number(4)));
      case '\x8d':
        return push_text(Kind::kString, take(number(8)));
      case 'C':
        return push_text(Kind::kBytes, take(number(1)));
      case 'B':
        return push_text(Kind::kBytes, take(number(4)));
      case '\x8e':
        return push_text(Kind::kBytes, take(number(8)));
      case ']':
        return push(make<ItemsNode>(Kind::kList));
      case '}':
        return push(make<PairsNode>(Kind::kDict));
      case ')':
        return push_shared(empty_tuple_node());
      default:
        return collect(opcode);
    }
  }

  void collect(char opcode) {
    switch (opcode) {
      case '(':
        return marks_.push_back(stack_.size());
      case 't':
        return push_tuple(pop_mark());
      case '\x85':
        return push_tuple(last(1));
      case '\x86':
        return push_tuple(last(2));
      case '\x87':
        return push_tuple(last(3));
      case 'a':
        return append_items(last(1));
      case 'e':
        return append_items(pop_mark());
      case 's':
        return set_items(last(2));
      case 'u':
        return set_items(pop_mark());
      default:
        return structure(opcode);
    }
  }

  void structure(char opcode) {
    switch (opcode) {
      case '\x80': {
        const uint64_t protocol = number(1);
        return require(protocol >= 2 && protocol <= 5, fmt::format("has pickle protocol {}; 2 to 5 are read", protocol));
      }
      case '\x95':
        return require(number(8) <= bytes_.size() - at_, "is cut off");
      case 'c': {
        const std::string module = line(), name = line();
        return push_global(module, name);
      }
      case '\x93': {
        const NodePtr name = pop(), module = pop();
        require(name->kind == Kind::kString && module->kind == Kind::kString, "names a global by what is no string");
        return push_global(static_cast<TextNode&>(*module).text, static_cast<TextNode&>(*name).text);
      }
      case 'R':
        return construct(false);
      case '\x81':
        return construct(true);
      case 'b':
        return build();
      case 'Q':
        return push_persistent();
      case 'q':
        return put(number(1));
      case 'r':
        return put(number(4));
      case '\x94':
        return put(memo_.size());
      case 'h':
        return get(number(1));
      case 'j':
        return get(number(4));
      case '0':
        pop();
        return;
      default:
        fail(fmt::format("has the opcode {:#04x}, which checkpoints do not use", static_cast<unsigned char>(opcode)));
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
