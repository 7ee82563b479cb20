// Jobs of the host run beside the thread that started them, and beside each other.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <fstream>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "shardproof/base/host_work.h"

using shardproof::HostJob;
using shardproof::start_host_job;

namespace {

// So many jobs, each of which ends only when all have begun.
std::vector<std::unique_ptr<HostJob>> run_together(int jobs) {
  std::barrier all(jobs + 1);
  std::vector<std::unique_ptr<HostJob>> started;
  for (int i = 0; i < jobs; ++i) started.push_back(start_host_job([&] { all.arrive_and_wait(); }));
  all.arrive_and_wait();
  for (const auto& job : started) job->wait();
  return started;
}

// Says so when it is destroyed.
struct Captured {
  std::atomic<bool>* gone;
  explicit Captured(std::atomic<bool>* told) : gone(told) {}
  ~Captured() { *gone = true; }
};

}  // namespace

// Whatever threads earlier jobs left behind.
RC_GTEST_PROP(HostWork, no_job_waits_for_another_to_end, ()) {
  for (const int jobs : *rc::gen::container<std::vector<int>>(3, rc::gen::inRange(1, 6)))
    for (const auto& job : run_together(jobs)) RC_ASSERT(job->is_over());
}

TEST(HostWork, what_a_job_captured_is_gone_when_the_job_is_over) {
  std::atomic<bool> gone = false;
  const auto job = start_host_job([captured = std::make_shared<Captured>(&gone)] { EXPECT_FALSE(*captured->gone); });
  while (!job->is_over()) std::this_thread::yield();
  EXPECT_TRUE(gone);
}

TEST(HostWork, what_a_job_throws_its_wait_throws_once) {
  const auto job = start_host_job([] { throw std::runtime_error("of the job"); });
  EXPECT_THROW(job->wait(), std::runtime_error);
  EXPECT_NO_THROW(job->wait());
  EXPECT_TRUE(job->is_over());
}

// Too few for the stack of a thread, and enough for small things.
void allow_few_more_addresses() {
  std::ifstream status("/proc/self/status");
  rlim_t kib = 0;
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmSize:")) kib = std::stoull(line.substr(7));
  const rlim_t bytes = (kib + 1024) * 1024;
  const rlimit limit{bytes, bytes};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
}

TEST(HostWork, where_no_thread_can_be_started_the_caller_does_the_job) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process that has kept no thread
  EXPECT_EXIT(
      {
        allow_few_more_addresses();
        std::thread::id worker;
        const auto job = start_host_job([&] { worker = std::this_thread::get_id(); });
        job->wait();
        const auto throws = start_host_job([] { throw std::runtime_error("of the job"); });
        try {
          throws->wait();
        } catch (const std::runtime_error&) {
          std::exit(worker == std::this_thread::get_id() ? 0 : 2);
        }
        std::exit(1);
      },
      testing::ExitedWithCode(0), "");
}

TEST(HostWork, a_job_that_is_dropped_is_waited_for) {
  bool over = false;
  start_host_job([&] { over = true; }).reset();
  EXPECT_TRUE(over);
}

TEST(HostWork, jobs_one_after_another_share_few_threads) {
  constexpr int kJobs = 100;
  std::set<pid_t> threads;
  for (int i = 0; i < kJobs; ++i) start_host_job([&] { threads.insert(::gettid()); })->wait();
  EXPECT_LT(threads.size(), kJobs / 4);
}

// Of a process that was forked the threads are gone.
TEST(HostWork, a_forked_process_has_jobs_of_its_own) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "under ThreadSanitizer a process that was forked beside other threads must not start threads";
#endif
  run_together(4);
  // Their threads become idle meanwhile. If one does not, the test passes all the same, and only notices less.
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::alarm(60);  // instead of waiting forever for threads of the parent
    bool over = false;
    start_host_job([&] { over = true; })->wait();
    ::_exit(over ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}
