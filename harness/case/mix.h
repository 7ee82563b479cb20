// Cases in which values meet that seldom do.
#pragma once

#include "harness/case/facets.h"
#include "harness/case/limits.h"
#include "harness/case/random.h"

namespace harness {

// Gives every fourth case values of facets() that are drawn evenly, whatever their usual probability. A random part of the
// facets takes part, a tenth, a third or two thirds (swarm testing: Groce et al., "Swarm Testing", ISSTA 2012). A value that
// does not fit the rest of the case is left out. Nothing depends on what was drawn before, so every case replays alone.
void mix(Chooser choose, Case& c, const Limits& limits);

// Whether the limits let this facet be set.
bool may_set(const Facet& facet, const Limits& limits);

}  // namespace harness
