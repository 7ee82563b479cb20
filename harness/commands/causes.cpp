#include "harness/commands/causes.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <sstream>

#include "harness/case/facets.h"

namespace harness {
namespace {

const Case& simplest() {
  static const Case made = [] {
    Case c = Case::parse("mlp(widths=1-1,act=identity,bias=0) mesh() zero3 sgd(lr=0.1) ordered seed=1 : step");
    for (const OptionRow& row : option_rows()) c.options.*row.member = row.simplest;
    return c;
  }();
  return made;
}

// Those that another one decides, or that are no part of a cause.
bool counts(const Facet& facet, const Case& minimal) {
  static const std::set<std::string> never = {"strategy", "mode", "odd sizes", "world", "several replicas", "several shards"};
  static const std::set<std::string> of_context = {"attention", "context"};
  if (facet.name == "model") return minimal.model.dropout() == 0 && !has_ties(minimal);  // else that is the cause
  return !never.contains(facet.name) && (minimal.context_ranks() > 1 || !of_context.contains(facet.name));
}

bool is_plain_word(const std::string& word) {
  return std::ranges::all_of(
      word, [](unsigned char letter) { return std::isalpha(letter) || letter == ',' || letter == ':' || letter == '_'; });
}

// Of the first line, the words without numbers, quotes and signs: names of parameters and paths have some.
std::string plain_words(const std::string& text) {
  std::istringstream words(text.substr(0, text.find('\n')));
  std::string kind;
  for (std::string word; words >> word;)
    if (is_plain_word(word)) kind += word + " ";
  return kind;
}

// What stands between two signs first, with them; "" where nothing does.
std::string between(const std::string& text, char open, char close) {
  const size_t begin = text.find(open), end = begin == std::string::npos ? begin : text.find(close, begin + 1);
  return end == std::string::npos ? "" : text.substr(begin, end - begin + 1);
}

// The library's errors name the place, and a broken invariant its condition.
std::string kind_of_error(const std::string& what) {
  const std::string place = between(what, '[', ']');
  const bool is_place = place.size() > 2 && is_plain_word(place.substr(1, place.size() - 2));
  if (is_place && what.find("broken invariant") != std::string::npos) return place + " " + between(what, '`', '`');
  // What an engine's ranks raised stands behind who they are.
  const std::string mark = " raised: ";
  const size_t raised = what.find(mark);
  const std::string words = raised == std::string::npos ? what : what.substr(raised + mark.size());
  return (is_place ? place + " " : "") + plain_words(words);
}

// With the mesh, the strategy and the mode of another case, and the options that only a mesh with an axis cp may have.
Case moved_to(Case moved, const Case& c) {
  moved.mesh = c.mesh;
  moved.strategy = c.strategy;
  moved.mode = c.mode;
  moved.options.context_gathered = c.options.context_gathered;
  moved.options.context_contiguous = c.options.context_contiguous;
  return moved;
}

bool fails_alike(const Case& c, const std::string& kind, const std::function<Verdict(const Case&)>& run) {
  if (!is_valid(c)) return false;
  const Verdict verdict = run(c);
  return !verdict.held && kind_of_failure(verdict) == kind;
}

}  // namespace

std::string kind_of_failure(const Verdict& verdict) {
  if (verdict.category == "error") return kind_of_error(verdict.what);
  const bool is_named = verdict.category.starts_with("property ") || verdict.category == "control" ||
                        verdict.category == "schedule" || verdict.category == "diverged";
  return is_named ? verdict.category : "values";
}

bool has_all_of(const Case& c, const Case& minimal) {
  if (c.largest_world() < minimal.largest_world() || (minimal.interleaving && !c.interleaving)) return false;
  if (minimal.data_ranks() > 1 && c.data_ranks() == 1) return false;
  return std::ranges::all_of(facets(), [&](const Facet& facet) {
    const size_t plain = facet.of(simplest());
    if (!counts(facet, minimal) || facet.of(minimal) == plain) return true;
    return facet.name == "model" ? facet.of(c) == facet.of(minimal) : facet.of(c) != plain;
  });
}

Case reduced_to(const Case& minimal, const Case& c) {
  Case reduced = moved_to(minimal, c);
  reduced.model = c.model;
  reduced.seed = c.seed;
  for (const OptionRow& row : option_rows())
    if (minimal.options.*row.member != row.simplest) reduced.options.*row.member = c.options.*row.member;
  if (minimal.optimizer.kind != golden::Optimizer::Kind::sgd) reduced.optimizer = c.optimizer;
  return reduced;
}

bool explains(const Case& minimal, const std::string& kind, const Case& c, const std::function<Verdict(const Case&)>& run) {
  if (!has_all_of(c, minimal)) return false;
  const Case there = moved_to(minimal, c);
  if (!(there == minimal) && !fails_alike(there, kind, run)) return false;
  const Case reduced = reduced_to(minimal, c);
  return reduced == c || fails_alike(reduced, kind, run);
}

std::string alike_in_words(int64_t cases) {
  return cases == 1 ? "1 more case has all of this and failed alike"
                    : fmt::format("{} more cases have all of this and failed alike", cases);
}

}  // namespace harness
