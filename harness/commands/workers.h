// Processes in which cases run, so that one that crashes takes no other case with it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace harness {

struct Answer {
  std::string text = {};   // of `serve`
  std::string error = {};  // what it threw; else ""
  std::string crash = {};  // "SIGSEGV", "exit code 3": how the worker ended instead of answering; else ""
  double seconds = 0;
};

class Workers {
 public:
  // Answers a request. In a worker it is called by the main thread, with one thread of LibTorch.
  using Serve = std::function<std::string(const std::string& request)>;

  // Forks so many, which may be none: then ask() serves by itself, one request at a time, and a crash ends this process. They
  // have what this process has now, and ignore SIGINT. REQUIRES that no other thread of this process holds a lock.
  Workers(int64_t count, Serve serve);
  // Waits for the end of all of them. No request may be under way.
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  // Has a free worker serve the request, and waits for both. A worker that crashes is replaced. Any number of threads may ask.
  // Throws Error where it cannot be replaced.
  Answer ask(const std::string& request);

  // How many requests are served at a time.
  int64_t size() const { return std::max<int64_t>(1, std::ssize(desks_)); }

 private:
  class Desk;

  Serve serve_;
  std::vector<std::unique_ptr<Desk>> desks_;
  std::mutex mutex_;  // what follows
  std::condition_variable came_free_;
  std::vector<Desk*> free_;
};

}  // namespace harness
