// Whatever befalls one process of an MPI job ends all others, with an error that says what happened where, and leaves nothing
// behind. Faults are drawn anew in each run; SHARDPROOF_MPI_FAULTS asks for more of them than one of each kind.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <regex>
#include <sstream>
#include <thread>

#include "harness/commands/flight.h"

namespace {

struct Fault {
  std::string kind, op;
  int64_t ranks = 2, victim = 0, step = 0, elements = 1;
  double timeout_s = 4;  // a busy machine must not look like a dead one
};

struct Ending {
  std::string kind, text;
  double seconds = 0;
};

struct Outcome {
  std::map<int64_t, Ending> ranks;
  std::string output, flight;
};

std::string scratch() {
  std::string folder = (std::filesystem::temp_directory_path() / "shardproof_mpi_XXXXXX").string();
  return mkdtemp(folder.data());
}

// Processes of the job are known by the folder in their command line.
bool any_process_names(const std::string& folder) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    std::ifstream file(entry.path() / "cmdline");
    std::stringstream line;
    line << file.rdbuf();
    if (line.str().find(folder) != std::string::npos && line.str().find("mpi_driver") != std::string::npos) return true;
  }
  return false;
}

Outcome run(const Fault& f) {
  Outcome outcome{.flight = scratch()};
  const std::string command = fmt::format(
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1 mpirun -n {} --oversubscribe --bind-to none "
      "'{}' {} {} "
      "{} {} {} {} '{}' 2>&1",
      f.ranks, MPI_DRIVER, f.kind, f.op, f.victim, f.step, f.elements, f.timeout_s, outcome.flight);
  std::FILE* pipe = popen(command.c_str(), "r");
  char buffer[4096];
  while (std::fgets(buffer, sizeof buffer, pipe)) outcome.output += buffer;
  pclose(pipe);
  const std::regex ended("ENDED rank (\\d+) (\\w+)(?: after ([0-9.]+) s: (.*))?");
  std::istringstream lines(outcome.output);
  for (std::string line; std::getline(lines, line);)
    if (std::smatch m; std::regex_search(line, m, ended))
      outcome.ranks[std::stol(m[1])] = {m[2], m[4], m[3].matched ? std::stod(m[3]) : 0};
  return outcome;
}

// The same faults in every run of a kind; SHARDPROOF_MPI_SEED draws others.
std::mt19937_64& random_source() {
  const char* asked = std::getenv("SHARDPROOF_MPI_SEED");
  static std::mt19937_64 source(asked ? std::strtoull(asked, nullptr, 10) : 1);
  return source;
}

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random_source());
}

Fault draw_fault(const std::string& kind) {
  static const std::vector<std::string> ops = {"all_gather", "reduce_scatter", "all_reduce",
                                               "all_to_all", "broadcast",      "barrier"};
  const bool needs_data = kind == "size" || kind == "dtype";
  Fault fault{.kind = kind, .op = ops[static_cast<size_t>(draw(0, needs_data ? 4 : 5))], .ranks = draw(2, 4)};
  fault.victim = draw(0, fault.ranks - 1);
  fault.step = draw(0, 8);
  fault.elements = std::vector<int64_t>{1, 500, 3000, 200'000}[static_cast<size_t>(draw(0, 3))];
  return fault;
}

struct Expected {
  std::string kind;
  std::vector<std::string> says;
  bool victim_speaks = true;
};

Expected expected(const Fault& f) {
  const std::string victim = fmt::format("rank {}", f.victim);
  const std::string disagree = fmt::format("ranks disagree on call {} of 'dp', for unit 'h.3'", f.step);
  if (f.kind == "kill" || f.kind == "kill_midway" || f.kind == "exit")
    return {"lost", {victim + " died", f.op, "call", "unit 'h.3'"}, false};
  if (f.kind == "stop") return {"lost", {victim + " has given no sign of life", f.op, "unit 'h.3'"}, false};
  if (f.kind == "slow") return {"lost", {victim + " is late", f.op, "unit 'h.3'"}, false};
  if (f.kind == "throw" || f.kind == "throw_midway" || f.kind == "throw_ahead" || f.kind == "throw_to_self")
    return {"error", {victim + " of", "the disk is full", "last call", "call"}};
  if (f.kind == "nan") return {"non_finite", {victim + " of", "the loss is nan", "last call"}};
  if (f.kind == "check") return {"failed_check", {victim + " of", "replicas differ", "last call"}};
  if (f.kind == "group") return {"lost", {"ranks wait for each other", f.op, "'tp'", "'dp'", "unit 'h.3'"}};
  if (f.kind == "root") return {"error", {disagree, "root 0", fmt::format("root {}", f.ranks - 1)}};
  if (f.kind == "factor") return {"error", {disagree, "(sum, ", "(sum then times 0.5, "}};
  if (f.kind == "reduce") return {"error", {disagree, "(sum, ", "(max, "}};
  return {"error", {disagree, "rank 0 calls"}};
}

void expect_clean_ending(const Fault& f) {
  SCOPED_TRACE(
      fmt::format("{} in {} of {} elements, rank {} of {}, step {}", f.kind, f.op, f.elements, f.victim, f.ranks, f.step));
  const Outcome outcome = run(f);
  const Expected e = expected(f);
  double slowest_s = 0;
  for (int64_t rank = 0; rank < f.ranks; ++rank) {
    if (rank == f.victim && !e.victim_speaks) continue;
    const auto found = outcome.ranks.find(rank);
    ASSERT_NE(found, outcome.ranks.end()) << "rank " << rank << " did not say how it ended\n" << outcome.output;
    EXPECT_EQ(found->second.kind, e.kind) << found->second.text;
    for (const std::string& part : e.says)
      EXPECT_NE(found->second.text.find(part), std::string::npos) << "'" << part << "' in: " << found->second.text;
    slowest_s = std::max(slowest_s, found->second.seconds);
  }
  // The launcher takes those that cannot end themselves, a moment after it ends.
  for (int look = 0; look < 500 && any_process_names(outcome.flight); ++look)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(any_process_names(outcome.flight)) << "a process stayed";
  const auto flights = harness::read_flights(outcome.flight);
  EXPECT_GE(flights.size(), static_cast<size_t>(f.ranks - 1)) << "records";
  const std::string parts = harness::first_disagreement(flights);
  const bool is_mismatch = f.kind == "order" || f.kind == "dtype" || (f.kind == "size" && f.op != "all_to_all");
  if (is_mismatch) EXPECT_NE(parts.find(fmt::format("call {} of 'dp'", f.step)), std::string::npos) << parts;
  fmt::print("{} {} {} ranks: ended {:.2f} s after the last call, timeout {} s\n", f.kind, f.op, f.ranks, slowest_s,
             f.timeout_s);
  std::filesystem::remove_all(outcome.flight);
}

int64_t repeats() {
  const char* asked = std::getenv("SHARDPROOF_MPI_FAULTS");
  return asked ? std::atol(asked) : 1;
}

// The two tensors are within the message that announces them, come after it, or are read.
void expect_misfit_named(const Fault& f) {
  const Outcome outcome = run(f);
  ASSERT_EQ(outcome.ranks.size(), 2u) << outcome.output;
  const std::vector<std::string> both = f.kind == "size"
                                            ? std::vector{fmt::format("x {}", f.elements), fmt::format("x {}", f.elements + 1)}
                                            : std::vector<std::string>{"float32", "int32"};
  for (const auto& [rank, ending] : outcome.ranks) {
    EXPECT_EQ(ending.kind, "error") << outcome.output;
    for (const std::string& part :
         {std::string("ranks disagree: "), std::string("send"), std::string("recv"), both[0], both[1]})
      EXPECT_NE(ending.text.find(part), std::string::npos) << "'" << part << "' in: " << ending.text;
  }
  std::filesystem::remove_all(outcome.flight);
}

class MpiFaults : public testing::TestWithParam<std::string> {};

}  // namespace

TEST_P(MpiFaults, ends_every_other_rank_with_an_error_that_says_what_happened_where) {
  random_source().discard(GetParam().size() * 7 + static_cast<unsigned char>(GetParam().back()));
  for (int64_t i = 0; i < repeats() && !HasFatalFailure(); ++i) expect_clean_ending(draw_fault(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Of, MpiFaults,
                         testing::Values("kill", "kill_midway", "exit", "stop", "slow", "throw", "nan", "check", "order",
                                         "size", "dtype", "group"),
                         [](const auto& kind) { return kind.param; });

TEST(MpiFaults, the_records_of_an_all_to_all_disagree_in_its_dtype) {
  expect_clean_ending({.kind = "dtype", .op = "all_to_all", .ranks = 3, .victim = 1, .step = 4, .elements = 500});
}

TEST(MpiFaults, broadcasts_from_two_roots_and_reductions_of_two_kinds_disagree) {
  expect_clean_ending({.kind = "root", .op = "broadcast", .ranks = 3, .victim = 1, .step = 4, .elements = 500});
  expect_clean_ending({.kind = "reduce", .op = "all_reduce", .ranks = 3, .victim = 1, .step = 4, .elements = 500});
}

TEST(MpiFaults, sums_that_are_finished_in_two_ways_disagree) {
  expect_clean_ending({.kind = "factor", .op = "all_reduce", .ranks = 3, .victim = 1, .step = 4, .elements = 500});
}

TEST(MpiFaults, without_a_fault_every_rank_ends_well) {
  for (const char* op : {"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "barrier"}) {
    const Outcome outcome = run({.kind = "none", .op = op, .ranks = 3, .step = 5, .elements = 5000});
    EXPECT_EQ(outcome.ranks.size(), 3u) << outcome.output;
    for (const auto& [rank, ending] : outcome.ranks) EXPECT_EQ(ending.kind, "well") << outcome.output;
  }
}

TEST(MpiFaults, ranks_that_agree_end_a_call_in_which_another_one_fails) {
  for (const char* kind : {"throw", "dtype", "size"})
    for (const char* op : {"all_gather", "reduce_scatter", "all_reduce"})
      expect_clean_ending({.kind = kind, .op = op, .ranks = 4, .victim = 2, .step = 2, .elements = 200'000});
  // Where each rank tells the others whether its slice of the sum is finite.
  expect_clean_ending({.kind = "size", .op = "finite_all_reduce", .ranks = 4, .victim = 2, .step = 2, .elements = 200'000});
}

TEST(MpiFaults, a_send_that_does_not_fit_its_receive_names_both) {
  for (const int64_t elements : {3, 200'000})
    for (const int64_t victim : {0, 1})
      expect_misfit_named({.kind = (elements == 3) == (victim == 0) ? "size" : "dtype",
                           .op = "send",
                           .victim = victim,
                           .step = 1,
                           .elements = elements});
}

TEST(MpiFaults, a_rank_that_fails_while_its_call_is_under_way_ends_the_others) {
  for (const char* op : {"send", "all_gather", "reduce_scatter"})
    for (const int64_t victim : {0, 1})
      expect_clean_ending(
          {.kind = "throw_midway", .op = op, .ranks = 2, .victim = victim, .step = 2, .elements = 200'000});
}

TEST(MpiFaults, a_receive_of_a_rank_that_has_failed_takes_nothing_that_is_sent_later) {
  expect_clean_ending({.kind = "throw_ahead", .op = "send", .ranks = 2, .victim = 0, .step = 2, .elements = 200'000});
}

TEST(MpiFaults, a_rank_that_fails_instead_of_sending_or_receiving_ends_the_other) {
  for (const int64_t victim : {0, 1})
    expect_clean_ending({.kind = "throw", .op = "send", .ranks = 2, .victim = victim, .step = 2, .elements = 500});
}

// Nobody else can tell the sender that nothing will take what it sent.
TEST(MpiFaults, a_rank_that_fails_with_a_send_to_itself_under_way_ends_the_others) {
  for (const int64_t elements : {3, 200'000})
    expect_clean_ending(
        {.kind = "throw_to_self", .op = "all_reduce", .ranks = 3, .victim = 1, .step = 2, .elements = elements});
}
