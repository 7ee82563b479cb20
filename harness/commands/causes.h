// Failures of a campaign by their causes. One bug often fails many cases, and each of them would shrink to much the same.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "harness/case/case.h"
#include "harness/run/run_case.h"

namespace harness {

// Whether a case has something else than the simplest wherever a minimal one has: options, events, the optimizer, the model,
// ranks along tp or cp, several ranks. The strategy, the mode and the data do not count.
bool has_all_of(const Case& c, const Case& minimal);

// The case with the simplest of everything in which the minimal one is the simplest. Its model, mesh, strategy, mode and data
// stay, and the history is that of the minimal one. It may be invalid.
Case reduced_to(const Case& minimal, const Case& c);

// Whether what made `minimal` fail is enough for `c` to fail: `c` has all of it, `minimal` fails alike on the mesh, under the
// strategy and in the mode of `c`, and so does `c` when it is reduced to what `minimal` has. `run` judges these cases. Both
// have failed, in a way of that kind. A second bug that needs nothing but another model is not told from the first.
bool explains(const Case& minimal, const std::string& kind, const Case& c, const std::function<Verdict(const Case&)>& run);

// "4 more cases have all of this and failed alike"
std::string alike_in_words(int64_t cases);

}  // namespace harness
