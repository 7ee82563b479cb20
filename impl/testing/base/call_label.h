// What communication is for, in words.
#pragma once

#include <string_view>

namespace shardproof {

// Says what the calls of this thread are for as long as it lives, e.g. "unit 'h.3'": in errors and records of backends. Labels
// nest; the innermost counts.
class CallLabel {
 public:
  // Keeps a view: the text must outlive the label.
  explicit CallLabel(std::string_view text);
  ~CallLabel();
  CallLabel(const CallLabel&) = delete;
  CallLabel& operator=(const CallLabel&) = delete;
  // "" outside of any.
  static std::string_view current();

 private:
  std::string_view outer_;
};

}  // namespace shardproof
