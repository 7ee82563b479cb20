#include "harness/commands/crash_report.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <string_view>

#include "harness/commands/json_lines.h"
#include "harness/run/running_cases.h"

// A signal handler may run in the middle of anything, an allocation too. So what it calls here neither allocates nor locks, and
// what it prints was put together before.
namespace harness {
namespace {

struct Fatal {
  int number;
  const char* name;
  struct sigaction before;
};
std::array<Fatal, 5> fatal = {{{SIGABRT, "SIGABRT", {}},
                               {SIGBUS, "SIGBUS", {}},
                               {SIGFPE, "SIGFPE", {}},
                               {SIGILL, "SIGILL", {}},
                               {SIGSEGV, "SIGSEGV", {}}}};

// Never destroyed: threads may crash while the process ends.
struct Texts {
  std::string replay, json_path, replay_in_json;
};
Texts* texts = nullptr;

std::atomic<int> crashed{0};  // the thread whose crash is told

// What is written to a file as few pieces, so that other threads write little in between.
class Output {
 public:
  explicit Output(int file) : file_(file) {}
  ~Output() { flush(); }
  Output& operator<<(std::string_view text) {
    for (const char letter : text) {
      if (size_ == buffer_.size()) flush();
      buffer_[size_++] = letter;
    }
    return *this;
  }
  // Between the quotes of JSON.
  Output& quoted(std::string_view text) {
    for (const char letter : text) {
      if (letter == '"' || letter == '\\') *this << "\\";
      *this << std::string_view(&letter, 1);
    }
    return *this;
  }

 private:
  void flush() {
    for (size_t done = 0; done < size_;) {
      const ssize_t written = ::write(file_, buffer_.data() + done, size_ - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) break;
      done += static_cast<size_t>(written);
    }
    size_ = 0;
  }

  int file_;
  std::array<char, 4096> buffer_;
  size_t size_ = 0;
};

struct Telling {
  Output& out;
  std::string_view own;  // the case of the crashed thread
  const char* signal;
  int told = 0;
};

void tell_replay(const char* text, void* with) {
  Telling& telling = *static_cast<Telling*>(with);
  const bool is_own = text == telling.own;
  if (!telling.own.empty() && telling.told++ == 1) telling.out << "other cases that ran then:\n";
  telling.out << "  replay   " << texts->replay << "'" << text << "'\n";
  if (is_own) telling.out << "  shrink   " << texts->replay << "--shrink '" << text << "'\n";
}

void tell_failure(const char* text, void* with) {
  Telling& telling = *static_cast<Telling*>(with);
  if (!telling.own.empty() && text != telling.own) return;
  telling.out << R"-({"type":"failure","what":"crash ()-" << telling.signal << R"-()","case":")-";
  telling.out.quoted(text) << R"-(","replay":")-" << texts->replay_in_json << "'";
  telling.out.quoted(text) << "'\"}\n";
}

// Whether a case was running.
bool tell(const Fatal& signal, int thread) {
  const char* const own = running_case_of(thread);
  bool any = *own != '\0';
  each_running_case(
      thread, [](const char*, void* with) { *static_cast<bool*>(with) = true; }, &any);
  if (!any) return false;
  {
    Output out(STDERR_FILENO);
    out << "\nCRASH (" << signal.name << ") ";
    out << (*own ? "while a thread worked on this case:\n" : "on a thread of no case. These cases ran:\n");
    Telling telling{out, own, signal.name};
    each_running_case(thread, tell_replay, &telling);
  }
  if (texts->json_path.empty()) return true;
  const int file = ::open(texts->json_path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
  if (file < 0) return true;
  Output out(file);
  Telling telling{out, own, signal.name};
  each_running_case(thread, tell_failure, &telling);
  return true;
}

void on_crash(int number, siginfo_t* info, void*) {
  const int thread = ::gettid();
  int nobody = 0;
  if (!crashed.compare_exchange_strong(nobody, thread)) {
    if (nobody == thread) ::_exit(1);  // this handler crashed itself
    for (;;) ::pause();                // the other thread ends the process
  }
  const Fatal* signal = fatal.data();
  while (signal->number != number) ++signal;
  const bool counts = tell(*signal, thread);
  const bool has_other = (signal->before.sa_flags & SA_SIGINFO) != 0 || signal->before.sa_handler != SIG_DFL;
  if (counts && !has_other) ::_exit(1);
  ::sigaction(number, &signal->before, nullptr);
  // An instruction that faults does so again when this returns. What was raised is raised again, and waits for that.
  if (info->si_code <= 0) ::raise(number);
}

}  // namespace

void report_crashes(const std::string& replay, const std::string& json) {
  std::string in_json = in_ascii(replay);
  in_json = in_json.substr(1, in_json.size() - 2);
  if (texts) {
    *texts = {replay, json, in_json};
    return;
  }
  texts = new Texts{replay, json, in_json};
  for (Fatal& signal : fatal) {
    struct sigaction action {};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    ::sigaction(signal.number, &action, &signal.before);
  }
}

}  // namespace harness
