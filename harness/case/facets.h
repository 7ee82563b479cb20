// In which respects cases differ. What a campaign covered is counted in pairs and triples of these values, and a part of the
// cases is drawn so that all of them meet.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "harness/case/case.h"

namespace harness {

struct Facet {
  std::string name;
  std::vector<std::string> values;        // no text is a value of two facets
  std::function<size_t(const Case&)> of;  // which of the values a case has
  // Gives a case that value; the result may be invalid. Empty where other parts of a case decide.
  std::function<void(Case&, size_t)> set = {};
  bool overview = false;  // one of the few that a report's heat map shows
};

// Strategy, mode, model, optimizer, mesh, history, and each row of option_rows().
const std::vector<Facet>& facets();

bool has_ties(const Case& c);
// Key heads that several ranks along tp hold in copies.
bool has_copied_heads(const Case& c);

}  // namespace harness
