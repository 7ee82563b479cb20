#include "harness/commands/causes.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "harness/case/facets.h"

namespace harness {
namespace {

const Case& simplest() {
  static const Case made = [] {
    Case c = Case::parse("mlp(widths=1-1,act=identity,bias=0) mesh() zero3 sgd(lr=0.1) ordered seed=1 : step");
    for (const OptionRow& row : option_rows()) row.of(c.options) = row.simplest;
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

// With the mesh, the strategy and the mode of another case, and the options that only a mesh with an axis cp may have.
Case moved_to(Case moved, const Case& c) {
  moved.mesh = c.mesh;
  moved.strategy = c.strategy;
  moved.mode = c.mode;
  moved.options.context_attention = c.options.context_attention;
  moved.options.context_contiguous = c.options.context_contiguous;
  return moved;
}

bool fails_so(const Case& c, const std::string& kind, const std::function<Verdict(const Case&)>& run) {
  return is_valid(c) && run(c).kind() == kind;
}

}  // namespace

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
    if (row.of(minimal.options) != row.simplest) row.of(reduced.options) = row.of(c.options);
  if (minimal.optimizer.kind != golden::Optimizer::Kind::sgd) reduced.optimizer = c.optimizer;
  return reduced;
}

bool explains(const Case& minimal, const std::string& kind, const Case& c, const std::function<Verdict(const Case&)>& run) {
  if (!has_all_of(c, minimal)) return false;
  const Case there = moved_to(minimal, c);
  if (!(there == minimal) && !fails_so(there, kind, run)) return false;
  const Case reduced = reduced_to(minimal, c);
  return reduced == c || fails_so(reduced, kind, run);
}

std::string alike_in_words(int64_t cases) {
  return cases == 1 ? "1 more case has all of this and failed alike"
                    : fmt::format("{} more cases have all of this and failed alike", cases);
}

}  // namespace harness
