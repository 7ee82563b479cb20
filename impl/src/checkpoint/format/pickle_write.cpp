#include <bit>
#include <limits>
#include <map>

#include "checkpoint/format/pickle_node.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/pickle.h"

namespace shardproof::checkpoint {
namespace {

using Kind = Value::Kind;

class Writer {
 public:
  explicit Writer(int protocol) : protocol_(protocol) {
    SHARD_REQUIRE(protocol == 2 || protocol == 4, "pickle", "protocol 2 and 4 are written, not {}", protocol);
    out_ = {'\x80', static_cast<char>(protocol)};
  }

  std::string finish(const Value& value) {
    write(value);
    out_ += '.';
    return std::move(out_);
  }

 private:
  void number(uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i));
  }

  void write_int(int64_t value) {
    if (value >= 0 && value < 0x100) {
      out_ += 'K';
      number(static_cast<uint64_t>(value), 1);
    } else if (value >= 0 && value < 0x10000) {
      out_ += 'M';
      number(static_cast<uint64_t>(value), 2);
    } else if (value == static_cast<int32_t>(value)) {
      out_ += 'J';
      number(static_cast<uint64_t>(value), 4);
    } else {
      out_ += "\x8a\x08";
      number(static_cast<uint64_t>(value), 8);
    }
  }

  void write_real(double value) {
    out_ += 'G';
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int i = 7; i >= 0; --i) out_ += static_cast<char>(bits >> (8 * i));
  }

  // Whether the memo had it; else the caller writes it and it is remembered behind that.
  bool recall(const std::string& key) {
    const auto found = memo_.find(key);
    if (found == memo_.end()) return false;
    if (found->second < 256) {
      out_ += 'h';
      number(found->second, 1);
    } else {
      out_ += 'j';
      number(found->second, 4);
    }
    return true;
  }
  void remember(const std::string& key) {
    const size_t index = memo_.size();
    memo_.emplace(key, index);
    if (protocol_ == 4) {
      out_ += '\x94';
    } else if (index < 256) {
      out_ += 'q';
      number(index, 1);
    } else {
      out_ += 'r';
      number(index, 4);
    }
  }

  void write_string(const std::string& text) {
    SHARD_REQUIRE(text.size() <= std::numeric_limits<uint32_t>::max(), "pickle", "a string of {} bytes", text.size());
    const std::string key = "s" + text;
    if (recall(key)) return;
    if (protocol_ == 4 && text.size() < 256) {
      out_ += '\x8c';
      number(text.size(), 1);
    } else {
      out_ += 'X';
      number(text.size(), 4);
    }
    out_ += text;
    remember(key);
  }

  void write_bytes(const std::string& bytes) {
    SHARD_REQUIRE(bytes.size() <= std::numeric_limits<uint32_t>::max(), "pickle", "{} bytes in one value", bytes.size());
    if (protocol_ == 4) {
      out_ += 'B';
      number(bytes.size(), 4);
      out_ += bytes;
      return;
    }
    std::string text;
    for (const char byte : bytes) {
      const auto code = static_cast<unsigned char>(byte);
      if (code >= 0x80) text += static_cast<char>(0xC0 | code >> 6);
      text += static_cast<char>(code < 0x80 ? code : 0x80 | (code & 0x3F));
    }
    write_global("_codecs", "encode");
    write_string(text);
    write_string("latin1");
    out_ += "\x86R";
  }

  void write_global(const std::string& module, const std::string& name) {
    const std::string key = "g" + module + "." + name;
    if (recall(key)) return;
    out_ += "c" + module + "\n" + name + "\n";
    remember(key);
  }
  void write_global(const Value::Node& node) {
    write_global(node.text.substr(0, node.module_chars), node.text.substr(node.module_chars + 1));
  }

  void write_tuple(const Value::Items& items) {
    if (items.empty()) {
      out_ += ')';
      return;
    }
    if (items.size() > 3) out_ += '(';
    for (const Value& item : items) write(item);
    static constexpr char kTuples[] = {'\x85', '\x86', '\x87'};
    out_ += items.size() > 3 ? 't' : kTuples[items.size() - 1];
  }
  void write_list(const Value::Items& items) {
    out_ += ']';
    if (items.empty()) return;
    out_ += '(';
    for (const Value& item : items) write(item);
    out_ += 'e';
  }
  void write_dict(const Value::Pairs& pairs) {
    out_ += '}';
    if (pairs.empty()) return;
    out_ += '(';
    for (const auto& [key, value] : pairs) {
      write(key);
      write(value);
    }
    out_ += 'u';
  }
  void write_object(const Value::Node& node) {
    if (node.text == kPersistentId) {
      write(node.items.at(0));
      out_ += 'Q';
      return;
    }
    write_global(node);
    write_tuple(node.items);
    out_ += node.instance ? '\x81' : 'R';
    if (!node.state.pointer()) return;
    write(node.state);
    out_ += 'b';
  }

  void write(const Value& value) {
    const Value::Node& node = value.node();
    switch (node.kind) {
      case Kind::kNone:
        out_ += 'N';
        break;
      case Kind::kBool:
        out_ += node.integer ? '\x88' : '\x89';
        break;
      case Kind::kInt:
        write_int(node.integer);
        break;
      case Kind::kFloat:
        write_real(node.real);
        break;
      case Kind::kString:
        write_string(node.text);
        break;
      case Kind::kBytes:
        write_bytes(node.text);
        break;
      case Kind::kList:
        write_list(node.items);
        break;
      case Kind::kTuple:
        write_tuple(node.items);
        break;
      case Kind::kDict:
        write_dict(node.pairs);
        break;
      case Kind::kGlobal:
        write_global(node);
        break;
      case Kind::kObject:
        write_object(node);
        break;
    }
  }

  int protocol_;
  std::string out_;
  std::map<std::string, size_t> memo_;
};

}  // namespace

std::string write_pickle(const Value& value, int protocol) {
  return Writer(protocol).finish(value);
}

}  // namespace shardproof::checkpoint
