#include "shardproof/checkpoint/format/pickle.h"

#include <algorithm>
#include <bit>

#include "checkpoint/format/pickle_node.h"
#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

using Kind = Value::Kind;

std::shared_ptr<Value::Node> node_of(Kind kind) {
  auto node = std::make_shared<Value::Node>();
  node->kind = kind;
  return node;
}

Value with_text(Kind kind, std::string text) {
  auto node = node_of(kind);
  node->text = std::move(text);
  return Value(std::move(node));
}

Value with_items(Kind kind, Value::Items items) {
  auto node = node_of(kind);
  node->items = std::move(items);
  return Value(std::move(node));
}

void set_global(Value::Node& node, const std::string& module, const std::string& name) {
  node.text = module + "." + name;
  node.module_chars = module.size();
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

Value::Value() {
  static const std::shared_ptr<const Node> none = node_of(Kind::kNone);
  node_ = none;
}

Value Value::boolean(bool value) {
  auto node = node_of(Kind::kBool);
  node->integer = value;
  return Value(std::move(node));
}

Value Value::integer(int64_t value) {
  auto node = node_of(Kind::kInt);
  node->integer = value;
  return Value(std::move(node));
}

Value Value::real(double value) {
  auto node = node_of(Kind::kFloat);
  node->real = value;
  return Value(std::move(node));
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
  auto node = node_of(Kind::kDict);
  node->pairs = std::move(pairs);
  return Value(std::move(node));
}

Value Value::global(std::string module, std::string name) {
  auto node = node_of(Kind::kGlobal);
  set_global(*node, module, name);
  return Value(std::move(node));
}

Value Value::reduced(std::string module, std::string name, Items args) {
  auto node = node_of(Kind::kObject);
  set_global(*node, module, name);
  node->items = std::move(args);
  return Value(std::move(node));
}

Value Value::instance(std::string module, std::string name, Pairs fields) {
  // Python leaves an empty state out.
  return instance(std::move(module), std::move(name), fields.empty() ? Value(nullptr) : dict(std::move(fields)));
}

Value Value::instance(std::string module, std::string name, Value state) {
  auto node = node_of(Kind::kObject);
  set_global(*node, module, name);
  node->instance = true;
  node->state = std::move(state);
  return Value(std::move(node));
}

Value Value::persistent(Value id) {
  auto node = node_of(Kind::kObject);
  node->text = kPersistentId;
  node->items = {std::move(id)};
  return Value(std::move(node));
}

Value::Kind Value::kind() const {
  return node_->kind;
}

bool Value::as_bool(std::string_view what) const {
  if (kind() != Kind::kBool) wrong_kind(*this, what, "a bool");
  return node_->integer != 0;
}

int64_t Value::as_int(std::string_view what) const {
  if (kind() != Kind::kInt) wrong_kind(*this, what, "an int");
  return node_->integer;
}

double Value::as_float(std::string_view what) const {
  if (kind() == Kind::kInt) return static_cast<double>(node_->integer);
  if (kind() != Kind::kFloat) wrong_kind(*this, what, "a float");
  return node_->real;
}

const std::string& Value::as_string(std::string_view what) const {
  if (kind() != Kind::kString) wrong_kind(*this, what, "a string");
  return node_->text;
}

const std::string& Value::as_bytes(std::string_view what) const {
  if (kind() != Kind::kBytes) wrong_kind(*this, what, "bytes");
  return node_->text;
}

const Value::Items& Value::as_list(std::string_view what) const {
  if (kind() != Kind::kList && kind() != Kind::kTuple) wrong_kind(*this, what, "a list or a tuple");
  return node_->items;
}

const Value::Pairs& Value::as_dict(std::string_view what) const {
  if (kind() != Kind::kDict) wrong_kind(*this, what, "a dict");
  return node_->pairs;
}

const std::string& Value::as_global(std::string_view what) const {
  if (kind() != Kind::kGlobal) wrong_kind(*this, what, "a global");
  return node_->text;
}

const std::string& Value::type_name() const {
  return kind() == Kind::kObject ? node_->text : kNoName;
}
const Value::Items& Value::args() const {
  return kind() == Kind::kObject ? node_->items : kNoItems;
}

const Value& Value::state() const {
  static const Value none;
  return kind() == Kind::kObject && node_->state.node_ ? node_->state : none;
}

const Value* Value::find(std::string_view field) const {
  const Value& dict = kind() == Kind::kObject ? state() : *this;
  if (dict.kind() != Kind::kDict) return nullptr;
  for (const auto& [key, value] : dict.node_->pairs)
    if (key.kind() == Kind::kString && key.node_->text == field) return &value;
  return nullptr;
}

namespace {

// Text that grows to `chars_max` and a little more, so that shared values cannot make it long.
void print(const Value& value, size_t chars_max, std::string& out) {
  const Value::Node& node = value.node();
  if (out.size() > chars_max) return;
  const auto print_items = [&](const char* open, const char* close) {
    out += open;
    for (size_t i = 0; i < node.items.size() && out.size() <= chars_max; ++i) {
      if (i > 0) out += ", ";
      print(node.items[i], chars_max, out);
    }
    out += close;
  };
  switch (node.kind) {
    case Kind::kNone:
      out += "None";
      break;
    case Kind::kBool:
      out += node.integer ? "True" : "False";
      break;
    case Kind::kInt:
      out += fmt::format("{}", node.integer);
      break;
    case Kind::kFloat:
      out += fmt::format("{}", node.real);
      break;
    case Kind::kString:
      out += "'" + node.text.substr(0, chars_max) + "'";
      break;
    case Kind::kBytes:
      out += fmt::format("<{} bytes>", node.text.size());
      break;
    case Kind::kList:
      print_items("[", "]");
      break;
    case Kind::kTuple:
      print_items("(", node.items.size() == 1 ? ",)" : ")");
      break;
    case Kind::kGlobal:
      out += node.text;
      break;
    case Kind::kObject:
      out += node.text;
      print_items("(", ")");
      break;
    case Kind::kDict:
      out += "{";
      for (size_t i = 0; i < node.pairs.size() && out.size() <= chars_max; ++i) {
        if (i > 0) out += ", ";
        print(node.pairs[i].first, chars_max, out);
        out += ": ";
        print(node.pairs[i].second, chars_max, out);
      }
      out += "}";
      break;
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
  const Node& a = *node_;
  const Node& b = *other.node_;
  return a.kind == b.kind && a.instance == b.instance && a.integer == b.integer &&
         std::bit_cast<uint64_t>(a.real) == std::bit_cast<uint64_t>(b.real) && a.text == b.text && a.items == b.items &&
         a.pairs == b.pairs && a.state == b.state;
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
