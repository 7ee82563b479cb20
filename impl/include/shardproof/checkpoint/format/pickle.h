// Pickles as data: a reader that builds values and never imports or calls anything, and a writer. No Torch.
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

// A value of a pickle; copies share. It is immutable and contains no cycle.
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
  // What `name(*args)` returned, and the state that was then given to it, if any.
  static Value reduced(std::string module, std::string name, Items args);
  // An instance made without its constructor, as dataclasses are pickled: fields by name, or any other state.
  static Value instance(std::string module, std::string name, Pairs fields);
  static Value instance(std::string module, std::string name, Value state);
  // What torch.save writes for a storage.
  static Value persistent(Value id);

  Kind kind() const;
  bool is_none() const { return kind() == Kind::kNone; }
  // Each throws Error saying `what` should have been which kind, and is not.
  bool as_bool(std::string_view what) const;
  int64_t as_int(std::string_view what) const;
  double as_float(std::string_view what) const;  // an int too
  const std::string& as_string(std::string_view what) const;
  const std::string& as_bytes(std::string_view what) const;
  const Items& as_list(std::string_view what) const;          // a tuple too
  const Pairs& as_dict(std::string_view what) const;          // an OrderedDict too
  const std::string& as_global(std::string_view what) const;  // "module.name" of a global
  // Of an object: "module.name", or "persistent id"; "" for other kinds.
  const std::string& type_name() const;
  const Items& args() const;   // of an object; of others none
  const Value& state() const;  // of an object; None when it has none
  // Field of an object's dict state or entry of a dict; null when absent.
  const Value* find(std::string_view field) const;

  // As Python would write it, for messages and for `inspect`, escaped (base/escape.h); cut at `chars_max`.
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
  int64_t nodes_max = int64_t{1} << 26;  // counted as a tree: shared values count each time
};

// Names "module.name" that may occur.
using AllowedGlobals = std::set<std::string, std::less<>>;
// Those of `.metadata` of PyTorch 2.1 to 2.11, and those of a torch.save file with tensors and plain values.
const AllowedGlobals& metadata_globals();
const AllowedGlobals& tensor_globals();

// Reads one pickle of protocol 2 to 5. Throws Error, and nothing else, naming `name`, the position and what is
// wrong; a global outside `allowed` is refused by its name. `consumed`, when given, is where the pickle ends; else nothing may
// follow it.
Value read_pickle(std::string_view bytes, const AllowedGlobals& allowed, const std::string& name,
                  const PickleLimits& limits = {}, size_t* consumed = nullptr);

// Law: read_pickle(write_pickle(v)) == v. Protocol 2 or 4; equal strings and globals are written once.
std::string write_pickle(const Value& value, int protocol = 2);

}  // namespace shardproof::checkpoint
