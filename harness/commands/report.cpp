#include "harness/commands/report.h"

#include <algorithm>
#include <cmath>

#include "harness/commands/causes.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/program.h"
#include "harness/compare/tolerance.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using nlohmann::json;

// A number that JSON has no word for is null there.
double number(const json& value) {
  return value.is_number() ? value.get<double>() : INFINITY;
}

// JSON that may stand inside of a script element: there `<` would be read first by HTML, e.g. in "</script>".
std::string for_html(const json& data) {
  std::string text;
  for (const char c : in_ascii(data)) {
    if (c == '<')
      text += "\\u003c";
    else if (c == '>')
      text += "\\u003e";
    else if (c == '&')
      text += "\\u0026";
    else
      text += c;
  }
  return text;
}

}  // namespace

int64_t Report::bin_of(double ratio) {
  if (!(ratio <= kToleranceFactor)) return kBins - 1;
  if (!(ratio > 0)) return 0;
  const auto half_octaves = static_cast<int64_t>(std::ceil(2 * std::log2(ratio / kToleranceFactor)));
  return std::clamp<int64_t>(kBins - 2 + half_octaves, 0, kBins - 2);
}

void Report::add(const json& line) {
  const std::string type = line.at("type");
  add_line(line, merged_);
  if (type == "case") add_case(line);
  if (type == "oracle") oracle_rows_.push_back({{"case", line.at("case")}, {"what", line.at("what")}});
  if (type != "summary") return;
  const auto smallest = line.find("smallest_found");
  if (smallest != line.end())
    for (const auto& [kind, errors] : smallest->items())
      for (const json& error : errors) smallest_found_[kind].push_back(number(error));
  const auto pairs = line.find("pairs");
  if (pairs == line.end()) return;  // a report of an older build
  facets_ = pairs->at("facets");
  for (const json& pair : pairs->at("drawn")) pairs_[{pair.at(0), pair.at(1)}] += pair.at(2).get<int64_t>();
}

void Report::add_case(const json& line) {
  ++cases_;
  const auto ratio = line.find("ratio");
  if (ratio == line.end())
    ++bitwise_;
  else
    ++errors_[line.value("precision", "float32")][static_cast<size_t>(bin_of(number(*ratio)))];
  const bool held = line.at("held");
  if (held && std::ssize(case_rows_) >= kCasesMax) return;
  case_rows_.push_back({line.at("case"), held, line.at("seconds"), ratio == line.end() ? json() : *ratio,
                        line.value("engine", std::string())});
}

void Report::add_faults(const std::string& path) {
  read_json_lines(path, "--faults", "ci/faults --json", [&](const json& line) {
    json row;
    for (const char* key : {"id", "title", "from", "check", "verdict", "by", "case", "guess"})
      row[key] = line.at(key).get<std::string>();
    for (const char* key : {"cases", "seconds"}) row[key] = line.at(key).get<double>();
    fault_rows_.push_back(std::move(row));
  });
}

json Report::data() const {
  json combinations = to_json(merged_.combinations.figures({}));
  for (const char* list : {"missing_pairs", "missing_triples"}) combinations.erase(list);  // thousands after a short run
  combinations["facets"] = std::ssize(harness::facets());
  json failures = json::array(), pairs = json::array(), errors = json::object();
  for (const MergedFailure& failure : merged_.minimal) {
    failures.push_back(failure.line);
    failures.back()["alike"] = failure.alike > 0 ? alike_in_words(failure.alike) : "";
  }
  for (const auto& [values, count] : pairs_) pairs.push_back({values.first, values.second, count});
  for (const auto& [precision, bins] : errors_) errors[precision] = bins;
  return {{"reports", merged_.reports},
          {"cases", merged_.cases},
          {"failures", merged_.failures},
          {"oracle_differences", merged_.oracle_differences},
          {"values_compared", merged_.values_compared},
          {"seconds", merged_.seconds},
          {"interrupted", merged_.interrupted},
          {"held", merged_.held()},
          {"features", merged_.features},
          {"program", program_name()},
          {"facets", facets_},
          {"pairs", std::move(pairs)},
          {"combinations", combinations},
          {"case_rows", case_rows_},
          {"cases_left_out", cases_ - std::ssize(case_rows_)},
          {"failure_rows", std::move(failures)},
          {"oracle_rows", oracle_rows_},
          {"tolerance", kToleranceFactor},
          {"errors", std::move(errors)},
          {"bitwise", bitwise_},
          {"smallest_found", smallest_found_},
          {"fault_rows", fault_rows_}};
}

std::string Report::page() const {
  static const std::string kMark = "{{data}}";
  std::string page = report_template();
  return page.replace(page.find(kMark), kMark.size(), for_html(data()));
}

}  // namespace harness
