// Python's pickles as data. The reader builds values and never imports or calls anything. There is a writer too. This header
// does not include Torch.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace shardproof::checkpoint {

// A value of a pickle. It is immutable and contains no cycle. Copies share the same data.
class Value {
 public:
  using Items = std::vector<Value>;
  using Pairs = std::vector<std::pair<Value, Value>>;
  enum class Kind { kNone, kBool, kInt, kFloat, kString, kBytes, kList, kTuple, kDict, kGlobal, kObject };

  Value();  // None
  static Value boolean(bool value);
  static Value integer(int64_t value);
  static Value real(double value);
  static Value string(std::string value);
  static Value bytes(std::string value);
  static Value list(Items items);
  static Value tuple(Items items);
  static Value dict(Pairs pairs);
  static Value global(std::string module, std::string name);
  // The object that the call module.name(*args) returned. A state may be given to it afterwards.
  static Value reduced(std::string module, std::string name, Items args);
  // An instance that is made without its constructor, as dataclasses are pickled. Its state is a dict of fields, or any other
  // value.
  static Value instance(std::string module, std::string name, Pairs fields);
  static Value instance(std::string module, std::string name, Value state);
  // A persistent id, which torch.save writes for a storage.
  static Value persistent(Value id);

  Kind kind() const;
  bool is_none() const { return kind() == Kind::kNone; }
  // Each throws Error when the value is of another kind; the message says of what kind `what` should have been.
  bool as_bool(std::string_view what) const;
  int64_t as_int(std::string_view what) const;
  double as_float(std::string_view what) const;  // takes an int too
  const std::string& as_string(std::string_view what) const;
  const std::string& as_bytes(std::string_view what) const;
  const Items& as_list(std::string_view what) const;          // takes a tuple too
  const Pairs& as_dict(std::string_view what) const;          // takes an OrderedDict too
  const std::string& as_global(std::string_view what) const;  // returns "module.name" of a global
  // The type of an object: "module.name", or "persistent id"; "" for other kinds.
  const std::string& type_name() const;
  const Items& args() const;   // the arguments of an object; empty for other kinds
  const Value& state() const;  // the state of an object; None when it has none
  // The field of that name in an object's state, or the entry of a dict; null when there is none.
  const Value* find(std::string_view field) const;

  // The value as Python would print it, for messages and for `inspect`. It is escaped (base/escape.h) and cut after `chars_max`
  // characters.
  std::string str(size_t chars_max = 200) const;
  bool operator==(const Value& other) const;

  struct Node;
  explicit Value(std::shared_ptr<const Node> node) : node_(std::move(node)) {}
  const Node& node() const { return *node_; }
  const std::shared_ptr<const Node>& pointer() const { return node_; }

 private:
  std::shared_ptr<const Node> node_;
};

struct PickleLimits {
  uint64_t bytes_max = uint64_t{1} << 31;
  int64_t depth_max = 64;
  int64_t nodes_max = int64_t{1} << 26;  // a shared value counts as often as it occurs
};

// The globals "module.name" that may occur in a pickle.
using AllowedGlobals = std::set<std::string, std::less<>>;
// Those that occur in a `.metadata` of PyTorch 2.1 to 2.11, and those in a torch.save file of tensors and plain values.
const AllowedGlobals& metadata_globals();
const AllowedGlobals& tensor_globals();

// Reads one pickle of protocol 2 to 5. Throws Error and nothing else; the message says `name`, the position and what is wrong.
// A global that is not in `allowed` is an error that names it. When `consumed` is given, it receives the position where the
// pickle ends; else nothing may follow the pickle.
Value read_pickle(std::string_view bytes, const AllowedGlobals& allowed, const std::string& name,
                  const PickleLimits& limits = {}, size_t* consumed = nullptr);

// Writes a pickle of protocol 2 or 4. Equal strings and globals are written once. Law: read_pickle(write_pickle(v)) == v.
std::string write_pickle(const Value& value, int protocol = 2);

}  // namespace shardproof::checkpoint
