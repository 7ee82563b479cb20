#include "harness/run/property.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "shardproof/base/check.h"

namespace harness {
namespace {

std::vector<Property>& registered() {
  static std::vector<Property> all;
  return all;
}

bool is_word(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

bool is_asked(const Property& property, const Case& c) { return !property.applies || property.applies(c); }

}  // namespace

const char* to_string(Moment moment) {
  switch (moment) {
    case Moment::begun: return "before the first step";
    case Moment::backward: return "after the last backward";
    case Moment::stepped: return "after the update";
  }
  return "";
}

void register_property(Property property) {
  SHARD_REQUIRE(is_word(property.name), "property", "a property's name is a word of letters, digits and '_', got '{}'",
                property.name);
  for (const Property& other : registered())
    SHARD_REQUIRE(other.name != property.name, "property", "there is a property '{}' already; choose another name",
                  property.name);
  SHARD_REQUIRE(property.finished || property.live, "property", "'{}' checks nothing; give it `finished`, `live` or both",
                property.name);
  registered().push_back(std::move(property));
}

const std::vector<Property>& properties() { return registered(); }

void ask_properties(const LiveRun& run, std::vector<PropertyComplaint>& complaints) {
  for (const Property& property : registered()) {
    if (!property.live || !is_asked(property, run.c)) continue;
    if (const Complaint complaint = property.live(run))
      complaints.push_back({property.name, fmt::format("step {}, rank {}, {}: {}", run.step + 1, run.sharded.rank(),
                                                       to_string(run.moment), *complaint)});
  }
}

std::optional<PropertyComplaint> first_complaint(const FinishedRun& run) {
  for (const std::vector<RankStep>& ranks : run.sharded)
    for (const RankStep& rank : ranks)
      if (!rank.complaints.empty()) return rank.complaints[0];
  for (const Property& property : registered()) {
    if (!property.finished || !is_asked(property, run.c)) continue;
    if (const Complaint complaint = property.finished(run)) return PropertyComplaint{property.name, *complaint};
  }
  return {};
}

std::vector<std::string> asked_about(const Case& c) {
  std::vector<std::string> names;
  for (const Property& property : registered())
    if (is_asked(property, c)) names.push_back(property.name);
  return names;
}

}  // namespace harness
