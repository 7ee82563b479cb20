// Writes the opcodes of a pickle one after another, so that no tree of values is needed for a large one.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>

namespace shardproof::checkpoint {

// Equal strings and globals are written once. Texts that are given as views must live until `finish`.
class PickleWriter {
 public:
  explicit PickleWriter(int protocol);  // 2 or 4

  void none() { out_ += 'N'; }
  void boolean(bool value) { out_ += value ? '\x88' : '\x89'; }
  void integer(int64_t value);
  void real(double value);
  void string(std::string_view text);
  void bytes(std::string_view bytes);
  // The name is "module.name", and the module has so many characters.
  void global(std::string_view name, size_t module_chars);

  // The items are written between the two calls; of a dict, each key before its value. `count` is that of items or pairs.
  void begin_tuple(size_t count);
  void end_tuple(size_t count);
  void begin_list(size_t count);
  void end_list(size_t count);
  void begin_dict(size_t count);
  void end_dict(size_t count);

  void call() { out_ += 'R'; }            // of the last global with the tuple behind it
  void make_object() { out_ += '\x81'; }  // of the same, without its constructor
  void set_state() { out_ += 'b'; }       // the last value becomes the state of the object before it
  void as_persistent_id() { out_ += 'Q'; }

  // For values that occur often and that Python never changes: `remember` is called behind the first, and `recall` with what it
  // returned stands for the same value again.
  size_t remember();
  void recall(size_t index);

  std::string finish();

 private:
  using Memo = std::unordered_map<std::string_view, size_t>;
  void number(uint64_t value, int bytes);
  bool recall(const Memo& memo, std::string_view key);
  void remember(Memo& memo, std::string_view key);

  const int protocol_;
  std::string out_;
  Memo strings_, globals_;
  size_t remembered_ = 0;                // with other values too
  std::deque<std::string> own_strings_;  // that no caller keeps
};

}  // namespace shardproof::checkpoint
