#include "shardproof/checkpoint/format/pickle.h"

#include <algorithm>
#include <bit>

#include "checkpoint/format/pickle_node.h"
#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

using Kind = Value::Kind;

Value with_text(Kind kind, std::string text) {
  return Value(std::make_shared<TextNode>(kind, std::move(text)));
}

Value with_items(Kind kind, Value::Items items) {
  auto node = std::make_shared<ItemsNode>(kind);
  node->items = std::move(items);
  return Value(std::move(node));
}

std::shared_ptr<TextNode> global_node(const std::string& module, const std::string& name) {
  return std::make_shared<TextNode>(Kind::kGlobal, module + "." + name, module.size());
}

// Points to what lives as long as the program, and counts no owners.
template <class Node>
std::shared_ptr<Value::Node> unowned(Node& node) {
  return {std::shared_ptr<Value::Node>(), &node};
}

std::vector<NumberNode> numbers_below(Kind kind, int64_t end) {
  std::vector<NumberNode> nodes;
  for (int64_t value = 0; value < end; ++value) nodes.emplace_back(kind, value, /*is_final=*/true);
  return nodes;
}

const char* noun(Kind kind) {
  static constexpr const char* kNouns[] = {"None",   "a bool",  "an int", "a float",  "a string", "bytes",
                                           "a list", "a tuple", "a dict", "a global", "an object"};
  return kNouns[static_cast<int>(kind)];
}

[[noreturn]] void wrong_kind(const Value& value, std::string_view what, const char* expected) {
  throw Error(message("[pickle] {} should be {}, got {}: {}", what, expected, noun(value.kind()), value.str(80)));
}

const Value::Items kNoItems;
const std::string kNoName;

}  // namespace

std::shared_ptr<Value::Node> none_node() {
  static Value::Node node(Kind::kNone, /*is_final=*/true);
  return unowned(node);
}

std::shared_ptr<Value::Node> empty_tuple_node() {
  static ItemsNode node(Kind::kTuple, /*is_final=*/true);
  return unowned(node);
}

std::shared_ptr<Value::Node> number_node(Kind kind, int64_t bits) {
  constexpr int64_t kSmall = 256;
  static std::vector<NumberNode> bools = numbers_below(Kind::kBool, 2), ints = numbers_below(Kind::kInt, kSmall);
  if (kind == Kind::kBool) return unowned(bools[bits != 0 ? 1 : 0]);
  if (kind == Kind::kInt && bits >= 0 && bits < kSmall) return unowned(ints[static_cast<size_t>(bits)]);
  return std::make_shared<NumberNode>(kind, bits);
}

const std::shared_ptr<const TextNode>& persistent_type() {
  static const auto type = std::make_shared<const TextNode>(Kind::kGlobal, std::string(kPersistentId));
  return type;
}

Value::Value() : node_(none_node()) {}

Value Value::boolean(bool value) {
  return Value(number_node(Kind::kBool, value));
}
Value Value::integer(int64_t value) {
  return Value(number_node(Kind::kInt, value));
}
Value Value::real(double value) {
  return Value(number_node(Kind::kFloat, std::bit_cast<int64_t>(value)));
}

Value Value::string(std::string value) {
  return with_text(Kind::kString, std::move(value));
}
Value Value::bytes(std::string value) {
  return with_text(Kind::kBytes, std::move(value));
}
Value Value::list(Items items) {
  return with_items(Kind::kList, std::move(items));
}
Value Value::tuple(Items items) {
  return with_items(Kind::kTuple, std::move(items));
}

Value Value::dict(Pairs pairs) {
  auto node = std::make_shared<PairsNode>(Kind::kDict);
  node->pairs = std::move(pairs);
  return Value(std::move(node));
}

Value Value::global(std::string module, std::string name) {
  return Value(global_node(module, name));
}

Value Value::reduced(std::string module, std::string name, Items args) {
  auto node = std::make_shared<ObjectNode>(global_node(module, name));
  node->items = std::move(args);
  return Value(std::move(node));
}

Value Value::instance(std::string module, std::string name, Pairs fields) {
  // Python leaves an empty state out.
  return instance(std::move(module), std::move(name), fields.empty() ? Value(nullptr) : dict(std::move(fields)));
}

Value Value::instance(std::string module, std::string name, Value state) {
  auto node = std::make_shared<ObjectNode>(global_node(module, name));
  node->instance = true;
  node->state = std::move(state);
  return Value(std::move(node));
}

Value Value::persistent(Value id) {
  auto node = std::make_shared<ObjectNode>(persistent_type());
  node->items = {std::move(id)};
  return Value(std::move(node));
}

Value::Kind Value::kind() const {
  return node_->kind;
}

bool Value::as_bool(std::string_view what) const {
  if (kind() != Kind::kBool) wrong_kind(*this, what, "a bool");
  return as<NumberNode>(*node_).bits != 0;
}

int64_t Value::as_int(std::string_view what) const {
  if (kind() != Kind::kInt) wrong_kind(*this, what, "an int");
  return as<NumberNode>(*node_).bits;
}

double Value::as_float(std::string_view what) const {
  if (kind() == Kind::kInt) return static_cast<double>(as<NumberNode>(*node_).bits);
  if (kind() != Kind::kFloat) wrong_kind(*this, what, "a float");
  return std::bit_cast<double>(as<NumberNode>(*node_).bits);
}

const std::string& Value::as_string(std::string_view what) const {
  if (kind() != Kind::kString) wrong_kind(*this, what, "a string");
  return as<TextNode>(*node_).text;
}

const std::string& Value::as_bytes(std::string_view what) const {
  if (kind() != Kind::kBytes) wrong_kind(*this, what, "bytes");
  return as<TextNode>(*node_).text;
}

const Value::Items& Value::as_list(std::string_view what) const {
  if (kind() != Kind::kList && kind() != Kind::kTuple) wrong_kind(*this, what, "a list or a tuple");
  return as<ItemsNode>(*node_).items;
}

const Value::Pairs& Value::as_dict(std::string_view what) const {
  if (kind() != Kind::kDict) wrong_kind(*this, what, "a dict");
  return as<PairsNode>(*node_).pairs;
}

const std::string& Value::as_global(std::string_view what) const {
  if (kind() != Kind::kGlobal) wrong_kind(*this, what, "a global");
  return as<TextNode>(*node_).text;
}

const std::string& Value::type_name() const {
  return kind() == Kind::kObject ? as<ObjectNode>(*node_).type->text : kNoName;
}
const Value::Items& Value::args() const {
  return kind() == Kind::kObject ? as<ObjectNode>(*node_).items : kNoItems;
}

const Value& Value::state() const {
  static const Value none;
  if (kind() != Kind::kObject) return none;
  const Value& given = as<ObjectNode>(*node_).state;
  return given.node_ ? given : none;
}

const Value* Value::find(std::string_view field) const {
  const Value& dict = kind() == Kind::kObject ? state() : *this;
  if (dict.kind() != Kind::kDict) return nullptr;
  for (const auto& [key, value] : as<PairsNode>(*dict.node_).pairs)
    if (key.kind() == Kind::kString && as<TextNode>(*key.node_).text == field) return &value;
  return nullptr;
}

namespace {

// Text that grows to `chars_max` and a little more, so that shared values cannot make it long.
void print(const Value& value, size_t chars_max, std::string& out) {
  const Value::Node& node = value.node();
  if (out.size() > chars_max) return;
  const auto print_items = [&](const Value::Items& items, const char* open, const char* close) {
    out += open;
    for (size_t i = 0; i < items.size() && out.size() <= chars_max; ++i) {
      if (i > 0) out += ", ";
      print(items[i], chars_max, out);
    }
    out += close;
  };
  switch (node.kind) {
    case Kind::kNone:
      out += "None";
      break;
    case Kind::kBool:
      out += as<NumberNode>(node).bits ? "True" : "False";
      break;
    case Kind::kInt:
      out += fmt::format("{}", as<NumberNode>(node).bits);
      break;
    case Kind::kFloat:
      out += fmt::format("{}", std::bit_cast<double>(as<NumberNode>(node).bits));
      break;
    case Kind::kString:
      out += "'" + as<TextNode>(node).text.substr(0, chars_max) + "'";
      break;
    case Kind::kBytes:
      out += fmt::format("<{} bytes>", as<TextNode>(node).text.size());
      break;
    case Kind::kList:
      print_items(as<ItemsNode>(node).items, "[", "]");
      break;
    case Kind::kTuple:
      print_items(as<ItemsNode>(node).items, "(", as<ItemsNode>(node).items.size() == 1 ? ",)" : ")");
      break;
    case Kind::kGlobal:
      out += as<TextNode>(node).text;
      break;
    case Kind::kObject:
      out += as<ObjectNode>(node).type->text;
      print_items(as<ObjectNode>(node).items, "(", ")");
      break;
    case Kind::kDict: {
      const Value::Pairs& pairs = as<PairsNode>(node).pairs;
      out += "{";
      for (size_t i = 0; i < pairs.size() && out.size() <= chars_max; ++i) {
        if (i > 0) out += ", ";
        print(pairs[i].first, chars_max, out);
        out += ": ";
        print(pairs[i].second, chars_max, out);
      }
      out += "}";
      break;
    }
  }
}

}  // namespace

std::string Value::str(size_t chars_max) const {
  std::string out;
  print(*this, chars_max, out);
  return out.size() > chars_max ? escaped(out.substr(0, chars_max)) + "..." : escaped(out);
}

bool Value::operator==(const Value& other) const {
  if (node_ == other.node_) return true;
  if (!node_ || !other.node_) return false;
  if (kind() != other.kind()) return false;
  switch (kind()) {
    case Kind::kNone:
      return true;
    case Kind::kBool:
    case Kind::kInt:
    case Kind::kFloat:
      return as<NumberNode>(*node_).bits == as<NumberNode>(*other.node_).bits;
    case Kind::kString:
    case Kind::kBytes:
    case Kind::kGlobal:
      return as<TextNode>(*node_).text == as<TextNode>(*other.node_).text;
    case Kind::kList:
    case Kind::kTuple:
      return as<ItemsNode>(*node_).items == as<ItemsNode>(*other.node_).items;
    case Kind::kDict:
      return as<PairsNode>(*node_).pairs == as<PairsNode>(*other.node_).pairs;
    case Kind::kObject:
      break;
  }
  const auto& a = as<ObjectNode>(*node_);
  const auto& b = as<ObjectNode>(*other.node_);
  return a.instance == b.instance && a.type->text == b.type->text && a.items == b.items && a.state == b.state;
}

namespace {

AllowedGlobals with(AllowedGlobals names, std::initializer_list<const char*> more) {
  names.insert(more.begin(), more.end());
  return names;
}

AllowedGlobals dtype_globals() {
  AllowedGlobals names;
  for (const char* dtype :
       {"float32",   "float64",    "float16",       "bfloat16",    "int64",           "int32",          "int16",
        "int8",      "uint8",      "uint16",        "uint32",      "uint64",          "bool",           "complex32",
        "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"})
    names.insert(fmt::format("torch.{}", dtype));
  return names;
}

}  // namespace

const AllowedGlobals& metadata_globals() {
  // Python 3.11 pickles an enumerator as getattr(type, name). Like all here it is data, never called.
  // The second home of TensorProperties is that of PyTorch up to 2.3.
  static const AllowedGlobals names =
      with(dtype_globals(), {"builtins.getattr",
                             "torch.distributed.checkpoint.metadata.Metadata",
                             "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
                             "torch.distributed.checkpoint.metadata.TensorProperties",
                             "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
                             "torch.distributed.checkpoint.metadata.MEM_FORMAT_ENCODING",
                             "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
                             "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
                             "torch.distributed.checkpoint.metadata.MetadataIndex",
                             "torch.distributed.checkpoint.metadata.StorageMeta",
                             "torch.distributed.checkpoint.filesystem._StorageInfo",
                             "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
                             "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
                             "torch.Size",
                             "torch.serialization._get_layout",
                             "pathlib.PosixPath",
                             "pathlib.WindowsPath",
                             "pathlib.PurePosixPath",
                             "pathlib._local.PosixPath",
                             "collections.OrderedDict",
                             "torch.strided",
                             "torch.contiguous_format",
                             "torch.preserve_format",
                             "torch.channels_last"});
  return names;
}

const AllowedGlobals& tensor_globals() {
  static const AllowedGlobals names = with(
      dtype_globals(), {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter", "collections.OrderedDict",
                        "torch.Size", "torch.FloatStorage", "torch.DoubleStorage", "torch.HalfStorage", "torch.BFloat16Storage",
                        "torch.LongStorage", "torch.IntStorage", "torch.ShortStorage", "torch.CharStorage", "torch.ByteStorage",
                        "torch.BoolStorage", "torch.ComplexFloatStorage", "torch.ComplexDoubleStorage",
                        "torch.storage.UntypedStorage", "torch.serialization._get_layout", "_codecs.encode"});
  return names;
}

}  // namespace shardproof::checkpoint
