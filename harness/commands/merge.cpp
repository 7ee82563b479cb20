#include "harness/commands/merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "harness/commands/causes.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/program.h"
#include "harness/plan/xml.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

void add_summary(const nlohmann::json& line, MergedReports& merged) {
  ++merged.reports;
  merged.parts.push_back({.drawn_from = line.at("drawn_from"),
                          .asked = line.at("asked"),
                          .part = line.at("part").get<int64_t>(),
                          .parts = line.at("parts").get<int64_t>(),
                          .path = ""});
  merged.cases += line.at("cases").get<int64_t>();
  merged.failures += line.at("failures").get<int64_t>();
  merged.values_compared += line.at("values_compared").get<int64_t>();
  merged.oracle_differences += line.at("oracle_differences").get<int64_t>();
  merged.seconds += line.at("seconds").get<double>();
  merged.interrupted |= line.at("interrupted").get<bool>();
  for (const auto& [feature, cases] : line.at("covered").items()) merged.features[feature] += cases.get<int64_t>();
}

// A case of an older version of this program may have words that are no longer known; it is not counted here.
void add_case(const nlohmann::json& line, MergedReports& merged) {
  try {
    merged.combinations.add(Case::parse(line.at("case").get<std::string>()));
  } catch (const shardproof::Error&) {
  }
}

std::string key_of(const nlohmann::json& line, const char* minimal) {
  return fmt::format("{} {}", line.value("engine", ""), line.at(minimal).get<std::string>());
}

// Whether two parts of a campaign have found one bug. Here no case is run, so the minimal cases have to have the same. What one
// run told apart stays apart.
bool has_cause_of(const MergedFailure& failure, const MergedFailure& known) {
  const std::string kind = failure.text("kind");
  if (failure.text("engine") != known.text("engine") || kind != known.text("kind") || kind.empty()) return false;
  if (failure.report == known.report) return false;
  try {
    const Case c = Case::parse(failure.text("case")), minimal = Case::parse(known.text("case"));
    return c.strategy == minimal.strategy && c.mode == minimal.mode && has_all_of(c, minimal) &&
           has_all_of(minimal, c);
  } catch (const shardproof::Error&) {
    return false;  // of an older version, as above
  }
}

void add_failure(const nlohmann::json& line, MergedReports& merged) {
  const std::string key = key_of(line, "case");
  if (const auto cause = merged.cause_of.find(key); cause != merged.cause_of.end()) {
    MergedFailure& known = merged.minimal[cause->second];
    known.alike += known.report != merged.reports;  // a crash may be written twice into one report
    return;
  }
  MergedFailure failure{.line = line, .report = merged.reports};
  failure.line.emplace("replay", fmt::format("{} replay '{}'", program_name(), failure.text("case")));
  failure.line.emplace("cases", 0);
  // These throw where it is no such line.
  line.at("what").get<std::string>();
  failure.line.at("cases").get<int64_t>();
  for (const char* text : {"where", "first", "replicas", "guess", "original", "engine", "kind", "replay"}) failure.text(text);
  const auto known = std::ranges::find_if(merged.minimal, [&](const auto& other) { return has_cause_of(failure, other); });
  merged.cause_of[key] = static_cast<size_t>(known - merged.minimal.begin());
  if (known != merged.minimal.end())
    ++known->alike;
  else
    merged.minimal.push_back(std::move(failure));
}

void add_alike(const nlohmann::json& line, MergedReports& merged) {
  const auto cause = merged.cause_of.find(key_of(line, "minimal"));
  if (cause != merged.cause_of.end()) ++merged.minimal[cause->second].alike;
}

void add_report(const std::string& path, const std::function<void(const nlohmann::json&)>& also, MergedReports& merged) {
  const int64_t before = merged.reports;
  read_json_lines(path, "--merge", "verify --json", [&](const nlohmann::json& line) {
    add_line(line, merged);
    if (also) also(line);
  });
  SHARD_REQUIRE(merged.reports > before, "verify",
                "--merge: {} has no summary, so its run did not end; leave it out or run it again", path);
  for (auto part = merged.parts.begin() + before; part != merged.parts.end(); ++part) part->path = path;
}

// Two reports that have cases in common count them twice.
void require_disjoint(const MergedPart& first, const MergedPart& second) {
  const bool one_campaign = first.asked == second.asked && first.parts == second.parts;
  SHARD_REQUIRE(
      first.drawn_from != second.drawn_from || (one_campaign && first.part != second.part), "verify",
      "--merge: {} is part {} of {} of {} from {}, and {} is part {} of {} of {}. They have cases in common; leave one "
      "of them out, or run it with another --seed",
      first.path, first.part, first.parts, first.asked, first.drawn_from, second.path, second.part, second.parts, second.asked);
}

void require_complete(const std::vector<MergedPart>& parts) {
  std::map<std::string, std::set<int64_t>> present;
  for (const MergedPart& part : parts) present[part.drawn_from].insert(part.part);
  for (const MergedPart& part : parts)
    for (int64_t number = 1; number <= part.parts; ++number)
      SHARD_REQUIRE(
          present[part.drawn_from].contains(number), "verify",
          "--merge: part {} of {} of {} from {} is missing, so not all of these cases have a verdict; add its report, or "
          "run `verify --shard {}/{}` with the options of {}",
          number, part.parts, part.asked, part.drawn_from, number, part.parts, part.path);
}

}  // namespace

void add_line(const nlohmann::json& line, MergedReports& merged) {
  const std::string type = line.at("type");
  if (type == "summary") add_summary(line, merged);
  if (type == "case") add_case(line, merged);
  if (type == "failure") add_failure(line, merged);
  if (type == "alike") add_alike(line, merged);
}

MergedReports merge_reports(const std::vector<std::string>& paths, const std::function<void(const nlohmann::json&)>& also) {
  MergedReports merged;
  for (const std::string& path : paths) add_report(path, also, merged);
  for (auto first = merged.parts.begin(); first != merged.parts.end(); ++first)
    for (auto second = first + 1; second != merged.parts.end(); ++second) require_disjoint(*first, *second);
  require_complete(merged.parts);
  return merged;
}

std::string describe(const MergedReports& merged, bool everything) {
  using shardproof::escaped;
  std::string text;
  if (everything) {
    text = "covered (cases):\n";
    for (const auto& [feature, cases] : merged.features) text += fmt::format("  {} {}\n", escaped(feature), cases);
    text += describe(merged.combinations.figures({}));
  } else {
    text = fmt::format("compared: {} values\nwhat the cases had: --verbose lists it, --report FILE shows it in a browser\n",
                       merged.values_compared);
  }
  if (merged.oracle_differences > 0)
    text += fmt::format("golden run against PyTorch in Python: {} differences\n", merged.oracle_differences);
  for (const MergedFailure& failure : merged.minimal) {
    text += fmt::format("\nFAILURE: {}\n", shardproof::escaped_lines(failure.text("what")));
    for (const char* part : {"where", "first", "replicas", "guess"})
      if (!failure.text(part).empty()) text += fmt::format("  {:<8} {}\n", part, escaped(failure.text(part)));
    text += fmt::format("  minimal  {}\n  replay   {}\n", escaped(failure.text("case")), escaped(failure.text("replay")));
    if (failure.alike > 0) text += fmt::format("  alike    {}\n", alike_in_words(failure.alike));
  }
  return text + fmt::format("\n{}{}: {} of {} cases held, in {} report{}\n", merged.interrupted ? "INTERRUPTED, so far " : "",
                            merged.held() ? "ALL HELD" : "FAILED", merged.cases - merged.failures, merged.cases, merged.reports,
                            merged.reports == 1 ? "" : "s");
}

std::string junit(const MergedReports& merged) {
  const bool other = merged.oracle_differences > 0;
  std::string text = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"shardproof verify\" tests=\"{}\" failures=\"{}\" "
      "errors=\"{}\" time=\"{:.1f}\">\n",
      1 + merged.minimal.size(), merged.minimal.size() + other, merged.interrupted ? 1 : 0, merged.seconds);
  text +=
      fmt::format("  <testcase classname=\"verify\" name=\"{} random cases\" time=\"{:.1f}\">", merged.cases, merged.seconds);
  if (other) text += fmt::format("<failure message=\"{} differences to PyTorch in Python\"/>", merged.oracle_differences);
  if (merged.interrupted) text += "<error message=\"interrupted: the other cases did not run\"/>";
  text += "</testcase>\n";
  for (const MergedFailure& failure : merged.minimal) {
    std::string more;
    for (const char* part : {"where", "first", "replicas", "guess", "replay"})
      if (!failure.text(part).empty())
        more += fmt::format("{}{}: {}", more.empty() ? "" : "&#10;", part, xml_text(failure.text(part)));
    if (failure.alike > 0) more += fmt::format("&#10;alike: {}", alike_in_words(failure.alike));
    text +=
        fmt::format("  <testcase classname=\"verify\" name=\"{}\">\n    <failure message=\"{}\">{}</failure>\n  </testcase>\n",
                    xml_text(failure.text("case")), xml_text(failure.text("what")), more);
  }
  return text + "</testsuite>\n";
}

}  // namespace harness
