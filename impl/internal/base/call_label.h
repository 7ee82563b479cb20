// What communication is for, in words.
#pragma once

#include <string>
#include <string_view>

namespace shardproof {

// Says what the calls of this thread are for as long as it lives, e.g. "unit 'h.3'": in errors and records of backends. Labels
// nest; the innermost counts. Backends that hand over more than data compare what the ranks of a call say it is for.
class CallLabel {
 public:
  // Keeps views: the texts must outlive the label. `occasion` says which of many such calls, e.g. "step 3, gather of a.weight".
  explicit CallLabel(std::string_view text, std::string_view occasion = {});
  ~CallLabel();
  CallLabel(const CallLabel&) = delete;
  CallLabel& operator=(const CallLabel&) = delete;
  // "" outside of any.
  static std::string_view current();
  // With the occasion before it, e.g. "step 3, gather of h.3.weight, unit 'h.3'".
  static std::string purpose();

 private:
  std::string_view outer_, outer_occasion_;
};

}  // namespace shardproof
