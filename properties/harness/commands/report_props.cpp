// The page of `verify --report`: what it says, and that it is safe and whole. ci/tests/report_browser_test.py opens it. And
// what `verify` prints at its end.
#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "harness/commands/coverage.h"
#include "harness/commands/merge.h"
#include "harness/commands/program.h"
#include "harness/commands/report.h"
#include "harness/commands/verify.h"
#include "harness/compare/tolerance.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/shown.h"

using namespace harness;
using nlohmann::json;
using shardproof::expect_error;

namespace {

const std::atomic<bool> kGoOn{false};

// The lines of the cases of one run, or of a shard of it.
std::vector<json> lines_of(const harness_env::Folder& folder, int64_t cases, int64_t shard = 0, int64_t shards = 1) {
  std::vector<json> lines;
  VerifyOptions options;
  options.cases = cases;
  options.python = false;
  options.failures_directory = folder / "failures";
  options.shard = shard, options.shard_count = shards;
  options.also = [&](const json& line) { lines.push_back(line); };
  verify(options, kGoOn);
  return lines;
}

Report report_of(const std::vector<json>& lines) {
  Report report;
  for (const json& line : lines) report.add(line);
  return report;
}

json case_line(const std::string& text, bool held = true) {
  return {{"type", "case"}, {"case", text}, {"held", held}, {"seconds", 0.5}, {"cases", 1}};
}

json failure_line(const std::string& what) {
  return {{"type", "failure"}, {"case", "mlp() mesh() ddp"}, {"what", what}, {"where", what}, {"guess", what}, {"cases", 3}};
}

size_t occurrences(const std::string& text, const std::string& part) {
  size_t found = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

// What the script of a page reads.
json data_in(const std::string& page) {
  const std::string start = "id=\"data\">";
  const size_t begin = page.find(start) + start.size();
  return json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

// Without what depends on the time, and on the order in which cases end, as the choice of cases does from which it is seen that
// a pair is valid.
json settled(json data) {
  for (const char* key : {"seconds", "reports", "combinations"}) data.erase(key);
  for (json& row : data["case_rows"]) row[2] = 0;
  std::sort(data["case_rows"].begin(), data["case_rows"].end());
  for (auto& [kind, errors] : data["smallest_found"].items()) std::sort(errors.begin(), errors.end());
  return data;
}

}  // namespace

TEST(Report, says_what_the_lines_of_a_run_say) {
  const harness_env::Folder folder;
  const std::vector<json> lines = lines_of(folder, 40);
  const json data = data_in(report_of(lines).page());
  EXPECT_EQ(data["cases"], 40);
  EXPECT_EQ(data["held"], true);
  EXPECT_EQ(data["case_rows"].size(), 40u);
  EXPECT_EQ(data["values_compared"], lines.back()["values_compared"]);
  int64_t fast = 0, pairs = 0;
  for (const json& line : lines) fast += line.contains("ratio");
  EXPECT_GT(fast, 0);
  EXPECT_EQ(data["bitwise"], 40 - fast);
  for (const auto& [precision, bins] : data["errors"].items())
    for (const json& bin : bins) fast -= bin.get<int64_t>();
  EXPECT_EQ(fast, 0) << "errors count each case of fast mode once";
  EXPECT_GT(data["combinations"]["pairs_drawn"], 0);
  EXPECT_LE(data["combinations"]["pairs_drawn"], data["combinations"]["pairs_valid"]);
  const size_t facets = data["facets"].size();
  for (const json& pair : data["pairs"]) pairs += pair[2].get<int64_t>();
  EXPECT_EQ(pairs, static_cast<int64_t>(40 * facets * (facets - 1) / 2)) << "each case has one pair of each two facets";
}

TEST(Report, of_merged_shards_is_that_of_the_whole_run) {
  const harness_env::Folder folder;
  std::vector<json> parts;
  for (int64_t shard = 0; shard < 3; ++shard)
    for (const json& line : lines_of(folder, 30, shard, 3)) parts.push_back(line);
  const json merged = report_of(parts).data();
  EXPECT_EQ(merged["reports"], 3);
  EXPECT_EQ(settled(merged), settled(report_of(lines_of(folder, 30)).data()));
}

TEST(Report, text_from_outside_is_never_read_as_html) {
  const std::string evil = "</script><script>alert(\"1\")</script><!-- \xe2\x80\xa8 \x01 '\" & \xff";
  Report report = report_of({case_line(evil, false), failure_line(evil)});
  const std::string page = report.page();
  EXPECT_EQ(occurrences(page, "</script>"), 2u) << "the data and the program";
  EXPECT_EQ(occurrences(page, "<!--"), 0u);
  EXPECT_EQ(occurrences(page, "alert("), 0u + occurrences(page, "\\u003cscript\\u003ealert("));
  const json data = data_in(page);
  EXPECT_EQ(data["failure_rows"][0]["what"], shardproof::escaped(evil)) << "a text that is no UTF-8 is escaped";
  const std::string quotes = "a \"name\" with 'quotes', <b>, &amp; and </script>";
  EXPECT_EQ(data_in(report_of({failure_line(quotes)}).page())["failure_rows"][0]["what"], quotes);
}

TEST(Report, is_one_file_that_loads_nothing_and_makes_no_html_of_text) {
  const std::string& page = report_template();
  EXPECT_EQ(occurrences(page, "{{data}}"), 1u);
  for (const char* mark : {"/*css*/", "src=", "@import", "url(", "https:", "innerHTML", "outerHTML", "insertAdjacent",
                           "document.write", "eval(", "fetch(", "XMLHttp"})
    EXPECT_EQ(occurrences(page, mark), 0u) << mark;
  EXPECT_EQ(occurrences(page, "http:"), occurrences(page, "http://www.w3.org/2000/svg")) << "the name of SVG is no address";
  EXPECT_EQ(occurrences(page, "default-src 'none'"), 1u);
}

TEST(Report, bins_of_errors_end_at_the_tolerance) {
  EXPECT_EQ(Report::bin_of(0), 0);
  EXPECT_EQ(Report::bin_of(1e-9), 0);
  EXPECT_EQ(Report::bin_of(kToleranceFactor), Report::kBins - 2);
  for (const double beyond : {kToleranceFactor * 1.0001, 1e30, HUGE_VAL, std::nan("")})
    EXPECT_EQ(Report::bin_of(beyond), Report::kBins - 1) << beyond;
  for (double ratio = 1e-3; ratio < 20; ratio *= 1.01) EXPECT_LE(Report::bin_of(ratio), Report::bin_of(ratio * 1.01));
  EXPECT_EQ(Report::bin_of(kToleranceFactor / 2) + 2, Report::bin_of(kToleranceFactor)) << "two bins an octave";
}

TEST(Report, lists_so_many_cases_and_all_that_failed_and_counts_the_rest) {
  Report report;
  for (int64_t i = 0; i < Report::kCasesMax + 5; ++i) report.add(case_line("held"));
  report.add(case_line("failed late", false));
  const json data = report.data();
  EXPECT_EQ(std::ssize(data["case_rows"]), Report::kCasesMax + 1);
  EXPECT_EQ(data["case_rows"].back()[0], "failed late");
  EXPECT_EQ(data["cases_left_out"], 5);
  EXPECT_EQ(data["bitwise"], Report::kCasesMax + 6);
}

TEST(Report, has_the_line_that_replays_each_failure_and_what_those_of_cases_are_made_of) {
  json failure = failure_line("a loss"), of_engine = case_line("mlp() : step");
  failure["replay"] = "own/program replay --engine torch-ddp 'mlp() mesh() ddp'";
  of_engine["engine"] = "torch-ddp";
  const json data = data_in(report_of({case_line("mlp() : step*2"), of_engine, failure}).page());
  EXPECT_EQ(data["failure_rows"][0]["replay"], failure["replay"]);
  EXPECT_EQ(data["program"], program_name());
  EXPECT_EQ(data["case_rows"][0][4], "");
  EXPECT_EQ(data["case_rows"][1][4], "torch-ddp");
  const json older = report_of({failure_line("a loss")}).data();
  EXPECT_EQ(older["failure_rows"][0]["replay"], program_name() + " replay 'mlp() mesh() ddp'") << "of a build without the line";
}

TEST(Report, shows_planted_bugs_and_refuses_another_file) {
  const harness_env::Folder folder;
  const json row = {{"type", "fault"},   {"id", "GRD-05"},      {"title", "A sum"}, {"from", "here"},
                    {"check", "verify"}, {"verdict", "killed"}, {"by", "a loss"},   {"case", ""},
                    {"guess", ""},       {"cases", 17},         {"seconds", 2.5}};
  std::ofstream(folder / "faults.json") << row << "\n";
  Report report;
  report.add_faults(folder / "faults.json");
  EXPECT_EQ(report.data()["fault_rows"][0]["id"], "GRD-05");
  EXPECT_EQ(report.data()["fault_rows"][0]["cases"], 17);
  std::ofstream(folder / "other") << row << "\nno JSON\n";
  expect_error([&] { report.add_faults(folder / "other"); }, {"line 2", "ci/faults --json"});
  std::ofstream(folder / "cases") << json{{"type", "case"}, {"case", "mlp() : step"}, {"seconds", 1}} << "\n";
  expect_error([&] { report.add_faults(folder / "cases"); }, {"line 1", "no line of ci/faults --json"});
  expect_error([&] { report.add_faults(folder / "missing"); }, {"cannot read", "missing"});
}

TEST(Verify, an_interrupted_report_is_an_error_of_junit) {
  MergedReports merged;
  merged.cases = 3;
  EXPECT_EQ(junit(merged).find("<error"), std::string::npos);
  merged.interrupted = true;
  EXPECT_NE(junit(merged).find("errors=\"1\""), std::string::npos) << junit(merged);
  EXPECT_NE(junit(merged).find("<error message=\"interrupted"), std::string::npos) << junit(merged);
}

TEST(Verify, the_overview_counts_strategies_models_and_ranks_that_were_drawn) {
  Coverage coverage;
  EXPECT_EQ(coverage.overview(), "");
  Verdict verdict = held_verdict();
  verdict.values_compared = 7;
  coverage.add(Case::parse("mlp(widths=3-2) mesh(dp_shard=2) zero3 sgd(lr=0.1) ordered seed=3 : step"), verdict,
               /*passes=*/true);
  EXPECT_EQ(coverage.overview(), "drawn: 1 strategy, 1 kind of model, 2 ranks\ncompared: 7 values\n");
  coverage.add(Case::parse("mlp(widths=3-2) mesh(dp_shard=3) row_b_t_sr sgd(lr=0.1) ordered seed=3 : step"), verdict,
               /*passes=*/true);
  coverage.add(Case::parse("odd() mesh(dp_shard=2) ddp sgd(lr=0.1) ordered seed=3 : step"), verdict, /*passes=*/true);
  EXPECT_EQ(coverage.overview(),
            "drawn: 2 strategies and 1 without a name (row_*), 2 kinds of models, 2 to 3 ranks\ncompared: 21 values\n");
}

TEST(Verify, texts_of_merged_reports_are_shown_and_never_obeyed) {
  MergedReports merged;
  const std::string evil = "a\x1b[2Jb";
  merged.features[evil] = 1;
  MergedFailure failure;
  failure.line = {{"case", evil}, {"where", evil}, {"guess", evil}, {"replay", evil}, {"what", evil + "\nsecond line"}};
  merged.minimal.push_back(failure);
  const std::string said = describe(merged, /*everything=*/true);
  EXPECT_TRUE(can_be_shown(said, /*lines=*/true)) << said;
  EXPECT_NE(said.find("\nsecond line"), std::string::npos) << said;
  EXPECT_TRUE(can_be_shown(junit(merged), /*lines=*/true)) << junit(merged);
}
