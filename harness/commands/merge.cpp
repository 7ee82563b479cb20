#include "harness/commands/merge.h"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>

#include "harness/commands/program.h"
#include "harness/plan/xml.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

void add_summary(const nlohmann::json& line, MergedReports& merged) {
  ++merged.reports;
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

void add_failure(const nlohmann::json& line, MergedReports& merged) {
  const std::string minimal = line.at("case");
  const std::string engine = line.value("engine", "");
  const auto known = [&](const MergedFailure& failure) { return failure.minimal == minimal && failure.engine == engine; };
  if (std::any_of(merged.minimal.begin(), merged.minimal.end(), known)) return;
  merged.minimal.push_back({.minimal = minimal,
                            .what = line.at("what"),
                            .where = line.value("where", ""),
                            .first = line.value("first", ""),
                            .guess = line.value("guess", ""),
                            .original = line.value("original", ""),
                            .engine = engine,
                            .replay = line.value("replay", fmt::format("{} replay '{}'", program_name(), minimal)),
                            .cases = line.value("cases", int64_t{0}),
                            .picture = line.value("picture", nlohmann::json())});
}

void add_report(const std::string& path, const std::function<void(const nlohmann::json&)>& also, MergedReports& merged) {
  std::ifstream file(path);
  SHARD_REQUIRE(file.good(), "verify", "--merge: cannot read {}", path);
  const int64_t before = merged.reports;
  int64_t number = 0;
  for (std::string text; std::getline(file, text);) {
    ++number;
    try {
      const nlohmann::json line = nlohmann::json::parse(text);
      add_line(line, merged);
      if (also) also(line);
    } catch (const nlohmann::json::exception& error) {
      throw shardproof::Error(
          fmt::format("[verify] --merge: {}, line {}: no line of verify --json: {}", path, number, error.what()));
    }
  }
  SHARD_REQUIRE(merged.reports > before, "verify",
                "--merge: {} has no summary, so its run did not end; leave it out or run it again", path);
}

}  // namespace

void add_line(const nlohmann::json& line, MergedReports& merged) {
  const std::string type = line.at("type");
  if (type == "summary") add_summary(line, merged);
  if (type == "case") add_case(line, merged);
  if (type == "failure") add_failure(line, merged);
}

MergedReports merge_reports(const std::vector<std::string>& paths, const std::function<void(const nlohmann::json&)>& also) {
  MergedReports merged;
  for (const std::string& path : paths) add_report(path, also, merged);
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
    text += fmt::format("\nFAILURE: {}\n", shardproof::escaped_lines(failure.what));
    if (!failure.where.empty()) text += fmt::format("  where    {}\n", escaped(failure.where));
    if (!failure.first.empty()) text += fmt::format("  first    {}\n", escaped(failure.first));
    if (!failure.guess.empty()) text += fmt::format("  guess    {}\n", escaped(failure.guess));
    text += fmt::format("  minimal  {}\n  replay   {}\n", escaped(failure.minimal), escaped(failure.replay));
  }
  return text + fmt::format("\n{}{}: {} of {} cases held, in {} report{}\n", merged.interrupted ? "INTERRUPTED, so far " : "",
                            merged.held() ? "ALL HELD" : "FAILED", merged.cases - merged.failures, merged.cases, merged.reports,
                            merged.reports == 1 ? "" : "s");
}

std::string junit(const MergedReports& merged) {
  const bool other = merged.oracle_differences > 0;
  std::string text = fmt::format(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuite name=\"shardproof verify\" tests=\"{}\" failures=\"{}\" "
      "time=\"{:.1f}\">\n",
      1 + merged.minimal.size(), merged.minimal.size() + other, merged.seconds);
  text +=
      fmt::format("  <testcase classname=\"verify\" name=\"{} random cases\" time=\"{:.1f}\">", merged.cases, merged.seconds);
  if (other) text += fmt::format("<failure message=\"{} differences to PyTorch in Python\"/>", merged.oracle_differences);
  text += "</testcase>\n";
  for (const MergedFailure& failure : merged.minimal)
    text += fmt::format(
        "  <testcase classname=\"verify\" name=\"{}\">\n    <failure message=\"{}\">where: {}&#10;first: {}&#10;guess: {}&#10;"
        "replay: {}</failure>\n  </testcase>\n",
        xml_text(failure.minimal), xml_text(failure.what), xml_text(failure.where), xml_text(failure.first),
        xml_text(failure.guess),
        xml_text(failure.replay));
  return text + "</testsuite>\n";
}

}  // namespace harness
