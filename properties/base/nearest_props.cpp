// Suggestions for misspelt names, against a search that tries every way to edit a word.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <string_view>

#include "shardproof/base/nearest.h"

using namespace shardproof;

namespace {

// Whether so many edits from left to right make one word of the other.
bool leads_to(std::string_view from, std::string_view to, size_t edits) {
  if (from.empty() || to.empty()) return std::max(from.size(), to.size()) <= edits;
  if (from[0] == to[0] && leads_to(from.substr(1), to.substr(1), edits)) return true;
  if (edits == 0) return false;
  const bool swapped = from.size() > 1 && to.size() > 1 && from[0] == to[1] && from[1] == to[0];
  return leads_to(from.substr(1), to, edits - 1) || leads_to(from, to.substr(1), edits - 1) ||
         leads_to(from.substr(1), to.substr(1), edits - 1) || (swapped && leads_to(from.substr(2), to.substr(2), edits - 1));
}

// A third of the letters may be wrong, and one letter of a short word.
std::string nearest_of_all(const std::string& word, const std::vector<std::string>& words) {
  for (size_t edits = 0; edits <= std::max<size_t>(1, word.size() / 3); ++edits)
    for (const std::string& candidate : words)
      if (leads_to(word, candidate, edits)) return candidate;
  return "";
}

char any_letter() {
  return *rc::gen::element('a', 'b', 'c');
}

std::string any_word() {
  std::string word;
  for (int64_t i = *rc::gen::inRange<int64_t>(0, 13); i > 0; --i) word += any_letter();
  return word;
}

std::string misspelt(std::string word) {
  for (int64_t i = *rc::gen::inRange<int64_t>(0, 6); i > 0; --i) {
    const auto at = *rc::gen::inRange<size_t>(0, word.size() + 1);
    const int64_t way = *rc::gen::inRange<int64_t>(0, 4);
    if (way == 0) word.insert(at, 1, any_letter());
    if (way == 1 && at < word.size()) word.erase(at, 1);
    if (way == 2 && at < word.size()) word[at] = any_letter();
    if (way == 3 && at + 1 < word.size()) std::swap(word[at], word[at + 1]);
  }
  return word;
}

}  // namespace

RC_GTEST_PROP(Nearest, the_first_of_the_words_that_the_fewest_edits_lead_to_is_found, ()) {
  const std::string word = any_word();
  std::vector<std::string> words;
  for (int64_t i = *rc::gen::inRange<int64_t>(0, 4); i > 0; --i) words.push_back(misspelt(word));
  RC_ASSERT(nearest(word, words) == nearest_of_all(word, words));
}

TEST(Nearest, a_word_is_suggested_when_one_is_near) {
  EXPECT_EQ(did_you_mean("zreo1", {"ddp", "zero1", "zero2"}), " Did you mean 'zero1'?");
  EXPECT_EQ(did_you_mean("pipeline", {"ddp", "zero1"}), "");
}
