#include "comm/process/process_watch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "shardproof/base/check.h"
#include "internal/comm/watch_sockets.h"

namespace shardproof {
namespace {

using namespace std::chrono_literals;

// So long after being told to end a process still looks for the reason.
constexpr auto kTermination = 400ms;
constexpr auto kLook = 25ms;

std::atomic<bool> told_to_end{false};
void on_sigterm(int) {
  told_to_end = true;
}
struct sigaction sigterm_before{};  // one watch in a process

double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

std::string one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', '\x1f');
  return text;
}
std::string as_lines(std::string text) {
  std::replace(text.begin(), text.end(), '\x1f', '\n');
  return text;
}

std::chrono::milliseconds beat_of(double timeout_s) {
  return std::chrono::milliseconds(std::clamp<int64_t>(static_cast<int64_t>(timeout_s * 1000 / 10), 25, 500));
}

}  // namespace

ProcessWatch::ProcessWatch(WatchOptions options) : options_(std::move(options)), beat_(beat_of(options_.timeout_s)) {}

ProcessWatch::~ProcessWatch() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  close_all();
}

void ProcessWatch::close_all() {
  if (!peers_.empty()) ::sigaction(SIGTERM, &sigterm_before, nullptr);
  for (auto& [rank, peer] : peers_)
    if (peer.socket >= 0) ::close(std::exchange(peer.socket, -1));
  if (listener_ >= 0) ::close(std::exchange(listener_, -1));
}

std::string ProcessWatch::listen() {
  auto [socket, addresses] = watch_listen(options_.world, options_.one_host);
  listener_ = socket;
  return addresses;
}

void ProcessWatch::connect(const std::string& addresses) {
  const auto deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(options_.timeout_s));
  if (options_.rank == 0) {
    for (auto& [rank, socket] : watch_accept(listener_, options_.world - 1, deadline)) peers_[rank].socket = socket;
  } else {
    peers_[0].socket = watch_connect(addresses, options_.rank, deadline);
  }
  looked_ = next_beat_ = Clock::now();
  for (auto& [rank, peer] : peers_) {
    peer.heard = looked_;
    ::fcntl(peer.socket, F_SETFL, O_NONBLOCK);
  }
  struct sigaction action{};
  action.sa_handler = on_sigterm;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGTERM, &action, &sigterm_before);
  thread_ = std::thread([this] { run(); });
}

std::string ProcessWatch::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

void ProcessWatch::end(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (asked_.empty()) asked_ = why;
}

// The others' connections stay open until they have left as well, so that nobody mistakes an early leaver for a dead one.
void ProcessWatch::leave() {
  leaving_ = true;
  if (thread_.joinable()) thread_.join();
  close_all();
}

void ProcessWatch::run() {
  std::optional<Clock::time_point> termination;
  bool said_bye = false;
  while (!stop_) {
    look_around();
    std::string asked;
    {
      const std::lock_guard lock(mutex_);
      asked = asked_;
    }
    if (!asked.empty()) tell_all_end(asked);
    if (told_to_end && !termination) termination = Clock::now() + kTermination;
    if (termination && Clock::now() > *termination)
      tell_all_end(fmt::format("rank {} was told to end by SIGTERM", options_.rank));
    if (Clock::now() >= next_beat_) say_beat();
    // After a pause of its own this process cannot judge the others' silence.
    if (Clock::now() - looked_ > 4 * beat_ + 1s)
      for (auto& [rank, peer] : peers_) peer.heard = Clock::now();
    looked_ = Clock::now();
    if (options_.rank == 0)
      check_silence(), check_waits();
    else
      check_hub();
    if (leaving_ && !std::exchange(said_bye, true))
      for (auto& [rank, peer] : peers_) say(peer, "bye\n");
    const bool all_left = std::all_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer.second.left; });
    if (said_bye && (options_.rank != 0 || all_left || told_)) return;
  }
}

void ProcessWatch::look_around() {
  std::vector<pollfd> fds;
  std::vector<int64_t> ranks;
  for (const auto& [rank, peer] : peers_)
    if (peer.socket >= 0) {
      fds.push_back({.fd = peer.socket, .events = POLLIN, .revents = 0});
      ranks.push_back(rank);
    }
  ::poll(fds.data(), fds.size(), static_cast<int>(kLook.count()));
  for (size_t i = 0; i < fds.size(); ++i)
    if (fds[i].revents != 0) read_from(ranks[i]);
}

void ProcessWatch::read_from(int64_t rank) {
  Peer& peer = peers_[rank];
  char buffer[4096];
  ssize_t got = 0;
  while ((got = ::read(peer.socket, buffer, sizeof buffer)) > 0) peer.unread.append(buffer, static_cast<size_t>(got));
  const bool closed = got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR);
  for (size_t end; (end = peer.unread.find('\n')) != std::string::npos;) {
    take_line(rank, peer.unread.substr(0, end));
    peer.unread.erase(0, end + 1);
  }
  if (!closed) return;
  ::close(std::exchange(peer.socket, -1));
  if (!std::exchange(peer.left, true) && !told_)
    tell_all_end(fmt::format("rank {} died: its connection closed without a goodbye (killed, crashed, or left by exit); {}",
                             rank, name_of(rank)));
}

void ProcessWatch::take_line(int64_t rank, const std::string& line) {
  Peer& peer = peers_[rank];
  peer.heard = Clock::now();
  if (line == "bye") {
    peer.left = true;
  } else if (line.starts_with("end ")) {
    tell_all_end(as_lines(line.substr(4)));
  } else if (line.starts_with("wait ") || line.starts_with("last ") || line.starts_with("save ")) {
    WatchStatus status{.waiting = line[0] == 'w', .saving = line[0] == 's'};
    std::istringstream words(line.substr(5));
    size_t missing = 0;
    words >> status.waited_s >> missing;
    status.missing.resize(std::min<size_t>(missing, static_cast<size_t>(options_.world)));
    for (int64_t& other : status.missing) words >> other;
    std::getline(words >> std::ws, status.text);
    peer.status = status;
  }
}

void ProcessWatch::say(Peer& peer, const std::string& line) {
  // A full buffer is a peer that does not read: its silence will be noticed.
  if (peer.socket >= 0 && ::send(peer.socket, line.data(), line.size(), MSG_NOSIGNAL) < 0) return;
}

void ProcessWatch::say_beat() {
  next_beat_ = Clock::now() + beat_;
  const WatchStatus status = options_.status();
  const std::string line =
      fmt::format("{} {:.3f} {} {} {}\n",
                  status.waiting  ? "wait"
                  : status.saving ? "save"
                                  : "last",
                  status.waited_s, status.missing.size(), fmt::join(status.missing, " "), one_line(status.text));
  for (auto& [rank, peer] : peers_) say(peer, line);
}

void ProcessWatch::tell_all_end(const std::string& why) {
  if (std::exchange(told_, true)) return;
  for (auto& [rank, peer] : peers_) say(peer, fmt::format("end {}\n", one_line(why)));
  {
    const std::lock_guard lock(mutex_);
    ended_ = why;
  }
  options_.on_end(why);
}

void ProcessWatch::check_hub() {
  const Peer& hub = peers_[0];
  if (told_ || hub.left) return;
  const double silent_s = seconds(Clock::now() - hub.heard);
  if (silent_s > options_.timeout_s)
    tell_all_end(fmt::format("rank 0 has given no sign of life for {:.1f} s: it is stopped, or its host cannot be reached; {}",
                             silent_s, name_of(0)));
}

void ProcessWatch::check_silence() {
  for (const auto& [rank, peer] : peers_) {
    const double silent_s = seconds(Clock::now() - peer.heard);
    if (!told_ && !peer.left && silent_s > options_.timeout_s)
      tell_all_end(
          fmt::format("rank {} has given no sign of life for {:.1f} s: it is stopped, or its host cannot be reached; {}", rank,
                      silent_s, name_of(rank)));
  }
}

// Rank 0 follows who waits for whom from the first that waits too long.
void ProcessWatch::check_waits() {
  if (told_) return;
  const WatchStatus own = options_.status();
  if (own.waiting && own.waited_s > options_.timeout_s) end_waits_for(0);
  for (const auto& [rank, peer] : peers_) {
    const double since_s = seconds(Clock::now() - peer.heard);
    if (peer.status.waiting && !peer.left && !is_silent(rank) && peer.status.waited_s + since_s > options_.timeout_s)
      end_waits_for(rank);
  }
}

void ProcessWatch::end_waits_for(int64_t waiting_rank) {
  if (const std::string culprit = culprit_of(waiting_rank); !culprit.empty()) tell_all_end(culprit);
}

std::string ProcessWatch::name_of(int64_t rank) const {
  const WatchStatus status = rank == options_.rank ? options_.status() : peers_.at(rank).status;
  if (status.text.empty()) return "it has made no call";
  if (!status.waiting) return fmt::format("the last call it told of was {}", status.text);
  return fmt::format("it waits in {} for {} {}", status.text, status.missing.size() == 1 ? "rank" : "ranks",
                     fmt::join(status.missing, ","));
}

bool ProcessWatch::is_silent(int64_t rank) const {
  return rank != options_.rank && Clock::now() - peers_.at(rank).heard > 4 * beat_;
}

std::string ProcessWatch::culprit_of(int64_t waiting_rank) const {
  const auto status_of = [&](int64_t rank) { return rank == options_.rank ? options_.status() : peers_.at(rank).status; };
  std::string chain;
  std::set<int64_t> seen;
  int64_t rank = waiting_rank;
  while (seen.insert(rank).second) {
    // What it said last is no longer so.
    if (is_silent(rank))
      return fmt::format("rank {} has given no sign of life for {:.1f} s: it is stopped, or its host cannot be reached; {}{}",
                         rank, seconds(Clock::now() - peers_.at(rank).heard), name_of(rank), chain);
    const WatchStatus status = status_of(rank);
    if (status.saving) return "";
    const auto known = [&](int64_t other) { return other == options_.rank || peers_.count(other) > 0; };
    if (!status.waiting || status.missing.empty() || !known(status.missing.front()))
      return fmt::format("rank {} is late: others have waited {:.1f} s for it; {}{}", rank, options_.timeout_s, name_of(rank),
                         chain);
    chain += fmt::format("\n  rank {}: {}", rank, name_of(rank));
    // One that does not wait itself keeps the others waiting.
    const auto idle = std::find_if(status.missing.begin(), status.missing.end(), [&](int64_t other) {
      return known(other) && (is_silent(other) || !status_of(other).waiting);
    });
    rank = idle != status.missing.end() ? *idle : status.missing.front();
  }
  return fmt::format(
      "ranks wait for each other, for {:.1f} s now:{}\nAll ranks of a group must make the same calls in the same order",
      options_.timeout_s, chain);
}

}  // namespace shardproof
