#include "harness/case/mix.h"

#include <utility>
#include <vector>

#include "harness/case/facets.h"

namespace harness {

bool may_set(const Facet& facet, const Limits& limits) {
  return facet.set && !limits.tiny && !(limits.strategy && facet.name == "strategy") &&
         !(limits.mesh && (facet.name == "load on a mesh" || facet.name == "axes in another order"));
}

void mix(Chooser choose, Case& c, const Limits& limits) {
  if (!choose.chance(0.25)) return;
  const double share = choose.one_of<double>({0.1, 0.33, 0.67});
  std::vector<const Facet*> order;
  for (const Facet& facet : facets())
    if (may_set(facet, limits)) order.push_back(&facet);
  // What comes first can rule out what comes later, so each order has its turn.
  for (size_t i = order.size(); i > 1; --i)
    std::swap(order[i - 1], order[static_cast<size_t>(choose.integer(0, static_cast<int64_t>(i) - 1))]);
  for (const Facet* facet : order) {
    const bool takes_part = choose.chance(share);
    const auto value = static_cast<size_t>(choose.integer(0, static_cast<int64_t>(facet->values.size()) - 1));
    if (takes_part) try_change(c, [&] { facet->set(c, value); });
  }
}

}  // namespace harness
