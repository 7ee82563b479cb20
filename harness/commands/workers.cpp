#include "harness/commands/workers.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>

#include "harness/run/message.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

enum class State { answered, threw, crashed };

// In memory that all processes of a desk see.
struct Shared {
  std::atomic<uint64_t> asked{0}, begun{0}, answered{0};  // requests
  std::atomic<State> state{State::answered};                        // of the last answer
  std::atomic<int> wait_status{0};                                  // crashed: of wait(2)
};

std::string end_in_words(int wait_status) {
  if (!WIFSIGNALED(wait_status)) return fmt::format("exit code {}", WEXITSTATUS(wait_status));
  const char* const name = ::sigabbrev_np(WTERMSIG(wait_status));
  return name ? fmt::format("SIG{}", name) : fmt::format("signal {}", WTERMSIG(wait_status));
}

}  // namespace

// Where a request is put and its answer is fetched. Each has three processes: this one asks, a clerk forks the worker and forks
// another one when that has crashed, and the worker serves. The clerk is forked before this process has threads and has none
// itself, because a process that is forked beside threads inherits locks that nobody gives back.
//
// Texts are in a file of memory, and what is sent only wakes whoever waits to look at Shared. So whichever process is killed,
// no half of a message is left.
class Workers::Desk {
 public:
  explicit Desk(const Serve& serve) : serve_(serve), text_(::memfd_create("shardproof", MFD_CLOEXEC)) {
    void* const memory = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const bool made = text_ >= 0 && memory != MAP_FAILED &&
                      ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends_.data()) == 0;
    SHARD_REQUIRE(made, "verify", "cannot start a worker: {}; ask for fewer with --jobs", ::strerror(errno));
    shared_ = new (memory) Shared;
  }
  ~Desk() {
    dismiss();
    if (clerk_ > 0) wait_for(clerk_);
    close_end(1);
    ::close(text_);
    ::munmap(shared_, sizeof(Shared));
  }

  // Its worker ends when it has served.
  void dismiss() { close_end(0); }

  // `all`: the desks that there are, this one too, whose ends of this process the new processes must not keep open.
  void start(const std::vector<std::unique_ptr<Desk>>& all) {
    const pid_t parent = ::getpid();
    std::fflush(nullptr);  // else both would write what is left in buffers
    clerk_ = ::fork();
    SHARD_REQUIRE(clerk_ >= 0, "verify", "cannot start a worker: {}; ask for fewer with --jobs", ::strerror(errno));
    if (clerk_ > 0) return close_end(1);
    for (const auto& desk : all) desk->close_end(0);
    end_with_parent(parent);
    ::signal(SIGINT, SIG_IGN);  // the process that asks decides what is left out
    run_clerk();
  }

  Answer ask(const std::string& request) {
    write(request);
    const uint64_t number = ++shared_->asked;
    wake(0);
    while (shared_->answered != number)
      SHARD_REQUIRE(sleep(0), "verify", "a worker was killed, and with it the process that replaces workers; run this again");
    switch (shared_->state) {
      case State::answered:
        return {.text = read()};
      case State::threw:
        return {.error = read()};
      default:
        return {.crash = end_in_words(shared_->wait_status)};
    }
  }

 private:
  [[noreturn]] void run_clerk() {
    for (;;) {
      const pid_t own = ::getpid(), worker = ::fork();
      if (worker < 0) ::_exit(1);
      if (worker == 0) {
        end_with_parent(own);
        run_worker();
      }
      const int status = wait_for(worker);
      char none;
      if (shared_->begun != shared_->answered) {
        ::recv(ends_[1], &none, 1, MSG_DONTWAIT);  // what woke it, if that is still there
        shared_->wait_status = status;
        answer(State::crashed);
        continue;
      }
      if (::recv(ends_[1], &none, 1, MSG_PEEK | MSG_DONTWAIT) == 0) ::_exit(0);
      wake(1);  // it may have answered, and not have told so any more
    }
  }

  [[noreturn]] void run_worker() {
    at::set_num_threads(1);
    while (sleep(1, MSG_PEEK)) {
      shared_->begun = shared_->asked.load();  // before the request is taken, so that whoever ends this process, it is not lost
      sleep(1);
      State state = State::answered;
      try {
        write(serve_(read()));
      } catch (const std::exception& error) {
        write(message_of(error));
        state = State::threw;
      }
      answer(state);
    }
    std::exit(0);  // as every process, for what is written when one ends, such as which lines have run
  }

  void answer(State state) {
    shared_->state = state;
    shared_->answered = shared_->asked.load();
    wake(1);
  }

  void wake(size_t end) const { ::send(ends_[end], "", 1, MSG_NOSIGNAL); }
  // Until somebody wakes it. False where nobody can any more.
  bool sleep(size_t end, int flags = 0) const {
    for (;;) {
      char none;
      const ssize_t count = ::recv(ends_[end], &none, 1, flags);
      if (count >= 0 || errno != EINTR) return count > 0;
    }
  }

  void write(const std::string& text) const {
    bool written = ::ftruncate(text_, 0) == 0;
    for (size_t done = 0; written && done < text.size();) {
      const ssize_t count = ::pwrite(text_, text.data() + done, text.size() - done, static_cast<off_t>(done));
      written = count > 0;
      done += written ? static_cast<size_t>(count) : 0;
    }
    SHARD_REQUIRE(written, "verify", "a worker's answer finds no room in memory: {}", ::strerror(errno));
  }
  std::string read() const {
    struct stat facts {};
    ::fstat(text_, &facts);
    std::string text(static_cast<size_t>(facts.st_size), '\0');
    const ssize_t count = ::pread(text_, text.data(), text.size(), 0);
    SHARD_CHECK(count == facts.st_size, "verify", "a text of {} bytes between processes has {}", text.size(), count);
    return text;
  }

  static int wait_for(pid_t process) {
    int status = 0;
    while (::waitpid(process, &status, 0) < 0 && errno == EINTR) continue;
    return status;
  }
  // Whoever kills the program has killed its workers.
  static void end_with_parent(pid_t parent) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
  }
  void close_end(size_t end) {
    if (ends_[end] >= 0) ::close(ends_[end]);
    ends_[end] = -1;
  }

  const Serve& serve_;
  int text_;
  std::array<int, 2> ends_{-1, -1};  // of this process, and of the others
  Shared* shared_ = nullptr;
  pid_t clerk_ = 0;
};

Workers::Workers(int64_t count, Serve serve) : serve_(std::move(serve)) {
  for (int64_t number = 0; number < count; ++number) {
    desks_.push_back(std::make_unique<Desk>(serve_));
    desks_.back()->start(desks_);
    free_.push_back(desks_.back().get());
  }
}

// All at once, since the end of a process takes a while.
Workers::~Workers() {
  for (const auto& desk : desks_) desk->dismiss();
}

Answer Workers::ask(const std::string& request) {
  const auto timed = [](const auto& serve) {
    const auto start = std::chrono::steady_clock::now();
    Answer answer = serve();
    answer.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return answer;
  };
  std::unique_lock lock(mutex_);
  if (desks_.empty()) return timed([&] { return Answer{.text = serve_(request)}; });
  came_free_.wait(lock, [this] { return !free_.empty(); });
  Desk* const desk = free_.back();
  free_.pop_back();
  lock.unlock();
  const auto put_back = [&] {
    lock.lock();
    free_.push_back(desk);
    came_free_.notify_one();
  };
  Answer answer;
  try {
    answer = timed([&] { return desk->ask(request); });
  } catch (...) {
    put_back();  // else whoever waits for it waits forever
    throw;
  }
  put_back();
  return answer;
}

}  // namespace harness
